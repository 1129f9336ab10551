"""Llama-shaped layers on GPUs: joined products, and between them steps in Triton instead of transformers' own code.

A layer's output and down projections stay modules, so that a tensor-parallel rank's sums run in their hooks. An mlp of
another shape stays a module too, for example one with experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crossdock.kernels.packages import has_package
from crossdock.kernels.packed import (
    PackedMatrix,
    RoundedRows,
    join_rows,
    multiplies_e4m3,
    require_e4m3_products,
    scaled_product,
)
from crossdock.workers.model.architecture import num_deep_layers
from crossdock.workers.model.forward.forward_context import current_context
from crossdock.workers.model.forward.row_adapters import RowAdapters
from crossdock.workers.model.layers.fused_projections import joined_tensor
from crossdock.workers.model.layers.llama_layers import (
    PROJECTIONS,
    NotFusableError,
    check_attention,
    check_mlp,
    decoder_layers,
    qkv_bias,
)
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.weights.packed_layers import PackedExperts, PackedLinear


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights and modules of one layer."""

    input_norm: Any
    qkv: Tensor | PackedMatrix  # [(Hq + 2 Hkv) D, E]
    qkv_bias: Tensor | None  # [(Hq + 2 Hkv) D]
    q_norm: Any  # None: heads are not normalised
    k_norm: Any
    out: nn.Module
    post_norm: Any
    gate_up: Tensor | PackedMatrix | None  # [2 I, E]; None: `mlp` is the whole mlp
    mlp: nn.Module  # the down projection, or the whole mlp
    window: int | None
    scale: float
    path: str  # in the model

    @classmethod
    def of(cls, layer: Any, window: int | None, path: str, in_fixed_order: bool) -> "_Layer":
        check_attention(layer)
        _check_packed(layer)
        attention = layer.self_attn
        mlp = layer.mlp
        gate_up = None
        last = mlp
        try:
            check_mlp(mlp)
        except NotFusableError:  # experts, for example
            if in_fixed_order:
                raise
        else:
            gate_up = _joined(mlp.gate_proj, mlp.up_proj)
            last = mlp.down_proj
        return cls(
            layer.input_layernorm,
            _joined(attention.q_proj, attention.k_proj, attention.v_proj),
            _joined_bias(attention),
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
            attention.o_proj,
            layer.post_attention_layernorm,
            gate_up,
            last,
            window,
            attention.scaling,
            path,
        )

    @property
    def down_codes(self) -> PackedMatrix | None:
        """The codes of the down projection, whose rows the kernel before may round; None: that takes plain rows."""
        return self.mlp.packed if self.gate_up is not None and isinstance(self.mlp, PackedLinear) else None

    def add(self, adapters: RowAdapters, names: Sequence[str], x: Tensor, y: Tensor, sizes: list[int]) -> None:
        """Add what adapters change in the joined outputs y [T, sum of sizes] of the projections `names`."""
        adapters.add_joined([f"{self.path}.{PROJECTIONS[name]}" for name in names], x, y, sizes)


