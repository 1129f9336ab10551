"""Whole experts on each rank give the logits of one rank, from plain and packed files. A rank reads its own alone."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from crossdock.workers.model.cut import whole_experts
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.cut.whole_experts import compute_own_experts
from crossdock.workers.model.load import load_model
from crossdock.workers.model.loaders import file_slice
from crossdock.workers.model.memory.memory_fit import check_fits
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights import weights
from crossdock.workers.model.weights.formats import Fp8Weights, PlainWeights
from crossdock.workers.model.weights.packed_layers import PackedExperts, packed_bytes
from crossdock.workers.model.weights.weights import check_division, model_on_meta, part_bytes
from tests.sweeps import SOAK, rest_in_soak
from tests.workers.architectures import DIVISIBLE, SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts
from tests.workers.model.weights.test_packed_checkpoints import write_experts, write_gpt_oss
from tests.workers.quantised import CASES
from tests.workers.ranks import UNHURRIED_S, Ranks, saved

FLOAT = torch.float32
PROMPTS = random_prompts(5, 23, 40)
WITHOUT = {
    "longcat_flash": "LongcatFlashExperts",
    "llama4_text": "Llama4TextExperts",
    "jetmoe": "has no experts that ranks divide",
}
UNDIVIDED = ["beam"]  # test_parts.py has the reason
_MIXTURES = (
    "mixtral qwen2_moe qwen3_moe olmoe granitemoe glm4_moe deepseek_v2 deepseek_v3 axk1 glm4_moe_lite gpt_oss dots1 "
    "lfm2_moe qwen3_next qwen3_5_moe_text kimi_linear bailing_hybrid granitemoehybrid nemotron_h aria_text cohere2_moe "
    "flex_olmo granitemoeshared hunyuan_v1_moe phimoe afmoe ernie4_5_moe exaone_moe flint hy_v3 laguna mellum "
    "minimax_m2 minimax_m3_vl_text solar_open"
)


def mixture(name: str) -> Any:
    """Return a random mixture of experts. No bias is zero: else one that a rank adds for others would not be seen."""
    experts = {"num_experts": 4, "num_local_experts": 4, "moe_topk": 2} if name == "hunyuan_v1_moe" else {}
    module = build(name, SERVED[name] | DIVISIBLE.get(name, {}) | experts)
    for key, parameter in module.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return module


def part_logits(rank: int, path: Path, tensor_size: int, num_stages: int = 1) -> tuple[list[Tensor], set[range]]:
    """On one rank: return every token's logits, none where the rank has none, and the experts that the rank holds."""
    position = RankPosition(rank, tensor_size, num_stages, has_whole_experts=True)
    model = load_model(ModelSpec(str(path), "float32"), links=Collectives(position, UNHURRIED_S))
    torch.manual_seed(0)  # the same pages everywhere
    logits = in_random_steps(model, PROMPTS, seed=7)
    return logits if position.is_driver else [], set(model.part.experts.values())


def assert_ranks_equal(ranks: Ranks, path: Path, expected: list[Tensor], division: tuple[int, int], count: int) -> None:
    """In fp32, whose sums differ by their order. The ranks of a stage have all `count` experts, each of them once."""
    tensor_size, num_stages = division
    answers = ranks.run(tensor_size * num_stages, part_logits, path, tensor_size, num_stages)
    assert_near(answers[RankPosition(0, *division).driver][0], expected)
    held = [own for _, own in answers]
    assert all(len(own) == 1 for own in held)
    for stage in range(num_stages):
        of_stage = [own.pop() for own in held[stage * tensor_size :][:tensor_size]]
        assert [number for own in of_stage for number in own] == list(range(count))


