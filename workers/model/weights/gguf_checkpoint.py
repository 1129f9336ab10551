"""A GGUF file as a Hugging Face directory whose matrices stay packed."""

import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from crossdock.workers.model.weights.gguf import converting
from crossdock.workers.model.weights.gguf_blocks import BLOCK_TYPES, Codes
from crossdock.workers.model.weights.gguf_config import as_written, config_of
from crossdock.workers.model.weights.gguf_keys import TENSORS, Metadata, pattern_of
from crossdock.workers.model.weights.gguf_tokenizer import NO_TOKENIZER, save_tokenizer, tokenizer_fault
from crossdock.workers.model.weights.untrusted import check_gguf, naming

logger = logging.getLogger(__name__)

_FLOATS = ("F32", "F16", "BF16")
_SHARD_BYTES = 2 << 30
Forms = dict[tuple[str, int, bool], list[str]]  # (kind, group, has offsets): modules, with wildcards for experts

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_WITH_EXPERTS = ("qwen2moe", "qwen3moe")
"""Architectures whose experts are read, [E, N, K] in one tensor."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}


def pack_gguf(gguf: Path, target: Path) -> None:
    """Write configuration, tokenizer and weights of a GGUF file to a new directory.

    Raises:
        ValueError: tensors are of types that are not read, or transformers knows no such architecture, or the file is
            of another kind.
    """
    check_gguf(gguf)
    with naming(gguf), converting(gguf) as reader:
        _pack(gguf, reader, target)


def _pack(gguf: Path, reader: GGUFReader, target: Path) -> None:
    metadata = Metadata(gguf, reader.fields)
    architecture = metadata.architecture
    if architecture == "clip":
        raise ValueError(f"model {gguf} is an encoder of pictures (mmproj); serve the safetensors form of the model")
    if (parts := reader.fields.get("split.count")) is not None and parts.contents() > 1:
        raise ValueError(
            f"model {gguf} is one of {parts.contents()} files of a model; join them with llama.cpp's llama-gguf-split "
            f"--merge, and serve the one file"
        )
    _refuse_unread(gguf, reader, architecture in _WITH_EXPERTS)
    config: Any = config_of(metadata, {tensor.name: tensor for tensor in reader.tensors})
    config.update({"dtype": "bfloat16"})
    sampling = _sampling(metadata)
    why_no_tokenizer = tokenizer_fault(metadata)
    metadata.check_rest()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    _check_places(gguf, reader, places, architecture in _WITH_EXPERTS)
    target.mkdir()
    if why_no_tokenizer:
        (target / NO_TOKENIZER).write_text(f"model {gguf}: {why_no_tokenizer}")
    else:
        save_tokenizer(gguf, target, metadata, config.max_position_embeddings)
    forms: Forms = defaultdict(list)
    _save_shards(target, _tensors(reader, processor, places, forms))
    listed = [
        {"kind": kind, "group": group, "has_offsets": has_offsets, "modules": modules}
        for (kind, group, has_offsets), modules in forms.items()
    ]
    # Without the path of the file, so that copies on other machines have the same fingerprint.
    values = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
    values |= {"quantization_config": {"quant_method": "gguf", "forms": listed}}
    values["architectures"] = [type(model).__name__]
    (target / "config.json").write_text(json.dumps(values, indent=2, default=str) + "\n")
    if sampling:
        (target / "generation_config.json").write_text(json.dumps(sampling, indent=2) + "\n")


def _sampling(metadata: Metadata) -> dict[str, Any]:
    """Return the sampling that a file recommends, as a generation_config.json."""
    found = {name: metadata.take(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    if others := metadata.names("general.sampling.*"):
        logger.warning("not read of the sampling that the file recommends: %s", ", ".join(sorted(others)))
    given = {name: value for name, value in found.items() if value is not None}
    return {name: as_written(value) if isinstance(value, float) else value for name, value in given.items()}


def _check_places(gguf: Path, reader: GGUFReader, places: Mapping[str, str], has_experts: bool) -> None:
    """Check that each tensor has a place, or is known. ValueError: one has not; the message names the tensor."""
    for tensor in reader.tensors:
        if tensor.name in places or pattern_of(TENSORS, tensor.name):
            continue
        if has_experts and _EXPERTS.fullmatch(tensor.name):
            continue
        raise ValueError(
            f"model {gguf}: the tensor {tensor.name} is not known, and may change what the model computes; serve a "
            f"safetensors form of the model"
        )


def _refuse_unread(gguf: Path, reader: GGUFReader, has_experts: bool) -> None:
    read = (*_FLOATS, *BLOCK_TYPES)
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in read:
            raise ValueError(
                f"model: {gguf}: {tensor.name} is of type {tensor.tensor_type.name}, which is not read; read are "
                f"{', '.join(read)}"
            )
        if len(tensor.shape) > 2 and not (has_experts and _EXPERTS.fullmatch(tensor.name)):
            raise ValueError(
                f"model: {gguf}: {tensor.name}: experts in GGUF are read of {' and '.join(_WITH_EXPERTS)} alone; serve "
                f"a safetensors form"
            )


def _tensors(
    reader: GGUFReader, processor: TensorProcessor, places: Mapping[str, str], forms: Forms
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint by name, and note in `forms` how those of a module are packed."""
    for tensor in reader.tensors:
        if experts := _EXPERTS.fullmatch(tensor.name):
            yield from _experts(tensor, f"model.layers.{experts[1]}.mlp.experts", experts[2], forms)
            continue
        if tensor.name not in places:  # read with the configuration, or without effect: `_check_places`
            continue
        name = places[tensor.name]
        kind = tensor.tensor_type.name
        if kind in _FLOATS or len(tensor.shape) < 2:
            weights = dequantize(tensor.data, tensor.tensor_type)
            yield name, _floats(processor.process(weights=weights, name=tensor.name).weights)
            continue
        block = BLOCK_TYPES[kind]
        rows = len(tensor.data)
        columns = int(tensor.shape[0])
        order = processor.process(weights=np.arange(rows)[:, None], name=tensor.name).weights[:, 0]
        if sorted(order) != list(range(rows)):
            raise ValueError(
                f"{tensor.name}: transformers changes its numbers as it reads, which packed ones cannot be"
            )
        module = name.removesuffix(".weight")
        codes = block.unpack(tensor.data.reshape(rows, columns // block.block, -1)[order])
        forms[block.kind, block.group, codes.offsets is not None].append(module)
        yield from _packed(module, codes, block.kind)


def _experts(tensor: Any, path: str, name: str, forms: Forms) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices [N, K] of experts, each under the name that safetensors forms of the model have."""
    block = BLOCK_TYPES.get(tensor.tensor_type.name)
    for number, data in enumerate(tensor.data):
        module = f"{path}.{number}.{name}_proj"
        if block is None:
            yield f"{module}.weight", _floats(dequantize(data, tensor.tensor_type))
            continue
        codes = block.unpack(data.reshape(len(data), int(tensor.shape[0]) // block.block, -1))
        yield from _packed(module, codes, block.kind)
    if block is not None:  # "gate_*" is also the one parameter that the model makes of gates and ups
        forms[block.kind, block.group, codes.offsets is not None].append(f"{path}.*.{name}_*")


def _packed(module: str, found: Codes, kind: str) -> Iterator[tuple[str, Tensor]]:
    codes = found.codes[:, ::2] | found.codes[:, 1::2] << 4 if kind == "int4" else found.codes
    yield f"{module}.codes", torch.from_numpy(np.ascontiguousarray(codes))
    yield f"{module}.scales", torch.from_numpy(found.scales)
    if found.offsets is not None:
        yield f"{module}.offsets", torch.from_numpy(found.offsets)


def _floats(weights: Any) -> Tensor:
    return torch.from_numpy(np.array(weights, np.float32))


def _save_shards(target: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors to files of about 2 GiB, of which no more is in memory, and their index."""
    shard: dict[str, Tensor] = {}
    files: dict[str, str] = {}

    def save() -> None:
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        save_file(shard, target / name, {"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor
        if sum(each.nbytes for each in shard.values()) > _SHARD_BYTES:
            save()
    if shard:
        save()
    index = {"metadata": {}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
