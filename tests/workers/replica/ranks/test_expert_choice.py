"""How ranks divide experts where the operator leaves it open: sizes of the model, both lines, one choice for all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.ranks import expert_choice
from crossdock.workers.replica.ranks.cpu_rates import measure_rates
from crossdock.workers.replica.ranks.expert_choice import division_of, sizes_of, with_experts_divided
from crossdock.workers.report.expert_division import ProductRates
from tests.workers.architectures import SERVED, build
from tests.workers.model.weights.test_packed_checkpoints import write_experts
from tests.workers.quantised import CASES
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.ranks.test_worker_group import assert_worker_group_equals_one_rank
from tests.workers.worker_groups import spec_of

CALLS = ProductRates(1e12, 1e12, call_s=1.0)  # each expert costs a second: whole ones are faster
ROWS = ProductRates(1e12, 1e3)  # products take all the time: an uneven router makes whole ones slower


def open_spec(path: Path, tensor_size: int = 2, num_stages: int = 1) -> ReplicaSpec:
    return replace(spec_of(path, tensor_size, num_stages), enable_expert_parallel=None)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("is_tied", [True, False])
def test_sizes_are_those_of_the_model_that_transformers_makes(tmp_path: Path, num_stages: int, is_tied: bool) -> None:
    module = build("qwen3_moe", SERVED["qwen3_moe"] | {"tie_word_embeddings": is_tied})
    spec = open_spec(saved(module, tmp_path), 2, num_stages)
    config = AutoConfig.from_pretrained(tmp_path)
    sizes = sizes_of(config, division_of(spec, config, "cpu", is_whole=True))
    experts = [each for each in module.modules() if type(each).__name__ == "Qwen3MoeExperts"]
    each = sum(parameter.numel() for parameter in experts[0].parameters()) // config.num_experts
    assert (sizes.layers, sizes.count, sizes.chosen) == (len(experts), config.num_experts, config.num_experts_per_tok)
    assert (sizes.inner, sizes.numbers, sizes.num_bytes) == (config.moe_intermediate_size, each, 4 * each)
    assert sizes.row_bytes == 4 * config.hidden_size
    vocabulary = config.hidden_size * config.vocab_size
    assert sizes.head_numbers == vocabulary // 2
    everything = sum(parameter.numel() for parameter in module.parameters())
    rest = everything - len(experts) * config.num_experts * each - vocabulary * (1 if is_tied else 2)
    assert rest / 2 <= sizes.rest_numbers < rest  # norms and routers are on both ranks
    assert sizes.rest_bytes == 4 * (sizes.rest_numbers + sizes.head_numbers)


@pytest.mark.parametrize(("rates", "is_whole"), [(CALLS, True), (ROWS, False)])
def test_faster_division_is_chosen_for_all_ranks_and_both_are_said(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: ProductRates, is_whole: bool
) -> None:
    monkeypatch.setattr(expert_choice, "measure_rates", lambda *_: rates)
    path = saved(build("qwen2_moe", SERVED["qwen2_moe"]), tmp_path)
    spec, lines = with_experts_divided(open_spec(path))
    assert spec == spec_of(path, 2, 1, enable_expert_parallel=is_whole)
    slices, whole = lines
    assert slices.startswith("slices: ")
    assert whole.startswith("whole: ")
    for line in lines:
        assert " MiB a rank; predicted " in line
        assert "ms for 1 stream, " in line
        assert "ms for 8, " in line  # max_num_seqs
        assert "ms for a chunk of 80 tokens" in line  # max_num_batched_tokens
    assert [line.endswith(": chosen") for line in lines] == [not is_whole, is_whole]
    assert_worker_group_equals_one_rank(ranks, path, (2, 1), enable_expert_parallel=spec.enable_expert_parallel)


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_the_operator_says_is_obeyed_without_a_prediction(tmp_path: Path, is_whole: bool) -> None:
    spec = spec_of(tmp_path / "nowhere", 2, 1, enable_expert_parallel=is_whole)
    assert with_experts_divided(spec) == (spec, [])


def test_there_is_no_choice_without_experts_or_without_ranks_that_divide_them(tmp_path: Path) -> None:
    dense = saved(build("llama", SERVED["llama"]), tmp_path / "dense")
    mixture = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path / "mixture")
    for path, division in ((dense, (2, 1)), (mixture, (1, 2)), (mixture, (8, 1))):
        spec, lines = with_experts_divided(open_spec(path, *division))
        assert spec.enable_expert_parallel is False
        assert not lines


def test_packed_experts_whose_groups_slices_would_divide_stay_whole(tmp_path: Path) -> None:
    write_experts(tmp_path, CASES["awq"], 96)
    spec, lines = with_experts_divided(open_spec(tmp_path / "packed"))
    assert spec.enable_expert_parallel
    slices, whole = lines
    assert slices.startswith("slices: not possible: ")
    assert "cannot be divided" in slices
    assert whole.endswith(" MiB a rank: chosen")


def test_gpu_without_a_data_sheet_keeps_slices_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_choice, "device_of", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Acme 9000")
    spec, lines = with_experts_divided(open_spec(saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)))
    assert spec.enable_expert_parallel is False
    assert "there is no data sheet of Acme 9000" in lines[0]
    assert len(lines) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_of_this_cpu_are_measured(dtype: Any) -> None:
    """No machine reads a byte in a nanosecond's thousandth, and none that runs tests needs a microsecond for one."""
    before = torch.get_num_threads()
    try:
        rates = measure_rates(dtype, 1)
    finally:
        torch.set_num_threads(before)
    assert 1e6 < rates.bandwidth < 1e12
    assert 1e6 < rates.flops < 1e14
    assert 0 < rates.call_s < 1
