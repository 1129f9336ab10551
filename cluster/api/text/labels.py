"""Labels of options: words of one token with which an answer may begin, so that one step of the model answers."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import product
from string import ascii_uppercase

from crossdock.cluster.api.text.tokenizer import ModelTokenizer

_FIRST = len(ascii_uppercase)  # labels that are looked for at least: letters
_END = 64  # characters of a prompt that decide how its continuation is divided into tokens


class AnswerLabels:
    """The labels of one model: A to Z, and then pairs of letters. Those that are looked for once are kept."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = ""
        self._asked = 0
        self._found: Sequence[tuple[str, int]] = ()

    async def after(self, prompt: str, num: int) -> Sequence[tuple[str, int]]:
        """Return labels and their token ids, `num` or as many as there are. `prompt`: the text before the answer."""
        end = prompt[-_END:]
        if end != self._end or num > self._asked:
            asked = max(num, _FIRST)
            self._found = await asyncio.to_thread(self._find, end, asked)
            self._end, self._asked = end, asked
        return self._found[:num]

    def _find(self, end: str, num: int) -> list[tuple[str, int]]:
        before = self._tokenizer.encode(end, add_special_tokens=False)
        found: dict[int, str] = {}
        for label in _candidates():
            *first, token_id = self._tokenizer.encode(end + label, add_special_tokens=False)
            if first == before and self._tokenizer.decode([token_id]).strip() == label:
                found.setdefault(token_id, label)
            if len(found) == num:
                break
        return [(label, token_id) for token_id, label in found.items()]


def _candidates() -> Iterator[str]:
    yield from ascii_uppercase
    yield from map("".join, product(ascii_uppercase, repeat=2))
