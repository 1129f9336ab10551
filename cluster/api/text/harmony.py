"""Takes apart the messages of gpt-oss: each has a header with its channel, and in a call the function's name.

OpenAI's format is https://github.com/openai/harmony. Their library reads tokens of one vocabulary, which it downloads
when a server starts, and it raises an error for a malformed header. Here such a text is content.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from crossdock.cluster.api.text.call_forms import json_arguments
from crossdock.cluster.api.text.call_values import Brackets, Schemas
from crossdock.cluster.api.text.message_parser import CallText, ContentText, Piece, ReasoningText, num_held
from crossdock.cluster.api.text.open_calls import JsonCall

MARKERS: Sequence[str] = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

_LONGEST_HEADER = 1024  # characters; a longer text without a body is content

_Part: TypeAlias = Literal["header", "reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class _Patterns:
    begins: re.Pattern[str]  # of a header
    header_end: re.Pattern[str]
    body_end: re.Pattern[str]
    channel: re.Pattern[str]
    cut: re.Pattern[str]  # a header without a body
    ends: Sequence[str]


@cache
def _patterns(sign: str) -> _Patterns:
    """Return the patterns of a text in which `sign` stands before each marker that is a token of its own."""
    left = re.escape(sign) + r"<\|"
    return _Patterns(
        begins=re.compile(rf"\s*(?:$|{re.escape(sign)}<|{re.escape(sign)}$|to?$|to=)"),
        header_end=re.compile(rf"{left}(?:message|end|call|return)\|>"),
        body_end=re.compile(rf"{left}(?:end|call|return|start)\|>"),
        channel=re.compile(rf"{left}channel\|>\s*(\w+)"),
        cut=re.compile(
            rf"\s*+(?:{left}start\|>\w*+)?(?:\s*+to=[\w.\-]*+)?\s*+(?:{left}channel\|>\w*+)?"
            rf"(?:\s++to=[\w.\-]*+)?\s*+(?:{left}constrain\|>)?\w*+\s*"
        ),
        ends=tuple(f"{sign}<|{name}|>" for name in ("end", "call", "return", "start")),
    )


_RECIPIENT = re.compile(r"\bto=functions\.([\w.\-]+)")


class HarmonyText:
    """The parser of such a text. It follows `<|start|>assistant` in the prompt, and what the prompt has after that."""

    def __init__(self, schemas: Schemas | None, prefix: str = "", sign: str = "") -> None:
        """`schemas`: of the tools; None: calls are content. `sign`: before markers that are tokens of their own."""
        self._schemas = schemas
        self._patterns = _patterns(sign)
        self._sign = sign
        self._buffer = ""
        self._part: _Part = "header"
        self._header = ""  # of a call, which is text if the call is malformed
        self._name = ""
        self._open: JsonCall | None = None  # the call, from its first bracket on
        self._position = 0  # in the buffer; no marker ends a call before it
        self._strings = Brackets()  # of a call's arguments
        self._num_calls = 0
        self.add(prefix)

    def add(self, text: str) -> list[Piece]:
        buffer = self._buffer
        self._buffer = ""
        buffer += text  # in place, as no other name has the text
        self._buffer = buffer
        del buffer
        pieces: list[Piece] = []
        while {"header": self._read_header, "call": self._read_call}.get(self._part, self._read_text)(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool) -> list[Piece]:
        pieces: list[Piece] = []
        rest = self._buffer
        self._buffer = ""
        if self._open is not None:
            shown, _ = self._open.last(rest, is_cut=is_cut)
            self._show(shown, pieces)
        elif self._part == "call" and (arguments := json_arguments(rest)) is not None:
            self._call(arguments, pieces)
        elif self._part == "call":
            self._emit("content", self._header + rest, pieces)
        elif self._part != "header" or self._patterns.cut.fullmatch(rest) is None:
            self._emit(self._part, rest, pieces)
        return pieces

    def _read_header(self, pieces: list[Piece]) -> bool:
        if self._patterns.begins.match(self._buffer) is None:
            self._part = "content"
            return True
        found = self._patterns.header_end.search(self._buffer, 0, _LONGEST_HEADER)
        if found is None and len(self._buffer) < _LONGEST_HEADER:
            return False
        if found is None:
            start = self._patterns.body_end.search(self._buffer)  # its own marker must not begin it again
            end = 0 if start is None else start.end()
            self._emit("content", self._buffer[:end], pieces)
            self._buffer = self._buffer[end:]
            self._part = "content"
            return True
        header = self._buffer[: found.end()]
        self._buffer = self._buffer[found.end() :]
        if not found[0].endswith("message|>"):
            self._emit("content", header, pieces)
            return True
        channels = self._patterns.channel.findall(header)
        recipient = _RECIPIENT.search(header)
        self._part = "reasoning" if channels and channels[-1] == "analysis" else "content"
        if recipient is not None and self._schemas is not None:
            self._part = "call"
            self._header = header
            self._name = recipient[1]
            self._position, self._strings = 0, Brackets()
        return True

    def _read_text(self, pieces: list[Piece]) -> bool:
        found = self._patterns.body_end.search(self._buffer)
        if found is None:
            end = len(self._buffer) - num_held(self._buffer, self._patterns.ends)
            self._emit(self._part, self._buffer[:end], pieces)
            self._buffer = self._buffer[end:]
            return False
        self._emit(self._part, self._buffer[: found.start()], pieces)
        self._end_body(found)
        return True

    def _read_call(self, pieces: list[Piece]) -> bool:
        if self._open is None and self._name in (self._schemas or ()) and re.match(r"\s{0,64}\{", self._buffer):
            self._call("", pieces)
            self._open = JsonCall(self._patterns.ends, "marker")
            self._buffer = self._buffer.lstrip()
        if self._open is not None:
            shown, end = self._open.take(self._buffer)
            self._show(shown, pieces)
            ended = None if end is None else self._patterns.body_end.match(self._buffer, end)
            if ended is not None:
                self._open = None
                self._end_body(ended)
            return ended is not None
        while (found := self._patterns.body_end.search(self._buffer, self._position)) is not None:
            self._position = found.end()
            if self._strings.end(self._buffer, found.start()) is None and self._strings.quote:
                continue
            arguments = json_arguments(self._buffer[: found.start()])
            if arguments is None:
                self._emit("content", self._header + self._buffer[: found.end()], pieces)
            else:
                self._call(arguments, pieces)
            self._end_body(found)
            return True
        self._position = max(self._position, len(self._buffer) - num_held(self._buffer, self._patterns.ends))
        return False

    def _end_body(self, found: re.Match[str]) -> None:
        is_start = found[0].endswith("start|>")
        self._buffer = self._buffer[found.start() if is_start else found.end() :]
        self._part = "header"

    def _show(self, arguments: str, pieces: list[Piece]) -> None:
        if arguments:
            pieces.append(CallText(self._num_calls - 1, arguments))

    def _call(self, arguments: str, pieces: list[Piece]) -> None:
        pieces.append(CallText(self._num_calls, arguments, self._name))
        self._num_calls += 1

    def _emit(self, part: _Part, text: str, pieces: list[Piece]) -> None:
        if text := text.replace(self._sign, "") if self._sign else text:
            pieces.append(ReasoningText(text) if part == "reasoning" else ContentText(text))
