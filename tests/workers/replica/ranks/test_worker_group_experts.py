"""Replicas whose ranks hold whole experts: the tokens of one rank, also after new weights, and beside slices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from crossdock.workers.model.checksums import checksum
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.engine.sleep import Sleep
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.submission import Submission
from tests.sweeps import SOAK, rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.weights.test_packed_checkpoints import write_experts, write_gpt_oss
from tests.workers.quantised import CASES
from tests.workers.ranks import Ranks
from tests.workers.ranks import saved as saved_in
from tests.workers.replica.engines import before_each_step, generated, greedy, run, tokens_of
from tests.workers.replica.ranks.test_worker_group import assert_worker_group_equals_one_rank
from tests.workers.replica.ranks.test_worker_group_weights import PROMPT, _push, tokens
from tests.workers.worker_groups import engine_of_ranks


@pytest.mark.parametrize("division", rest_in_soak([(2, 1), (4, 1), (2, 2)], (2, 2)))
def test_worker_group_with_whole_experts_equals_one_rank(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int]
) -> None:
    path = saved_in(build("qwen2_moe", SERVED["qwen2_moe"]), tmp_path)
    assert_worker_group_equals_one_rank(ranks, path, division, enable_expert_parallel=True)


@pytest.mark.parametrize("name", ["awq", pytest.param("mxfp4 of gpt-oss", marks=SOAK)])
@pytest.mark.parametrize("is_whole", [True, pytest.param(False, marks=SOAK)])
def test_worker_group_with_packed_experts_equals_one_rank(
    ranks: Ranks, tmp_path: Path, name: str, is_whole: bool
) -> None:
    path = tmp_path
    if name == "awq":
        write_experts(tmp_path, CASES[name])
        path = tmp_path / "packed"
    else:
        write_gpt_oss(tmp_path)
    assert_worker_group_equals_one_rank(ranks, path, (2, 1), enable_expert_parallel=is_whole)


def mixture(folder: Path, seed: int) -> Path:
    """Save a random mixture of experts, and return its folder."""
    module = build("qwen3_moe", SERVED["qwen3_moe"])
    torch.manual_seed(seed)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return saved_in(module, folder)


def test_whole_experts_are_replaced_by_those_of_files_of_a_trainer_and_of_the_start(
    ranks: Ranks, tmp_path: Path
) -> None:
    folders = [mixture(tmp_path / f"{seed}", seed) for seed in (1, 2, 3)]
    modules: list[Any] = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    wanted = [generated(module, [PROMPT], 8)[0] for module in modules]
    assert len({tuple(each) for each in wanted}) == 3
    with engine_of_ranks(ranks, folders[0], 2, 1, enable_expert_parallel=True) as engine:
        update = engine.executor.new_weights
        assert update is not None
        assert tokens(engine) == wanted[0]
        update.call("read", {"folder": str(folders[1])})
        update.put()
        assert tokens(engine) == wanted[1]
        sleep = Sleep(engine, folders[0], fingerprint(folders[0]))
        sleep.sleep(2)
        sleep.read([])
        sleep.wake([])
        assert tokens(engine) == wanted[0]
        tensors = list(load_file(folders[2] / "model.safetensors").items())
        _push(update, tensors, 2, {name: checksum(tensor) for name, tensor in tensors})
        update.put()
        assert tokens(engine) == wanted[2]
        update.call("check", {})


@pytest.mark.parametrize("per_early_row", [0.0, 5e-3])
def test_chunks_of_two_stages_beside_streams_pass_the_breakpoint_of_experts_and_give_transformers_tokens(
    ranks: Ranks, tmp_path: Path, per_early_row: float
) -> None:
    """Where the first rows of a step read the experts, chunks of fewer rows would read them again and again."""
    module = build("qwen3_moe", SERVED["qwen3_moe"])
    texts = [[3 + (number * 31 + place * 7) % 120 for place in range(6)] for number in range(4)]
    long = [3 + place * place % 121 for place in range(200)]
    cost = StepCost(base=6e-3, per_prefill_token=5e-4, per_decode=8e-4, breakpoint_rows=64, per_early_row=per_early_row)
    classes = [{"name": "standard", "ttft_s": 1e6, "tpot_s": 10.0}]
    rows = list[int]()

    def note(batch: Batch) -> None:
        if any(part.request.id == "long" and part.start < 150 for part in batch.scheduled):  # the last may be short
            rows.append(batch.num_tokens)

    settings = {"slo_classes": classes, "max_num_batched_tokens": 256, "chunk_policy": "adaptive"}
    with engine_of_ranks(ranks, saved_in(module, tmp_path), 1, 2, **settings) as engine:
        engine.scheduler.learn(cost, 1.2, 0.5)
        before_each_step(engine, note)
        for number, text in enumerate(texts):
            engine.add(Submission(f"{number}", text, greedy(28)))
        begun = [delta for _ in range(8) for delta in engine.step().deltas]
        engine.add(Submission("long", long, greedy(12)))
        deltas = run(engine)
    assert (min(rows) >= 64) is (per_early_row > 0), rows
    for delta in reversed(begun):
        deltas[delta.request_id].insert(0, delta)
    found = [tokens_of(deltas[name]) for name in ("0", "1", "2", "3", "long")]
    assert found == [*generated(module, texts, 28), *generated(module, [long], 12)]
