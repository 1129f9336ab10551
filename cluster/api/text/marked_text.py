"""Takes apart a text in which markers begin and end the reasoning and the tool calls.

Every decision depends on the text up to there alone, never on how the text was divided. A text that only looks like a
call stays text.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from crossdock.cluster.api.text.call_forms import Call, CallForm, CallScan, Taken
from crossdock.cluster.api.text.call_values import Schemas
from crossdock.cluster.api.text.message_parser import CallText, ContentText, Piece, ReasoningText, num_held
from crossdock.cluster.api.text.open_calls import HEAD, SIGN, OpenCall, opening

_MOST_OPEN = 8  # calls without an end, one in the other, after which the rest of an output is text
_LONGEST_OPENING = 64  # characters of the beginning of a call without a marker, white space included
_PART = 256  # characters that are decided together at the end of an output: each marker copies what follows it

_Kind: TypeAlias = Literal["think", "answer", "call", "section", "nothing"]


@dataclass(frozen=True, slots=True)
class MarkedFamily:
    """How a family of models marks the parts of a message.

    `thinks`: the markers that begin reasoning; `answers`: those that end it. `sections`: markers around several calls;
    `nothing`: markers that have no meaning of their own. `ends_thinking`: a call may begin within the reasoning.
    """

    thinks: Sequence[str] = ()
    answers: Sequence[str] = ()
    calls: Sequence[CallForm] = ()
    sections: Sequence[str] = ()
    nothing: Sequence[str] = ()
    ends_thinking: bool = False
    inner: Sequence[str] = ()  # markers within calls

    def markers(self) -> list[str]:
        """Return every marker of the family."""
        openers = [mark for form in self.calls for mark in (form.opener, form.closer) if mark]
        return [*self.thinks, *self.answers, *openers, *self.sections, *self.nothing]

    def call_openers(self) -> list[str]:
        """Return the markers that may begin a call, or a section of calls."""
        sections = (mark for mark in self.sections if "/" not in mark and "end" not in mark)
        return [*(form.opener for form in self.calls if form.opener), *sections]

    def signed(self, tokens: Collection[str]) -> "MarkedFamily":
        """Return the family in a text that has a sign before each of these tokens where it is a token of its own."""
        if not tokens:
            return self
        pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

        def sign(mark: str) -> str:
            return pattern.sub(rf"{SIGN}\g<0>", mark)

        return replace(
            self,
            thinks=tuple(map(sign, self.thinks)),
            answers=tuple(map(sign, self.answers)),
            calls=tuple(replace(form, opener=sign(form.opener), closer=sign(form.closer)) for form in self.calls),
            sections=tuple(map(sign, self.sections)),
            nothing=tuple(map(sign, self.nothing)),
        )


@dataclass(slots=True)
class _Markers:
    """The markers that matter now, and where one may be."""

    kinds: dict[str, _Kind]
    pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        marks = sorted(self.kinds, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")


class MarkedText:
    """The parser of such a text."""

    def __init__(self, family: MarkedFamily, schemas: Schemas | None, *, is_thinking: bool) -> None:
        """`schemas`: of the tools; None: calls are text. `is_thinking`: the prompt has begun the reasoning."""
        forms = () if schemas is None else family.calls
        self._schemas = schemas or {}
        self._forms = {form.opener: form for form in forms if form.opener}
        self._bare = next((form for form in forms if not form.opener), None)
        calls: dict[str, _Kind] = dict.fromkeys(self._forms, "call")
        sections: dict[str, _Kind] = {} if schemas is None else dict.fromkeys(family.sections, "section")
        nothing: dict[str, _Kind] = dict.fromkeys(family.nothing, "nothing")
        ends: dict[str, _Kind] = dict.fromkeys(family.answers, "answer")
        thinks: dict[str, _Kind] = dict.fromkeys(family.thinks, "think")
        self._first = _Markers(thinks | ends | calls | sections | nothing)  # before any content
        self._in_content = _Markers(calls | sections | nothing)
        self._in_thinking = _Markers(ends | (calls | sections if family.ends_thinking else {}))
        self._is_thinking = is_thinking
        self._has_content = False
        self._buffer = ""  # not decided yet; in a call, what follows its opening marker
        self._space = ""  # held: white space before a marker may belong to the marker
        self._drops_space = is_thinking  # after a marker, white space with a line break belongs to the marker
        self._section = ""  # a marker of a section, which is text if no call follows it or came before it
        self._after_call = False
        self._open: OpenCall | None = None  # of which the buffer has all since its function was known
        self._open_form: CallForm | None = None  # of that call
        self._scan: CallScan | None = None  # of the call that the buffer begins with
        self._num_calls = 0

    def add(self, text: str) -> list[Piece]:
        buffer = self._buffer
        self._buffer = ""
        buffer += text  # in place, as no other name has the text: a long call is not copied at each token
        self._buffer = buffer
        del buffer
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def finish(self, *, is_cut: bool) -> list[Piece]:
        pieces: list[Piece] = []
        for _ in range(_MOST_OPEN):
            if self._open is not None:
                arguments, end = self._open.last(self._buffer, is_cut=is_cut)
                self._end_call(arguments, end, pieces)
                self._add_parts(pieces)
                continue
            if (scan := self._scan) is None or (not self._buffer.strip() and scan.form.opener):
                break  # a marker alone says nothing
            self._resolve(scan, scan.last(self._buffer, is_cut=is_cut), pieces)
            self._add_parts(pieces)
        else:
            self._text(self._scan.form.opener if self._scan is not None else "", pieces)
        self._text(self._buffer, pieces)
        self._buffer = ""
        if "\n" not in self._space or not (self._is_thinking or self._drops_space):
            self._emit(self._space, pieces)
        self._space = ""
        return pieces

    def _add_parts(self, pieces: list[Piece]) -> None:
        """Decide the buffer at the end of an output."""
        rest = self._buffer
        self._buffer = ""
        for start in range(0, len(rest), _PART):
            pieces += self.add(rest[start : start + _PART])

    def _step(self, pieces: list[Piece]) -> bool:
        """Decide a part of the buffer. Returns whether there may be more to decide."""
        if self._open is not None:
            arguments, end = self._open.take(self._buffer)
            if end is None:
                self._show(arguments, pieces)
                return False
            self._end_call(arguments, end, pieces)
            return True
        if self._scan is not None:
            if self._opens(self._scan, pieces):
                return True
            taken = self._scan.take(self._buffer)
            if taken is None:
                return False
            self._resolve(self._scan, taken, pieces)
            return True
        if self._bare is not None and self._begins_bare(self._bare):
            return True
        if self._bare is not None and self._bare.in_content and not self._is_thinking:
            return self._step_to_bare(self._bare, pieces)
        markers = self._in_thinking if self._is_thinking else self._in_content if self._has_content else self._first
        found = markers.pattern.search(self._buffer)
        if found is None:
            end = len(self._buffer) - num_held(self._buffer, markers.kinds)
            text = self._buffer[:end]
            self._buffer = self._buffer[end:]
            self._text(text, pieces)
            return False
        before = self._buffer[: found.start()]
        if before.strip() and not self._is_thinking and not self._has_content:
            # The first content ends here: a marker of reasoning after it is text.
            self._text(before, pieces)
            self._buffer = self._buffer[found.start() :]
            return True
        self._text(before, pieces)
        self._buffer = self._buffer[found.end() :]
        self._marker(found[0], markers.kinds[found[0]], pieces)
        return True

    def _begins_bare(self, form: CallForm) -> bool:
        """Begin a call that has no marker, where the first character that is not white space may be its bracket."""
        text = self._buffer.lstrip()
        if not text or self._has_content or self._is_thinking or re.match(form.begins, text) is None:
            return False
        self._space += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        self._scan = CallScan(form, self._schemas)
        return True

    def _step_to_bare(self, form: CallForm, pieces: list[Piece]) -> bool:
        """Decide the text before the next beginning of a call that has no marker, or of another marker."""
        found = self._in_content.pattern.search(self._buffer)
        end = len(self._buffer) if found is None else found.start()
        start, is_call = _beginning(self._buffer, end, form.in_content)
        if start < end or is_call:
            text = self._buffer[:start]
            self._buffer = self._buffer[start:]
            self._text(text, pieces)
            if is_call:
                self._scan = CallScan(form, self._schemas)
            return is_call
        if found is None:
            end -= num_held(self._buffer, self._in_content.kinds)
        self._text(self._buffer[:end], pieces)
        self._buffer = self._buffer[end:]
        if found is None:
            return False
        self._buffer = self._buffer[len(found[0]) :]
        self._marker(found[0], self._in_content.kinds[found[0]], pieces)
        return True

    def _marker(self, mark: str, kind: _Kind, pieces: list[Piece]) -> None:
        match kind:
            case "think" | "answer":
                self._end_text(pieces)
                self._is_thinking = kind == "think"
            case "section":
                self._section += (self._space if "\n" in self._space else "") + mark
                self._end_text(pieces)
            case "nothing":
                self._end_text(pieces)
            case "call":
                self._scan = CallScan(self._forms[mark], self._schemas)

    def _end_text(self, pieces: list[Piece]) -> None:
        """End a text before a marker. White space with a line break between them belongs to the marker."""
        space = self._space
        self._space = ""
        self._drops_space = True
        if "\n" not in space and (self._is_thinking or self._has_content):
            self._emit(space, pieces)

    def _resolve(self, scan: CallScan, taken: Taken, pieces: list[Piece]) -> None:
        """Take a call, or a text that looked like a call, out of the buffer."""
        body = self._buffer[: taken.end]
        self._buffer = self._buffer[taken.end :]
        self._scan = None
        if taken.calls:
            self._calls(taken.calls, pieces)
            return
        self._text(scan.form.opener + body, pieces)
        self._has_content = self._has_content or not self._is_thinking  # no bracket begins a call after this

    def _opens(self, scan: CallScan, pieces: list[Piece]) -> bool:
        """Open a call of a known function whose arguments begin. Returns whether there is one."""
        form = scan.form
        found = opening(form.head, self._buffer, self._schemas) if form.head and scan.may_open else None
        scan.may_open = len(self._buffer) < HEAD
        if found is None:
            return False
        self._scan, self._open, self._open_form = None, form.opened(found["name"], self._schemas), form
        self._calls([Call(found["name"], "", found.groupdict().get("id"))], pieces)
        self._buffer = self._buffer[found.end() :]
        return True

    def _end_call(self, arguments: str, end: int, pieces: list[Piece]) -> None:
        """End the call that is open, and take it out of the buffer."""
        self._show(arguments, pieces)
        assert self._open is not None
        assert self._open_form is not None
        following = self._open.following
        self._buffer = self._buffer[end:]
        if following is None:
            self._buffer = self._buffer.removeprefix(self._open_form.closer)
            self._open = None
        else:
            self._open = self._open_form.opened(following, self._schemas)
            self._calls([Call(following, "")], pieces)

    def _show(self, arguments: str, pieces: list[Piece]) -> None:
        if arguments:
            pieces.append(CallText(self._num_calls - 1, arguments))

    def _calls(self, calls: Sequence[Call], pieces: list[Piece]) -> None:
        self._section = ""
        self._end_text(pieces)
        self._is_thinking = False
        for call in calls:
            pieces.append(CallText(self._num_calls, call.arguments, call.name, call.id))
            self._num_calls += 1
        self._after_call = True

    def _text(self, text: str, pieces: list[Piece]) -> None:
        """Emit text without trailing white space and, after a marker, without leading white space."""
        stripped = text.rstrip()
        if not stripped:
            self._space += text
            return
        if self._section:
            held = self._section
            self._section = ""
            if not self._after_call:
                self._emit(held, pieces)
        self._after_call = False
        shown = self._space + stripped
        if self._drops_space:
            body = shown.lstrip()
            shown = body if "\n" in shown[: len(shown) - len(body)] else shown
        self._drops_space = False
        self._space = text[len(stripped) :]
        self._has_content = self._has_content or not self._is_thinking
        self._emit(shown, pieces)

    def _emit(self, text: str, pieces: list[Piece]) -> None:
        if text := text.replace(SIGN, ""):
            pieces.append(ReasoningText(text) if self._is_thinking else ContentText(text))


def _beginning(text: str, end: int, opening: str) -> tuple[int, bool]:
    """Return where an opening begins before `end`, and whether all of it has come; `end`: nowhere.

    White space within the opening does not count, up to some characters.
    """
    at = text.find(opening[0], 0, end)
    while at >= 0:
        part = "".join(text[at : min(at + _LONGEST_OPENING, end)].split())
        if part.startswith(opening):
            return at, True
        if opening.startswith(part) and end == len(text) and end - at < _LONGEST_OPENING:
            return at, False
        at = text.find(opening[0], at + 1, end)
    return end, False
