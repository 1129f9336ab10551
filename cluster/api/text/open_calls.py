"""Calls whose arguments are shown while the model writes them.

A call is open from the place where its function is known, and is a call from there on, whatever follows. Every decision
depends on the text up to there alone, never on how the text was divided.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from crossdock.cluster.api.text.call_values import Brackets, Schemas, typed, types_of, write_json
from crossdock.cluster.api.text.message_parser import num_held

# Before a marker that is a token of its own, so that the same characters written with other tokens are text. Unicode
# reserves this character for such uses within programs.
SIGN = "\ufdd0"
HEAD = 1024  # characters in which the function of an open call must stand
_SPACE = 64  # characters of white space that may stand between two tags
_LONGEST_END = 512  # of a value, with the beginning of the next parameter
_GAP = 1024  # … and before a parameter
_CLOSING = re.compile(r"[\s}\]`]{0,256}")  # what may follow the arguments of a call whose marker is missing

End: TypeAlias = Literal["marker", "bracket", "outer bracket"]  # of a call: after its arguments


class OpenCall(Protocol):
    """The rest of a call. Both methods get all of the text since the call was opened, which grows.

    `following`: the function of another call, of the same kind, whose arguments begin where this one ends; None: none.
    """

    following: str | None

    def take(self, text: str) -> tuple[str, int | None]:
        """Return more of the arguments, and where the call ends, before its marker; None: it goes on."""

    def last(self, text: str, *, is_cut: bool) -> tuple[str, int]:
        """Return the rest of the arguments at the end of the output, and where the call ends."""


class JsonCall:
    """Arguments that are JSON, which the text begins with. They are shown as the model writes them."""

    def __init__(self, marks: Sequence[str], ends: End) -> None:
        """`marks`: markers that end the call wherever they stand outside a string. `ends`: what ends it otherwise."""
        self.following: str | None = None
        self._marks = marks
        self._mark = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._ends = ends
        self._brackets = Brackets()
        self._position = 0  # no marker begins before it
        self._num_shown = 0
        self._end: int | None = None  # of the arguments
        self._writer = _Written()

    def take(self, text: str) -> tuple[str, int | None]:
        shown = ""
        if self._end is None:
            shown, is_cut = self._arguments(text)
            if is_cut:
                return shown, self._position
        if self._end is None or self._ends == "bracket":
            return shown, self._end
        if self._ends == "outer bracket":
            return shown, self._brackets.end(text)
        found = self._mark.search(text, self._position)
        if found is None:
            self._position = max(self._position, len(text) - num_held(text, self._marks))
        return shown, None if found is None else found.start()

    def last(self, text: str, *, is_cut: bool) -> tuple[str, int]:
        if self._end is None:
            stop = len(text) - (0 if self._brackets.quote else num_held(text, self._marks))
            return self._writer.add(text[self._num_shown : stop]), len(text)
        closing = _CLOSING.match(text, self._end)
        assert closing is not None
        rest = text[closing.end() :]
        return "", len(text) if any(mark.startswith(rest) for mark in self._marks) else closing.end()

    def _arguments(self, text: str) -> tuple[str, bool]:
        """Return more of the arguments, and whether a marker cuts them."""
        while True:
            mark = self._mark.search(text, self._position)
            stop = len(text) - num_held(text, self._marks) if mark is None else mark.start()
            end = self._brackets.end(text, stop)
            is_cut = end is None and mark is not None and not self._brackets.quote
            if end is not None or is_cut:
                self._end = self._position = stop if end is None else end
                if self._ends == "outer bracket":
                    self._brackets = Brackets(start=self._end, depth=1)
                return self._shown(text, self._end), is_cut
            if mark is None:
                self._position = stop
                return self._shown(text, stop), False
            self._position = mark.end()

    def _shown(self, text: str, stop: int) -> str:
        start = self._num_shown
        self._num_shown = max(stop, self._num_shown)
        return self._writer.add(text[start : self._num_shown])


class _Written:
    """Writes JSON again, with escapes where a string has a control character, and without signs."""

    def __init__(self) -> None:
        self._is_string = False
        self._is_escaped = False

    def add(self, text: str) -> str:
        text = text.replace(SIGN, "")
        if not self._is_escaped and re.search(r'["\\\x00-\x1f]', text) is None:
            return text
        parts = []
        for part in re.split(r'([\\"\x00-\x1f])', text):
            if not part:
                continue
            is_control = part < " "
            if is_control and self._is_string:
                part = write_json(part)[1:-1]
            parts.append(part)
            if self._is_escaped:
                self._is_escaped = False
            elif part == "\\" and self._is_string:
                self._is_escaped = True
            elif part == '"':
                self._is_string = not self._is_string
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Parameters:
    """How a call writes its parameters between tags.

    `begins`: of a parameter, with the groups `key` and perhaps `kind` or `is_text`, see `tagged_calls`. `ends`: of its
    value. `mark`: with which `begins` begins. `unescape`: reads a name.
    """

    mark: str
    begins: str
    ends: str
    also_ends: str = ""  # before the next mark, or the end of the call
    wrappers: Collection[str] = ()
    unescape: Callable[[str], str] = str


class TaggedCall:
    """Parameters between tags. Each is shown once it is complete."""

    def __init__(self, parameters: Parameters, closer: str, schemas: Schemas, name: str) -> None:
        self.following: str | None = None
        self._parameters = parameters
        self._closer = closer
        self._schemas = schemas
        self._name = name
        begins = re.sub(r"\(\?P<\w+>", "(?:", parameters.begins)
        follows = rf"(?:{begins}|{re.escape(closer)})"
        self._begins = re.compile(rf"\s{{0,{_GAP}}}{parameters.begins}", re.DOTALL)
        ends = rf"{parameters.ends}(?=\s{{0,{_SPACE}}}{follows})"
        if parameters.also_ends:
            ends += rf"|{parameters.also_ends}(?={follows})"
        self._ends = re.compile(ends, re.DOTALL)
        self._at_end = re.compile(parameters.ends)
        self._position = 0  # of the next parameter, or where its value may end
        self._value: int | None = None  # where the value begins
        self._found: re.Match[str] | None = None  # the beginning of the parameter
        self._is_first = True
        self._types: dict[str, Sequence[str]] = {}

    def take(self, text: str) -> tuple[str, int | None]:
        shown: list[str] = []
        while True:
            if self._value is not None:
                ended = self._ends.search(text, self._position)
                if ended is None:
                    self._position = max(self._position, len(text) - _LONGEST_END)
                    break
                shown.append(self._argument(text[self._value : ended.start()]))
                self._value, self._position = None, ended.end()
                continue
            found = self._begins.match(text, self._position)
            if found is not None:
                self._found, self._value, self._position = found, found.end(), found.end()
                continue
            rest = text[self._position : self._position + _GAP + HEAD]
            after = rest.lstrip()
            if after.startswith(self._closer):
                shown.append(self._closing())
                return "".join(shown), self._position + len(rest) - len(after)
            if self._may_go_on(after, len(rest)):
                break
            shown.append(self._closing())  # what follows is no parameter
            return "".join(shown), self._position
        return "".join(shown), None

    def last(self, text: str, *, is_cut: bool) -> tuple[str, int]:
        shown = ""
        position = self._position
        if self._value is not None:
            ends = [*self._at_end.finditer(text, self._value)]
            shown = self._argument(text[self._value : ends[-1].start()]) if ends else ""
            position = ends[-1].end() if ends else len(text)
        shown += "" if is_cut else self._closing()  # a call that is cut stays open, as arguments in JSON do
        rest = text[position:].strip()
        return shown, len(text) if self._may_go_on(rest, 0) else position

    def _may_go_on(self, after: str, num_chars: int) -> bool:
        """Return whether more text may make a parameter, or the end of the call, of what follows."""
        if not after:
            return num_chars < _GAP
        plain = after.replace(SIGN, "")
        mark = self._parameters.mark
        is_mark = mark.startswith(plain) or (plain.startswith(mark) and num_chars < HEAD)
        return is_mark or self._closer.startswith(after)

    def _argument(self, raw: str) -> str:
        """Return a parameter as a part of a JSON object."""
        assert self._found is not None
        groups = self._found.groupdict()
        key = self._parameters.unescape(groups["key"].replace(SIGN, ""))
        kind = groups.get("kind")
        is_text = groups.get("is_text")
        if key not in self._types:  # a schema may be long, and a call may name a parameter often
            self._types[key] = types_of(self._schemas, self._name, key) if kind is None else ()
        raw = raw.replace(SIGN, "")
        is_raw = kind == "string" or (is_text == "true" and not self._types[key])
        try:
            written = write_json(raw if is_raw else typed(raw, self._types[key]))
        except ValueError:
            written = write_json(raw)
        before = "{" if self._is_first else ", "
        self._is_first = False
        return f"{before}{write_json(key)}: {written}"

    def _closing(self) -> str:
        return "{}" if self._is_first else "}"


def opening(head: str, text: str, known: Collection[str]) -> re.Match[str] | None:
    """Return the beginning of a call of a known function up to its arguments; None: not here, or not yet."""
    found = re.match(head, text[:HEAD], re.DOTALL)
    return found if found is not None and found["name"] in known else None
