"""The life of a request whose pictures an encode replica encodes: nothing that happens there ends an attempt."""

import pytest

from crossdock.router.actions import Accepted, Ask, Detach, Fail, PlaceAgain, Submit, SuspectRequest
from crossdock.router.request_life import RequestLife
from crossdock.workers.schedule.pictures.items import Item
from crossdock.workers.schedule.request import FinishReason, TokenDelta
from crossdock.workers.schedule.submission import Leg, SamplingParams, Submission
from tests.router.test_request_life import DEATH, LOSS, PROMPT, delta, router, submits

PICTURES = [Item(4, 10, 8, "image", b"cat".ljust(16)), Item(20, 10, 10, "image", b"dog".ljust(16))]


def new_life(*names: str) -> RequestLife:
    """Return a life with two pictures; v1, v2, … encode."""
    submission = Submission("r", PROMPT, SamplingParams(max_tokens=4), cache_salt="tenant", items=PICTURES)
    return RequestLife(submission, router(names), 0.0)


def begun(*names: str) -> tuple[RequestLife, list[Submit]]:
    """Return a life whose replicas have all taken their legs, and these."""
    life = new_life(*names)
    legs = submits(life.place(0.0))
    actions = [action for leg in legs for action in life.taken(leg.replica, 0, 1, 0.0)]
    assert actions == [Accepted()]
    return life, legs


def ending(reason: FinishReason) -> TokenDelta:
    return TokenDelta("r", [], finish_reason=reason)


@pytest.mark.parametrize("names", [("a",), ("p", "d")], ids=["mixed", "pair"])
def test_encode_replica_is_submitted_last_and_ships_to_the_one_that_computes_the_prompt(names: tuple[str, ...]) -> None:
    *others, encoding = submits(new_life(*names, "v1").place(0.0))
    first = others[-1]
    assert [leg.replica for leg in others] == [*reversed(names)]
    assert [leg.encoder for leg in others] == [None] * (len(others) - 1) + ["v1"]
    assert not any(leg.is_encoding for leg in others)
    assert all(list(leg.submission.items) == PICTURES for leg in others)
    assert (encoding.replica, encoding.peer, encoding.is_encoding) == ("v1", first.replica, True)
    leg = encoding.submission
    assert (leg.id, leg.epoch, leg.leg, leg.cache_salt) == ("r", 0, Leg.SEND, "tenant")
    assert len(leg.prompt_token_ids) == 2 * 16 + 1
    assert [(item.start, item.length, item.num_rows) for item in leg.items] == [(0, 8, 8), (16, 10, 10)]


def test_replica_that_waits_for_rows_is_given_the_predicted_seconds() -> None:
    life = new_life("p", "d", "v1")
    legs = submits(life.place(0.0))
    assert life.placement is not None
    assert {leg.submission.rows_within_s for leg in legs} == {life.placement.predicted_ttft}
    assert life.placement.predicted_ttft > 0
    (alone,) = submits(new_life("a").place(0.0))
    assert alone.submission.rows_within_s == 0


def test_request_without_pictures_has_no_encode_replica() -> None:
    life = RequestLife(Submission("r", PROMPT), router(["a", "v1"]), 0.0)
    (submit,) = submits(life.place(0.0))
    assert (submit.replica, submit.encoder) == ("a", None)
    assert life.query is not None
    assert life.query.encoding is None


def test_encode_replica_that_does_not_answer_the_submission_is_not_waited_for() -> None:
    life = new_life("a", "v1")
    life.place(0.0)
    assert life.taken("a", 0, 1, 0.0) == []
    assert life.tokens("a", delta(0), 1.0) == []
    assert life.tick(10.0) == [Detach("v1", 0, True), Accepted(), delta(0)]
    assert life.taken("v1", 0, 1, 11.0) == []


@pytest.mark.parametrize("loss", [LOSS, DEATH])
@pytest.mark.parametrize("names", [("a",), ("p", "d")], ids=["mixed", "pair"])
def test_attempt_goes_on_without_its_encode_replica(names: tuple[str, ...], loss: Exception) -> None:
    life, legs = begun(*names, "v1")
    first = legs[-2].replica
    assert life.lost("v1", 0, loss, 1.0) == [Detach("v1", 0, True)]  # type: ignore[arg-type]
    assert not life.is_suspect
    assert life.tokens(first, delta(0), 2.0) == [delta(0)]


