"""One rank's part of a checkpoint: of every tensor in its safetensors files, only the rank's slice is read.

transformers does the loading (names, merged experts, data types, ties). Between its steps the module is cut while it
is on the meta device, and the source of its weights gives only the rank's slices.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    rename_source_key,
)

from crossdock.workers.model.architecture import ATTENTION_NAME, attention_names
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.part import ModelPart, TensorSlice
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.weights.scheme import PLAIN, scheme_at
from crossdock.workers.model.weights.tensor_check import check_tensors
from crossdock.workers.model.weights.weight_probe import check_products


def auto_model(config: PretrainedConfig) -> Any:
    """Return transformers' class that loads a model with its output projection, and its encoder of pictures if any."""
    has_pictures = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if has_pictures else AutoModelForCausalLM


def load_weights(
    config: PretrainedConfig,
    path: Path,
    dtype: torch.dtype,
    load: Callable[..., tuple[Any, ModelPart | None]],
    needs_all: bool = True,
) -> tuple[Any, ModelPart | None]:
    """Load the weights in `path` with `load`. Returns transformers' model or one rank's part, and which part that is.

    Without `needs_all`, `load` takes parts of the model that the checkpoint may lack.

    Raises:
        ValueError: transformers lets no other attention into the model; or there are no weights in safetensors, or
            others than the model's; or they are stored in a way that is not read.
    """
    scheme = scheme_at(path)
    for each in (config, config.get_text_config(decoder=True)):
        if scheme is not PLAIN and isinstance(getattr(each, "quantization_config", None), dict):
            each.quantization_config["dequantize"] = True  # else transformers fetches kernels from the hub on GPUs
    try:
        named = check_tensors(auto_model(config), config, path, dtype, scheme, needs_all)
        module, part = load(dtype=dtype, attn_implementation=attention_names(config))
    except OSError as error:
        if any(path.glob("*.safetensors")):
            raise
        raise ValueError(
            f"model directory {path} has no weights in *.safetensors, the only format that is loaded; "
            f"transformers' save_pretrained writes them"
        ) from error
    except ValueError as error:
        if ATTENTION_NAME not in str(error) and "attn_implementation" not in str(error):
            raise
        raise ValueError(f"{config.model_type}: transformers gives it no pluggable attention") from error
    if scheme is not PLAIN:  # transformers leaves plain weights beside packed ones in the dtype of their file
        for name, parameter in module.named_parameters():
            parameter.data = parameter.data.to(named.dtype_of(name, parameter.dtype))
    check_products(module, part, named)
    return module, part


def load_whole(config: PretrainedConfig, path: Path, **options: Any) -> tuple[Any, None]:
    # Other formats are pickles: to load them is to run code that the checkpoint brings.
    options |= {"low_cpu_mem_usage": True, "use_safetensors": True, "trust_remote_code": False}
    return auto_model(config).from_pretrained(path, config=config, **options), None


def load_part(
    config: PretrainedConfig, path: Path, position: RankPosition, collectives: Collectives | None, **options: Any
) -> tuple[Any, ModelPart]:
    """Load the part at `position` of the model in a Hugging Face directory. `options` are `from_pretrained`'s.

    Raises:
        CannotCut: the model cannot be divided among so many ranks.
        ValueError: the checkpoint lacks weights.
    """
    return load_cut(config, path, lambda module: cut_model(module, position, collectives), **options)


