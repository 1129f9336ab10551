"""JSON schemas hold as they are written: numbers of any length are exact, and undeclared properties do not appear."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoTokenizer

from crossdock.workers.model.grammar.matcher import new_matcher, to_llguidance
from crossdock.workers.model.grammar.vetting import follow
from crossdock.workers.schedule.request.submission import CLOSED, Grammar, InvalidField

BYTES = LLTokenizer("byte")
LARGE = 175_928_847_299_117_063  # between two floats of 64 bits
INTEGERS = st.integers(-(10**30), 10**30) | st.integers(-(2**65), 2**65) | st.integers(-(2**54), 2**54)


def accepts(schema: Any, *texts: str, kind: str = "json_schema") -> list[bool]:
    """Return whether each text is an answer under a schema, or under a grammar of another kind."""
    source = schema if kind == "lark" else json.dumps(schema)
    compiled = to_llguidance(Grammar(kind, source))
    found = []
    for text in texts:
        matcher = LLMatcher(BYTES, compiled, log_level=0)
        assert not matcher.get_error(), matcher.get_error()
        token_ids = [*text.encode()]
        found.append(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())
    return found


def near(number: int) -> set[int]:
    """Return integers beside a number, among them the one that a float of 64 bits would make of it."""
    return {number - 1, number, number + 1, int(float(number)), number * 10, number // 10, -number, 0}


def is_valid(value: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


HOLDERS: dict[str, Any] = {  # where a schema may hold numbers: of a schema, and of a value under it
    "alone": (lambda schema: schema, lambda value: value),
    "property": (
        lambda schema: {
            "type": "object",
            "properties": {"first": {"type": "string"}, "id": schema, "last": {"type": "boolean"}},
            "required": ["id"],
        },
        lambda value: {"first": "x", "id": value},
    ),
    "item": (lambda schema: {"type": "array", "items": schema, "maxItems": 2}, lambda value: [value, value]),
    "first item": (
        lambda schema: {"type": "array", "prefixItems": [{"type": "null"}, schema], "minItems": 2},
        lambda value: [None, value, "more"],
    ),
    "value of any name": (
        lambda schema: {"type": "object", "additionalProperties": schema},
        lambda value: {"a": value},
    ),
    "value of any other name": (
        lambda schema: {"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": schema},
        lambda value: {"b": None, "a": value},
    ),
    "union": (lambda schema: {"anyOf": [{"type": "string"}, schema]}, lambda value: value),
    "one of": (lambda schema: {"oneOf": [{"type": "string"}, {**schema, "type": "integer"}]}, lambda value: value),
    "reference": (
        lambda schema: {
            "$defs": {"id": schema},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/id"}, "b": {"$ref": "#/$defs/id"}},
        },
        lambda value: {"a": value, "b": value},
    ),
}


def check(schema: dict[str, Any], values: set[int], holder: str) -> None:
    """Check that exactly the values which a validator with exact integers takes can be generated."""
    held, value_of = HOLDERS[holder]
    whole = held(schema)
    found = accepts(whole, *(json.dumps(value_of(value)) for value in values))
    assert found == [is_valid(value_of(value), whole) for value in values], (whole, values)


@pytest.mark.parametrize("holder", HOLDERS)
@settings(max_examples=12, deadline=None)
@given(st.lists(INTEGERS, min_size=1, max_size=3), st.booleans())
def test_listed_integers_are_generated_as_they_are(holder: str, listed: list[int], is_const: bool) -> None:
    schema = {"const": listed[0]} if is_const else {"enum": listed}
    check(schema, set().union(*map(near, listed)), holder)


@pytest.mark.parametrize("holder", HOLDERS)
@settings(max_examples=12, deadline=None)
@given(st.tuples(INTEGERS, INTEGERS), st.sampled_from(["both", "low", "high"]), st.booleans(), st.booleans())
def test_bounds_of_integers_are_exact(
    holder: str, bounds: tuple[int, int], which: str, takes_low: bool, takes_high: bool
) -> None:
    low, high = min(bounds), max(bounds) + 3
    schema: dict[str, Any] = {"type": "integer"}
    if which != "high":
        schema["minimum" if takes_low else "exclusiveMinimum"] = low
    if which != "low":
        schema["maximum" if takes_high else "exclusiveMaximum"] = high
    check(schema, near(low) | near(high), holder)


@settings(max_examples=40, deadline=None)
@given(st.tuples(INTEGERS, INTEGERS), st.booleans(), st.booleans())
def test_bounds_of_numbers_are_exact(bounds: tuple[int, int], takes_low: bool, takes_high: bool) -> None:
    low, high = min(bounds), max(bounds) + 3
    names = "minimum" if takes_low else "exclusiveMinimum", "maximum" if takes_high else "exclusiveMaximum"
    schema = {"type": "number", names[0]: low, names[1]: high}
    values = near(low) | near(high)
    assert accepts(schema, *map(str, values)) == [is_valid(value, schema) for value in values]


def test_integers_in_listed_lists_and_objects_are_generated_as_they_are() -> None:
    schema = {"enum": [{"a": [LARGE, 'é"', 1.5], "b": {}}, [LARGE + 1], "x", 7, None]}
    texts = [json.dumps(value, ensure_ascii=False) for value in schema["enum"]]
    wrong = [text.replace(str(LARGE)[:-1], str(LARGE - 10)[:-1]) for text in texts[:2]]
    assert accepts(schema, *texts, *wrong, "8") == [True] * 5 + [False] * 3


@pytest.mark.parametrize("name", ["integer", "number"])
def test_bounds_of_signed_and_unsigned_integers_of_64_bits_hold(name: str) -> None:
    for low, high in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(2**53) + 1, 2**53 - 1)):
        schema = {"type": name, "format": "int64", "minimum": low, "maximum": high}
        assert accepts(schema, *map(str, (low, high, low - 1, high + 1))) == [True, True, False, False]


def test_reference_to_itself_beside_large_numbers_is_followed() -> None:
    node = {"type": "object", "properties": {"id": {"const": LARGE}, "next": {"$ref": "#/$defs/node"}}}
    text = json.dumps({"id": LARGE, "next": {"id": LARGE, "next": {"id": LARGE}}})
    schema = {"$defs": {"node": node}, "$ref": "#/$defs/node"}
    assert accepts(schema, text, text.replace("63}", "56}", 1)) == [True, False]


def test_large_numbers_within_a_grammar_in_lark_are_exact() -> None:
    """Texts, patterns and comments that look like a schema stay what they are."""
    schema = json.dumps({"const": LARGE})
    source = f'start: "id " %json {schema} // %json {schema}\n  | {json.dumps(f"%json {schema}")} /%json/'
    texts = (f"id {LARGE}", f"%json {schema}%json", f"id {int(float(LARGE))}")
    assert accepts(source, *texts, kind="lark") == [True, True, False]


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "integer", "multipleOf": LARGE}, f"multipleOf: {LARGE}"),
        ({"type": "integer", "multipleOf": 3, "minimum": LARGE}, f"minimum: {LARGE}.*multipleOf"),
        ({"type": "number", "minimum": 0.5, "maximum": LARGE}, f"maximum: {LARGE}.*fraction"),
        ({"allOf": [{"type": "integer"}, {"minimum": LARGE}]}, f"minimum: {LARGE}.*allOf"),
        ({"type": "array", "uniqueItems": True, "items": {"const": LARGE}}, f"const: {LARGE}.*uniqueItems"),
        ({"enum": [LARGE], "maximum": 5}, "enum.*none of its values"),
        ({"type": "integer", "minimum": LARGE, "maximum": LARGE - 1}, "no integer"),
        ({"type": "string", "minLength": 10**29}, "minLength: 1000"),
    ],
)
def test_number_that_cannot_be_held_is_refused_with_its_keyword(schema: dict[str, Any], named: str) -> None:
    for grammar in (
        Grammar("json_schema", json.dumps(schema)),
        Grammar("lark", f"start: %json {json.dumps({**schema, CLOSED: True})}"),
    ):
        with pytest.raises(InvalidField, match=named):
            new_matcher(BYTES, grammar)


def test_lengths_beyond_any_text_are_no_bound() -> None:
    for key, text in (("maxLength", '"a"'), ("maxItems", "[1]"), ("maxProperties", '{"a":1}')):
        kind = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}[key]
        for length in (2**32, 2**63 - 1, 10**29):
            assert accepts({"type": kind, key: length}, text) == [True]


# -- undeclared properties -------------------------------------------------------------------------------------------

A, B = {"a": {"type": "integer"}}, {"b": {"type": "integer"}}
OBJECT: dict[str, Any] = {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**OBJECT, "properties": A}, ['{"a":1}', "{}"], ['{"a":1,"b":2}', '{"b":2}']),
        ({"properties": A}, ['{"a":1}', "[]"], ['{"b":2}']),
        ({**OBJECT, "properties": {}}, ["{}"], ['{"a":1}']),
        ({**OBJECT, "required": ["a"]}, ['{"a":[]}'], ['{"a":1,"b":1}', "{}"]),
        ({"type": ["object", "null"], "properties": A}, ['{"a":1}', "null"], ['{"b":2}']),
        ({**OBJECT, "properties": {"o": {**OBJECT, "properties": A}}}, ['{"o":{"a":1}}'], ['{"o":{"b":1}}']),
        ({"items": {**OBJECT, "properties": A}, "type": "array"}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({"prefixItems": [{**OBJECT, "properties": A}]}, ['[{"a":1}]'], ['[{"b":1}]']),
        ({**OBJECT, "properties": A, "patternProperties": {"^x": {}}}, ['{"a":1,"x":2}', '{"xy":1}'], ['{"b":1}']),
        ({**OBJECT, "additionalProperties": {"properties": A, **OBJECT}}, ['{"z":{"a":1}}'], ['{"z":{"b":1}}']),
        # A schema that asks for more, or says nothing about properties, stays open.
        ({**OBJECT, "properties": A, "additionalProperties": True}, ['{"a":1,"b":2}'], []),
        ({**OBJECT, "properties": A, "additionalProperties": {"type": "string"}}, ['{"b":"2"}'], ['{"b":2}']),
        ({**OBJECT, "properties": A, "unevaluatedProperties": True}, ['{"a":1,"b":2}'], []),
        (OBJECT, ['{"b":2}'], []),
        ({**OBJECT, "properties": {"o": OBJECT}}, ['{"o":{"any":[1]}}'], ['{"any":1}']),
        ({**OBJECT, "properties": {}, "minProperties": 1}, ['{"b":2}'], ["{}"]),
        ({}, ['{"b":2}', "1"], []),
        # Composed schemas are closed as a whole.
        ({"allOf": [{**OBJECT, "properties": A}, {"properties": B}]}, ['{"a":1,"b":2}', "{}"], ['{"c":1}']),
        ({**OBJECT, "properties": A, "allOf": [{"properties": B}]}, ['{"a":1,"b":2}'], ['{"a":1,"c":1}']),
        ({**OBJECT, "properties": A, "allOf": [{"required": ["a"]}]}, ['{"a":1}'], ["{}", '{"a":1,"c":1}']),
        ({"allOf": [{**OBJECT, "properties": A, "additionalProperties": True}, {"properties": B}]}, ['{"c":1}'], []),
        (
            {"allOf": [{**OBJECT, "properties": A, "unevaluatedProperties": False}, {"properties": B}]},
            ['{"a":1}'],
            ['{"c":1}'],
        ),
        (
            {**OBJECT, "properties": A, "anyOf": [{"properties": B, "required": ["b"]}, {"required": ["a"]}]},
            ['{"a":1,"b":2}', '{"a":1}'],
            ['{"a":1,"c":1}', "{}"],
        ),
        (
            {"anyOf": [{**OBJECT, "properties": A}, {**OBJECT, "additionalProperties": {"type": "null"}}]},
            ['{"a":1}', '{"z":null}'],
            ['{"z":1}', '{"a":1,"z":null}'],
        ),
        (
            {"$defs": {"A": {**OBJECT, "properties": A}}, "$ref": "#/$defs/A", "properties": B},
            ['{"a":1,"b":2}'],
            ['{"c":1}'],
        ),
        (
            {
                "$defs": {"A": {**OBJECT, "properties": {**A, "next": {"$ref": "#/$defs/A"}}}},
                **OBJECT,
                "properties": {
                    "both": {"allOf": [{"$ref": "#/$defs/A"}, {"properties": B}]},
                    "A": {"$ref": "#/$defs/A"},
                },
            },
            ['{"both":{"a":1,"next":{"a":2},"b":2},"A":{"a":1}}'],
            ['{"both":{"next":{"b":2}}}', '{"both":{"c":1}}', '{"A":{"b":1}}'],
        ),
        (
            {
                "oneOf": [
                    {**OBJECT, "properties": {"kind": {"const": kind}, **more}, "required": ["kind"]}
                    for kind, more in (("x", A), ("y", B))
                ]
            },
            ['{"kind":"x","a":1}', '{"kind":"y","b":1}'],
            ['{"kind":"x","b":1}', '{"kind":"y","c":1}'],
        ),
    ],
)
def test_only_properties_that_the_schema_declares_or_asks_for_are_generated(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in (*good, *bad) if accepts(schema, text) == [True]] == good
    marked = f"start: %json {json.dumps({**schema, CLOSED: True})}"
    assert [text for text in (*good, *bad) if accepts(marked, text, kind="lark") == [True]] == good
    assert all(is_valid(json.loads(text), schema) for text in good), "closing only narrows"


def test_schema_in_a_clients_own_grammar_stays_open() -> None:
    source = f"start: %json {json.dumps({**OBJECT, 'properties': A})}"
    assert accepts(source, '{"a":1,"b":2}', kind="lark") == [True]


@pytest.mark.parametrize("name", ["path", "binary", "password", "uri-reference", "own:kind"])
def test_unknown_format_of_a_text_binds_nothing(name: str) -> None:
    schema = {**OBJECT, "properties": {"a": {"type": "string", "format": name, "maxLength": 4}}}
    assert accepts(schema, '{"a":"x y"}', '{"a":"too long"}') == [True, False]
    assert accepts({"type": "string", "format": "date"}, '"2026-11-28"', '"today"') == [True, False]


def test_text_with_a_special_token_is_refused_in_words(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    engines = LLTokenizer(tokenizer.backend_tokenizer.to_str(), eos_token=[tokenizer.eos_token_id])
    for grammar in (
        Grammar("choice", '["a<|im_start|>b"]'),
        Grammar("json_schema", '{"const": "<|im_start|>"}'),
        Grammar("lark", 'start: "a<|im_start|>b"'),
    ):
        with pytest.raises(InvalidField, match="letters of a special token"):
            follow(new_matcher(engines, grammar), engines, grammar)


def test_schema_that_would_close_slowly_is_refused() -> None:
    parts = [{"properties": {f"p{i}": {}}} for i in range(2000)]
    with pytest.raises(InvalidField, match="additionalProperties"):
        new_matcher(BYTES, Grammar("json_schema", json.dumps({"allOf": parts})))
