"""Any bytes decode to a message whose fields are in range, or raise MalformedMessage; messages survive a round trip."""

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from crossdock.kvtransfer.messages import (
    MAX_BYTES,
    Abort,
    Grant,
    GroupPages,
    Hello,
    MalformedMessage,
    Pages,
    Stopped,
    TransferMessage,
    Wait,
    decode,
    encode,
)

from .one_group import whole

requests = st.text(min_size=1, max_size=512)
numbers = st.integers(0, (1 << 40) - 1)
pages = st.lists(numbers, max_size=50).map(tuple)
groups = st.builds(GroupPages, numbers, pages)
messages = st.one_of(
    st.builds(Hello, requests, numbers),
    st.builds(Grant, requests, numbers, numbers, st.lists(groups, max_size=3).map(tuple), pages),
    st.builds(Wait, requests, numbers, st.floats(0, 86_400), st.booleans()),
    st.builds(Abort, requests, numbers, st.binary(max_size=600)),
    st.builds(Stopped, requests, numbers, st.booleans()),
    st.builds(Pages, requests, numbers, numbers, numbers, numbers, numbers, numbers, numbers, st.none() | st.binary()),
)


@given(messages)
def test_message_encoded_and_decoded_is_the_same(message: TransferMessage) -> None:
    assert decode(encode(message)) == message


def test_grant_of_128k_tokens_fits_in_64_kib() -> None:
    grant = Grant("r" * 40, 1, 0, whole(range(100_000, 108_192)))
    assert len(encode(grant)) < 64 << 10


def test_message_beyond_the_size_limit_is_refused_by_both_sides() -> None:
    huge = Pages("r", 1, 0, 0, 0, 0, 0, 1, b"x" * MAX_BYTES)
    with pytest.raises(ValueError, match="at most"):
        encode(huge)
    with pytest.raises(MalformedMessage, match="bytes"):
        decode(b"x" * (MAX_BYTES + 1))


@given(st.binary(max_size=200))
@example(b"")
@example(msgpack.packb(["Hello", "r", 1, 2]))
@example(b"\x91" * 2000)  # nested too deep
@example(msgpack.packb(["Hello", "r", 1])[:-1])
@example(msgpack.packb(["Hello", "r", 1]) + b"\0")
def test_random_bytes_are_refused_or_in_range(data: bytes) -> None:
    try:
        message = decode(data)
    except MalformedMessage:
        return
    assert decode(encode(message)) == message


good = ["Grant", "r", 1, 2, [[2, [3, 4]], [4, []]], [5]]
values = (
    st.none() | st.booleans() | st.integers(-3, 1 << 63) | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
)


@given(st.integers(0, 5), values | st.lists(values, max_size=3))
def test_message_with_one_random_field_is_refused_or_in_range(index: int, value: object) -> None:
    parts = [*good]
    parts[index] = value
    try:
        message = decode(msgpack.packb(parts))
    except MalformedMessage:
        return
    assert isinstance(message, Grant)
    assert all(type(page) is int and page >= 0 for group in message.groups for page in (group.first, *group.pages))
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
        ["Grant", "r", 1, 0, [[0, [0, "1"]]]],
        ["Grant", "r", 1, 0, [[0, [[0]]]]],
        ["Grant", "r", 1, 0, [[0]]],
        ["Grant", "r", 1, 0, [[-1, []]]],
        ["Grant", "r", 1, 0, [0, 1]],
        ["Pages", "r", 1, 0, 0, 0, 0, 0, 0, "result"],
    ],
)
def test_message_with_a_field_out_of_range_is_refused(parts: object) -> None:
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb(parts))
