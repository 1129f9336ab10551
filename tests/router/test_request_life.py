"""The life of a request alone: each rule with a few events, and its promises in any history of events."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from crossdock.router.actions import (
    Accepted,
    Action,
    Ask,
    Detach,
    Fail,
    PlaceAgain,
    ReplicaDead,
    ReplicaLost,
    Submit,
    SuspectRequest,
)
from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.placement import Placement
from crossdock.router.query import Query
from crossdock.router.request_life import MOST_PLACEMENTS, RequestLife
from crossdock.workers.report.live_profile import Prompts
from crossdock.workers.schedule import kv
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import FinishReason, Request, TokenDelta, TokenLogprobs
from crossdock.workers.schedule.request.submission import Leg, Overloaded, SamplingParams, Submission
from crossdock.workers.schedule.table import RequestTable
from tests.router.replicas import ENCODER, live, profile

LOSS = ReplicaLost("out of reach")
DEATH = ReplicaDead("its process has ended")
BUSY = Overloaded("busy", 2.0)
PROMPT = [7] * 40


@dataclass(slots=True)
class CheckedFleet(Fleet):
    """A router that checks that every in-flight load is settled once, before the next in-flight load."""

    queries: list[Query] = field(default_factory=list)
    is_booked: bool = False
    is_computed: bool = False

    def book(self, query: Query, placement: Placement) -> None:
        assert not self.is_booked, "the attempt before this was not settled"
        self.is_booked, self.is_computed = True, False
        self.queries.append(query)
        Fleet.book(self, query, placement)

    def first_token(self, request_id: str) -> None:
        assert self.is_booked
        assert not self.is_computed
        self.is_computed = True
        Fleet.first_token(self, request_id)

    def settle(self, request_id: str) -> None:
        assert self.is_booked, "settled twice, or never booked"
        self.is_booked = False
        Fleet.settle(self, request_id)


def router(names: Sequence[str], **config: Any) -> CheckedFleet:
    """Return a router over idle replicas: p… for prefill, d… for decode, others for all."""
    fleet = CheckedFleet(RouterConfig.model_validate({"policy": "round-robin"} | config))
    for name in names:
        join(fleet, name)
    return fleet


def join(fleet: Fleet, name: str, now: float = 0.0) -> None:
    role: Any = {"p": "prefill", "d": "decode"}.get(name[0], "mixed")
    fleet.join(name, profile(role=role, encoder_cost=ENCODER), now)
    fleet.hear(name, live(), now)


def new_life(*names: str, max_tokens: int = 4) -> RequestLife:
    return RequestLife(Submission("r", PROMPT, SamplingParams(max_tokens=max_tokens)), router(names), 0.0)


def running_life(*names: str, max_tokens: int = 4) -> tuple[RequestLife, str]:
    """Return a life on one replica, which has taken the request, and the name of that replica."""
    life = new_life(*names, max_tokens=max_tokens)
    (submit,) = life.place(0.0)
    assert isinstance(submit, Submit)
    assert life.taken(submit.replica, 0, 1, 0.0) == [Accepted()]
    return life, submit.replica


def paired_life(*, is_granted: bool = True, max_tokens: int = 4) -> RequestLife:
    """Return a life whose prompt "p" computes for "d". Both have taken their legs; "d" has pages if `is_granted`."""
    life = new_life("p", "d", max_tokens=max_tokens)
    assert [(leg.replica, leg.peer, leg.submission.leg) for leg in submits(life.place(0.0))] == [
        ("d", "p", Leg.RECEIVE),
        ("p", "d", Leg.SEND),
    ]
    assert life.taken("d", 0, 1, 0.0) == []
    assert life.taken("p", 0, 1, 0.0) == [Accepted()]
    if is_granted:
        assert life.tokens("d", grant(), 0.0) == []
    return life


def submits(actions: Sequence[Action]) -> list[Submit]:
    assert all(isinstance(action, Submit) for action in actions), actions
    return [action for action in actions if isinstance(action, Submit)]


def delta(first: int, count: int = 1, epoch: int = 0, end: FinishReason | None = None) -> TokenDelta:
    """Return the tokens `first`, `first` + 1, … of an output whose tokens are their own positions."""
    return TokenDelta("r", list(range(first, first + count)), first, epoch, finish_reason=end)


def grant(epoch: int = 0) -> TokenDelta:
    """Return the delta that a decode replica sends once it has pages for a request."""
    return TokenDelta("r", [], epoch=epoch)


# -- placing ---------------------------------------------------------------------------------------------------------


def test_overloaded_replica_is_left_out_until_all_have_refused_with_the_shortest_wait() -> None:
    life, waits = new_life("a", "b", "c"), [5.0, 2.0, 9.0]
    tried = []
    actions = life.place(0.0)
    for attempt, wait in enumerate(waits):
        (submit,) = submits(actions)
        assert submit.submission.epoch == attempt
        tried.append(submit.replica)
        detach, again = life.refused(submit.replica, attempt, Overloaded("busy", wait), 1.0)
        assert detach == Detach(submit.replica, attempt, is_running=False)
        assert again == PlaceAgain(None)
        actions = life.place(1.0)
    (fail,) = actions
    assert sorted(tried) == ["a", "b", "c"]
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, Overloaded)
    assert fail.error.retry_after == 2.0


def test_value_error_of_one_leg_fails_the_request_and_aborts_the_other() -> None:
    life = new_life("p", "d")
    life.place(0.0)
    error = ValueError("prompt has too many tokens")
    assert life.refused("p", 0, error, 0.0) == [Detach("d", 0, True), Detach("p", 0, False), Fail(error)]
    assert life.taken("d", 0, 1, 0.0) == []


@pytest.mark.parametrize("way", ["silent", "missing", "stuck"])
def test_submission_without_an_answer_is_aborted_where_its_replica_does_not_have_it(way: str) -> None:
    life = new_life("a", "b")
    (submit,) = submits(life.place(0.0))
    assert life.deadline == 10.0
    assert life.tick(9.9) == []
    assert life.tick(10.0) == [Ask(submit.replica, 0)]
    now = 130.0
    if way == "silent":
        actions = life.tick(now)
    else:
        now = 140.0 if way == "stuck" else 15.0
        numbers = ["submitted", 3] if way == "stuck" else None
        assert life.progress(submit.replica, 0, numbers, 10.0) == [], "it may be on its way; a step may be long"
        assert life.tick(now) == [Ask(submit.replica, 0)]
        actions = life.progress(submit.replica, 0, numbers, now)
    detach, again = actions
    assert detach == Detach(submit.replica, 0, True)
    assert isinstance(again, PlaceAgain)
    assert (again.loss is None) == (way != "stuck")
    (other,) = submits(life.place(now))
    assert other.replica != submit.replica


def test_submission_waits_at_its_replica_for_as_long_as_others_before_it_move() -> None:
    life = new_life("p", "d")
    life.place(0.0)
    assert life.taken("p", 0, 1, 0.0) == []
    for turn in range(100):
        now = life.deadline
        assert life.tick(now) == [Ask("d", 0)], "the other leg was answered"
        assert life.progress("d", 0, ["submitted", turn], now) == []
    assert now > 4 * 120.0
    assert life.tick(life.deadline) == [Ask("d", 0)]
    assert life.taken("d", 0, 1, now) == [Accepted()]
    assert life.progress("d", 0, None, now) == [], "of the time before"
    assert life.tick(life.deadline) == [Ask("d", 0), Ask("p", 0)]


def test_last_two_placements_are_on_one_replica_alone() -> None:
    life, legs = new_life("p", "d", "m"), []
    for attempt in range(MOST_PLACEMENTS):
        submitted = submits(life.place(0.0))
        legs.append(len(submitted))
        for submit in submitted:
            life.taken(submit.replica, attempt, 1, 0.0)
        *_, end = life.lost(submitted[0].replica, attempt, LOSS, 0.0)
        assert end == (PlaceAgain(LOSS) if attempt < MOST_PLACEMENTS - 1 else Fail(LOSS))
        assert not life.is_suspect, "none of them was seen to die"
    assert legs == [2, 2, 1, 1]


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_request_goes_on_elsewhere_after_the_tokens_that_its_client_has() -> None:
    life, first = running_life("a", "b", max_tokens=10)
    assert life.tokens(first, delta(0), 1.0) == [delta(0)]
    assert life.tokens(first, delta(1, 2), 1.0) == [delta(1, 2)]
    assert life.lost(first, 0, LOSS, 2.0) == [Detach(first, 0, True), PlaceAgain(LOSS)]
    (submit,) = submits(life.place(2.0))
    assert submit.replica != first
    assert submit.submission.output_token_ids == (0, 1, 2)
    assert submit.submission.sampling.max_tokens == 10, "of the output, not of what is left of it"
    query = life.query
    assert query is not None
    assert (query.num_tokens, query.max_tokens, query.may_refuse) == (43, 7, False)
    assert life.taken(submit.replica, 1, 1, 2.0) == [Accepted()]
    assert life.tokens(submit.replica, delta(3, epoch=0), 3.0) == [], "of the older attempt"
    assert life.tokens(submit.replica, delta(3, epoch=1), 3.0) == [delta(3, epoch=1)]


def test_pages_are_hashed_again_with_the_output_and_not_at_all_for_prompt_logprobs() -> None:
    life, first = running_life("a", "b", max_tokens=100)
    life.tokens(first, delta(0, 20), 1.0)
    query = life.query
    assert query is not None
    assert len(query.page_hashes) == 40 // 16
    life.lost(first, 0, LOSS, 1.0)
    life.place(1.0)
    assert life.query is not None
    assert len(life.query.page_hashes) == 60 // 16
    assert life.query.page_hashes[:2] == query.page_hashes
    every = RequestLife(Submission("r", PROMPT, SamplingParams(prompt_logprobs=0)), router("ab"), 0.0)
    every.place(0.0)
    assert every.query is not None
    assert not every.query.page_hashes


def test_pages_with_pictures_have_the_hashes_that_replicas_give_them() -> None:
    """Those of the pages from the picture on differ from a prompt's with another picture."""
    found = []
    for content in (b"cat", b"cat", b"dog"):
        items = [Item(20, 8, 8, "image", content.ljust(16))]
        submission = Submission("r", PROMPT, cache_salt="tenant", items=items)
        life = RequestLife(submission, router("ab"), 0.0)
        life.place(0.0)
        assert life.query is not None
        request, pages = Request(submission, 0.0), PagePool(8, 16)
        table = RequestTable(SchedulerConfig(), pages, 128)
        kv.match_prefix(table, request)
        assert list(life.query.page_hashes) == request.page_hashes
        found.append(life.query.page_hashes)
    assert found[0] == found[1]
    assert [one == other for one, other in zip(found[0], found[2], strict=True)] == [True, False]


