"""Arguments as Gemma 4 writes them, {key:<|"|>text<|"|>,other:1}: strings between marks, and keys without quotes."""

import re
from collections.abc import Sequence
from typing import Any

from crossdock.cluster.api.text.call_values import read_json, write_json
from crossdock.cluster.api.text.message_parser import num_held
from crossdock.cluster.api.text.open_calls import SIGN

_QUOTE = '<|"|>'
_KEY = re.compile(r'([{,]\s*+)([^\s{}\[\]:,"][^{}\[\]:,"]*+):')


def gemma_value(text: str) -> Any:
    """Return the value of a text. Raises ValueError for a text that is none."""
    parts = text.split(_QUOTE)
    if len(parts) % 2 == 0:
        raise ValueError("a string without an end")
    keyed = (_KEY.sub(_quoted_key, part) for part in parts[::2])
    texts = (write_json(part) for part in parts[1::2])
    written = [next(keyed)]
    for part in texts:
        written += [part, next(keyed, "")]
    return read_json("".join(written))


def _quoted_key(found: re.Match[str]) -> str:
    return f"{found[1]}{write_json(found[2].rstrip())}:"


class GemmaCall:
    """The rest of a call, see `OpenCall`. Each argument is shown once it is complete."""

    def __init__(self, marks: Sequence[str]) -> None:
        """`marks`: markers that end the call wherever they stand outside a string."""
        self.following: str | None = None
        self._marks = marks
        self._next = re.compile("|".join(map(re.escape, (*marks, _QUOTE))) + r"|[{}\[\],]")
        self._ends = re.compile("|".join(map(re.escape, marks)))
        self._position = 0  # all before it is read
        self._begin = 0  # of the argument that is read
        self._depth = 0
        self._is_string = False
        self._is_first = True
        self._end: int | None = None  # of the arguments

    def take(self, text: str) -> tuple[str, int | None]:
        shown: list[str] = []
        while self._end is None:
            found = self._next.search(text, self._position)
            if found is None:
                held = num_held(text, (*self._marks, _QUOTE))
                self._position = max(self._position, len(text) - held)
                return "".join(shown), None
            self._position = found.end()
            if found[0] == _QUOTE:
                self._is_string = not self._is_string
            elif not self._is_string and found[0] in self._marks:
                shown.append(self._argument(text[self._begin : found.start()]) + self._closing())
                return "".join(shown), found.start()
            elif not self._is_string:
                shown.append(self._bracket(text, found))
        ended = self._ends.search(text, self._position)
        if ended is None:
            self._position = max(self._position, len(text) - num_held(text, self._marks))
        return "".join(shown), None if ended is None else ended.start()

    def last(self, text: str, *, is_cut: bool) -> tuple[str, int]:
        if self._end is not None:
            rest = text[self._end :].strip()
            is_rest = not rest or any(mark.startswith(rest) for mark in self._marks)
            return "", len(text) if is_rest else self._end
        raw = text[self._begin :]
        is_whole = self._depth == 1 and not self._is_string and (not is_cut or raw.rstrip().endswith(_QUOTE))
        shown = self._argument(raw) if is_whole else ""
        return shown + ("" if is_cut else self._closing()), len(text)

    def _bracket(self, text: str, found: re.Match[str]) -> str:
        """Return the argument that a bracket or a comma ends; nothing within one."""
        mark = found[0]
        if mark in "{[":
            self._depth += 1
            self._begin = found.end() if self._depth == 1 else self._begin
            return ""
        self._depth -= mark in "}]"
        if self._depth > (mark == ","):
            return ""
        shown = self._argument(text[self._begin : found.start()])
        self._begin = found.end()
        if mark == ",":
            return shown
        self._end = found.end()
        return shown + self._closing()

    def _argument(self, raw: str) -> str:
        """Return an argument as a part of a JSON object. One that the model wrote wrongly is a text."""
        raw = raw.replace(SIGN, "").strip()
        key, colon, rest = raw.partition(":")
        if not colon:
            return ""
        try:
            value = gemma_value(f"{{{raw}}}")
        except ValueError:
            if not rest.strip():
                return ""
            value = {key.strip(): rest.strip()}
        before = "{" if self._is_first else ", "
        self._is_first = False
        return before + write_json(value)[1:-1]

    def _closing(self) -> str:
        return "{}" if self._is_first else "}"
