"""Predict what one request would cost at every replica, in seconds: when its first token would come, by how much
streams would be late, and how long the replica would work. Pure functions over the arrays of `Loads`, or over the
floats of an only replica's `Row`, which take less time.

The commands that the constants cite are in placement.py."""

# mypy: disable-error-code="no-any-return"
# Operations on figures, and figures by class, are `Any`: `CostFormula` has them for floats and for arrays.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import inf
from operator import attrgetter
from typing import Any, Generic, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.router.loads import BEHIND, FIRST, ReplicaFigures, Slots, lateness
from crossdock.router.query import Query
from crossdock.workers.report.live_profile import MEMORY_S, MOST_ENDS
from crossdock.workers.schedule.cost.formula import Figure, Floats
from crossdock.workers.schedule.first_token import (
    drain_seconds,
    first_token_seconds,
    largest,
    nothing_like,
    pace_of,
    prompt_seconds,
    seconds_of_equals,
    total_of,
)
from crossdock.workers.schedule.pictures.encoder_cost import batch_seconds
from crossdock.workers.schedule.policies.chunk_policies import Lent
from crossdock.workers.schedule.request.slo import SloClass

Figures: TypeAlias = ReplicaFigures[Any, Figure, Any]  # `Loads`, or a `Row`

RECENT_SHARE_BACKLOG_S = 0.3
"""Prefill backlog (s) above which the recent decode share predicts better than the current one. A prompt that is done
soon meets the streams of now, a longer one those that come and go meanwhile. Insensitive: always the recent share
(0), or always the current one (infinity), changes good requests by less than 0.15 points in knee, loaded and pools."""

MAX_UNSEEN_PROGRESS_S = 3.0
"""Silence (s) during which a replica is assumed to work off the prompts it last reported; the default of
`router.ttl_s`, after which the replica counts as stale. knee: 0 instead raises the median error of predicted TTFTs
from 5.8 % to 9.5 %; 100 changes nothing, as no replica there is silent for long."""


@dataclass(slots=True)
class PromptPrediction(Generic[Figure]):
    """One prompt at every replica, as if that replica computed all of it. Arrays `[slot]`, in seconds. Floats where one
    replica alone was asked for."""

    prefill: Figure  # of the replica's time for the uncached part of the prompt, with the pictures that it encodes
    alone: Figure  # to the first token if the replica has nothing else to do
    admission_ttft: Figure  # to the first token with `delays`, as the replica's own admission computes that; 0 where no
    # replica may refuse the request
    ttft: Figure  # to the first token
    chunk: Figure  # no seconds: tokens of the prompt that a step holds, if the replica has nothing else to do
    prompt_share: Figure  # no seconds: share of the replica's time that the prompt gets
    prompt_lateness: Figure  # by which the prompt makes running streams late, weighted by class
    delays: Figure  # by which it delays the first tokens of longer prompts of its class, and of prompts whose pages it
    # takes, of all together
    room_wait: Figure  # until a place and pages are free for the request

    def improve(self, other: "PromptPrediction[Figure]", slots: Slots, is_better: NDArray[np.bool_]) -> None:
        """In those of `slots` where `is_better`, put the figures of `other`, `[place in slots]`, which has more pages.

        Room stays as it is: pages that were fetched or loaded take as much as computed ones."""
        if is_better.any():
            better = slots[is_better]
            for mine, others in zip(_but_room(self), _but_room(other), strict=True):
                mine[better] = others[is_better]


_but_room = attrgetter(*(each.name for each in fields(PromptPrediction) if each.name != "room_wait"))


@dataclass(slots=True)
class Prediction(PromptPrediction[Figure]):
    """One request at every replica, as if that replica did all the work. Arrays `[slot]`, or floats, in seconds."""

    evicted: Figure  # of prefill that will be done again, because the request evicts cached pages
    gap: Figure  # between its output tokens
    decode_lateness: Figure  # by which its output makes all streams late, itself included, weighted by class
    decode_work: Figure  # of the replica's time for the output


def with_output(
    prompt: PromptPrediction[Figure], loads: Figures[Figure], query: Query, cached: Figure
) -> Prediction[Figure]:
    """Return the prediction for a request whose `prompt` is predicted. The other arguments are as in
    `predict_prompt`."""
    output = query.expected_output
    token: Any = loads.joining.seconds + loads.cost.context_seconds(query.num_tokens, 1)
    token = token + loads.cost.per_adapted * query.adapter_weights if query.adapter_weights else token
    gap = loads.future.gap + loads.joining.share * token
    evicted = _evicted_seconds(loads, query.num_tokens + output, cached)
    late = _decode_lateness(loads, loads.classes[loads.priority_of(query.slo_class)], gap, output)
    work = output * token * loads.pipeline.interval_share
    figures = [*_but_room(prompt), prompt.room_wait, evicted, gap, late, work]
    return Prediction(*figures)


