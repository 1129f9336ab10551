"""Checkpoints in every packed format: read as independent libraries read them, kept packed, cut, counted, refused."""

import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from crossdock.kernels.packed import PackedMatrix
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.layers.coded_products import CodedLinear
from crossdock.workers.model.load import load_model
from crossdock.workers.model.loaders import file_slice
from crossdock.workers.model.memory.host_memory import bytes_of
from crossdock.workers.model.memory.memory_fit import check_fits
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights import weights
from crossdock.workers.model.weights.formats import PlainWeights
from crossdock.workers.model.weights.heap import trim_heap
from crossdock.workers.model.weights.packed_layers import PackedExperts, PackedLinear, packed_bytes
from crossdock.workers.model.weights.weights import read_config
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts
from tests.workers.quantised import CASES, SIZES, Case, mxfp4_experts, save, write
from tests.workers.ranks import UNHURRIED_S, Ranks

STATUS = Path("/proc/self/status")
FLOAT = torch.float32
PROMPTS = random_prompts(5, 23, 40)
MOE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2}

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8, "vocab_size": 128256}
GPT_OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32}


def read(path: Path, position: RankPosition | None = None) -> Any:
    """Read a checkpoint as a replica's rank does. To read needs no other rank."""
    links: Any = None if position is None else SimpleNamespace(position=position)
    return PlainWeights().read(AutoConfig.from_pretrained(path), path, FLOAT, links)


def held_bytes(module: Any) -> int:
    return packed_bytes(module) + sum(parameter.nbytes for parameter in module.parameters())


def assert_logits_equal(path: Path, module: Any) -> None:
    """Check logits at every chunk boundary beside those of transformers' model of the dequantised weights."""
    model = load_model(ModelSpec(str(path), "float32"))
    assert model.kernels, "products read the codes"
    found, expected = in_random_steps(model, PROMPTS, seed=7), [monolithic(module.eval(), each) for each in PROMPTS]
    assert_near(found, expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()


@pytest.mark.parametrize("name", CASES)
def test_matrices_stay_packed_and_equal_those_of_an_independent_library(name: str, tmp_path: Path) -> None:
    width = 128 if "nf4" in name else 96  # a multiple of the group
    case, module = CASES[name], write(tmp_path, CASES[name], sizes=SIZES | {"intermediate_size": width})
    found, part = read(tmp_path)
    linears = {path: each for path, each in found.named_modules() if isinstance(each, PackedLinear)}
    assert part is None
    assert len(linears) == 14
    for path, linear in linears.items():
        theirs, ours = module.get_submodule(path).weight, linear.packed.dequantise(FLOAT)
        tolerance = 2**-8 if "nvfp4" in name else 1e-6  # the library rounds to bfloat16
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=tolerance)
        order = 0 if linear.packed.columns is None else linear.packed.columns.nbytes
        assert linear.packed.nbytes - order <= case.bytes_per_weight * theirs.numel() + 16
    counted = PlainWeights().count_bytes(AutoConfig.from_pretrained(tmp_path), RankPosition(), FLOAT)
    assert counted.held == held_bytes(found)


@pytest.mark.parametrize(
    "name",
    ["fp8 blocks", "modelopt fp8", "compressed-tensors w4a16 zeros", "awq", "gptq act-order", "bitsandbytes nf4"],
)
def test_logits_of_chunks_equal_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 128} if "nf4" in name else None
    assert_logits_equal(tmp_path, write(tmp_path, CASES[name], "qwen2", sizes))


@pytest.mark.parametrize(("architecture", "value_dims"), [("deepseek_v3", {0}), ("glm_moe_dsa", {0, 20})])
def test_latents_are_cached_although_their_up_projections_are_packed(
    architecture: str, value_dims: set[int], tmp_path: Path
) -> None:
    """The keys of indexers lie where other layers have values."""
    module = write(tmp_path, CASES["fp8 uneven blocks"], architecture, SERVED[architecture])
    model = load_model(ModelSpec(str(tmp_path), "float32"))
    assert {shape.value_dim for shape in model.layers} == value_dims
    assert any(isinstance(each, CodedLinear) for each in model.module.modules())
    assert_logits_equal(tmp_path, module)


