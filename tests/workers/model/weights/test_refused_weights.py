"""Weights that would give wrong results are refused by name: whole models and parts of ranks."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.formats import PlainWeights
from crossdock.workers.model.weights.scheme import check_asked, scheme_of
from crossdock.workers.model.weights.weights import check_division
from tests.workers.architectures import SERVED, build

BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
Tensors = dict[str, Tensor]
POSITIONS = {"whole": None, "tensor rank": RankPosition(1, 2), "stage": RankPosition(0, 1, 2)}


def read(path: Path, position: RankPosition | None = None, dtype: torch.dtype = BF16) -> Any:
    """Read a checkpoint as a replica's rank does. To read needs no other rank."""
    links: Any = None if position is None else SimpleNamespace(position=position)
    return PlainWeights().read(AutoConfig.from_pretrained(path), path, dtype, links)[0]


def saved(path: Path, tensors: Tensors, **settings: Any) -> Path:
    """Replace what a checkpoint holds, and write `settings` to its configuration."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((path / "config.json").read_text()) | settings
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, Tensors]:
    """A checkpoint of two layers, and its tensors."""
    build("qwen2", SIZES).to(BF16).save_pretrained(tmp_path)
    return tmp_path, load_file(tmp_path / "model.safetensors")


def packed(tensors: Tensors, block: tuple[int, int], scale_dtype: torch.dtype) -> Tensors:
    """Return the projections of layers as e4m3 with a scale for each block, a power of two, and the rest as it is."""
    found = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            rows, columns = (size // step for size, step in zip(weight.shape, block, strict=True))
            blocks = weight.float().reshape(rows, block[0], columns, block[1])
            exponents = torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / 448))
            found[name] = (blocks / exponents.exp2()[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            is_byte = scale_dtype is torch.uint8
            found[f"{name}_scale_inv"] = (exponents + 127).to(torch.uint8) if is_byte else exponents.exp2()
    return found


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}


def _groups(**weights: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors with one group of linears."""
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": group}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "of modelopt: quant_algo 'W4A8_AWQ' is not read, only FP8, .*: serve the checkpoint that it was made from",
        ),
        ({"quant_method": "compressed-tensors"}, r"compressed-tensors: its fields .* \(KeyError\('config_groups'\)\)"),
        (_groups(num_bits=2), r"format 'pack-quantized' of 2 bits \(int, group\) is not read, only pack-quantized, "),
        (_groups() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not read"),
        (_groups() | {"transform_config": {"config_groups": {}}}, "rotations as they are used are not read"),
        ({"quant_method": "awq", "version": "gemv"}, "of awq: 4 bits in version gemv .* only 4 bits in version gemm"),
        ({"quant_method": "gptq", "bits": 3}, "of gptq: 3 bits .* only 4 and 8 .* --quantization int8"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "settings for single layers"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not read, only e4m3"),
        ({"load_in_4bit": True}, "of bitsandbytes: fp4 is not read, only bnb_4bit_quant_type nf4"),
        ({"load_in_8bit": True}, "of bitsandbytes: 8 bits is not read.* --quantization int8"),
        (
            {"quant_method": "of next year"},
            "'of next year', which is not read: .* Read are fp8, fbgemm_fp8, mxfp8, mxfp4, awq, .* and plain",
        ),
        ({}, "quant_method None"),
        (["fp8"], "quant_method None"),
        ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\]"),
    ],
)
def test_quantisation_that_is_not_read_is_refused_by_name(config: Any, reason: str) -> None:
    for each in (
        {"quantization_config": config},
        {"compression_config": config},
        {"text_config": {"quantization_config": config}},
    ):
        with pytest.raises(ValueError, match=reason):
            scheme_of(each)


@pytest.mark.parametrize(
    ("asked", "config", "reason"),
    [
        ("awq", FP8, "quantization awq is for checkpoints of that quant_method, .* are quantised with fp8"),
        ("awq", None, "quantization awq is for .* these weights are plain; .* by fp8, and on CPUs by int8"),
        ("fp8", AWQ, "quantization fp8 is for .* quantised with awq"),
        ("int8", FP8, "quantization int8 rounds plain weights, and this checkpoint is quantised with fp8"),
    ],
)
def test_quantization_that_the_checkpoint_is_not_stored_in_is_refused(asked: str, config: Any, reason: str) -> None:
    scheme = scheme_of({"quantization_config": config})
    with pytest.raises(ValueError, match=reason):
        check_asked(asked, scheme)
    check_asked(None, scheme)
    check_asked(scheme.method, scheme)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return apply


