"""How others place requests, for comparison: each looks at counts where `placement.choose` predicts seconds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class View:
    """What these policies know: one entry per replica, and of the request."""

    requests: Floats  # in flight
    cached: Floats  # tokens of the prompt that the replica has
    waiting: Floats  # uncached prompt tokens not computed yet
    context: Floats  # tokens that streams hold
    page_size: Floats
    num_tokens: int
    seed: int  # a hash of the request's id
    number: int  # of the placement, counted by the router


Policy = Callable[[View], int]
"""The place of the chosen replica in the view."""


def round_robin(view: View) -> int:
    return view.number % len(view.requests)


def least_requests(view: View) -> int:
    return _any_of(view.requests == view.requests.min(), view.seed)


def power_of_two(view: View) -> int:
    """The less busy of two that chance picks."""
    count = len(view.requests)
    if count == 1:
        return 0
    one = view.seed % count
    other = (one + 1 + (view.seed >> 16) % (count - 1)) % count
    return one if view.requests[one] <= view.requests[other] else other


def prefix_affinity(view: View, threshold: float = 0.5, most_apart: int = 32, most_times: float = 1.5) -> int:
    """SGLang's cache-aware rule: the longest cached prefix where it is `threshold` of the prompt, unless requests are
    spread unevenly; else who has the fewest."""
    low, high = view.requests.min(), view.requests.max()
    is_uneven = high - low > most_apart and high > most_times * low
    if not is_uneven and view.cached.max() > threshold * view.num_tokens:
        return _any_of(view.cached == view.cached.max(), view.seed)
    return least_requests(view)


def block_cost(view: View, overlap_weight: float = 1.0) -> int:
    """NVIDIA Dynamo's rule: pages to prefill, those that wait included, plus pages of the streams; the least wins."""
    prefill = (view.waiting + view.num_tokens - view.cached) / view.page_size
    cost = overlap_weight * prefill + (view.context + view.num_tokens) / view.page_size
    return _any_of(cost == cost.min(), view.seed)


POLICIES: Mapping[str, Policy] = {
    "round-robin": round_robin,
    "least-requests": least_requests,
    "power-of-two": power_of_two,
    "prefix-affinity": prefix_affinity,
    "block-cost": block_cost,
}


def _any_of(best: NDArray[np.bool_], seed: int) -> int:
    tied = np.flatnonzero(best)
    return int(tied[seed % len(tied)])