def write_experts(tmp_path: Path, case: Case, width: int = 64, **sizes: Any) -> Any:
    """Write a checkpoint in `packed` whose experts are packed, and return transformers' model of the same weights."""
    module = build("qwen3_moe", MOE | {"moe_intermediate_size": width} | sizes)
    for each in ("plain", "packed"):
        module.save_pretrained(tmp_path / each)
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    packed = dict(plain)
    for key in [key for key in plain if ".experts." in key]:
        made = case.make(*plain[key].shape)
        plain[key] = case.weight_of(made)
        del packed[key]
        packed |= {f"{key.removesuffix('.weight')}{suffix}": each for suffix, each in made.items()}
    save(tmp_path / "plain", plain, None)
    save(tmp_path / "packed", packed, case.config)
    return type(module).from_pretrained(tmp_path / "plain", dtype=FLOAT)


@pytest.mark.parametrize("name", ["fp8 blocks", "compressed-tensors w4a16", "awq"])
def test_logits_of_packed_experts_equal_those_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    module = write_experts(tmp_path, CASES[name])
    found, _ = read(tmp_path / "packed")
    assert sum(isinstance(each, PackedExperts) for each in found.modules()) == 4
    assert_logits_equal(tmp_path / "packed", module)


def num_matrices() -> int:
    gc.collect()
    return sum(type(each) is PackedMatrix for each in gc.get_objects())


def test_codes_in_panels_are_in_memory_once(tmp_path: Path) -> None:
    write_experts(tmp_path, CASES["awq"])
    before = num_matrices()
    model = load_model(ModelSpec(str(tmp_path / "packed"), "float32"))
    assert model.kernels
    assert num_matrices() == before


def assert_experts_are_slices(path: Path, module: Any, position: RankPosition) -> None:
    found, part = read(path, position)
    held = {name: each for name, each in found.named_modules() if isinstance(each, PackedExperts)}
    assert held
    for name, experts in held.items():
        expected = part.slices[name].read(module.get_parameter(name), 3)
        torch.testing.assert_close(torch.stack([experts[i] for i in range(len(expected))]), expected)


@pytest.mark.parametrize("name", ["fp8 blocks", "awq"])
def test_parts_of_packed_experts_are_slices_of_the_whole(name: str, tmp_path: Path) -> None:
    module = write_experts(tmp_path, CASES[name])
    for rank in range(2):
        assert_experts_are_slices(tmp_path / "packed", module, RankPosition(rank, 2))
    write_experts(tmp_path, CASES[name], width=96)
    with pytest.raises(CannotCut, match=r"_proj cannot be divided .* 32 (rows|columns) each"):
        read(tmp_path / "packed", RankPosition(0, 2))


def write_gpt_oss(tmp_path: Path) -> Any:
    """Write a checkpoint with experts in MXFP4, and return transformers' model of the same weights."""
    module = build("gpt_oss", SERVED["gpt_oss"] | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64})
    module.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weights = mxfp4_experts(tensors)
    assert len(weights) == 8
    module.load_state_dict(module.state_dict() | weights)
    save(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return module.eval()


def test_logits_of_experts_in_mxfp4_equal_those_of_the_dequantised_model(tmp_path: Path) -> None:
    module = write_gpt_oss(tmp_path)
    found, _ = read(tmp_path)
    weights = [each for name, each in module.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert packed_bytes(found) == sum(weight.numel() for weight in weights) * (0.5 + 2 / 32)
    assert_logits_equal(tmp_path, module)
    assert_experts_are_slices(tmp_path, module, RankPosition(1, 2))
    config = AutoConfig.from_pretrained(tmp_path)
    counted = PlainWeights().count_bytes(config, RankPosition(), FLOAT)
    assert counted.held == held_bytes(found)
    assert counted.in_panels == sum(weight.numel() for weight in weights) * 2 / 32, "scales of two bytes take four"
    needed, half = (PlainWeights().count_bytes(config, RankPosition(0, n), FLOAT).on("cpu") for n in (1, 2))
    check_fits(config, RankPosition(), FLOAT, 100, "cpu", free_bytes=needed + 100)
    with pytest.raises(ValueError, match=r"0\.0 MiB are missing"):
        check_fits(config, RankPosition(), FLOAT, 100, "cpu", free_bytes=needed + 99)
    for free, advice in ((half + 100, "tensor_parallel_size 2 would fit"), (half + 99, "No tensor_parallel_size")):
        with pytest.raises(ValueError, match=advice):
            check_fits(config, RankPosition(), FLOAT, 100, "cpu", free_bytes=free)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("modelopt fp8", "hf_quant_config.json"),
        ("gptq act-order", "quantize_config.json"),
        ("awq", "quant_config.json"),
    ],
)
def test_quantisation_described_beside_the_configuration_is_read(name: str, file: str, tmp_path: Path) -> None:
    module, described = write(tmp_path, CASES[name]), CASES[name].config
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    inner = {"quantization": described} if name == "modelopt fp8" else described
    (tmp_path / file).write_text(json.dumps(inner))
    assert_logits_equal(tmp_path, module)
    loaded = read_config(tmp_path)
    assert PlainWeights().count_bytes(loaded, RankPosition(), FLOAT).held < 0.7 * held_bytes(module)


