"""Take what a model writes apart while it comes: content, reasoning and tool calls.

A parser is a function of the text alone. However the text is split into deltas, and whichever replica writes them, the
pieces add up to the same message.
"""

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from crossdock.cluster.api.text.call_ids import NewIds
from crossdock.workers.schedule.request.request import FinishReason


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
    """A part of a tool call. The first part of each call has its name; all have a part of the arguments, as JSON.

    `id`: beside the name, where the family has ids of its own; None: any id will do.
    """

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


def num_held(text: str, marks: Collection[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    longest = min(max(map(len, marks), default=1) - 1, len(text))
    return next((num for num in range(longest, 0, -1) if any(mark.startswith(text[-num:]) for mark in marks)), 0)


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


@dataclass(slots=True)
class ReasonedText:
    """The parser of reasoning, which leaves the text after its end to another parser."""

    thoughts: MessageParser
    answer: MessageParser

    def add(self, text: str) -> list[Piece]:
        return self._pieces(self.thoughts.add(text))

    def finish(self, *, is_cut: bool) -> list[Piece]:
        return [*self._pieces(self.thoughts.finish(is_cut=is_cut)), *self.answer.finish(is_cut=is_cut)]

    def _pieces(self, pieces: list[Piece]) -> list[Piece]:
        more: list[Piece] = []
        for piece in pieces:
            more += self.answer.add(piece.text) if isinstance(piece, ContentText) else [piece]
        return more


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(slots=True)
class ChatMessage:
    """One choice's message in the form of OpenAI's chats, whole and as deltas.

    `shows_reasoning`: false where the client does not want it (`include_reasoning`). `most_calls`: later calls are left
    out (`parallel_tool_calls`). `is_named`: the client has named the function, so a call ends as a text does. `ids`: in
    the form of the model's family; None: it has no form.

    Texts come one per token, so that `reasoning_tokens` is the same however many tokens a step has. A token without a
    piece, such as a marker, counts with the next piece.
    """

    parser: MessageParser
    shows_reasoning: bool = True
    most_calls: int | None = None
    is_named: bool = False
    new_call_id: Callable[[], str] = _new_call_id
    ids: NewIds | None = None
    num_calls: int = 0
    reasoning_tokens: int = 0  # also of reasoning that the client does not want
    _undecided_tokens: int = field(default=0, init=False)
    _read: list[Piece] = field(default_factory=list, init=False)

    def read(self, texts: Sequence[str], finish_reason: str | None) -> None:
        """Keep what more tokens add to the message, for `whole`; the last ones have a finish reason."""
        self._read += self.pieces(texts, finish_reason)

    def delta(self, texts: Sequence[str], finish_reason: str | None) -> dict[str, Any]:
        """Return the part of the message that more tokens add; the last ones have a finish reason."""
        return self._fields(self.pieces(texts, finish_reason))

    def _fields(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        if len(pieces) == 1 and isinstance(pieces[0], ContentText):  # nearly every token
            return {"content": pieces[0].text}
        contents = [piece.text for piece in pieces if isinstance(piece, ContentText)]
        thoughts = [piece.text for piece in pieces if isinstance(piece, ReasoningText)]
        calls = [self._call(piece) for piece in pieces if isinstance(piece, CallText)]
        delta: dict[str, Any] = {"content": "".join(contents)} if contents else {}
        if thoughts:
            delta["reasoning"] = delta["reasoning_content"] = "".join(thoughts)
        return {**delta, "tool_calls": calls} if calls else delta

    def pieces(self, texts: Sequence[str], finish_reason: str | None) -> list[Piece]:
        """Return the pieces that more tokens complete, without those that the client does not want."""
        pieces: list[Piece] = []
        for text in texts:
            self._undecided_tokens += 1
            pieces += self._counted(self.parser.add(text) if text else [])
        if finish_reason is not None:
            pieces += self._counted(self.parser.finish(is_cut=finish_reason == FinishReason.LENGTH.value))
        if self.shows_reasoning and self.most_calls is None:
            return pieces
        return [piece for piece in pieces if self._is_wanted(piece)]

    def _counted(self, pieces: list[Piece]) -> list[Piece]:
        """Count the tokens since the last piece, if there are pieces now. Returns the pieces, and calls with ids."""
        if pieces:
            pieces = [self._identified(piece) if isinstance(piece, CallText) else piece for piece in pieces]
            if any(isinstance(piece, ReasoningText) for piece in pieces):
                self.reasoning_tokens += self._undecided_tokens
            self._undecided_tokens = 0
        return pieces

    def _identified(self, piece: CallText) -> CallText:
        if piece.name is None or self.ids is None:
            return piece
        return replace(piece, id=self.ids.next(piece.name, piece.id))

    def _is_wanted(self, piece: Piece) -> bool:
        if isinstance(piece, CallText):
            return self.most_calls is None or piece.index < self.most_calls
        return self.shows_reasoning or not isinstance(piece, ReasoningText)

    def whole(self) -> dict[str, Any]:
        """Return the fields of the message that was read: the sum of all its deltas."""
        delta = self._fields(self._read)
        calls: list[dict[str, Any]] = []
        for part in delta.pop("tool_calls", ()):
            index = part.pop("index")
            if index == len(calls):
                calls.append(part)
            else:
                calls[index]["function"]["arguments"] += part["function"]["arguments"]
        empty = None if calls or delta else ""
        return {"content": empty, **delta, **({"tool_calls": calls} if calls else {})}

    def finish_reason(self, reason: str | None) -> str | None:
        """Return OpenAI's finish reason for that of the engine."""
        is_whole = reason == FinishReason.STOP.value
        return "tool_calls" if is_whole and self.num_calls and not self.is_named else reason

    def _call(self, piece: CallText) -> dict[str, Any]:
        if piece.name is None:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        self.num_calls += 1
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"index": piece.index, "id": piece.id or self.new_call_id(), "type": "function", "function": function}
