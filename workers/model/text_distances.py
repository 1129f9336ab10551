"""MPNet over a flat batch of texts: attention stays within each text, with a bias by the distance of two tokens.

transformers' code of this model lets no other attention in, so a part of it is replaced.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutput


def attend_by_distance(model: Any) -> None:
    """Keep texts apart in the attention of transformers' `MPNetModel`, which then takes `text_lengths`.

    A text that is alone in its batch is computed by transformers' own code.
    """
    lengths: list[int] = []  # of the texts of the pass that runs

    def take(_module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        lengths[:] = given.pop("text_lengths")
        return args, given

    model.register_forward_pre_hook(take, with_kwargs=True)
    for layer in model.encoder.layer:
        layer.attention.set_submodule("attn", _Attention(layer.attention.attn, lengths))
    model.set_submodule("encoder", _Encoder(model.encoder, lengths))


class _Encoder(nn.Module):
    """transformers' layers, with the bias of the longest text of a batch."""

    def __init__(self, own: Any, lengths: Sequence[int]) -> None:
        super().__init__()
        self.own = own
        self._lengths = lengths

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None, **given: Any) -> Any:
        if len(self._lengths) == 1:
            return self.own(hidden, attention_mask=attention_mask, **given)
        bias = self.own.compute_position_bias(hidden[:, : max(self._lengths)])  # [1, H, n, n]
        for layer in self.own.layer:
            hidden = layer(hidden, None, bias)[0]
        return BaseModelOutput(last_hidden_state=hidden)


class _Attention(nn.Module):
    def __init__(self, own: Any, lengths: Sequence[int]) -> None:
        super().__init__()
        self.own = own
        self._lengths = lengths

    def forward(self, hidden: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, **given: Any) -> Any:
        """Return the output [1, T, E] for hidden states [1, T, E]. `bias` begins with those of shorter texts."""
        if len(self._lengths) == 1:
            return self.own(hidden, mask, bias, **given)
        assert bias is not None
        shape = (*hidden.shape[:-1], -1, self.own.attention_head_size)
        heads = [product(hidden).view(shape).transpose(1, 2) for product in (self.own.q, self.own.k, self.own.v)]
        parts = []
        for query, key, value in zip(*(torch.split(each, list(self._lengths), 2) for each in heads), strict=True):
            n = query.shape[2]
            parts.append(scaled_dot_product_attention(query, key, value, attn_mask=bias[:, :, :n, :n]))
        return (self.own.o(torch.cat(parts, 2).transpose(1, 2).reshape(hidden.shape)),)
