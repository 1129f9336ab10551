"""Predict what one request would cost at every replica, in seconds: when its first token would come, by how much
streams would be late, and how long the replica would work. Pure functions over the arrays of `Loads`, or over the
floats of an only replica's `Row`, which take less time.

The commands that the constants cite are in placement.py."""

# mypy: disable-error-code="no-any-return"
# Operations on figures, and figures by class, are `Any`: `CostFormula` has them for floats and for arrays.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from math import inf
from operator import add, attrgetter
from typing import Any, Generic, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.router.loads import ReplicaFigures, Slots
from crossdock.router.work import EXPECTED_OUTPUT_TOKENS
from crossdock.workers.report.advertise import MEMORY_S, MOST_ENDS
from crossdock.workers.schedule.cost.formula import Figure, Floats
from crossdock.workers.schedule.pacing.chunk_policies import pace_beside
from crossdock.workers.schedule.pacing.chunking import LEAST_SHARE
from crossdock.workers.schedule.slo import SloClass

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
    admission_ttft: Figure  # to the first token, as the replica's own admission computes that
    ttft: Figure  # to the first token
    prompt_share: Figure  # no seconds: share of the replica's time that the prompt gets
    prompt_lateness: Figure  # by which the prompt makes running streams late, weighted by class
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
    prompt: PromptPrediction[Figure],
    loads: Figures[Figure],
    num_tokens: int,
    output: int,
    priority: int,
    cached: Figure,
    classes: Sequence[SloClass],
    adapter: int = 0,
) -> Prediction[Figure]:
    """Return the prediction for a prompt and an expected output of `output` tokens. The other arguments are those of
    `predict_prompt`."""
    slo = classes[priority]
    token: Any = loads.per_joining_decode + loads.cost.per_context * num_tokens
    token = token + loads.cost.per_adapted * adapter if adapter else token
    gap = loads.future_gap + loads.token_share * token
    evicted = _evicted_seconds(loads, num_tokens + output, cached)
    late, work = _decode_lateness(loads, slo, gap, output, classes), output * token * loads.interval_share
    seconds = prompt.prefill, prompt.alone, prompt.admission_ttft, prompt.ttft, prompt.prompt_share
    return Prediction(*seconds, prompt.prompt_lateness, prompt.room_wait, evicted, gap, late, work)


def predict_prompt(
    loads: Figures[Figure],
    num_tokens: int,
    max_tokens: int,
    priority: int,
    cached: Figure,
    age: Figure,
    classes: Sequence[SloClass],
    items: Sequence[tuple[int, int, int]] = (),
    fair: Callable[[Figure, Figure], Figure] | None = None,
    held: Figure | None = None,
    adapter: int = 0,
) -> PromptPrediction[Figure]:
    """Return the prediction for a prompt of `num_tokens`, which needs room for an output of at most `max_tokens` too.

    `cached`: tokens of the prompt that each replica has in its cache. `age`: seconds since each replica last reported
    something new, which grows without bound while a replica has nothing to do. `items`: (end, rows, parts) of each
    item that the replica encodes, unless its cached tokens cover the item. `fair`: of `own` and `done` seconds, what
    goes before the prompt where tenants have shares, see tenants.py; None: they have none. `held`: of the cached
    tokens, those whose pages other requests hold: the others need room, also in the pool; None: the prompt has room
    at every replica. `adapter`: numbers in the matrices of the prompt's adapter.

    Over a row, `cached` and `age` are floats, and there are no `items`, no `fair` and no `held`.
    """
    cost: Any = loads.cost
    larger = cost.larger
    rest = num_tokens - cached
    context = cached + rest / 2
    per_token = cost.per_token(context, adapter)
    own = _prefill_seconds(loads, num_tokens, rest, cached, adapter)
    prompt_lateness = _prompt_lateness(loads, priority, rest, per_token, context, classes)
    if items:
        encoder, num_items = _encoder_seconds(loads, items, cached)
        own += encoder * loads.interval_share
        prompt_lateness += _encoder_lateness(loads, priority, rest, encoder, num_items, classes)
    drain = _drain_seconds(loads, rest, cached, adapter)
    ahead = _backlog_ahead(loads, priority, age, own, fair)
    behind = ahead + own
    output = min(max_tokens, EXPECTED_OUTPUT_TOKENS)
    room_wait = _nothing(rest) if held is None else _room_wait(loads, priority, num_tokens - held + output, age)
    # More urgent prompts that come later go first. And the longer this prompt takes, the likelier it is that as many
    # streams will run meanwhile as did recently.
    excess = loads.recent_excess_share * np.exp(age / -MEMORY_S) * (behind / (behind + RECENT_SHARE_BACKLOG_S))
    share = larger(loads.own_prefill_share[priority] - excess, LEAST_SHARE)
    lent = loads.lent_share, loads.lent_seconds * loads.delays_streams[priority], behind, larger
    pace = pace_beside(share, *lent)
    ttft = larger(larger(ahead * pace, loads.step_left), room_wait) + own * pace + drain
    return PromptPrediction(
        prefill=own,
        alone=own + drain,
        admission_ttft=behind * pace_beside(loads.prefill_share[priority], *lent) + drain,
        ttft=ttft,
        prompt_share=1 / pace,
        prompt_lateness=prompt_lateness,
        room_wait=room_wait,
    )


