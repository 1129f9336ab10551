"""Llama-shaped layers of a transformers model, run without transformers' own code.

Fusion is optional. Layers that are not recognised run in transformers' own code; so do those whose logits differ, which
the probe finds out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from crossdock.kernels.cpu.choice import KernelChoice, of_plain_weights, only
from crossdock.kernels.cpu.decoder import DecoderLayer, DecoderShape, DecoderStack, Weight
from crossdock.kernels.cpu.linear import (
    ChosenLinear,
    NativeLinear,
    Weights,
    fits_bfloat16,
    linear_choice,
    usable_kernels,
    usable_packed_kernels,
)
from crossdock.kernels.cpu.packed_linear import CodeForm, PackedPanels, why_not_packed
from crossdock.kernels.cpu.row_deltas import RowDeltas, StackDeltas
from crossdock.kernels.cpu.stack_choice import stack_choice
from crossdock.kernels.options import CpuKernels, Kernel
from crossdock.kernels.packed import PackedMatrix
from crossdock.workers.model.forward.forward_context import current_context
from crossdock.workers.model.forward.row_adapters import AdapterWeights
from crossdock.workers.model.layers.llama_layers import (
    PROJECTIONS,
    NotFusableError,
    decoder_layers,
    is_packed,
    layer_weights,
    shape_of,
    weight_of,
)
from crossdock.workers.model.weights.heap import trim_heap


class FusedLayers(nn.Module):
    """All decoder layers of a model as one module, the only one in the model's list of layers."""

    def __init__(self, stack: DecoderStack, path: str) -> None:
        """`path`: of the replaced layers in their model."""
        super().__init__()
        self._stack = stack
        self._path = path
        self._deltas: WeakKeyDictionary[AdapterWeights, StackDeltas] = WeakKeyDictionary()
        self.attention_type = "full_attention"  # some models choose a mask by this; ours is None in any case

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        # [1, T, D] each.
        context = current_context()
        (cos, sin) = position_embeddings
        assert context.batch is not None
        groups = () if context.adapters is None else context.adapters.groups
        deltas = RowDeltas([(self.deltas_of(weights), rows) for weights, rows in groups])
        tap = context.layer_tap
        kept = () if tap is None else (tap.layers, tap.keep)
        return self._stack(hidden_states[0], cos[0], sin[0], context.pages, context.batch, deltas, *kept)[None]

    @property
    def sites(self) -> Iterator[str]:
        """The names of all linears that the layers compute."""
        for layer in range(self._stack.num_layers):
            yield from (f"{self._path}.{layer}.{path}" for path in PROJECTIONS.values())

    @property
    def kernel_tensors(self) -> Sequence[Tensor]:
        """The tensors of all weights."""
        return self._stack.tensors

    def with_weights(self, layers: nn.ModuleList) -> DecoderStack:
        """Return a stack of the same kernels with the weights of other layers. ValueError: the kernels would round."""
        new = [layer_weights(*each) for each in zip(layers, self._stack.windows, strict=True)]
        _refuse_rounding(self._stack.kernels, _matrices(new))
        return self._stack.with_weights(new)

    def take(self, stack: DecoderStack) -> None:
        """Compute with another stack from now on."""
        self._stack = stack

    def drop(self) -> None:
        """Give up the weights, until `take`."""
        self._stack.drop()

    def deltas_of(self, weights: AdapterWeights) -> StackDeltas:
        """Return the matrices of an adapter by layer. The first call takes a millisecond or two."""
        if weights not in self._deltas:
            names = [f"{self._path}.{layer}" for layer in range(self._stack.num_layers)]
            own = [{each: weights.pairs.get(f"{name}.{path}") for each, path in PROJECTIONS.items()} for name in names]
            found = [{each: pair for each, pair in layer.items() if pair is not None} for layer in own]
            self._deltas[weights] = StackDeltas(found)
        return self._deltas[weights]


class FusedHead(nn.Module):
    """The output projection by the kernel chosen for each number of rows."""

    def __init__(self, weight: Weight, choice: KernelChoice, frees_codes: bool = False) -> None:
        super().__init__()
        self.choice = choice
        self.take(self.with_weight(weight, frees_codes))

    @property
    def kernel_tensors(self) -> Sequence[Tensor]:
        """The tensors of the weight."""
        return self.linear.tensors

    def with_weight(self, weight: Weight, frees_codes: bool = False) -> ChosenLinear:
        """Return a projection of the same kernels with another weight, whose codes may be given back."""
        packed = weight if isinstance(weight, Tensor) else PackedPanels.of(weight, frees=frees_codes)
        return ChosenLinear(packed, self.choice)

    def take(self, linear: ChosenLinear) -> None:
        """Compute with another projection from now on."""
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:  # [1, N, E]
        return self.linear(hidden[0])[None]


class PackedEmbedding(nn.Module):
    """The embedding of a model whose output projection has the same weight: read from there, not in memory twice."""

    def __init__(self, linear: ChosenLinear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, token_ids: Tensor) -> Tensor:  # [1, T] to [1, T, E]
        return cast(NativeLinear, self._linear.formats["native"]).rows(token_ids)


