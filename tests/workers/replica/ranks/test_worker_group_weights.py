"""Weights that are replaced on several ranks: from files, and by a process group that a trainer opens."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from crossdock.workers.model.checksums import checksum, checksums_in
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.sleep import Sleep
from crossdock.workers.replica.engine.weight_update import WeightUpdate
from crossdock.workers.replica.ranks.rank_messages import WeightsCalled
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.ports import free_port
from tests.workers.model.test_new_weights import saved
from tests.workers.ranks import DIVISIONS, Ranks
from tests.workers.replica.engines import generated, greedy, run, tokens_of
from tests.workers.replica.moving_memory import MovingMemory, follow_moving
from tests.workers.worker_groups import engine_of_ranks

PROMPT = [3 + i * 7 % 100 for i in range(40)]


def tokens(engine: Engine) -> list[int]:
    engine.pages.block_pool.clear_cache()
    engine.add(Submission("r", PROMPT, greedy(8)))
    return tokens_of(run(engine)["r"])


class Trainer:
    """Rank 0 of a group: sends tensors while another thread asks the ranks to receive them."""

    def __init__(self, world_size: int) -> None:
        self.info = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1}
        self.info["world_size"] = world_size
        self._size = world_size

    def open(self) -> None:
        wait = timedelta(seconds=240)
        address, port = self.info["master_address"], self.info["master_port"]
        store: Any = dist.TCPStore(address, port, self._size, True, wait, wait_for_workers=False)  # type: ignore[attr-defined]
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = wait, [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group: Any = dist.ProcessGroupGloo(store, 0, self._size, options)

    def send(self, tensors: Sequence[tuple[str, Tensor]], buffer_bytes: int) -> None:
        """Send tensors one by one, or packed as vLLM's trainers do."""
        some: list[Tensor] = []
        for _, tensor in tensors:
            some.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
            if sum(map(len, some)) > buffer_bytes:
                self._group.broadcast(torch.cat(some), 0).wait()
                some = []
        if some:
            self._group.broadcast(torch.cat(some), 0).wait()

    @staticmethod
    def announce(tensors: Sequence[tuple[str, Tensor]]) -> dict[str, Any]:
        return {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }


@pytest.mark.parametrize("division", DIVISIONS[-1:])
def test_worker_group_computes_with_weights_of_files_and_of_a_trainer(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int]
) -> None:
    folders, wide = [saved(tmp_path / f"{seed}", seed) for seed in (1, 2, 3)], tmp_path / "wide"
    saved(wide, 2, intermediate_size=80)
    modules = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    wanted = [generated(module, [PROMPT], 8)[0] for module in modules]
    assert len({tuple(each) for each in wanted}) == 3
    with engine_of_ranks(ranks, folders[0], *division) as engine:
        update = engine.executor.new_weights
        assert update is not None
        assert tokens(engine) == wanted[0]
        update.call("read", {"folder": str(folders[1])})
        assert tokens(engine) == wanted[0]
        update.put()
        assert tokens(engine) == wanted[1]
        sleep = Sleep(engine, folders[0], fingerprint(folders[0]))
        sleep.sleep(2)  # all ranks: one that kept the weights of the update, or its pages, would compute other tokens
        sleep.read([])
        sleep.wake([])
        assert tokens(engine) == wanted[0]
        tensors = list(modules[2].named_parameters())
        _push(update, tensors, division[0] * division[1], {name: checksum(tensor) for name, tensor in tensors})
        update.put()
        assert tokens(engine) == wanted[2]
        update.call("check", {})
        assert update.checksums == checksums_in(folders[2]), "what all ranks have received"
        name, tensor = tensors[5]
        with pytest.raises(ValueError, match=f"other bytes were received than were sent of {name}$"):
            _push(update, tensors, division[0] * division[1], {name: checksum(tensor * 1.5)})
        assert not update.is_read
        with pytest.raises(ValueError, match="of another shape"):
            update.call("read", {"folder": str(wide)})
        assert not update.is_read
        assert tokens(engine) == wanted[2]


def _push(
    update: WeightUpdate, tensors: Sequence[tuple[str, Tensor]], num_ranks: int, checksums: dict[str, str]
) -> None:
    """Push tensors through a group, as TRL's client asks for it."""
    trainer, packed = Trainer(num_ranks + 1), 20_000
    opening = threading.Thread(target=trainer.open)
    opening.start()
    info = trainer.info | {"packed": True, "packed_buffer_size_bytes": packed}
    update.call("join", {"init_info": info, "first": 0})
    opening.join()
    update.call("start", {})
    sending = threading.Thread(target=trainer.send, args=(tensors, packed))
    sending.start()
    update.call("receive", {"update_info": trainer.announce(tensors) | {"checksums": checksums}})
    sending.join()
    update.call("read", {"folder": ""})


def test_ranks_that_have_read_unlike_tensors_refuse_the_update() -> None:
    other = WeightsCalled("", {"a.weight": "1", "b.weight": "3"})
    own: Any = SimpleNamespace(call=lambda *_: {"a.weight": "1", "b.weight": "2"})
    worker_group: Any = SimpleNamespace(call_weights=lambda *_: lambda: [other])
    with pytest.raises(ValueError, match=r"ranks of a replica have unlike tensors: b\.weight$"):
        WeightUpdate(own, worker_group).call("read", {"folder": ""})


def test_update_without_a_group_or_with_a_wrong_place_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    with engine_of_ranks(ranks, saved(tmp_path / "model", 1), 2, 1) as engine:
        update = engine.executor.new_weights
        assert update is not None
        with pytest.raises(ValueError, match="call /init_weight_transfer_engine first"):
            update.call("receive", {"update_info": {}})
        with pytest.raises(ValueError, match="init_info needs master_address"):
            update.call("join", {"init_info": {}, "first": 0})
        small = Trainer(2).info
        with pytest.raises(ValueError, match="world_size is 2"):
            update.call("join", {"init_info": small, "first": 1})


def test_ranks_of_gpus_sleep_and_record_their_steps_again(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answers = saved(tmp_path, 1), list[Any]()
    device = MovingMemory(monkeypatch)
    with engine_of_ranks(ranks, path, 2, 1, follow_moving, answers, attention_backend="torch") as engine:
        expected, sleep = tokens(engine), Sleep(engine, path, fingerprint(path))
        for level in (1, 2):
            sleep.sleep(level)
            sleep.read([])
            sleep.wake([])
            assert tokens(engine) == expected
    assert answers == [(device.num_recorded, device.num_replayed)]
    assert device.num_recorded % 3 == 0, "at the start, and after each sleep"
