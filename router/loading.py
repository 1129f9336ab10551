"""Predict where a replica loads pages of a prompt's prefix from the tiers below its pool, in place of computing them.

The replica decides so itself, by the same `loads_sooner`: see `TierLoading`.
"""

from collections.abc import Callable, Sequence

import numpy as np

from crossdock.router.loads import Loads, Slots
from crossdock.router.placement import Options, least
from crossdock.router.predict import PromptPrediction
from crossdock.workers.report.live_profile import TierLoads
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.first_token import loads_sooner

LOAD_CANDIDATES = 8
"""Replicas of least cost that are tried with a load. More would cost time at every decision."""


def with_loads(
    options: Options,
    by_tier: Sequence[Floats],
    predict: Callable[[Slots, Floats], PromptPrediction[Floats]],
    tiers_of: Callable[[int], TierLoads],
) -> Options:
    """Improve the prediction where replicas load pages sooner than they compute them. Return the options, which name
    the replicas that do.

    Args:
        options: their `cached` counts the pages in pools.
        by_tier: the same with the pages in each replica's fastest tier, and where there is another, with that one too.
        predict: returns the prediction at the replicas of some slots, with so many cached tokens each.
        tiers_of: returns the prices of the loads of the replica in a slot.
    """
    loads, cached, here = options.loads, options.cached, options.prediction
    more = by_tier[-1] - cached
    first = options.candidates.first
    slots: Slots = first.compress(more.take(first) > 0)
    if len(slots) > LOAD_CANDIDATES:
        costs = options.prompt_costs(options.due_s(), here)
        slots = least(slots, costs - (options.slo.weight + 1) * saved_seconds(loads, cached, more), LOAD_CANDIDATES)
    if not len(slots):
        return options
    before = cached[slots]
    tiers = [tiers_of(int(slot)) for slot in slots]
    queue = np.array([each.queue_seconds for each in tiers])
    size = loads.pages.size[slots]
    load_s: Floats = np.zeros(len(slots))
    for tokens, number in zip(by_tier, (0, -1), strict=False):
        page_s = np.array([each.page_seconds[number] if each.page_seconds else 0.0 for each in tiers])
        load_s += loads.group_pages((tokens[slots] - before) / size, slots) * page_s
        before = tokens[slots]
    loaded = predict(slots, before)
    computed = here.prefill[slots] - loaded.prefill
    # Prompts of plain layers are computed from the beginning while they are loaded from the end, until both meet.
    meets = (
        (loads.pages.num_groups[slots] == 1)
        & (loads.pages.num_full_groups[slots] == 1)
        & (loads.pages.state_pages[slots] == 0)
    )
    is_sooner = loads_sooner(computed, queue, load_s, meets)
    # A load begins when the prompt has pages, and runs while the prompt waits for its turn.
    idle = loaded.ttft - loaded.prefill / loaded.prompt_share - loaded.room_wait
    wait = np.maximum(queue + load_s - idle, 0.0)
    both = np.where(meets, computed * wait / np.maximum(computed + wait, 1e-12), 0.0)
    wait = np.where(meets, both, wait)
    loaded.ttft = loaded.ttft + wait
    loaded.prefill = loaded.prefill + both
    here.improve(loaded, slots, is_sooner)
    tokens = cached.copy()
    tokens[slots[is_sooner]] = before[is_sooner]
    return options._replace(cached=tokens, loading=slots[is_sooner])


def saved_seconds(loads: Loads, cached: Floats, more: Floats) -> Floats:
    """Return about how many seconds of a replica's time `more` cached tokens save, without the fixed part of steps."""
    per_token = loads.cost.per_token(cached + more / 2, 0.0)
    saved: Floats = more * per_token * loads.pipeline.interval_share
    return saved