@dataclass(frozen=True, slots=True)
class Fusion:
    """Fused layers and head, as they were put into a model."""

    undo: Callable[[], None] | None  # None: packed matrices were given up as they were laid out for kernels
    layers: KernelChoice
    head: KernelChoice

    def __str__(self) -> str:
        if self.layers == self.head:
            return str(self.layers)
        return f"{self.layers}; output projection {self.head}"


def fuse(
    module: nn.Module,
    windows: Sequence[int | None],
    attention: Callable[..., Tensor],
    cpu_kernels: CpuKernels = "auto",
    kernel: Kernel | None = None,
) -> Fusion:
    """Replace the decoder layers and the head of a CPU model.

    `attention` is the model's `paged_attention`. `kernel` int8 rounds plain weights to int8, and rows of all products;
    None: the fastest kernels that do not round.

    Raises:
        NotFusableError: with the reason; the model is unchanged.
        ValueError: `cpu_kernels` names a kernel that cannot run here.
    """
    model: Any = module
    decoder, layers = decoder_layers(model)
    weights = [layer_weights(layer, window) for layer, window in zip(layers, windows, strict=True)]
    shape = shape_of(layers[0])
    if reason := shape.why_not():
        raise NotFusableError(reason)
    head: Any = getattr(model, "lm_head", None)
    head_weight = _weight_of_head(head)
    has_codes = is_packed(model)
    _check_forms(weights)
    try:
        layers_choice, head_choice = _choices(shape, weights, head_weight, cpu_kernels, kernel)
        is_narrow = "native" in layers_choice.kernels and weights[0].input_norm.dtype is torch.float32
        if has_codes:
            weights.clear()
            in_turn = _taken(layers, windows)
        else:
            in_turn = _narrowed(weights, layers_choice.kernels) if is_narrow else iter(weights)
        with_amx = cpu_kernels == "auto"  # native kernels promise rows that do not depend on the chunks of a prompt
        stack = DecoderStack(shape, in_turn, layers_choice, attention, has_codes, with_amx)
        path = next(name for name, part in model.named_modules() if part is layers)
        fused = FusedLayers(stack, path)
        fused_head = FusedHead(head_weight, head_choice, has_codes)
    except OSError as error:
        _widen(weights)
        raise NotFusableError(str(error)) from error
    if has_codes:
        vars(head).pop("packed", None)
    embedding: Any = getattr(decoder, "embed_tokens", None)
    is_tied = type(embedding) is nn.Embedding and embedding.weight is getattr(head, "weight", None)
    decoder.layers = nn.ModuleList([fused])
    model.lm_head = fused_head
    if is_tied and isinstance(fused_head.linear.formats.get("native"), NativeLinear):
        decoder.embed_tokens = PackedEmbedding(fused_head.linear)

    def undo() -> None:
        _widen(weights)
        decoder.layers = layers
        model.lm_head = head
        if is_tied:
            decoder.embed_tokens = embedding

    return Fusion(None if has_codes else undo, layers_choice, head_choice)


def fused_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of fused layers and head, by the module's name and their numbers there."""
    parts = {path: part for path, part in module.named_modules() if isinstance(part, FusedLayers | FusedHead)}
    return {f"{path}.{n}": each for path, part in parts.items() for n, each in enumerate(part.kernel_tensors)}


def fused_weights(module: nn.Module, plain: nn.Module) -> tuple[Callable[[], None], dict[str, Tensor]]:
    """Pack the weights of a plain module of the same model for the fused layers and head of `module`, if it has any.

    Returns a function that has these compute with what was packed, and the `fused_tensors` of `module` afterwards.

    Raises:
        ValueError: the kernels would round the weights.
    """
    parts = {path: part for path, part in module.named_modules() if isinstance(part, FusedLayers)}
    if not parts:
        return lambda: None, {}
    [(path, fused)] = parts.items()
    (decoder, _), (_, layers), head = decoder_layers(module), decoder_layers(plain), cast(Any, module).lm_head
    weight = weight_of(cast(Any, plain).lm_head)
    assert weight is not None
    _refuse_rounding(head.choice.kernels, [weight])
    stack = fused.with_weights(layers)
    linear = head.with_weight(weight)

    def put() -> None:
        fused.take(stack)
        head.take(linear)
        if isinstance(decoder.embed_tokens, PackedEmbedding):
            decoder.embed_tokens = PackedEmbedding(linear)

    new = {path: stack.tensors, "lm_head": linear.tensors}
    return put, {f"{path}.{number}": each for path, some in new.items() for number, each in enumerate(some)}


def drop_fused(module: nn.Module) -> None:
    """Give up the weights of fused layers and their head, until those of `fused_weights` are put in place."""
    for part in module.modules():
        if isinstance(part, FusedLayers):
            part.drop()
        if isinstance(part, FusedHead):
            part.linear.formats.clear()


