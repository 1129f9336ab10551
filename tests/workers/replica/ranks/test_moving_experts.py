"""Replicas whose experts move between ranks while requests run: the tokens of one rank, also after new weights."""

from pathlib import Path

import pytest
import torch

from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.config import EplbConfig
from crossdock.workers.replica.engine.engine_loader import load_engine
from crossdock.workers.replica.engine.sleep import Sleep
from crossdock.workers.replica.serving.metrics import EngineMetrics
from tests.sweeps import SOAK
from tests.workers.architectures import SERVED, build
from tests.workers.model.weights.test_packed_checkpoints import write_experts
from tests.workers.quantised import CASES
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.ranks.test_worker_group import tokens, works
from tests.workers.worker_groups import engine_of_ranks, spec_of

OFTEN = EplbConfig(num_redundant_experts=4, window_size=4, step_interval=4)


def uneven(folder: Path, name: str, seed: int = 1) -> Path:
    """Save a mixture whose router prefers some experts, and return its folder."""
    if name == "awq":
        write_experts(folder, CASES[name])
        return folder / "packed"
    module = build(name, SERVED[name])
    torch.manual_seed(seed)
    for key, parameter in module.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        if key.endswith("gate.weight"):
            parameter.data *= torch.linspace(3, 0.2, len(parameter))[:, None]
    return saved(module, folder)


@pytest.mark.parametrize(
    ("name", "division"),
    [("qwen3_moe", (2, 1)), ("awq", (2, 1)), ("qwen3_moe", (2, 2)), pytest.param("qwen3_moe", (4, 1), marks=SOAK)],
)
def test_experts_that_move_and_have_copies_leave_tokens_as_those_of_one_rank(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    path = uneven(tmp_path, name)
    wanted = tokens(load_engine(spec_of(path, 1, 1)), works(num_tokens=24))
    with engine_of_ranks(ranks, path, *division, enable_expert_parallel=True, eplb=OFTEN) as engine:
        balance = engine.model.balance
        assert balance is not None
        assert tokens(engine, works(num_tokens=24)) == wanted
        assert balance.num_moved
        assert tokens(engine, works(num_tokens=8)) == [each[:8] for each in wanted], "from cached prompts"
        shown = EngineMetrics(engine).registry
        assert shown.get_sample_value("crossdock_experts_moved_total") == balance.num_moved
        assert balance.balancedness is not None
        assert shown.get_sample_value("crossdock_expert_balancedness") == balance.balancedness


def test_other_weights_begin_where_ranks_read_them_and_move_again(ranks: Ranks, tmp_path: Path) -> None:
    folders = [uneven(tmp_path / f"{seed}", "qwen3_moe", seed) for seed in (1, 2)]
    wanted = [tokens(load_engine(spec_of(folder, 1, 1)), works(num_tokens=16)) for folder in folders]
    assert wanted[0] != wanted[1]
    with engine_of_ranks(ranks, folders[0], 2, 1, enable_expert_parallel=True, eplb=OFTEN) as engine:
        balance, update = engine.model.balance, engine.executor.new_weights
        assert balance is not None
        assert update is not None
        assert tokens(engine, works(num_tokens=16)) == wanted[0]
        moved = balance.num_moved
        assert balance.moved_names
        update.call("read", {"folder": str(folders[1])})
        update.put()
        engine.pages.block_pool.clear_cache()
        assert not balance.moved_names
        update.call("check", {})
        assert tokens(engine, works(num_tokens=16)) == wanted[1]
        assert balance.num_moved > moved
        assert balance.moved_names
        update.call("check", {})
        sleep = Sleep(engine, folders[0], fingerprint(folders[0]))
        sleep.sleep(2)
        sleep.read([])
        sleep.wake([])
        engine.pages.block_pool.clear_cache()
        assert tokens(engine, works(num_tokens=16)) == wanted[0]


def test_step_before_which_an_expert_moves_teaches_no_seconds(ranks: Ranks, tmp_path: Path) -> None:
    path = uneven(tmp_path, "qwen3_moe")
    with engine_of_ranks(ranks, path, 2, 1, enable_expert_parallel=True, eplb=OFTEN) as engine:
        balance = engine.model.balance
        assert balance is not None
        for submission in works(num_tokens=20):
            engine.add(submission)
        seen = set()
        while engine.has_work:
            engine.begin_step()
            step = engine.pipeline.newest
            assert step is not None
            seen.add((balance.is_moving, step.is_usual))
            engine.finish_step()
        assert seen == {(True, False), (False, True)}
