"""Answers as OpenAI writes them: usage, log-probabilities, and the server-sent events of a streamed answer."""

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any

from crossdock.cluster.api.errors import ApiError, to_json
from crossdock.cluster.api.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request import TokenLogprobs

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # JSON has no infinities; vLLM's number


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def completion_logprobs(
    tokenizer: ModelTokenizer, positions: Sequence[tuple[int, TokenLogprobs | None]], offsets: Sequence[int]
) -> dict[str, Any]:
    """Return log-probabilities in the shape of completions.

    `positions`: token ids, each with its log-probabilities; the first token of a text has none. `offsets`: where each
    token begins in the text, in characters.
    """
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets)}
    for token_id, position in positions:
        token = token_name(tokenizer, token_id)
        result["tokens"].append(token)
        if position is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(_number(position.logprob))
        top = {token_name(tokenizer, other): _number(logprob) for other, logprob in position.top}
        top.setdefault(token, _number(position.logprob))
        result["top_logprobs"].append(top)
    return result


def token_name(tokenizer: ModelTokenizer, token_id: int) -> str:
    """Return a token as text, or as OpenAI's completions write a part of a character: `bytes:\\xe2\\x82`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: ModelTokenizer, positions: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Return log-probabilities in the shape of chats, with the `num_top` likeliest tokens at each position."""
    content = []
    for position in positions:
        entry = _chat_token(tokenizer, position.token_id, position.logprob)
        ranked = sorted({**dict(position.top), position.token_id: position.logprob}.items(), key=lambda item: -item[1])
        entry["top_logprobs"] = [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in ranked[:num_top]]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: ModelTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(raw)}


def prompt_logprobs(
    tokenizer: ModelTokenizer, positions: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Return log-probabilities in vLLM's shape: for each position an object from token id to logprob, rank and text."""
    result: list[dict[str, Any] | None] = []
    for position in positions:
        if position is None:
            result.append(None)
            continue
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, 1)}
        ranked[position.token_id] = (position.logprob, position.rank)
        result.append(
            {
                str(token_id): {
                    "logprob": _number(logprob),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
                }
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return result


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class AnswerEvents:
    """Writes the server-sent events of one streamed answer; the fields that all events share are serialised once.

    A token costs one event, so the usual event (text and nothing else) is put together from strings.
    """

    def __init__(self, head: Mapping[str, Any], *, is_chat: bool, include_usage: bool) -> None:
        self._prefix = "data: " + to_json(dict(head)).decode()[:-1] + ',"choices":['
        self._suffix = '],"usage":null}\n\n' if include_usage else "]}\n\n"
        self._before = '{"index":%d,"delta":{"content":' if is_chat else '{"index":%d,"text":'
        after = '},"logprobs":null,"finish_reason":null}' if is_chat else ',"logprobs":null,"finish_reason":null}'
        self._after = after + self._suffix
        self._befores: dict[int, str] = {}

    def text(self, index: int, text: str) -> bytes:
        before = self._befores.get(index)
        if before is None:
            before = self._befores[index] = self._prefix + self._before % index
        return (before + encode_basestring(text) + self._after).encode()

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        return self.written_choice(to_json(choice))

    def written_choice(self, choice: bytes) -> bytes:
        """Return the event of a choice that is JSON already."""
        return self._prefix.encode() + choice + self._suffix.encode()

    def usage(self, numbers: Mapping[str, Any]) -> bytes:
        return (self._prefix + '],"usage":' + to_json(numbers).decode() + "}\n\n").encode()


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"
