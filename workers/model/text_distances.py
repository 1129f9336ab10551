"""MPNet's attention within each text of a flat batch: scores have a bias by the distance of two tokens.

transformers' code of this model lets no other attention in, so its layers' own methods are replaced.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def attend_by_distance(model: Any) -> None:
    """Keep texts apart in the attention of transformers' `MPNetModel`, which then takes `text_lengths`.

    A text that is alone in its batch is computed by transformers' own code.
    """
    encoder = model.encoder
    lengths: list[int] = []  # of the texts of the pass that runs

    def take(_module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        lengths[:] = given.pop("text_lengths")
        return args, given

    def bias(own: Any, hidden: Tensor, *args: Any) -> Tensor:
        """Return the bias [1, H, n, n] of the longest text, which begins with those of shorter ones."""
        found: Tensor = own(hidden[:, : max(lengths)], *args)
        return found

    def attend(layer: Any, own: Any, hidden: Tensor, mask: Tensor | None, bias: Tensor, **given: Any) -> Any:
        return own(hidden, mask, bias, **given) if len(lengths) == 1 else (_attend(layer, hidden, bias, lengths),)

    model.register_forward_pre_hook(take, with_kwargs=True)
    encoder.compute_position_bias = partial(bias, encoder.compute_position_bias)
    for each in encoder.layer:
        layer = each.attention.attn
        layer.forward = partial(attend, layer, layer.forward)


def _attend(layer: Any, hidden: Tensor, bias: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the output [1, T, E] of an `MPNetSelfAttention` for hidden states [1, T, E]."""
    shape = (*hidden.shape[:-1], -1, layer.attention_head_size)
    heads = [product(hidden).view(shape).transpose(1, 2) for product in (layer.q, layer.k, layer.v)]
    parts = []
    for query, key, value in zip(*(torch.split(each, list(lengths), 2) for each in heads), strict=True):
        n = query.shape[2]
        parts.append(scaled_dot_product_attention(query, key, value, attn_mask=bias[:, :, :n, :n]))
    output: Tensor = layer.o(torch.cat(parts, 2).transpose(1, 2).reshape(hidden.shape))
    return output
