"""A fleet whose replicas have unlike weights, as of two formats, or during an upgrade from one to the other."""

from typing import Any

from crossdock.router.actions import Accepted, Action, Fail, PlaceAgain
from crossdock.router.fleet import Fleet
from crossdock.router.request_life import RequestLife
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Leg, SamplingParams, Submission
from tests.router.replicas import fleet_of, profile
from tests.router.test_request_life import LOSS, submits


def two_formats(**config: Any) -> Fleet:
    """Return a router over two replicas in bfloat16 and, as idle but faster, two in FP8."""
    slow = {name: profile(4.0, weights="bf16") for name in ("bf16/0", "bf16/1")}
    return fleet_of(slow | {name: profile(weights="fp8") for name in ("fp8/0", "fp8/1")}, **config)


def begin(fleet: Fleet, num_tokens: int) -> tuple[RequestLife, str]:
    """Return a life with so many tokens, and the replica that made them: one in bfloat16."""
    life = RequestLife(Submission("r", [7] * 400, SamplingParams(max_tokens=9)), fleet, 0.0)
    for name in ("fp8/0", "fp8/1"):
        fleet.leave(name)
    (submit,) = submits(life.place(0.0))
    assert life.taken(submit.replica, 0, 1, 0.0) == [Accepted()]
    if num_tokens:
        life.tokens(submit.replica, TokenDelta("r", list(range(num_tokens)), 0, 0), 0.0)
    for name in ("fp8/0", "fp8/1"):
        fleet.join(name, profile(weights="fp8"), 0.0)
    return life, submit.replica


def after_loss(life: RequestLife, replica: str) -> list[Action]:
    """Lose the replica of a life, and return where the life goes next."""
    attempt = life.attempt
    life._fleet.leave(replica)
    assert any(isinstance(each, PlaceAgain) for each in life.lost(replica, attempt, LOSS, 1.0))
    return life.place(1.0)


def test_stream_goes_on_only_at_replicas_of_its_own_weights() -> None:
    life, first = begin(two_formats(), 2)
    (submit,) = submits(after_loss(life, first))
    assert {first, submit.replica} == {"bf16/0", "bf16/1"}
    assert submit.submission.output_token_ids == (0, 1)
    life.taken(submit.replica, 1, 1, 1.0)
    (fail,) = after_loss(life, submit.replica)
    assert isinstance(fail, Fail)
    assert "no replica is left with the weights that made the tokens so far" in str(fail.error)
    assert "router.unlike_weights: mixed" in str(fail.error)


def test_request_without_a_token_goes_on_at_replicas_of_any_weights() -> None:
    life, first = begin(two_formats(), 0)
    (submit,) = submits(after_loss(life, first))
    assert submit.replica.startswith("fp8"), "the faster ones"


def test_stream_goes_on_at_replicas_of_any_weights_where_the_router_mixes_them() -> None:
    life, first = begin(two_formats(unlike_weights="mixed"), 2)
    (submit,) = submits(after_loss(life, first))
    assert submit.replica.startswith("fp8")
    assert submit.submission.output_token_ids == (0, 1)


def test_stream_of_a_replica_of_unknown_weights_goes_on_anywhere() -> None:
    """As one does of a version that did not advertise them."""
    fleet = fleet_of({"old": profile(weights=""), "new": profile(weights="bf16")})
    life = RequestLife(Submission("r", [7] * 40, SamplingParams(max_tokens=9)), fleet, 0.0)
    fleet.leave("new")
    life.place(0.0)
    life.taken("old", 0, 1, 0.0)
    life.tokens("old", TokenDelta("r", [0], 0, 0), 0.0)
    fleet.join("new", profile(weights="bf16"), 0.0)
    (submit,) = submits(after_loss(life, "old"))
    assert submit.replica == "new"


def test_stream_of_a_pair_goes_on_with_the_weights_of_its_decode_replica() -> None:
    """Whichever computed its prompt: a prefill replica of other weights takes no part in the next attempt."""
    profiles = {f"prefill {kind}": profile(role="prefill", weights=kind) for kind in ("bf16", "fp8")}
    profiles |= {f"decode {number}": profile(role="decode", weights="bf16") for number in (0, 1)}
    fleet = fleet_of(profiles, shipping="always", unlike_weights="apart")
    fleet.leave("prefill bf16")
    life = RequestLife(Submission("r", [7] * 400, SamplingParams(max_tokens=9)), fleet, 0.0)
    receive, send = submits(life.place(0.0))
    life.taken(receive.replica, 0, 1, 0.0)
    life.taken(send.replica, 0, 1, 0.0)
    life.tokens(send.replica, TokenDelta("r", [0], 0, 0), 0.0)
    fleet.join("prefill bf16", profiles["prefill bf16"], 0.0)
    again, other = submits(after_loss(life, receive.replica))
    assert [(each.replica.split()[0], each.submission.leg) for each in (again, other)] == [
        ("decode", Leg.RECEIVE),
        ("prefill", Leg.SEND),
    ]
    assert other.replica == "prefill bf16"
