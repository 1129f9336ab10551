"""Drafts of models with recurrent layers: where a step writes the state after them, and what is computed again."""

import pytest

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.batch import Scheduled
from crossdock.workers.schedule.request.request import Status
from crossdock.workers.schedule.scheduler import Scheduler
from tests.workers.schedule.drafts.test_verify import land, scheduler_of
from tests.workers.schedule.model_free_replica import new_request

PAGES = 2  # of a state
DRAFTS = [11, 12, 13, 14, 15, 16]


def verify(scheduler: Scheduler, num_accepted: int, drafts: list[int] = DRAFTS) -> Scheduled:
    """Take a step with drafts of stream "a", of which so many are accepted."""
    batch = scheduler.schedule(0.0, {"a": drafts})
    land(scheduler, batch, {"a": num_accepted})
    [part] = batch.scheduled
    return part


def test_decodes_that_compute_tokens_again_come_behind_others_and_take_rows() -> None:
    streams = [new_request(name, [1, 2, 3], max_tokens=90) for name in "ab"]
    scheduler = scheduler_of(*streams, state_pages=PAGES)
    land(scheduler, scheduler.schedule(0.0, {"a": DRAFTS}), {"a": 2})
    batch = scheduler.schedule(0.0)
    assert [(part.request.id, part.num_tokens) for part in batch.scheduled] == [("b", 1), ("a", 4)]
    assert (batch.num_decodes, batch.work.drafts, batch.num_drafts) == (2, 3, 0)


def test_chunk_has_the_tokens_that_are_not_computed_again() -> None:
    scheduler = scheduler_of(new_request("a", [1, 2, 3], max_tokens=90), state_pages=PAGES, chunk_policy="fixed")
    verify(scheduler, num_accepted=5)
    scheduler.add(new_request("b", [5] * 90))
    assert [part.num_tokens for part in scheduler.schedule(0.0).scheduled] == [7, 24], "32 in all, full pages of 4"


def test_stream_without_pages_for_a_second_state_has_no_drafts() -> None:
    stream = new_request("a", [1] * 5, max_tokens=90)
    scheduler = scheduler_of(stream, state_pages=PAGES)
    scheduler.pages.allocate("another owner", scheduler.pages.block_pool.num_available - PAGES + 1)
    assert not verify(scheduler, 0).drafts
    scheduler.pages.release("another owner")
    scheduler.pages.allocate("another owner", scheduler.pages.block_pool.num_available - PAGES)
    part = verify(scheduler, 0)
    assert part.drafts == DRAFTS[:1], "one token more has a place on the last page"
    assert scheduler.table.num_preemptions == 0


def test_drafts_of_one_stage_leave_the_streams_of_the_next_step_a_page_each() -> None:
    """Both streams begin a page. The second one needs it before the first one gives back its second state."""
    streams = [new_request(name, [1] * 4, max_tokens=90) for name in "ab"]
    scheduler = scheduler_of(*streams, state_pages=PAGES, depth=2, caching=False)
    scheduler.pages.allocate("another owner", scheduler.pages.block_pool.num_available - 1 - PAGES)
    parts = [scheduler.schedule(0.0, dict.fromkeys("ab", DRAFTS)).scheduled for _ in range(2)]
    assert [[part.request.id for part in step] for step in parts] == [["a"], ["b"]]
    assert scheduler.table.num_preemptions == 0


def test_request_starts_although_each_of_two_stages_could_verify_drafts_with_its_pages() -> None:
    scheduler = scheduler_of(*(new_request(name, [1] * 4, max_tokens=90) for name in "ab"), state_pages=PAGES, depth=2)
    waiting = new_request("c", [5] * 8, max_tokens=1)
    flights = [scheduler.schedule(0.0, dict.fromkeys("ab", DRAFTS))]
    assert flights[0].num_drafts
    scheduler.pages.allocate("another owner", scheduler.pages.block_pool.num_available - 6)
    scheduler.add(waiting)
    for _ in range(5):
        flights.append(scheduler.schedule(0.0, dict.fromkeys("ab", DRAFTS)))
        land(scheduler, flights.pop(0), dict.fromkeys("ab", 1))
    assert waiting.status is not Status.WAITING


def test_stream_with_many_tokens_to_compute_again_has_no_drafts_until_they_are() -> None:
    stream = new_request("a", [1, 2, 3], max_tokens=90)
    scheduler = scheduler_of(stream, state_pages=PAGES, max_num_batched_tokens=96)
    lengths = [(stream.num_verified_tokens, len(verify(scheduler, num_accepted=3).drafts)) for _ in range(8)]
    assert lengths == [(0, 6), (4, 6), (8, 6), (12, 6), (16, 6), (20, 0), (0, 6), (4, 6)]


@pytest.mark.parametrize(("budget", "expected"), [(32, [6, 6]), (22, [5, 5]), (12, [])])
def test_drafts_leave_the_next_step_room_for_what_it_computes_again_and_a_page(
    budget: int, expected: list[int]
) -> None:
    """Each of 8 places has a token in the next step, a page has 4, and two streams compute their drafts again."""
    streams = [new_request(name, [1, 2, 3], max_tokens=90) for name in "ab"]
    scheduler = scheduler_of(*streams, state_pages=PAGES, max_num_batched_tokens=budget)
    batch = scheduler.schedule(0.0, {"a": DRAFTS, "b": DRAFTS})
    assert [len(part.drafts) for part in batch.scheduled if part.drafts] == expected


@pytest.mark.parametrize(("num_accepted", "expected_start"), [(6, 40), (5, 32)])
def test_next_turn_begins_from_the_state_after_drafts_only_if_all_are_accepted(
    num_accepted: int, expected_start: int
) -> None:
    """The prompt leaves a snapshot after 32 tokens. The drafts end with the token before 40."""
    cost = StepCost(base=1e-6, per_prefill_token=1e-3, per_decode=1e-9)
    prompt = [7] * 33
    scheduler = scheduler_of(
        new_request("a", prompt, max_tokens=40),
        state_pages=PAGES,
        max_num_batched_tokens=64,
        num_pages=200,
    )
    scheduler.learn(cost, overrun=1.0)
    part = verify(scheduler, num_accepted)
    assert (part.start + part.num_tokens, part.state.is_snapshot) == (40, True)
    scheduler.abort("a")
    scheduler.add(new_request("b", [*prompt, 99, *DRAFTS, 8, 9], max_tokens=1))
    assert scheduler.schedule(0.0).scheduled[0].start == expected_start


def test_share_of_a_gap_counts_the_rows_that_are_computed_again() -> None:
    """A token takes 2 ms. Two drafts take 4 ms and give two tokens, then a token computed again and a new one 4 ms."""
    stream = new_request("a", [1], max_tokens=990)
    scheduler = scheduler_of(stream, num_pages=400, max_model_len=1000, state_pages=PAGES)
    scheduler.learn(StepCost(base=1e-3, per_prefill_token=1e-3, per_decode=1e-3), overrun=1.0)
    assert scheduler.verification is not None
    for number in range(400):
        stream.due = 1e6
        scheduler.choose_streams(0.0)
        land(scheduler, scheduler.schedule(0.0, {} if number % 2 else {"a": [5, 5]}), {"a": 1})
    assert scheduler.verification.gap_share == pytest.approx((4 / 2 / 2 + 4 / 2) / 2, abs=0.02)
