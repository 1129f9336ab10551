"""Which prompt is computed first."""

from typing import Any

import pytest

from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.policies.order import PromptWork, order_prefills, prefill_reason
from crossdock.workers.schedule.policies.tenants import Tenants
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Submission

NOTHING_DONE = PromptWork(0.0, "s")


def new_prompt(name: str, num_tokens: int, priority_in_class: int = 0, **fields: Any) -> Request:
    submission = Submission(name, [1] * num_tokens, priority_in_class=priority_in_class)
    return Request(submission, **fields)


def test_classes_come_before_rests() -> None:
    old = new_prompt("old", 10, priority=2, aged_rest=10.0)
    new = new_prompt("new", 1000, priority=0, aged_rest=51_000.0)
    assert order_prefills([old, new], 1.0, 60.0, Tenants()) == [new, old]


def test_prompt_with_the_shortest_aged_rest_goes_first() -> None:
    longer, shorter = new_prompt("longer", 10, aged_rest=3.5), new_prompt("shorter", 4000, aged_rest=3.25)
    assert order_prefills([longer, shorter], 1.0, 60.0, Tenants()) == [shorter, longer]
    work = PromptWork(48.0, "s")
    assert prefill_reason(longer, 1.0, work, 60.0, Tenants()) == "0.5 s of its prompt left, less ageing"
    assert prefill_reason(longer, 1.0, PromptWork(64.0, "s"), 60.0, Tenants()).startswith("-0.5 s of its prompt left")


def test_starving_prompts_go_first_and_the_oldest_of_them() -> None:
    batch = new_prompt("batch", 4000, priority=2, queued_at=0.0, arrival_time=0.0)
    later = new_prompt("later", 10, priority=2, queued_at=1.0, arrival_time=1.0)
    urgent = new_prompt("urgent", 10, priority=0, queued_at=61.0, arrival_time=61.0)
    assert order_prefills([urgent, later, batch], 61.5, 60.0, Tenants()) == [batch, later, urgent]
    assert prefill_reason(batch, 61.5, NOTHING_DONE, 60.0, Tenants()) == "waited 62 s"


def test_prompt_promised_for_later_does_not_starve_yet() -> None:
    """A minute is nothing to a batch prompt that may take ten: until then it goes before no class."""
    batch = new_prompt("batch", 4000, priority=2, queued_at=0.0, arrival_time=0.0, ttft_deadline=600.0)
    urgent = new_prompt("urgent", 10, priority=0, queued_at=599.0, arrival_time=599.0, ttft_deadline=1.0)
    assert order_prefills([batch, urgent], 599.5, 60.0, Tenants()) == [urgent, batch]
    assert order_prefills([urgent, batch], 600.0, 60.0, Tenants()) == [batch, urgent]


def test_ties_go_by_arrival_then_id() -> None:
    early = new_prompt("c", 10, arrival_time=-1.0, queued_at=-1.0)
    ordered = order_prefills([new_prompt("b", 10), new_prompt("a", 10), early], 1.0, 60.0, Tenants())
    assert [request.id for request in ordered] == ["c", "a", "b"]


def test_priority_of_client_comes_within_its_class_and_before_all_else_there() -> None:
    urgent = new_prompt("urgent", 10, priority=0, priority_in_class=100)
    first = new_prompt("first", 1000, priority=1, priority_in_class=-1)
    preempted = new_prompt("preempted", 10, priority=1, num_preemptions=1)
    short, last = new_prompt("short", 10, priority=1), new_prompt("last", 10, priority=1, priority_in_class=2)
    assert order_prefills([last, short, preempted, first, urgent], 1.0, 60.0, Tenants()) == [
        urgent, first, preempted, short, last,
    ]  # fmt: skip
    reason = prefill_reason(first, 1.0, NOTHING_DONE, 60.0, Tenants())
    assert reason == "priority -1, 0 s of its prompt left, less ageing"
    last.queued_at = -100.0
    assert order_prefills([urgent, last], 1.0, 60.0, Tenants()) == [last, urgent], "it starves"


def test_settings_take_the_old_name_of_the_order() -> None:
    assert SchedulerConfig.model_validate({"prefill_order": "response_ratio"}).prefill_order == "shortest_remaining"
    with pytest.raises(ValueError, match="shortest_remaining"):
        SchedulerConfig.model_validate({"prefill_order": "shortest"})
