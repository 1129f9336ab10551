"""Fields of files that other programs wrote: read by code that is known by its source, harmless, or passed over."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from inspect import getfile
from pathlib import Path
from typing import Any

NOTHING: tuple[Any, ...] = (None, False, "", [], {}, 0, 1, 0.0, 1.0)
"""Values that ask for nothing: a factor of 1, a bound or a number of 0, what is off."""
# A name in quotes, of an argument with a default, or of a field with a type.
_NAME = re.compile(r"""["'](\w+)["']|\b(\w+)\s*=(?!=)|^\s+(\w+)\s*:""", re.MULTILINE)


def asks_for_nothing(value: Any) -> bool:
    """Return whether a field with this value asks for nothing."""
    return any(value == nothing and type(value) is type(nothing) for nothing in NOTHING)


def names_in_code(kind: type) -> frozenset[str]:
    """Return the names of fields and arguments in transformers' code of a class and of its bases."""
    modules = {getfile(each) for each in kind.__mro__ if each.__module__.startswith("transformers.")}
    found = (match for file in sorted(modules) for match in _NAME.finditer(Path(file).read_text(encoding="utf-8")))
    return frozenset(name for match in found for name in match.groups() if name)


def passed_over(
    found: Mapping[str, Any], known: frozenset[str], harmless: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """Yield the fields that no code reads, that ask for something, and that no pattern of `harmless` names."""
    for name, value in found.items():
        is_harmless = asks_for_nothing(value) or any(fnmatchcase(name, pattern) for pattern in harmless)
        if name not in known and not is_harmless:
            yield name, value
