"""Answers as OpenAI writes them: usage, and the server-sent events of a streamed answer."""

from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from crossdock.cluster.api.errors import ApiError, to_json

DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class AnswerEvents:
    """Writes the server-sent events of one streamed answer; the fields that all events share are serialised once.

    A token costs one event, so the usual event (text and nothing else) is put together from strings. `usage` of an
    event: the numbers that the request wants in every event; None: null, or left out without `include_usage`.
    """

    def __init__(self, head: Mapping[str, Any], *, is_chat: bool, include_usage: bool) -> None:
        self._head = "data: " + to_json(dict(head)).decode()[:-1]
        self._prefix = self._head + ',"choices":['
        self._suffix = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._before = '{"index":%d,"delta":{"content":' if is_chat else '{"index":%d,"text":'
        self._after = '},"logprobs":null,"finish_reason":null}' if is_chat else ',"logprobs":null,"finish_reason":null}'
        self._befores: dict[int, str] = {}

    def text(self, index: int, text: str, usage: Mapping[str, Any] | None = None) -> bytes:
        before = self._befores.get(index)
        if before is None:
            before = self._befores[index] = self._prefix + self._before % index
        return (before + encode_basestring(text) + self._after + self._end(usage)).encode()

    def choice(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None) -> bytes:
        return self.written_choice(to_json(choice), usage)

    def written_choice(self, choice: bytes, usage: Mapping[str, Any] | None = None) -> bytes:
        """Return the event of a choice that is JSON already."""
        return self._prefix.encode() + choice + self._end(usage).encode()

    def first_choice(self, fields: bytes, choice: bytes, usage: Mapping[str, Any] | None = None) -> bytes:
        """Return the event of a choice beside further fields of the answer, a JSON object of at least one."""
        return self._head.encode() + b"," + fields[1:-1] + b',"choices":[' + choice + self._end(usage).encode()

    def usage(self, numbers: Mapping[str, Any]) -> bytes:
        return (self._prefix + self._end(numbers)).encode()

    def _end(self, usage: Mapping[str, Any] | None) -> str:
        return self._suffix if usage is None else '],"usage":' + to_json(usage).decode() + "}\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the end of a stream that an error cuts, as OpenAI's clients of completions and chats read it."""
    return b"data: " + error.body() + b"\n\n" + DONE


SILENCE_S = 5.0  # of a stream in a long call, which is shown when it is whole; then something keeps the stream open


def named_event(kind: str, content: bytes) -> bytes:
    """Return a server-sent event that has a name, as in the Responses and Messages APIs. `content`: JSON."""
    return b"event: " + kind.encode() + b"\ndata: " + content + b"\n\n"
