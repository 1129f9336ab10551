"""Let the indexers of MiniMax-M3 give their keys and queries to our attention, which chooses the blocks of tokens.

As in `indexed.py`, transformers' layers pass on what an indexer returns, as `block_indices`, without reading it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

from crossdock.kernels.indexed_blocks import BlockIndexer, best_blocks
from crossdock.workers.model.forward.forward_context import context_or_none

_CHECKED = 24, {"block_size": 2, "topk_blocks": 4, "local_blocks": 1}  # tokens of a check, and what is chosen of them


class BlockIndexerCall:
    """Takes the place of an indexer's `forward`: returns a `BlockIndexer` in a forward pass of ours."""

    def __init__(self, module: Any, heads: tuple[int, int, int] | None) -> None:
        """Replace the method. `heads`: the first KV head of this rank, the end, and the number of all; None: all.

        Raises:
            ValueError: the indexer does not choose for each KV head, or a row's own block is not always chosen.
        """
        kv_heads = module.config.num_key_value_heads
        name = module.config.model_type
        if module.num_heads != kv_heads:
            raise ValueError(
                f"{name}: index_n_heads is {module.num_heads}, and an indexer is served that has one head for each of "
                f"the {kv_heads} KV heads"
            )
        if not 1 <= module.local_blocks <= module.topk_blocks:
            raise ValueError(
                f"{name}: index_local_blocks is {module.local_blocks}; served is 1 to index_topk_blocks "
                f"({module.topk_blocks}), so that a row always reads its own block"
            )
        self._module = module
        self._heads = slice(*heads[:2]) if heads else slice(0, kv_heads)
        self._own: Callable[..., Tensor] = module.forward
        module.forward = self
        if heads is not None:
            module.build_block_mask = partial(self._mask_of_heads, module.build_block_mask)

    def _mask_of_heads(self, build: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return transformers' mask [B, H, S, L] for the query heads of this rank, in a pass that is not ours."""
        config = self._module.config
        group = config.num_attention_heads // config.num_key_value_heads
        masks = build(*inputs)[:, ::group][:, self._heads]
        return masks if masks.shape[1] == 1 else masks.repeat_interleave(group, 1)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        past_key_values: Any,
        position_ids: Tensor,
    ) -> Any:
        """Return a `BlockIndexer` for the rows of the flat batch; where a pass is not ours, what transformers does."""
        if context_or_none() is None:
            return self._own(hidden_states, position_embeddings, past_key_values, position_ids)
        return self._indexer(hidden_states, position_embeddings)

    def _indexer(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor]) -> BlockIndexer:
        """Return the queries and keys of rows [1, T, E]."""
        module = self._module
        shape = 1, hidden.shape[1], -1, module.head_dim
        q = module.q_norm(module.q_proj(hidden).view(shape))[:, :, self._heads]
        k = module.k_norm(module.k_proj(hidden).view(shape))
        cos, sin = (each[..., : module.head_dim] for each in cos_sin)
        q, k = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        bounds = module.block_size, module.topk_blocks, module.local_blocks
        return BlockIndexer(k[0, :, 0], q[0], *bounds)

    def share_of_own_choices(self) -> float:
        """Return the share of blocks that transformers' code chooses too, for rows of random numbers."""
        module = self._module
        num_tokens, bounds = _CHECKED
        like = module.k_norm.weight
        random = torch.Generator().manual_seed(0)

        def rows(width: int) -> Tensor:
            return torch.randn(1, num_tokens, width, generator=random).to(like.device, like.dtype)

        hidden = rows(module.q_proj.in_features)
        angles = rows(module.head_dim // 4).repeat(1, 1, 2)  # a part of a head is rotated
        turns = angles.cos(), angles.sin()
        positions = torch.arange(num_tokens, device=like.device)
        usual = {name: getattr(module, name) for name in bounds}
        vars(module).update(bounds)
        try:
            theirs = self._own(hidden, turns, None, positions[None])[0, self._heads].transpose(0, 1)
            found = self._indexer(hidden, turns)
        finally:
            vars(module).update(usual)
        ours = best_blocks(found, found.queries, found.keys.float(), positions).blocks
        chosen = positions >= found.top_k  # earlier rows see no more than they may choose
        is_equal = ours[chosen][..., None] == theirs[chosen][..., None, :]
        return float(is_equal.any(-1).float().mean())