class TritonLayers(nn.Module):
    """All decoder layers of a model as one module, the only one in the model's list of layers."""

    def __init__(self, layers: Sequence[_Layer], replaced: nn.ModuleList, in_fixed_order: bool) -> None:
        from crossdock.kernels.gpu.triton_fixed_order import product  # Triton is not installed everywhere

        super().__init__()
        self._layers = layers
        self._product: Callable[..., Tensor] = product if in_fixed_order else F.linear
        # the layer whose weights are read; no child, so that names of parameters stay as they are
        self.replaced = (replaced,)
        self.attention_type = "full_attention"  # some models choose a mask by this; ours is None in any case

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        # Imported here: Triton is not installed everywhere.
        from crossdock.kernels.gpu.triton_layer_steps import add_and_norm, finish_heads, silu_and_multiply

        context = current_context()
        attention = context.attention.paged_attention
        hidden = hidden_states[0].clone()  # [T, E], changed in place
        cos, sin = (each[0].contiguous() for each in position_embeddings)  # [T, D] each
        if cos.shape[1] != context.pages[0][0].shape[3]:
            raise NotFusableError("only a part of each head is rotated")
        addend: Tensor | None = None
        rows = len(hidden), hidden.device
        tap = context.layer_tap
        for number, layer in enumerate(self._layers):
            if tap is not None and number in tap.layers:
                tap.keep(number, hidden.clone() if addend is None else hidden + addend)
            k_pages, v_pages, batch, scales = context.of_layer(number)
            rounded = RoundedRows.room(layer.qkv, *rows)
            norm = layer.input_norm
            normed = add_and_norm(hidden, addend, norm.weight, norm.variance_epsilon, rounded)
            norms: dict[str, Any] = {}
            if layer.q_norm is not None:
                norms = {"q_norm": layer.q_norm.weight, "k_norm": layer.k_norm.weight}
                norms["eps"] = layer.q_norm.variance_epsilon
            qkv = self._multiplied(normed, layer.qkv, layer.qkv_bias, rounded)
            if context.adapters is not None:
                kv_width = k_pages.shape[1] * k_pages.shape[3]
                sizes = [qkv.shape[1] - 2 * kv_width, kv_width, kv_width]
                layer.add(context.adapters, ("q", "k", "v"), normed, qkv, sizes)
            q = finish_heads(qkv, cos, sin, k_pages, v_pages, batch.slots, **norms, **scales)
            seen = attention(q, k_pages, v_pages, batch, scale=layer.scale, window=layer.window, **scales)  # [T, Hq, D]
            addend = layer.out(seen.flatten(1))
            rounded, norm = RoundedRows.room(layer.gate_up, *rows), layer.post_norm
            normed = add_and_norm(hidden, addend, norm.weight, norm.variance_epsilon, rounded)
            if layer.gate_up is not None:
                gate_up = self._multiplied(normed, layer.gate_up, None, rounded)
                if context.adapters is not None:
                    layer.add(context.adapters, ("gate", "up"), normed, gate_up, [gate_up.shape[1] // 2] * 2)
                rounded = RoundedRows.room(layer.down_codes, *rows)
                inner = silu_and_multiply(gate_up, rounded)
                addend = layer.mlp(inner) if rounded is None else layer.mlp(inner, rounded)
            else:
                addend = layer.mlp(normed[None])[0]
        return (hidden + addend)[None] if addend is not None else hidden[None]

    def _multiplied(
        self, x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None, rounded: RoundedRows | None
    ) -> Tensor:
        """Return x @ weight.T + bias; of a packed weight by products of e4m3, of `rounded` where that is there."""
        if isinstance(weight, PackedMatrix):
            return scaled_product(x, weight, bias, rounded)
        return self._product(x, weight, bias)


def may_use_triton_steps(model: LoadedModel) -> bool:
    """Return whether the steps of this model's layers could run in Triton: beside attention that runs on its device."""
    return model.attention.is_beside_triton and has_package("triton")


def use_triton_layers(
    model: LoadedModel, windows: Sequence[int | None], *, in_fixed_order: bool = False
) -> Callable[[], None]:
    """Replace the decoder layers of a model whose projections are joined. Returns a function that undoes it.

    `windows`: of each layer's attention. `in_fixed_order`: also the products; each mlp must be Llama's.

    Raises:
        NotFusableError: with the reason; the model computes as before.
    """
    if model.part.stage is not None:
        raise NotFusableError("each rank has a pipeline stage, which is entered and left between layers")
    if num_deep_layers(model.config):
        raise NotFusableError("embeddings of pictures are added between layers")
    decoder, layers = decoder_layers(model.module)
    path = next(name for name, part in model.module.named_modules() if part is layers)
    both = enumerate(zip(layers, windows, strict=True))
    fused = [_Layer.of(layer, window, f"{path}.{number}", in_fixed_order) for number, (layer, window) in both]
    if any(parameter.dtype != model.dtype for parameter in layers.parameters()):
        raise NotFusableError("the layers' weights are of several dtypes")
    if any(shape.key_dim != shape.value_dim or shape.key_dim % 2 for shape in model.layers):
        raise NotFusableError("keys and values have unlike widths")
    decoder.layers = nn.ModuleList([TritonLayers(fused, layers, in_fixed_order)])

    def undo() -> None:
        decoder.layers = layers

    return undo


def _joined_bias(attention: Any) -> Tensor | None:
    """Return the bias of the three input projections as one tensor that theirs are views of."""
    cat = qkv_bias(attention)
    if cat is None or isinstance(attention.q_proj, PackedLinear):
        return cat
    joined = joined_tensor(*(linear.bias for linear in (attention.q_proj, attention.k_proj, attention.v_proj)))
    if joined is None:
        raise NotFusableError("biases of one input are not joined")
    return joined


def _joined(*linears: Any) -> Tensor | PackedMatrix:
    if isinstance(linears[0], PackedLinear):
        return _joined_codes(linears)
    weight = joined_tensor(*(linear.weight for linear in linears))
    if weight is None:
        raise NotFusableError("projections of one input are not joined")
    return weight


def _check_packed(layer: nn.Module) -> None:
    """Check that all packed weights of a layer are multiplied in e4m3: others are computed by kernels of their own."""
    for part in layer.modules():
        packed = part.packed if isinstance(part, PackedLinear) else None
        is_read = packed is None or multiplies_e4m3(packed, torch.bfloat16, packed.codes.device)
        if isinstance(part, PackedExperts) or not is_read:
            raise NotFusableError("weights are packed in a form whose products are not e4m3")
        if packed is not None:
            require_e4m3_products(packed.codes.device)


def _joined_codes(linears: Sequence[PackedLinear]) -> PackedMatrix:
    """Return one matrix of the rows of all linears, of which theirs become views: memory holds the codes once."""
    try:
        whole = join_rows([linear.packed for linear in linears])
    except ValueError as reason:
        raise NotFusableError(f"projections of one input: {reason}") from None
    rows = whole.shape[0]
    if whole.block_rows > 1:  # a scale for all rows of one projection
        scales = whole.scales.repeat_interleave(whole.block_rows, 0)[:rows].contiguous()
        whole = replace(whole, scales=scales, block_rows=1)
    start = 0
    for linear in linears:
        end = start + linear.out_features
        linear.packed = whole.part(0, start, end)
        start = end
    return whole
