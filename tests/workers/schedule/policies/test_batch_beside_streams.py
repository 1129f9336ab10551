"""Lines of a batch beside four interactive streams, on a simulated clock: the streams' gaps, and the batch's pace."""

import random
from collections import Counter
from itertools import count
from typing import NamedTuple

import numpy as np
import pytest

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.batch import SampledToken
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES
from tests.workers.schedule.model_free_replica import new_request, new_scheduler

FAST = StepCost(base=9e-3, per_prefill_token=6e-4, per_attended=0.0, per_decode=7e-4, per_context=3e-7)
SLOW = StepCost(base=17e-3, per_prefill_token=2.5e-3, per_attended=0.0, per_decode=1.6e-3, per_context=6e-7)
"""Beside four streams, a page of 16 tokens takes longer than the promise."""
SLOWER = StepCost(base=22e-3, per_prefill_token=3.8e-3, per_attended=0.0, per_decode=3.8e-3, per_context=6e-7)
"""Beside four streams of `standard`, two to four tokens fit where some steps take 1.6 times as long as predicted."""


class Pace(NamedTuple):
    p99: float  # seconds between two tokens of a stream
    batch: float  # tokens a second
    streams: float


def run(cost: StepCost, slo_class: str, spread: float, streams: int, seconds: float = 10.0) -> Pace:
    """Serve so many streams of 128 tokens, and lines of 24 tokens of which eight always wait, the first a step longer.

    `spread`: relative, of the seconds of a step."""
    scheduler = new_scheduler(4000, 2048, max_num_batched_tokens=2048, max_num_seqs=64, page_size=16)
    noise, numbers, now = random.Random(5), count(), 0.0
    scheduler.learn(cost, np.exp(1.64 * spread))
    newest, gaps, tokens = dict[str, float](), list[float](), {slo_class: 0, "batch": 0}

    def add(name: str, length: int) -> None:
        number = next(numbers)
        prompt = [number % 40_000 + 1, *noise.choices(range(1, 40_000), k=17)]
        request = new_request(f"{name} {number}", prompt, length, slo_class=name)
        request.arrival_time = now
        scheduler.add(request)

    while now < seconds:
        table = scheduler.table
        at_work = Counter(each.slo_class for each in (*table.running, *table.waiting))
        in_queue = Counter(each.slo_class for each in table.waiting)
        for _ in range(streams - at_work[slo_class] if now else 0):
            add(slo_class, 128)
        for _ in range(8 - in_queue["batch"]):
            add("batch", 24)
        batch = scheduler.schedule(now)
        now += cost.seconds(batch.work) * np.exp(spread * noise.gauss(0.0, 1.0))
        sampled = {part.request.id: SampledToken(5) for part in batch.scheduled if part.samples}
        for part in batch.scheduled:
            if part.samples:
                tokens[part.request.slo_class] += 1
                if part.request.slo_class == slo_class and part.request.id in newest:
                    gaps.append(now - newest[part.request.id])
                newest[part.request.id] = now
        scheduler.update(batch, sampled, now)
    p99 = float(np.percentile(gaps, 99)) if gaps else 0.0
    return Pace(p99, tokens["batch"] / now, tokens[slo_class] / now)


@pytest.mark.parametrize(
    ("cost", "slo_class", "spread", "share"),
    [(FAST, "interactive", 0.05, 0.9), (SLOW, "interactive", 0.05, 0.6), (SLOWER, "standard", 0.1, 0.9)],
    ids=["fast", "slow", "slower"],
)
def test_streams_beside_a_batch_keep_their_promise_and_the_batch_gets_most_of_the_rest(
    cost: StepCost, slo_class: str, spread: float, share: float
) -> None:
    alone, beside = run(cost, slo_class, spread, 0), run(cost, slo_class, spread, 4)
    [promise_s] = [slo.tpot_s for slo in DEFAULT_CLASSES if slo.name == slo_class]
    assert beside.p99 <= promise_s
    assert beside.batch >= share * (alone.batch - beside.streams)
