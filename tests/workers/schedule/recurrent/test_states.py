"""Recurrent states: which pages each part of a step reads and writes, and which snapshots later requests find."""

import pytest

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.recurrent.snapshots import further_step_seconds, is_worth_its_pages
from crossdock.workers.schedule.request.batch import Scheduled, StatePages
from tests.workers.schedule.model_free_replica import COST, ModelFreeReplica, new_request, new_scheduler

PAGES = 2  # of a state
FAST = StepCost(base=1e-6, per_prefill_token=1e-3, per_attended=0.0, per_decode=1e-4, per_context=0.0)


def new_replica(num_pages: int = 200, max_model_len: int = 200, **config: int) -> ModelFreeReplica:
    """Return a replica of a recurrent model whose step for a snapshot costs next to nothing."""
    settings = {"max_num_batched_tokens": 64, "state_pages": PAGES} | config
    scheduler = new_scheduler(num_pages, max_model_len, cost=FAST, chunk_policy="fixed", **settings)
    return ModelFreeReplica(scheduler, sample=lambda token_ids: 7)


def parts_of(replica: ModelFreeReplica, name: str) -> list[Scheduled]:
    return [part for batch in replica.batches for part in batch.scheduled if part.request.id == name]


def states_of(replica: ModelFreeReplica, name: str) -> list[tuple[int, StatePages]]:
    """Return where each part of a request ended, and the pages of its states."""
    return [(part.start + part.num_tokens, part.state) for part in parts_of(replica, name)]


def test_prompt_begins_with_zeros_and_its_last_full_page_ends_a_chunk_with_a_snapshot() -> None:
    replica = new_replica()
    replica.scheduler.add(new_request("a", range(30), 2))
    own = []
    while replica.scheduler.table.has_work:
        replica.step()
        own.append(list(replica.scheduler.pages.states.newest("a#0")))
    (end, first), (_, second), *later = states_of(replica, "a")
    assert (end, list(first.read)) == (28, []), "tokens 28 and 29 are on a page that is not full"
    assert list(second.read) == list(first.write) == own[0]
    assert list(second.write) == own[1] != own[0]
    assert all(list(state.read) == list(state.write) == own[1] for _, state in later)
    assert replica.scheduler.pages.counts().cached == 7 + PAGES


def test_next_turn_begins_from_the_snapshot_and_writes_its_own_pages() -> None:
    replica = new_replica()
    replica.scheduler.add(new_request("a", range(30), 2))
    replica.run()
    ((_, made), *_) = states_of(replica, "a")
    turns = [new_request(name, [*range(30), 7, 7, *tail], 4) for name, tail in (("b", [1]), ("c", [2, 3]))]
    for turn in turns:
        replica.scheduler.add(turn)
    replica.step()
    found = [parts_of(replica, name)[0] for name in "bc"]
    assert [part.start for part in found] == [28, 28]
    assert all(list(part.state.read) == list(made.write) for part in found), "both read one snapshot"
    assert len({page for part in found for page in part.state.write}) == 2 * PAGES
    replica.run()
    assert replica.scheduler.pages.counts().owned == 0


def test_prefix_of_two_requests_gets_a_snapshot_from_the_second() -> None:
    replica, system = new_replica(), [9] * 40
    for number in range(3):
        replica.scheduler.add(new_request(f"r{number}", [*system, *[50 + number] * 20], 2))
        replica.run()
    assert parts_of(replica, "r1")[0].start == 0, "its pages are found, and no state"
    assert parts_of(replica, "r1")[0].num_tokens == 40, "the chunk ends where the prefixes part"
    assert parts_of(replica, "r2")[0].start == 40


def test_output_leaves_snapshots_where_a_next_turn_saves_enough() -> None:
    """A state has the pages of 8 tokens. An output's state is worth that where more than 1.6 are computed again."""
    replica = new_replica()
    replica.scheduler.add(new_request("a", range(30), 8))  # the last token is not computed: 37 are
    replica.run()
    for number, tokens in enumerate((7, 3)):
        replica.scheduler.add(new_request(f"b{number}", [*range(30), *[7] * tokens, 1, 2], 1))
        replica.run()
    assert [parts_of(replica, name)[0].start for name in ("b0", "b1")] == [36, 32]


def test_preempted_prompt_continues_from_its_own_state() -> None:
    replica = new_replica(num_pages=36, max_model_len=100, max_num_batched_tokens=40)
    replica.scheduler.add(new_request("a", [3] * 80, 1))
    replica.step()
    (request,) = replica.scheduler.table.running
    assert request.num_computed_tokens == 40
    replica.scheduler.add(new_request("urgent", [5] * 40, 1, slo_class="interactive"))
    replica.step()
    assert request.num_preemptions == 1
    replica.run()
    assert [part.start for part in parts_of(replica, "a")][:2] == [0, 40]


def test_snapshots_preempt_no_request() -> None:
    """The pool holds one request and one state more."""
    replica = new_replica(num_pages=50 + 2 * PAGES)
    replica.scheduler.add(new_request("a", range(180), 19))
    replica.run()
    assert len({tuple(state.write) for _, state in states_of(replica, "a")}) > 1, "there was room for some"
    assert replica.scheduler.table.num_preemptions == 0
    assert replica.scheduler.pages.counts().owned == 0


def test_prompt_without_caching_makes_no_snapshot() -> None:
    scheduler = new_scheduler(caching=False, state_pages=PAGES)
    replica = ModelFreeReplica(scheduler)
    scheduler.add(new_request("a", range(30), 4))
    replica.run()
    first, *later = [state for _, state in states_of(replica, "a")]
    assert not first.read
    assert all(state.read is state.write is first.write for state in later)


def test_pool_without_room_for_two_states_of_the_longest_request_is_refused() -> None:
    with pytest.raises(ValueError, match="twice 2 for its recurrent state"):
        new_scheduler(num_pages=25 + 3, max_model_len=100, state_pages=PAGES)
    new_scheduler(num_pages=25 + 4, max_model_len=100, state_pages=PAGES)


def test_snapshot_is_worth_its_pages_where_much_is_computed_again() -> None:
    assert not is_worth_its_pages(0, 100, 0.5, 3000, COST)
    assert is_worth_its_pages(0, 4000, 0.5, 3000, COST)
    assert not is_worth_its_pages(3900, 4000, 0.5, 3000, COST), "little is computed since the one before"
    assert not is_worth_its_pages(0, 4000, 0.03, 3000, COST)
    assert not is_worth_its_pages(0, 4000, 0.5, 3000, COST, step_seconds=10.0)
    assert not is_worth_its_pages(0, 4000, 0.5, 3000, COST, evicted_seconds=10.0)
    assert is_worth_its_pages(0, 4000, 0.5, 3000, None)


def test_further_step_takes_at_least_its_fixed_part() -> None:
    assert further_step_seconds(100, 110, COST) == pytest.approx(COST.base)
    assert further_step_seconds(100, 110, None) == 0.0
