"""The flags and the environment variables of vLLM and SGLang, and what becomes of each here.

Flags that earlier versions of this server had are answered likewise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from itertools import chain, product
from typing import Any, Literal, TypeAlias

import yaml

from crossdock.cluster.config_file import gone_setting

State: TypeAlias = Literal["use", "needless", "lost", "unsupported"]
STATES: Mapping[State, str] = {
    "use": "use",
    "needless": "not needed:",
    "lost": "left out:",
    "unsupported": "not supported:",
}
_PREFIXES = ("VLLM_", "SGLANG_")  # of their variables


@cache
def table() -> dict[str, Any]:
    """Return the table of other servers' flags as `other_flags.yaml` has it."""
    return _read("other_flags.yaml")


@cache
def known() -> dict[str, Any]:
    """Return the names of other servers' flags, and what follows each, as `known_flags.yaml` has them."""
    return _read("known_flags.yaml")


def _read(name: str) -> dict[str, Any]:
    return dict(yaml.load(files("crossdock.cluster.serve").joinpath(name).read_text(), yaml.CSafeLoader))


@cache
def takes_value() -> Mapping[str, bool]:
    """Return the flags of other servers, and whether a value follows each. A switch has a --no- form, too."""
    arity: dict[str, bool] = {}
    for server in known().values():
        arity |= dict.fromkeys([*server["values"], *server.get("several", ())], True)
        for name in server["switches"]:
            arity |= dict.fromkeys((name, name.replace("--", "--no-", 1)), False)
    return arity


@cache
def takes_several() -> frozenset[str]:
    """Return the flags of other servers that several values may follow."""
    return frozenset(name for server in known().values() for name in server.get("several", ()))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says for a flag that is missing here what a user reads, and what a start does.

    `text`: what a user reads. `becomes`: the words of ours with the same meaning; empty: there are none. `words`:
    values, and ours for them. `harmless`: patterns of values with which a refused flag does nothing, and why.
    """

    state: State
    text: str
    becomes: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, str] = field(default_factory=dict)

    def line(self, flag: str) -> str:
        """Return the line that a user reads about the flag."""
        return f"{flag}: {STATES[self.state]} {self.text}"

    def line_of_harmless(self, flag: str, value: str) -> str | None:
        """Return the line about a refused flag whose value does nothing; None: the value does something."""
        reasons = (reason for pattern, reason in self.harmless.items() if fnmatchcase(value, pattern))
        return next((f"{flag} {value}: {STATES['needless']} {reason}" for reason in reasons), None)


def verdict(flag: str) -> Verdict | None:
    """Return the verdict on a flag; None: no other server has the flag, and no earlier version had."""
    names = {flag, flag.replace("--no-", "--", 1)}
    groups = table()["groups"]
    listed = (group for group in groups if not names.isdisjoint(group["flags"]))
    alike = (group for group in groups if any(fnmatchcase(*each) for each in product(names, group["flags"])))
    group = next(chain(listed, alike), None)
    return None if group is None else _verdict_of(group)


def answer(flag: str) -> str | None:
    """Return the line for a flag that is missing here; None: no other server has the flag, and no version had."""
    if gone := gone_setting(flag):
        return f"{flag}: {gone}"
    found = verdict(flag)
    return None if found is None else found.line(flag)


def verdict_on_value(flag: str, value: str, part_of: Mapping[str, Any] | None) -> Verdict | None:
    """Return the verdict on a flag of ours with a word that only other servers know; None: the word is no such word.

    Args:
        flag: its name.
        value: the word.
        part_of: the value as a JSON object; None: the value is none.
    """
    for rule in table()["values"]:
        word = value if "of" not in rule else (part_of or {}).get(rule["of"])
        if rule["flag"] == flag and isinstance(word, str) and any(fnmatchcase(word, each) for each in rule["words"]):
            return _verdict_of(rule)
    return None


def _verdict_of(group: Mapping[str, Any]) -> Verdict:
    state: State = next(state for state in STATES if state in group)
    words = group.get("words", {})
    return Verdict(
        state,
        group[state],
        group.get("becomes", ""),
        words if isinstance(words, dict) else {},
        group.get("harmless", {}),
    )


def unread_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each variable of vLLM or SGLang that is set and that a setting here replaces, and one line for
    all others of theirs."""
    replaced = table()["environment"]
    lines = [f"{name} is not read here; use {instead}" for name, instead in replaced.items() if environment.get(name)]
    others = sorted(
        name for name in environment if name.startswith(_PREFIXES) and environment[name] and name not in replaced
    )
    return [*lines, f"not read here: {', '.join(others)}"] if others else lines


def require_no_unread_key(environment: Mapping[str, str]) -> None:
    """Raise ValueError if a variable of another server has a key that the clients of a server would have to send."""
    for name, value in environment.items():
        if name.startswith(_PREFIXES) and name.endswith("_API_KEY") and value:
            raise ValueError(
                f"{name} is not read here, and the server would be open: give --api-key, or CROSSDOCK_API_KEY; "
                f"to serve without keys, unset {name}"
            )
