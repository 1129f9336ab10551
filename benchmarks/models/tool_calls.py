"""Are tool calls and reasoning read right? CanIToolCall's recorded outputs of nine families of models.

    pip install --no-deps canitoolcall==0.1.1      # 469 recorded outputs; Apache-2.0
    pip install jsonschema
    python benchmarks/models/tool_calls.py

Prints a table of families, and one of every output that is read otherwise than expected, with the reason. An output
counts as right if it is whole and in every split: in characters one by one, in threes, in sevens and at random.
Strictly right is equal character by character; else white space around a text differs.
"""

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

from canitoolcall.checks import case_status, run_checks
from canitoolcall.fixtures import Fixture, load_family, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult
from tables import hardware, markdown, today

from crossdock.cluster.api.text.families import FAMILIES
from crossdock.cluster.api.text.harmony import HarmonyText
from crossdock.cluster.api.text.marked_text import MarkedText
from crossdock.cluster.api.text.message_parser import ChatMessage, MessageParser

CUT = "the limit of tokens cut this call: its text stays content, and `finish_reason` is `length`"
REASONS = {
    "deepseek/sglang-v4-self-closing-invoke": "a closed tag without a body is not the model's format",
    "deepseek/v32-truncated-second-parallel-call": CUT,
    "deepseek/v4-truncated-second-parallel-call": CUT,
    "deepseek/v41-truncated-second-parallel-call": CUT,
    "gemma4/truncated-second-parallel-call": CUT,
    "qwen3-hermes/truncated-second-parallel-call": CUT,
    "glm/glm47-missing-last-close-arg-value": "a value without its end is no value: what it includes cannot be known",
    "gpt-oss/llamacpp-builtin-python-recipient": "a built-in tool was not offered: what is sent to it stays content",
    "gpt-oss/harmony-marker-in-reasoning": "markers in other tokens: a server sees tokens, this replay text alone",
    "kimi/k2i-vllm-noise-between-markers": "text between the calls stays content, and is not dropped",
}
SINGLE = {"qwen3-hermes": "hermes", "qwen3-xml": "qwen3_xml", "glm": "glm", "gemma4": "gemma4", "mistral": "mistral"}


def parser(fixture: Fixture) -> MessageParser:
    """Return the parser that a server with the fixture's model has."""
    functions = [tool.get("function", tool) for tool in fixture.tools]
    schemas = {each["name"]: each.get("parameters") or {} for each in functions}
    model, family = fixture.reference_model.split("/")[1], fixture.family
    if family == "gpt-oss":
        return HarmonyText(schemas)
    if family == "deepseek":
        name = "deepseek_v3" if model in ("DeepSeek-V3-0324", "DeepSeek-V3.1") else "deepseek_dsml"
    elif family == "kimi":
        name = "kimi_k3" if "K3" in model else "kimi_k2"
    elif family == "llama":
        name = "llama3_json" if "-3" in model else "llama4_pythonic"
    else:
        name = SINGLE[family]
    reference = load_family(family).reference_for(fixture.reference_model)
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = (reference.default_generation_prompt if reference else None) or ""
    marked = FAMILIES[name]
    return MarkedText(marked, schemas, is_thinking=prompt.rstrip().endswith(tuple(marked.thinks) or "\0"))


def splits(text: str) -> Iterator[tuple[str, list[str]]]:
    for size in (1, 3, 7):
        yield f"char:{size}", [text[start : start + size] for start in range(0, len(text), size)]
    chance = random.Random(text)
    pieces: list[str] = []
    while text:
        size = chance.randint(1, 12)
        pieces.append(text[:size])
        text = text[size:]
    yield "rand:1:8", pieces


def read(fixture: Fixture, pieces: list[str]) -> ParseResult:
    """Return the message that the deltas of these pieces add up to."""
    message = ChatMessage(parser(fixture))
    texts: dict[str, str] = defaultdict(str)
    calls: list[ParsedToolCall] = []
    for i, piece in enumerate(pieces):
        is_last = i == len(pieces) - 1
        delta = message.delta([piece], ("length" if fixture.truncated else "stop") if is_last else None)
        for name in ("content", "reasoning"):
            texts[name] += delta.get(name, "")
        functions = [call["function"] for call in delta.get("tool_calls", ())]
        calls += [ParsedToolCall(function["name"], function["arguments"]) for function in functions]
    return ParseResult(
        content=texts["content"] or None, reasoning_content=texts["reasoning"] or None, tool_calls=tuple(calls)
    )


def replay() -> int:
    """Print the tables of the recorded outputs. Returns how many wrong ones have no reason."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong: list[list[str]] = []
    for fixture in load_fixtures():
        streams = {name: read(fixture, pieces) for name, pieces in splits(fixture.raw_output)}
        whole = read(fixture, [fixture.raw_output])
        # A name that the checks count: those of characters are not a server's deltas for them.
        observed = Observation(whole, {f"rand:{i + 1}:8": result for i, result in enumerate(streams.values())})
        rows = run_checks(fixture, load_family(fixture.family), observed)
        status = case_status(rows).value
        counts[fixture.family][status] += 1
        if status == "fail":
            detail = next(row.detail for row in rows if row.status.value == "fail") or ""
            wrong.append(
                [fixture.id, REASONS.get(fixture.id, "?"), detail.replace("|", "\\|").replace("\n", " ")[:100]]
            )
    total = sum(counts.values(), Counter[str]())
    table = [["family", "strictly right", "right but for white space", "otherwise"]]
    for family, count in [*counts.items(), ("all", total)]:
        table.append([family, *(str(count[status]) for status in ("pass", "soft_pass", "fail"))])
    print(markdown(table))
    print(markdown([["output", "why", "what differs"], *wrong]))
    return sum(why == "?" for _, why, _ in wrong)


if __name__ == "__main__":
    print(f"{today()}; {hardware()}\n")
    sys.exit(replay() > 0)
