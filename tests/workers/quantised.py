"""Tiny checkpoints in every packed format. Independent libraries say which weights their bytes are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert import AutoAWQConverter, ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.workers.architectures import build

Tensors = dict[str, Tensor]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
SIZES |= {"num_key_value_heads": 2}


class Case(NamedTuple):
    """A format: its `quantization_config`, tensors of a matrix [N, K] by the suffix of their names, and an oracle."""

    config: dict[str, Any]
    make: Callable[[int, int], Tensors]
    weight_of: Callable[[Tensors], Tensor]  # [N, K] float32
    bytes_per_weight: float  # in memory


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def _scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape) * 0.02 + 0.005).to(dtype)


def _e4m3(*shape: int) -> Tensor:
    return torch.randn(shape).mul(8).to(torch.float8_e4m3fn)


def _fp8(block: tuple[int, int] | None, scale: str, config: dict[str, Any], bytes_per_weight: float) -> Case:
    """Scales of blocks [rows, columns]; None: one of the tensor."""

    def make(rows: int, columns: int) -> Tensors:
        grid = () if block is None else (-(-rows // block[0]), -(-columns // block[1]))
        return {".weight": _e4m3(rows, columns), scale: _scales(*grid)}

    def weight_of(tensors: Tensors) -> Tensor:
        rows, columns = tensors[".weight"].shape
        height, width = (min(size) for size in zip(block or (rows, columns), (rows, columns), strict=True))
        grid = tensors[scale].reshape(-(-rows // height), -1)
        return (
            tensors[".weight"].float() * grid.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
        )

    return Case(config, make, weight_of, bytes_per_weight)


def _mxfp8(scale: str, config: dict[str, Any]) -> Case:
    def make(rows: int, columns: int) -> Tensors:
        exponents = torch.randint(117, 122, (rows, columns // 32), dtype=torch.uint8)
        return {".weight": _e4m3(rows, columns), scale: exponents}

    def weight_of(tensors: Tensors) -> Tensor:
        scales = torch.exp2(tensors[scale].float() - 127)
        return tensors[".weight"].float() * scales.repeat_interleave(32, 1)

    return Case(config, make, weight_of, 1 + 4 / 32)


def _compressed(layout: str, make: Callable[[int, int], Tensors], bytes_per_weight: float, **weights: Any) -> Case:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    config |= {"ignore": ["lm_head"]}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    library: Any = BaseCompressor.get_value_from_registry(layout)

    def weight_of(tensors: Tensors) -> Tensor:
        weight: Tensor = library.decompress({name[1:]: each for name, each in tensors.items()}, scheme)["weight"]
        return weight.float()

    return Case(config, make, weight_of, bytes_per_weight)


def _packed_words(bits: int, group: int | None, is_symmetric: bool) -> Callable[[int, int], Tensors]:
    def make(rows: int, columns: int) -> Tensors:
        num_groups = columns // (group or columns)
        tensors = {
            ".weight_packed": _words(rows, columns * bits // 32),
            ".weight_scale": _scales(rows, num_groups) * (1 if bits == 4 else 0.05),
            ".weight_shape": torch.tensor([rows, columns]),
        }
        return tensors if is_symmetric else tensors | {".weight_zero_point": _words(rows * bits // 32, num_groups)}

    return make


def _nvfp4(rows: int, columns: int) -> Tensors:
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 16) * 200 + 20).to(torch.float8_e4m3fn)
    return {".weight_packed": packed, ".weight_scale": scales, ".weight_global_scale": torch.tensor([9000.0])}


def _mxfp4(rows: int, columns: int) -> Tensors:
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    return {
        ".weight_packed": packed,
        ".weight_scale": torch.randint(118, 122, (rows, columns // 32), dtype=torch.uint8),
    }


def _int8(rows: int, columns: int) -> Tensors:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    return {".weight": codes, ".weight_scale": _scales(rows, 1) * 0.05}


def _awq(has_zeros: bool) -> Case:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": has_zeros, "version": "gemm"}

    def make(rows: int, columns: int) -> Tensors:
        tensors = {".qweight": _words(columns, rows // 8), ".scales": _scales(columns // 32, rows, dtype=torch.float16)}
        return tensors | ({".qzeros": _words(columns // 32, rows // 8)} if has_zeros else {})

    scheme = {"num_bits": 4, "type": "int", "symmetric": not has_zeros, "strategy": "group", "group_size": 32}
    compressed = _compressed("pack-quantized", make, 0, **scheme)

    def weight_of(tensors: Tensors) -> Tensor:
        converter = AutoAWQConverter(group_size=32, zero_point=has_zeros)
        named = converter.process({f"m{name}": each.clone() for name, each in tensors.items()})
        named["m.weight_scale"] = named["m.weight_scale"].float()
        return compressed.weight_of({name[1:]: each for name, each in named.items()})

    return Case(config, make, weight_of, 0.5 + (8 if has_zeros else 4) / 32)


def _gptq(bits: int, is_symmetric: bool, has_order: bool, version: str = "gptq") -> Case:
    """A matrix of GPTQ, whose oracle takes each column's numbers from their words by shifts."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": is_symmetric, "desc_act": has_order}
    per_word, most = 32 // bits, 2**bits - 1

    def make(rows: int, columns: int) -> Tensors:
        groups = torch.arange(columns) // 32
        middle = sum(((most + 1) // 2 - 1) << (bits * i) for i in range(per_word))
        zeros = torch.full((columns // 32, rows // per_word), middle)
        return {
            ".qweight": _words(columns // per_word, rows),
            ".qzeros": zeros.to(torch.int32) if is_symmetric else _words(columns // 32, rows // per_word),
            ".scales": _scales(columns // 32, rows, dtype=torch.float16) * (1 if bits == 4 else 0.05),
            ".g_idx": (groups[torch.randperm(columns)] if has_order else groups).int(),
        }

    def weight_of(tensors: Tensors) -> Tensor:
        words, zeros = tensors[".qweight"].long(), tensors[".qzeros"].long()
        rows, columns = words.shape[1], words.shape[0] * per_word
        weight, n = torch.empty(rows, columns), torch.arange(rows)
        for k in range(columns):
            group = int(tensors[".g_idx"][k])
            codes = words[k // per_word] >> bits * (k % per_word) & most
            stored = zeros[group, n // per_word] >> bits * (n % per_word) & most
            weight[:, k] = tensors[".scales"][group].float() * (codes - (stored + (version == "gptq")))
        return weight

    per_group = 4 if is_symmetric else 8
    config |= {"checkpoint_format": version}
    return Case(config, make, weight_of, bits / 8 + per_group / 32)


def _modelopt_nvfp4() -> Case:
    def make(rows: int, columns: int) -> Tensors:
        tensors = _nvfp4(rows, columns)
        found = {".weight": tensors[".weight_packed"], ".weight_scale": tensors[".weight_scale"]}
        return found | {".weight_scale_2": torch.tensor(1 / 9000.0), ".input_scale": torch.tensor(1.0)}

    def weight_of(tensors: Tensors) -> Tensor:
        named = {f"m{name}": each for name, each in tensors.items()}
        converted = ModelOptNvfp4Converter(targets=["re:m"]).process(named)
        return CASES["compressed-tensors nvfp4"].weight_of(
            {name[1:]: each for name, each in converted.items() if "input" not in name}
        )

    return Case({"quant_method": "modelopt", "quant_algo": "NVFP4"}, make, weight_of, 0.5 + 4 / 16)


NF4 = (-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.07958030)
NF4 += (0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0)


def _nf4(is_nested: bool) -> Case:
    """A matrix of bitsandbytes, whose oracle takes element after element."""
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

    def make(rows: int, columns: int) -> Tensors:
        count = rows * columns // 64
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
        found = {".weight": torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8)}
        found |= {".weight.absmax": _scales(count) * 4, ".weight.quant_map": torch.tensor(NF4)}
        if is_nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.04}
            found[".weight.absmax"] = torch.randint(0, 256, (count,), dtype=torch.uint8)
            found[".weight.nested_absmax"] = _scales(-(-count // 256))
            found[".weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        return found | {".weight.quant_state.bitsandbytes__nf4": text}

    def weight_of(tensors: Tensors) -> Tensor:
        state = json.loads(bytes(tensors[".weight.quant_state.bitsandbytes__nf4"].tolist()))
        values, scales = [], tensors[".weight.absmax"].tolist()
        if is_nested:
            table, nested = tensors[".weight.nested_quant_map"].tolist(), tensors[".weight.nested_absmax"].tolist()
            scales = [table[code] * nested[i // 256] + state["nested_offset"] for i, code in enumerate(scales)]
        for byte in tensors[".weight"].flatten().tolist():
            values += [NF4[byte // 16], NF4[byte % 16]]
        return torch.tensor([value * scales[i // 64] for i, value in enumerate(values)]).view(state["shape"])

    return Case(config, make, weight_of, 0.5 + 4 / 64)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
CASES: dict[str, Case] = {
    "fp8 blocks": _fp8((32, 32), ".weight_scale_inv", _FP8 | {"weight_block_size": [32, 32]}, 1 + 4 / 1024),
    "fp8 uneven blocks": _fp8((40, 48), ".weight_scale_inv", _FP8 | {"weight_block_size": [40, 48]}, 1 + 4 / 1920),
    "fp8 tensor": _fp8(None, ".weight_scale", _FP8, 1),
    "mxfp8": _mxfp8(".weight_scale_inv", _FP8 | {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
    "modelopt mxfp8": _mxfp8(".weight_scale", {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "fbgemm_fp8": _fp8((1, 10**6), ".weight_scale", {"quant_method": "fbgemm_fp8"}, 1 + 4 / 64),
    "modelopt fp8": _fp8(None, ".weight_scale", {"quant_method": "modelopt", "quant_algo": "FP8"}, 1),
    "compressed-tensors fp8": _compressed(
        *("float-quantized", lambda n, k: {".weight": _e4m3(n, k), ".weight_scale": _scales(n, 1)}, 1 + 4 / 64),
        num_bits=8,
        type="float",
        strategy="channel",
    ),
    "compressed-tensors w8a8": _compressed("int-quantized", _int8, 1 + 4 / 64, num_bits=8, strategy="channel"),
    "compressed-tensors w8a16": _compressed(
        *("pack-quantized", _packed_words(8, None, True), 1 + 4 / 64), num_bits=8, strategy="channel"
    ),
    "compressed-tensors w4a16": _compressed("pack-quantized", _packed_words(4, 32, True), 0.5 + 4 / 32, **_GROUPS),
    "compressed-tensors w4a16 zeros": _compressed(
        *("pack-quantized", _packed_words(4, 32, False), 0.5 + 8 / 32), **_GROUPS, symmetric=False
    ),
    "compressed-tensors nvfp4": _compressed(
        *("nvfp4-pack-quantized", _nvfp4, 0.5 + 4 / 16),
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
    ),
    "compressed-tensors mxfp4": _compressed(
        *("mxfp4-pack-quantized", _mxfp4, 0.5 + 2 / 32),
        num_bits=4,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype="uint8",
    ),
    "awq": _awq(has_zeros=True),
    "awq without zeros": _awq(has_zeros=False),
    "gptq": _gptq(4, is_symmetric=False, has_order=False),
    "gptq symmetric": _gptq(4, is_symmetric=True, has_order=False),
    "gptq act-order": _gptq(4, is_symmetric=False, has_order=True),
    "gptq 8 bits": _gptq(8, is_symmetric=False, has_order=False),
    "gptq v2": _gptq(4, is_symmetric=False, has_order=False, version="gptq_v2"),
    "modelopt nvfp4": _modelopt_nvfp4(),
    "bitsandbytes nf4": _nf4(is_nested=False),
    "bitsandbytes nested nf4": _nf4(is_nested=True),
}
"""Every form that is read, by a name for tests."""


def write(path: Path, case: Case, architecture: str = "llama", sizes: dict[str, Any] | None = None) -> PreTrainedModel:
    """Write a checkpoint whose projections are packed, and return transformers' model of the weights that it means."""
    return pack(path, case, build(architecture, SIZES if sizes is None else sizes))


def pack(path: Path, case: Case, module: PreTrainedModel) -> PreTrainedModel:
    """Write a checkpoint of `module` with packed projections in its decoder, and give `module` those weights."""
    module.save_pretrained(path)
    tensors = dict(module.state_dict())
    decoder = {id(each) for each in module.get_decoder().modules()}
    torch.manual_seed(0)
    for name, linear in module.named_modules():
        if type(linear) is nn.Linear and id(linear) in decoder:
            made = case.make(*linear.weight.shape)
            linear.weight.data.copy_(case.weight_of(made))
            tensors |= {f"{name}{suffix}": each for suffix, each in made.items()}
            if ".weight" not in made:
                tensors.pop(f"{name}.weight")
    save(path, tensors, case.config)
    return module


def save(path: Path, tensors: Tensors, quantisation: dict[str, Any] | None) -> None:
    """Replace the tensors of a checkpoint, and say in its configuration how they are packed; None: they are plain."""
    contiguous = {name: each.contiguous().clone() for name, each in tensors.items()}
    save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {} if quantisation is None else {"quantization_config": quantisation}
    (path / "config.json").write_text(json.dumps(config))


def mxfp4_experts(tensors: Tensors) -> Tensors:
    """Put experts of gpt-oss in MXFP4, at random, in the place of their weights; return the weights that these mean."""
    weights: Tensors = {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return weights
