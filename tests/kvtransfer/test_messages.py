"""Any bytes decode to a message whose fields are in range, or raise MalformedMessage; messages survive a round trip."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import msgpack, to_builtins

from crossdock.kvtransfer.messages import (
    MAX_BYTES,
    Abort,
    Checksum,
    Grant,
    Hello,
    MalformedMessage,
    Pages,
    Stopped,
    TransferMessage,
    Wait,
    decode,
    encode,
)
from crossdock.kvtransfer.records import GroupPages

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
    st.builds(
        Pages,
        requests,
        *[numbers] * 7,
        st.none() | st.binary(),
        st.none() | st.builds(Checksum, numbers, pages),
    ),
)


@given(messages)
def test_message_encoded_and_decoded_is_the_same(message: TransferMessage) -> None:
    assert decode(encode(message)) == message


def test_message_without_a_checksum_does_not_name_it() -> None:
    """So replicas of a release without checksums read the pages of one that has them, turned off."""
    assert b"checksum" not in encode(Pages("r", 1, 0, 0, 0, 0, 0, 1))


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
@example(b"\x91" * 2000)  # nested too deep
@example(encode(Hello("r", 1))[:-1])
@example(encode(Hello("r", 1)) + b"\0")
def test_random_bytes_are_refused_or_in_range(data: bytes) -> None:
    try:
        message = decode(data)
    except MalformedMessage:
        return
    assert decode(encode(message)) == message


GRANT = {"type": "Grant", "request": "r", "epoch": 1, "first_page": 2, "groups": [[2, [3, 4]], [4, []]]}
PAGES = to_builtins(Pages("r", 1, 0, 0, 0, 0, 0, 1))
values = (
    st.none() | st.booleans() | st.integers(-3, 1 << 63) | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
)


@given(st.sampled_from([*GRANT]), values | st.lists(values, max_size=3))
def test_message_with_one_random_field_is_refused_or_in_range(name: str, value: object) -> None:
    try:
        message = decode(msgpack.encode({**GRANT, name: value}))
    except MalformedMessage:
        return
    assert isinstance(message, Grant)
    assert all(type(page) is int and page >= 0 for group in message.groups for page in (group.first, *group.pages))
    assert type(message.request) is str
    assert type(message.epoch) is type(message.first_page) is int


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"type": "Message", "request": "r", "epoch": 1}, "type"),
        ({"type": ["Hello"], "request": "r", "epoch": 1}, "type"),
        (["Hello", "r", 1], "Expected `object`"),
        ({"type": "Hello", "request": "r"}, "epoch"),
        ({"type": "Hello", "request": "r", "epoch": 1, "more": 2}, "more"),
        ({"type": "Hello", "request": "", "epoch": 1}, "request"),
        ({"type": "Hello", "request": "r" * 513, "epoch": 1}, "request"),
        ({"type": "Hello", "request": b"r", "epoch": 1}, "request"),
        ({"type": "Hello", "request": "r", "epoch": -1}, "epoch"),
        ({"type": "Hello", "request": "r", "epoch": True}, "epoch"),
        ({"type": "Hello", "request": "r", "epoch": 1.0}, "epoch"),
        ({"type": "Wait", "request": "r", "epoch": 1, "seconds": float("nan"), "is_from_source": True}, "seconds"),
        ({"type": "Wait", "request": "r", "epoch": 1, "seconds": float("inf"), "is_from_source": True}, "seconds"),
        ({"type": "Wait", "request": "r", "epoch": 1, "seconds": -1.0, "is_from_source": True}, "seconds"),
        ({"type": "Stopped", "request": "r", "epoch": 1, "is_clean": 1}, "is_clean"),
        (GRANT | {"groups": [[0, [0, "1"]]]}, "groups"),
        (GRANT | {"groups": [[0, [[0]]]]}, "groups"),
        (GRANT | {"groups": [[0]]}, "groups"),
        (GRANT | {"groups": [[-1, []]]}, "groups"),
        (GRANT | {"groups": [0, 1]}, "groups"),
        (PAGES | {"result": "text"}, "result"),
        (PAGES | {"checksum": [-1, []]}, "checksum"),
        (PAGES | {"checksum": [1, [-1]]}, "checksum"),
    ],
)
def test_message_with_a_field_out_of_range_is_refused_and_the_field_named(message: object, named: str) -> None:
    with pytest.raises(MalformedMessage, match=named):
        decode(msgpack.encode(message))