def predict_prompt(
    loads: Figures[Figure],
    query: Query,
    cached: Figure,
    age: Figure,
    held: Figure | None = None,
    fair: Callable[[Figure, Figure], Figure] | None = None,
) -> PromptPrediction[Figure]:
    """Return the prediction for a request's prompt, which needs room for the expected output too.

    `cached`: tokens of the prompt that each replica has in its cache: pictures before their end are not encoded. `age`:
    seconds since each replica last reported something new, which grows without bound while a replica has nothing to do.
    `held`: of the cached tokens, those whose pages other requests hold: the others need room, also in the pool; None:
    the prompt has room at every replica, and none waits for pages. `fair`: of `own` and `done` seconds, what goes
    before the prompt where tenants have shares, see tenants.py; None: they have none.

    Over a row, `cached` and `age` are floats, and there are no pictures, no `held` and no `fair`.
    """
    num_tokens = query.num_tokens
    adapter = query.adapter_weights
    priority = loads.priority_of(query.slo_class)
    cost: Any = loads.cost
    larger = cost.larger
    rest = num_tokens - cached
    context = cached + rest / 2
    per_token = cost.per_token(context, adapter)
    chunk = loads.prompt_steps.tokens(cost, per_token)
    steps = loads.pipeline.interval_share, cached, num_tokens, chunk, adapter
    own = prompt_seconds(loads.cost, *steps)
    prompt_lateness = _prompt_lateness(loads, priority, rest, per_token, context)
    if query.items:
        encoder, num_items = _encoder_seconds(loads, query.items, cached)
        own += encoder * loads.pipeline.interval_share
        prompt_lateness += _encoder_lateness(loads, priority, rest, encoder, num_items)
    drain = drain_seconds(loads.cost, *steps)
    step_left = loads.step_left(age)
    done = loads.done_by_then(age, step_left, priority, MAX_UNSEEN_PROGRESS_S)
    ahead, delays = _waiting_then(loads, priority, done, step_left, own, fair)
    with_own = ahead + own
    output = query.expected_output
    room_wait = page_delays = nothing_like(rest)
    if held is not None:
        needed = num_tokens - held + output
        room_wait = _room_wait(loads, priority, needed, own, age)
        page_delays = _page_delays(loads, priority, needed, own, age)
    # More urgent prompts that come later go first. And the longer this prompt takes, the likelier it is that as many
    # streams will run meanwhile as did recently.
    excess = loads.shares.recent_excess * np.exp(age / -MEMORY_S) * (with_own / (with_own + RECENT_SHARE_BACKLOG_S))
    share = loads.shares.own[priority] - excess
    lent = Lent(loads.lent.share, loads.lent.seconds * loads.shares.delays_streams[priority])
    pace = pace_of(share, lent, with_own, larger)
    behind = larger(loads.queue.total - done - ahead, 0.0)  # of every class
    filled_step = loads.filled_step(ahead, own, behind)
    admission_ttft = nothing_like(rest)
    if query.may_refuse and largest(loads.refuses_late):
        admission_ttft = _admission_ttft(loads, priority, age, own, drain, lent, fair)
    return PromptPrediction(
        prefill=own,
        alone=own + drain,
        admission_ttft=admission_ttft,
        ttft=first_token_seconds(step_left, ahead, own, pace, drain, room_wait, filled_step, larger),
        chunk=chunk,
        prompt_share=1 / pace,
        prompt_lateness=prompt_lateness,
        delays=delays * pace + page_delays,
        room_wait=room_wait,
    )


def _admission_ttft(
    loads: Figures[Figure],
    priority: int,
    age: Figure,
    own: Figure,
    drain: Figure,
    lent: Lent,
    fair: Callable[[Figure, Figure], Figure] | None,
) -> Figure:
    """Return the seconds until the first token, with those by which the prompt delays others, as `Forecast.ttft` of the
    replica adds them: where the router knows what the replica knows, both are the same to the last digit."""
    larger = loads.cost.larger
    done = loads.done_now(age, priority, MAX_UNSEEN_PROGRESS_S)
    ahead, delays = _waiting_then(loads, priority, done, nothing_like(own), own, fair)
    pace = pace_of(loads.shares.now[priority], lent, ahead + own, larger)
    return first_token_seconds(0.0, ahead, own, pace, drain, 0.0, 0.0, larger) + delays * pace


