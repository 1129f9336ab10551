"""What a model writes, taken apart while it comes: content, reasoning and tool calls.

A parser is a function of the text alone. However the text is split into deltas, and whichever replica writes them, the
pieces add up to the same message.
"""

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class ContentText:
    """A part of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A part of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallText:
    """A part of a tool call. The first part of each call has its name; all have a part of the arguments, as JSON."""

    index: int
    arguments: str
    name: str | None = None


Piece: TypeAlias = ContentText | ReasoningText | CallText


class MessageParser(Protocol):
    """Takes one choice's text apart."""

    def add(self, text: str) -> list[Piece]:
        """Return the pieces that more text completes."""

    def finish(self, *, is_cut: bool) -> list[Piece]:
        """Return the pieces that are left at the end of the text. `is_cut`: the limit of tokens ended the text."""


class PlainText:
    """The parser of a text that is content alone."""

    def add(self, text: str) -> list[Piece]:
        return [ContentText(text)] if text else []

    def finish(self, *, is_cut: bool) -> list[Piece]:
        return []


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(slots=True)
class ChatMessage:
    """One choice's message in the form of OpenAI's chats, whole and as deltas.

    `shows_reasoning`: false where the client does not want it (`include_reasoning`).
    """

    parser: MessageParser
    shows_reasoning: bool = True
    new_call_id: Callable[[], str] = _new_call_id
    num_calls: int = 0
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: list[dict[str, Any]] = field(default_factory=list)

    def deltas(self, text: str, finish_reason: str | None) -> list[dict[str, Any]]:
        """Return what more text adds to the message, one delta for each piece; the last text has a finish reason."""
        pieces = self.parser.add(text)
        if finish_reason is not None:
            pieces = [*pieces, *self.parser.finish(is_cut=finish_reason == "length")]
        return [delta for piece in pieces if (delta := self._delta(piece))]

    def whole(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return the fields of the message in which the model has written this text: the sum of all its deltas."""
        for delta in self.deltas(text, finish_reason):
            self._extend(delta)
        content = "".join(self._content)
        message: dict[str, Any] = {"content": content if content or not self._calls else None}
        if self._reasoning:
            message |= _reasoning_fields("".join(self._reasoning))
        return message | ({"tool_calls": self._calls} if self._calls else {})

    def _delta(self, piece: Piece) -> dict[str, Any]:
        match piece:
            case ContentText(text):
                return {"content": text}
            case ReasoningText(text):
                return _reasoning_fields(text) if self.shows_reasoning else {}
            case CallText(index, arguments, name):
                call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
                if name is not None:
                    self.num_calls += 1
                    function = {"name": name, "arguments": arguments}
                    call = {"index": index, "id": self.new_call_id(), "type": "function", "function": function}
                return {"tool_calls": [call]}

    def _extend(self, delta: dict[str, Any]) -> None:
        if "content" in delta:
            self._content.append(delta["content"])
        elif "reasoning" in delta:
            self._reasoning.append(delta["reasoning"])
        else:
            _add_calls(self._calls, delta["tool_calls"])


def _reasoning_fields(text: str) -> dict[str, Any]:
    """Return the reasoning under both of its names: vLLM's new one, and the one of DeepSeek's API."""
    return {"reasoning": text, "reasoning_content": text}


def _add_calls(calls: list[dict[str, Any]], more: Iterable[dict[str, Any]]) -> None:
    for call in more:
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
        else:
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