@pytest.mark.parametrize(
    ("architecture", "sizes", "quantisation", "published"),
    [
        ("llama", LLAMA_8B, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 5.73e9),
        ("gpt_oss", GPT_OSS_20B, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, 13.76e9),
    ],
)
def test_bytes_of_published_checkpoints_are_near_those_of_their_files(
    architecture: str, sizes: dict[str, Any], quantisation: dict[str, Any], published: float
) -> None:
    """Scales are float32 here and float16 or bytes in the files, whose sizes are those on the hub."""
    config = AutoConfig.for_model(architecture, **sizes, quantization_config=quantisation)
    whole = PlainWeights().count_bytes(config, RankPosition(), torch.bfloat16).held
    assert published < whole < 1.06 * published
    for position in (RankPosition(0, 2), RankPosition(1, 1, 2)):
        assert PlainWeights().count_bytes(config, position, torch.bfloat16).held == pytest.approx(whole / 2, rel=0.01)


INDIVISIBLE = {"fp8 uneven blocks": "40 rows each", "gptq act-order": r"\(act-order\) cannot be divided"}


# Scales of blocks and of groups, offsets, words in another order, a table; and matrices that cannot be divided.
DIVIDED = ["fp8 blocks", "modelopt nvfp4", "compressed-tensors w4a16 zeros", "awq", "gptq", "bitsandbytes nf4"]


@pytest.mark.parametrize("name", rest_in_soak(CASES, *DIVIDED, *INDIVISIBLE))
def test_parts_of_packed_matrices_are_slices_of_the_whole_or_refused_by_name(name: str, tmp_path: Path) -> None:
    module = write(tmp_path, CASES[name], sizes=SIZES | {"intermediate_size": 128})
    config = AutoConfig.from_pretrained(tmp_path)
    for position in (RankPosition(0, 2), RankPosition(1, 2), RankPosition(1, 1, 2)):
        if name in INDIVISIBLE and position.tensor_size > 1:
            for refused in (read, lambda *_, at=position: PlainWeights().count_bytes(config, at, FLOAT)):
                with pytest.raises(CannotCut, match=rf"proj\.weight .*{INDIVISIBLE[name]}.* pipeline stages, which"):
                    refused(tmp_path, position)
            continue
        found, part = read(tmp_path, position)
        linears = {path: each for path, each in found.named_modules() if isinstance(each, PackedLinear)}
        assert linears
        for path, linear in linears.items():
            whole, kept = module.get_submodule(path).weight, part.slices.get(f"{path}.weight")
            expected = whole if kept is None else kept.read(whole, 2)
            tolerance = 2**-8 if "nvfp4" in name else 1e-6  # the library rounds to bfloat16
            torch.testing.assert_close(linear.packed.dequantise(FLOAT), expected, atol=1e-6, rtol=tolerance)
            assert linear.packed.codes.untyped_storage().nbytes() == linear.packed.codes.nbytes, (
                "a view keeps the whole"
            )
        assert PlainWeights().count_bytes(config, position, FLOAT).held == held_bytes(found)


def test_parts_that_would_divide_a_group_are_refused(tmp_path: Path) -> None:
    write(tmp_path, CASES["compressed-tensors w4a16"])  # 96 columns are three groups of 32
    with pytest.raises(CannotCut, match=r"down_proj\.weight cannot be divided .* 32 columns each"):
        read(tmp_path, RankPosition(0, 2))


