"""Policies of other routers, for comparison: each looks at counts where `placement.choose` predicts seconds."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crossdock.router.loads import Slots
from crossdock.router.placement import Options, SlotPair
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


def place(policy: Policy, table: ReplicaTable, options: Options, number: int) -> SlotPair:
    """Return the slots of the replicas that a policy chooses: a pair where there are replicas of role `prefill`, the
    same slot twice otherwise. `number` counts placements."""
    query, candidates = options.query, options.candidates

    def view_of(slots: Slots) -> PolicyView:
        replicas = [table.replica_in(slot) for slot in slots]
        tokens = np.array([replica.count_tokens() for replica in replicas], dtype=float)
        return PolicyView(
            requests=np.array([replica.num_requests for replica in replicas], dtype=float),
            cached=options.cached[slots],
            waiting=tokens[:, 0],
            context=tokens[:, 1],
            page_size=table.loads.pages.size[slots],
            num_tokens=query.num_tokens,
            seed=zlib.crc32(query.request_id.encode()),
            number=number,
        )

    def pick(slots: Slots) -> int:
        return int(slots[policy(view_of(slots))])

    prefills = table.with_role("prefill", candidates.prefills)
    if not len(prefills) or not len(candidates.decodes):
        alone = candidates.alone if len(candidates.alone) else candidates.decodes
        mixed = table.with_role("mixed", alone)
        slot = pick(mixed if len(mixed) else alone)
        return SlotPair(slot, slot)
    own = np.intersect1d(candidates.decodes, candidates.alone)
    if policy in HOLDERS and len(own) and (at := HOLDERS[policy](view_of(own))) is not None:
        return SlotPair(int(own[at]), int(own[at]))
    prefill = pick(prefills)
    decodes = candidates.decodes[table.groups[candidates.decodes] == table.groups[prefill]]
    return SlotPair(prefill, pick(decodes) if len(decodes) else prefill)


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
    low = view.requests.min()
    high = view.requests.max()
    is_uneven = high - low > max_apart and high > max_ratio * low
    if not is_uneven and view.cached.max() > threshold * view.num_tokens:
        return _any_of(view.cached == view.cached.max(), view.seed)
    return least_requests(view)


def block_cost(view: PolicyView, overlap_weight: float = 1.0) -> int:
    """Return NVIDIA Dynamo's choice: the least pages to prefill, waiting ones included, plus pages of the streams."""
    prefill = (view.waiting + view.num_tokens - view.cached) / view.page_size
    cost = overlap_weight * prefill + (view.context + view.num_tokens) / view.page_size
    return _any_of(cost == cost.min(), view.seed)


def conversation_holder(view: PolicyView) -> int | None:
    """Return the replica that has most of a conversation; None: the prompt begins one.

    A prompt counts as a later turn where a replica has more than half of the prompt: no request names its conversation.
    """
    if view.cached.max() <= view.num_tokens / 2:
        return None
    return _any_of(view.cached == view.cached.max(), view.seed)


def pinned(view: PolicyView) -> int:
    """Return ConServe's choice: a conversation stays where its first turn was decoded, whatever waits there.

    A new one goes where streams and prompts hold the fewest tokens. Of pools, later turns are computed by the decode
    replica.
    """
    holder = conversation_holder(view)
    held = view.context + view.waiting
    return holder if holder is not None else _any_of(held == held.min(), view.seed)


def gated_holder(view: PolicyView, tokens_per_s: float = 20_000.0, most_s: float = 2.0) -> int | None:
    """Return the replica with the longest cached prefix while its remaining prompt tokens take at most `most_s`.

    `tokens_per_s`: of every replica. llm-d's guide has both values measured for each cluster. Here they are those of
    an H100 with a model of 8 billion parameters (`crossdock simulate`, the trace of conversations), and a fifth of the
    standard class's time to first token.
    """
    if not view.cached.max():
        return None
    at = _any_of(view.cached == view.cached.max(), view.seed)
    return at if _remaining(view)[at] <= most_s * tokens_per_s else None


def remaining_work(view: PolicyView) -> int:
    """Return a choice after llm-d's gate: `gated_holder`, else the replica with the fewest prompt tokens left."""
    holder = gated_holder(view)
    left = _remaining(view)
    return holder if holder is not None else _any_of(left == left.min(), view.seed)


def _remaining(view: PolicyView) -> Floats:
    """Return the prompt tokens that each replica would have to compute with this prompt."""
    left: Floats = view.waiting + view.num_tokens - view.cached
    return left


POLICIES: Mapping[str, Policy] = {
    "round-robin": round_robin,
    "least-requests": least_requests,
    "power-of-two": power_of_two,
    "prefix-affinity": prefix_affinity,
    "block-cost": block_cost,
    "pinned": pinned,
    "remaining-work": remaining_work,
}
HOLDERS: Mapping[Policy, Callable[[PolicyView], int | None]] = {
    pinned: conversation_holder,
    remaining_work: gated_holder,
}
"""By policy: the decode replica that computes a prompt itself; None: a pair serves it."""


def _any_of(best: NDArray[np.bool_], seed: int) -> int:
    tied = np.flatnonzero(best)
    return int(tied[seed % len(tied)])
