"""Tool calls and reasoning of each family of models: the same message, however its text is split."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.cluster.api.text.families import FAMILIES
from crossdock.cluster.api.text.harmony import MARKERS, HarmonyText
from crossdock.cluster.api.text.marked_text import MarkedText
from crossdock.cluster.api.text.message_parser import ChatMessage, MessageParser
from crossdock.cluster.api.text.open_calls import SIGN
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
    "seed_oss": "<seed:think>\nWhy\n</seed:think>\n\nSure.\n\n<seed:tool_call>\n<function=move>\n"
    "<parameter=to>Ré 🙂</parameter>\n<parameter=speed>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=wait>\n</function>\n</seed:tool_call>",
    "minimax_m2": "<think>\nWhy\n</think>\n\nSure.\n\n<minimax:tool_call>\n"
    '<invoke name="move">\n<parameter name="to">Ré 🙂</parameter>\n<parameter name="speed">3</parameter>\n</invoke>\n'
    '<invoke name="wait">\n</invoke>\n</minimax:tool_call>',
    "step3": "<think>\nWhy\n</think>\n\nSure.\n<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="move">\n<steptml:parameter name="to">Ré 🙂</steptml:parameter>\n'
    '<steptml:parameter name="speed">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="wait">\n</steptml:invoke><｜tool_call_end｜>\n'
    "<｜tool_calls_end｜>",
    "internlm": f'<think>\nWhy\n</think>\n\nSure.<|action_start|><|plugin|>\n{{"name": "move", "parameters": {ONE}}}'
    '<|action_end|><|action_start|> <|plugin|>\n{"name": "wait", "parameters": {}}<|action_end|>',
    "lfm2": "<think>\nWhy\n</think>\n\nSure.<|tool_call_start|>[move(to='Ré 🙂', speed=3), wait()]<|tool_call_end|>",
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
# Families of which each argument comes once its value is complete.
WHOLE_VALUES = (
    *("qwen3_xml", "glm", "deepseek_dsml", "kimi_k3", "gemma4", "seed_oss", "minimax_m2", "step3"),
    *("lfm2", "llama4_pythonic"),
)
BARE = ("llama3_json", "llama4_pythonic")  # have neither reasoning nor content beside calls
NO_VALUES = ("1j", "b'a'", "{1}", "{[1]}", "...", f"1{'0' * 400}+1j")  # in Python
# Texts that look like calls and are none: (family, text).
NO_CALLS = [
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "jump", "arguments": {"to": NaN}}</tool_call>'),
    ("hermes", "Write <tool_call> and then JSON."),
    ("qwen3_xml", "<function=jump>\n<parameter=to>\nRé"),
    ("deepseek_v3", '<｜tool▁call▁begin｜>jump<｜tool▁sep｜>{"to": <｜tool▁call▁end｜>'),
    ("mistral", '[TOOL_CALLS]jump[ARGS]{"to": '),
    ("hermes", "<tool_ca"),
    ("glm", "<tool_call>move <b>now</b></tool_call>"),
    ("seed_oss", "<function=jump>\n<parameter=to>\nRé"),
    ("minimax_m2", '<invoke name="move">go</invoke>'),
    ("step3", '<steptml:invoke name="move">go</steptml:invoke>'),
    ("internlm", "<|action_start|><|plugin|>not JSON<|action_end|>"),
    ("lfm2", "<|tool_call_start|>move to Rome<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[1, 2]<|tool_call_end|>"),
    ("deepseek_dsml", '<｜DSML｜invoke name="move">go</｜DSML｜invoke>'),
    ("kimi_k2", "<|tool_call_begin|>functions.move:0<|tool_call_end|>"),
    ("gemma4", "<|tool_call>call:move to Rome<tool_call|>"),
    ("mistral", "[TOOL_CALLS] all of them"),
    ("llama3_json", '{"capital": "Paris"} is an answer'),
    ("llama3_json", '{"name": "jump", "parameters": {}}'),
    ("llama4_pythonic", "[1, 2] is a list"),
    ("llama4_pythonic", "[move(1)]"),
    ("llama4_pythonic", "[jump(to=1), move(to='a')]"),
    ("llama4_pythonic", "[move(to"),
    *(("lfm2", f"<|tool_call_start|>[jump(to={text})]<|tool_call_end|>") for text in NO_VALUES),
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
            if call.pop("index") == len(calls):
                calls.append(call)
            else:
                assert call["function"]["arguments"]
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
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


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize(
    ("family", "text", "stopped", "cut", "content"),
    [
        ("hermes", '<tool_call>\n{"name": "move", "arguments": {"to": "a"}\n</tool_call>', '{"to": "a"}', None, None),
        ("hermes", '<tool_call>{"name": "move", "arguments": {"to": NaN}}</tool_call>', '{"to": NaN}', None, None),
        ("hermes", '<tool_call>{"name": "move", "arguments": {"to": </tool_call>Sorry.', '{"to": ', None, "Sorry."),
        ("hermes", '<tool_call>{"name": "move", "arguments": {"to": "a"}}\nSorry.', '{"to": "a"}', None, "Sorry."),
        ("hermes", '<tool_call>{"name": "move", "arguments": {"to": "a"}}</tool_', '{"to": "a"}', None, None),
        ("hermes", '<tool_call>{"name": "move", "arguments": {"to": "a\nb', '{"to": "a\\nb', None, None),
        ("deepseek_v3", '<｜tool▁call▁begin｜>move<｜tool▁sep｜>{"to": <｜tool▁call▁end｜>', '{"to": ', None, None),
        ("mistral", '[TOOL_CALLS]move[ARGS]{"to": ', '{"to": ', None, None),
        ("llama3_json", '{"name": "move", "parameters": {"to": ', '{"to": ', None, None),
        ("llama3_json", '{"name": "move", "parameters": {"to": "a"}, "id": {}} Sorry.', '{"to": "a"}', None, "Sorry."),
        ("gpt_oss", '<|channel|>commentary to=functions.move<|message|>{"to": <|call|>', '{"to": ', None, None),
        ("qwen3_xml", "<function=move>\n<parameter=to>\nRé", "{}", "", None),
        ("qwen3_xml", "<function=move>\n<parameter=to>\na\n</parameter>\n", '{"to": "a"}', '{"to": "a"', None),
        ("qwen3_xml", "<function=move>\n<parameter=to>\na\n</parameter>Sorry.", '{"to": "a"}', '{"to": "a"', "Sorry."),
        ("glm", "<tool_call>move<arg_key>to</arg_key><arg_value>a</arg_value>No.", '{"to": "a"}', '{"to": "a"', "No."),
        ("lfm2", "<|tool_call_start|>[move(to='a'", '{"to": "a"}', '{"to": "a"', None),
        ("lfm2", "<|tool_call_start|>[move(to='a', speed=3", '{"to": "a", "speed": 3}', '{"to": "a"', None),
        ("lfm2", "<|tool_call_start|>[move(to='a', speed=", '{"to": "a"}', '{"to": "a"', None),
        ("lfm2", "<|tool_call_start|>[move(to='a<|tool_call_end|>", "{}", "", None),
        ("lfm2", "<|tool_call_start|>[move(to='a')<|tool_call_end|>Sorry.", '{"to": "a"}', None, "Sorry."),
        ("lfm2", "<|tool_call_start|>[move(to=<|tool_call_end|>Sorry.", '{"to": ""}', None, "Sorry."),
        ("lfm2", "<|tool_call_start|>[move(to='a')] \n<|tool_call_end|>Sorry.", '{"to": "a"}', None, "Sorry."),
        ("llama4_pythonic", "[move(to=''", '{"to": ""}', '{"to": ""', None),
        ("llama4_pythonic", "[move(to='a', 5, speed=3)] Sorry.", '{"to": "a", "speed": 3}', None, "Sorry."),
        ("llama4_pythonic", "[move(to='a'), jump(high=2)]", '{"to": "a"}', None, ", jump(high=2)]"),
        ("llama4_pythonic", "[move(to='a'] Sorry.", '{"to": "a"}', None, "Sorry."),
        ("llama4_pythonic", "[move(to='a'), 5]", '{"to": "a"}', None, ", 5]"),
        ("llama4_pythonic", "[move(to='a'),", '{"to": "a"}', None, None),
        *(("llama4_pythonic", f"[move(to={text})]", json.dumps({"to": text}), None, None) for text in NO_VALUES),
    ],
)  # fmt: skip
def test_malformed_call_stays_a_call_once_its_arguments_have_begun(
    family: str, text: str, stopped: str, cut: str | None, content: str | None, reason: str, size: int
) -> None:
    """Clients have seen its beginning. What follows the call is content."""
    message = streamed(family, [text[start : start + size] for start in range(0, len(text), size)], reason)
    assert message == whole(family, text, reason)
    [call] = message["tool_calls"]
    expected = stopped if reason == "stop" or cut is None else cut
    assert call["function"] == {"name": "move", "arguments": expected}
    assert (message["content"] or "").strip() == (content or "")


@pytest.mark.parametrize("family", sorted(CALLS))
def test_arguments_come_while_the_model_writes_them(family: str) -> None:
    """The whole of a value between tags or marks comes at once, other arguments with each token."""
    message = ChatMessage(parser(family))
    deltas = [message.delta([letter], None) for letter in CALLS[family]]
    at = [i for i, delta in enumerate(deltas) for call in delta.get("tool_calls", ()) if call["index"] == 0]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ()) if call["index"] == 0]
    assert calls[0]["function"] == {"name": "move", "arguments": ""}
    assert all(call["function"].keys() == {"arguments"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == ONE
    if family in WHOLE_VALUES:
        assert len(calls) - (calls[-1]["function"] == {"arguments": "}"}) == 3, "the name, and two parameters"
        assert at[1] < at[2]
    else:
        assert len(calls) > len(ONE) // 2


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_text_split_in_any_way_gives_the_same_message_and_loses_nothing(data: st.DataObject) -> None:
    """Texts of markers, calls and noise. What is no marker and in no call comes out once, in its order."""
    family = data.draw(st.sampled_from(sorted(CALLS)))
    markers = MARKERS if family == "gpt_oss" else FAMILIES[family].markers()
    words = [
        *markers,
        CALLS[family],
        *re.split(r"(?<=[>\]}])", CALLS[family]),
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
    """Leave markers out, also those that the letters around a marker make once it is gone."""
    text = "".join(text.split())
    longest_first = sorted(("".join(marker.split()) for marker in markers), key=len, reverse=True)
    while found := next((marker for marker in longest_first if marker in text), ""):
        text = text.replace(found, "")
    return text


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


def test_calls_of_lfm2_may_be_json_and_have_any_text_in_their_strings() -> None:
    json_text = '<|tool_call_start|>[{"name": "move", "arguments": {"to": "<|tool_call_end|>"}}]<|tool_call_end|>'
    assert calls_of(whole("lfm2", json_text)) == [("move", {"to": "<|tool_call_end|>"})]
    text = """<|tool_call_start|>[move(to='He said "go" <|tool_call_end|>', path=[1, true])]<|tool_call_end|>"""
    assert calls_of(whole("lfm2", text)) == [("move", {"to": 'He said "go" <|tool_call_end|>', "path": [1, True]})]
    assert calls_of(whole("lfm2", "<|tool_call_start|>[jump(high=2)]<|tool_call_end|>")) == [("jump", {"high": 2})]


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


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r"'\d'", r"\d"),
        ("''", ""),
        ("'a\\'b'", "a'b"),
        ("'a' 'b'", "ab"),
        ("\"\"\"It's \"so\", (all) of it\"\"\"", "It's \"so\", (all) of it"),
        ("\'\'\'a\nb\'\'\'", "a\nb"),
        ("'a\nb'", "a\nb"),
        ("[1, (2, 3), {'a': [None, true]}]", [1, [2, 3], {"a": [None, True]}]),
        ("{'a': {'b': ')]'}}", {"a": {"b": ")]"}}),
        ("-1.5", -1.5),
        (f"'{'a' * 40_000}'", "a" * 40_000),
    ],
)  # fmt: skip
def test_literal_of_python_is_read_alike_in_any_pieces(literal: str, value: Any, size: int) -> None:
    text = f"[move(to={literal}, speed=3), wait ( ) , move(to='b')]"
    message = streamed("llama4_pythonic", [text[start : start + size] for start in range(0, len(text), size)])
    assert calls_of(message) == [("move", {"to": value, "speed": 3}), ("wait", {}), ("move", {"to": "b"})]
    assert message["content"] is None


def test_list_of_unknown_functions_is_read_up_to_a_bound() -> None:
    text = "<|tool_call_start|>[jump(to='{}')]<|tool_call_end|>"
    assert calls_of(whole("lfm2", text.replace("{}", "a"))) == [("jump", {"to": "a"})]
    assert "tool_calls" not in whole("lfm2", text.replace("{}", "a" * 40_000))


def test_calls_without_an_end_do_not_hide_what_follows_them() -> None:
    message = whole("qwen3_xml", "<think>I write <function=a and b.</think>Sure.")
    assert (message["reasoning"], message["content"]) == ("I write <function=a and b.", "Sure.")
    assert whole("hermes", "<tool_call>{" * 1000)["content"] == "<tool_call>{" * 1000


def test_schema_that_is_long_is_read_once_for_all_values_of_a_call() -> None:
    """A prompt may ask for a parameter often, and its schema may have thousands of types."""
    schemas = {"move": {"properties": {"to": {"anyOf": [{"type": f"t{i}"} for i in range(5000)] + [{"type": "null"}]}}}}
    text = "<tool_call>move" + "<arg_key>to</arg_key><arg_value>null</arg_value>" * 5000 + "</tool_call>"
    assert calls_of(whole("glm", text, schemas=schemas)) == [("move", {"to": None})]


@pytest.mark.parametrize(
    ("named", "raw", "value"),
    [
        *((name, "7", 7) for name in ("int", "int64", "uint8", "long", "Integer")),
        *((name, "3.14", 3.14) for name in ("float", "float32", "double", "num", "decimal")),
        *((name, '{"a": 1}', {"a": 1}) for name in ("dict", "dict[str, int]", "map", "Object")),
        *((name, "[1]", [1]) for name in ("list", "list[int]", "arr", "tuple")),
        *((name, "true", True) for name in ("bool", "Boolean")),
        *((name, "7", "7") for name in ("str", "text", "date", "interval", "enum")),
        ("none", "null", None),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_xml", "glm", "deepseek_dsml"])
def test_types_of_hand_written_tools_are_read_as_json_schemas(family: str, named: str, raw: str, value: Any) -> None:
    call = CALLS_OF_ONE_VALUE[family] % ("to", raw)
    schemas = {"move": {"properties": {"to": {"type": named}}}}
    [(_, arguments)] = calls_of(whole(family, call, schemas=schemas))
    assert arguments == {"to": value}
    assert type(arguments["to"]) is type(value)


DSML = (
    '<｜DSML｜invoke name="move">\n<｜DSML｜parameter name="%s" string="{}">%s</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
CALLS_OF_ONE_VALUE = {
    "qwen3_xml": "<function=move>\n<parameter=%s>\n%s\n</parameter>\n</function>",
    "glm": "<tool_call>move<arg_key>%s</arg_key><arg_value>%s</arg_value></tool_call>",
    "deepseek_dsml": DSML.replace("{}", "true"),
}


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"$ref": "#/$defs/Level"}, "2", 2),
        ({"$ref": "#/$defs/a~1b"}, "12", "12"),
        ({"anyOf": [{"$ref": "#/$defs/a~1b"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "true", True),
        ({"$ref": "#/$defs/None"}, "text", "text"),
        ({"const": 5}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": [True, None]}, "true", True),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_xml", "glm", "deepseek_dsml"])
def test_values_have_the_types_of_references_and_of_listed_values(
    family: str, schema: Any, raw: str, value: Any
) -> None:
    """As pydantic writes the schemas of enumerations."""
    definitions = {
        "Level": {"enum": [1, 2], "type": "integer"},
        "a/b": {"type": "string"},
        "Loop": {"allOf": [{"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
    }
    schemas = {"move": {"properties": {"to": schema}, "$defs": definitions}}
    call = CALLS_OF_ONE_VALUE[family] % ("to", raw)
    for message in (whole(family, call, schemas=schemas), streamed(family, list(call), schemas=schemas)):
        [(_, arguments)] = calls_of(message)
        assert arguments == {"to": value}
        assert type(arguments["to"]) is type(value)


@pytest.mark.parametrize(
    ("schema", "is_text", "raw", "value"),
    [
        ({"type": "integer"}, "true", "42", 42),
        ({"type": "object"}, "true", '{"a": 1}', {"a": 1}),
        ({"type": "integer"}, "true", "forty", "forty"),
        ({"type": "string"}, "false", "null", "null"),
        ({"type": "string"}, "false", "5", "5"),
        ({"type": ["string", "null"]}, "false", "null", None),
        ({}, "true", "42", "42"),
        ({}, "false", "42", 42),
    ],
)
def test_schema_decides_about_a_value_before_deepseeks_own_mark(
    schema: Any, is_text: str, raw: str, value: Any
) -> None:
    call = DSML.replace("{}", is_text) % ("to", raw)
    [(_, arguments)] = calls_of(whole("deepseek_dsml", call, schemas={"move": {"properties": {"to": schema}}}))
    assert arguments == {"to": value}


@pytest.mark.parametrize("wrapper", ["arguments", "input"])
@pytest.mark.parametrize("is_text", ["true", "false"])
def test_arguments_in_one_parameter_are_unwrapped_unless_the_function_declares_it(wrapper: str, is_text: str) -> None:
    call = DSML.replace("{}", is_text) % (wrapper, '{"to": "Rome"}')
    for declared, expected in (
        ({"to": {}}, {"to": "Rome"}),
        ({wrapper: {"type": "object"}}, {wrapper: {"to": "Rome"}}),
    ):
        [(_, arguments)] = calls_of(whole("deepseek_dsml", call, schemas={"move": {"properties": declared}}))
        assert arguments == expected
    call = DSML.replace("{}", is_text) % (wrapper, "not JSON")
    [(_, arguments)] = calls_of(whole("deepseek_dsml", call, schemas={"move": {}}))
    assert arguments == {wrapper: "not JSON"}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<|tool_call>call:move{to:<|tool_call>call:move{to:<|"|>a<|"|>}<tool_call|>', [{}, {"to": "a"}]),
        ('<|tool_call>call:move{to:<|"|>a<|"|>,speed:fast}<tool_call|>', [{"to": "a", "speed": "fast"}]),
        (
            '<|tool_call>call:move{to:{by:[<|"|>a},<|"|>,1]},speed:2}<tool_call|>',
            [{"to": {"by": ["a},", 1]}, "speed": 2}],
        ),
        ('<|tool_call>call:move{to:<|"|>a<tool_call|><|"|>}<tool_call|>', [{"to": "a<tool_call|>"}]),
    ],
)
def test_call_of_gemma_whose_arguments_have_begun_stays_a_call(
    text: str, arguments: list[dict[str, Any]], size: int
) -> None:
    message = streamed("gemma4", [text[start : start + size] for start in range(0, len(text), size)])
    assert message == whole("gemma4", text)
    assert calls_of(message) == [("move", each) for each in arguments]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("gemma4", '<|tool_call>:move{to:<|"|>a<|"|>}<tool_call|>', None, 1),
        ("gemma4", '<|tool_call>call:move to<tool_call|><|tool_call>call:move{to:<|"|>a<|"|>}<tool_call|>', "to", 1),
        ("gemma4", '<|tool_call>call:move{to:<|"|>a<|"|>}<|tool_call>call:move{to:<|"|>a<|"|>}<tool_call|>', None, 2),
        ("hermes", '<tool_call>{"name": <tool_call>{"name": "move", "arguments": {"to": "a"}}</tool_call>', "name", 1),
        ("llama3_json", 'Sure. {"name": "move", "parameters": {"to": "a"}}', "Sure.", 1),
        ("llama3_json", 'A {set}: {\n "name" : "move", "parameters": {"to": "a"}}; {"name": "move", '
         '"parameters": {"to": "a"}}', "A {set}:", 2),
        ("llama3_json", 'I see {"name": "jump", "parameters": {"to": "a"}} and {"names', "jump", 0),
    ],
)  # fmt: skip
def test_calls_are_found_behind_text_and_behind_malformed_calls(
    family: str, text: str, content: str | None, calls: int, size: int
) -> None:
    message = streamed(family, [text[start : start + size] for start in range(0, len(text), size)])
    assert message == whole(family, text)
    assert calls_of(message) == [("move", {"to": "a"})] * calls
    assert message["content"] == content if content is None else content in message["content"]
