"""One rank's part of a checkpoint: of every plain tensor in its safetensors files, only the rank's slice is read.

Packed matrices are read one after the other, cut and kept packed.

transformers does the loading (names, merged experts, data types, ties). Between its steps the module is cut while it
is on the meta device, and the source of its weights gives only the rank's slices.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    dot_natural_key,
)

from crossdock.kernels.options import LoadFormat
from crossdock.workers.model.architecture import ATTENTION_NAME, attention_names, is_classifier
from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.part import ModelPart, TensorSlice
from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.loaders.files import Files, open_files
from crossdock.workers.model.loaders.held import HeldTensors
from crossdock.workers.model.loaders.objects import origin_of
from crossdock.workers.model.weights.config_fields import check_fields
from crossdock.workers.model.weights.heap import trim_heap
from crossdock.workers.model.weights.packed_layers import (
    PackedLinear,
    add_empty_slots,
    forms_at_load,
    packed_bytes,
    part_of,
    put_forms,
)
from crossdock.workers.model.weights.scheme import (
    E4M3_AT_LOAD,
    KEYS,
    PLAIN,
    PackedForm,
    Scheme,
    quantisation,
    quantisation_at,
    scheme_at,
    scheme_of,
)
from crossdock.workers.model.weights.stored_tensors import PackedTensor
from crossdock.workers.model.weights.tensor_check import (
    ChosenTensors,
    NamedTensors,
    check_tensors,
    expert_of,
)
from crossdock.workers.model.weights.untrusted import naming, read_config_file
from crossdock.workers.model.weights.weight_probe import check_products


def auto_model(config: PretrainedConfig) -> Any:
    """Return transformers' class that loads a model with its output projection, and its encoder of pictures if any."""
    has_pictures = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if has_pictures else AutoModelForCausalLM


_LOADING = Lock()
"""Transformers replaces functions of its classes while it loads: two loads at once would leave them replaced."""


def read_config(path: Path) -> PretrainedConfig:
    """Return the configuration of a Hugging Face directory, with what a file beside it says of a quantisation.

    Raises:
        ValueError: transformers cannot read it, or a field is neither read nor harmless; the message names the file.
    """
    found = read_config_file(path)
    with naming(path / "config.json", kept=(OSError,)):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
        check_fields(path / "config.json", found, config)
    if is_classifier(config.architectures):
        config.update({"tie_word_embeddings": True})  # a classifier has no output projection, and generates no text
    if quantisation(config.to_dict()) is None and (found := quantisation_at(path)) is not None:
        config.update({KEYS[0]: found})
    return config


def load_weights(
    config: PretrainedConfig,
    path: Path,
    dtype: torch.dtype,
    cut: Callable[[Any], ModelPart] | None = None,
    device: str = "cpu",
    load_format: LoadFormat = "auto",
    scheme: Scheme | None = None,
    chosen: ChosenTensors | None = None,
    held: HeldTensors | None = None,
) -> tuple[Any, ModelPart | None]:
    """Load the weights in `path`. Returns transformers' model, and the part of it that `cut` returned.

    `cut` gets the model while it is on the meta device, and leaves what is to be loaded; None: all. Plain tensors go
    to `device` one by one, so that the host never holds a GPU's weights; a checkpoint with packed matrices comes to
    the host. `load_format` names who reads the files. `scheme`: made at load from plain files; None: that of the files.
    `chosen`: the tensors in the files that are the model's, where these are a part of a larger one; None: all.
    `held`: the tensors of which `path` has only the heads: the model shares the memory of whole ones in its dtype.

    Raises:
        CannotCut: `cut` cannot divide the model so.
        ValueError: transformers lets no other attention into the model; or there are no weights in safetensors, or
            others than the model's; or they are stored in a way that is not read; or `load_format` is not to be had.
    """
    scheme = scheme or scheme_at(path)
    is_plain = scheme is PLAIN
    plain_config = config if is_plain else without_quantisation(config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention_names(config)}
    if device != "cpu" and is_plain:
        options["device_map"] = {"": device}
    try:
        with _LOADING:
            named = check_tensors(auto_model(config), plain_config, path, dtype, scheme, chosen)
            are_in_files = held is None and origin_of(path) is None
            is_read_by_transformers = load_format in ("auto", "safetensors") and are_in_files
            if cut is None and chosen is None and is_plain and is_read_by_transformers:
                module = _load_whole(config, path, **options)
                part = None
            else:
                module, part = _load_cut(plain_config, path, cut or _whole, named, load_format, held, **options)
    except OSError as error:
        if any(path.glob("*.safetensors")):
            raise
        raise ValueError(
            f"model directory {path} has no weights in *.safetensors, the only format that is loaded; "
            f"transformers' save_pretrained writes them"
        ) from error
    except AttributeError as error:
        if PackedLinear.__name__ not in str(error):
            raise
        raise ValueError(
            f"{config.model_type}: transformers' code reads weights of linears by itself, so they cannot be packed; "
            f"serve plain weights, without --quantization"
        ) from error
    except ValueError as error:
        text = str(error).replace(str(path), "")
        if ATTENTION_NAME not in text and "attn_implementation" not in text:
            raise
        raise ValueError(f"{config.model_type}: transformers gives it no pluggable attention") from error
    if not is_plain:
        module.config.update({KEYS[0]: dict(E4M3_AT_LOAD) if scheme.is_made_at_load else quantisation_at(path)})
    check_products(module, part, named, held)
    return module, None if cut is None else part


