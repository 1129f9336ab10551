"""Ids of tool calls, in the form that a family of models writes or whose template demands it.

A template may write ids into the prompt, and the model then copies their form. Clients send back our ids, and those of
other servers: each is brought into the family's form when a prompt is rendered. The same messages have the same ids in
each prompt, so that cached pages of a conversation are found again.
"""

import hashlib
import re
import secrets
import string
from collections.abc import Container, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

_LETTERS = string.digits + string.ascii_letters
_MISTRAL_CHARS = 9
_KIMI_OPENING = re.compile(r"(functions\.\S+?:[0-9]+)\s*<\|tool_call_argument_begin\|>")


class CallIds(Protocol):
    """The form of a family's ids."""

    def is_own(self, call_id: str, name: str) -> bool:
        """Return whether a call of the function `name` may keep an id."""

    def new(self, name: str, number: int) -> str:
        """Return an id for a call that the model wrote without one. `number`: calls before it in the conversation."""

    def translated(self, call_id: str, name: str, number: int, used: Container[str]) -> str:
        """Return the id that stands for another server's. `number`: as in `new`; `used`: ids of calls before it."""


class MistralIds:
    """Nine letters and digits. Templates since v3 of Mistral's format refuse all others."""

    def is_own(self, call_id: str, name: str) -> bool:
        return len(call_id) == _MISTRAL_CHARS and call_id.isascii() and call_id.isalnum()

    def new(self, name: str, number: int) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(_MISTRAL_CHARS))

    def translated(self, call_id: str, name: str, number: int, used: Container[str]) -> str:
        rest = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest())
        letters = []
        for _ in range(_MISTRAL_CHARS):
            rest, letter = divmod(rest, len(_LETTERS))
            letters.append(_LETTERS[letter])
        return "".join(letters)


class KimiIds:
    """`functions.get_weather:0`: the function, and the number of the call in the conversation. Kimi K2 writes them."""

    def is_own(self, call_id: str, name: str) -> bool:
        head, _, number = call_id.rpartition(":")
        return head == f"functions.{name}" and number.isascii() and number.isdigit()

    def new(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"

    def translated(self, call_id: str, name: str, number: int, used: Container[str]) -> str:
        return next(found for n in count(number) if (found := self.new(name, n)) not in used)


CALL_IDS: Mapping[str, CallIds] = {"kimi_k2": KimiIds(), "mistral": MistralIds()}
"""The form of ids by family. Templates of other families write no ids, so that any id will do."""


class NewIds:
    """Gives ids to the calls of one answer."""

    def __init__(self, form: CallIds, num_before: int) -> None:
        """`num_before`: calls of the conversation before this answer."""
        self._form = form
        self._number = num_before
        self._given = set[str]()

    def next(self, name: str, written: str | None) -> str:
        """Return the id of the next call. `written`: the id that the model wrote, which the call keeps if it can."""
        found = written if written is not None and self._form.is_own(written, name) else None
        while found is None or found in self._given:
            found = self._form.new(name, self._number)
            self._number += 1
        self._given.add(found)
        return found


def num_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of calls in the messages of a chat."""
    lists = (message.get("tool_calls") for message in messages)
    return sum(len(calls) for calls in lists if isinstance(calls, list))


def written_id(opening: str) -> str | None:
    """Return the id in the text before a call's arguments; None without one."""
    found = _KIMI_OPENING.search(opening)
    return None if found is None else found[1]


def with_own_ids(messages: Sequence[Mapping[str, Any]], form: CallIds) -> list[dict[str, Any]]:
    """Return messages for a template, with each id of a call in the family's form.

    A result gets the id of the newest call before it that had the same id.
    """
    number = 0
    renamed: dict[str, str] = {}
    used: set[str] = set()
    result = []
    for message in messages:
        changed = dict(message)
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = own = []
            for call in calls:
                name = str(call["function"].get("name"))
                given = call.get("id")
                if not isinstance(given, str):
                    given = f"call {number}"
                found = given if form.is_own(given, name) else form.translated(given, name, number, used)
                renamed[given] = found
                used.add(found)
                own.append({**call, "id": found})
                number += 1
        elif isinstance(given := message.get("tool_call_id"), str):
            is_known = given in renamed or form.is_own(given, str(message.get("name")))
            found = renamed.get(given, given) if is_known else form.translated(given, "", number, used)
            changed["tool_call_id"] = found
        result.append(changed)
    return result