@pytest.mark.parametrize("policy", ["seconds", "round-robin"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_prompt_whose_vector_is_wanted_goes_to_a_prefill_replica_alone(pooling: str, policy: str) -> None:
    """Decode replicas take it only once no other is left. The mean has no use for cached pages."""
    fleet = router(["p1", "p2", "d1"], policy=policy, shipping="always")
    sampling = SamplingParams(max_tokens=1, pooling=pooling)
    life = RequestLife(Submission("r", PROMPT, sampling), fleet, 0.0)
    seen = []
    for attempt in range(3):
        [submit] = life.place(float(attempt))
        assert isinstance(submit, Submit)
        assert (submit.peer, submit.submission.leg) == (None, Leg.LOCAL)
        assert life.query is not None
        assert bool(life.query.page_hashes) == (pooling == "last")
        seen.append(submit.replica)
        life.taken(submit.replica, attempt, 1, float(attempt))
        life.lost(submit.replica, attempt, LOSS, float(attempt))
    assert {*seen[:2]} == {"p1", "p2"}
    assert seen[2] == "d1"


def test_token_that_client_has_already_is_cut_off_with_its_logprob() -> None:
    life = paired_life()
    life.tokens("p", delta(0), 1.0)
    twice = delta(0, 2)
    twice.logprobs = [TokenLogprobs(0, -1.0, 1), TokenLogprobs(1, -2.0, 1)]
    (fresh,) = life.tokens("d", twice, 2.0)
    assert isinstance(fresh, TokenDelta)
    assert (fresh.first, fresh.token_ids, fresh.logprobs) == (1, [1], [TokenLogprobs(1, -2.0, 1)])


def test_tokens_before_acceptance_come_after_it() -> None:
    life = new_life("p", "d")
    life.place(0.0)
    life.taken("p", 0, 1, 0.0)
    assert life.tokens("p", delta(0), 1.0) == []
    assert life.tokens("p", TokenDelta("r", [], finish_reason=FinishReason.SHIPPED), 1.0) == []
    assert life.tokens("d", grant(), 1.0) == []
    assert life.taken("d", 0, 1, 2.0) == [Accepted(), Detach("p", 0, False), delta(0)]


def test_early_tokens_wait_for_the_first_and_end_with_it() -> None:
    life = paired_life()
    assert life.tokens("d", delta(1), 1.0) == []
    assert life.tokens("d", delta(2, 2, end=FinishReason.LENGTH), 1.0) == []
    end = delta(2, 2, end=FinishReason.LENGTH)
    assert life.tokens("p", delta(0), 2.0) == [delta(0), delta(1), Detach("d", 0, False), Detach("p", 0, True), end]
    assert life.is_over


@pytest.mark.parametrize("way", ["shipped", "shipped before the grant is known", "computed by the decode replica"])
def test_first_token_waits_until_the_decode_replica_has_pages_and_they_have_come(way: str) -> None:
    """Or a client would have one token and then wait for a place, or for all pages: a gap that no class promises."""
    life = paired_life(is_granted=False)
    assert life.tokens("p", delta(0), 1.0) == []
    assert life.output == []
    assert life.tick(life.deadline) == [Ask("d", 0), Ask("p", 0)], "it is waited for as before, and not for ever"
    shipped = TokenDelta("r", [], finish_reason=FinishReason.SHIPPED)
    if way == "shipped":
        assert life.tokens("d", grant(), 9.0) == [], "all pages travel from now on"
        assert life.tokens("p", shipped, 9.5) == [Detach("p", 0, False), delta(0)]
    elif way == "shipped before the grant is known":
        assert life.tokens("p", shipped, 9.0) == [Detach("p", 0, False)]
        assert life.tokens("d", grant(), 9.5) == [delta(0)]
    else:
        other = TokenDelta("r", [9], 0)
        assert life.lost("p", 0, DEATH, 9.0) == [Detach("p", 0, True)]
        assert life.tokens("d", other, 9.5) == [other]
    assert life.tokens("d", delta(1), 10.0) == [delta(1)]
    assert life.tokens("d", grant(), 10.0) == [], "a repeated one changes nothing"


def test_first_token_whose_pages_travel_late_waits_no_longer_than_the_second() -> None:
    life = paired_life(is_granted=False)
    assert life.tokens("p", delta(0), 1.0) == []
    assert life.tokens("d", grant(), 9.0) == []
    assert life.tokens("d", delta(1), 9.5) == [delta(0), delta(1)], "before the end of the other leg is known"


def test_first_token_whose_pages_travel_late_is_shown_once_the_decode_replica_must_compute_them() -> None:
    life = paired_life(is_granted=False)
    assert life.tokens("p", delta(0), 1.0) == []
    assert life.tokens("d", grant(), 9.0) == []
    assert life.lost("p", 0, DEATH, 9.5) == [Detach("p", 0, True), delta(0)]


def test_request_that_ends_with_its_first_token_waits_for_no_grant() -> None:
    life = paired_life(is_granted=False, max_tokens=1)
    end = delta(0, end=FinishReason.LENGTH)
    assert life.tokens("p", end, 1.0) == [Detach("d", 0, True), Detach("p", 0, False), end]
    assert life.is_over


@pytest.mark.parametrize("loss", ["decode replica lost", "returned", "nothing moves"])
def test_first_token_that_waits_for_a_grant_is_computed_again_in_the_next_attempt(loss: str) -> None:
    life = paired_life(is_granted=False)
    assert life.tokens("p", delta(0), 1.0) == []
    if loss == "decode replica lost":
        actions = life.lost("d", 0, LOSS, 2.0)
    elif loss == "returned":
        actions = life.tokens("p", TokenDelta("r", [], 1, finish_reason=FinishReason.RETURNED), 2.0)
    else:
        for now in (10.0, 10.0 + 121.0):
            ask_both(life, now)
            life.progress("d", 0, ["waiting", 0], now)
            actions = life.progress("p", 0, ["sending", 40], now)
    assert isinstance(actions[-1], PlaceAgain)
    legs = submits(life.place(200.0))
    assert {leg.submission.output_token_ids for leg in legs} == {()}
    assert life.tokens("p", delta(0), 201.0) == [], "of the attempt that is over"


@pytest.mark.parametrize("has_early", [False, True])
def test_attempt_without_prefill_replica_goes_on_unless_the_first_token_is_lost(has_early: bool) -> None:
    life = paired_life()
    if has_early:
        life.tokens("d", delta(1), 1.0)
    actions = life.lost("p", 0, LOSS, 2.0)
    assert actions[0] == Detach("p", 0, True)
    if has_early:
        assert actions[1] == Detach("d", 0, True)
        assert isinstance(actions[2], PlaceAgain)
        assert "first token was lost" in str(actions[2].loss)
    else:
        assert len(actions) == 1
        assert life.tokens("d", delta(0), 3.0) == [delta(0)]


# -- deadlines -------------------------------------------------------------------------------------------------------


def test_silent_replica_is_asked_and_every_token_puts_that_off() -> None:
    life, replica = running_life("a", "b")
    assert life.deadline == 5.0
    life.tokens(replica, delta(0), 3.0)
    assert life.deadline == 8.0
    assert life.tick(7.9) == []
    assert life.tick(8.0) == [Ask(replica, 0)]
    assert life.deadline == 128.0
    assert life.progress(replica, 0, [7], 9.0) == []
    assert life.deadline == 14.0
    assert life.tick(14.0) == [Ask(replica, 0)]
    detach, again = life.tick(134.0)
    assert detach == Detach(replica, 0, True)
    assert isinstance(again, PlaceAgain)
    assert "does not answer" in str(again.loss)


@pytest.mark.parametrize(
    ("numbers", "since", "why"), [(None, 5.0, "does not have r any more"), (["running", 7], 121.0, "has not moved")]
)
def test_replica_that_forgot_the_request_or_is_stuck_is_given_up(
    numbers: list[int | str] | None, since: float, why: str
) -> None:
    life, replica = running_life("a", "b")
    life.tick(5.0)
    assert life.progress(replica, 0, numbers, 5.0) == [], "the last message may be on its way; a step may be long"
    life.tick(5.0 + since)
    detach, again = life.progress(replica, 0, numbers, 5.0 + since)
    assert detach == Detach(replica, 0, True)
    assert isinstance(again, PlaceAgain)
    assert why in str(again.loss)


def ask_both(life: RequestLife, now: float) -> None:
    """Let the deadline pass until the replicas of a pair are asked."""
    assert life.tick(max(now, life.deadline)) == [Ask("d", 0), Ask("p", 0)]


def test_progress_of_either_replica_of_a_pair_counts_and_without_any_the_request_is_lost() -> None:
    life = paired_life()
    for turn in range(5):
        now = 100.0 * (turn + 1)
        ask_both(life, now)
        assert life.progress("d", 0, ["waiting", 0], now) == []
        assert life.progress("p", 0, ["running", turn], now) == []
    ask_both(life, 550.0)
    assert life.progress("d", 0, ["waiting", 0], 550.0) == []
    assert life.progress("p", 0, ["running", 4], 550.0) == []
    ask_both(life, 621.0)
    assert life.progress("p", 0, ["running", 4], 621.0) == []
    *detached, again = life.progress("d", 0, ["waiting", 0], 621.0)
    assert detached == [Detach("d", 0, True), Detach("p", 0, True)]
    assert isinstance(again, PlaceAgain)
    assert "has not moved at replica d and p for 121 s" in str(again.loss)


def test_prefill_replica_that_ships_while_it_is_asked_is_not_waited_for() -> None:
    life = paired_life()
    ask_both(life, 100.0)
    life.shipped("p", 0, 100.5)
    assert life.progress("d", 0, ["held", 1], 101.0) == []
    assert life.tick(life.deadline) == [Ask("d", 0)]


@pytest.mark.parametrize("forgets", [False, True])
def test_prefill_replica_that_forgot_the_request_or_is_silent_is_left_out(forgets: bool) -> None:
    """The decode replica has the pages, or computes the prompt."""
    life, now = paired_life(), 0.0
    for turn in range(1 + forgets):
        now = max(20.0 * (turn + 1), life.deadline)
        ask_both(life, now)
        assert life.progress("d", 0, ["held", turn], now) == []
        if forgets:
            actions = life.progress("p", 0, None, now)
            assert actions == ([Detach("p", 0, True)] if turn else [])
    if not forgets:
        assert life.tick(life.deadline) == [Detach("p", 0, True)]
    assert life.tick(life.deadline) == [Ask("d", 0)]
    assert life.tokens("d", delta(0), now) == [delta(0)]


# -- losses that say something about the request ---------------------------------------------------------------------


def test_request_returned_by_its_replica_is_placed_again_without_a_loss() -> None:
    life, _ = running_life("a", max_tokens=10)
    life.tokens("a", delta(0), 1.0)
    for attempt in range(3 * MOST_PLACEMENTS):
        returned = TokenDelta("r", [], 1, attempt, finish_reason=FinishReason.RETURNED)
        assert life.tokens("a", returned, 2.0 + attempt) == [Detach("a", attempt, False), PlaceAgain(None)]
        (submit,) = submits(life.place(2.0 + attempt))
        submission = submit.submission
        assert (submission.epoch, submission.output_token_ids, submission.may_refuse) == (attempt + 1, (0,), False)
        assert submission.waited_s == 2.0 + attempt
        assert life.taken("a", attempt + 1, 1, 2.0 + attempt) == [Accepted()]
    assert life.tokens("a", delta(1, 9, 3 * MOST_PLACEMENTS, FinishReason.LENGTH), 99.0)[-1] == delta(
        1, 9, 3 * MOST_PLACEMENTS, FinishReason.LENGTH
    )


def test_request_without_promise_is_refused_by_no_router_and_keeps_that_in_later_attempts() -> None:
    """The router here predicts that the first token is late at both replicas."""
    fleet = router(("a", "b"), policy="seconds")
    for name in ("a", "b"):
        fleet.hear(name, live(2, prompts=(Prompts(0, 6, 1, 100_000, 20.0),)), 0.0)
    promised = RequestLife(Submission("promised", PROMPT), fleet, 0.0)
    (fail,) = promised.place(0.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, Overloaded)
    life = RequestLife(Submission("r", PROMPT, is_promised=False), fleet, 0.0)
    (submit,) = submits(life.place(0.0))
    life.refused(submit.replica, 0, LOSS, 1.0)
    (again,) = submits(life.place(1.0))
    assert again.replica != submit.replica
    for submission in (submit.submission, again.submission):
        assert (submission.is_promised, submission.may_refuse) == (False, True)


def test_accepted_request_is_refused_by_none_any_more() -> None:
    """Its replica is lost before it has a token; the others are overloaded, or have other limits."""
    life, first = running_life("a", "b", "c")
    life.lost(first, 0, LOSS, 3.0)
    errors = [BUSY, ValueError("too long here")]
    for attempt, error in enumerate(errors, 1):
        (submit,) = submits(life.place(3.0))
        assert (submit.submission.may_refuse, submit.submission.waited_s) == (False, 3.0)
        assert life.query is not None
        assert not life.query.may_refuse
        assert life.refused(submit.replica, attempt, error, 3.0) == [
            Detach(submit.replica, attempt, False),
            PlaceAgain(None),
        ]
    (submit,) = submits(life.place(3.0))
    assert submit.replica == first, "the last resort"
    *_, again = life.refused(first, 3, BUSY, 3.0)
    assert again == PlaceAgain(None)
    (fail,) = life.place(3.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, ReplicaLost)


@pytest.mark.parametrize("late", ["decode", "prefill"])
def test_other_first_token_than_the_client_has_reaches_it_never(late: str) -> None:
    """Unlike machines may sample unlike tokens. What follows must follow from the tokens that the client has."""
    life, other = paired_life(), TokenDelta("r", [9, 8], 0)
    if late == "decode":
        assert life.tokens("p", delta(0), 1.0) == [delta(0)]
        life.lost("p", 0, LOSS, 1.0)
        detach, again = life.tokens("d", other, 2.0)
        assert detach == Detach("d", 0, True)
        assert isinstance(again, PlaceAgain)
        (submit, *_) = submits(life.place(2.0))
        assert submit.submission.output_token_ids == (0,)
    else:
        assert life.tokens("d", other, 1.0) == [other]
        assert life.tokens("p", delta(0), 2.0) == [Detach("p", 0, True)]
        assert life.tokens("d", delta(2), 3.0) == [delta(2)]


def test_end_after_another_first_token_does_not_end_the_request() -> None:
    """The decode replica's own first token was a stop token; the client has another one."""
    life = paired_life()
    life.tokens("p", delta(0), 1.0)
    life.lost("p", 0, LOSS, 1.0)
    end = TokenDelta("r", [2], 0, finish_reason=FinishReason.STOP, stop_token_id=2)
    *_, again = life.tokens("d", end, 2.0)
    assert isinstance(again, PlaceAgain)
    assert not life.is_over


@pytest.mark.parametrize("stage", ["submitted", "taken"])
def test_request_that_two_replicas_died_of_is_not_tried_again(stage: str) -> None:
    life = new_life("a", "b", "c")
    for attempt in range(2):
        (submit,) = submits(life.place(0.0))
        if stage == "taken":
            life.taken(submit.replica, attempt, 1, 0.0)
        assert life.is_suspect == bool(attempt)
        *_, end = life.lost(submit.replica, attempt, DEATH, 1.0)
    assert isinstance(end, Fail)
    assert isinstance(end.error, SuspectRequest)
    assert "2 replicas" in str(end.error)
    assert "do not repeat" in str(end.error)
    assert life.is_over


def test_death_of_a_prefill_replica_before_the_first_token_leaves_the_decode_replica_alone() -> None:
    """It would compute the prompt next, and may die of that too, with all that runs there."""
    life = paired_life()
    assert life.lost("p", 0, DEATH, 1.0) == [Detach("d", 0, True), Detach("p", 0, True), PlaceAgain(DEATH)]
    assert life.is_suspect


def test_stream_beside_deaths_is_innocent_until_it_has_been_lost_too_often() -> None:
    life = new_life("a", "b", max_tokens=99)
    for attempt in range(MOST_PLACEMENTS):
        (submit,) = submits(life.place(0.0))
        life.taken(submit.replica, attempt, 1, 0.0)
        life.tokens(submit.replica, delta(attempt, epoch=attempt), 1.0)
        assert not life.is_suspect
        *_, end = life.lost(submit.replica, attempt, DEATH, 1.0)
        assert end == PlaceAgain(DEATH) or attempt == MOST_PLACEMENTS - 1
    assert isinstance(end, Fail)
    assert isinstance(end.error, SuspectRequest)


# -- any history -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Part:
    """A leg of an attempt at a replica, and how far that has come with it."""

    submission: Submission
    peer: str | None
    output: list[int]  # as this replica knows it
    state: str = "sent"  # then "holds", and in the end "gone": refused, ended, forgotten, aborted or dead
    is_taken: bool = False  # the life knows that it holds the leg
    is_granted: bool = False  # pages of this replica, to the prefill replica
    has_pages: bool = False  # of the prompt, and the first token, from the prefill replica
    is_detached: bool = False


class AnyLife(RuleBasedStateMachine):
    """Replicas take, refuse, work, return, forget, die and come back; messages come late, twice or never.

    Of unlike replicas each samples tokens of its own, which depend on all tokens before. The client may leave.
    """

    @initialize(
        names=st.sampled_from(["a", "abc", "pd", "pda", "ppddab", "pqdeab"]),
        policy=st.sampled_from(["round-robin", "seconds"]),
        shipping=st.sampled_from(["always", "auto"]),
        max_tokens=st.integers(1, 6),
        are_unlike=st.booleans(),
    )
    def start(self, names: str, policy: str, shipping: str, max_tokens: int, are_unlike: bool) -> None:
        self.are_unlike = are_unlike
        self.names = sorted({*names})
        self.fleet = router(self.names, policy=policy, shipping=shipping)
        self.up = set(self.names)
        self.max_tokens, self.now = max_tokens, 0.0
        params = SamplingParams(max_tokens=max_tokens)
        self.life = RequestLife(Submission("r", PROMPT, params), self.fleet, self.now)
        self.parts: dict[tuple[str, int], Part] = {}
        self.wires: dict[str, deque[TokenDelta]] = {name: deque() for name in self.names}
        self.delivered: list[tuple[str, TokenDelta]] = []
        self.given: list[int] = []
        self.num_losses = self.num_deaths = self.num_returned = 0
        self.must_place, self.is_accepted, self.is_over = True, False, False
        self.heard: set[tuple[str, int]] = set()  # the parts of which the life has had any delta
        self.asked: set[str] = set()

    def sample(self, output: Sequence[int], replica: str) -> int:
        return abs(hash((*output, ord(replica) if self.are_unlike else 0))) % 1000

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out actions as a driver does, and check each of them."""
        for action in actions:
            assert not self.is_over, f"{action} after the end"
            match action:
                case TokenDelta(token_ids=token_ids):
                    assert self.is_accepted
                    assert action.finish_reason or (self.decode, self.life.attempt) in self.heard, "it has no pages yet"
                    for token in token_ids:
                        assert token in {self.sample(self.given, name) for name in self.names}, "from other tokens"
                        self.given.append(token)
                    self.is_over = action.finish_reason is not None
                    assert not self.is_over or len(self.given) == self.max_tokens
                case Submit(replica, submission, peer):
                    assert replica in self.up
                    assert submission.epoch == self.life.attempt
                    assert list(submission.output_token_ids) == self.given
                    assert submission.may_refuse == (not self.is_accepted)
                    assert (replica, submission.epoch) not in self.parts
                    self.parts[replica, submission.epoch] = Part(submission, peer, [*self.given])
                    query = self.fleet.queries[-1]
                    assert query.num_tokens == len(PROMPT) + len(self.given)
                    assert query.max_tokens == self.max_tokens - len(self.given)
                    assert query.may_refuse == (not self.is_accepted)
                case Accepted():
                    self.is_accepted = True
                    assert all(part.state != "sent" for part in self.current().values())
                case Detach(replica, attempt, is_running):
                    part = self.parts[replica, attempt]
                    assert not part.is_detached, "detached twice"
                    assert is_running or part.state == "gone", "left running"
                    part.is_detached, part.state = True, "gone"
                case PlaceAgain(loss):
                    self.must_place = True
                    self.num_losses += loss is not None
                    assert self.num_losses < MOST_PLACEMENTS
                case Ask(replica, attempt):
                    assert attempt == self.life.attempt
                    assert replica in self.current()
                    self.asked.add(replica)
                case Fail(error):
                    self.is_over = True
                    assert not self.is_accepted or isinstance(error, ReplicaLost | SuspectRequest)
                    assert self.num_deaths >= 2 or not isinstance(error, SuspectRequest)

    def current(self) -> dict[str, Part]:
        """Return the parts of the last attempt that are not detached, by replica."""
        attempt = self.life.attempt
        return {
            name: part
            for (name, its_attempt), part in self.parts.items()
            if its_attempt == attempt and not part.is_detached
        }

    @property
    def decode(self) -> str:
        """The replica that makes the output of the last attempt."""
        keys = [key for key, part in self.parts.items() if part.submission.leg is not Leg.SEND]
        return next(name for name, attempt in keys if attempt == self.life.attempt)

    def hear(self, replica: str, sent: TokenDelta) -> None:
        self.heard.add((replica, sent.epoch))
        self.do(self.life.tokens(replica, sent, self.now))

    def in_state(self, state: str) -> list[tuple[str, int]]:
        return [key for key, part in self.parts.items() if part.state == state]

    # -- replicas ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.must_place)
    @rule()
    def place(self) -> None:
        self.must_place = False
        self.asked.clear()
        self.do(self.life.place(self.now))

    @precondition(lambda self: self.in_state("sent"))
    @rule(data=st.data(), answer=st.sampled_from(["taken"] * 12 + ["busy", "busy", "silent", "unheard", "wrong"]))
    def answer(self, data: st.DataObject, answer: str) -> None:
        key = data.draw(st.sampled_from(self.in_state("sent")))
        part = self.parts[key]
        part.state = "gone" if answer in ("busy", "wrong") else "holds"
        errors = {"busy": BUSY, "silent": LOSS, "wrong": ValueError("too long")}
        part.is_taken = answer == "taken"
        if answer == "unheard":
            pass  # the answer is lost
        elif answer == "taken":
            self.do(self.life.taken(*key, 1, self.now))
        else:
            self.do(self.life.refused(*key, errors[answer], self.now))  # type: ignore[arg-type]

    @rule(data=st.data(), is_taken=st.booleans())
    @precondition(lambda self: self.parts)
    def answer_late(self, data: st.DataObject, is_taken: bool) -> None:
        """An answer of an attempt that was given up."""
        late = [key for key, part in self.parts.items() if part.is_detached and key[1] < self.life.attempt]
        if late:
            key = data.draw(st.sampled_from(late))
            answered = self.life.taken(*key, 1, self.now) if is_taken else self.life.refused(*key, BUSY, self.now)
            assert answered == []

    @precondition(lambda self: self.in_state("holds"))
    @rule(data=st.data(), count=st.integers(1, 3), arrives=st.sampled_from([True, True, False]))
    def work(self, data: st.DataObject, count: int, arrives: bool) -> None:
        self.make(data.draw(st.sampled_from(self.in_state("holds"))), count, arrives)

    @precondition(lambda self: self.in_state("holds"))
    @rule(data=st.data())
    def give_pages(self, data: st.DataObject) -> None:
        self.grant(data.draw(st.sampled_from(self.in_state("holds"))))

    def grant(self, key: tuple[str, int]) -> None:
        """A decode replica has pages for a request: it notifies the life too."""
        part = self.parts[key]
        if part.submission.leg is Leg.RECEIVE and not part.is_granted:
            part.is_granted = True
            self.wires[key[0]].append(grant(key[1]))

    def make(self, key: tuple[str, int], count: int, arrives: bool = True) -> None:
        """A replica makes up to `count` tokens, as far as its leg goes. `arrives`: the pages, if it sends any."""
        (replica, attempt), part = key, self.parts[key]
        leg, wire = part.submission.leg, self.wires[replica]
        if leg is Leg.RECEIVE and not part.has_pages:
            assert part.peer is not None
            if self.parts[part.peer, attempt].state != "gone":
                return  # the pages may still come; else this replica computes the prompt itself
        if leg is Leg.SEND:
            count = 1
        first = len(part.output)
        end = min(first + count, self.max_tokens)
        is_last = end == self.max_tokens
        while len(part.output) < end:
            part.output.append(self.sample(part.output, replica))
        reason = FinishReason.LENGTH if is_last else None
        wire.append(TokenDelta("r", part.output[first:], first, attempt, finish_reason=reason))
        if is_last or leg is Leg.SEND:
            part.state = "gone"
        if leg is Leg.SEND and not is_last:
            assert part.peer is not None
            wire.append(TokenDelta("r", [], epoch=attempt, finish_reason=FinishReason.SHIPPED))
            receiver = self.parts[part.peer, attempt]
            is_new = receiver.submission.output_token_ids == tuple(receiver.output)
            if arrives and is_new and receiver.state == "holds":  # else it takes over
                self.grant((part.peer, attempt))
                receiver.has_pages, receiver.output = True, [*part.output]

    @precondition(lambda self: self.in_state("holds"))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        """A replica makes way for a more urgent request."""
        replica, attempt = key = data.draw(st.sampled_from(self.in_state("holds")))
        self.parts[key].state = "gone"
        self.num_returned += 1
        first = len(self.parts[key].output)
        self.wires[replica].append(TokenDelta("r", [], first, attempt, finish_reason=FinishReason.RETURNED))

    @precondition(lambda self: self.in_state("holds"))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.parts[data.draw(st.sampled_from(self.in_state("holds")))].state = "gone"

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        waiting = [name for name, wire in self.wires.items() if wire]
        if waiting:
            name = data.draw(st.sampled_from(waiting))
            sent = self.wires[name].popleft()
            self.delivered.append((name, sent))
            self.hear(name, sent)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def deliver_twice(self, data: st.DataObject) -> None:
        self.hear(*data.draw(st.sampled_from(self.delivered)))

    @precondition(lambda self: self.up)
    @rule(data=st.data(), chance=st.integers(1, 4), loss=st.sampled_from([LOSS, DEATH]))
    def lose(self, data: st.DataObject, chance: int, loss: ReplicaLost) -> None:
        if chance != 3:
            return
        name = data.draw(st.sampled_from(sorted(self.up)))
        self.up.discard(name)
        self.fleet.leave(name)
        self.wires[name].clear()
        for (replica, _), part in self.parts.items():
            if replica == name:
                part.state = "gone"
        self.num_deaths += loss is DEATH
        self.do(self.life.lost(name, self.life.attempt, loss, self.now))

    @rule()
    def come_back(self) -> None:
        for name in sorted({*self.names} - self.up):
            join(self.fleet, name, self.now)
            self.up.add(name)

    @rule(num_steps=st.integers(1, 5))
    def go_well(self, num_steps: int) -> None:
        """Nothing goes wrong for a while: else few histories would come to their tokens."""
        for _ in range(num_steps):
            if self.must_place and not self.is_over:
                self.place()
            elif keys := self.in_state("sent"):
                self.parts[keys[0]].state, self.parts[keys[0]].is_taken = "holds", True
                self.do(self.life.taken(*keys[0], 1, self.now))
            else:
                for key in self.in_state("holds"):
                    self.make(key, 1)
                for name, wire in self.wires.items():
                    if wire:
                        self.delivered.append((name, wire.popleft()))
                        self.hear(*self.delivered[-1])

    # -- time and the client -----------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 3.0]), is_due=st.booleans())
    def wait(self, seconds: float, is_due: bool) -> None:
        self.now += seconds
        if is_due and isfinite(self.life.deadline):
            self.now = max(self.now, self.life.deadline)
        self.do(self.life.tick(self.now))

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), number=st.integers(1, 2))
    def report_progress(self, data: st.DataObject, number: int) -> None:
        self.report(data.draw(st.sampled_from(sorted(self.asked))), number)

    def report(self, replica: str, number: int) -> None:
        self.asked.discard(replica)
        part = self.parts[replica, self.life.attempt]
        waits = part.state == "sent" and number == 2  # else its replica has not heard of it
        numbers = [number] if part.state == "holds" or waits else None
        self.do(self.life.progress(replica, self.life.attempt, numbers, self.now))

    @rule(chance=st.integers(1, 20))
    def client_leaves(self, chance: int) -> None:
        if chance == 13 and not self.is_over:
            self.do(self.life.close())
            self.is_over = True

    # -- promises ----------------------------------------------------------------------------------------------------

    @invariant()
    def request_ends_everywhere_or_waits_on_a_live_replica(self) -> None:
        if not hasattr(self, "life"):
            return
        assert self.life.is_over == self.is_over
        assert self.life.output == self.given
        assert self.life.attempt < (MOST_PLACEMENTS + self.num_returned) * len(self.names)
        if self.is_over or self.must_place:
            assert all(part.is_detached for part in self.parts.values()), "a replica was left with the request"
            assert not self.fleet.is_booked
        else:
            decode = next(name for name, part in self.current().items() if part.submission.leg is not Leg.SEND)
            assert decode in self.up
            assert self.fleet.is_booked
        assert isfinite(self.life.deadline) != self.is_over

    def teardown(self) -> None:
        """From here on all goes well: the request ends, with all of its tokens or an error."""
        if not hasattr(self, "life"):
            return
        self.come_back()
        for _ in range(200):
            if self.must_place and not self.is_over:
                self.place()
            for key in self.in_state("sent"):
                self.parts[key].state = "holds"
                self.do(self.life.taken(*key, 1, self.now))
            for key in self.in_state("holds"):
                if self.parts[key].state == "holds":
                    self.make(key, 3)
            for name, wire in self.wires.items():
                while wire:
                    self.hear(name, wire.popleft())
            if self.is_over:
                break
            self.now = max(self.now, self.life.deadline)
            self.do(self.life.tick(self.now))
            for replica in sorted(self.asked):
                if not self.must_place and not self.is_over:
                    self.report(replica, int(self.now))
        assert self.is_over
        assert self.life.deadline == inf


AnyLife.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestAnyLife = AnyLife.TestCase


@pytest.mark.soak
def test_any_life_at_length() -> None:
    run_state_machine_as_test(AnyLife, settings=settings(max_examples=5000, stateful_step_count=60, deadline=None))