FAULTS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "unexpected": (lambda t: t.update({f"{UP}_scale": torch.ones(1)}), "without a place in the model: .*_scale"),
    "missing": (lambda t: t.pop(UP), f"missing: {UP}"),
    "missing norm": (lambda t: t.pop(NORM), f"missing: {NORM}"),
    "float8": (changed(UP, lambda w: w.to(torch.float8_e4m3fn)), rf"{UP} \(F8_E4M3, expected floats\)"),
    "int8": (changed(UP, lambda w: w.to(torch.int8)), rf"{UP} \(I8, expected floats\)"),
    "uint8": (changed(NORM, lambda w: w.to(torch.uint8)), rf"{NORM} \(U8, expected floats\)"),
    "int32": (changed(UP, lambda w: w.to(torch.int32)), rf"{UP} \(I32, expected floats\)"),
    "uint16": (changed(UP, lambda w: w.to(torch.uint16)), rf"of a dtype that is not read: {UP} \(U16\)"),
    "transposed": (changed(UP, lambda w: w.T), rf"another shape: {UP} \[64, 96\], expected \[96, 64\]"),
    "half": (
        changed(UP, lambda w: w[:48]),
        rf"another shape: {UP} \[48, 64\], expected \[96, 64\]",
    ),  # one rank's share
}


@pytest.mark.parametrize("division", POSITIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_tensor_that_is_not_the_models_is_refused_by_name(
    fault: str, division: str, plain: tuple[Path, Tensors]
) -> None:
    path, tensors = plain
    change, reason = FAULTS[fault]
    change(tensors)
    with pytest.raises(ValueError, match=f"would give wrong results: .*1 tensors {reason}|{reason}"):
        read(saved(path, tensors), POSITIONS[division])


def test_unequal_experts_are_refused_by_name(tmp_path: Path) -> None:
    build("qwen3_moe", SERVED["qwen3_moe"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if "experts.1.up_proj" in key)
    tensors[name] = tensors[name][:-1]
    for position in POSITIONS.values():
        with pytest.raises(ValueError, match=r"that cannot be merged: .*experts"):
            read(saved(tmp_path, tensors), position)


def test_tensors_that_change_no_token_are_allowed(plain: tuple[Path, Tensors]) -> None:
    path, tensors = plain
    tensors["model.rotary_emb.inv_freq"] = torch.ones(8)
    tensors["mtp.fc.weight"] = torch.ones(8)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(96, 64)  # guesses the token after the next
    for position in POSITIONS.values():
        assert read(saved(path, tensors, num_nextn_predict_layers=1), position) is not None
    with pytest.raises(ValueError, match=r"without a place in the model: model\.layers\.2\.mlp"):
        read(saved(path, tensors, num_nextn_predict_layers=0))


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.uint8])
def test_packed_weights_load_in_every_dtype_and_are_refused_without_scales(
    scale_dtype: torch.dtype, plain: tuple[Path, Tensors]
) -> None:
    path, tensors = plain
    settings = FP8 if scale_dtype is torch.float32 else MXFP8
    found = packed(tensors, tuple(settings["weight_block_size"]), scale_dtype)
    saved(path, found, quantization_config=settings)
    for dtype in (BF16, torch.float32):
        assert load_model(ModelSpec(str(path), str(dtype).removeprefix("torch."))).dtype == dtype
    check_division(path, RankPosition(0, 1, 2))
    found.pop(f"{UP}_scale_inv")
    with pytest.raises(ValueError, match=rf"{UP} \(F8_E4M3 without scales\)"):
        read(saved(path, found))
    tensors |= {f"{UP}_scale_inv": found[UP.replace("up", "gate") + "_scale_inv"]}
    with pytest.raises(ValueError, match=r"without a place in the model: .*up_proj\.weight_scale_inv"):
        read(saved(path, tensors))


def test_weights_that_were_unpacked_wrongly_differ_from_products_of_the_bytes(
    plain: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    from crossdock.workers.model.weights import weights

    path, tensors = plain
    saved(path, packed(tensors, (16, 16), torch.float32), quantization_config=FP8)
    part_of = weights.part_of

    def scaled(name: str, matrix: Any, *args: Any) -> Any:
        return part_of(name, replace(matrix, scales=matrix.scales * 2), *args)

    monkeypatch.setattr(weights, "part_of", scaled)
    with pytest.raises(ValueError, match=r"_proj\.weight gives products that differ by .* bytes in the file"):
        read(path)


@pytest.mark.parametrize("division", POSITIONS)
def test_rows_of_another_rank_differ_from_products_of_the_bytes(
    division: str, plain: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    from crossdock.workers.model.weights import weights

    path, _ = plain
    check = weights.check_products

    def rolled(module: Any, *args: Any) -> None:
        projection = module.model.layers[0].mlp.up_proj
        projection.weight.data = projection.weight.data.roll(1, 0)
        check(module, *args)

    monkeypatch.setattr(weights, "check_products", rolled)
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight gives products that differ by"):
        read(path, POSITIONS[division])
