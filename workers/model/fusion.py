"""Llama-shaped layers of a transformers model, recognised by their modules and run without transformers' own code.

Fusion is optional. Layers that are not recognised run in transformers' own code; so do those whose logits differ, which
the probe finds out.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.choice import KernelChoice, only
from crossdock.kernels.decoder import DecoderLayer, DecoderShape, DecoderStack
from crossdock.kernels.linear import ChosenLinear, Weights, linear_choice, usable_kernels
from crossdock.kernels.options import CpuKernels, Quantization
from crossdock.kernels.stack_choice import stack_choice

PageViews = Sequence[tuple[Tensor, Tensor]]
CurrentPages = Callable[[], tuple[PageViews, AttentionBatch]]


class NotFusableError(Exception):
    """The layers are not of the one shape that the kernel knows; the message names the difference."""


class FusedLayers(nn.Module):
    """All decoder layers of a model as one module, the only one in the model's list of layers."""

    def __init__(self, stack: DecoderStack, current_pages: CurrentPages) -> None:
        super().__init__()
        self._stack = stack
        self._current_pages = current_pages
        self.attention_type = "full_attention"  # some models choose a mask by this; ours is None in any case

    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        pages, batch = self._current_pages()
        cos, sin = position_embeddings  # [1, T, D] each
        return self._stack(hidden_states[0], cos[0], sin[0], pages, batch)[None]


class FusedHead(nn.Module):
    """The output projection by the kernel chosen for each number of rows."""

    def __init__(self, weight: Tensor, choice: KernelChoice) -> None:
        super().__init__()
        self._linear = ChosenLinear(weight, choice)

    def forward(self, hidden: Tensor) -> Tensor:  # [1, N, E]
        return self._linear(hidden[0])[None]


@dataclass(frozen=True, slots=True)
class Fusion:
    """Fused layers and head, as they were put into a model."""

    undo: Callable[[], None]
    layers: KernelChoice
    head: KernelChoice

    def __str__(self) -> str:
        if self.layers == self.head:
            return str(self.layers)
        return f"{self.layers}; output projection {self.head}"


def fuse(
    module: nn.Module,
    windows: Sequence[int | None],
    current_pages: CurrentPages,
    attention: Callable[..., Tensor],
    cpu_kernels: CpuKernels = "auto",
    free_bytes: int | None = None,
    quantization: Quantization | None = None,
) -> Fusion:
    """Replace the decoder layers and the head of a CPU model.

    `attention` is the model's `paged_attention`. Weights are kept in the formats of two kernels only if both copies fit
    into `free_bytes`; None: they do. `quantization` sets the format of all of them.

    Raises:
        NotFusableError: with the reason; the model is unchanged.
        ValueError: `cpu_kernels` names a kernel that cannot run here.
    """
    model: Any = module
    decoder: Any = getattr(model, "model", None)
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise NotFusableError("the model has no model.layers")
    weights = [_layer(layer, window) for layer, window in zip(layers, windows, strict=True)]
    shape = _shape(layers[0])
    if reason := shape.why_not():
        raise NotFusableError(reason)
    head: Any = getattr(model, "lm_head", None)
    if type(head) is not nn.Linear or getattr(head, "bias", None) is not None or head.out_features % 16:
        raise NotFusableError("the model's lm_head is not a plain linear of a multiple of 16 outputs")
    dtype = head.weight.dtype
    kernels = usable_kernels(dtype, cpu_kernels)
    head_weights = Weights(head.out_features, head.in_features, count=1)
    num_bytes = sum(each.num_bytes(dtype) for each in (*shape.matrices(len(layers)), head_weights))
    max_kernels = 2 if free_bytes is None or 2 * num_bytes <= free_bytes else 1
    try:
        if quantization is not None:
            layers_choice = head_choice = only(quantization)
        else:
            layers_choice = stack_choice(shape, len(layers), dtype, kernels, max_kernels)
            head_choice = linear_choice("output projection", [head_weights], dtype, kernels, max_kernels)
        stack = DecoderStack(shape, weights, layers_choice, attention)
        fused, fused_head = FusedLayers(stack, current_pages), FusedHead(head.weight, head_choice)
    except OSError as error:
        raise NotFusableError(str(error)) from error
    decoder.layers, model.lm_head = nn.ModuleList([fused]), fused_head

    def undo() -> None:
        decoder.layers, model.lm_head = layers, head

    return Fusion(undo, layers_choice, head_choice)


def _expect(part: nn.Module | None, name: str, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    """Check that exactly these children of `part` have weights; `name` is the part's, for the error."""
    names = (
        {child_name for child_name, child in part.named_children() if any(True for _ in child.parameters())}
        if part is not None
        else set()
    )
    if wrong := (names - optional) ^ needed:
        raise NotFusableError(f"the {name} differs in {', '.join(sorted(wrong))}")


def _layer(layer: Any, window: int | None) -> DecoderLayer:
    _expect(layer, "layer", {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention, mlp = layer.self_attn, layer.mlp
    _expect(attention, "attention", {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
    _expect(mlp, "mlp", {"gate_proj", "up_proj", "down_proj"})
    if any(linear.bias is not None for linear in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        raise NotFusableError("the output or mlp projections have biases")
    biases = [linear.bias for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is not None and norm.weight.numel() != attention.head_dim for norm in norms):
        raise NotFusableError("the query norm is not over single heads")
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight,
        q=attention.q_proj.weight,
        k=attention.k_proj.weight,
        v=attention.v_proj.weight,
        qkv_bias=torch.cat(biases) if all(bias is not None for bias in biases) else None,
        q_norm=norms[0].weight if norms[0] is not None else None,
        k_norm=norms[1].weight if norms[1] is not None else None,
        out=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        window=window,
    )


def _shape(layer: Any) -> DecoderShape:
    attention = layer.self_attn
    qk_norm = getattr(attention, "q_norm", None)
    norms = (layer.input_layernorm, qk_norm) if qk_norm is not None else (layer.input_layernorm,)
    if not all(hasattr(norm, "variance_epsilon") for norm in norms):
        raise NotFusableError("its norms are not Llama's RMS norm")
    return DecoderShape(
        hidden=attention.q_proj.in_features,
        num_heads=attention.q_proj.out_features // attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        intermediate=layer.mlp.gate_proj.out_features,
        eps=layer.input_layernorm.variance_epsilon,
        qk_eps=qk_norm.variance_epsilon if qk_norm is not None else 0.0,
        scale=attention.scaling,
    )
