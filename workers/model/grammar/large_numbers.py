"""JSON schemas with numbers that llguidance would round: it reads every number as a float of 64 bits.

A part with such a number becomes rules in Lark: values are texts, and bounds are patterns of digits. All other parts
stay JSON schemas within these rules.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor
from typing import Any, TypeAlias

from crossdock.workers.model.grammar.local_references import resolved
from crossdock.workers.model.grammar.number_patterns import integers, numbers

_Schema: TypeAlias = Mapping[str, Any]

_MOST_EXACT = 1 << 53  # a float of 64 bits holds every integer up to here
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NUMERIC = (*_BOUNDS, "multipleOf")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_OBJECT = ("properties", "required", "additionalProperties", "minProperties", "maxProperties")
_ARRAY = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
_STRING = ("minLength", "maxLength", "pattern", "format")
_LITERALS = ("const", "enum")
_APPLIED = ("allOf", "anyOf", "oneOf", "$ref")
_OTHERS = (  # known words that no rule here expresses
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains"),
    *("maxContains", "uniqueItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "patternProperties"),
    *("$dynamicRef", "$recursiveRef"),
)
_WORDS = {*_NUMERIC, *_OBJECT, *_ARRAY, *_STRING, *_LITERALS, *_APPLIED, *_OTHERS}
_OWN_WORDS = {"array": _ARRAY, "object": _OBJECT}  # words of a type that has rules here
_MOST_SHOWN = 60  # digits of a number in an error
_SPACE = r"[ \n\t\r]{1,20}"


def exact_rules(schema: Any, name: str, options: Mapping[str, Any]) -> list[str] | None:
    """Return rules in Lark, the first of which has the `name`, for a schema with numbers beyond 2^53.

    None: there is no such number. `options`: of llguidance's `x-guidance`.
    Raises ValueError, which names the keyword and the number, for a schema that no rules here express.
    """
    if not isinstance(schema, Mapping):
        return None
    rules = _Rules(schema, name, options)
    return rules.of_root() if rules.is_large(schema) else None


class _Rules:
    """The rules of one schema."""

    def __init__(self, root: _Schema, name: str, options: Mapping[str, Any]) -> None:
        self._root = root
        self._name = name
        self._options = options
        self._written: list[str] = []
        self._num_rules = 0
        self._references: dict[str, str] = {}  # rules by pointers
        self._plains: dict[str, str] = {}  # rules by their schemas
        self._large: dict[int, str | None] = {}  # see `_large_in`
        space = "" if options.get("whitespace_flexible") is False else f"{name}-space? "
        self._item_separator = f"{space}{_pattern(options.get('item_separator', ','))} {space}".strip()
        self._key_separator = f"{space}{_pattern(options.get('key_separator', ':'))} {space}".strip()
        self._space = space
        if space:
            self._add(f"{name}-space", _pattern(options.get("whitespace_pattern") or _SPACE))

    def of_root(self) -> list[str]:
        rule = f"{self._name}: {self._value(self._root)}"
        return [rule, *self._written]

    def is_large(self, schema: Any) -> bool:
        """Return whether a part has a number beyond 2^53, or refers to one that has."""
        return self._large_in(schema) is not None

    def _large_in(self, schema: Any) -> str | None:
        """Return the first keyword and number beyond 2^53 in a part; None: there is none."""
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in self._large:
            self._large[id(schema)] = None  # while a reference leads back here
            found = next((f"{key}: {_digits(number)}" for key, number in _own_large(schema)), None)
            self._large[id(schema)] = found or next(filter(None, map(self._large_in, self._below(schema))), None)
        return self._large[id(schema)]

    def _below(self, schema: _Schema) -> Iterator[Any]:
        for key in ("allOf", "anyOf", "oneOf", "prefixItems", "items"):
            if isinstance(schema.get(key), list):
                yield from schema[key]
        for key in ("properties", "patternProperties"):
            if isinstance(schema.get(key), Mapping):
                yield from schema[key].values()
        yield from (schema.get(key) for key in ("items", "additionalItems", "additionalProperties"))
        if "$ref" in schema:
            yield resolved(self._root, schema["$ref"])

    # -- values ------------------------------------------------------------------------------------------------------

    def _value(self, schema: Any) -> str:
        """Return the expression of a value of a schema."""
        if not self.is_large(schema):
            return self._plain(schema)
        words = {key for key in schema if key in _WORDS}
        for key in _LITERALS:
            if key in words:
                return self._literals(schema, key, words)
        for key in _APPLIED:
            if key in words:
                return self._applied(schema, key, words)
        types = schema.get("type", [name for name in _TYPES if name != "integer"])
        types = types if isinstance(types, list) else [types]
        return self._either([self._typed({**schema, "type": name}, name) for name in types])

    def _plain(self, schema: Any) -> str:
        """Return the expression of a schema without large numbers, with the parts that it refers to."""
        if schema is False:
            raise ValueError("a part of the schema is false: no value is possible")
        schema = {} if schema is True else schema
        if not isinstance(schema, Mapping):
            raise ValueError(f"a schema must be an object or a boolean, not {json.dumps(schema)[:_MOST_SHOWN]}")
        shared = {} if "$ref" not in json.dumps(schema) else self._without_large()
        text = json.dumps({**shared, **schema, "x-guidance": dict(self._options)})
        if text not in self._plains:
            self._plains[text] = self._add(self._fresh(), f"%json {text}")
        return self._plains[text]

    def _without_large(self) -> dict[str, Any]:
        """Return the parts that others may refer to, but for those with large numbers."""
        shared = {}
        for key in ("$defs", "definitions"):
            if isinstance(self._root.get(key), Mapping):
                shared[key] = {name: one for name, one in self._root[key].items() if not self.is_large(one)}
        return shared

    def _literals(self, schema: _Schema, key: str, words: set[str]) -> str:
        """Return the expression of the values that are listed, as far as the type and the bounds beside allow them."""
        self._refuse(schema, words - {key, *_NUMERIC})
        values = [schema["const"]] if key == "const" else schema["enum"]
        if not isinstance(values, list):
            raise ValueError("enum must be a list")
        types = schema.get("type", list(_TYPES))
        types = types if isinstance(types, list) else [types]
        fitting = [value for value in values if _has_type(value, types) and _within(value, schema)]
        if not fitting:
            raise ValueError(f"{key}: the type and the bounds beside it allow none of its values")
        others = [value for value in fitting if not any(_large_numbers(value))]
        found = [self._text(value) for value in fitting if any(_large_numbers(value))]
        return self._either(found + ([self._plain({"enum": others})] if others else []))

    def _text(self, value: Any) -> str:
        """Return the expression of one value."""
        match value:
            case dict():
                members = [
                    f"{_literal(_json(key))} {self._key_separator} {self._text(one)}" for key, one in value.items()
                ]
                return self._enclosed("{", members, "}")
            case list():
                return self._enclosed("[", [self._text(one) for one in value], "]")
            case _:
                return _literal(_json(value))

    def _enclosed(self, opening: str, parts: Sequence[str], closing: str) -> str:
        inside = f" {self._item_separator} ".join(parts)
        return f'"{opening}" {self._space}{inside} {self._space}"{closing}"'

    def _applied(self, schema: _Schema, key: str, words: set[str]) -> str:
        """Return the expression of a schema that consists of others. Beside them, only the type may stand."""
        self._refuse(schema, words - {key})
        parts = [schema[key]] if key == "$ref" else schema[key]
        if not isinstance(parts, list) or not parts or (key == "allOf" and len(parts) > 1):
            raise ValueError(f"{self._large_in(schema)} is beyond 2^53, and {key} cannot be combined with that here")
        targets = [resolved(self._root, part) if key == "$ref" else part for part in parts]
        kinds = [self._types(target) for target in targets]
        given = schema.get("type")
        if given is not None and any(kind is None or not kind <= _kinds(given) for kind in kinds):
            raise ValueError(f"{self._large_in(schema)} is beyond 2^53, and 'type' beside {key} is not its own here")
        if key == "oneOf":
            total = frozenset().union(*(kind or frozenset() for kind in kinds))
            if None in kinds or len(total) < sum(len(kind or ()) for kind in kinds):
                raise ValueError(f"{self._large_in(schema)} is beyond 2^53, and needs anyOf in place of oneOf here")
        if key == "$ref":
            return self._referred(schema["$ref"], targets[0])
        return self._either([self._value(part) for part in parts])

    def _referred(self, pointer: str, target: Any) -> str:
        if pointer not in self._references:
            self._references[pointer] = rule = f"{self._name}-ref{len(self._references)}"
            self._add(rule, self._value(target))
        return self._references[pointer]

    def _types(self, schema: Any, depth: int = 0) -> frozenset[str] | None:
        """Return the kinds of values that a part allows; None: they are not known."""
        if not isinstance(schema, Mapping) or depth > 8:
            return None
        if "type" in schema:
            return _kinds(schema["type"])
        if "const" in schema or isinstance(schema.get("enum"), list):
            return frozenset(_kind(value) for value in ([schema["const"]] if "const" in schema else schema["enum"]))
        parts = [resolved(self._root, schema["$ref"])] if "$ref" in schema else schema.get("anyOf", schema.get("oneOf"))
        if not isinstance(parts, list):
            return None
        kinds = [self._types(part, depth + 1) for part in parts]
        return None if None in kinds else frozenset().union(*(kind or () for kind in kinds))

    # -- by type -----------------------------------------------------------------------------------------------------

    def _typed(self, schema: _Schema, kind: Any) -> str:
        words = {key for key in schema if key in _WORDS}
        if kind in ("integer", "number"):
            self._refuse(schema, words & {*_OTHERS})
            return self._number(schema, is_whole=kind == "integer")
        if kind not in _OWN_WORDS:
            return self._plain(
                {key: value for key, value in schema.items() if key not in (*_NUMERIC, *_OBJECT, *_ARRAY)}
            )
        own = {key: value for key, value in schema.items() if key not in {*_NUMERIC, *_STRING, *_OBJECT, *_ARRAY}}
        own |= {key: schema[key] for key in _OWN_WORDS[kind] if key in schema}
        if not self.is_large(own):
            return self._plain(own)
        self._refuse(own, words & {*_OTHERS})
        return self._array(own) if kind == "array" else self._object(own)

    def _number(self, schema: _Schema, *, is_whole: bool) -> str:
        given = {key: schema[key] for key in _BOUNDS if schema.get(key) is not None}
        if not any(_is_large(value) for value in given.values()):
            if _is_large(schema.get("multipleOf")):
                raise ValueError(
                    f"multipleOf: {_digits(schema['multipleOf'])} is more than 2^53, the most that is exact"
                )
            return self._plain({key: schema[key] for key in ("type", *_NUMERIC) if key in schema})
        low, takes_low = _bound(schema, "minimum", "exclusiveMinimum", max)
        high, takes_high = _bound(schema, "maximum", "exclusiveMaximum", min)
        named = next(f"{key}: {_digits(value)}" for key, value in given.items() if _is_large(value))
        if schema.get("multipleOf") not in (None, *((1,) if is_whole else ())):
            raise ValueError(f"{named} is beyond 2^53, and cannot be combined with multipleOf here")
        if is_whole:
            first = None if low is None else ceil(low) + (not takes_low and ceil(low) == low)
            last = None if high is None else floor(high) - (not takes_high and floor(high) == high)
            pattern = integers(first, last)
        elif (low or 0) % 1 or (high or 0) % 1:
            raise ValueError(
                f"{named} is beyond 2^53, and the other bound has a fraction, which cannot be combined here"
            )
        else:
            pattern = numbers(_whole(low), _whole(high), takes_low=takes_low, takes_high=takes_high)
        return f"/{pattern}/"

    def _array(self, schema: _Schema) -> str:
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        if isinstance(rest, list):
            first = rest
            rest = schema.get("additionalItems", True)
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        if not isinstance(first, list) or not isinstance(least, int) or not isinstance(most, int | None):
            raise ValueError("prefixItems must be a list, and minItems and maxItems integers")
        if rest is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            raise ValueError(f"minItems: {least} is more than maxItems, {most}, or than the list has")
        first = first if most is None else first[:most]
        parts = [self._value(one) for one in first]
        # Each rule has the items from a place on, those before which an item stands.
        more = ""
        if most is None or most > len(first):
            item = self._add(self._fresh(), self._value(rest))
            lowest = max(least - len(first), 0)
            highest = "" if most is None else most - len(first)
            if not parts:
                some = f"({self._item_separator} {item}){{{max(lowest - 1, 0)},{'' if most is None else most - 1}}}"
                inside = f"{item} {some}"
                inside = inside if least else f"({inside})?"
                return f'"[" {self._space}{inside} {self._space}"]"'
            more = f"({self._item_separator} {item}){{{lowest},{highest}}}"
        inside = ""
        for i in range(len(parts), 0, -1):
            after = " ".join(filter(None, [inside, more if i == len(parts) else ""]))
            one = f"{self._item_separator if i > 1 else ''} {parts[i - 1]} {after}".strip()
            inside = one if i <= least else f"({one})?"
        return f'"[" {self._space}{inside} {self._space}"]"'

    def _object(self, schema: _Schema) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")
        others = schema.get("additionalProperties", True)
        properties = {**properties, **{name: others for name in required if name not in properties}}
        least = schema.get("minProperties", 0)
        most = schema.get("maxProperties")
        if least > len(required) or (most is not None and (others is not False or most < len(properties))):
            named = self._large_in(schema)
            raise ValueError(f"{named} is beyond 2^53, and cannot be combined with minProperties or maxProperties here")
        members = [
            (f"{_literal(_json(name))} {self._key_separator} {self._value(one)}", name in required)
            for name, one in properties.items()
            if one is not False
        ]
        if others is not False:
            members.append((self._others(others, properties), False))
        return f'"{{" {self._space}{self._members(members)} {self._space}"}}"'

    def _others(self, schema: Any, names: Mapping[str, Any]) -> str:
        """Return the expression of one or more properties that are not declared."""
        key = self._plain({"type": "string"})
        if names:
            key = self._fresh().upper()
            taken = " | ".join(_literal(_json(name)) for name in names)
            self._written.append(rf'{key}: /"([^"\\\x00-\x1f]|\\["\\\/bfnrt])*"/ & ~({taken})')
        member = f"{key} {self._key_separator} {self._value(schema)}"
        return f"{member} ({self._item_separator} {member})*"

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return the expression of properties in their order, each with whether it is required."""
        # Properties from a place on: behind others, and as the first ones.
        after = ""
        alone = ""
        for member, is_required in reversed(members):
            follows = self._named(f"{self._item_separator} {member}", is_required, after)
            first = f"{member} {after}".strip()
            alone = first if is_required else f"({first}{f' | {alone}' if alone else ''}){'' if alone else '?'}"
            alone = self._add(self._fresh(), alone)
            after = follows
        return alone

    def _named(self, member: str, is_required: bool, after: str) -> str:
        one = member if is_required else f"({member})?"
        return self._add(self._fresh(), f"{one} {after}".strip())

    # -- rules -------------------------------------------------------------------------------------------------------

    def _fresh(self) -> str:
        """Return the name of another rule."""
        self._num_rules += 1
        return f"{self._name}-{self._num_rules}"

    def _add(self, name: str, expression: str) -> str:
        self._written.append(f"{name}: {expression}")
        return name

    def _either(self, parts: Sequence[str]) -> str:
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"

    def _refuse(self, schema: _Schema, words: set[str]) -> None:
        if words:
            named = self._large_in(schema)
            word = min(words)
            raise ValueError(f"{named} is beyond 2^53, and cannot be combined with {word} here")


