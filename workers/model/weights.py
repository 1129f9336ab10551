"""One rank's part of a checkpoint: of every tensor in its safetensors files, what the rank holds is read, and no more.

transformers loads as ever (names, merged experts, data types, ties); between its steps the module is cut while it is on
the meta device, and what it reads the weights from gives the rank's slices only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.part import ModelPart, TensorSlice
from crossdock.workers.model.cut.position import CannotCut, RankPosition


def load_part(
    config: PretrainedConfig, path: Path, place: RankPosition, links: Collectives | None, **options: Any
) -> tuple[Any, ModelPart]:
    """The part at `place` of the model in a Hugging Face directory; `options` are `from_pretrained`'s.

    Raises:
        CannotCut: the model cannot be divided so.
        ValueError: the checkpoint lacks weights.
    """
    whole = AutoModelForCausalLM._model_mapping[type(config)]
    parts: list[ModelPart] = []

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # of the class made below
        whole.__init__(self, *args, **kwargs)
        parts.append(cut_model(self, place, links))

    def _load_pretrained_model(model: Any, state_dict: Any, files: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return whole._load_pretrained_model(model, _slices(model, parts[0], files), None, *args, **kwargs)

    steps = {"__init__": __init__, "_load_pretrained_model": staticmethod(_load_pretrained_model)}
    # Of the same name and module: transformers looks up by them what checkpoints of this model need.
    mine = type(whole.__name__, (whole,), {"__module__": whole.__module__, **steps})
    module, found = mine.from_pretrained(  # type: ignore[attr-defined]
        path, config=config, use_safetensors=True, output_loading_info=True, **options
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{path} has no weights for {', '.join(missing[:4])}{' and others' * (len(missing) > 4)}")
    return module, parts[0]


def measure_part(config: PretrainedConfig, place: RankPosition, dtype: torch.dtype) -> int:
    """Bytes of the weights that the rank at `place` would hold. CannotCut: there is no such part."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
        cut_model(module, place, None)
    tied = set(getattr(module, "all_tied_weights_keys", ()))
    return sum(value.nbytes for name, value in module.state_dict().items() if name not in tied)


def check_division(path: Path, tensor_size: int, num_stages: int) -> None:
    """Raises CannotCut, with the reason, if the model in a Hugging Face directory cannot be divided among so many."""
    config = AutoConfig.from_pretrained(path)
    for rank in range(tensor_size * num_stages):
        measure_part(config, RankPosition(rank, tensor_size, num_stages), torch.float32)


class _Slice:
    """What transformers takes for a safetensors slice: asked for all, it gives this rank's part."""

    def __init__(self, source: Any, where: TensorSlice | None, num_dims: int) -> None:
        self._source, self._where, self._num_dims = source, where, num_dims

    def __getitem__(self, key: Any) -> Tensor:
        assert key is ...
        tensor: Tensor = self._source[...] if self._where is None else self._where.read(self._source, self._num_dims)
        return tensor

    def get_dtype(self) -> Any:
        return self._source.get_dtype()


def _slices(model: Any, part: ModelPart, files: Sequence[str]) -> dict[str, _Slice]:
    """By name in the checkpoint, for every tensor that this rank needs some of."""
    held = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    operations = {pattern: entry.operations for entry in converters for pattern in entry.source_patterns}
    found: dict[str, _Slice] = {}
    for file in files:
        # Not by mmap: pages of the file would count as this process's memory.
        reader: Any = safe_open(file, framework="pt", device="cpu", backend="pread")
        for key in reader.keys():  # noqa: SIM118  # it is no mapping
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, held)
            if name not in held:
                continue
            where = part.slices.get(name)
            if where is not None and pattern is not None:
                for operation in operations[pattern]:
                    if not isinstance(operation, MergeModulelist | Concatenate):
                        raise CannotCut(
                            f"{model.config.model_type}: {key} must be converted ({operation}) before it can be "
                            f"divided; load and save the model with transformers once, and serve that"
                        )
            found[key] = _Slice(reader.get_slice(key), where, held[name].dim())
    return found
