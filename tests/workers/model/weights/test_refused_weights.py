"""Weights that would give wrong results are refused by name: whole models, parts of ranks and encoders of pictures."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.encoder_model import load_encoder
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.plain import PlainWeights
from crossdock.workers.model.weights.scheme import scheme_of
from crossdock.workers.model.weights.weights import check_division
from tests.workers.architectures import SERVED, build
from tests.workers.multimodal import build_multimodal

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


FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "modelopt"}, "'modelopt', which is not read: NVIDIA's Model Optimizer"),
        ({"quant_method": "compressed-tensors"}, "llm-compressor wrote it: .* --quantization int8"),
        ({"quant_method": "awq"}, "-AWQ .* --quantization int8"),
        ({"quant_method": "gptq"}, "-GPTQ .* --quantization int8"),
        ({"load_in_4bit": True}, "'bitsandbytes', .* --quantization int8"),
        (
            {"quant_method": "of next year"},
            "'of next year', which is not read: .* Read are fp8, mxfp8, mxfp4, and plain",
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


@pytest.mark.parametrize("file", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_lone_file_of_a_quantisation_is_refused_by_name(file: str, plain: tuple[Path, Tensors]) -> None:
    path, _ = plain
    (path / file).write_text("{}")
    with pytest.raises(ValueError, match=f"{file} says that the weights are quantised"):
        load_model(ModelSpec(str(path)))
    assert scheme_of({"quantization_config": FP8}, [file]).method == "fp8"


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


def test_encoder_with_a_tensor_of_another_kind_is_refused(tmp_path: Path) -> None:
    build_multimodal("qwen3_vl").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if "visual" in key and key.endswith("weight"))
    assert load_encoder(ModelSpec(str(tmp_path), "float32"))
    tensors[name] = tensors[name].to(torch.int8)
    with pytest.raises(ValueError, match=r"\(I8, expected floats\)"):
        load_encoder(ModelSpec(str(saved(tmp_path, tensors)), "float32"))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("settings", "scale_dtype"), [(FP8, torch.float32), (MXFP8, torch.uint8)])
def test_packed_weights_are_read_as_their_scales_say(
    settings: dict[str, Any], scale_dtype: torch.dtype, dtype: torch.dtype, plain: tuple[Path, Tensors]
) -> None:
    """Scales are powers of two, so that the products of bytes and scales are exact in bfloat16 too."""
    path, tensors = plain
    saved(path, packed(tensors, tuple(settings["weight_block_size"]), scale_dtype), quantization_config=settings)
    model = load_model(ModelSpec(str(path), str(dtype).removeprefix("torch.")))
    assert model.dtype == dtype
    found = read(path, dtype=dtype).state_dict()
    for name, weight in tensors.items():
        assert found[name].dtype == dtype
        tolerance = 2**-4 if name.endswith("proj.weight") else 0  # e4m3 stores four bits
        assert (found[name].float() - weight.float()).norm() <= tolerance * weight.float().norm(), name


def test_experts_in_mxfp4_are_read_as_their_scales_say(tmp_path: Path) -> None:
    build("gpt_oss", SERVED["gpt_oss"] | {"hidden_size": 64, "head_dim": 16}).to(BF16).save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # e2m1
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 125, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": scales}
        rows = values[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = rows.flatten(2).transpose(1, 2)  # exact in bfloat16
    saved(tmp_path, tensors, quantization_config={"quant_method": "mxfp4"})
    found = read(tmp_path).state_dict()
    assert len(expected) == 8
    assert all(torch.equal(found[name].float(), expected[name]) for name in expected)
    tensors.pop(next(name for name in tensors if name.endswith("_scales")))
    with pytest.raises(ValueError, match="would give wrong results"):
        read(saved(tmp_path, tensors))


def test_packed_weights_without_scales_or_in_parts_are_refused(plain: tuple[Path, Tensors]) -> None:
    path, tensors = plain
    found = packed(tensors, (16, 16), torch.float32)
    saved(path, found, quantization_config=FP8)
    for position in (RankPosition(0, 2), RankPosition(0, 1, 2)):
        with pytest.raises(CannotCut, match="weights in fp8 are read whole"):
            read(path, position)
        with pytest.raises(CannotCut, match="weights in fp8 are read whole"):
            check_division(path, position.tensor_size, position.num_stages)
    found.pop(f"{UP}_scale_inv")
    with pytest.raises(ValueError, match=rf"{UP} \(F8_E4M3 without a scale\)"):
        read(saved(path, found))


def test_weights_that_were_read_wrongly_differ_from_products_of_the_bytes(
    plain: tuple[Path, Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tensors = plain
    saved(path, packed(tensors, (16, 16), torch.float32), quantization_config=FP8)
    ignores_scales: Any = lambda _self, quantized, _scales, output_dtype=None: quantized.to(output_dtype)  # noqa: E731
    monkeypatch.setattr(Fp8Dequantize, "_dequantize_one", ignores_scales)
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
