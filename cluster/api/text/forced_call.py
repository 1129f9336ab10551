"""Takes apart a text that a grammar makes one tool call; its arguments are shown while the model writes them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from crossdock.cluster.api.body.tool_calls import before_arguments
from crossdock.cluster.api.text.message_parser import CallText, ContentText, Piece


@dataclass(slots=True)
class ForcedCallText:
    """The parser of such a text. A text that ends before its arguments begin is content."""

    names: Iterable[str]
    _text: str = ""  # before the arguments begin; then what may be the last brace
    _has_begun: bool = False
    _arguments: list[str] = field(default_factory=list)

    def add(self, text: str) -> list[Piece]:
        self._text += text
        name: str | None = None
        if not self._has_begun:
            name = next((name for name in self.names if self._text.startswith(before_arguments(name))), None)
            if name is None:
                return []
            self._has_begun = True
            self._text = self._text.removeprefix(before_arguments(name))
        # The last brace ends the call and not the arguments if nothing follows.
        end = len(self._text) - self._text.endswith("}")
        arguments, self._text = self._text[:end], self._text[end:]
        self._arguments.append(arguments)
        return [CallText(0, arguments, name)] if arguments or name is not None else []

    def finish(self, *, is_cut: bool) -> list[Piece]:
        rest, self._text = self._text, ""
        if not self._has_begun:
            return [ContentText(rest)] if rest else []
        # The limit of tokens may have ended the text at a brace of the arguments.
        is_part = rest and is_cut and not _is_json("".join(self._arguments))
        return [CallText(0, rest)] if is_part else []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
