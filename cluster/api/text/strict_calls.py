"""Make arguments obey their schema where no call is forced: a grammar holds from the marker of a call to its end."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from crossdock.cluster.api.body.constraints import from_text
from crossdock.cluster.api.text.reasoning_grammar import json_rule
from crossdock.workers.schedule.request import Grammar

# How a call is written: the marker that begins it, the text before the arguments, and the text after them. `{name}` and
# `{json}` stand for the function's name, bare and as JSON.
_FORMS = {
    "hermes": ("<tool_call>", '\n{"name": {json}, "arguments": ', "}\n</tool_call>"),
    "kimi_k2": ("<|tool_call_begin|>", "functions.{name}:#<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "mistral": ("[TOOL_CALLS]", "{name}[ARGS]", ""),
}


def strict_calls(
    family: str | None, tools: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, int]
) -> Grammar | None:
    """Return the grammar of texts with such calls; None where no function is strict or the family's form is not JSON.

    The arguments of functions that are not strict may be any object. `special_tokens`: ids by their texts.
    Raises ApiError for schemas that are too long.
    """
    functions = [tool["function"] for tool in tools]
    if family not in _FORMS or not any(function.get("strict") is True for function in functions):
        return None
    opener, before, after = _FORMS[family]
    if family == "mistral" and "[ARGS]" not in special_tokens:
        return None  # an older format
    if (token := special_tokens.get(opener)) is not None:
        text = f"<[^{token}]>*"
        rules = [f"start: ({text} call)* {text}", f"call: <[{token}]> called"]
    else:
        rules = ["start: call* TEXT", "call: opener called", rf"opener[lazy]: /(.|\n)*{re.escape(opener)}/"]
        rules.append(r"TEXT: /(.|\n)*/")
    rules.append("called: " + " | ".join(f"called{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        schema = function.get("parameters") if function.get("strict") is True else None
        name = str(function["name"])
        head = before.replace("{name}", name).replace("{json}", json.dumps(name))
        rules.append(f"called{i}: {_parts(head, special_tokens)} arguments{i} {_parts(after, special_tokens)}")
        rules.append(f"arguments{i}: {json_rule(schema if isinstance(schema, dict) else {'type': 'object'})}")
    return from_text("lark", "\n".join(rules), "tools")


def _parts(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return a text in Lark. A line break may be left out, and `#` is a number."""
    known = sorted((mark for mark in special_tokens if mark in text), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, known), "\n", "#"])
    parts = re.split(f"({pattern})", text)
    named = {"\n": r"/\n?/", "#": "/[0-9]+/", **{mark: f"<[{special_tokens[mark]}]>" for mark in known}}
    return " ".join(named.get(part, json.dumps(part)) for part in parts if part)