def _most(figures: Any) -> float:
    """Return the largest of all replicas' figures; of an only replica's, the figure."""
    return np.maximum.reduce(figures) if isinstance(figures, np.ndarray) else figures  # without the frames of `max`


def _nothing(like: Any) -> Any:
    return np.zeros(len(like)) if isinstance(like, np.ndarray) else 0.0


def _encoder_seconds(loads: Any, items: Sequence[tuple[int, int, int]], cached: Any) -> tuple[Any, Any]:
    """Return the encoder's seconds and items at every replica: `Encoding.seconds_left` with no embedding in memory."""
    if loads.encoder_per_row.max() <= 0:
        return np.zeros(len(cached)), np.zeros(len(cached))
    ends, rows, parts = np.array(items, dtype=float).T
    missing = (ends[:, None] > cached).astype(float)
    num_items = missing.sum(axis=0)
    seconds: Floats = loads.encoder_base * (num_items > 0) + loads.encoder_per_row * (rows @ missing)
    seconds += loads.encoder_per_square * ((rows * rows / parts) @ missing)
    return seconds, num_items


def _prefill_seconds(loads: Figures[Figure], num_tokens: int, rest: Figure, cached: Figure, adapter: int) -> Figure:
    """Return the seconds of the uncached `rest` of a prompt at every replica, as `Forecast.prefill_seconds` does."""
    if num_tokens <= -_most(-loads.max_step_tokens):  # one step, which is the usual case
        return loads.cost.chunk_step_seconds(cached, rest, adapter) * loads.interval_share
    return loads.cost.prefill_seconds(cached, cached + rest, loads.max_step_tokens, adapter) * loads.interval_share


def _drain_seconds(loads: Figures[Figure], rest: Figure, cached: Figure, adapter: int) -> Figure:
    """Return the seconds that the prompt's last step takes to leave a pipeline, beyond the interval between steps."""
    after = 1 - loads.interval_share
    if _most(after) <= 0:  # no replica is a pipeline, which is the usual case
        return _nothing(rest)
    last = loads.cost.last_step_seconds(cached, cached + rest, loads.max_step_tokens, adapter)
    return loads.cost.larger(after, 0.0) * last


def _backlog_ahead(
    loads: Figures[Figure], priority: int, age: Figure, own: Figure, fair: Callable[[Figure, Figure], Figure] | None
) -> Figure:
    """Return the seconds of waiting prompts that go before a prompt of `own` seconds, as `forecast.predicted_ttft` does
    for single prompts. Since a replica last reported, it has worked off some of what it reported."""
    larger, smaller = loads.cost.larger, loads.cost.smaller
    done = smaller(age, MAX_UNSEEN_PROGRESS_S) * loads.prefill_share[priority]
    urgent, urgent_booked = loads.urgent_reported[priority], loads.urgent_booked[priority]
    ahead = larger(urgent - done, 0.0)
    most = None if fair is None else ahead + urgent_booked + fair(own, larger(done - urgent, 0.0))
    # Prompts of the same class share the time: each delays this one by this one's own length at most.
    reported, booked = loads.waiting(priority)
    done = done - urgent
    if len(reported[0]):
        total = _sum(reported[1])
        left = smaller(larger(1 - done / larger(total, 1e-9), 0.0), 1.0)
        ahead += _at_most(loads, reported, left, own)
        done -= total
    # Booked prompts are computed after those, and not before the step ended that ran as the first one was booked.
    if len(reported[0]) or len(booked[0]) or _most(urgent_booked) > 0:
        since = smaller(age - loads.first_booked, MAX_UNSEEN_PROGRESS_S) - loads.step_left
        done = smaller(done, since * loads.prefill_share[priority])
        done = larger(done, 0.0)
        ahead += larger(urgent_booked - done, 0.0)
        left = 1 - (done - urgent_booked) / larger(_sum(booked[1]), 1e-9)
        left = smaller(larger(left, 0.0), 1.0)
        ahead += _at_most(loads, booked, left, own)
    return ahead if most is None else np.where(np.isnan(most), ahead, most)


def _at_most(loads: Figures[Figure], waiting: Any, left: Figure, own: Figure) -> Figure:
    """Return the seconds that are left of waiting prompts, of each at most `own`."""
    smaller, (counts, seconds) = loads.cost.smaller, waiting
    if isinstance(counts, np.ndarray):
        return _sum(smaller(seconds * left, counts * own))
    return _sum([smaller(each * left, count * own) for count, each in zip(counts, seconds, strict=True)])


def _sum(groups: Any) -> Any:
    """Add the groups of every replica, or of an only one, in order."""
    # In half the time of `Floats.sum` where replicas have few groups.
    return np.add.reduce(groups) if isinstance(groups, np.ndarray) else reduce(add, groups, 0.0)