def _load_whole(config: PretrainedConfig, path: Path, **options: Any) -> Any:
    # Other formats are pickles: to load them is to run code that the checkpoint brings.
    options |= {"low_cpu_mem_usage": True, "use_safetensors": True, "trust_remote_code": False}
    return auto_model(config).from_pretrained(path, config=config, **options)


def _whole(model: Any) -> ModelPart:
    return cut_model(model, RankPosition(), None)


def _load_cut(
    config: PretrainedConfig,
    path: Path,
    cut: Callable[[Any], ModelPart],
    named: NamedTensors,
    load_format: LoadFormat,
    held: HeldTensors | None,
    **options: Any,
) -> tuple[Any, ModelPart]:
    """Load the part of a model that `cut` leaves, packed matrices as they are. `options` are `from_pretrained`'s.

    Raises:
        CannotCut: `cut` cannot divide the model so.
        ValueError: the checkpoint lacks weights.
    """
    whole = auto_model(config)._model_mapping[type(config)]
    packed = named.packed()
    dtype = options["dtype"]
    parts: list[ModelPart] = []
    put: list[str] = []

    def form_of(name: str) -> PackedForm | None:
        return packed[name][0].form if name in packed else None

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # of the class made below
        whole.__init__(self, *args, **kwargs)
        parts.append(cut(self))
        put.extend(put_forms(self, parts[0], form_of, dtype))

    def _load_pretrained_model(model: Any, state_dict: Any, _files: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        sources = _slices(model, parts[0], named, files, dtype)
        files.expect(lambda: _read_once(sources, named, files))
        return whole._load_pretrained_model(model, sources, None, *args, **kwargs)

    if packed:
        options["experts_implementation"] = "eager"  # one expert at a time, as packed experts are read
    steps = {"__init__": __init__, "_load_pretrained_model": staticmethod(_load_pretrained_model)}
    # The same name and module as the whole class: by these transformers looks up the conversions of a checkpoint.
    part_class = type(whole.__name__, (whole,), {"__module__": whole.__module__, **steps})
    device = options.get("device_map", {}).get("", "cpu")
    with held or open_files(path, load_format, device) as files:
        module, report = part_class.from_pretrained(  # type: ignore[attr-defined]
            path, config=config, use_safetensors=True, output_loading_info=True, **options
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"{path} has no weights for {', '.join(missing[:4])}{' and others' * (len(missing) > 4)}")
        own = {name: _of_rank(packed[name], parts[0].experts.get(name)) for name in put}
        files.expect(lambda: [tensor.read_pieces(files) for name in put for tensor in own[name]])
        for name in put:
            _fill(module, name, own[name], None if name in parts[0].experts else parts[0].slices.get(name), files)
            trim_heap()  # holes between the parts of matrices took 130 MiB (Llama of 1 GiB in AWQ, 2026-11-24)
    add_empty_slots(module, parts[0])
    return module, parts[0]


def _read_once(sources: Mapping[str, "_WeightSource"], named: NamedTensors, files: Files) -> None:
    """Read all tensors in the order in which transformers does."""
    for key in sorted(sources, key=dot_natural_key):
        stored = named.stored[key]
        if isinstance(stored, PackedTensor):
            stored.read_pieces(files)
        else:
            sources[key][...]


def _of_rank(tensors: Sequence[PackedTensor], experts: range | None) -> Sequence[PackedTensor]:
    """Return the packed tensors of a parameter that a rank holds. experts: those that it has whole; None: of all."""
    if experts is None:
        return tensors
    if tensors[0].is_per_expert:
        return [tensor.of_experts(experts) for tensor in tensors]
    return [tensor for tensor in tensors if expert_of(tensor.key) in experts]


def _fill(module: Any, name: str, tensors: Sequence[PackedTensor], kept: TensorSlice | None, files: Files) -> None:
    """Read the packed matrices of a parameter into the place that `put_forms` prepared."""
    path, _, attribute = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, PackedLinear):
        (matrix,) = tensors[0].matrices(files)
        owner.packed = part_of(name, matrix, kept)
        return
    experts = getattr(owner, attribute)
    count = len(tensors) // len(experts.experts) or 1  # tensors of one expert, whose rows follow one another
    found = [
        part_of(name, matrix, kept, number % count, owner.is_transposed)
        for number, tensor in enumerate(tensors)
        for matrix in tensor.matrices(files)
    ]
    experts.experts = [found[start : start + count] for start in range(0, len(found), count)]


