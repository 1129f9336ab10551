"""Compare the tensors in a checkpoint's files with those of the model, before any of them is read.

transformers loads what has a place, fills the rest with random numbers, and mentions both in its log. So its own
renaming, merging and dequantisation run here first, over tensors that have names, dtypes and shapes but no bytes.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import DownloadKwargs, LoadStateDictConfig, _get_resolved_checkpoint_files
from transformers.quantizers.auto import get_hf_quantizer
from transformers.utils import logging

from crossdock.workers.model.weights.scheme import Scheme

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = _FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_OF_SCALES = {*_FLOATS, "F8_E8M0", "U8"}
_MOST_NAMED = 3  # tensors of one kind of fault


class StoredTensor:
    """A tensor in a file of a checkpoint. Stands in for a slice of safetensors, and gives a tensor without bytes."""

    def __init__(self, file: str, dtype: str, shape: list[int]) -> None:
        self.file, self.dtype, self.shape = file, dtype, shape

    def __getitem__(self, _everything: Any) -> Tensor:
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype], device="meta")

    def get_dtype(self) -> str:
        return self.dtype

    def get_shape(self) -> list[int]:
        return self.shape


class NamedTensors:
    """The tensors of a checkpoint by their names in the files, and the parameter of the model that each belongs to."""

    def __init__(self, model: Any, stored: Mapping[str, StoredTensor], dtype: torch.dtype, quantizer: Any) -> None:
        self.stored = stored
        self.mapping = get_model_conversion_mapping(model, None, quantizer)
        self.dtype_plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # of parameters that stay in float32
        self._prefix, self._held = model.base_model_prefix, model.state_dict()

    def shape_of(self, name: str) -> list[int]:
        """Return the shape of a parameter of the whole model."""
        return list(self._held[name].shape) if name in self._held else []

    def dtype_of(self, name: str, otherwise: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter; `otherwise` if the whole model has none of this name."""
        alternation, patterns, _ = build_glob_alternation(list(self.dtype_plan))
        if self.dtype_plan and (found := alternation.search(name)) and found.lastgroup:
            return self.dtype_plan[patterns[found.lastgroup]]
        return self._held[name].dtype if name in self._held else otherwise

    def keeps_values(self, pattern: str | None) -> bool:
        """Report whether transformers takes a tensor as it is, or only times its scales."""
        operations = [
            operation
            for entry in self.mapping
            if isinstance(entry, WeightConverter) and pattern in entry.source_patterns
            for operation in entry.operations
        ]
        return all(hasattr(operation, "hf_quantizer") for operation in operations)

    def places(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield (name in the file, name in the model, pattern by which transformers converts it or None)."""
        mapping = copy.deepcopy(self.mapping)  # some renamings remember what they have seen
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
        for key in sorted(self.stored):
            name, pattern = rename_source_key(key, renamings, converters, self._prefix, self._held)
            yield (key, key, None) if name not in self._held and key in self._held else (key, name, pattern)

    def of_other_kinds(self, scheme: Scheme) -> Iterator[str]:
        """Yield each tensor, as text, whose elements are not of the kind that its parameter holds."""
        places = [place for place in self.places() if place[1] in self._held]
        num_scales = Counter(name for _, name, pattern in places if is_scale(pattern))
        num_packed = Counter(name for key, name, _ in places if self.stored[key].dtype == "F8_E4M3")
        for key, name, pattern in places:
            dtype, needs_floats = self.stored[key].dtype, self._held[name].is_floating_point()
            if dtype in scheme.packed and pattern is not None and needs_floats:
                if dtype == "F8_E4M3" and num_scales[name] != num_packed[name]:
                    yield f"{key} ({dtype} without a scale)"
            elif not (dtype in _OF_SCALES if is_scale(pattern) else (dtype in _FLOATS) == needs_floats):
                yield f"{key} ({dtype}, expected {'floats' if needs_floats else 'integers'})"


def check_tensors(
    model_class: Any, config: PretrainedConfig, path: Path, dtype: torch.dtype, scheme: Scheme, needs_all: bool = True
) -> NamedTensors:
    """Check that the files in `path` hold every tensor of the model, of its shape and kind, and no other.

    `model_class` is one of transformers' auto classes. Tensors may be missing unless `needs_all`.

    Raises:
        OSError: there are no weights in safetensors.
        ValueError: some tensors are others; the message names them.
    """
    config = copy.deepcopy(config)
    stored = dict(_stored_tensors(config, path))
    if unread := [f"{key} ({tensor.dtype})" for key, tensor in stored.items() if tensor.dtype not in _DTYPES]:
        raise ValueError(_message(path, {"of a dtype that is not read": unread}))
    quantizer, config, _ = get_hf_quantizer(config, None, None, True, {})
    with torch.device("meta"):
        model = model_class.from_config(config, dtype=dtype)
    if quantizer is not None:
        quantizer.preprocess_model(model=model, dtype=dtype)
    named = NamedTensors(model, stored, dtype, quantizer)
    faults = {"of another kind": list(named.of_other_kinds(scheme))}
    report = _load_without_bytes(model, named, dtype, quantizer)
    faults |= {
        "without a place in the model": [name for name in report.unexpected_keys if not _is_harmless(name, config)],
        "missing": list(report.missing_keys) if needs_all else [],
        "of another shape": [
            f"{name} {list(found)}, expected {list(expected)}" for name, found, expected in report.mismatched_keys
        ],
        "that cannot be merged": list(report.conversion_errors),
    }
    if any(faults.values()):
        raise ValueError(_message(path, faults))
    return named


def _load_without_bytes(model: Any, named: NamedTensors, dtype: torch.dtype, quantizer: Any) -> Any:
    """Load tensors without bytes into a model on the meta device. Returns transformers' report."""
    options = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=dtype,
        dtype_plan=named.dtype_plan,
        hf_quantizer=quantizer,
        weight_mapping=copy.deepcopy(named.mapping),
    )
    with _no_progress_bar():
        report, _ = convert_and_load_state_dict_in_model(model, dict(named.stored), options)
    model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(report)
    return report


