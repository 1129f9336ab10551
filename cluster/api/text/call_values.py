"""Values that a model writes into a tool call: where a JSON text ends, and what a raw text means in a schema."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]  # the parameters of each function, by its name

_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}

# Names of types that hand-written tools use in place of JSON schema's.
_ALIASES = (
    (re.compile(r"u?int\d*|long|short|unsigned\w*"), "integer"),
    (re.compile(r"num|float\d*|double|decimal"), "number"),
    (re.compile(r"bool"), "boolean"),
    (re.compile(r"dict\w*|map|mapping|struct"), "object"),
    (re.compile(r"list|arr|tuple|set|sequence"), "array"),
    (re.compile(r"none|nil"), "null"),
)


class Brackets:
    """Follows brackets and strings in a text that grows, in time linear in its length."""

    def __init__(self, quotes: str = '"', start: int = 0, depth: int = 0) -> None:
        """Begin at character `start` of the text, with `depth` brackets open. `quotes`: begin and end strings."""
        self._next = re.compile(rf"\\.|[{quotes}{{}}\[\]()]", re.DOTALL)
        self._position = start
        self._depth = depth
        self.quote = ""  # of the string that is open; empty outside strings

    def end(self, text: str, stop: int = sys.maxsize) -> int | None:
        """Return where the first bracket that the text opens is closed; None: not yet. Looks no further than `stop`.

        `text` begins with the text of the call before.
        """
        while True:
            found = self._next.search(text, self._position, stop)
            if found is None:
                # A backslash at the end waits for the character that it escapes.
                self._position = min(len(text), stop) - text.endswith("\\", self._position, stop)
                return None
            self._position = found.end()
            mark = found[0]
            if self.quote:
                self.quote = "" if mark == self.quote else self.quote
            elif mark in "\"'":
                self.quote = mark
            elif mark in "{[(":
                self._depth += 1
            elif mark in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return self._position


def read_json(text: str) -> Any:
    """Return the value of a JSON text, whose strings may have line breaks.

    Raises ValueError for any other text, and for numbers that JSON does not have.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def write_json(value: Any) -> str:
    """Return the JSON of a value. Raises ValueError for numbers that JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write as an escape alone
        return json.dumps(value, allow_nan=False)
    return text


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def properties_of(schemas: Schemas, function: str) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters by their names; empty where its schema says nothing of them."""
    properties = schemas.get(function, {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def typed(raw: str, types: Sequence[str]) -> Any:
    """Return the value of a raw text: of the first of a schema's types that fits, else the text itself.

    Without types, the text is its JSON value if it is JSON.
    """
    if types and set(types) <= {"string"}:
        return raw
    value = _literal(raw.strip())
    for name in types or tuple(_TYPES):
        if name == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        kind = _TYPES.get(name)
        is_bool = isinstance(value, bool)
        if kind is not None and isinstance(value, kind) and (is_bool == (name == "boolean")):
            return value
    return raw


def _literal(text: str) -> Any:
    """Return a JSON value or a literal of Python; the text itself where it is neither."""
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        return read_json(text)
    except ValueError:
        return text


def types_of(schemas: Schemas, function: str, parameter: str) -> Sequence[str]:
    """Return the types that the schema of a parameter allows, each once; empty: any, or there is no schema.

    A `$ref` is followed within the function's parameters, and values of `enum` and `const` have their types. Parts of
    another form than a schema's say nothing. A type that neither JSON schemas nor hand-written tools have is "string".
    """
    root = schemas.get(function, {})
    found: dict[str, None] = {}
    seen: set[str] = set()
    parts = [properties_of(schemas, function).get(parameter)]
    for part in parts:  # which grows
        if not isinstance(part, Mapping):
            continue
        given = part.get("type")
        found |= dict.fromkeys(_type_named(name) for name in [given, *_list(given)] if isinstance(name, str))
        values = [*_list(part.get("enum")), *([part["const"]] if "const" in part else [])]
        found |= dict.fromkeys(_type_of(value) for value in values)
        parts += [each for union in ("anyOf", "oneOf", "allOf") for each in _list(part.get(union))]
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            parts.append(_part_at(root, reference))
    return list(found)


def _part_at(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Color` names; None: there is none."""
    beginning, *names = reference.split("/")
    part: Any = root if beginning == "#" else None
    for name in names:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


def _type_of(value: Any) -> str:
    """Return the name of a JSON value's type."""
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "string")


def _type_named(name: str) -> str:
    if name in _TYPES:
        return name
    base = name.lower().partition("[")[0]  # as in `list[str]`
    return next((meant for pattern, meant in _ALIASES if pattern.fullmatch(base)), base if base in _TYPES else "string")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
