"""Cut the tail of each row: min-p, top-k and top-p, rows together, each by its own numbers.

A neutral number stands for a filter that a row did not ask for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crossdock.workers.model.sampling.devices import blocks_of, copy_to, log_softmax
from crossdock.workers.model.sampling.row import SampleRow

_UNITS = 2.0**34
"""In which the highest score's weight is counted: float64 holds the sum of 500,000 such weights to the last unit."""


class TailCuts(NamedTuple):
    """Where each row's tail is cut, as columns [N, 1]."""

    top_k: Tensor  # int64; more than any vocabulary if unset
    top_p: Tensor  # float64; 2 if unset, since a sum of floats may pass 1
    log_min_p: Tensor  # float32; -inf if unset

    @classmethod
    def of(cls, rows: Sequence[SampleRow], device: torch.device) -> "TailCuts":
        params = [row.params for row in rows]
        return cls(
            copy_to(device, torch.tensor([[p.top_k if p.top_k > 0 else 1 << 40] for p in params])),
            copy_to(device, torch.tensor([[p.top_p if p.top_p < 1 else 2.0] for p in params], dtype=torch.float64)),
            copy_to(device, torch.tensor([[p.min_p] for p in params]).log_()),
        )


def temperatures_of(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    return copy_to(device, torch.tensor([[row.params.temperature] for row in rows]))  # [N, 1]


def row_sums(scores: Tensor, rows: Sequence[SampleRow], temperatures: Tensor) -> Tensor:
    """Return each row's sum of exp(scaled score - the highest) [N, 1] where top-p is a share of the whole row. Other
    rows have inf."""
    sums = torch.full((len(rows), 1), torch.inf, dtype=torch.float64, device=scores.device)
    params = [row.params for row in rows]
    is_nuclear = [p.top_p < 1 and p.top_k <= 0 and p.min_p <= 0 for p in params]
    if any(is_nuclear):
        # By log_softmax, whose sum runs along one row at a time: a plain sum over a lone row is split among threads.
        for block in blocks_of(scores):
            if any(is_nuclear[block]):
                scaled = scores[block] / temperatures[block]
                sums[block] = log_softmax(scaled).amax(-1, keepdim=True).neg_().double().exp_()
        others = [[not nuclear] for nuclear in is_nuclear]  # computed only because they share a block with one
        sums.masked_fill_(copy_to(scores.device, torch.tensor(others)), torch.inf)
    return sums


def kept_floor(head: Tensor, sums: Tensor, cuts: TailCuts, is_all: bool) -> tuple[Tensor, Tensor]:
    """Return the lowest kept score [n, 1], and whether `head` surely holds all kept scores [n].

    `head` [n, K] is each row's largest scaled scores, descending; `is_all` if that is the whole row. `sums` comes from
    `row_sums`. Equal scores are kept or cut together: which of them a sort puts first is an accident.
    """
    width = head.shape[-1]
    peak = head[:, :1]
    last = head[:, -1:]
    floor = peak + cuts.log_min_p
    kth = head.gather(-1, cuts.top_k.clamp(max=width) - 1)
    floor = torch.where(cuts.top_k <= width, torch.maximum(floor, kth), floor)
    # If the head holds all that min-p and top-k leave, then top-p is a share of that, else of the whole row. If they
    # cut, but below the head, it is neither: the row's sum is inf, the floor sinks to the last score, and the row
    # needs a wider head.
    is_exhausted = (last == -torch.inf) | is_all
    is_whole = (floor > last) | is_exhausted
    # In whole units, so that sums are exact: a GPU adds a lone row in another order than rows side by side.
    weights = (head - peak).double().exp_().mul_(_UNITS).round_().masked_fill_(head < floor, 0.0)
    cumulative = weights.cumsum(-1)
    is_nucleus = cumulative - weights < cuts.top_p * torch.where(is_whole, cumulative[:, -1:], sums * _UNITS)
    floor = torch.maximum(floor, head.masked_fill(~is_nucleus, torch.inf).amin(-1, keepdim=True))
    return floor, ((floor > last) | is_exhausted).squeeze(-1)
