"""Policies of other routers, for comparison: each looks at counts where `placement.choose` predicts seconds."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crossdock.router.loads import Slots
from crossdock.router.placement import Candidates, Query
from crossdock.router.replica_table import ReplicaTable
from crossdock.workers.schedule.cost.formula import Floats


@dataclass(frozen=True, slots=True)
class PolicyView:
    """The facts that these policies use: of the request, and arrays with one entry per replica."""

    requests: Floats  # in flight
    cached: Floats  # tokens of the prompt that the replica has
    waiting: Floats  # uncached prompt tokens that are not computed yet
    context: Floats  # tokens in the contexts of streams
    page_size: Floats
    num_tokens: int
    seed: int  # a hash of the request's id
    number: int  # of the placement, counted by the router


Policy = Callable[[PolicyView], int]
"""Returns the index of the chosen replica in the view."""


def place(
    policy: Policy, table: ReplicaTable, candidates: Candidates, query: Query, cached: Floats, number: int
) -> tuple[int, int]:
    """Return the slots of the (prefill, decode) replicas that a policy chooses: a pair where there are replicas of role
    `prefill`, the same slot twice otherwise. `number` counts placements."""

    def pick(slots: Slots) -> int:
        replicas = [table.replica_in(slot) for slot in slots]
        tokens = np.array([replica.count_tokens() for replica in replicas], dtype=float)
        view = PolicyView(
            requests=np.array([replica.num_requests for replica in replicas], dtype=float),
            cached=cached[slots],
            waiting=tokens[:, 0],
            context=tokens[:, 1],
            page_size=table.loads.page_size[slots],
            num_tokens=query.num_tokens,
            seed=zlib.crc32(query.request_id.encode()),
            number=number,
        )
        return int(slots[policy(view)])

    prefills = np.intersect1d(candidates.prefills, table.slots_of("prefill"))
    if not len(prefills) or not len(candidates.decodes):
        alone = candidates.alone if len(candidates.alone) else candidates.decodes
        mixed = np.intersect1d(alone, table.slots_of("mixed"))
        slot = pick(mixed if len(mixed) else alone)
        return slot, slot
    prefill = pick(prefills)
    decodes = candidates.decodes[table.groups[candidates.decodes] == table.groups[prefill]]
    return (prefill, pick(decodes)) if len(decodes) else (prefill, prefill)


def round_robin(view: PolicyView) -> int:
    return view.number % len(view.requests)


def least_requests(view: PolicyView) -> int:
    return _any_of(view.requests == view.requests.min(), view.seed)


def power_of_two(view: PolicyView) -> int:
    """Return the less busy one of two replicas taken at random."""
    count = len(view.requests)
    if count == 1:
        return 0
    one = view.seed % count
    other = (one + 1 + (view.seed >> 16) % (count - 1)) % count
    return one if view.requests[one] <= view.requests[other] else other


def prefix_affinity(view: PolicyView, threshold: float = 0.5, max_apart: int = 32, max_ratio: float = 1.5) -> int:
    """Return SGLang's cache-aware choice: the longest cached prefix if it is more than `threshold` of the prompt.

    If requests are spread unevenly (by more than `max_apart`, and by more than `max_ratio` times the fewest), or no
    prefix is long enough: the fewest requests. SGLang's defaults were 0.5, 32 and 1.0001, later 0.3, 64 and 1.5.
    """
    low, high = view.requests.min(), view.requests.max()
    is_uneven = high - low > max_apart and high > max_ratio * low
    if not is_uneven and view.cached.max() > threshold * view.num_tokens:
        return _any_of(view.cached == view.cached.max(), view.seed)
    return least_requests(view)


def block_cost(view: PolicyView, overlap_weight: float = 1.0) -> int:
    """Return NVIDIA Dynamo's choice: the least pages to prefill, waiting ones included, plus pages of the streams."""
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
