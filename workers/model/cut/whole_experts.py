"""Whole experts on each rank, in place of a slice of every expert: a rank computes the rows that are sent to its own.

Every rank of a stage has all rows, so no rows are exchanged: the ranks' outputs are summed, as those of slices are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def why_not_whole(experts: Any, num_ranks: int) -> str:
    """Return why ranks cannot hold whole experts of a transformers module; empty: they can."""
    name = type(experts).__name__
    # Transformers gives this attribute to modules that take rows, the experts of each row and their shares.
    if not hasattr(experts, "_is_expert_parallel") or any(
        len(parameter) != experts.num_experts for parameter in experts.parameters()
    ):
        return f"code of {name} does not compute some experts alone"
    if experts.num_experts < num_ranks:
        return f"{experts.num_experts} experts of {name} are fewer than {num_ranks} ranks"
    return ""


def compute_own_experts(experts: Any, first: int, end: int) -> None:
    """Let a module of experts, which holds those of `[first, end)` alone, add the outputs of these and no others."""

    def slots_of(chosen: Tensor) -> Tensor:
        return torch.where((chosen >= first) & (chosen < end), chosen - first, end - first)

    compute_in_slots(experts, end - first, slots_of)


def compute_in_slots(experts: Any, num_slots: int, slots_of: Callable[[Tensor], Tensor]) -> None:
    """Let a module of experts add the outputs of those that it holds, in `num_slots` slots, and of no others.

    `slots_of`: returns for the experts of each row [T, k] the slots [T, k] that compute them; `num_slots`: none here.
    """
    experts.num_experts = num_slots
    compute: Callable[[Tensor, Tensor, Tensor], Tensor] = experts.forward

    def forward(hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return [T, D] for rows [T, D], the experts of each row [T, k], of the whole model, and their shares."""
        own = slots_of(chosen)
        is_own = own < num_slots
        if _may_count_rows(experts, hidden):
            return _of_own_pairs(compute, hidden, own, shares, is_own)
        # Transformers' grouped products and ours skip pairs of the expert after the last, whose share must be 0.
        experts._is_expert_parallel = True
        return compute(hidden, own, torch.where(is_own, shares, 0))

    experts.forward = forward


def _may_count_rows(experts: Any, hidden: Tensor) -> bool:
    """Return whether the host may wait for the number of rows: not on GPUs, unless experts run one by one anyway."""
    return not hidden.is_cuda or experts.config._experts_implementation == "eager"


def _of_own_pairs(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, chosen: Tensor, shares: Tensor, is_own: Tensor
) -> Tensor:
    """Compute the pairs of a row and an own expert as rows with one expert each, and add them up in float32."""
    rows, places = is_own.nonzero(as_tuple=True)
    out = torch.zeros_like(hidden, dtype=torch.float32)
    if len(rows):
        outputs = compute(hidden[rows], chosen[rows, places, None], shares[rows, places, None])
        out.index_add_(0, rows, outputs.float())
    return out.to(hidden.dtype)
