"""Grammars of calls as a family of models writes them: forced ones, and those of strict functions in a free text."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from crossdock.cluster.api.body.constraints import from_text
from crossdock.cluster.api.body.tool_calls import ForcedCall, arguments_schema
from crossdock.cluster.api.text.reasoning_grammar import answer_rule, json_rule
from crossdock.workers.schedule.request.submission import Grammar

# How a call is written: the marker that begins it, the text before the arguments, and the text after them. `{name}` and
# `{json}` stand for the function's name, bare and as JSON, and a NUL for a number.
_FORMS = {
    "hermes": ("<tool_call>", '\n{"name": {json}, "arguments": ', "}\n</tool_call>"),
    "kimi_k2": ("<|tool_call_begin|>", "functions.{name}:\0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "mistral": ("[TOOL_CALLS]", "{name}[ARGS]", ""),
    # Without a marker: only where the whole text is calls.
    "llama3_json": ("", '{"name": {json}, "parameters": ', "}"),
    "deepseek_v3": ("<｜tool▁call▁begin｜>", "{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "deepseek_v3_code": (
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
    ),
}

# The texts around all calls, and between two of them.
_AROUND = {
    "hermes": ("", "\n", ""),
    "kimi_k2": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    "llama3_json": ("", "; ", ""),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
    "deepseek_v3_code": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
}

# Calls whose parameters stand between tags: the texts that begin a call, that begin and end each value, that follow a
# value, and that end the call. Where `_HAS_LOOSE_LINES`, line breaks may be left out, as newer models do.
_TAGGED = {
    "qwen3_xml": (
        "<tool_call>\n<function={name}>\n",
        "<parameter={key}>\n",
        "\n</parameter>",
        "\n",
        "</function>\n</tool_call>",
    ),
    "glm": ("<tool_call>{name}\n", "<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>", "\n", "</tool_call>"),
}
_HAS_LOOSE_LINES = ("glm",)
GPT_OSS = "gpt_oss"
_NUMBER = "[0-9]{1,6}"  # of a call; without a bound, a model could write digits for ever
_PLAIN_NAME = re.compile(r"[\w.\-]+")
_OBJECT_WORDS = {"$defs", "$schema", "additionalProperties", "description", "properties", "required", "title", "type"}
_STRING_BOUNDS = {"format", "maxLength", "minLength", "pattern"}

_HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")  # of gpt-oss


def form_of(family: str | None, chat_template: str) -> str | None:
    """Return the form of a family's calls. DeepSeek's first models write arguments as a block of code."""
    return "deepseek_v3_code" if family == "deepseek_v3" and "```json" in chat_template else family


def strict_calls(
    family: str | None, tools: Sequence[Mapping[str, Any]], token_ids: Mapping[str, int]
) -> Grammar | None:
    """Return the grammar of texts with such calls; None where no function is strict or the family's form is not JSON.

    The arguments of functions that are not strict may be any object. `token_ids`: of tokens that a
    grammar has to name, by their texts.
    Raises ApiError for schemas that are too long.
    """
    functions = [tool["function"] for tool in tools]
    if family not in _FORMS or not any(function.get("strict") is True for function in functions):
        return None
    opener, before, after = _FORMS[family]
    if not opener or (family == "mistral" and "[ARGS]" not in token_ids):
        return None  # calls without a marker, or an older format
    if (token := token_ids.get(opener)) is not None:
        text = f"<[^{token}]>*"
        rules = [f"start: ({text} call)* {text}", f"call: <[{token}]> called"]
    else:
        rules = ["start: call* TEXT", "call: opener called", rf"opener[lazy]: /(.|\n)*{re.escape(opener)}/"]
        rules.append(r"TEXT: /(.|\n)*/")
    rules.append("called: " + " | ".join(f"called{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        is_strict = function.get("strict") is True
        name = str(function["name"])
        head = before.replace("{name}", name).replace("{json}", json.dumps(name))
        rules.append(f"called{i}: {_parts(head, token_ids)} arguments{i} {_parts(after, token_ids)}")
        schema = arguments_schema(function, f"tools[{i}].function") if is_strict else {"type": "object"}
        rules.append(f"arguments{i}: {json_rule(schema, is_closed=is_strict)}")
    return from_text("lark", "\n".join(rules), "tools")


def forced_calls(
    family: str | None, call: ForcedCall, token_ids: Mapping[str, int], *, is_single: bool
) -> tuple[Grammar, dict[str, str]] | None:
    """Return the grammar of one or more calls of the forced functions, and what stands before their arguments.

    The latter are patterns by the functions' names. None: the family's form is not known here.
    Raises ApiError for schemas that are too long.
    """
    if family not in _FORMS or (family == "mistral" and "[ARGS]" not in token_ids):
        return None
    opener, before, after = _FORMS[family]
    begin, between, end = _AROUND.get(family, ("", "", ""))
    more = "" if is_single else f"({_parts(between, token_ids, exact=True)} call)*"
    rules = [f"start: {_parts(begin, token_ids)} call {more} {_parts(end, token_ids)}"]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(call.parameters))))
    openings: dict[str, str] = {}
    for i, (name, schema) in enumerate(call.parameters.items()):
        head = opener + before.replace("{name}", name).replace("{json}", json.dumps(name))
        head_parts, tail_parts = (_parts(part, token_ids, exact=True) for part in (head, after))
        rules.append(f"call{i}: {head_parts} arguments{i} {tail_parts}")
        rules.append(f"arguments{i}: {json_rule(schema, is_closed=True)}")
        openings[name] = re.escape(head).replace(re.escape("\0"), _NUMBER)
    grammar = from_text("lark", "\n".join(rules), "tools")
    assert grammar is not None
    return grammar, openings


def calls_or_format(
    family: str | None,
    openers: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
    form: Grammar,
    token_ids: Mapping[str, int],
    *,
    is_single: bool,
) -> Grammar | None:
    """Return the grammar of answers that are calls or content in a format; None where no marker begins calls.

    `openers`: the markers that may begin a call. A family whose form is not JSON writes as it likes after one.
    Raises ApiError for schemas that are too long.
    """
    content = answer_rule(form)
    if content is None:
        return None
    functions = [tool["function"] for tool in tools]
    schemas = {
        str(function["name"]): arguments_schema(function, f"tools[{i}].function")
        if function.get("strict") is True
        else {"type": "object"}
        for i, function in enumerate(functions)
    }
    if family == "llama3_json":
        calls = _calls_beside_json(schemas, is_single=is_single)
    elif native := forced_calls(family, ForcedCall(schemas, is_named=False), token_ids, is_single=is_single):
        calls = native[0].source.replace("start:", "calls:", 1)
    elif family == GPT_OSS and token_ids.keys() >= set(_HARMONY):
        return _harmony_calls_or_format(content, token_ids)
    elif openers:
        calls = f"calls: ({' | '.join(_parts(mark, token_ids, exact=True) for mark in openers)}) <[*]>*"
    else:
        return None
    rules = ["start: calls | content", calls, content.replace("answer:", "content:", 1)]
    return from_text("lark", "\n".join(rules), "tools")


def _calls_beside_json(schemas: Mapping[str, Mapping[str, Any]], *, is_single: bool) -> str:
    """Return the rules of Llama's calls where the answer may also be other JSON.

    Each mark of JSON is a text of its own: llguidance takes the longest text that may come, and cannot go back to a
    shorter one.
    """
    more = "" if is_single else ' (";" " " call)*'
    rules = [f"calls: call{more}"]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(schemas))))
    for i, (name, schema) in enumerate(schemas.items()):
        parts = ["{", '"name"', ":", " ", json.dumps(name), ",", " ", '"parameters"', ":", " "]
        rules.append(f'call{i}: {" ".join(map(json.dumps, parts))} arguments{i} "}}"')
        rules.append(f"arguments{i}: {json_rule(schema, is_closed=True)}")
    return "\n".join(rules)


def _harmony_calls_or_format(content: str, token_ids: Mapping[str, int]) -> Grammar | None:
    channel, message, end, start = (f"<[{token_ids[mark]}]>" for mark in _HARMONY[:4])
    rules = [
        "start: analysis? (call | final)",
        f'analysis: {channel} "analysis" {message} /(.|\\n)*/ {end} {start} "assistant"',
        f'call: ({channel} "commentary" | " to=functions.") <[*]>*',
        f'final: {channel} "final" {message} content',
        content.replace("answer:", "content:", 1),
    ]
    return from_text("lark", "\n".join(rules), "tools")


def tagged_calls(
    family: str | None, call: ForcedCall, token_ids: Mapping[str, int], *, is_single: bool
) -> Grammar | None:
    """Return the grammar of one or more forced calls in a family's tags.

    None: the family has no tags, or tags cannot express a schema, such as a union or a bound of a text.
    Raises ApiError for schemas that are too long.
    """
    if family not in _TAGGED:
        return None
    begin, before, closer, after, end = _TAGGED[family]
    exact = family not in _HAS_LOOSE_LINES
    close = _parts(closer, token_ids, exact=True)
    ends_text = re.escape(closer).replace("/", r"\/").replace("\\\n", r"\n")
    rules = ["start: call" + ("" if is_single else f" ({_parts(chr(10), token_ids, exact=True)} call)*")]
    rules.append("call: " + " | ".join(f"call{i}" for i in range(len(call.parameters))))
    is_token = closer in token_ids  # which no free text contains
    rules.append(f"text: free {close}\nfree: /(.|\\n)*/" if is_token else f"text[lazy]: /(.|\\n)*{ends_text}/")
    for i, (name, schema) in enumerate(call.parameters.items()):
        values = _tagged_values(schema)
        if values is None or _PLAIN_NAME.fullmatch(name) is None:
            return None
        parts = [_parts(begin.replace("{name}", name), token_ids, exact=exact)]
        for j, (key, value, is_required) in enumerate(values):
            rule = "text" if value == "text" else f"({value}) {close}"
            if value.startswith("%json"):
                rules.append(f"value{i}_{j}: {value}")
                rule = f"value{i}_{j} {close}"
            head, tail = (_parts(part, token_ids, exact=exact) for part in (before.replace("{key}", key), after))
            parts.append(f"({head} {rule} {tail})" + "?" * (not is_required))
        rules.append(f"call{i}: {' '.join(parts)} {_parts(end, token_ids, exact=exact)}")
    return from_text("lark", "\n".join(rules), "tools")


def _tagged_values(schema: Mapping[str, Any]) -> list[tuple[str, str, bool]] | None:
    """Return each parameter's key, the grammar of its value, and whether it is required; None: tags cannot say it.

    `text` is the grammar of any text.
    """
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    is_plain = schema.keys() <= _OBJECT_WORDS and schema.get("type", "object") == "object"
    has_known_names = isinstance(properties, dict) and isinstance(required, list | tuple)
    if not is_plain or not has_known_names or not all(isinstance(key, str) and key in properties for key in required):
        return None
    found = []
    for key, given in properties.items():
        value = _tagged_value(given, schema.get("$defs", {})) if _PLAIN_NAME.fullmatch(key) else None
        if value is None:
            return None
        found.append((key, value, key in required))
    return found


def _tagged_value(schema: Any, shared: Mapping[str, Any]) -> str | None:
    """Return the grammar of one value, without the quotes of a text; None: tags cannot say it."""
    if not isinstance(schema, dict) or "$ref" in schema or not isinstance(schema.get("type"), str):
        return None
    if schema["type"] != "string":
        return json_rule({**schema, **({"$defs": shared} if shared else {})}, is_closed=True)
    if "enum" in schema:
        texts = schema["enum"]
        is_list = isinstance(texts, list) and len(texts) > 0
        is_safe = is_list and all(isinstance(text, str) and re.search(r"[<\n]", text) is None for text in texts)
        return " | ".join(map(json.dumps, texts)) if is_safe else None
    return None if schema.keys() & (_STRING_BOUNDS | {"const"}) else "text"


def harmony_call(call: ForcedCall, token_ids: Mapping[str, int]) -> Grammar | None:
    """Return the grammar of one forced call of gpt-oss, after reasoning or without; None: it cannot be written so.

    The prompt ends with `<|start|>assistant`. Raises ApiError for schemas that are too long.
    """
    has_names = all(re.fullmatch(r"[\w.\-]+", name) for name in call.parameters)
    if not has_names or not token_ids.keys() >= set(_HARMONY):
        return None
    channel, message, end, start, constrain, last = (f"<[{token_ids[mark]}]>" for mark in _HARMONY)
    rules = [
        "start: analysis? call",
        f'analysis: {channel} "analysis" {message} /(.|\\n)*/ {end} {start} "assistant"',
        "call: " + " | ".join(f"call{i}" for i in range(len(call.parameters))),
    ]
    for i, (name, schema) in enumerate(call.parameters.items()):
        recipient = json.dumps(f"commentary to=functions.{name} ")
        rules.append(f'call{i}: {channel} {recipient} {constrain} "json" {message} arguments{i} {last}')
        rules.append(f"arguments{i}: {json_rule(schema, is_closed=True)}")
    return from_text("lark", "\n".join(rules), "tools")


def _parts(text: str, token_ids: Mapping[str, int], *, exact: bool = False) -> str:
    """Return a text in Lark, in which a NUL is a number. Unless it is exact, a line break may be left out."""
    known = sorted((mark for mark in token_ids if mark in text), key=len, reverse=True)
    pattern = "|".join([*map(re.escape, known), "\n", "\0"])
    parts = re.split(f"({pattern})", text)
    named = {
        "\n": r'"\n"' if exact else r"/\n?/",
        "\0": f"/{_NUMBER}/",
        **{mark: f"<[{token_ids[mark]}]>" for mark in known},
    }
    return " ".join(named.get(part, json.dumps(part)) for part in parts if part)
