"""Takes apart a text that a grammar makes tool calls; their arguments are shown while the model writes them."""

import re
from collections.abc import Mapping

from crossdock.cluster.api.body.tool_calls import ForcedCall, before_arguments
from crossdock.cluster.api.text.call_ids import written_id
from crossdock.cluster.api.text.call_values import Brackets
from crossdock.cluster.api.text.message_parser import CallText, ContentText, Piece
from crossdock.cluster.api.text.open_calls import SIGN


def plain_openings(call: ForcedCall) -> dict[str, str]:
    """Return the pattern of the text before each function's arguments, in the form for any model."""
    return {name: re.escape(before_arguments(name)) for name in call.parameters}


class ForcedCallText:
    """The parser of such a text. A text that ends before its first arguments begin is content."""

    def __init__(self, openings: Mapping[str, str]) -> None:
        """`openings`: what stands before the arguments of each function, as patterns by name."""
        self._names = tuple(openings)
        self._opening = re.compile("|".join(f"({pattern})" for pattern in openings.values()))
        self._longest = max(map(len, openings.values()))  # characters; an upper bound
        self._position = 0  # in the buffer; no opening begins before it
        self._buffer = ""  # before the arguments; then they themselves
        self._brackets: Brackets | None = None  # of the arguments that have begun
        self._num_shown = 0  # characters of these arguments
        self._index = -1

    def add(self, text: str) -> list[Piece]:
        buffer = self._buffer
        self._buffer = ""
        buffer += text.replace(SIGN, "")  # in place, as no other name has the text
        self._buffer = buffer
        del buffer
        pieces: list[Piece] = []
        while True:
            name: str | None = None
            call_id: str | None = None
            if self._brackets is None:
                found = self._opening.search(self._buffer, self._position)
                if found is None:
                    self._position = max(self._position, len(self._buffer) - self._longest)
                    return pieces
                assert found.lastindex is not None
                name = self._names[found.lastindex - 1]
                call_id = written_id(found[0])
                self._buffer = self._buffer[found.end() :]
                self._position = 0
                self._brackets = Brackets()
                self._num_shown = 0
                self._index = self._index + 1
            end = self._brackets.end(self._buffer)
            arguments = self._buffer[self._num_shown : end]
            self._num_shown += len(arguments)
            if arguments or name is not None:
                pieces.append(CallText(self._index, arguments, name, call_id))
            if end is None:
                return pieces
            self._buffer = self._buffer[end:]
            self._brackets = None

    def finish(self, *, is_cut: bool) -> list[Piece]:
        rest = self._buffer
        self._buffer = ""
        return [ContentText(rest)] if rest and self._index < 0 else []
