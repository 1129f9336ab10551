"""Compare the tensors in a checkpoint's files with those of the model, before any of them is read.

transformers loads what has a place, fills the rest with random numbers, and mentions both in its log. So its own
renaming and merging run here first, over tensors that have names, dtypes and shapes but no bytes.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from crossdock.workers.model.architecture import is_classifier
from crossdock.workers.model.loaders.file_slice import DTYPES, FLOATS
from crossdock.workers.model.weights.packed_layers import forms_at_load
from crossdock.workers.model.weights.scheme import PLAIN, PackedForm, Scheme
from crossdock.workers.model.weights.stored_tensors import PackedTensor, StoredTensor, stored_in
from crossdock.workers.model.weights.untrusted import naming

_EXPERTS = re.compile(r"\.experts\.(gate_up|gate|up|down)_proj$")  # those that are one parameter
_MOST_NAMED = 3  # tensors of one kind of fault

ChosenTensors: TypeAlias = Callable[[Mapping[str, StoredTensor]], dict[str, StoredTensor]]
"""Returns those tensors of a checkpoint that belong to a part of its model, by the names that this part has for them.
"""


class NamedTensors:
    """The tensors of a checkpoint by their names in the files, and the parameter of the model that each belongs to."""

    def __init__(self, model: Any, stored: dict[str, StoredTensor], dtype: torch.dtype) -> None:
        self.stored = stored
        self.mapping = get_model_conversion_mapping(model)
        self.dtype_plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)  # of parameters that stay in float32
        self._prefix, self._held = model.base_model_prefix, model.state_dict()

    def shape_of(self, name: str) -> list[int]:
        """Return the shape of a parameter of the whole model."""
        return list(self._held[name].shape) if name in self._held else []

    def places(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield (name in the file, name in the model, pattern by which transformers converts it or None)."""
        mapping = copy.deepcopy(self.mapping)  # some renamings remember what they have seen
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
        for key in sorted(self.stored):
            name, pattern = rename_source_key(key, renamings, converters, self._prefix, self._held)
            yield (key, key, None) if name not in self._held and key in self._held else (key, name, pattern)

    def packed(self) -> dict[str, list[PackedTensor]]:
        """Return the packed tensors of each parameter that has no others, in the order in which it holds them.

        An expert's tensors are one after the other. Parameters are left out whose tensors transformers converts in
        another way than by merging those of experts.
        """
        found: dict[str, list[tuple[int, int, PackedTensor]]] = defaultdict(list)
        others = set()
        for key, name, pattern in self.places():
            tensor = self.stored[key]
            number = self._number_of(pattern)
            expert = expert_of(key)
            if isinstance(tensor, PackedTensor) and number >= 0:
                found[name].append((expert, number, tensor))
            else:
                others.add(name)
        return {
            name: [tensor for _, _, tensor in sorted(sources, key=lambda source: source[:2])]
            for name, sources in found.items()
            if name not in others
        }

    def _number_of(self, pattern: str | None) -> int:
        """Return which of the patterns of a merge of experts this is; 0 without a merge, -1 of another conversion."""
        for entry in self.mapping:
            if isinstance(entry, WeightConverter) and pattern in entry.source_patterns:
                is_merge = all(
                    (isinstance(operation, MergeModulelist) and operation.dim == 0)
                    or (isinstance(operation, Concatenate) and operation.dim == 1)
                    for operation in entry.operations
                )
                return entry.source_patterns.index(pattern) if is_merge else -1
        return 0

    def round(self, forms: Mapping[str, PackedForm]) -> None:
        """Let the tensors of the parameters in `forms` be read as packed ones.

        Raises:
            ValueError: there are none, or transformers converts one in a way that no packed one can take.
        """
        if not forms:
            raise ValueError("quantization fp8: the decoder has no linears to round; serve it without --quantization")
        plain = [name for name in self._held if _EXPERTS.search(name) and name not in forms]
        if plain:
            raise ValueError(
                f"quantization fp8: {plain[0]} holds experts that no code here reads one at a time, and would stay "
                f"plain; serve this model without --quantization"
            )
        for key, name, pattern in list(self.places()):
            if name not in forms:
                continue
            if self._number_of(pattern) < 0:
                raise ValueError(
                    f"quantization fp8: {key} is converted as it is loaded, and cannot be rounded before that; serve "
                    f"this model without --quantization"
                )
            self.stored[key] = PackedTensor(forms[name], {"codes": self.stored[key]})

    def of_other_kinds(self) -> Iterator[str]:
        """Yield each tensor, as text, whose elements are not of the kind that its parameter holds."""
        for key, name, _ in self.places():
            if name not in self._held:
                continue
            dtype = self.stored[key].dtype
            needs_floats = self._held[name].is_floating_point()
            if (dtype in FLOATS) != needs_floats:
                yield f"{key} ({dtype}, expected {'floats' if needs_floats else 'integers'})"


