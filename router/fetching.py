"""Choose from where each replica would fetch pages of a prompt's prefix, in predicted seconds; or that it fetches none.

A replica that has more of the prefix is a source. It computes nothing: it sends its pages over its link. Compared with
this are the seconds of prefill that the pages save at the replica that computes the rest. Pure functions over arrays of
replica slots.
"""

from collections.abc import Callable
from math import inf

import numpy as np

from crossdock.router.loading import saved_seconds
from crossdock.router.loads import Loads, Slots
from crossdock.router.placement import HANDOVER_S, PAIR_CANDIDATES, Fetch, Options, least
from crossdock.router.predict import PromptPrediction
from crossdock.workers.schedule.cost.formula import Floats

FETCH_CANDIDATES = 8
"""Replicas of least cost that are tried with a fetch. More would cost time at every decision."""


def with_sources(
    options: Options,
    ages: Floats,
    predict: Callable[[Slots, Floats], PromptPrediction[Floats]],
    link_waits: Floats,
    tokens_at: Callable[[int], float],
) -> Options:
    """Improve the prediction where replicas fetch pages and that costs less. Return the options, which name the source
    of each.

    Args:
        ages: seconds since each replica's last report.
        predict: returns the prediction at the replicas of some slots, with so many cached tokens each.
        tokens_at: returns how many tokens of the prompt the replica in a slot has reported. `options.cached` may have
            more, of prompts that are on their way to the replica.
        link_waits: seconds until each replica's link is free; infinity where a replica must not be a source.
    """
    loads, cached, here = options.loads, options.cached, options.prediction
    first = options.candidates.first
    sources = _best_sources(loads, cached, link_waits)
    if not len(sources):
        return options
    held = np.array([tokens_at(int(source)) for source in sources])
    most = float(held.max())
    if most <= cached.take(first).min():  # none has more than others, as of a text before all prompts
        return options._replace(alternatives=_alternatives(options, here.ttft[:0]))
    due = options.due_s()
    costs = options.prompt_costs(due, here)
    saved = saved_seconds(loads, cached, np.maximum(most - cached, 0.0))
    tried = least(first.compress(saved.take(first) > 0), costs - (options.slo.weight + 1) * saved, FETCH_CANDIDATES)
    before = here.ttft.take(tried) - here.prefill.take(tried) / here.prompt_share.take(tried)
    lacking = most - cached.take(tried)
    more = held[:, None] - cached.take(tried)  # [source, place in `tried`]
    travel = _travel_seconds(loads, more, sources, tried)
    # The source sees the question after its running step; the fetching replica sees the offer after its own.
    turn_left = loads.turn_left(ages)
    waits = HANDOVER_S + turn_left[tried] + (turn_left[sources] + link_waits[sources])[:, None]
    groups = options.candidates.groups
    may = (more > 0) & (groups[sources, None] == groups[tried])
    arrival = waits + travel
    gain = may * (more / lacking * saved.take(tried) - np.maximum(arrival - before, 0.0))
    at = np.flatnonzero(gain.max(axis=0) > 0)
    best = gain.argmax(axis=0)[at]
    tried = tried[at]
    if not len(tried):
        return options._replace(alternatives=_alternatives(options, here.ttft[:0]))
    fetched = predict(tried, held[best])
    before = fetched.ttft - fetched.prefill / fetched.prompt_share
    fetched.ttft += np.maximum(arrival[best, at] - before, 0.0)
    is_better = options.prompt_costs(due, fetched) < costs[tried]
    is_better &= fetched.room_wait <= 0  # a replica that lacks room declines the offered pages
    alternatives = _alternatives(options, fetched.ttft)
    here.improve(fetched, tried, is_better)
    fetches = [each[is_better].tolist() for each in (tried, sources[best], held[best], travel[best, at])]
    found = {slot: Fetch(*fetch) for slot, *fetch in zip(*fetches, strict=True)}
    return options._replace(alternatives=alternatives, fetches=found)


def _alternatives(options: Options, fetched: Floats) -> dict[str, float]:
    """Return the least predicted TTFT, in seconds, of each way to use the longest prefix or not to.

    `fetched`: predicted TTFTs with a fetch."""
    first = options.candidates.first
    is_holder = options.cached.take(first) == options.cached.max()
    ttft = options.prediction.ttft.take(first)
    ways = {"holder": ttft.compress(is_holder), "fetch": fetched, "compute": ttft.compress(~is_holder)}
    return {way: round(float(seconds.min()), 6) for way, seconds in ways.items() if len(seconds)}


def _best_sources(loads: Loads, cached: Floats, link_waits: Floats) -> Slots:
    """Return the `PAIR_CANDIDATES` replicas that would save an average replica the most seconds."""
    holders = ((cached > 0) & (link_waits < inf)).nonzero()[0]
    if len(holders) <= PAIR_CANDIDATES:
        return holders
    per_token = np.add.reduce(loads.cost.per_prefill_token.take(holders)) / len(holders)
    cost = cached * (loads.pages.num_bytes / (loads.pages.size * loads.pages.bytes_per_second) - per_token)
    cost += loads.pages.transfer_s + link_waits
    return least(holders, cost, PAIR_CANDIDATES)


def _travel_seconds(loads: Loads, more: Floats, sources: Slots, slots: Slots) -> Floats:
    """Return the seconds `[source, slot]` that the pages of `more` tokens take on a source's link."""
    pages = loads.group_pages(np.maximum(more, 0.0) / loads.pages.size[slots], slots) + loads.pages.state_pages[slots]
    num_bytes = pages * loads.pages.num_bytes[slots]
    travel: Floats = loads.pages.transfer_s[sources, None] + num_bytes / loads.pages.bytes_per_second[sources, None]
    return travel
