"""Draft by lookup: find where the stream's last tokens stood before, and propose what followed there. No model.

Each request has an index of its own: where every n-gram of the shortest length ended last, and for every position,
where the n-gram that ends there ended before. A step adds the new tokens and follows one chain, so its cost does not
depend on the length of the text: 3 µs with 100,000 random tokens, whose first look takes 22 ms (Zen 5).

The longest match is taken, and of several the latest. With up to 8 drafts a step makes 5.04, 3.98, 4.07 and 1.66 tokens
(quotes, edits, JSON, free chat). With the earliest of the longest, as in vLLM 0.32, it makes 4.91, 3.88, 4.10 and 1.63,
and with matches of 2 tokens at least 4.72, 3.70, 3.43 and 1.55 (by replay of greedy answers).
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig

MAX_CANDIDATES = 64
"""Most earlier positions that a step compares with the newest tokens, the latest first. It bounds a step's cost.

In a text of 29,000 tokens, a step makes 3.99 tokens with 32 candidates, 4.09 with 256 and 4.15 with all.
"""

LONGEST_MATCH = 32
"""Tokens from which on a match of method suffix is not compared further."""

_SHORTEST_MATCH = 1  # tokens, of method suffix
_LEAST_TABLE = 256  # slots
_MULTIPLIER = 0x9E3779B1  # 2^32 / golden ratio: spreads token ids over the upper bits (Knuth, multiplicative hashing)
_MASK = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class _TextIndex:
    """Where each n-gram of one growing text stands. Takes at most 20 bytes per token.

    A position is that of the token after the n-gram. Several n-grams may share a slot of the table, so that a position
    found is a candidate, to be compared.
    """

    tokens: Sequence[int]  # the request's own list
    shortest: int  # tokens of an n-gram
    cap: int  # tokens from which on a match is not compared further
    _heads: "array[int]" = field(default_factory=lambda: array("i"))  # by slot: the latest position; -1: none
    _earlier: "array[int]" = field(default_factory=lambda: array("i"))  # by position: the one before in its slot
    _bits: int = 0  # the table has 2^bits slots
    _found: tuple[int, int, int] = (-1, 0, 0)  # length of the text at the last search; length and position of the match

    def search(self, forced: Sequence[int] = ()) -> tuple[int, int]:
        """Return the length of the longest match of the text's end, and the position of what followed it.

        The latest of several matches of that length. 0: the last `shortest` tokens of the text occur only once.
        `forced`: tokens that will follow the text, and count as its end.
        """
        num_tokens = len(self.tokens) + len(forced)
        if self._found[0] != num_tokens:
            self._found = num_tokens, *self._search(len(self.tokens), forced)
        return self._found[1:]

    def _search(self, end: int, forced: Sequence[int]) -> tuple[int, int]:
        if end <= self.shortest:
            return 0, 0
        self._extend(end)
        ending = [*self.tokens[max(end - self.cap, 0) : end], *forced][-self.cap :]
        ending.reverse()
        best = 0
        at = 0
        if self._found[1]:  # what followed the last match may go on
            at = self._found[2] + end + len(forced) - self._found[0]
            best = self._match_length(at, ending) if at < end else 0
        position = self._heads[self._slot(ending[self.shortest - 1 :: -1])]
        for _ in range(MAX_CANDIDATES):
            if position < 0 or best >= self.cap:
                break
            length = self._match_length(position, ending)
            if length > best:
                best = length
                at = position
            position = self._earlier[position]
        return (best, at) if best >= self.shortest else (0, 0)

    def _match_length(self, position: int, ending: Sequence[int]) -> int:
        """Return how many tokens before `position` equal those of `ending`, whose last one comes first."""
        tokens = self.tokens
        length = 0
        most = min(len(ending), position)
        while length < most and tokens[position - 1 - length] == ending[length]:
            length += 1
        return length

    def _extend(self, end: int) -> None:
        """Index the n-grams that some token follows: those that end before `end`."""
        if end > len(self._heads):
            self._rebuild(end)
            return
        for position in range(len(self._earlier), end):
            slot = self._slot(self.tokens[position - self.shortest : position])
            self._earlier.append(self._heads[slot])
            self._heads[slot] = position

    def _slot(self, gram: Sequence[int]) -> int:
        code = 0
        for token in gram:
            code = (code * _MULTIPLIER + token + 1) & _MASK
        return ((code * _MULTIPLIER) & _MASK) >> (32 - self._bits)

    def _rebuild(self, end: int) -> None:
        """Index the text up to `end` in a table for twice as many tokens."""
        self._bits = max(2 * end, _LEAST_TABLE).bit_length()
        slots = self._slots(np.array(self.tokens[: end - 1], np.uint64))
        positions = np.arange(self.shortest, end, dtype=np.int32)
        heads = np.full(1 << self._bits, -1, np.int32)
        heads[slots] = positions  # of equal slots, the last remains
        order = np.argsort(slots, kind="stable")
        earlier = np.full(end, -1, np.int32)
        is_same = slots[order[1:]] == slots[order[:-1]]
        earlier[positions[order[1:][is_same]]] = positions[order[:-1][is_same]]
        self._heads, self._earlier = array("i", heads.tobytes()), array("i", earlier.tobytes())

    def _slots(self, tokens: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the slot, as `_slot`, of the n-gram that ends at each position of `tokens`."""
        multiplier = np.uint64(_MULTIPLIER)
        mask = np.uint64(_MASK)
        num_grams = len(tokens) - self.shortest + 1
        code = np.zeros(num_grams, np.uint64)
        for offset in range(self.shortest):
            code = (code * multiplier + tokens[offset : offset + num_grams] + np.uint64(1)) & mask
        return (((code * multiplier) & mask) >> np.uint64(32 - self._bits)).astype(np.int64)


