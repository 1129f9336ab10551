"""Tool calls and reasoning of each family of models: the same message, however its text is split."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.cluster.api.text.call_forms import SIGN
from crossdock.cluster.api.text.families import FAMILIES
from crossdock.cluster.api.text.harmony import MARKERS, HarmonyText
from crossdock.cluster.api.text.marked_text import MarkedText
from crossdock.cluster.api.text.message_parser import ChatMessage, MessageParser
from tests.cluster.api.text.parsed_messages import calls_of, whole_message

MOVE = {
    "type": "object",
    "properties": {"to": {"type": "string"}, "speed": {"type": "integer"}, "path": {"type": "array"}},
}
SCHEMAS = {"move": MOVE, "wait": {}}
BOTH = [("move", {"to": "Ré 🙂", "speed": 3}), ("wait", {})]
ONE = '{"to": "Ré 🙂", "speed": 3}'
# A text of each family with reasoning where it has any, content, and the calls BOTH.
CALLS = {
    "hermes": "<think>\nWhy\n</think>\n\nSure.\n<tool_call>\n"
    f'{{"name": "move", "arguments": {ONE}}}\n</tool_call>\n<tool_call>\n'
    '{"name": "wait", "arguments": {}}\n</tool_call>',
    "qwen3_xml": "<think>\nWhy\n</think>\n\nSure.\n\n<tool_call>\n<function=move>\n"
    "<parameter=to>\nRé 🙂\n</parameter>\n"
    "<parameter=speed>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=wait>\n</function>\n</tool_call>",
    "glm": "<think>Why</think>\nSure.\n<tool_call>move\n<arg_key>to</arg_key>\n<arg_value>Ré 🙂</arg_value>\n"
    "<arg_key>speed</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>wait\n</tool_call>",
    "deepseek_v3": "<think>Why</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>move<｜tool▁sep｜>"
    f"{ONE}<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_dsml": '<think>Why</think>Sure.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="move">\n'
    '<｜DSML｜parameter name="to" string="true">Ré 🙂</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="speed" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="wait">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "kimi_k2": "<think>Why</think>Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.move:0"
    f"<|tool_call_argument_begin|>{ONE}<|tool_call_end|><|tool_call_begin|>functions.wait:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": "<|open|>think<|sep|>Why<|close|>think<|sep|><|open|>response<|sep|>Sure.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="move" index="1"<|sep|><|open|>argument key="to" type="string"<|sep|>Ré 🙂'
    '<|close|>argument<|sep|><|open|>argument key="speed" type="number"<|sep|>3<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="wait" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "gemma4": '<|channel>thought\nWhy\n<channel|>Sure.<|tool_call>call:move{to:<|"|>Ré 🙂<|"|>,speed:3}<tool_call|>'
    "<|tool_call>call:wait{}<tool_call|>",
    "mistral": f"[THINK]Why[/THINK]Sure.[TOOL_CALLS]move[ARGS]{ONE}[TOOL_CALLS]wait[ARGS]{{}}",
    "gpt_oss": "<|channel|>analysis<|message|>Why<|end|><|start|>assistant<|channel|>commentary<|message|>Sure.<|end|>"
    f"<|start|>assistant to=functions.move<|channel|>commentary <|constrain|>json<|message|>{ONE}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.wait<|message|>{}",
    "llama3_json": f'{{"name": "move", "parameters": {ONE}}}; {{"name": "wait", "parameters": {{}}}}',
    "llama4_pythonic": "<|python_start|>[move(to='Ré 🙂', speed=3), wait()]<|python_end|>",
}
BARE = ("llama3_json", "llama4_pythonic")  # have neither reasoning nor content beside calls
# Texts that look like calls and are none: (family, text).
NO_CALLS = [
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>\n{"name": "move", "arguments": {"to": "a"}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "move", "arguments": {"speed": NaN}}</tool_call>'),
    ("hermes", "Write <tool_call> and then JSON."),
    ("hermes", "<tool_ca"),
    ("qwen3_xml", "<function=move>\n<parameter=to>\nRé"),
    ("glm", "<tool_call>move <b>now</b></tool_call>"),
    ("deepseek_v3", '<｜tool▁call▁begin｜>move<｜tool▁sep｜>{"to": <｜tool▁call▁end｜>'),
    ("deepseek_dsml", '<｜DSML｜invoke name="move">go</｜DSML｜invoke>'),
    ("kimi_k2", "<|tool_call_begin|>functions.move:0<|tool_call_end|>"),
    ("gemma4", "<|tool_call>call:move to Rome<tool_call|>"),
    ("mistral", "[TOOL_CALLS] all of them"),
    ("mistral", '[TOOL_CALLS]move[ARGS]{"to": '),
    ("llama3_json", '{"capital": "Paris"} is an answer'),
    ("llama3_json", '{"name": "jump", "parameters": {}}'),
    ("llama3_json", '{"name": "move", "parameters": {"to": '),
    ("llama4_pythonic", "[1, 2] is a list"),
    ("llama4_pythonic", "[move(1)]"),
    *(("llama4_pythonic", f"[move(to={text})]") for text in ("1j", "b'a'", "{1}", "{[1]}", "...", f"1{'0' * 400}+1j")),
    ("gpt_oss", "Text without a header"),
    ("gpt_oss", "<|channel|>commentary to=functions.move<|message|>not JSON<|call|>"),
]


def parser(family: str, *, is_thinking: bool = False, schemas: Any = SCHEMAS) -> MessageParser:
    if family == "gpt_oss":
        return HarmonyText(schemas)
    return MarkedText(FAMILIES[family], schemas, is_thinking=is_thinking)


def whole(family: str, text: str, reason: str = "stop", **more: Any) -> dict[str, Any]:
    ids = iter(range(1000))
    return whole_message(ChatMessage(parser(family, **more), new_call_id=lambda: str(next(ids))), text, reason=reason)


def streamed(family: str, pieces: list[str], reason: str = "stop", **more: Any) -> dict[str, Any]:
    """Return the sum of a stream's deltas as a client builds it."""
    ids = iter(range(1000))
    message = ChatMessage(parser(family, **more), new_call_id=lambda: str(next(ids)))
    total: dict[str, Any] = {"content": None}
    for i, piece in enumerate(pieces):
        delta = message.delta([piece], reason if i == len(pieces) - 1 else None)
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                assert delta[name]
                total[name] = (total.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = total.setdefault("tool_calls", [])
            assert call.pop("index") == len(calls)
            calls.append(call)
    if total == {"content": None}:
        total = {"content": ""}
    return total


@pytest.mark.parametrize("family", CALLS)
def test_calls_reasoning_and_content_of_each_family(family: str) -> None:
    message = whole(family, CALLS[family])
    assert calls_of(message) == BOTH
    if family not in BARE:
        assert (message["content"], message["reasoning"]) == ("Sure.", "Why")
    else:
        assert message["content"] is None


@pytest.mark.parametrize(("family", "text"), NO_CALLS)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_text_that_is_no_call_stays_content_as_it_is(family: str, text: str, reason: str) -> None:
    assert whole(family, text, reason) == {"content": text}


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_text_split_in_any_way_gives_the_same_message_and_loses_nothing(data: st.DataObject) -> None:
    """Texts of markers, calls and noise. What is no marker and in no call comes out once, in its order."""
    family = data.draw(st.sampled_from(sorted(CALLS)))
    markers = MARKERS if family == "gpt_oss" else FAMILIES[family].markers()
    words = [
        *markers,
        CALLS[family],
        ONE,
        "move",
        "wait",
        "[",
        "{",
        '"',
        "\\",
        "}",
        "]",
        "\n",
        "  ",
        "a",
        "é",
        "<",
        "<tool",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reason = data.draw(st.sampled_from(["stop", "length"]))
    is_thinking = data.draw(st.booleans())
    message = whole(family, text, reason, is_thinking=is_thinking)
    assert streamed(family, pieces, reason, is_thinking=is_thinking) == message
    if "tool_calls" not in message and family != "gpt_oss":
        shown = (message.get("reasoning") or "") + (message["content"] or "")
        assert _bare(shown, markers) == _bare(text, markers)


def _bare(text: str, markers: Any) -> str:
    for marker in sorted(markers, key=len, reverse=True):
        text = text.replace(marker, "")
    return "".join(text.split())


@pytest.mark.parametrize("family", sorted(CALLS.keys() - {*BARE}))
def test_calls_are_content_without_tools_and_reasoning_is_read(family: str) -> None:
    message = whole(family, CALLS[family], schemas=None)
    assert message["reasoning"] == "Why"
    assert message["content"].startswith("Sure.")
    assert "Ré 🙂" in message["content"]
    assert "tool_calls" not in message


@pytest.mark.parametrize("family", ["hermes", "glm", "qwen3_xml"])
def test_reasoning_that_the_prompt_has_begun_needs_no_marker(family: str) -> None:
    assert whole(family, "Why\n</think>\n\nSure.", is_thinking=True) == {
        "content": "Sure.",
        "reasoning": "Why",
        "reasoning_content": "Why",
    }
    assert whole(family, "Why", "length", is_thinking=True)["reasoning"] == "Why"


def test_marker_within_arguments_is_text() -> None:
    text = "Write </tool_call> and <tool_call>."
    call = json.dumps({"name": "move", "arguments": {"to": text}})
    assert calls_of(whole("hermes", f"<tool_call>{call}</tool_call>")) == [("move", {"to": text})]
    call = f"<function=move>\n<parameter=to>\n{text} </function>.\n</parameter>\n</function>"
    assert calls_of(whole("qwen3_xml", call)) == [("move", {"to": f"{text} </function>."})]


@pytest.mark.parametrize("family", [family for family in CALLS if family not in BARE])
def test_reasoning_tokens_are_the_same_however_many_a_step_has(family: str) -> None:
    """Each character is a token. Only `Why` is shown as reasoning; what is before it marks the beginning."""
    text = CALLS[family]
    last = text.index("Why") + len("Why")
    for num_tokens in (1, 2, 7, len(text)):
        message = ChatMessage(parser(family), shows_reasoning=False)
        for start in range(0, len(text), num_tokens):
            message.pieces([*text[start : start + num_tokens]], None)
        message.pieces([], "stop")
        assert message.reasoning_tokens == last


def test_marker_that_is_written_with_other_tokens_is_text() -> None:
    """The marker of a model that has it as a token of its own stands behind a sign."""
    family = FAMILIES["mistral"].signed({"[TOOL_CALLS]", "[/THINK]", "[THINK]"})
    message = ChatMessage(MarkedText(family, SCHEMAS, is_thinking=False))
    text = f"{SIGN}[THINK]I know [/THINK] and [TOOL_CALLS].{SIGN}[/THINK]See [TOOL_CALLS]wait."
    text += f"{SIGN}[TOOL_CALLS]wait[ARGS]{{}}"
    answer = whole_message(message, text)
    assert (answer["reasoning"], answer["content"]) == ("I know [/THINK] and [TOOL_CALLS].", "See [TOOL_CALLS]wait.")
    assert calls_of(answer) == [("wait", {})]
    harmony = ChatMessage(HarmonyText(SCHEMAS, sign=SIGN))
    text = f"{SIGN}<|channel|>analysis{SIGN}<|message|>No <|end|> yet.{SIGN}<|end|>"
    assert whole_message(harmony, text)["reasoning"] == "No <|end|> yet."


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, '{"a": [1]}', {"a": [1]}),
        ({"type": "integer"}, "five", "five"),
        ({"type": "integer"}, "true", "true"),
        ({}, "[1]", [1]),
        ({}, "a b", "a b"),
        (5, "NaN", "NaN"),
        ({"anyOf": 5, "enum": 5}, "5", 5),
    ],
)
def test_raw_value_has_the_type_of_its_schema(schema: Any, raw: str, value: Any) -> None:
    schemas = {"move": {"properties": {"to": schema}}}
    text = f"<tool_call>move<arg_key>to</arg_key><arg_value>{raw}</arg_value></tool_call>"
    [(_, arguments)] = calls_of(whole("glm", text, schemas=schemas))
    assert arguments == {"to": value}
    assert type(arguments["to"]) is type(value)


