"""Whatever bytes arrive, they are a message in range or MalformedMessage; what is sent comes back as it was."""

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from crossdock.kvtransfer.messages import (
    MAX_BYTES,
    Abort,
    Grant,
    Hello,
    MalformedMessage,
    TransferMessage,
    Pages,
    Stopped,
    Wait,
    decode,
    encode,
)

requests = st.text(min_size=1, max_size=512)
numbers = st.integers(0, (1 << 40) - 1)
messages = st.one_of(
    st.builds(Hello, requests, numbers),
    st.builds(Grant, requests, numbers, numbers, st.lists(numbers, max_size=50).map(tuple)),
    st.builds(Wait, requests, numbers, st.floats(0, 86_400), st.booleans()),
    st.builds(Abort, requests, numbers, st.binary(max_size=600)),
    st.builds(Stopped, requests, numbers, st.booleans()),
    st.builds(Pages, requests, numbers, numbers, numbers, numbers, numbers, numbers, numbers, st.none() | st.binary()),
)


@given(messages)
def test_round_trip(message: TransferMessage) -> None:
    assert decode(encode(message)) == message


def test_a_grant_of_128k_tokens_fits() -> None:
    grant = Grant("r" * 40, 1, 0, tuple(range(100_000, 108_192)))
    assert len(encode(grant)) < 64 << 10


def test_what_is_too_large_is_refused_by_both_sides() -> None:
    huge = Pages("r", 1, 0, 0, 0, 0, 0, 1, b"x" * MAX_BYTES)
    with pytest.raises(ValueError, match="at most"):
        encode(huge)
    with pytest.raises(MalformedMessage, match="bytes"):
        decode(b"x" * (MAX_BYTES + 1))


@given(st.binary(max_size=200))
@example(b"")
@example(msgpack.packb(["Hello", "r", 1, 2]))
@example(b"\x91" * 2000)  # nested deeper than anyone means
@example(msgpack.packb(["Hello", "r", 1])[:-1])
@example(msgpack.packb(["Hello", "r", 1]) + b"\0")
def test_noise_is_refused(data: bytes) -> None:
    try:
        message = decode(data)
    except MalformedMessage:
        return
    assert decode(encode(message)) == message


good = ["Grant", "r", 1, 2, [3, 4]]
values = (
    st.none() | st.booleans() | st.integers(-3, 1 << 63) | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
)


@given(st.integers(0, 4), values | st.lists(values, max_size=3))
def test_each_field_is_checked(index: int, value: object) -> None:
    parts = [*good]
    parts[index] = value
    try:
        message = decode(msgpack.packb(parts))
    except MalformedMessage:
        return
    assert isinstance(message, Grant)
    assert all(type(page) is int and page >= 0 for page in message.pages)
    assert type(message.request) is str
    assert type(message.epoch) is type(message.first_page) is int


@pytest.mark.parametrize(
    "parts",
    [
        ["Message", "r", 1],
        [["Hello"], "r", 1],
        {"Hello": 1},
        ["Hello", "", 1],
        ["Hello", "r" * 513, 1],
        ["Hello", "r", -1],
        ["Hello", "r", True],
        ["Hello", "r", 1.0],
        ["Hello", b"r", 1],
        ["Wait", "r", 1, float("nan"), True],
        ["Wait", "r", 1, float("inf"), True],
        ["Wait", "r", 1, -1.0, True],
        ["Stopped", "r", 1, 1],
        ["Grant", "r", 1, 0, [0, "1"]],
        ["Grant", "r", 1, 0, [[0]]],
        ["Pages", "r", 1, 0, 0, 0, 0, 0, 0, "state"],
    ],
)
def test_out_of_range(parts: object) -> None:
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb(parts))