@dataclass(slots=True)
class PromptLookup:
    """Drafts the tokens that followed an earlier occurrence of a stream's last tokens in its own text."""

    config: SpeculativeConfig
    _indexes: dict[str, _TextIndex] = field(default_factory=dict)  # by request

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add a request. `token_ids` is its own list, prompt and output, which grows with each accepted token."""
        is_ngram = self.config.method == "ngram"
        shortest = self.config.prompt_lookup_min if is_ngram else _SHORTEST_MATCH
        cap = self.config.prompt_lookup_max if is_ngram else LONGEST_MATCH
        self._indexes[request_id] = _TextIndex(token_ids, shortest, cap)

    def remove(self, request_id: str) -> None:
        """Forget a request; one that was never added is ignored."""
        self._indexes.pop(request_id, None)

    def match_length(self, request_id: str, forced: Sequence[int] = ()) -> int:
        """Return the length of the match of the request's last tokens in its text; 0: there is no draft."""
        return self._indexes[request_id].search(forced)[0]

    def propose(self, wanted: Mapping[str, int], forced: Mapping[str, Sequence[int]] = {}) -> dict[str, list[int]]:
        """Return the `wanted` number of drafts for each request whose last tokens occur earlier in its text."""
        drafts = {}
        for request_id, most in wanted.items():
            index = self._indexes[request_id]
            ending = forced.get(request_id, ())
            length, position = index.search(ending)
            if length:
                drafts[request_id] = _continuation(index.tokens, position, ending, most)
        return drafts

    def seconds(self, num_streams: int, num_tokens: int) -> float:
        """Return 0: a lookup takes microseconds."""
        return 0.0


def _continuation(tokens: Sequence[int], position: int, ending: Sequence[int], most: int) -> list[int]:
    """Return `most` tokens from `position` on. Past the end of the text, the copied tokens repeat as a period.

    `ending`: what follows `tokens` in the text.
    """
    copied = [*tokens[position : position + most], *ending[: max(position + most - len(tokens), 0)]]
    period = len(copied)
    while len(copied) < most:
        copied.append(copied[-period])
    return copied
