"""Log-probabilities as completions, chats and vLLM's `prompt_logprobs` write them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from crossdock.cluster.api.slices import PAUSE_S
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import TokenLogprobs

_LOWEST_LOGPROB = -9999.0  # JSON has no infinities; vLLM's number
_ENTRIES_AT_ONCE = 1536  # log-probabilities between two looks at other requests; under a millisecond

_Position = TypeVar("_Position")
_Part = TypeVar("_Part")


class LogprobWriter:
    """Writes the log-probabilities of one request's tokens; other requests are served meanwhile.

    `as_ids`: tokens are written as `token_id:7`, vLLM's `return_tokens_as_token_ids`.
    """

    def __init__(self, tokenizer: ModelTokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._num_written = 0  # log-probabilities since other requests were served, of all choices together

    async def completion(
        self, positions: Sequence[tuple[int, TokenLogprobs | None]], offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Return log-probabilities in the shape of completions.

        `positions`: token ids, each with its log-probabilities; the first token of a text has none. `offsets`: where
        each token begins in the text, in characters.
        """
        result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": list(offsets)}
        async for token, logprob, top in self._written(positions, self._completion_part, lambda pair: _size(pair[1])):
            result["tokens"].append(token)
            result["token_logprobs"].append(logprob)
            result["top_logprobs"].append(top)
        return result

    async def chat(self, positions: Sequence[TokenLogprobs], num_top: int | None) -> dict[str, Any]:
        """Return log-probabilities in the shape of chats.

        `num_top`: list so many of the likeliest tokens at each position; None: the token and all its alternatives.
        """

        def part(position: TokenLogprobs) -> dict[str, Any]:
            entry = self._chat_token(position.token_id, position.logprob)
            known = {**dict(position.top), position.token_id: position.logprob}
            ranked = sorted(known.items(), key=lambda item: -item[1])[:num_top]
            entry["top_logprobs"] = [self._chat_token(token_id, logprob) for token_id, logprob in ranked]
            return entry

        return {"content": [entry async for entry in self._written(positions, part, _size)], "refusal": None}

    async def prompt(self, positions: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """Return log-probabilities in vLLM's shape: an object a position, from token id to logprob, rank and text."""
        return [entry async for entry in self._written(positions, self._prompt_part, _size)]

    async def _written(
        self, positions: Sequence[_Position], write: Callable[[_Position], _Part], size: Callable[[_Position], int]
    ) -> AsyncGenerator[_Part, None]:
        """Yield the result of `write` for each position.

        Other requests are served after each `_ENTRIES_AT_ONCE` log-probabilities. A position with more leaves the event
        loop for a thread.
        """
        for position in positions:
            num = size(position)
            if num > _ENTRIES_AT_ONCE:
                yield await asyncio.to_thread(write, position)
                continue
            if self._num_written + num > _ENTRIES_AT_ONCE:
                await asyncio.sleep(PAUSE_S)
                self._num_written = 0
            self._num_written += num
            yield write(position)

    def token_name(self, token_id: int) -> str:
        """Return a token as text, or as OpenAI's completions write a part of a character: `bytes:\\xe2\\x82`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _completion_part(
        self, pair: tuple[int, TokenLogprobs | None]
    ) -> tuple[str, float | None, dict[str, float] | None]:
        token_id, position = pair
        token = self.token_name(token_id)
        if position is None:
            return token, None, None
        top = {self.token_name(other): _number(logprob) for other, logprob in position.top}
        top.setdefault(token, _number(position.logprob))
        return token, _number(position.logprob), top

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        token = f"token_id:{token_id}" if self._as_ids else raw.decode("utf-8", "replace")
        return {"token": token, "logprob": _number(logprob), "bytes": list(raw)}

    def _prompt_part(self, position: TokenLogprobs | None) -> dict[str, Any] | None:
        if position is None:
            return None
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, 1)}
        ranked[position.token_id] = (position.logprob, position.rank)
        return {
            str(token_id): {
                "logprob": _number(logprob),
                "rank": rank,
                "decoded_token": self._tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
            }
            for token_id, (logprob, rank) in ranked.items()
        }


def num_entries(positions: Sequence[tuple[int, TokenLogprobs | None]]) -> int:
    """Return how many log-probabilities there are at the positions of an output."""
    return sum(_size(position) for _, position in positions)


def _size(position: TokenLogprobs | None) -> int:
    return 1 if position is None else 1 + len(position.top)


def _number(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)
