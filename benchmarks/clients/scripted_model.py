"""A model without weights for other people's clients: reasoning, calls and answers that the conversation decides.

It writes as Qwen3 does (`<think>`, `<tool_call>`). A user's message that names cities gets one call for each, results
of tools get an answer that repeats them, and all else gets a story. Text that a grammar would not allow is an error.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Grammar, Submission
from tests.cluster.api.scripted_api import ScriptedDispatcher
from tests.cluster.small_tokenizers import byte_level

CONTEXT = 1_000_000  # tokens: the small vocabulary makes agents' prompts long
CITIES = ("Paris", "Rome")
STORY = "The quick brown fox 🙂 jumps over the lazy dog"
THOUGHT = "The user wants an answer."
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\nCall them in <tool_call>.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ScriptedModel(ScriptedDispatcher):
    """A dispatcher that answers by the text of the prompt."""

    def __init__(self) -> None:
        self._hf: PreTrainedTokenizerFast = byte_level()
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        self._hf.add_tokens([AddedToken(mark, special=False) for mark in marks])
        self._hf.chat_template = TEMPLATE
        super().__init__(ModelTokenizer(self._hf), CONTEXT)
        self._grammar_tokens = from_tokenizer(self._hf)
        self.script = self._play

    def _play(self, submission: Submission) -> Iterable[TokenDelta | Exception | float]:
        prompt = self._hf.decode(submission.prompt_token_ids, skip_special_tokens=False)
        if submission.sampling.pooling is not None:
            yield _embedding(submission)
            return
        grammar = submission.sampling.grammar
        words = answer(prompt, grammar)
        ids = self.tokenizer.encode(words)
        if grammar is not None and (reason := self._why_impossible(grammar, ids)):
            yield RuntimeError(f"the grammar {grammar} does not allow {words!r}: {reason}")
            return
        yield from self._deltas(submission, words)

    def _deltas(self, submission: Submission, words: str) -> Iterable[TokenDelta | Exception | float]:
        for delta in self.story(submission, words):
            yield delta
            yield 0.001  # as a model does, so that deltas come apart

    def _why_impossible(self, grammar: Grammar, ids: list[int]) -> str:
        """Return why a model under this grammar could not write these tokens; empty if it could."""
        if grammar.kind == "lark":
            compiled = LLMatcher.grammar_from_lark(grammar.source)
        else:
            schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.source)
            compiled = LLMatcher.grammar_from_json_schema(schema)
        matcher = LLMatcher(self._grammar_tokens, compiled)
        taken = matcher.try_consume_tokens(ids)
        if taken == len(ids) and matcher.is_accepting():
            return ""
        return matcher.get_error() or f"it stops after {self.tokenizer.decode(ids[:taken])!r}"


def _embedding(submission: Submission) -> TokenDelta:
    """Return the vector of a prompt: four numbers that count its tokens."""
    ids = submission.prompt_token_ids
    vector = np.array([len(ids), sum(ids) % 7, max(ids) % 5, 1], "<f4")
    reason = FinishReason.LENGTH
    return TokenDelta(submission.id, list(ids[:1]), finish_reason=reason, embedding=vector.tobytes())


def answer(prompt: str, grammar: Grammar | None) -> str:
    """Return the model's text after this prompt."""
    tools = _tools(prompt)
    if grammar is not None and grammar.kind in ("json_object", "json_schema"):
        return json.dumps(_instance(json.loads(grammar.source or "{}"), CITIES[0]))
    if grammar is not None and re.match(r"start:\s+call(?!\*)", grammar.source):
        names = re.findall(r'\\"name\\": \\"(.+?)\\"', grammar.source)
        return _call(names[0], tools[names[0]], CITIES[0])
    asked, results = _question(prompt)
    if results:
        return _thought() + "The tools say: " + "; ".join(results)
    name = "get_weather" if "get_weather" in tools else _shell(tools)
    if name is not None and asked:
        return _thought() + "\n".join(_call(name, tools[name], city) for city in asked)
    return _thought() + STORY


def _question(prompt: str) -> tuple[list[str], list[str]]:
    """Return the cities of the last question about them, and the results of tools after it.

    Agents add messages of their own between these.
    """
    cities: list[str] = []
    results: list[str] = []
    for turn in prompt.split("<|im_start|>"):
        role, _, text = turn.partition("\n")
        text = text.strip().removesuffix("<|im_end|>").strip()
        if role == "tool":
            results.append(text)
        elif role == "user" and (named := [city for city in CITIES if city in text]):
            cities, results = named, []
    return cities, results if cities else []


def _thought() -> str:
    return f"<think>\n{THOUGHT}\n</think>\n\n"


def _tools(prompt: str) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of the tools that the prompt shows, by name."""
    shown = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.S)
    functions = [json.loads(line)["function"] for line in shown[1].splitlines()] if shown else []
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _shell(tools: Mapping[str, Any]) -> str | None:
    """Return the tool with which an agent runs commands."""
    return next((name for name in ("Bash", "exec_command", "shell_command", "shell") if name in tools), None)


def _call(name: str, schema: Mapping[str, Any], city: str) -> str:
    call = {"name": name, "arguments": _instance(schema, city)}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _instance(schema: Mapping[str, Any], city: str, name: str = "", root: Mapping[str, Any] | None = None) -> Any:
    """Return a value that a schema allows, with its required properties alone. Strings are `city`, or a command."""
    root = root or schema
    if "$ref" in schema:
        return _instance(root["$defs"][schema["$ref"].rpartition("/")[2]], city, name, root)
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "integer" | "number":
            return 21
        case "boolean":
            return True
        case "array":
            if name == "command":
                return ["echo", f"21 degrees in {city}"]
            return [_instance(schema["items"], city, name, root)]
        case "string":
            return f"echo 21 degrees in {city}" if name in ("command", "cmd") else city
        case _:
            properties = schema.get("properties", {})
            required = schema.get("required", list(properties))
            return {key: _instance(properties[key], city, key, root) for key in properties if key in required}