def _encoder_seconds(loads: Any, items: Sequence[tuple[int, int, int]], cached: Any) -> tuple[Any, Any]:
    """Return the seconds of the encoder and the items to encode at every replica, which has no embedding of them."""
    if loads.encoder.per_token.max() <= 0:
        return np.zeros(len(cached)), np.zeros(len(cached))
    ends, rows, parts = np.array(items, dtype=float).T
    missing = (ends[:, None] > cached).astype(float)
    num_items = missing.sum(axis=0)
    costs = loads.encoder.base, loads.encoder.per_token, loads.encoder.per_square
    return batch_seconds(*costs, num_items, rows @ missing, (rows * rows / parts) @ missing), num_items


def _waiting_then(
    loads: Figures[Figure],
    priority: int,
    done: Figure,
    step_left: Figure,
    own: Figure,
    fair: Callable[[Figure, Figure], Figure] | None,
) -> tuple[Figure, Figure]:
    """Return the seconds of prompts that go before a prompt of `own` seconds, once `done` seconds of all of them are
    computed, and the seconds by which the prompt delays others.

    `step_left`: until then. A replica computes more urgent prompts first, and reported ones before those that were
    booked since."""
    larger, chosen = loads.cost.larger, loads.cost.chosen
    queue = loads.queue
    urgent = queue.urgent_reported[priority], queue.urgent_booked[priority]
    most = None
    if fair is not None:
        until_now = larger(done - step_left, 0.0)
        most = larger(urgent[0] - until_now, 0.0) + urgent[1] + fair(own, larger(until_now - urgent[0], 0.0))
        most = larger(most - step_left, 0.0)  # shares count from now on
    ahead = delays = nothing_like(own)
    for of_urgent, (counts, seconds) in zip(urgent, loads.waiting(priority), strict=True):
        ahead = ahead + larger(of_urgent - done, 0.0)
        done = larger(done - of_urgent, 0.0)
        if len(counts):
            total = total_of(seconds)
            left = larger(1 - done / larger(total, 1e-9), 0.0)
            before, after = seconds_of_equals(counts, seconds, own, loads.cost, left)
            ahead = ahead + before
            delays = delays + after * (left > 0)
            done = larger(done - total, 0.0)
    if most is None:
        return ahead, delays
    has_no_rival = np.isnan(most)  # elsewhere its tenant's turns decide what goes before
    return chosen(has_no_rival, ahead, most), chosen(has_no_rival, delays, 0.0)


def lacks_room(loads: Figures[Figure], priority: int, tokens: Figure | float, age: Figure) -> Any:
    """Return whether a request that takes room for `tokens` tokens must wait for pages or a place at each replica."""
    return (tokens > loads.room.longest_now[priority]) | (age >= loads.room.taken_at)


def _room_wait(loads: Any, priority: int, rest: Any, own: Any, age: Any) -> Any:
    """Return the seconds until enough requests have ended for a place and for the pages of `rest` tokens, which no
    request that waits has taken. A prompt of `own` seconds takes pages before longer ones that wait.

    Requests that come later and need less pass. So it is not less than requests have waited already that need no more:
    where more comes than ends, that is all that is known."""
    lacks = lacks_room(loads, priority, rest, age)
    if not lacks.any():
        return np.zeros(len(rest))
    pages = _pages(loads, rest)
    is_first = _goes_first(loads, own, age)
    ends = np.where(is_first, loads.ends[FIRST], loads.ends[BEHIND])
    needs, waited = loads.lacking
    passed = np.where((needs <= pages) & ~is_first, waited, 0.0).max(axis=0)
    until_free = _until_free(ends, pages - loads.room.free_pages[priority], 1 - loads.room.free_slots[priority], age)
    wait: Floats = np.where(lacks, np.maximum(until_free - age, passed), 0.0)
    return wait


def _goes_first(loads: Any, own: Any, age: Any) -> Any:
    """Return whether a prompt of `own` seconds gets pages before all prompts that wait for some at each replica."""
    return (own < loads.room.shortest_lacking) & (age < loads.room.taken_at)


def _page_delays(loads: Any, priority: int, rest: Any, own: Any, age: Any) -> Any:
    """Return the seconds by which prompts that wait for pages get them later, of all together, where the pages of
    `rest` tokens are taken before: by a prompt that has room now, or that is shorter."""
    if not loads.room.num_lacking.any():
        return np.zeros(len(rest))
    missing = loads.room.pages_lacking - loads.room.free_pages[priority]
    with_rest = missing + _pages(loads, rest)
    now, then = [_until_free(loads.ends[FIRST], each, 1.0, age) for each in (missing, with_rest)]
    takes = _goes_first(loads, own, age) | ~lacks_room(loads, priority, rest, age)
    delays: Floats = np.where(takes, loads.room.num_lacking * (then - now), 0.0)
    return delays


