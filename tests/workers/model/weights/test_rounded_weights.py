"""Plain weights that `quantization fp8` rounds as they are loaded: an independent library gives the same codes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model
from crossdock.workers.model.memory.memory_fit import check_fits
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.new_weights import NewWeights
from crossdock.workers.model.weights.formats import format_of
from crossdock.workers.model.weights.packed_layers import PackedExperts, PackedLinear
from crossdock.workers.model.weights.scheme import E4M3_AT_LOAD
from crossdock.workers.model.weights.weights import part_bytes
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts
from tests.workers.quantised import CASES, SIZES, save, write
from tests.workers.ranks import UNHURRIED_S, Ranks

FP8 = format_of("fp8")
PROMPTS = random_prompts(5, 23, 40)
ARGS = QuantizationArgs(num_bits=8, type="float", strategy="channel")
MOE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = SERVED["gpt_oss"] | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
CUT = SIZES | {"intermediate_size": 128}
PLAIN = (".gate.weight", "router.weight", "bias", "sinks")
ROUNDED = (".self_attn.q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def codes_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [N, K] and scales [N, 1] that the library gives a weight [N, K]."""
    rows = weight.float()
    scales, zeros = calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), ARGS)
    codes = quantize(rows, scales, zeros, ARGS, dtype=torch.float8_e4m3fn)
    return codes, scales.float()


def dequantised(weight: Tensor) -> Tensor:
    codes, scales = codes_of(weight)
    return codes.float() * scales


def round_module(module: Any) -> Any:
    """Give transformers' model the weights that its own mean after rounding."""
    for name, parameter in module.named_parameters():
        if ".layers." not in name or "norm" in name or name.endswith(PLAIN):
            continue
        if parameter.dim() == 2:
            parameter.data.copy_(dequantised(parameter.data))
        else:
            is_transposed = module.config.model_type == "gpt_oss"
            rows = parameter.data.transpose(1, 2) if is_transposed else parameter.data
            rounded = torch.stack([dequantised(each) for each in rows])
            parameter.data.copy_(rounded.transpose(1, 2) if is_transposed else rounded)
    return module.eval()


def read(path: Path, position: RankPosition | None = None) -> Any:
    """Read a checkpoint as a replica's rank does. To read needs no other rank."""
    links: Any = None if position is None else SimpleNamespace(position=position)
    return FP8.read(AutoConfig.from_pretrained(path), path, torch.float32, links)