def _weight_of_head(head: Any) -> Weight:
    weight = weight_of(head)
    if weight is None or head.bias is not None or head.out_features % 16:
        raise NotFusableError("the model's lm_head is not a plain linear of a multiple of 16 outputs")
    return weight


def _usable(
    layers: Sequence[DecoderLayer], head: Weight, setting: CpuKernels
) -> tuple[Sequence[Kernel], Sequence[Kernel]]:
    """Return the kernels that `setting` allows for the layers, and for the head; all of them for a plain head of packed
    layers. ValueError: none."""
    dtype = layers[0].input_norm.dtype
    is_packed = isinstance(layers[0].gate, PackedMatrix)
    fits = _fit([head, *_matrices(layers)])
    if not is_packed and isinstance(head, Tensor):
        kernels = usable_kernels(dtype, setting, fits)
        return kernels, kernels
    packed = usable_packed_kernels(dtype, setting)
    plain = usable_kernels(dtype, fits=fits)
    plain = ("native",) if setting == "native" and "native" in plain else plain
    return (packed if is_packed else plain), (plain if isinstance(head, Tensor) else packed)


def _matrices(layers: Sequence[DecoderLayer]) -> list[Weight]:
    return [matrix for layer in layers for matrix in layer.matrices]


def _fit(matrices: Sequence[Weight]) -> bool:
    """Report whether bfloat16 holds the numbers of all plain matrices."""
    return all(fits_bfloat16(each) for each in matrices if isinstance(each, Tensor))


def _refuse_rounding(kernels: Sequence[Kernel], matrices: Sequence[Weight]) -> None:
    if "native" in kernels and not _fit(matrices):
        raise ValueError(
            "bfloat16 does not hold the numbers of these float32 weights, and the kernels of this replica, which were "
            "chosen for weights that it held, would round them: start with --cpu-kernels torch, or --dtype bfloat16"
        )


def _choices(
    shape: DecoderShape,
    layers: Sequence[DecoderLayer],
    head: Weight,
    setting: CpuKernels,
    kernel: Kernel | None,
) -> tuple[KernelChoice, KernelChoice]:
    """Return the kernels of the layers and of the head: `kernel`; None: those of `setting` that are the fastest."""
    if kernel is not None:
        return only(kernel), only(kernel)
    dtype = layers[0].input_norm.dtype
    (of_layers, of_head) = _usable(layers, head, setting)
    if isinstance(layers[0].gate, PackedMatrix):
        layers_choice = stack_choice(shape, len(layers), dtype, of_layers, CodeForm.of(layers[0].gate))
    else:
        layers_choice = of_plain_weights(of_layers)
    if isinstance(head, Tensor):
        return layers_choice, of_plain_weights(of_head)
    weights = Weights(head.shape[0], head.shape[1], count=1)
    return layers_choice, linear_choice("output projection", weights, dtype, of_head, CodeForm.of(head))


def _check_forms(layers: Sequence[DecoderLayer]) -> None:
    """Check that the packed matrices of each input can be one weight. NotFusableError: they cannot."""
    for layer in layers:
        for group in ((layer.q, layer.k, layer.v), (layer.out,), (layer.gate, layer.up), (layer.down,)):
            packed = [each for each in group if isinstance(each, PackedMatrix)]
            if reason := next(filter(None, map(why_not_packed, packed)), None):
                raise NotFusableError(f"packed weights cannot be computed by kernels: {reason}")
            orders = {None if each.columns is None else tuple(each.columns.tolist()) for each in packed}
            if len(packed) not in (0, len(group)) or len({CodeForm.of(each) for each in packed}) > 1 or len(orders) > 1:
                raise NotFusableError("packed weights of one input are of unlike forms")


def _taken(layers: nn.ModuleList, windows: Sequence[int | None]) -> Iterator[DecoderLayer]:
    """Yield the weights of each layer, and then give up its packed matrices, so that memory holds them once."""
    for layer, window in zip(layers, windows, strict=True):
        yield layer_weights(layer, window)
        for part in layer.modules():
            vars(part).pop("packed", None)
        trim_heap()


def _narrowed(layers: Sequence[DecoderLayer], kernels: Sequence[Kernel]) -> Iterator[DecoderLayer]:
    """Yield the weights of each layer, and keep its matrices in bfloat16, which holds them, until `_widen`.

    `native` alone reads them in bfloat16, so that copies take half of the memory.
    """
    for layer in layers:
        if len(kernels) == 1:
            _turn_to(torch.bfloat16, [layer])
        yield layer
        _turn_to(torch.bfloat16, [layer])
        trim_heap()


def _widen(layers: Sequence[DecoderLayer]) -> None:
    """Undo `_narrowed`: give the matrices the dtype of the norms."""
    if layers:
        _turn_to(layers[0].input_norm.dtype, layers)


@torch.inference_mode(False)  # weights are used in other modes too
def _turn_to(dtype: torch.dtype, layers: Sequence[DecoderLayer]) -> None:
    for parameter in _matrices(layers):
        if isinstance(parameter, Tensor):
            parameter.data = parameter.data.to(dtype)