@pytest.mark.parametrize("is_answered", [True, False])
def test_death_of_an_encode_replica_leaves_all_others_out_and_counts_by_itself(is_answered: bool) -> None:
    """Its other requests had no part in it. Two more deaths are needed, of replicas that compute."""
    life = new_life("a", "b", "v1", "v2")
    _, encoding = submits(life.place(0.0))
    if is_answered:
        life.taken(encoding.replica, 0, 1, 0.0)
    actions = life.lost(encoding.replica, 0, DEATH, 0.0)
    assert actions[-1] == (Detach(encoding.replica, 0, True) if is_answered else PlaceAgain(None))
    for turn in range(2):
        if not (turn == 0 and is_answered):
            (submit,) = submits(life.place(0.0))
            assert submit.encoder is None
        assert life.placement is not None
        *_, end = life.lost(life.placement.decode, life.attempt, DEATH, 1.0)
        assert isinstance(end, PlaceAgain) if turn == 0 else isinstance(end, Fail)
    assert isinstance(end, Fail)
    assert isinstance(end.error, SuspectRequest)


@pytest.mark.parametrize(
    "reason", [FinishReason.SHIPPED, FinishReason.RETURNED, FinishReason.ERROR, FinishReason.LENGTH]
)
def test_end_of_the_encoding_leg_ends_nothing_else(reason: FinishReason) -> None:
    life, _ = begun("a", "v1")
    assert life.tokens("v1", delta(0), 1.0) == [], "its token means nothing"
    assert life.tokens("v1", ending(reason), 1.0) == [Detach("v1", 0, False)]
    assert life.tokens("v1", ending(reason), 1.0) == []
    assert life.tokens("a", delta(0), 2.0) == [delta(0)]
    assert life.output == [0]


def test_encoding_leg_that_ends_before_others_have_answered_does_not_hold_up_acceptance() -> None:
    life = new_life("a", "v1")
    life.place(0.0)
    assert life.tokens("v1", ending(FinishReason.SHIPPED), 1.0) == [Detach("v1", 0, False)]
    assert life.taken("a", 0, 1, 1.0) == [Accepted()]


def test_first_token_ends_the_encoding_leg() -> None:
    """All rows were read, or found in a cache."""
    life, _ = begun("a", "v1")
    assert life.tokens("a", delta(0), 1.0) == [Detach("v1", 0, True), delta(0)]


@pytest.mark.parametrize("forgets", [False, True])
def test_encode_replica_that_is_silent_or_forgot_the_leg_is_left_out(forgets: bool) -> None:
    life, _ = begun("p", "d", "v1")
    now = 0.0
    for turn in range(1 + forgets):
        now = max(20.0 * (turn + 1), life.deadline)
        assert life.tick(now) == [Ask("d", 0), Ask("p", 0), Ask("v1", 0)]
        life.progress("d", 0, ["held", turn], now)
        life.progress("p", 0, ["running", turn], now)
        if forgets:
            actions = life.progress("v1", 0, None, now)
    if not forgets:
        actions = life.tick(life.deadline)
    assert actions == [Detach("v1", 0, True)]
    assert life.tick(life.deadline) == [Ask("d", 0), Ask("p", 0)]


def test_progress_of_the_encode_replica_counts() -> None:
    """The prompt waits for embeddings, however long they take."""
    life, _ = begun("a", "v1")
    for turn in range(4):
        now = 100.0 * (turn + 1)
        life.tick(max(now, life.deadline))
        assert life.progress("a", 0, ["waiting", 0], now) == []
        assert life.progress("v1", 0, ["running", turn], now) == []
    life.tick(max(430.0, life.deadline))
    assert life.progress("a", 0, ["waiting", 0], 430.0) == []
    assert life.progress("v1", 0, ["running", 3], 430.0) == []
    life.tick(max(530.0, life.deadline))
    assert life.progress("a", 0, ["waiting", 0], 530.0) == []
    *detached, again = life.progress("v1", 0, ["running", 3], 530.0)
    assert detached == [Detach("a", 0, True), Detach("v1", 0, True)]
    assert isinstance(again, PlaceAgain)


def test_request_that_goes_on_elsewhere_has_its_pictures_encoded_elsewhere_again() -> None:
    life, legs = begun("a", "b", "v1")
    first = legs[0].replica
    life.tokens(first, delta(0, 2), 1.0)
    assert life.lost(first, 0, LOSS, 2.0) == [Detach(first, 0, True), PlaceAgain(LOSS)]
    submit, encoding = submits(life.place(2.0))
    assert submit.submission.output_token_ids == (0, 1)
    assert (submit.encoder, encoding.submission.output_token_ids, encoding.submission.epoch) == ("v1", (), 1)
    assert not encoding.submission.may_refuse


def test_client_that_leaves_ends_the_encoding_leg_too() -> None:
    life, _ = begun("p", "d", "v1")
    assert life.close() == [Detach("d", 0, True), Detach("p", 0, True), Detach("v1", 0, True)]
