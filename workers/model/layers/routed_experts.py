"""Compute each expert for its routed rows alone, where transformers computes all rows in all experts.

Llama 4's experts get a copy of all rows for each expert, multiplied by the router's score, which is mostly 0. Several
ranks would also sum their parts of all these copies.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor


def skip_idle_experts(module: Any) -> None:
    """Give Llama 4's experts on a CPU routed rows alone. On GPUs the number of rows is not known before a step."""
    for mixture in module.modules():
        if type(mixture).__name__ == "Llama4TextMoe" and mixture.experts.gate_up_proj.device.type == "cpu":
            mixture.forward = partial(_mix, mixture)
            mixture.experts.forward = partial(_compute, mixture.experts)


def _mix(mixture: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, D] of all experts, the shared one included, and the router's logits [T, E]."""
    hidden = hidden.reshape(-1, mixture.hidden_dim)
    scores, logits = mixture.router(hidden)  # [T, E] each
    chosen = logits.topk(mixture.top_k).indices  # [T, k]
    order = chosen.flatten().argsort(stable=True)  # the rows of one expert lie together
    rows = order // mixture.top_k
    counts = chosen.flatten().bincount(minlength=scores.shape[1])
    routed = hidden[rows] * scores.gather(1, chosen).flatten()[order, None]  # [T * k, D]
    out: Tensor = mixture.shared_expert(hidden)
    return out.index_add_(0, rows, mixture.experts(routed, counts.tolist())), logits


def _compute(experts: Any, routed: Tensor, counts: list[int]) -> Tensor:
    """Return the outputs [N, D] of `routed` [N, D]. `counts`: rows of each expert, in their order."""
    parts = []
    for expert, rows in enumerate(torch.split(routed, counts)):
        if len(rows):
            gate, up = (rows @ experts.gate_up_proj[expert]).chunk(2, dim=-1)
            parts.append((up * experts.act_fn(gate)) @ experts.down_proj[expert])
    return torch.cat(parts)
