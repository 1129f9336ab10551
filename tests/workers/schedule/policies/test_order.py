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


def test_classes_come_before_ends() -> None:
    old = new_prompt("old", 10, priority=2, end_alone=10.0)
    new = new_prompt("new", 1000, priority=0, end_alone=51_000.0)
    assert order_prefills([old, new], 1.0, 60.0, Tenants()) == [new, old]


def test_prompt_that_would_have_ended_first_alone_goes_first() -> None:
    later, sooner = new_prompt("later", 10, end_alone=3.5), new_prompt("sooner", 4000, end_alone=3.25)
    assert order_prefills([later, sooner], 1.0, 60.0, Tenants()) == [sooner, later]
    work = PromptWork(3.3, "s")
    assert prefill_reason(later, 1.0, work, 60.0, Tenants()) == "alone it would end in 0.2 s of prompts"
    assert prefill_reason(sooner, 1.0, work, 60.0, Tenants()) == "alone it would have ended 0.05 s of prompts ago"


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
    assert (
        prefill_reason(first, 1.0, NOTHING_DONE, 60.0, Tenants()) == "priority -1, alone it would end in 0 s of prompts"
    )
    last.queued_at = -100.0
    assert order_prefills([urgent, last], 1.0, 60.0, Tenants()) == [last, urgent], "it starves"


def test_settings_take_the_old_name_of_the_order() -> None:
    assert SchedulerConfig.model_validate({"prefill_order": "response_ratio"}).prefill_order == "earliest_end"
    with pytest.raises(ValueError, match="earliest_end"):
        SchedulerConfig.model_validate({"prefill_order": "shortest"})