# -- numbers ---------------------------------------------------------------------------------------------------------


def _is_large(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > _MOST_EXACT


def _large_numbers(value: Any) -> Iterator[int]:
    """Yield the integers beyond 2^53 in a JSON value. Such a float stays what it is."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _large_numbers(one)
    elif isinstance(value, int) and _is_large(value):
        yield value


def _own_large(schema: _Schema) -> Iterator[tuple[str, int | float]]:
    for key in _NUMERIC:
        if _is_large(schema.get(key)):
            yield key, schema[key]
    for key in _LITERALS:
        for number in _large_numbers(schema.get(key)):
            yield key, number


def _bound(schema: _Schema, key: str, exclusive: str, tightest: Any) -> tuple[int | float | None, bool]:
    """Return a bound, and whether it is allowed itself. In old drafts, the exclusive one is a boolean."""
    own = schema.get(key)
    other = schema.get(exclusive)
    if isinstance(other, bool):
        return own, not other
    if other is None or own is None:
        return (own, True) if other is None else (other, False)
    return (other, False) if tightest(own, other) == other else (own, True)


def _whole(value: int | float | None) -> int | None:
    return None if value is None else int(value)


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds.get(type(value), "number")


def _kinds(types: Any) -> frozenset[str]:
    names = types if isinstance(types, list) else [types]
    return frozenset("number" if name == "integer" else str(name) for name in names)


def _has_type(value: Any, types: Sequence[Any]) -> bool:
    kind = _kind(value)
    return kind in types or (kind == "number" and "integer" in types and value % 1 == 0)


def _within(value: Any, schema: _Schema) -> bool:
    if _kind(value) != "number":
        return True
    low, takes_low = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, takes_high = _bound(schema, "maximum", "exclusiveMaximum", min)
    is_above = low is None or value > low or (takes_low and value == low)
    is_below = high is None or value < high or (takes_high and value == high)
    step = schema.get("multipleOf")
    return is_above and is_below and (not step or value % step == 0)


# -- texts -----------------------------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _literal(text: str) -> str:
    """Return a text in Lark."""
    return json.dumps(text)


def _pattern(pattern: Any) -> str:
    """Return a regular expression in Lark."""
    return "/" + str(pattern).replace("/", r"\/").replace("\n", r"\n") + "/"


def _digits(number: int | float) -> str:
    text = str(number)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
