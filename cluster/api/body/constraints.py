"""Structured output: each way in which a request may constrain its output, as a grammar."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from crossdock.cluster.api.body.other_fields import check_other_fields
from crossdock.cluster.api.bounds import GRAMMAR_CHARS, GUIDED_CHOICES
from crossdock.cluster.api.errors import ApiError, check_count, wrong
from crossdock.workers.schedule.request.submission import Grammar

STRUCTURED_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]{1,100}[ \t]*::=", re.MULTILINE)
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def response_format(value: Mapping[str, Any] | None) -> Grammar | None:
    """Return the grammar of OpenAI's `response_format`; None where any text will do."""
    if value is None:
        return None
    check_other_fields(value, ("type", "json_schema"), "response_format.")
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = None
        if isinstance(holder, dict):
            check_other_fields(holder, _SCHEMA_FIELDS, "response_format.json_schema.")
            schema = holder.get("schema")
        if not isinstance(schema, dict):
            param = "response_format.json_schema.schema"
            raise ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
        return from_text("json_schema", json.dumps(schema), "response_format.json_schema.schema")
    raise wrong("response_format.type", "it must be 'text', 'json_object' or 'json_schema'")


def json_schema(schema: str | Mapping[str, Any] | bool | None, param: str) -> Grammar | None:
    """Return the grammar of a JSON schema, which may itself be written as JSON."""
    if schema is None:
        return None
    if isinstance(schema, str):
        from_text("json_schema", schema, param)
        try:
            schema = from_json(schema, allow_inf_nan=False)  # refuses deep nesting, where json.loads would not return
        except ValueError as error:
            raise ApiError(f"'{param}' is not valid JSON: {error}.", param=param, code="invalid_value") from None
    if not isinstance(schema, dict | bool):
        raise ApiError(f"'{param}' must be a JSON schema.", param=param, code="invalid_value")
    return from_text("json_schema", json.dumps(schema), param)


def from_text(kind: str, source: str | None, param: str) -> Grammar | None:
    """Return the grammar whose text is `source`. Raises ApiError for a text that is too long."""
    if source is None:
        return None
    check_count(param, len(source), GRAMMAR_CHARS)
    return Grammar(kind, source)


def lark(source: str | None, param: str) -> Grammar | None:
    """Return the grammar of rules in Lark's form. Raises ApiError for GBNF, which other servers accept."""
    if source is not None and _GBNF_RULE.search(source):
        raise wrong(param, "rules are written as in Lark, 'start: \"yes\" | \"no\"', not as in GBNF, 'root ::= …'")
    return from_text("lark", source, param)


def choice(texts: Any, param: str) -> Grammar | None:
    """Return the grammar that allows any one of `texts`."""
    if texts is None:
        return None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        reason = f"'{param}' must be a list of one or more strings, and none of them empty."
        raise ApiError(reason, param=param, code="invalid_value")
    check_count(param, len(texts), GUIDED_CHOICES, "entries")
    return from_text("choice", json.dumps(texts), param)


def structured_outputs(value: Mapping[str, Any] | None) -> list[tuple[str, Grammar]]:
    """Return the grammars of vLLM's `structured_outputs`, each with its field: json, regex, choice, grammar or
    json_object.
    """
    check_other_fields(value or {}, STRUCTURED_OUTPUTS, "structured_outputs.")
    given = {name: part for name, part in (value or {}).items() if part is not None and part is not False}
    for name in ("regex", "grammar"):
        if name in given and not isinstance(given[name], str):
            param = f"structured_outputs.{name}"
            raise ApiError(f"'{param}' must be a string.", param=param, code="invalid_value")
    grammars = {
        "json": json_schema(given.get("json"), "structured_outputs.json"),
        "regex": from_text("regex", given.get("regex"), "structured_outputs.regex"),
        "choice": choice(given.get("choice"), "structured_outputs.choice"),
        "grammar": lark(given.get("grammar"), "structured_outputs.grammar"),
        "json_object": Grammar("json_object") if given.get("json_object") else None,
    }
    return [(f"structured_outputs.{name}", grammar) for name, grammar in grammars.items() if grammar is not None]
