"""Promises: predicted first tokens, refusals with the seconds to wait, places reserved for urgent classes."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import ClassVar

import numpy as np
import pytest

from crossdock.workers.schedule.admission import reserved_slots
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.cost.formula import StepCosts
from crossdock.workers.schedule.first_token import first_token_seconds, pace_of, seconds_of_equals
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.policies.chunk_policies import NOTHING_LENT
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES
from crossdock.workers.schedule.request.submission import Overloaded
from crossdock.workers.schedule.table import RequestTable
from tests.workers.schedule.model_free_replica import CLASSES, COST, new_timed_replica


def test_request_that_would_be_late_is_refused_with_the_seconds_to_wait() -> None:
    replica = new_timed_replica(admission="reject")
    replica.add("first", 3000, "batch")
    replica.add("second", 30, "interactive")  # goes before: not late
    for number in range(2):
        replica.add(f"third {number}", 150, "standard")
    with pytest.raises(Overloaded, match=r"'standard' promises 0\.\d s") as refused:
        replica.add("fourth", 200, "standard")
    assert 0 < refused.value.retry_after < 1
    replica.add("fourth", 200, "batch")
    waited = replica.now + refused.value.retry_after
    while replica.now < waited:
        replica.step()
    replica.add("fifth", 200, "standard")  # as promised: it is admitted now
    replica.run()


@pytest.mark.parametrize("fields", [{"is_promised": False}, {"may_refuse": False}])
def test_request_without_promise_or_accepted_elsewhere_waits_however_late(fields: dict[str, bool]) -> None:
    replica = new_timed_replica(admission="reject")
    for number in range(3):
        replica.add(f"before {number}", 200, "standard", is_promised=False)
    with pytest.raises(Overloaded):
        replica.add("promised", 200, "standard")
    late = replica.add("late", 200, "standard", **fields)
    assert late.predicted_ttft is not None
    assert late.predicted_ttft > late.ttft_deadline > 0, "the class is a target all the same"
    replica.run()
    assert late.status is Status.FINISHED


def test_urgent_request_is_refused_where_starving_ones_go_before_it() -> None:
    """Without the refusal its promise would be broken: prompts that starve go before every class."""
    replica = new_timed_replica(admission="reject", starvation_s=1.0)
    waiting = [replica.add(f"waiting {number}", 3000, "standard", is_promised=False) for number in range(30)]
    promised = replica.add("urgent", 30, "interactive", max_tokens=1)
    assert promised.predicted_ttft is not None
    assert promised.predicted_ttft < promised.ttft_deadline
    while replica.now < waiting[0].ttft_deadline + 1.0:
        replica.step()
    with pytest.raises(Overloaded):
        replica.add("late", 30, "interactive")
    while any(request.status is not Status.FINISHED for request in waiting[1:]):
        replica.step()
    replica.add("in time", 30, "interactive")
    replica.run()


def test_unknown_class_is_refused_by_field() -> None:
    with pytest.raises(ValueError, match="slo_class 'gold' is not served here; there are interactive, standard, batch"):
        new_timed_replica().add("a", 3, "gold")


def test_prompt_waits_for_more_urgent_ones_and_for_shorter_ones_of_its_class() -> None:
    def predicted(own: float, urgent: float = 0.0, equals: Sequence[float] = (), share: float = 1.0) -> float:
        ahead = urgent + seconds_of_equals([1.0] * len(equals), equals, own, COST)[0]
        pace = pace_of(share, NOTHING_LENT, ahead + own, max)
        return float(first_token_seconds(0.0, ahead, own, pace, 0.0, 0.0, 0.0, max))

    assert predicted(1.0) == 1.0
    assert predicted(1.0, urgent=5.0) == 6.0
    assert predicted(1.0, equals=[5.0, 0.2, 1.0]) == pytest.approx(2.2)
    assert predicted(1.0, share=0.5) == 2.0
    assert predicted(1.0, share=0.0) < 100, "streams never stop prompts for good"


def test_equal_prompts_go_before_one_that_comes_later_however_their_seconds_round() -> None:
    own = 0.1
    seconds = sum([own] * 60)
    assert seconds != 60 * own
    for factor in (1.0, 1.0 - 1e-15, 1.0 + 1e-15):
        assert seconds_of_equals([60.0], [seconds * factor], own, COST) == (seconds * factor, 0.0)


@pytest.mark.parametrize("left", [1.0, 0.1])
def test_prompt_delays_each_longer_one_by_its_own_seconds(left: float) -> None:
    """Groups of prompts, at one replica and at two alike."""
    counts, seconds, own = [2.0, 1.0, 3.0], [10.0, 0.2, 3.0], 1.0
    found = seconds_of_equals(counts, seconds, own, COST, left)
    assert found == pytest.approx((0.2 + 3.0, 2 * own) if left == 1.0 else (0.1 * 13.2, 0.0))
    arrays = [np.array([figures, figures]).T for figures in (counts, seconds)]
    of_two = seconds_of_equals(*arrays, np.array([own, own]), StepCosts(*np.array([COST.coefficients] * 2).T), left)
    assert np.array(of_two).T.tolist() == [[*found], [*found]]


@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
@pytest.mark.parametrize("slo_class", [slo.name for slo in CLASSES])
@pytest.mark.parametrize("num_streams", [1, 8, 16])
def test_share_of_time_for_prompts_is_as_predicted(num_streams: int, slo_class: str, policy: str) -> None:
    """Compared with the share in simulated steps, beside standard streams that leave much time or none."""
    replica = new_timed_replica(chunk_policy=policy, max_num_seqs=32, min_chunk_tokens=4)
    scheduler = replica.scheduler
    for number in range(num_streams):
        replica.add(f"s{number}", 100, "standard", max_tokens=200)
    while any(not request.is_decoding for request in scheduler.table.requests()):
        replica.step()
    for _ in range(8):  # streams become early
        replica.step()
    priority = [slo.name for slo in CLASSES].index(slo_class)
    predicted = scheduler.forecast.prefill_share(priority)
    began, before = replica.now, scheduler.table.prefilled.seconds
    replica.add("prompt", 3000, slo_class)
    for _ in range(10):
        replica.step()
    actual = (scheduler.table.prefilled.seconds - before) / (replica.now - began)
    assert predicted == pytest.approx(actual, abs=0.1)  # a chunk ends on a page of 8 tokens


class CountedCost(StepCost):
    """Counts how often the seconds of a prompt are predicted."""

    num_predictions: ClassVar[int] = 0

    def prefill_seconds(self, start: float, end: float, chunk: float, adapter: float = 0) -> float:
        CountedCost.num_predictions += 1
        return super().prefill_seconds(start, end, chunk, adapter)


def test_thousand_choices_that_arrive_between_two_steps_are_each_predicted_a_few_times() -> None:
    replica = new_timed_replica(CountedCost(**asdict(COST)))
    replica.add("running", 300)
    replica.step()
    CountedCost.num_predictions = 0
    for number in range(1000):
        replica.add(f"choice {number}", 20)
    assert CountedCost.num_predictions <= 3 * 1000


def test_thousand_prompts_that_arrive_between_two_steps_look_at_each_other_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica that compares each prompt with all that wait takes 10 s for 2,048 vectors, and seems to be lost."""
    num_looks = 0
    urgency = RequestTable.urgency

    def counted(table: RequestTable, request: Request) -> tuple[int, int]:
        nonlocal num_looks
        num_looks += 1
        return urgency(table, request)

    monkeypatch.setattr(RequestTable, "urgency", counted)
    replica = new_timed_replica()
    replica.add("running", 300)
    replica.step()
    for number in range(1000):
        replica.add(f"prompt {number}", 20)
    assert num_looks <= 3 * 1000


