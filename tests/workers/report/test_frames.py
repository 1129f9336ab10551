"""A replica's messages as bytes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import DecodeError

from crossdock.workers.report.advertise import Message
from crossdock.workers.report.answer import Answer, Refusal
from crossdock.workers.report.frames import LENGTH, frame, read_frame, read_submission, submission_frame
from crossdock.workers.report.live_profile import (
    Learnt,
    LiveProfile,
    PageChanges,
    Prefills,
    Prompts,
    Room,
    WaitingRequest,
)
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta, TokenLogprobs
from crossdock.workers.schedule.request.submission import Grammar, Leg, SamplingParams, Submission

finite = st.floats(allow_nan=False)
numbers = st.integers(-(2**40), 2**40)
logprobs = st.builds(
    TokenLogprobs, numbers, finite, numbers, st.lists(st.tuples(numbers, finite), max_size=2).map(tuple)
)
deltas = st.builds(
    TokenDelta,
    st.text(max_size=9),
    st.lists(numbers, max_size=3),
    first=numbers,
    epoch=numbers,
    logprobs=st.none() | st.lists(logprobs, max_size=2),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=2),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | numbers,
    num_cached_tokens=numbers,
    error=st.none() | st.text(max_size=9),
    embedding=st.none() | st.binary(max_size=9),
)
waiting = st.builds(WaitingRequest, numbers, finite, numbers, numbers)
groups = st.lists(st.builds(Prompts, numbers, numbers, numbers, numbers, finite), max_size=2).map(tuple)
profiles = st.builds(
    LiveProfile,
    st.text(max_size=9),
    numbers,
    st.lists(finite, max_size=4).map(lambda cost: Learnt(tuple(cost))),
    groups.map(Prefills),
    room=st.lists(waiting, max_size=2).map(lambda requests: Room(starting=tuple(requests))),
    role=st.none() | st.sampled_from(["mixed", "prefill", "decode"]),
    step_seconds=finite,
)
hashes = st.lists(st.binary(max_size=32), max_size=3)
tiers = st.lists(hashes, max_size=2)
changes = st.builds(
    PageChanges, st.text(max_size=9), numbers, hashes, hashes, is_all=st.booleans(), stored=tiers, lost=tiers
)
refusals = st.builds(Refusal, st.text(max_size=9), st.text(max_size=9), finite, st.text(max_size=9))
answers = st.lists(st.builds(Answer, numbers, numbers, st.none() | refusals), max_size=2)
messages = st.builds(
    Message, st.lists(deltas, max_size=3), st.none() | profiles, st.lists(changes, max_size=2), answers
)


@settings(max_examples=50)
@given(messages)
def test_message_that_went_through_a_frame_is_the_same(message: Message) -> None:
    content = frame(message)
    assert LENGTH.unpack(content[: LENGTH.size]) == (len(content) - LENGTH.size,)
    assert read_frame(content[LENGTH.size :]) == message


words = st.text(max_size=9)
samplings = st.builds(
    SamplingParams,
    temperature=finite,
    logit_bias=st.lists(st.tuples(numbers, finite), max_size=2).map(tuple),
    bad_words=st.lists(st.lists(numbers, max_size=2).map(tuple), max_size=2).map(tuple),
    logprobs=st.none() | numbers,
    grammar=st.none() | st.builds(Grammar, words, words),
)
submissions = st.builds(
    Submission,
    words,
    st.lists(numbers, max_size=5),
    samplings,
    output_token_ids=st.lists(numbers, max_size=2),
    leg=st.sampled_from(Leg),
    peer=st.binary(max_size=9),
    items=st.just([]),
    alternatives=st.lists(st.tuples(words, finite), max_size=2),
)


@settings(max_examples=50)
@given(numbers, submissions)
def test_submission_that_went_through_a_frame_is_the_same(number: int, submission: Submission) -> None:
    content = submission_frame(number, submission)[LENGTH.size :]
    assert read_submission(content) == (number, submission)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "bool"])
def test_tensors_of_a_picture_go_through_a_frame(dtype: str) -> None:
    tensors = {"pixel_values": np.arange(24).reshape(2, 3, 4).astype(dtype)[:, ::2], "empty": np.zeros((0, 2), dtype)}
    sent = Submission("r", [1, 2], items=[Item(0, 2, 1, "image", b"hash", tensors)])
    _, submission = read_submission(submission_frame(0, sent)[LENGTH.size :])
    (item,) = submission.items
    assert (item.start, item.length, item.kind, item.content_hash) == (0, 2, "image", b"hash")
    for name, tensor in tensors.items():
        assert item.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(item.tensors[name], tensor)


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(content: bytes) -> None:
    try:
        again = read_frame(content)
    except DecodeError:
        return
    whole = frame(again)
    assert frame(read_frame(whole[LENGTH.size :])) == whole  # not the messages: NaN does not equal itself


def test_cut_frame_is_refused() -> None:
    content = frame(Message([TokenDelta("r", [1, 2])]))
    for end in range(LENGTH.size, len(content)):
        with pytest.raises(DecodeError):
            read_frame(content[LENGTH.size : end])
