"""Let a model with latent attention (MLA) cache latents: its layers call attention before they expand them.

transformers' layers compute a latent and a rotated key per token, and expand them to every head's keys and values in a
method of their own, `expand_kv`. That method is replaced. All else stays transformers' own code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from crossdock.kernels.latent_attention import UpProjections


class NoLatentsError(Exception):
    """Latents of this model cannot be cached; the message gives the reason."""


class Unexpanded:
    """Takes the place of an attention module's `expand_kv`, and has the projections that `expand_kv` would apply."""

    def __init__(self, attention: Any) -> None:
        """Replace the method.

        Raises:
            NoLatentsError: the module is not of the known shape.
        """
        self._own: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = attention.expand_kv
        self._config = attention.config
        self._linear = attention.kv_b_proj
        self._key_dim: int = attention.qk_nope_head_dim
        self._width: int = attention.qk_nope_head_dim + attention.v_head_dim
        if type(self._linear) is not nn.Linear or getattr(self._linear, "bias", None) is not None:
            raise NoLatentsError("the up-projection of latents is not a plain linear layer")
        if self._linear.in_features != attention.kv_lora_rank or self._linear.out_features % self._width:
            raise NoLatentsError("the up-projection of latents has another shape than its heads")
        attention.expand_kv = self

    def __call__(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Return the one key [1, 1, T, R + Dr] that all heads share, and a value of no elements.

        Where a check runs transformers' eager attention, return every head's keys and values.
        """
        if self._config._attn_implementation == "eager":
            return self._own(latent, rotated)
        return torch.cat((latent, rotated), -1), latent[..., :0]

    @property
    def projections(self) -> UpProjections:
        """The projections from a latent to the heads that this rank holds."""
        return UpProjections(self._linear.weight.view(-1, self._width, self._linear.in_features), self._key_dim)


def has_latents(config: PretrainedConfig) -> bool:
    """Return whether the layers of a decoder with this configuration compute latents."""
    return getattr(config, "kv_lora_rank", None) is not None


def unexpanded(attention: nn.Module) -> Unexpanded | None:
    """Return the replacement of a module's `expand_kv`; None: the module caches keys and values."""
    found: Unexpanded | None = vars(attention).get("expand_kv")
    return found


def cache_latents(module: nn.Module, layers: Sequence[int]) -> Callable[[], None]:
    """Let the attention of these layers cache latents. Returns a function that undoes it.

    Raises:
        NoLatentsError: with the reason; the model is unchanged.
    """
    replaced: list[Any] = []

    def undo() -> None:
        for attention in replaced:
            del attention.expand_kv

    found: list[Any] = [each for each in module.modules() if hasattr(each, "expand_kv")]
    if sorted(each.layer_idx for each in found) != list(layers):
        raise NoLatentsError("not every layer computes latents")
    try:
        for attention in found:
            Unexpanded(attention)
            replaced.append(attention)
    except NoLatentsError:
        undo()
        raise
    return undo