def lacks_room(loads: Figures[Figure], priority: int, tokens: Figure | float, age: Figure) -> Any:
    """Return whether a request that takes room for `tokens` tokens must wait for pages or a place at each replica."""
    return (tokens > loads.max_prompt_now[priority]) | (age >= loads.taken_at)


def _room_wait(loads: Any, priority: int, rest: Any, age: Any) -> Any:
    """Return the seconds until enough requests have ended for a place and for the pages of `rest` tokens, which no
    request that waits has taken."""
    lacks = lacks_room(loads, priority, rest, age)
    if not lacks.any():
        return np.zeros(len(rest))
    missing = np.maximum(_pages(loads, rest) - loads.free_pages[priority], 0.0)
    places = np.arange(1, MOST_ENDS + 1)[:, None]
    seconds, freed = loads.ends
    until = np.concatenate([seconds[1:], np.full((1, len(rest)), inf)])  # the next end
    enough = (freed >= missing) & (places >= np.minimum(1 - loads.free_places[priority], MOST_ENDS)) & (until > age)
    at = np.where(enough.any(axis=0), enough.argmax(axis=0), MOST_ENDS - 1)
    slots = np.arange(len(rest))
    most = np.maximum(freed.max(axis=0), 1.0)
    later = np.maximum(np.ceil(missing / most), 1.0)  # as many pages more take as long again
    wait: Floats = np.where(lacks, np.maximum(seconds[at, slots] * later - age, 0.0), 0.0)
    return wait


def _evicted_seconds(loads: Figures[Figure], tokens: int, cached: Figure) -> Figure:
    """Return the seconds of prefill that are expected to be lost if the `tokens` that are not `cached` get pages."""
    if _most(loads.eviction_seconds) <= 0:
        return _nothing(cached)
    larger = loads.cost.larger
    evicted = larger(_pages(loads, tokens - cached) - larger(loads.empty_pages, 0.0), 0.0)
    return evicted * loads.eviction_seconds


def _pages(loads: Figures[Figure], tokens: Figure) -> Figure:
    """Return how many pages a request of `tokens` tokens takes at every replica, of all groups and of its state."""
    return loads.group_pages(np.ceil(tokens / loads.page_size)) + loads.state_pages


def _prompt_lateness(
    loads: Figures[Figure], priority: int, rest: Figure, per_token: Figure, context: Figure, classes: Sequence[SloClass]
) -> Figure:
    """Return the weighted seconds by which the steps that compute the prompt make running streams late."""
    larger, smaller = loads.cost.larger, loads.cost.smaller
    chunk = smaller(loads.min_chunk, rest)
    cost, streams, per_step = loads.cost, loads.step_streams, loads.chunk_gap
    more = chunk * per_token + cost.per_chunk_context * context
    more += cost.early_seconds(streams + chunk) - cost.early_seconds(streams)
    step = larger(loads.gap + more * per_step, cost.least_with_chunk * per_step)
    if _most(step) <= _tightest_tpot(classes):  # no stream is late at any replica, which is the usual case
        return _nothing(rest)
    late = _lateness(step, loads.streams, classes, larger) - loads.lateness
    return cost.chosen(loads.delays_streams[priority], late * rest / (larger(chunk, 1.0) * loads.depth), 0.0)


def _encoder_lateness(
    loads: Any, priority: int, rest: Any, seconds: Floats, num_items: Floats, classes: Sequence[SloClass]
) -> Any:
    """Return the weighted seconds by which the steps that encode `num_items` pictures make running streams late.

    A picture is encoded whole, in the step of the first chunk that reads it. So a stream waits at least for one.
    """
    if not num_items.any():
        return np.zeros(len(rest))
    chunk = np.maximum(np.minimum(loads.min_chunk, rest), 1.0)
    steps = np.maximum(np.minimum(num_items, rest / chunk), 1.0)
    gap = loads.gap + seconds / steps * loads.chunk_gap
    late = _lateness(gap, loads.streams, classes, np.maximum) - loads.lateness
    return np.where(loads.delays_streams[priority], steps * late, 0.0)


def _decode_lateness(
    loads: Figures[Figure], slo: SloClass, gap: Figure, output: int, classes: Sequence[SloClass]
) -> Figure:
    """Return the weighted seconds by which `output` steps of `gap` make all streams late, the request's included."""
    if _most(gap) <= _tightest_tpot(classes):
        return _nothing(gap)
    larger = loads.cost.larger
    more = _lateness(gap, loads.future_streams, classes, larger) - loads.future_lateness
    return output * (more + slo.weight * larger(gap - slo.tpot_s, 0.0))


def _tightest_tpot(classes: Sequence[SloClass]) -> float:
    return min([slo.tpot_s for slo in classes])


def _lateness(gap: Figure, streams: Any, classes: Sequence[SloClass], larger: Callable[..., Any]) -> Figure:
    """Return `loads.lateness` of every replica."""
    late, longest = _nothing(gap), _most(gap)
    for slo, count in zip(classes, streams, strict=True):
        if longest > slo.tpot_s:
            late += larger(gap - slo.tpot_s, 0.0) * (slo.weight * count)
    return late