def expert_of(key: str) -> int:
    """Return the number of the expert whose tensor this is, by its name in a file, where each expert has its own."""
    return int((re.findall(r"\.(\d+)\.", key) or ["0"])[-1])


def check_tensors(
    model_class: Any,
    config: PretrainedConfig,
    path: Path,
    dtype: torch.dtype,
    scheme: Scheme,
    chosen: ChosenTensors | None = None,
) -> NamedTensors:
    """Check that the files in `path` hold every tensor of the model, of its shape and kind, and no other.

    `model_class` is one of transformers' auto classes. `scheme`: of the weights once they are loaded. `chosen`: see
    `ChosenTensors`; None: all tensors.

    Raises:
        OSError: there are no weights in safetensors.
        ValueError: some tensors are others; the message names them.
    """
    stored = stored_in(config, path, PLAIN if scheme.is_made_at_load else scheme)
    if chosen is not None:
        stored = stored._replace(tensors=chosen(stored.tensors))
    unread = [f"{key} ({each.dtype})" for key, each in stored.tensors.items() if each.dtype not in DTYPES]
    if unread or stored.faults:
        raise ValueError(_message(path, {"of a dtype that is not read": unread, "of another kind": stored.faults}))
    with naming(path / "config.json", kept=(ValueError,)), torch.device("meta"):
        model = model_class.from_config(config, dtype=dtype)
    named = NamedTensors(model, stored.tensors, dtype)
    faults = {"of another kind": list(named.of_other_kinds())}
    report = _load_without_bytes(model, named, dtype)
    faults |= {
        "without a place in the model": [name for name in report.unexpected_keys if not _is_harmless(name, config)],
        "missing": list(report.missing_keys),
        "of another shape": [
            f"{name} {list(found)}, expected {list(expected)}" for name, found, expected in report.mismatched_keys
        ],
        "that cannot be merged": list(report.conversion_errors),
    }
    if any(faults.values()):
        raise ValueError(_message(path, faults))
    if scheme.is_made_at_load:
        named.round(forms_at_load(model, scheme))
    return named


def _load_without_bytes(model: Any, named: NamedTensors, dtype: torch.dtype) -> Any:
    """Load tensors without bytes into a model on the meta device. Returns transformers' report."""
    options = LoadStateDictConfig(
        device_map={"": "meta"},
        dtype=dtype,
        dtype_plan=named.dtype_plan,
        weight_mapping=copy.deepcopy(named.mapping),
    )
    with _no_progress_bar():
        report, _ = convert_and_load_state_dict_in_model(model, dict(named.stored), options)
    model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(report)
    return report


def _is_harmless(name: str, config: PretrainedConfig) -> bool:
    """Report whether a tensor without a place does not change tokens: of layers that guess further tokens, masks, or a
    head that is applied elsewhere."""
    if name == "score.weight" and is_classifier(config.architectures):
        return True
    if re.search(r"(^|\.)mtp\.|\.attn\.masked_bias$|^h\.\d+\.attn\.bias$|^transformer\.h\.\d+\.attn\.bias$", name):
        return True
    decoder = config.get_text_config(decoder=True)
    layer = re.search(r"\blayers\.(\d+)\.", name)
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
