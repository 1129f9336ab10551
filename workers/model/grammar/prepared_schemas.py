"""JSON schemas as llguidance should read them: closed, and without words that bind no text.

A closed schema allows no property but the declared ones, unless it asks for more: by `additionalProperties`, by
`patternProperties`, or as an object about whose properties it says nothing. JSON schema itself leaves objects open,
and a small model would then write on until its limit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from crossdock.workers.model.grammar.local_references import resolved

_Schema: TypeAlias = Any  # an object or a boolean; anything else is malformed, and left to llguidance

BRANCHES = ("anyOf", "oneOf")  # one of their schemas holds, or several
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of names to schemas
_LISTS = ("prefixItems",)
_PARTS = ("items", "additionalItems", "additionalProperties")
_DECLARING = ("properties", "required", "patternProperties")
_MOST_NAMES = 1 << 17  # looked at for all parts of a schema together; about 10 ms
_MOST_LENGTH = (1 << 31) - 1  # no text here is longer; llguidance takes no larger bound of every kind
_LONGEST = ("maxLength", "maxItems", "maxProperties")
_SHORTEST = ("minLength", "minItems", "minProperties")
_FORMATS = {  # formats that llguidance holds texts to; by JSON schema, a format is an annotation
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"),
}


def prepared(schema: _Schema, *, is_closed: bool) -> _Schema:
    """Return a schema without unknown formats and lengths beyond every text; `is_closed`: it is closed, too.

    Raises ValueError for a text or list that would have to be longer than any, and for schemas that close slowly.
    """
    if not isinstance(schema, Mapping):
        return schema
    return _Preparation(schema, is_closed).whole()


class _Preparation:
    """The work on one schema."""

    def __init__(self, root: Mapping[str, Any], is_closed: bool) -> None:
        self._root = root
        self._is_closed = is_closed
        self._variants: dict[
            tuple[str, frozenset[str], bool], str
        ] = {}  # names of closed copies of what is referred to
        self._added: dict[str, Any] = {}  # these copies
        self._num_names = 0

    def whole(self) -> _Schema:
        schema = self._alone(self._root)
        if self._added:
            schema["$defs"] = {**schema.get("$defs", {}), **self._added}
        return schema

    def _alone(self, schema: _Schema) -> _Schema:
        """Return a schema that no other schema about the same value stands beside."""
        return self._beside(schema, frozenset(), False)

    def _beside(self, schema: _Schema, names: frozenset[str], is_open: bool) -> _Schema:
        """Return a schema as a part of one whose other parts declare `names`, and may ask for more: `is_open`."""
        if not isinstance(schema, Mapping):
            return schema
        result = {key: self._below(key, value) for key, value in schema.items()}
        self._drop_words(result)
        if not self._is_closed:
            for key in ("allOf", *BRANCHES):
                if key in result:
                    result[key] = self._each(schema[key], [(frozenset(), False)] * _length(schema[key]))
            return result
        if "$ref" in schema and not any(key in schema for key in ("allOf", *BRANCHES, *_DECLARING)):
            result["$ref"] = self._reference(schema["$ref"], names, is_open)
            return result
        parts = list(self._parts(schema))
        declared = [self._declared(part) for part in parts]
        asked = [self._asks(part) for part in parts]
        beside = []
        for i in range(len(parts)):
            others = names.union(*declared[:i], *declared[i + 1 :])
            self._count(len(others))
            beside.append((others, is_open or any(asked[:i]) or any(asked[i + 1 :])))
        self._close(result, *beside[0])
        at = 1
        for key in ("allOf", *BRANCHES):
            if key == "allOf":
                length = _length(schema.get(key))
                if length:
                    result[key] = self._each(schema[key], beside[at : at + length])
                at += length
            elif _length(schema.get(key)):
                result[key] = self._each(schema[key], [beside[at]] * _length(schema[key]))
                at += 1
        if "$ref" in schema and at < len(beside):
            result["$ref"] = self._reference(schema["$ref"], *beside[at])
        return result

    def _each(self, schemas: Any, beside: Sequence[tuple[frozenset[str], bool]]) -> Any:
        if not isinstance(schemas, list):
            return schemas
        return [self._beside(one, *around) for one, around in zip(schemas, beside, strict=True)]

    def _below(self, key: str, value: Any) -> Any:
        """Return the value of a keyword, with the schemas in it prepared that are about other values."""
        if key in _MAPS and isinstance(value, Mapping):
            return {name: self._alone(one) for name, one in value.items()}
        if (key in _LISTS or key == "items") and isinstance(value, list):
            return [self._alone(one) for one in value]
        return self._alone(value) if key in _PARTS else value

    def _drop_words(self, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
            del schema["format"]
        for key in _LONGEST:
            if _is_long(schema.get(key)):
                del schema[key]
        for key in _SHORTEST:
            if _is_long(schema.get(key)):
                raise ValueError(f"{key}: {schema[key]} is more than any output has")

    def _close(self, schema: dict[str, Any], names: frozenset[str], is_open: bool) -> None:
        """Close a schema itself, without its parts."""
        properties = schema.get("properties", {})
        keeps_out = schema.get("unevaluatedProperties") is False
        if isinstance(schema.get("unevaluatedProperties"), bool):  # llguidance need not know this word
            is_open = schema.pop("unevaluatedProperties") or is_open
        is_declaring = keeps_out or any(key in schema for key in _DECLARING)
        if not is_declaring or is_open or "additionalProperties" in schema or not isinstance(properties, Mapping):
            return
        if "properties" not in schema and names and not keeps_out:
            return  # a part that declares properties is closed
        own = _own_names(schema)
        least = schema.get("minProperties", 0)
        if isinstance(least, int) and least > len(own | names) and "patternProperties" not in schema:
            return
        more = dict.fromkeys(sorted((own | names) - properties.keys()), True)
        self._count(len(more))
        schema["properties"] = {**properties, **more}
        schema["additionalProperties"] = False

    def _reference(self, pointer: Any, names: frozenset[str], is_open: bool) -> Any:
        """Return a reference to a schema as a part beside which others stand: to a copy that is closed with these."""
        target = resolved(self._root, pointer)
        if not isinstance(target, Mapping) or not (names or is_open):
            return pointer
        key = (pointer, names, is_open)
        if key not in self._variants:
            self._variants[key] = name = f"x-closed-{len(self._variants)}"
            self._added[name] = self._beside(target, names, is_open)
        return f"#/$defs/{self._variants[key]}"

    # -- what a schema says about the names of properties, all of its parts together ---------------------------------

    def _parts(self, schema: Mapping[str, Any]) -> Iterator[list[_Schema]]:
        """Yield the parts of a schema that hold at once, each as its alternatives: first the schema itself."""
        applied = ("allOf", *BRANCHES, "$ref")
        yield [{key: value for key, value in schema.items() if key not in applied}]
        for part in schema["allOf"] if _length(schema.get("allOf")) else ():
            yield [part]
        for key in BRANCHES:
            if _length(schema.get(key)):
                yield list(schema[key])
        if "$ref" in schema:
            yield [{"$ref": schema["$ref"]}]

    def _members(self, schemas: Sequence[_Schema]) -> Iterator[Mapping[str, Any]]:
        """Yield schemas and all their parts, what they refer to included, each once."""
        seen: set[int] = set()
        waiting = list(schemas)
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            self._count(1)
            yield schema
            for key in ("allOf", *BRANCHES):
                waiting += schema[key] if _length(schema.get(key)) else []
            if "$ref" in schema:
                waiting.append(resolved(self._root, schema["$ref"]))

    def _declared(self, alternatives: Sequence[_Schema]) -> frozenset[str]:
        return frozenset().union(*(_own_names(schema) for schema in self._members(alternatives)))

    def _asks(self, alternatives: Sequence[_Schema]) -> bool:
        return any(_asks_for_more(schema) for schema in self._members(alternatives))

    def _count(self, names: int) -> None:
        self._num_names += names
        if self._num_names > _MOST_NAMES:
            raise ValueError("allOf, anyOf, oneOf and $ref combine too many properties; write additionalProperties")


def _own_names(schema: Mapping[str, Any]) -> frozenset[str]:
    properties = schema.get("properties")
    required = schema.get("required")
    names = [*properties] if isinstance(properties, Mapping) else []
    names += [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return frozenset(names)


def _asks_for_more(schema: Mapping[str, Any]) -> bool:
    asks = any(schema.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties"))
    return asks or bool(schema.get("patternProperties"))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


def _is_long(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > _MOST_LENGTH