def linears_of(module: Any) -> dict[str, PackedLinear]:
    return {name: each for name, each in module.named_modules() if isinstance(each, PackedLinear)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_and_scales_are_those_of_an_independent_library_and_the_rest_stays(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    module = build("llama", SIZES).to(dtype)
    module.model.layers[0].mlp.up_proj.weight.data[3] = 0  # a row without a scale of its own
    module.save_pretrained(tmp_path)
    found, _ = FP8.read(AutoConfig.from_pretrained(tmp_path), tmp_path, dtype, None)
    linears = linears_of(found)
    assert len(linears) == 14
    for name, linear in linears.items():
        weight = module.get_submodule(name).weight
        codes, scales = codes_of(weight)
        others = weight.abs().amax(1) > 0
        assert torch.equal(linear.packed.codes.float(), codes.float()), name
        assert torch.equal(linear.packed.scales[others], scales[others]), name
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, module.get_parameter(name)), name
    counted = FP8.count_bytes(AutoConfig.from_pretrained(tmp_path), RankPosition(), dtype)
    assert counted.held == counted.loading == part_bytes(found)


def test_logits_are_the_bits_of_a_checkpoint_that_holds_the_same_codes(tmp_path: Path) -> None:
    module = build("qwen2", SIZES).to(torch.bfloat16)
    for name in ("plain", "packed"):
        module.save_pretrained(tmp_path / name)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    for key in [key for key in tensors if key.removesuffix(".weight").endswith(ROUNDED)]:
        tensors[key], tensors[f"{key}_scale"] = codes_of(tensors[key])
    save(tmp_path / "packed", tensors, dict(E4M3_AT_LOAD))
    found = [
        load_model(ModelSpec(str(tmp_path / name), "float32", cpu_kernels="native", quantization=asked))
        for name, asked in (("plain", "fp8"), ("packed", None), ("packed", "compressed-tensors"))
    ]
    assert len({model.kernels for model in found}) == 1
    ours, *theirs = (in_random_steps(model, PROMPTS, seed=7) for model in found)
    for each in theirs:
        assert all(torch.equal(a, b) for a, b in zip(ours, each, strict=True))


@pytest.mark.parametrize(
    ("name", "sizes", "num_experts"),
    [("llama", SIZES, 0), ("phi3", SERVED["phi3"], 0), ("qwen3_moe", MOE, 4), ("gpt_oss", GPT_OSS, None)],
)
def test_logits_of_chunks_equal_those_of_the_dequantised_model(
    name: str, sizes: Any, num_experts: int | None, tmp_path: Path
) -> None:
    module = build(name, sizes)
    module.save_pretrained(tmp_path)
    read_module, _ = read(tmp_path)
    experts = [each for each in read_module.modules() if isinstance(each, PackedExperts)]
    assert len(experts) == (2 * module.config.num_hidden_layers if num_experts is None else num_experts)
    assert not any(each.endswith((".gate", ".router")) for each in linears_of(read_module))
    model = load_model(ModelSpec(str(tmp_path), "float32", quantization="fp8"))
    assert model.kernels, "products read the codes"
    found = in_random_steps(model, PROMPTS, seed=7)
    expected = [monolithic(round_module(module), each) for each in PROMPTS]
    assert_near(found, expected)


@pytest.mark.parametrize("position", [RankPosition(0, 2), RankPosition(1, 2), RankPosition(1, 1, 2)])
def test_parts_have_the_codes_and_scales_of_whole_rows(position: RankPosition, tmp_path: Path) -> None:
    module = build("llama", CUT)
    module.save_pretrained(tmp_path)
    found, part = read(tmp_path, position)
    linears = linears_of(found)
    assert linears
    for name, linear in linears.items():
        whole, kept = dequantised(module.get_submodule(name).weight), part.slices.get(f"{name}.weight")
        assert torch.equal(linear.packed.dequantise(torch.float32), whole if kept is None else kept.read(whole, 2))
    config = AutoConfig.from_pretrained(tmp_path)
    assert FP8.count_bytes(config, position, torch.float32).held == part_bytes(found)


def part_logits(rank: int, path: Path, tensor_size: int, num_stages: int) -> list[Tensor]:
    """On one rank: return every token's logits, or nothing where the rank has none."""
    position = RankPosition(rank, tensor_size, num_stages)
    spec = ModelSpec(str(path), "float32", quantization="fp8")
    model = load_model(spec, links=Collectives(position, UNHURRIED_S))
    assert model.kernels, "products read the codes"
    torch.manual_seed(0)  # the same pages everywhere
    logits = in_random_steps(model, PROMPTS, seed=7)
    return logits if position.is_last_stage else []


def test_logits_of_ranks_equal_those_of_the_dequantised_model(ranks: Ranks, tmp_path: Path) -> None:
    module = build("llama", CUT)
    module.save_pretrained(tmp_path)
    expected = [monolithic(round_module(module), prompt) for prompt in PROMPTS]
    for division in ((2, 1), (1, 2)):
        driver = RankPosition(0, *division).driver
        assert_near(ranks.run(2, part_logits, tmp_path, *division)[driver], expected)


def test_memory_that_is_asked_for_is_that_of_the_codes(tmp_path: Path) -> None:
    module = build("llama", CUT)
    module.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    needed, half = (FP8.count_bytes(config, RankPosition(0, n), torch.float32).on("cpu") for n in (1, 2))
    assert needed < format_of(None).count_bytes(config, RankPosition(), torch.float32).held
    options: Any = {"device": "cpu", "weight_format": FP8}
    check_fits(config, RankPosition(), torch.float32, 100, free_bytes=needed + 100, **options)
    with pytest.raises(ValueError, match="tensor_parallel_size 2 would fit"):
        check_fits(config, RankPosition(), torch.float32, 100, free_bytes=half + 100, **options)


def test_updates_are_refused_by_name(tmp_path: Path) -> None:
    build("llama", SIZES).save_pretrained(tmp_path)
    model = load_model(ModelSpec(str(tmp_path), "float32", quantization="fp8"))
    with pytest.raises(ValueError, match="quantization fp8 rounded the weights of the start"):
        NewWeights(model).call("start", "{}")


def test_other_checkpoints_and_models_without_linears_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "awq", CASES["awq"])
    build("gpt2", SERVED["gpt2"]).save_pretrained(tmp_path / "gpt2")
    for name in ("llama4_text", "gpt_bigcode"):
        build(name, SERVED[name]).save_pretrained(tmp_path / name)
    for name, reason in (
        ("awq", "quantization fp8 is for .* quantised with awq"),
        ("gpt2", "has no linears to round"),
        ("gpt_bigcode", "reads weights of linears by itself, so they cannot be packed"),
        ("llama4_text", r"experts\.gate_up_proj holds experts .* would stay plain"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_model(ModelSpec(str(tmp_path / name), "float32", quantization="fp8"))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_number_that_is_none_is_refused(wrong: float, tmp_path: Path) -> None:
    module = build("llama", SIZES)
    module.model.layers[1].mlp.up_proj.weight.data[3, 5] = wrong
    module.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"up_proj"):
        load_model(ModelSpec(str(tmp_path), "float32", quantization="fp8"))
