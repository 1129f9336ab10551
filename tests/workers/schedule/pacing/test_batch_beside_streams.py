"""Lines of a batch beside four interactive streams, on a simulated clock: the streams' gaps, and the batch's pace."""

import random
from collections import Counter
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest

from crossdock.workers.schedule.batch import SampledToken
from crossdock.workers.schedule.cost.cost import StepCost
from tests.workers.schedule.model_free_replica import new_request, new_scheduler

PROMISE_S, NOISE = 0.05, 0.05  # of `interactive`; relative spread of the seconds of a step
FAST = StepCost(base=9e-3, per_prefill_token=6e-4, per_attended=0.0, per_decode=7e-4, per_context=3e-7)
SLOW = StepCost(base=17e-3, per_prefill_token=2.5e-3, per_attended=0.0, per_decode=1.6e-3, per_context=6e-7)
"""Beside four streams, a page of 16 tokens takes longer than the promise."""


class Pace(NamedTuple):
    p99: float  # seconds between two tokens of a stream
    batch: float  # tokens a second
    streams: float


def run(cost: StepCost, streams: int, waiting: int, seconds: float = 10.0) -> Pace:
    """Serve so many streams of 128 tokens, and lines of 24 tokens of which `waiting` always wait."""
    scheduler = new_scheduler(4000, 2048, max_num_batched_tokens=2048, max_num_seqs=64, page_size=16)
    noise, numbers, now = random.Random(5), count(), 0.0
    scheduler.learn(cost, 1.64 * NOISE + 1)
    newest, gaps, tokens = dict[str, float](), list[float](), {"interactive": 0, "batch": 0}

    def add(slo_class: str, length: int) -> None:
        number = next(numbers)
        prompt = [number % 40_000 + 1, *noise.choices(range(1, 40_000), k=17)]
        request = new_request(f"{slo_class} {number}", prompt, length)
        request.slo_class, request.arrival_time = slo_class, now
        scheduler.add(request)

    while now < seconds:
        table = scheduler.table
        at_work = Counter(each.slo_class for each in (*table.running, *table.waiting))
        in_queue = Counter(each.slo_class for each in table.waiting)
        for _ in range(streams - at_work["interactive"]):
            add("interactive", 128)
        for _ in range(waiting - in_queue["batch"]):
            add("batch", 24)
        batch = scheduler.schedule(now)
        now += cost.seconds(batch.work) * np.exp(NOISE * noise.gauss(0.0, 1.0))
        sampled = {part.request.id: SampledToken(5) for part in batch.scheduled if part.samples}
        for part in batch.scheduled:
            if part.samples:
                tokens[part.request.slo_class] += 1
                if part.request.slo_class == "interactive" and part.request.id in newest:
                    gaps.append(now - newest[part.request.id])
                newest[part.request.id] = now
        scheduler.update(batch, sampled, now)
    p99 = float(np.percentile(gaps, 99)) if gaps else 0.0
    return Pace(p99, tokens["batch"] / now, tokens["interactive"] / now)


@pytest.mark.parametrize(("cost", "share"), [(FAST, 0.9), (SLOW, 0.6)])
def test_streams_beside_a_batch_keep_their_promise_and_the_batch_gets_most_of_the_rest(
    cost: StepCost, share: float
) -> None:
    alone, beside = run(cost, 0, 8), run(cost, 4, 8)
    assert beside.p99 <= PROMISE_S
    assert beside.batch >= share * (alone.batch - beside.streams)
