"""Messages between ranks: each arrives as it was sent, and bytes that are no message raise MalformedRankMessage."""

import math
from dataclasses import fields
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.kvtransfer.events import Arrived, Committed, Failed, Figures, Granted, Reason, Released, WriterStopped
from crossdock.kvtransfer.messages import GroupPages
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.ranks.pool_layout import HeldLayers
from crossdock.workers.replica.ranks.rank_messages import (
    AllocatePool,
    CancelExpectCall,
    CancelShipCall,
    ChunkCall,
    DockOpened,
    DriverMessage,
    EndRank,
    ExpectCall,
    FinishCall,
    FollowerMessage,
    GrantCall,
    JoinGang,
    MalformedRankMessage,
    OpenDock,
    PeerDeadCall,
    PhaseEnded,
    RankFailure,
    RankReady,
    RecordSteps,
    RunStep,
    ShipCall,
    WaitCall,
    decode_driver_message,
    decode_follower_message,
    encode,
)

HELD = ((0, 0, 2, 4, 12, 12, 0), (1, 0, 2, 4, 12, 12, 16, -3, 5))
GROUPS = (GroupPages(0, (1, 2, 3)), GroupPages(2, (7,)))
DRIVER_MESSAGES: list[DriverMessage] = [
    AllocatePool(100),
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
    JoinGang(3),
    PhaseEnded("weights read in 1.0 s"),
    RankReady(HELD, 100, 4096),
    DockOpened(b"blob"),
    RankFailure("ValueError: no", "Traceback"),
    Granted("r", 1, 2),
    Committed("r", 1, 32),
    Arrived("r", 1, 40, b"\0state", Figures(0.1, None, 2.0, 1 << 40)),
    WriterStopped("r", 1),
    Failed("r", 1, True, Reason.PROTOCOL, "why"),
    Released("r", 1, False, Figures(num_pages=4)),
]
MALFORMED: list[Any] = [
    "not a list",
    [],
    [1],
    ["getattr", "x"],
    ["JoinGang", 1],
    ["RunStep"],
    ["RunStep", b"", b""],
    ["RunStep", "text"],
    ["AllocatePool", True],
    ["AllocatePool", 1.0],
    ["ChunkCall", "r", [[0, [1, "2"]]], 48],
    ["ChunkCall", "r", [[0, [1], 2]], 48],
    ["ChunkCall", "r", [[-1, [1]]], 48],
    ["ChunkCall", "r", [1, 2], 48],
    ["ChunkCall", "r", 5, 48],
    ["ShipCall", "r", 1, [b"a"], "10"],
    ["OpenDock", [[[0, "0"]]], "m", "prefill", {}],
    ["OpenDock", [], "m", "prefill", {"transport": "pigeon"}],
    ["OpenDock", [], "m", "prefill", {"unknown": 1}],
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


@pytest.mark.parametrize("parts", MALFORMED, ids=str)
def test_message_of_wrong_form_is_refused(parts: Any) -> None:
    with pytest.raises(MalformedRankMessage):
        decode_driver_message(msgpack.packb(parts))


VALUES: list[Any] = [None, True, 3, -1, 1 << 63, 0.5, -0.5, math.nan, "text", b"bytes", [], [-1], [1.5], ["text"], {}]
VALUES += [[None], [[1, "2"]], {"unknown": 1}, {"deadline_s": -1}]
FITTING: dict[Any, list[Any]] = {  # the values of VALUES that a field of this type may have
    int: [3],
    float: [3, 1 << 63, 0.5],
    str: ["text"],
    bytes: [b"bytes"],
    bool: [True],
    tuple[int, ...]: [[]],
    tuple[GroupPages, ...]: [[]],
    tuple[bytes, ...]: [[]],
    tuple[HeldLayers, ...]: [[]],
    HeldLayers: [[]],
    TransferConfig: [{}],
    Reason: [],
    Figures: [],
    float | None: [None, 3, 1 << 63, 0.5],
}


@pytest.mark.parametrize("message", [*DRIVER_MESSAGES, *FOLLOWER_MESSAGES], ids=lambda message: type(message).__name__)
def test_field_of_wrong_type_or_range_is_refused(message: Any) -> None:
    """Every field of every message, with every value that is not of its type, and with too few and too many fields."""
    decode: Any = decode_driver_message if message in DRIVER_MESSAGES else decode_follower_message
    name, *parts = msgpack.unpackb(encode(message))
    for at, field in enumerate(fields(message)):
        for value in VALUES:
            changed = msgpack.packb([name, *parts[:at], value, *parts[at + 1 :]])
            if any(type(value) is type(good) and value == good for good in FITTING[field.type]):
                decode(changed)
                continue
            with pytest.raises(MalformedRankMessage):
                decode(changed)
    for wrong in ([name, *parts, 0], [name, *parts][: len(parts)], [name, parts]):
        with pytest.raises(MalformedRankMessage):
            decode(msgpack.packb(wrong))


def test_figures_of_wrong_type_or_range_are_refused() -> None:
    name, *rest, figures = msgpack.unpackb(encode(Released("r", 1, True, Figures(0.1, 0.2, 0.3, 1, 2, 3, 0.4, 0.5, 6))))
    for at, field in enumerate(fields(Figures)):
        for value in VALUES:
            changed = msgpack.packb([name, *rest, [*figures[:at], value, *figures[at + 1 :]]])
            if any(type(value) is type(good) and value == good for good in FITTING[field.type]):
                decode_follower_message(changed)
                continue
            with pytest.raises(MalformedRankMessage):
                decode_follower_message(changed)


@pytest.mark.parametrize("parts", [["Failed", "r", 1, True, "mood", ""], ["Released", "r", 1, True, [0.0]]], ids=str)
def test_event_of_wrong_form_is_refused(parts: Any) -> None:
    with pytest.raises(MalformedRankMessage):
        decode_follower_message(msgpack.packb(parts))


def test_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(MalformedRankMessage, match="no known kind"):
        decode_driver_message(encode(JoinGang(1)))
    with pytest.raises(MalformedRankMessage, match="no known kind"):
        decode_follower_message(encode(RunStep(b"")))


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedRankMessage):
        decode_driver_message(data)
