"""Choose who encodes a prompt's pictures: the replica that computes it, or an `encode` replica, in predicted seconds.

To the router an encode replica computes a prompt too: its leg has one token for each row of embeddings. So its backlog,
its prefix hits and its seconds are predicted as those of any replica. Pure functions over arrays of replica slots.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from crossdock.router.loads import Loads, Slots
from crossdock.router.placement import (
    EVICTION_WEIGHT,
    HANDOVER_S,
    PAIR_CANDIDATES,
    Candidates,
    Query,
    due_s,
    late_refusal_s,
    prompt_costs,
    travel_behind,
)
from crossdock.router.predict import Prediction, seconds_after
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.pictures.encoding import LONGEST_SHIPPING_STEP_S
from crossdock.workers.schedule.slo import SloClass


def with_encoders(
    loads: Loads,
    query: Query,
    cached: Floats,
    cached_rows: Floats,
    predictions: tuple[Prediction, Prediction, Prediction],
    slo: SloClass,
    candidates: Candidates,
    must: bool,
) -> tuple[Prediction, Slots]:
    """Return the prediction in which pictures are encoded where that costs least, and the slots of who encodes them.

    A slot, for each replica that may compute the prompt, is an encode replica's; -1: that replica encodes itself.

    `cached`: tokens of the prompt that each replica has; `cached_rows`: rows of `query.encoding` that each has.
    `predictions`: of the prompt with its pictures, of the prompt without them, and of `query.encoding`. `must`: an
    encode replica encodes wherever one can, also if that is slower.
    """
    here, text, leg = predictions
    chosen: Slots = np.full(len(cached), -1, dtype=np.intp)
    may = (loads.takes_rows > 0) & (cached < query.items[-1][0])  # else the cached prefix covers all pictures
    encoders = _best(loads, query, leg, slo, candidates.encoders)
    if not len(encoders) or not may.any():
        return here, chosen
    due = due_s(here, slo, candidates.first)
    ttft = np.array([_ttft(loads, query, cached, cached_rows, text, leg, encoder) for encoder in encoders])
    work = text.prefill + (leg.prefill + EVICTION_WEIGHT * leg.evicted)[encoders, None]
    costs = prompt_costs(slo, due, ttft, work, text.prompt_lateness)
    costs[loads.page_size[encoders][:, None] != loads.page_size] = np.inf
    best = costs.argmin(axis=0)
    at = np.arange(len(cached))
    least = costs[best, at]
    is_better = may & np.isfinite(least)
    if not must:
        is_better &= least < prompt_costs(slo, due, here.ttft, here.prefill, here.prompt_lateness)
    chosen[is_better] = encoders[best][is_better]
    return _merged(here, text, is_better, ttft[best, at], leg.prefill[encoders][best]), chosen


def _merged(here: Prediction, text: Prediction, is_better: NDArray[np.bool_], ttft: Floats, work: Floats) -> Prediction:
    """Return the prediction `here`; in the slots where `is_better`, the prediction with an encode replica."""

    def pick(elsewhere: Floats, own: Floats) -> Floats:
        return np.where(is_better, elsewhere, own)

    return replace(
        here,
        prefill=pick(text.prefill, here.prefill),
        encoder_work=pick(work, here.encoder_work),
        admission_ttft=pick(text.admission_ttft, here.admission_ttft),
        admission_alone=pick(text.admission_alone, here.admission_alone),
        ttft=pick(ttft, here.ttft),
        prompt_lateness=pick(text.prompt_lateness, here.prompt_lateness),
    )


def _best(loads: Loads, query: Query, leg: Prediction, slo: SloClass, encoders: Slots) -> Slots:
    """Return the `PAIR_CANDIDATES` encode replicas of least cost, of those that would not refuse the leg as late."""
    if query.may_refuse:
        encoders = encoders[late_refusal_s(loads, leg, slo, encoders) <= 0]
    if len(encoders) <= PAIR_CANDIDATES:
        return encoders
    costs = slo.weight * leg.ttft + leg.prefill
    return encoders[np.argpartition(costs[encoders], PAIR_CANDIDATES)[:PAIR_CANDIDATES]]


def _ttft(
    loads: Loads, query: Query, cached: Floats, cached_rows: Floats, text: Prediction, leg: Prediction, encoder: np.intp
) -> Floats:
    """Return the seconds to the first token at every replica, `[slot]`, if `encoder` sends the rows.

    Rows come with each step of the encoder, and tokens from a picture's first on are computed once its last row is
    there. If steps are alike, the prompt waits longest for the first picture or for those of the last step.
    """
    assert query.encoding is not None
    first_row, num_rows = float(cached_rows[encoder]), query.encoding.num_tokens
    first_done, last_step = _steps(loads, query.encoding, first_row, encoder)
    share = min((first_done - first_row) / (num_rows - first_row), 1.0)
    ends = (
        (first_row, leg.ttft[encoder] - (1 - share) * leg.prefill[encoder] + HANDOVER_S),
        (last_step, leg.ttft[encoder] + _travel(loads, query, leg)[encoder]),
    )
    ttft = text.ttft
    for row, arrives in ends:
        seconds = seconds_after(loads, query.num_tokens, _position(query, row), cached) / text.prompt_share
        ttft = np.maximum(ttft, arrives + loads.step_left + seconds)
    return ttft


def _steps(loads: Loads, leg: Query, first_row: float, encoder: np.intp) -> tuple[float, float]:
    """Return the row at which the step that completes the first picture ends, and the first row of the last step.

    Pictures that take long have a step each. No picture is missing where the encode replica has all embeddings.
    """
    chunk = float(loads.max_step_tokens[encoder])
    per_row, per_square = float(loads.encoder_per_row[encoder]), float(loads.encoder_per_square[encoder])
    missing = [item for item in leg.items if item[0] > first_row]
    last_step = leg.num_tokens - ((leg.num_tokens - first_row - 1) % chunk + 1)
    if len(missing) < 2:
        return first_row + chunk, last_step
    first_end, (last_end, last_rows, last_parts) = missing[0][0], missing[-1]
    if per_row * last_rows + per_square * last_rows**2 / last_parts <= LONGEST_SHIPPING_STEP_S:
        return first_row + chunk, last_step
    return float(first_end), float(last_end - last_rows)


def _position(query: Query, row: float) -> int:
    """Return where the picture begins in the prompt to which a row of the leg belongs."""
    assert query.encoding is not None
    found = (item for item, (end, *_) in zip(query.items, query.encoding.items, strict=True) if end > row)
    end, num_rows, _ = next(found, query.items[-1])
    return end - num_rows


def _travel(loads: Loads, query: Query, leg: Prediction) -> Floats:
    """Return the seconds from an encode replica's last computed row to the arrival of all rows at the other replica."""
    assert query.encoding is not None
    num_rows = query.encoding.num_tokens
    travel = num_rows / loads.page_size * loads.page_bytes / loads.bytes_per_second
    return HANDOVER_S + travel_behind(travel, loads.max_step_tokens, leg.alone, num_rows)
