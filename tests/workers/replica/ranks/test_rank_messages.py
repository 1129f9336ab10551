"""Messages between ranks: each arrives as it was sent, and bytes that are no message raise MalformedRankMessage."""

import itertools
import math
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack

from crossdock.kvtransfer.calls import (
    CancelExpectCall,
    CancelShipCall,
    ChunkCall,
    ExpectCall,
    FinishCall,
    GrantCall,
    PeerDeadCall,
    ShipCall,
    WaitCall,
)
from crossdock.kvtransfer.events import Arrived, Committed, Failed, Figures, Reason, Released, WriterStopped
from crossdock.kvtransfer.records import Count, GroupPages, Seconds
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.ranks.pool_layout import HeldLayers
from crossdock.workers.replica.ranks.rank_messages import (
    AllocatePool,
    CopyPages,
    DockOpened,
    DriverMessage,
    EndRank,
    ExpectParts,
    FilesCalled,
    FollowerMessage,
    JoinWorkerGroup,
    LoadPart,
    LookForParts,
    MalformedRankMessage,
    OpenDock,
    OpenFiles,
    PageName,
    PhaseEnded,
    RankFailure,
    RankReady,
    RecordSteps,
    RunStep,
    WritePart,
    decode_driver_message,
    decode_follower_message,
    encode,
)

HELD = ((0, 0, 2, 4, 12, 12, 0), (1, 0, 2, 4, 12, 12, 16, -3, 5))
PAGE = bytes(range(17))
GROUPS = (GroupPages(0, (1, 2, 3)), GroupPages(2, (7,)))
DRIVER_MESSAGES: list[DriverMessage] = [
    AllocatePool(100, 20),
    CopyPages((3, 4), (0, 7), is_out=True),
    OpenFiles(b"fingerprint"),
    WritePart(PAGE, (3, 4), 17),
    LoadPart(PAGE, (3, 4), (0, 7), 17),
    LookForParts(),
    ExpectParts((PAGE, PAGE)),
    RecordSteps(64, 2048, 8),
    RunStep(b"\0inputs"),
    OpenDock((HELD, HELD), "m", "prefill", TransferConfig(transport="tcp", host="10.0.0.1", grace_s=0.5)),
    EndRank(),
    ShipCall("r", 1, (b"a", b"b"), 10.0),
    ExpectCall("r", 1, (b"a",), 10.0),
    ChunkCall("r", GROUPS, 48),
    FinishCall("r", (), 0, b"\0result", (4, 2)),
    GrantCall("r", 1, 0, GROUPS, (5,)),
    CancelShipCall("r", 1),
    CancelExpectCall("r", 1),
    WaitCall("r", 1, 0.5),
    PeerDeadCall(b"blob"),
]
FOLLOWER_MESSAGES: list[FollowerMessage] = [
    JoinWorkerGroup(3),
    PhaseEnded("weights read in 1.0 s"),
    RankReady(HELD, 100, 4096),
    DockOpened(b"blob"),
    FilesCalled("OSError: no", False, (PAGE, PAGE[::-1]), (PAGE,)),
    RankFailure("ValueError: no", "Traceback"),
    Committed("r", 1, 32),
    Arrived("r", 1, 40, b"\0state", Figures(0.1, None, 2.0, 1 << 40)),
    WriterStopped("r", 1),
    Failed("r", 1, True, Reason.PROTOCOL, "why"),
    Released("r", 1, False, Figures(num_pages=4)),
]
MALFORMED: list[tuple[Any, str]] = [  # and what the error names
    ("not a map", "Expected `object`"),
    ([1], "Expected `object`"),
    ({}, "type"),
    ({"type": "getattr", "x": 1}, "getattr"),
    ({"type": "JoinWorkerGroup", "rank": 1}, "JoinWorkerGroup"),  # of the other direction
    ({"type": "RunStep"}, "inputs"),
    ({"type": "RunStep", "inputs": b"", "more": b""}, "more"),
    ({"type": "WritePart", "page": PAGE[1:], "slots": [3], "after": 1}, "length >= 17"),
    ({"type": "LoadPart", "page": PAGE + b"0", "slots": [3], "pages": [3], "after": 1}, "length <= 17"),
    ({"type": "ChunkCall", "request": "r", "groups": [[0, [1, "2"]]], "num_tokens": 48}, "groups"),
    ({"type": "ChunkCall", "request": "r", "groups": [[0, [1], 2]], "num_tokens": 48}, "groups"),
    ({"type": "ChunkCall", "request": "r", "groups": [[-1, [1]]], "num_tokens": 48}, "groups"),
    ({"type": "OpenDock", "by_rank": [[[0, "0"]]], "model": "m", "role": "prefill", "transfer": {}}, "by_rank"),
    ({"type": "OpenDock", "by_rank": [], "model": "m", "role": "p", "transfer": {"transport": "pigeon"}}, "transport"),
    ({"type": "OpenDock", "by_rank": [], "model": "m", "role": "p", "transfer": {"unknown": 1}}, "unknown"),
]