def test_half_of_a_character_is_an_escape_in_arguments_and_no_name() -> None:
    text = '<tool_call>{"name": "move", "arguments": {"to": "\\ud83d"}}</tool_call>'
    message = whole("hermes", text)
    assert json.dumps(message, ensure_ascii=False).encode()
    assert calls_of(message) == [("move", {"to": "\ud83d"})]
    text = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert whole("hermes", text) == {"content": text}


def test_arguments_that_json_cannot_nest_are_content() -> None:
    text = '<tool_call>{"name": "move", "arguments": ' + "[" * 100_000 + "</tool_call>"
    assert whole("hermes", text)["content"] == text


@pytest.mark.parametrize("size", [1, 9, 5000])
def test_header_of_gpt_oss_that_never_ends_is_content(size: int) -> None:
    """The marker that begins such a header does not begin it again, for ever."""
    text = "<|channel|>final<|message|>Hi<|start|>" + "a" * 1500 + "<|message|>b"
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    message = streamed("gpt_oss", pieces)
    assert message == {"content": "Hi<|start|>" + "a" * 1500 + "<|message|>b"}


@pytest.mark.parametrize("size", [1, 5, 100])
def test_backslash_before_the_end_of_a_string_is_read_alike_in_any_pieces(size: int) -> None:
    text = '[TOOL_CALLS]move[ARGS]{"to": "a\\\\"}[TOOL_CALLS]wait[ARGS]{}'
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert calls_of(streamed("mistral", pieces)) == [("move", {"to": "a\\"}), ("wait", {})]


def test_call_with_an_escape_that_python_does_not_know_is_read() -> None:
    assert calls_of(whole("llama4_pythonic", "[move(to='\\d')]")) == [("move", {"to": "\\d"})]
    assert "tool_calls" not in whole("llama4_pythonic", f"[move(to='{'a' * 40_000}')]")


def test_calls_without_an_end_do_not_hide_what_follows_them() -> None:
    message = whole("qwen3_xml", "<think>I write <function=a and b.</think>Sure.")
    assert (message["reasoning"], message["content"]) == ("I write <function=a and b.", "Sure.")
    assert whole("hermes", "<tool_call>{" * 1000)["content"] == "<tool_call>{" * 1000


def test_schema_that_is_long_is_read_once_for_all_values_of_a_call() -> None:
    """A prompt may ask for a parameter often, and its schema may have thousands of types."""
    schemas = {"move": {"properties": {"to": {"anyOf": [{"type": f"t{i}"} for i in range(5000)] + [{"type": "null"}]}}}}
    text = "<tool_call>move" + "<arg_key>to</arg_key><arg_value>null</arg_value>" * 5000 + "</tool_call>"
    assert calls_of(whole("glm", text, schemas=schemas)) == [("move", {"to": None})]