def test_packed_weights_refuse_another_dtype_which_would_round_their_scales(tmp_path: Path) -> None:
    write(tmp_path, CASES["awq"])
    model, _ = read(tmp_path)
    linear = next(module for module in model.modules() if isinstance(module, PackedLinear))
    before = linear.packed.scales
    with pytest.raises(TypeError, match=r"keeps its dtypes; torch\.float\d+ would become torch\.float64"):
        linear.double()
    assert linear.to("cpu").packed.scales.equal(before)


def part_logits(rank: int, path: Path, tensor_size: int, num_stages: int) -> list[Tensor]:
    """On one rank: return every token's logits, or nothing where the rank has none."""
    position = RankPosition(rank, tensor_size, num_stages)
    model = load_model(ModelSpec(str(path), "float32"), links=Collectives(position, UNHURRIED_S))
    assert model.kernels, "products read the codes"
    torch.manual_seed(0)  # the same pages everywhere
    logits = in_random_steps(model, PROMPTS, seed=7)
    return logits if position.is_last_stage else []


def test_logits_of_ranks_equal_those_of_the_dequantised_model(ranks: Ranks, tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 128}
    for name in ("fp8 blocks", "awq", "mxfp4 of gpt-oss"):
        path = tmp_path / name
        path.mkdir()
        module = write(path, CASES[name], sizes=sizes).eval() if name in CASES else write_gpt_oss(path)
        expected = [monolithic(module, prompt) for prompt in PROMPTS]
        for division in ((2, 1), (1, 2)):
            driver = RankPosition(0, *division).driver
            assert_near(ranks.run(2, part_logits, path, *division)[driver], expected)


PACKED = ("fp8 blocks", "compressed-tensors w4a16 zeros", "experts", "mxfp4")


@pytest.mark.parametrize(("name", "rank"), [("plain", 1), *((name, rank) for name in PACKED for rank in (None, 1))])
def test_no_byte_of_weights_is_read_twice(
    name: str, rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks read packed matrices whole, and their own parts of plain tensors. No rank: all is read.

    A whole checkpoint of plain tensors is read by transformers."""
    path, sizes = tmp_path, SIZES | {"intermediate_size": 128}
    if name == "plain":
        build("llama", sizes).save_pretrained(path)
    elif name == "mxfp4":
        write_gpt_oss(path)
    elif name == "experts":
        write_experts(path, CASES["awq"])
        path = tmp_path / "packed"
    else:
        write(path, CASES[name], sizes=sizes)
    file, preadv = path / "model.safetensors", os.preadv
    counts = torch.zeros(file.stat().st_size, dtype=torch.int8)

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert os.fstat(descriptor).st_ino == file.stat().st_ino
        counts[offset : offset + sum(map(len, buffers))] += 1
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(weights, "check_products", lambda *_: None)  # reads some rows of 16 linears again
    monkeypatch.setattr(file_slice.os, "preadv", counted)
    found, _ = read(path, RankPosition(rank or 0, 1 if rank is None else 2))
    assert counts.max() == 1
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert not counts[:header].any()
    assert counts.sum() == len(counts) - header if rank is None else counts.sum() < len(counts) - header
    assert name != "plain" or counts.sum() == held_bytes(found)


def peak_of_loading(_: int, path: Path) -> tuple[int, int]:
    """Return (bytes by which the memory of this process grew at most while loading, bytes held in the end)."""
    config = AutoConfig.from_pretrained(path)
    PlainWeights().read(config, path, FLOAT, None)  # libraries take memory once
    gc.collect()
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = bytes_of(STATUS, "VmRSS")
    module, _part = PlainWeights().read(config, path, FLOAT, None)
    return bytes_of(STATUS, "VmHWM") - before, held_bytes(module)


def test_memory_while_loading_stays_near_that_of_the_packed_weights(ranks: Ranks, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "head_dim": 128,
        "vocab_size": 1024,
        "num_hidden_layers": 16,
    }
    module = write(tmp_path, CASES["compressed-tensors w4a16"], sizes=sizes)
    plain = sum(parameter.nbytes for parameter in module.parameters())
    ((peak, held),) = ranks.run(1, peak_of_loading, tmp_path)
    assert held < 0.2 * plain
    assert peak < held + 0.1 * plain, "no copy in plain floats"