@pytest.mark.parametrize("message", DRIVER_MESSAGES, ids=lambda message: type(message).__name__)
def test_driver_message_arrives_as_it_was_sent(message: DriverMessage) -> None:
    assert decode_driver_message(encode(message)) == message


@pytest.mark.parametrize("message", FOLLOWER_MESSAGES, ids=lambda message: type(message).__name__)
def test_follower_message_arrives_as_it_was_sent(message: FollowerMessage) -> None:
    found = decode_follower_message(encode(message))
    assert found == message
    assert getattr(found, "figures", None) == getattr(message, "figures", None)  # these two are not compared above
    assert getattr(found, "detail", None) == getattr(message, "detail", None)


@pytest.mark.parametrize(("message", "named"), MALFORMED, ids=str)
def test_message_of_wrong_form_is_refused_and_what_is_wrong_named(message: Any, named: str) -> None:
    with pytest.raises(MalformedRankMessage, match=named):
        decode_driver_message(msgpack.encode(message))


VALUES: list[Any] = [None, True, 3, -1, 1 << 63, 0.5, -0.5, math.nan, "text", b"bytes", [], [-1], [1.5], ["text"], {}]
VALUES += [[None], [[1, "2"]], {"unknown": 1}, {"deadline_s": -1}]
FITTING: dict[Any, list[Any]] = {  # the values of VALUES that a field of this type may have
    Count: [3],
    Seconds: [3, 1 << 63, 0.5],
    str: ["text"],
    bytes: [b"bytes"],
    bool: [True],
    PageName: [],
    tuple[PageName, ...]: [[]],
    tuple[Count, ...]: [[]],
    tuple[GroupPages, ...]: [[]],
    tuple[bytes, ...]: [[]],
    tuple[HeldLayers, ...]: [[]],
    HeldLayers: [[]],
    TransferConfig: [{}],
    Reason: [],
    Figures: [{}, {"unknown": 1}, {"deadline_s": -1}],  # all of its fields have defaults
    Seconds | None: [None, 3, 1 << 63, 0.5],
}


def check_fields(kind: type, good: dict[str, Any], decode: Callable[[dict[str, Any]], object]) -> None:
    """Check every field of a message with every value that is not of its type, and without it."""
    hints = get_type_hints(kind, include_extras=True)
    for name, value in itertools.product(good.keys() & hints.keys(), VALUES):
        if any(type(value) is type(fitting) and value == fitting for fitting in FITTING[hints[name]]):
            decode({**good, name: value})
            continue
        with pytest.raises(MalformedRankMessage):
            decode({**good, name: value})


@pytest.mark.parametrize("message", DRIVER_MESSAGES, ids=lambda message: type(message).__name__)
def test_field_of_wrong_type_or_range_is_refused(message: Any) -> None:
    good = msgpack.decode(encode(message))
    check_fields(type(message), good, lambda changed: decode_driver_message(msgpack.encode(changed)))


@pytest.mark.parametrize("message", FOLLOWER_MESSAGES, ids=lambda message: type(message).__name__)
def test_field_of_a_follower_of_wrong_type_or_range_is_refused(message: Any) -> None:
    good = msgpack.decode(encode(message))
    if "kind" not in good:
        check_fields(type(message), good, lambda changed: decode_follower_message(msgpack.encode(changed)))
        return

    def decode(changed: dict[str, Any]) -> object:
        return decode_follower_message(msgpack.encode({**good, "fields": changed}))

    check_fields(type(message), good["fields"], decode)
    if figures := good["fields"].get("figures"):
        check_fields(Figures, figures, lambda changed: decode({**good["fields"], "figures": changed}))


def test_event_of_unknown_kind_is_refused() -> None:
    with pytest.raises(MalformedRankMessage, match="unknown kind 'Lost'"):
        decode_follower_message(msgpack.encode({**msgpack.decode(encode(Committed("r", 1, 2))), "kind": "Lost"}))


def test_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(MalformedRankMessage, match="RunStep"):
        decode_follower_message(encode(RunStep(b"")))


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedRankMessage):
        decode_driver_message(data)