def load_cut(
    config: PretrainedConfig, path: Path, cut: Callable[[Any], ModelPart], **options: Any
) -> tuple[Any, ModelPart]:
    """Load the part of a Hugging Face directory's model that `cut` leaves. Returns it, and the result of `cut`.

    `cut` gets the model while it is on the meta device. `options` are `from_pretrained`'s.

    Raises:
        CannotCut: `cut` cannot divide the model so.
        ValueError: the checkpoint lacks weights.
    """
    _check_is_cut(path)
    whole = auto_model(config)._model_mapping[type(config)]
    parts: list[ModelPart] = []

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # of the class made below
        whole.__init__(self, *args, **kwargs)
        parts.append(cut(self))

    def _load_pretrained_model(model: Any, state_dict: Any, files: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        return whole._load_pretrained_model(model, _slices(model, parts[0], files), None, *args, **kwargs)

    steps = {"__init__": __init__, "_load_pretrained_model": staticmethod(_load_pretrained_model)}
    # The same name and module as the whole class: by these transformers looks up the conversions of a checkpoint.
    part_class = type(whole.__name__, (whole,), {"__module__": whole.__module__, **steps})
    module, report = part_class.from_pretrained(  # type: ignore[attr-defined]
        path, config=config, use_safetensors=True, output_loading_info=True, **options
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"{path} has no weights for {', '.join(missing[:4])}{' and others' * (len(missing) > 4)}")
    return module, parts[0]


def measure_part(config: PretrainedConfig, position: RankPosition, dtype: torch.dtype) -> int:
    """Return the bytes of the weights that the rank at `position` would hold.

    Raises:
        CannotCut: there is no such part.
    """
    module = model_on_meta(config, position, dtype)
    tied = set(getattr(module, "all_tied_weights_keys", ()))
    return sum(value.nbytes for name, value in module.state_dict().items() if name not in tied)


def model_on_meta(config: PretrainedConfig, position: RankPosition, dtype: torch.dtype) -> Any:
    """Return the part of the rank at `position` on the meta device. CannotCut: there is no such part."""
    with torch.device("meta"):
        module = auto_model(config).from_config(config, dtype=dtype)
        cut_model(module, position, None)
    return module


def check_division(path: Path, tensor_size: int, num_stages: int) -> None:
    """Check that the model in a Hugging Face directory can be divided among so many ranks.

    Raises:
        CannotCut: with the reason.
    """
    _check_is_cut(path)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for rank in range(tensor_size * num_stages):
        measure_part(config, RankPosition(rank, tensor_size, num_stages), torch.float32)


def _check_is_cut(path: Path) -> None:
    if (scheme := scheme_at(path)) is not PLAIN:
        raise CannotCut(
            f"{path}: weights in {scheme.method} are read whole, for a part of them has no scales; set "
            f"tensor_parallel_size and pipeline_parallel_size 1, or serve the checkpoint that it was made from"
        )


class _WeightSource:
    """Stands in for a safetensors slice: when transformers reads all of it, it gives this rank's part.

    `transposed` are two dimensions that the checkpoint has the other way round. The part has the parameter's order, in
    which transformers leaves it.
    """

    def __init__(
        self, source: Any, kept: TensorSlice | None, num_dims: int, transposed: tuple[int, int] | None = None
    ) -> None:
        self._source, self._kept, self._num_dims, self._transposed = source, kept, num_dims, transposed

    def __getitem__(self, key: Any) -> Tensor:
        assert key is ...
        if self._kept is None:
            return self._source[...]  # type: ignore[no-any-return]
        if self._transposed is None:
            return self._kept.read(self._source, self._num_dims)
        return self._kept.transposed(*self._transposed).read(self._source, self._num_dims).transpose(*self._transposed)

    def get_dtype(self) -> Any:
        return self._source.get_dtype()


def _slices(model: Any, part: ModelPart, files: Sequence[str]) -> dict[str, _WeightSource]:
    """Return a source for every tensor of which this rank needs some, by its name in the checkpoint."""
    held = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in mapping if not isinstance(entry, WeightConverter)]
    operations = {pattern: entry.operations for entry in converters for pattern in entry.source_patterns}
    sources: dict[str, _WeightSource] = {}
    for file in files:
        # Not by mmap: pages of the file would count as this process's memory.
        reader: Any = safe_open(file, framework="pt", device="cpu", backend="pread")
        for key in reader.keys():  # noqa: SIM118  # the reader is no mapping
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, held)
            if name not in held:
                continue
            kept, source, transposed = part.slices.get(name), reader.get_slice(key), None
            if kept is not None and pattern is not None:
                for operation in operations[pattern]:
                    if isinstance(operation, Transpose) and operation.check_dims:
                        is_in_order = source.get_shape() == kept.whole_shape(held[name].shape)
                        transposed = None if is_in_order else (operation.dim0, operation.dim1)
                    elif not isinstance(operation, MergeModulelist | Concatenate):
                        raise CannotCut(
                            f"{model.config.model_type}: transformers converts {key} ({operation}) as it loads, and a "
                            f"part of it cannot be; set tensor_parallel_size 1: stages divide whole layers"
                        )
            sources[key] = _WeightSource(source, kept, held[name].dim(), transposed)
    return sources