def _until_free(ends: Any, missing: Any, num_ends: Any, age: Any) -> Any:
    """Return the seconds from the last report until so many requests have ended that `missing` pages more are free.

    `ends`: as in `Loads`, BEHIND or FIRST. `num_ends`: at least so many."""
    seconds, freed = ends
    missing = np.maximum(missing, 0.0)
    places = np.arange(1, MOST_ENDS + 1)[:, None]
    until = np.concatenate([seconds[1:], np.full((1, len(missing)), inf)])  # the next end
    enough = (freed >= missing) & (places >= np.minimum(num_ends, MOST_ENDS)) & (until > age)
    at = np.where(enough.any(axis=0), enough.argmax(axis=0), MOST_ENDS - 1)
    # Each further `most` pages take the same time again.
    most = np.maximum(freed.max(axis=0), 1.0)
    return seconds[at, np.arange(len(missing))] * np.maximum(np.ceil(missing / most), 1.0)


def _evicted_seconds(loads: Figures[Figure], tokens: int, cached: Figure) -> Figure:
    """Return the seconds of prefill that are expected to be lost if the `tokens` that are not `cached` get pages."""
    if largest(loads.room.eviction_seconds) <= 0:
        return nothing_like(cached)
    larger = loads.cost.larger
    evicted = larger(_pages(loads, tokens - cached) - larger(loads.room.empty_pages, 0.0), 0.0)
    return evicted * loads.room.eviction_seconds


def _pages(loads: Figures[Figure], tokens: Figure) -> Figure:
    """Return how many pages a request of `tokens` tokens takes at every replica, of all groups and of its state."""
    return loads.group_pages(np.ceil(tokens / loads.pages.size)) + loads.pages.state_pages


def _prompt_lateness(loads: Figures[Figure], priority: int, rest: Figure, per_token: Figure, context: Figure) -> Figure:
    """Return the weighted seconds by which the steps that compute the prompt make running streams late."""
    larger = loads.cost.larger
    smaller = loads.cost.smaller
    chunk = smaller(loads.min_chunk, rest)
    cost = loads.cost
    streams = loads.step_streams
    per_step = loads.pipeline.chunk_gap
    more = chunk * per_token + cost.per_chunk_context * context
    more += cost.early_seconds(streams + chunk) - cost.early_seconds(streams)
    step = larger(loads.now.gap + more * per_step, cost.least_with_chunk * per_step)
    if largest(step) <= _tightest_tpot(loads.classes):  # no stream is late at any replica, which is the usual case
        return nothing_like(rest)
    late = lateness(step, loads.now.counts, loads.classes, larger) - loads.now.lateness
    return cost.chosen(
        loads.shares.delays_streams[priority], late * rest / (larger(chunk, 1.0) * loads.pipeline.depth), 0.0
    )


def _encoder_lateness(loads: Any, priority: int, rest: Any, seconds: Floats, num_items: Floats) -> Any:
    """Return the weighted seconds by which the steps that encode `num_items` pictures make running streams late.

    A picture is encoded whole, in the step of the first chunk that reads it. So a stream waits at least for one.
    """
    if not num_items.any():
        return np.zeros(len(rest))
    chunk = np.maximum(np.minimum(loads.min_chunk, rest), 1.0)
    steps = np.maximum(np.minimum(num_items, rest / chunk), 1.0)
    gap = loads.now.gap + seconds / steps * loads.pipeline.chunk_gap
    late = lateness(gap, loads.now.counts, loads.classes, np.maximum) - loads.now.lateness
    return np.where(loads.shares.delays_streams[priority], steps * late, 0.0)


def _decode_lateness(loads: Figures[Figure], slo: SloClass, gap: Figure, output: int) -> Figure:
    """Return the weighted seconds by which `output` steps of `gap` make all streams late, the request's included."""
    if largest(gap) <= _tightest_tpot(loads.classes):
        return nothing_like(gap)
    larger = loads.cost.larger
    more = lateness(gap, loads.future.counts, loads.classes, larger) - loads.future.lateness
    return output * (more + slo.weight * larger(gap - slo.tpot_s, 0.0))


def _tightest_tpot(classes: Sequence[SloClass]) -> float:
    return min([slo.tpot_s for slo in classes])