@pytest.mark.parametrize("division", [(2, 1), pytest.param((4, 1), marks=SOAK), pytest.param((2, 2), marks=SOAK)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_ranks_with_whole_experts_equal_one_rank(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    module = mixture(name)
    expected = in_random_steps(load_model(ModelSpec(str(saved(module, tmp_path)), "float32")), PROMPTS, seed=7)
    assert_ranks_equal(ranks, tmp_path, expected, division, 4)


# Tensors of each expert; of all experts; with biases, transposed; without a gate; beside other layers and experts.
USUAL = ["mixtral", "granitemoe", "gpt_oss", "nemotron_h", "deepseek_v3"]


@pytest.mark.parametrize("name", rest_in_soak(_MIXTURES.split(), *USUAL))
@torch.inference_mode()
def test_experts_that_ranks_read_are_all_of_the_model_and_add_up(name: str, tmp_path: Path) -> None:
    """In one process: a rank alone reads its experts, and gives its part of the outputs."""
    module = mixture(name)
    whole: Any = {key: each for key, each in module.named_modules() if hasattr(each, "_is_expert_parallel")}
    count = next(iter(whole.values())).num_experts
    hidden, shares = torch.randn(11, 48), torch.rand(11, 2)
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(11)])
    totals = dict.fromkeys(whole, torch.zeros(11, 48))
    for rank in range(2):
        found, part = read(saved(module, tmp_path), RankPosition(rank, 2, 1, True), all_reduce=lambda x: x)
        assert {key.rpartition(".")[0] for key in part.experts} == whole.keys()
        for key, own in part.experts.items():
            assert own == range(count * rank // 2, count * (rank + 1) // 2)
            assert torch.equal(found.get_parameter(key), module.get_parameter(key)[own.start : own.stop]), key
        totals = {key: total + found.get_submodule(key)(hidden, chosen, shares) for key, total in totals.items()}
    for key, total in totals.items():
        torch.testing.assert_close(total, whole[key](hidden, chosen, shares), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tensor_size", rest_in_soak([2, 4], 4))
def test_number_of_experts_that_ranks_do_not_divide_is_held_unevenly(
    ranks: Ranks, tmp_path: Path, tensor_size: int
) -> None:
    module = build("qwen3_moe", SERVED["qwen3_moe"] | {"num_experts": 7, "num_local_experts": 7})
    expected = [monolithic(module, prompt) for prompt in PROMPTS]
    assert_ranks_equal(ranks, saved(module, tmp_path), expected, (tensor_size, 1), 7)


@pytest.mark.parametrize(
    ("name", "implementation", "may_count"),
    [
        ("mixtral", "grouped_mm", True),
        ("mixtral", "grouped_mm", False),
        ("mixtral", "batched_mm", False),
        ("gpt_oss", "grouped_mm", False),
        ("gpt_oss", "eager", True),
    ],
)
def test_outputs_of_own_experts_add_up_to_those_of_all(
    name: str, implementation: str, may_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both where the host counts the rows of a rank, and where it must not, as on GPUs. One rank has no row at all."""
    monkeypatch.setattr(whole_experts, "_may_count_rows", lambda *_: may_count)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 48, generator=generator)
    chosen = torch.randint(0, 3, (9, 1), generator=generator)
    chosen = torch.cat([chosen, (chosen + 1) % 3], 1)  # none goes to the last expert
    shares = torch.rand(9, 2, generator=generator)

    def experts() -> Any:
        model = build(name, SERVED[name])
        model.set_experts_implementation(implementation)
        return next(each for each in model.modules() if hasattr(each, "is_transposed"))

    whole = experts()
    expected = whole(hidden, chosen, shares)
    total = torch.zeros_like(expected)
    for first, end in ((0, 1), (1, 3), (3, 4)):
        own = experts()
        for key, parameter in list(own.named_parameters()):
            setattr(own, key, torch.nn.Parameter(parameter[first:end], requires_grad=False))
        compute_own_experts(own, first, end)
        total += own(hidden, chosen, shares)
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


def read(path: Path, position: RankPosition, **links_: Any) -> Any:
    """Read a checkpoint as a rank does. To read needs no other rank."""
    links: Any = SimpleNamespace(position=position, **links_)
    return PlainWeights().read(AutoConfig.from_pretrained(path), path, FLOAT, links)


def packed(name: str, tmp_path: Path, width: int = 64) -> tuple[Path, Any]:
    """Write a checkpoint with packed experts. Returns its folder, and transformers' model of the same weights."""
    if name == "mxfp4 of gpt-oss":
        return tmp_path, write_gpt_oss(tmp_path)
    return tmp_path / "packed", write_experts(tmp_path, CASES[name], width).eval()


@pytest.mark.parametrize(
    ("name", "num_ranks"), [pytest.param("fp8 blocks", 2, marks=SOAK), ("awq", 2), ("mxfp4 of gpt-oss", 4)]
)
def test_packed_experts_that_slices_cannot_divide_equal_one_rank(
    ranks: Ranks, tmp_path: Path, name: str, num_ranks: int
) -> None:
    path, module = packed(name, tmp_path, width=96)
    with pytest.raises(CannotCut, match="proj cannot be divided"):
        read(path, RankPosition(0, num_ranks))
    assert_ranks_equal(ranks, path, [monolithic(module, prompt) for prompt in PROMPTS], (num_ranks, 1), 4)


@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "mxfp4 of gpt-oss"])
def test_packed_experts_of_a_rank_are_those_of_the_file_and_counted(name: str, tmp_path: Path) -> None:
    path, module = packed(name, tmp_path)
    config = AutoConfig.from_pretrained(path)
    sizes = (2, 4) if name == "mxfp4 of gpt-oss" else (2,)  # the others have 2 heads
    for position in (RankPosition(size - 1, size, 1, True) for size in sizes):
        found, part = read(path, position)
        held = {each: experts for each, experts in found.named_modules() if isinstance(experts, PackedExperts)}
        assert held
        counted = model_on_meta(config, position, FLOAT)
        for each, experts in held.items():
            own = part.experts[each]
            assert len(own) == 4 // position.tensor_size
            expected = module.get_parameter(each)[own.start : own.stop]
            torch.testing.assert_close(torch.stack([experts[number] for number in range(len(own))]), expected)
            assert packed_bytes(counted.get_submodule(each)) == packed_bytes(experts)


def test_experts_rounded_at_load_equal_those_of_one_rank(tmp_path: Path) -> None:
    path = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)
    config = AutoConfig.from_pretrained(path)
    whole, _ = Fp8Weights().read(config, path, FLOAT, None)
    links: Any = SimpleNamespace(position=RankPosition(1, 2, 1, True))
    found, part = Fp8Weights().read(AutoConfig.from_pretrained(path), path, FLOAT, links)
    held = {name: each for name, each in found.named_modules() if isinstance(each, PackedExperts)}
    assert len(held) == 8
    for name, experts in held.items():
        for number, expert in enumerate(part.experts[name]):
            assert torch.equal(experts[number], whole.get_submodule(name)[expert])


@pytest.mark.parametrize("name", ["plain", "awq", "mxfp4 of gpt-oss"])
def test_rank_reads_no_byte_of_other_experts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks read each byte of an expert once, together."""
    if name == "plain":
        path = saved(build("qwen3_moe", SERVED["qwen3_moe"]), tmp_path)
    else:
        path, _ = packed(name, tmp_path)
    file, preadv = path / "model.safetensors", os.preadv
    counts = torch.zeros(2, file.stat().st_size, dtype=torch.int8)

    def counted(rank: int, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts[rank, offset : offset + sum(map(len, buffers))] += 1
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(weights, "check_products", lambda *_: None)  # reads some rows of 16 linears again
    for rank in range(2):
        monkeypatch.setattr(file_slice.os, "preadv", partial(counted, rank))
        read(path, RankPosition(rank, 2, 1, True))
    assert counts.max() == 1
    monkeypatch.undo()
    opened = file_slice.OpenFile(file)
    experts = [key for key in opened.keys() if ".experts." in key]  # noqa: SIM118  # it is no mapping
    assert experts
    for key in experts:
        place = opened.slice_of(key)
        size = place[...].nbytes
        assert counts[:, place.start : place.start + size].sum() == size, key
    opened.close()


def test_bytes_of_ranks_add_up_to_whole_and_an_uneven_rank_is_counted_as_larger() -> None:
    config = build("qwen3_moe", SERVED["qwen3_moe"] | {"num_experts": 5, "num_local_experts": 5}).config
    whole, sliced = (model_on_meta(config, RankPosition(0, size), FLOAT) for size in (1, 2))
    expert = part_bytes(whole.model.layers[0].mlp.experts) // 5
    held = [part_bytes(model_on_meta(config, RankPosition(rank, 2, 1, True), FLOAT)) for rank in range(2)]
    assert held[1] - held[0] == 4 * expert
    assert sum(held) == 2 * part_bytes(sliced)
    with pytest.raises(ValueError, match="tensor_parallel_size 4 would fit"):
        check_fits(config, RankPosition(1, 2, 1, True), FLOAT, 100, "cpu", free_bytes=held[1] - 1)


@pytest.mark.parametrize("name", WITHOUT)
def test_model_whose_experts_cannot_be_whole_says_so(tmp_path: Path, name: str) -> None:
    path = saved(build(name, SERVED[name]), tmp_path)
    assert WITHOUT[name] in check_division(path, RankPosition(0, 2, 1, True))
    assert check_division(path, RankPosition(0, 2)) == ""


@pytest.mark.parametrize("name", rest_in_soak(WITHOUT, "llama4_text"))
def test_model_whose_experts_cannot_be_whole_has_slices(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = saved(build(name, SERVED[name]), tmp_path)
    expected = in_random_steps(load_model(ModelSpec(str(path), "float32")), PROMPTS, seed=7)
    answers = ranks.run(2, part_logits, path, 2)
    assert_near(answers[0][0], expected)
    assert all(own == set() for _, own in answers)


def test_more_ranks_than_experts_have_slices_and_say_so(tmp_path: Path) -> None:
    path = saved(build("qwen3_moe", SERVED["qwen3_moe"] | {"num_experts": 3, "num_local_experts": 3}), tmp_path)
    found = check_division(path, RankPosition(0, 4, 1, True))
    assert found == "3 experts of Qwen3MoeExperts are fewer than 4 ranks"
    assert check_division(path, RankPosition(0, 2, 1, True)) == ""


def test_dense_model_says_that_it_has_no_experts(tmp_path: Path) -> None:
    path = saved(build("llama", {}), tmp_path)
    assert check_division(path, RankPosition(0, 2, 1, True)) == "the model has no experts that ranks divide"