def _stored_tensors(config: PretrainedConfig, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    files, _ = _get_resolved_checkpoint_files(
        pretrained_model_name_or_path=str(path),
        variant=None,
        gguf_file=None,
        use_safetensors=True,
        download_kwargs=DownloadKwargs(local_files_only=True),
        user_agent={},
        is_remote_code=False,
        transformers_explicit_filename=getattr(config, "transformers_weights", None),
    )
    for file in files or ():
        with safe_open(file, framework="pt", device="cpu") as reader:
            for key in reader.keys():  # noqa: SIM118  # the reader is no mapping
                tensor = reader.get_slice(key)
                yield key, StoredTensor(file, tensor.get_dtype(), tensor.get_shape())


def is_scale(pattern: str | None) -> bool:
    """Report whether transformers converts a tensor by a pattern of scales."""
    return pattern is not None and "scale" in pattern


def _is_harmless(name: str, config: PretrainedConfig) -> bool:
    """Report whether a tensor without a place does not change tokens: of layers that guess further tokens, or masks."""
    if re.search(r"(^|\.)mtp\.|\.attn\.masked_bias$|^h\.\d+\.attn\.bias$|^transformer\.h\.\d+\.attn\.bias$", name):
        return True
    decoder, layer = config.get_text_config(decoder=True), re.search(r"\blayers\.(\d+)\.", name)
    has_more_layers = bool(getattr(decoder, "num_nextn_predict_layers", 0))
    return has_more_layers and layer is not None and int(layer[1]) >= decoder.num_hidden_layers


def _message(path: Path, faults: Mapping[str, list[str]]) -> str:
    texts = [
        f"{len(found)} tensors {fault}: {', '.join(sorted(found)[:_MOST_NAMED])}{', …' * (len(found) > _MOST_NAMED)}"
        for fault, found in faults.items()
        if found
    ]
    return (
        f"model: {path} would give wrong results: for the model that config.json describes, {'; '.join(texts)}. "
        f"Serve plain weights in safetensors, with the config.json that belongs to them"
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
