"""Let the indexers of a model give their keys and queries to our attention, which chooses the tokens (DeepSeek-V3.2).

transformers' layers pass on what an indexer returns, as `indices`, without reading it: so an indexer may return more
than numbers of tokens. All else stays transformers' own code.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave

from crossdock.kernels.indexed_attention import Indexer, best_tokens, token_scores
from crossdock.workers.model.architecture import INDEXED_MODELS
from crossdock.workers.model.forward.forward_context import context_or_none
from crossdock.workers.model.forward.indexed_blocks import BlockIndexerCall

_CHECKED = 24, 8  # tokens of a check, and how many of them are chosen
_AGREED = 0.9  # share of equal choices: in bfloat16 sums in another order decide between nearly equal scores


class IndexerCall:
    """Takes the place of an indexer's `forward`: returns an `Indexer` in a forward pass of ours."""

    def __init__(self, module: Any) -> None:
        """Replace the method."""
        self._module = module
        by_pairs = INDEXED_MODELS[module.config.model_type] == "pairs"
        self._rotate = apply_rotary_pos_emb_interleave if by_pairs else apply_rotary_pos_emb
        self._own: Callable[..., Tensor] = module.forward
        module.forward = self

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        **rest: Any,
    ) -> Any:
        """Return an `Indexer` for the rows of the flat batch; where a pass is not ours, what transformers returns."""
        if context_or_none() is None:
            return self._own(hidden_states, q_resid, position_embeddings, attention_mask, position_ids, **rest)
        return self._indexer(hidden_states, q_resid, position_embeddings)

    def _indexer(self, hidden: Tensor, query_latents: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Indexer:
        """Return the queries, keys and weights of rows [1, T, E] with latents [1, T, Rq] of their queries."""
        module = self._module
        turned = module.qk_rope_head_dim
        q = module.wq_b(query_latents).view(1, hidden.shape[1], module.n_heads, module.head_dim)
        k = module.k_norm(module.wk(hidden))[:, :, None]
        q_turned, k_turned = self._rotate(q[..., :turned], k[..., :turned], *cos_sin, unsqueeze_dim=2)
        queries = torch.cat((q_turned, q[..., turned:]), -1)[0]
        keys = torch.cat((k_turned, k[..., turned:]), -1)[0, :, 0]
        weights = module.weights_proj(hidden.to(module.weights_proj.weight.dtype))[0].float()
        weights = weights * (module.n_heads**-0.5 * module.softmax_scale)
        return Indexer(module.layer_idx, keys, queries, weights, module.index_topk)

    def share_of_own_choices(self) -> float:
        """Return the share of tokens that transformers' code chooses too, for rows of random numbers."""
        module = self._module
        num_tokens, num_chosen = _CHECKED
        like = module.k_norm.weight
        random = torch.Generator().manual_seed(0)

        def rows(width: int) -> Tensor:
            return torch.randn(1, num_tokens, width, generator=random).to(like.device, like.dtype)

        hidden = rows(module.hidden_size)
        latents = rows(module.q_lora_rank)
        angles = rows(module.qk_rope_head_dim // 2).repeat(1, 1, 2)
        turns = angles.cos(), angles.sin()
        mask = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool, device=like.device).tril()
        module.index_topk, usual = num_chosen, module.index_topk
        try:
            theirs = self._own(hidden, latents, turns, mask, None)[0, num_chosen:]
        finally:
            module.index_topk = usual
        found = self._indexer(hidden, latents, turns)
        last = torch.arange(num_tokens, device=like.device)
        ours = best_tokens(token_scores(found, slice(0, num_tokens), found.keys.float()), last, num_chosen)[0]
        is_equal = ours[num_chosen:, :, None] == theirs[:, None, :]
        return float(is_equal.any(-1).float().mean())


def give_indexers(module: Any, layers: Sequence[int], heads: Mapping[int, tuple[int, int, int]]) -> None:
    """Let the indexers of `layers` give their keys to our attention. `heads`: of layers that ranks divide, see
    `ModelPart`.

    Raises:
        ValueError: an indexer would choose other tokens than transformers' code, or is of a form that is not served.
    """
    for each in list(module.modules()):
        if getattr(each, "layer_idx", None) not in layers:
            continue
        if (call := _call_of(each, heads)) is not None:
            share = call.share_of_own_choices()
            if not share >= _AGREED:
                raise ValueError(
                    f"{each.config.model_type}: of the tokens that the indexer of layer {each.layer_idx} chooses, "
                    f"transformers' own code chooses {share:.0%}"
                )


def _call_of(module: Any, heads: Mapping[int, tuple[int, int, int]]) -> IndexerCall | BlockIndexerCall | None:
    """Replace the `forward` of a layer's module, and return the replacement. None: the module is no indexer."""
    if hasattr(module, "index_topk"):
        return IndexerCall(module)
    if hasattr(module, "topk_blocks"):
        return BlockIndexerCall(module, heads.get(module.layer_idx))
    return None