def without_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of which transformers makes a model with plain weights."""
    plain = copy.deepcopy(config)
    for each in (plain, plain.get_text_config(decoder=True)):
        for key in KEYS:
            if hasattr(each, key):
                delattr(each, key)
    return plain


def part_bytes(module: Any) -> int:
    """Return the bytes of the weights of a module, each tied one once."""
    tied = set(getattr(module, "all_tied_weights_keys", ()))
    plain: int = sum(value.nbytes for name, value in module.state_dict().items() if name not in tied)
    return plain + packed_bytes(module)


def model_on_meta(
    config: PretrainedConfig, position: RankPosition, dtype: torch.dtype, scheme: Scheme | None = None
) -> Any:
    """Return the module of the rank at `position` on the meta device. `scheme`: see `load_weights`.

    Raises:
        CannotCut: there is no such part.
    """
    return part_on_meta(config, position, dtype, scheme)[0]


def part_on_meta(
    config: PretrainedConfig, position: RankPosition, dtype: torch.dtype, scheme: Scheme | None
) -> tuple[Any, ModelPart]:
    """Return the module of the rank at `position` as `model_on_meta` does, and which part of the model it is."""
    held = scheme or scheme_of(config.to_dict())

    def form_of(name: str) -> PackedForm | None:
        owner, _, attribute = name.rpartition(".")
        return held.form_of(owner if attribute == "weight" else f"{owner}.0.{attribute}")

    with torch.device("meta"):
        with naming(Path(config.name_or_path) / "config.json", kept=(ValueError,)):
            module = auto_model(config).from_config(without_quantisation(config), dtype=dtype)
        forms = forms_at_load(module, held) if held.is_made_at_load else None
        part = cut_model(module, position, None)
        put_forms(module, part, form_of if forms is None else forms.get, dtype)
        add_empty_slots(module, part)
    return module, part


def check_division(path: Path, position: RankPosition) -> str:
    """Check that the model in a Hugging Face directory can be divided among the ranks of a replica.

    `position`: that of any rank. Returns why ranks get slices of experts where it asks for whole ones; empty: they
    get whole ones, or it does not ask.

    Raises:
        CannotCut: with the reason.
    """
    config = read_config(path)
    reasons = []
    for rank in range(position.size):
        _, part = part_on_meta(config, replace(position, rank=rank), torch.float32, None)
        reasons.append(part.why_experts_are_sliced)
    return max(reasons)


class _WeightSource:
    """Stands in for a safetensors slice: when transformers reads all of it, it gives this rank's part.

    `transposed` are two dimensions that the checkpoint has the other way round. The part has the parameter's order, in
    which transformers leaves it.
    """

    def __init__(
        self, source: Any, kept: TensorSlice | None, num_dims: int, transposed: tuple[int, int] | None = None
    ) -> None:
        self._source = source
        self._kept = kept
        self._num_dims = num_dims
        self._transposed = transposed

    def __getitem__(self, key: Any) -> Tensor:
        assert key is ...
        if self._kept is None:
            return self._source[...]  # type: ignore[no-any-return]
        if self._transposed is None:
            return self._kept.read(self._source, self._num_dims)
        return self._kept.transposed(*self._transposed).read(self._source, self._num_dims).transpose(*self._transposed)

    def get_dtype(self) -> Any:
        return self._source.get_dtype()


def _slices(
    model: Any, part: ModelPart, named: NamedTensors, files: Files, dtype: torch.dtype
) -> dict[str, _WeightSource]:
    """Return a source for every tensor of which this rank needs some in plain floats, by its name in the checkpoint."""
    held = model.state_dict()
    operations = {
        pattern: entry.operations
        for entry in named.mapping
        if isinstance(entry, WeightConverter)
        for pattern in entry.source_patterns
    }
    sources: dict[str, _WeightSource] = {}
    for key, name, pattern in named.places():
        if name not in held:
            continue
        kept = part.slices.get(name)
        source = named.stored[key].opened(files, dtype)
        transposed = None
        if name in part.experts and len(source.get_shape()) < held[name].dim():  # the tensor of one expert
            if expert_of(key) not in part.experts[name]:
                continue
            kept = None
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
