"""Recognise Llama-shaped decoder layers of a transformers model by their modules, and take their weights out."""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn

from crossdock.kernels.cpu.decoder import DecoderLayer, DecoderShape, Weight
from crossdock.kernels.packed import PackedMatrix

PROJECTIONS = {  # by the name of the matrix in `DecoderLayer`
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class NotFusableError(Exception):
    """The layers are not of the shape that fused layers compute; the message names the difference."""


def weight_of(linear: Any) -> Weight | None:
    """Return the weight of a linear, plain or packed; None: the module is no linear."""
    packed = getattr(linear, "packed", None)
    if isinstance(packed, PackedMatrix):
        return packed
    return linear.weight if type(linear) is nn.Linear else None


def is_packed(module: nn.Module) -> bool:
    """Return whether a linear of the module has a packed weight."""
    return any(isinstance(getattr(part, "packed", None), PackedMatrix) for part in module.modules())


def _has_weights(module: nn.Module) -> bool:
    return is_packed(module) or any(True for _ in module.parameters())


def _expect(part: nn.Module | None, name: str, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    """Check that exactly these children of `part` have weights; `name` is the part's, for the error."""
    names = (
        {child_name for child_name, child in part.named_children() if _has_weights(child)}
        if part is not None
        else set()
    )
    if wrong := (names - optional) ^ needed:
        raise NotFusableError(f"the {name} differs in {', '.join(sorted(wrong))}")


def decoder_layers(model: Any) -> tuple[Any, nn.ModuleList]:
    """Return the module whose `layers` are the decoder layers, and these layers.

    Raises:
        NotFusableError: the model has no such module.
    """
    decoder: Any = getattr(model, "model", None)
    for name in ("language_model", "text_model"):  # beside an encoder of pictures
        decoder = getattr(decoder, name, decoder)
    layers: Any = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise NotFusableError("the model has no model.layers")
    return decoder, layers


def check_attention(layer: Any) -> None:
    """Check that a layer has Llama's parts, and that its attention and norms are of Llama's shape.

    Raises:
        NotFusableError: with the difference.
    """
    _expect(layer, "layer", {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attention = layer.self_attn
    _expect(attention, "attention", {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
    if any(True for _ in attention.parameters(recurse=False)):
        raise NotFusableError("the attention has weights beside its projections")
    if not getattr(attention, "use_rope", True):
        raise NotFusableError("a layer rotates no heads")
    if attention.o_proj.bias is not None:
        raise NotFusableError("the output projection has a bias")
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(norm is not None and norm.weight.numel() != attention.head_dim for norm in norms):
        raise NotFusableError("the query norm is not over single heads")
    norms += [layer.input_layernorm, layer.post_attention_layernorm]
    if not all(norm is None or hasattr(norm, "variance_epsilon") for norm in norms):
        raise NotFusableError("its norms are not Llama's RMS norm")


def check_mlp(mlp: Any) -> None:
    """Check that an mlp is Llama's: down(silu(gate) * up), without biases.

    Raises:
        NotFusableError: with the difference.
    """
    _expect(mlp, "mlp", {"gate_proj", "up_proj", "down_proj"})
    if any(linear.bias is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        raise NotFusableError("the mlp projections have biases")
    x = torch.linspace(-4, 4, 9)  # the logits of a probe may differ little between one activation and another
    if not torch.allclose(mlp.act_fn(x), nn.functional.silu(x), atol=1e-5):
        raise NotFusableError("the activation is not SiLU")


def qkv_bias(attention: Any) -> Tensor | None:
    """Return the bias [(Hq + 2 Hkv) D] of the three input projections, if all have one.

    Raises:
        NotFusableError: only some have one.
    """
    biases = [linear.bias for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
    given = [bias for bias in biases if bias is not None]
    if len(given) not in (0, len(biases)):
        raise NotFusableError("not all input projections have biases")
    return torch.cat(given) if given else None


def layer_weights(layer: Any, window: int | None) -> DecoderLayer:
    """Return the weights of a layer. NotFusableError: it differs from Llama's."""
    check_attention(layer)
    check_mlp(layer.mlp)
    attention = layer.self_attn
    mlp = layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    matrices = [weight_of(linear) for linear in (*linears, mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    given = [matrix for matrix in matrices if matrix is not None]
    if len(given) < len(matrices):
        raise NotFusableError("a projection is no plain linear")
    if len({isinstance(matrix, PackedMatrix) for matrix in given}) > 1:
        raise NotFusableError("some projections of a layer are packed and others plain")
    q, k, v, out, gate, up, down = given
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight,
        q=q,
        k=k,
        v=v,
        qkv_bias=qkv_bias(attention),
        q_norm=norms[0].weight if norms[0] is not None else None,
        k_norm=norms[1].weight if norms[1] is not None else None,
        out=out,
        post_norm=layer.post_attention_layernorm.weight,
        gate=gate,
        up=up,
        down=down,
        window=window,
    )


def shape_of(layer: Any) -> DecoderShape:
    """Return the sizes and constants of a layer that `layer_weights` takes."""
    attention = layer.self_attn
    qk_norm = getattr(attention, "q_norm", None)
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