def test_prediction_after_any_change_of_the_queue_is_that_of_a_first_look() -> None:
    replica = new_timed_replica()
    for number in range(40):
        slo_class = ("interactive", "standard", "batch")[number % 3]
        request = replica.add(f"r{number}", 10 + 37 * (number % 7), slo_class, max_tokens=5)
        table = replica.scheduler.table
        if number % 5 == 1:
            replica.step()
        if number % 4 == 2:
            replica.scheduler.abort(f"r{number - 2}")
        if number % 11 == 3:
            replica.scheduler.learn(replace(replica.scheduler.forecast.cost, base=0.001 * number), 1.1)
        forecast = replica.scheduler.forecast
        fresh = Forecast(table, forecast.cost, forecast.overrun)
        assert replica.scheduler.forecast.ttft(request) == fresh.ttft(request)


def test_places_are_reserved_for_urgent_classes() -> None:
    reserved = int(DEFAULT_CLASSES[0].decode_share * 64)
    assert reserved > 0
    assert reserved_slots(DEFAULT_CLASSES, 64, [], 0) == 0
    assert reserved_slots(DEFAULT_CLASSES, 64, [2] * 10, 2) == reserved
    assert reserved_slots(DEFAULT_CLASSES, 64, [0] * 2, 1) == reserved - 2
    assert reserved_slots(DEFAULT_CLASSES, 64, [0] * 60, 2) == 0
