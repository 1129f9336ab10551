"""HTTP responses and server-sent events, byte by byte."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.cluster.bench.http import BenchError, HttpResponse, TokenStream, error_text
from crossdock.cluster.bench.metrics import Sample
from tests.cluster.bench.scripted import event

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\n6\r\nworld\n\r\n0\r\n\r\n"
)


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=12))
def test_chunked_body_split_anywhere_is_complete(cuts: list[int]) -> None:
    response = HttpResponse()
    edges = [0, *sorted(cuts), len(CHUNKED)]
    body = b"".join(response.feed(CHUNKED[a:b]) for a, b in pairwise(edges))
    assert body == b"hello world\n"
    assert response.status == 200
    assert response.complete


@pytest.mark.parametrize(
    ("head", "complete_before", "complete_after_close"),
    [(b"Content-Length: 3\r\n", True, True), (b"Content-Length: 9\r\n", False, False), (b"", False, True)],
)
def test_body_ends_at_its_length_or_with_the_connection(
    head: bytes, complete_before: bool, complete_after_close: bool
) -> None:
    response = HttpResponse()
    assert response.feed(b"HTTP/1.1 404 Not Found\r\n" + head + b"\r\nabc") == b"abc"
    assert (response.status, response.complete) == (404, complete_before)
    response.end_of_stream()
    assert response.complete == complete_after_close


def test_response_of_another_protocol_raises() -> None:
    with pytest.raises(BenchError, match="not an HTTP server"):
        HttpResponse().feed(b"SSH-2.0-OpenSSH\r\n\r\n")


def text(value: str, **fields: Any) -> bytes:
    return event(choices=[{"text": value, "finish_reason": None}], **fields)


def test_tokens_without_running_usage_are_counted_by_text() -> None:
    stream = TokenStream(Sample("request", 4, 10))
    stream.feed(text("a") + text("b"), 1.0)
    stream.feed(b": comment\r\n" + text("")[:9], 2.0)
    stream.feed(text("")[9:], 2.5)
    stream.feed(text("c"), 3.0)
    stream.feed(event(choices=[], usage={"prompt_tokens": 12, "completion_tokens": 4}) + b"data: [DONE]\n\n", 4.0)
    assert stream.sample.times == [1.0, 3.0]
    assert stream.sample.counts == [2, 1]
    assert stream.sample.output_tokens == 4
    assert stream.sample.prompt_tokens == 12
    assert stream.done


def test_tokens_without_text_are_counted_by_running_usage() -> None:
    stream = TokenStream(Sample("request", 9, 10))
    for number, (value, count) in enumerate([("", 0), ("", 1), ("é", 2), ("ab", 5)]):
        stream.feed(text(value, usage={"prompt_tokens": 10, "completion_tokens": count}), float(number))
    assert stream.sample.times == [1.0, 2.0, 3.0]
    assert stream.sample.counts == [1, 1, 3]
    assert not stream.done


def test_chat_stream_with_error_event_sets_the_samples_error() -> None:
    stream = TokenStream(Sample("request", 9, 10))
    stream.feed(event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]), 1.0)
    assert not stream.sample.times
    stream.feed(
        event(choices=[{"delta": {"content": "x"}}]) + event(choices=[{"delta": {"reasoning_content": "y"}}]), 2.0
    )
    stream.feed(event(choices=[{"delta": {}, "finish_reason": "length"}]), 3.0)
    assert (stream.sample.counts, stream.done) == ([2], True)
    stream.feed(event(error={"message": "replica lost", "code": 503}), 4.0)
    assert stream.sample.error == "error event: replica lost"
    with pytest.raises(BenchError, match="not an event"):
        stream.feed(b"data: nonsense\n", 5.0)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "no such model", "type": "x"}}', "no such model"),
        (b'{"message": "too  long\\n"}', "too long"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"", "(empty)"),
    ],
)
def test_error_text_of_any_body_is_short(body: bytes, shown: str) -> None:
    assert error_text(body) == shown


def test_token_stream_keeps_the_text_and_the_cached_tokens() -> None:
    sample = Sample("request", 2, 10)
    stream = TokenStream(sample)
    stream.feed(b'data: {"choices": [{"text": "Hel"}]}\n\ndata: {"choices": [{"delta": {"content": "lo"}}]}\n\n', 1.0)
    assert sample.cached_tokens is None
    usage = '{"completion_tokens": 2, "prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}'
    stream.feed(f'data: {{"choices": [], "usage": {usage}}}\n\n'.encode(), 2.0)
    assert ("".join(stream.texts), sample.prompt_tokens, sample.cached_tokens) == ("Hello", 12, 8)
