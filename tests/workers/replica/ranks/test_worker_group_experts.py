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
from tests.sweeps import SOAK
from tests.workers.architectures import SERVED, build
from tests.workers.model.weights.test_packed_checkpoints import write_experts, write_gpt_oss
from tests.workers.quantised import CASES
from tests.workers.ranks import Ranks
from tests.workers.ranks import saved as saved_in
from tests.workers.replica.engines import generated
from tests.workers.replica.ranks.test_worker_group import assert_worker_group_equals_one_rank
from tests.workers.replica.ranks.test_worker_group_weights import PROMPT, _push, tokens
from tests.workers.worker_groups import engine_of_ranks


@pytest.mark.parametrize("division", [(2, 1), pytest.param((4, 1), marks=SOAK), (2, 2)])
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
