"""Tool calls and reasoning that models write by themselves, as OpenAI's client reads them, whole and streamed."""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache, partial
from typing import Any

import httpx
import openai
import pytest
from llguidance import LLTokenizer
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.message_format import MessageFormat, MessageReading
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.model.grammar.matcher import new_matcher
from crossdock.workers.schedule.request.submission import Grammar
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, events, serving
from tests.cluster.api.text.parsed_messages import calls_of, whole_message

MOVE = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE}},
    {"type": "function", "function": {"name": "wait"}},
]
NAMES = ("move", "wait")
MOVED = '{"name": "move", "arguments": {"to": "Ré 🙂"}}'
HERMES = "<tool_call>\n%s\n</tool_call>"
CALLS = f'<tool_call>\n{MOVED}\n</tool_call>\n<tool_call>\n{{"name": "wait", "arguments": {{}}}}\n</tool_call>'
TEXT = f"Why\n</think>\n\nSure.\n{CALLS}"
# A template of a family shows it by its markers; this one leaves the tools out, to be short.
THINKING = (
    "{{ messages[-1].content }}{# <tool_call> #}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
MISTRAL = "{{ messages[-1].content }}{# [TOOL_CALLS] #}"


def with_tokens(
    tokenizer: PreTrainedTokenizerFast, template: str, *special: str, tokens: Iterable[str] = ()
) -> ModelTokenizer:
    own = deepcopy(tokenizer)
    own.add_tokens(["<think>", "</think>", *tokens])
    own.add_special_tokens({"additional_special_tokens": list(special)})
    own.chat_template = template
    return ModelTokenizer(own)


@pytest.fixture(scope="module")
def thinker(tokenizers: dict[str, PreTrainedTokenizerFast]) -> ModelTokenizer:
    return with_tokens(tokenizers["byte_level"], THINKING)


@pytest.fixture
def model(thinker: ModelTokenizer) -> Iterator[tuple[ScriptedDispatcher, httpx.Client]]:
    engine = ScriptedDispatcher(thinker)
    engine.script = partial(engine.story, words=TEXT)
    with serving(engine, thinker, HttpConfig()) as http:
        yield engine, http


def read(
    tokenizer: ModelTokenizer, prompt: list[int], *, reads: bool = True, **fields: Any
) -> tuple[MessageReading, str]:
    """Return how the answer to a chat is read, and the source of its grammar, which there must be."""
    body = ChatCompletionRequest.model_validate({"messages": HI, **fields})
    reading = MessageFormat(tokenizer, reads_unforced_calls=reads).reading(body, prompt)
    assert reading.grammar is not None
    return reading, reading.grammar.source


def message_of(tokenizer: ModelTokenizer, reading: MessageReading, text: str) -> dict[str, Any]:
    """Return the message of a text whose tokens come one by one."""
    detokenizer = tokenizer.detokenizer(shown=reading.shown)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return whole_message(reading.message(), *map(detokenizer.add, token_ids), detokenizer.flush())


def answer(http: httpx.Client, **fields: Any) -> Any:
    """Return the answer to a chat, which must succeed."""
    result = http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert result.status_code == 200, result.text
    return result.json()


def test_answer_has_reasoning_content_and_calls(model: tuple[ScriptedDispatcher, httpx.Client]) -> None:
    for choice in answer(model[1], tools=TOOLS, n=2)["choices"]:
        message = choice["message"]
        assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Why", "Why", "Sure.")
        assert calls_of(message) == [("move", {"to": "Ré 🙂"}), ("wait", {})]
        assert choice["finish_reason"] == "tool_calls"
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("template", "config", "tools", "reasoning"),
    [
        (THINKING, {}, "hermes", "hermes"),
        ("{# </think> #}", {}, None, "think"),
        ("{# <|python_tag|> #}", {}, "llama3_json", None),
        ("{# <|channel|> #}", {}, "gpt_oss", "gpt_oss"),
        ("", {}, None, None),
        (THINKING, {"tool_call_parser": "glm45", "reasoning_parser": "none"}, "glm", None),
    ],
)
def test_families_of_messages_are_shown_with_the_model_and_logged(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    caplog: pytest.LogCaptureFixture,
    template: str,
    config: dict[str, str],
    tools: str | None,
    reasoning: str | None,
) -> None:
    tokenizer = with_tokens(tokenizers["byte_level"], template)
    with (
        caplog.at_level(logging.INFO, "ray.serve"),
        serving(ScriptedDispatcher(tokenizer), tokenizer, HttpConfig.model_validate(config)) as http,
    ):
        shown = [http.get("/v1/models").json()["data"][0], http.get("/v1/models/tiny").json()]
    for model in shown:
        assert (model["tool_family"], model["reasoning_family"]) == (tools, reasoning)
    text = f"tool_family {tools}, reasoning_family {reasoning}"
    assert f"families of messages, found or configured: {text}" in caplog.messages


@pytest.mark.parametrize("hidden", [{}, {"include_reasoning": False}])
def test_usage_counts_tokens_of_reasoning_whole_and_streamed(
    model: tuple[ScriptedDispatcher, httpx.Client], thinker: ModelTokenizer, hidden: dict[str, Any]
) -> None:
    """White space before the marker shows nothing, and counts with what follows."""
    num_tokens = thinker.encode(TEXT).index(thinker.encode("</think>")[0]) - len(thinker.encode("\n"))
    assert num_tokens > 0
    for n in (1, 2):
        usage = answer(model[1], n=n, **hidden)["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": n * num_tokens}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"messages": HI, "stream": True, "stream_options": options, "n": n, **hidden}
        chunks = events(model[1].post("/v1/chat/completions", json=body))
        assert chunks[-1]["usage"] == usage
        running = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks[:-1]]
        assert (running[0], max(running)) == (0, num_tokens)


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 2}, {"return_token_ids": True}])
def test_stream_has_the_same_message_for_openais_client(
    model: tuple[ScriptedDispatcher, httpx.Client], more: dict[str, Any]
) -> None:
    own = {"return_token_ids": more.pop("return_token_ids")} if "return_token_ids" in more else {}
    with (
        openai.OpenAI(base_url=f"{model[1].base_url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS, extra_body=own, **more
        ) as stream,
    ):
        for _ in stream:
            pass
        choices = stream.get_final_completion().choices
    assert len(choices) == more.get("n", 1)
    for choice in choices:
        assert choice.finish_reason == "tool_calls"
        assert calls_of(choice.message.model_dump()) == [("move", {"to": "Ré 🙂"}), ("wait", {})]
        assert all(call.id.startswith("call_") for call in choice.message.tool_calls or ())
        assert choice.message.content == "Sure."
        assert choice.message.reasoning == "Why"  # type: ignore[attr-defined]
        assert bool(choice.logprobs) == ("logprobs" in more)


@pytest.mark.parametrize(
    ("route", "path", "body", "sign"),
    [
        ("chats", "/v1/chat/completions", {"messages": HI, "tools": TOOLS}, '"delta":{}'),
        (
            "responses",
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", "name": name} for name in NAMES]},
            ": ",
        ),
        (
            "messages",
            "/v1/messages",
            {"messages": HI, "max_tokens": 300, "tools": [{"name": name, "input_schema": {}} for name in NAMES]},
            "event: ping\n",
        ),
    ],
)
def test_stream_in_a_long_call_is_kept_open_by_events_without_text(
    model: tuple[ScriptedDispatcher, httpx.Client],
    monkeypatch: pytest.MonkeyPatch,
    route: str,
    path: str,
    body: dict[str, Any],
    sign: str,
) -> None:
    def counted() -> tuple[int, int]:
        """Return the number of events without text, and of all others."""
        blocks = model[1].post(path, json={**body, "stream": True}).text.split("\n\n")
        num_empty = sum(block.startswith(sign) or ('"delta"' in sign and sign in block) for block in blocks)
        return num_empty, len(blocks) - num_empty

    num_empty, num_shown = counted()
    monkeypatch.setattr(f"crossdock.cluster.api.routes.{route}.SILENCE_S", -1.0)
    found = counted()
    assert found[0] > num_empty + 10
    assert found[1] == num_shown


@pytest.mark.parametrize(
    ("fields", "content", "num_calls"),
    [
        ({}, f"Sure.\n{CALLS}", 0),
        ({"tools": TOOLS, "tool_choice": "none"}, f"Sure.\n{CALLS}", 0),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "Sure.", 1),
    ],
)
def test_calls_that_are_not_asked_for_stay_text_or_are_left_out(
    model: tuple[ScriptedDispatcher, httpx.Client], fields: dict[str, Any], content: str, num_calls: int
) -> None:
    choice = answer(model[1], **fields)["choices"][0]
    assert choice["message"]["content"] == content
    assert len(choice["message"].get("tool_calls", ())) == num_calls
    assert choice["finish_reason"] == ("tool_calls" if num_calls else "stop")


def test_reasoning_is_left_out_or_text_where_the_request_says_so(
    model: tuple[ScriptedDispatcher, httpx.Client],
) -> None:
    message = answer(model[1], include_reasoning=False)["choices"][0]["message"]
    assert message["content"].startswith("Sure.")
    assert not {"reasoning", "reasoning_content"} & message.keys()
    message = answer(model[1], chat_template_kwargs={"enable_thinking": False})["choices"][0]["message"]
    assert message["content"] == f"{TEXT}"


@pytest.mark.parametrize(
    ("config", "reasoning", "calls"),
    [
        ({"tool_call_parser": "none"}, "Why", 0),
        ({"enable_auto_tool_choice": False}, "Why", 0),
        ({"reasoning_parser": "none"}, None, 2),
        ({"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, "Why", 2),
        ({"tool_call_parser": "mistral"}, "Why", 0),
    ],
)
def test_parsers_that_the_server_names_are_used(
    thinker: ModelTokenizer, config: dict[str, Any], reasoning: str | None, calls: int
) -> None:
    engine = ScriptedDispatcher(thinker)
    engine.script = partial(engine.story, words=TEXT)
    with serving(engine, thinker, HttpConfig.model_validate(config)) as http:
        message = answer(http, tools=TOOLS)["choices"][0]["message"]
    assert message.get("reasoning") == reasoning
    assert len(message.get("tool_calls", ())) == calls


@pytest.mark.parametrize(
    ("begun", "is_thinking"), [("<think>Half a", True), ("<think>Why</think>Su", False), ("Su", False)]
)
def test_message_that_the_model_continues_is_reasoning_until_its_end(
    thinker: ModelTokenizer, begun: str, is_thinking: bool
) -> None:
    messages = [*HI, {"role": "assistant", "content": begun}]
    body = ChatCompletionRequest.model_validate({"messages": messages, "continue_final_message": True})
    message = whole_message(MessageFormat(thinker).reading(body, thinker.encode(begun)).message(), "re.")
    assert message["content"] == (None if is_thinking else "re.")
    assert message.get("reasoning") == ("re." if is_thinking else None)


def test_unknown_parser_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(ValidationError, match="no parser; it must be auto, none, deepseek_v3"):
        HttpConfig(tool_call_parser="mine")
    with pytest.raises(ValidationError, match="no parser; it must be auto, none, deepseek-r1"):
        HttpConfig(reasoning_parser="mine")


def test_special_tokens_that_are_markers_reach_the_parser_alone(
    tokenizers: dict[str, PreTrainedTokenizerFast],
) -> None:
    """The output also has special tokens that are no markers, and the text of markers in other tokens."""
    tokenizer = with_tokens(tokenizers["byte_level"], MISTRAL, "[TOOL_CALLS]", "[ARGS]", "<unused>")
    engine = ScriptedDispatcher(tokenizer)
    engine.script = partial(engine.story, words="[TOOL_ CALLS]<unused>Sure.[TOOL_CALLS]wait[ARGS]{}")
    with serving(engine, tokenizer, HttpConfig()) as http:
        choice = answer(http, tools=TOOLS)["choices"][0]
        assert choice["message"]["content"] == "[TOOL_ CALLS]Sure."
        assert calls_of(choice["message"]) == [("wait", {})]
        assert answer(http)["choices"][0]["message"]["content"] == "[TOOL_ CALLS]Sure.wait{}"


def test_constraint_holds_for_the_answer_after_the_reasoning(
    model: tuple[ScriptedDispatcher, httpx.Client], thinker: ModelTokenizer
) -> None:
    engine, http = model
    engine.script = partial(engine.story, words="Why</think>\n\nyes")
    choice = answer(http, guided_choice=["yes", "no"])["choices"][0]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Why", "yes")
    engine.script = partial(engine.story, words=f"Why</think>{CALLS}")
    choice = answer(http, tools=TOOLS, tool_choice="required")["choices"][0]
    assert choice["message"]["reasoning"] == "Why"
    assert calls_of(choice["message"]) == [("move", {"to": "Ré 🙂"}), ("wait", {})]
    for submission, good, bad in zip(
        engine.submissions, ("Hm</think>\nno", f"</think>{CALLS}"), ("yes", CALLS), strict=True
    ):
        assert submission.sampling.grammar is not None
        assert accepts(thinker, submission.sampling.grammar.source, good)
        assert not accepts(thinker, submission.sampling.grammar.source, bad)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, 'a</think>{"a": 1}', "a</think>b"),
        ({"guided_json": {"type": "integer"}}, "a</think>\n5", "a</think>b"),
        ({"guided_regex": "a/b+"}, "a</think>a/bb", "a</think>ab"),
        ({"thinking_token_budget": 3}, "abc</think>any", "abcd</think>any"),
        ({"thinking_token_budget": 0}, "</think>any", "a</think>any"),
        ({"thinking_token_budget": 2, "guided_choice": ["x"]}, "ab</think>x", "abc</think>x"),
        ({"thinking_token_budget": 3, "enable_thinking": False}, "<think>abc</think>any", "<think>abcd</think>any"),
        ({"thinking_token_budget": 3, "enable_thinking": False}, "no thoughts", "<think>abcde"),
    ],
)
def test_grammar_bounds_reasoning_and_holds_after_it(
    thinker: ModelTokenizer, fields: dict[str, Any], good: str, bad: str
) -> None:
    is_thinking = fields.pop("enable_thinking", True)
    _, grammar = read(thinker, thinker.encode("Hi<think>\n" if is_thinking else "Hi"), **fields)
    assert accepts(thinker, grammar, good)
    assert not accepts(thinker, grammar, bad)


STRICT = [{"type": "function", "function": {"name": "move", "parameters": MOVE, "strict": True}}, TOOLS[1]]


KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
DEEPSEEK_NEW = (DEEPSEEK[0], f'{DEEPSEEK[2]}move{DEEPSEEK[4]}{{"to": "a"}}{DEEPSEEK[3]}', DEEPSEEK[1])
DEEPSEEK_OLD = (
    DEEPSEEK[0],
    f'{DEEPSEEK[2]}function{DEEPSEEK[4]}move\n```json\n{{"to": "a"}}\n```{DEEPSEEK[3]}',
    DEEPSEEK[1],
)


def two_of(parts: tuple[str, str, str], between: str) -> str:
    begin, call, end = parts
    return f"{begin}{call}{between}{call}{end}"


KIMI_CALL = '<|tool_call_begin|>functions.move:%d<|tool_call_argument_begin|>{"to": "a"}<|tool_call_end|>'


BAD_CALLS = ('{"name": "move", "arguments": {}}', '{"name": "jump", "arguments": {}}')


@pytest.mark.parametrize(
    ("template", "tokens", "special", "prompt", "good", "bad"),
    [
        (
            THINKING,
            (),
            (),
            "Hi<think>\n",
            (
                "Why</think>Sure.",
                f"Why</think>Sure.\n{CALLS} Done.",
                '</think><tool_call>{"name": "wait", "arguments": {"any": [1]}}</tool_call>',
            ),
            (
                '</think><tool_call>{"name": "move", "arguments": {"any": [1]}}</tool_call>',
                '</think><tool_call>{"name": "jump", "arguments": {}}</tool_call>',
                "</think><tool_call>",
            ),
        ),
        (  # Qwen3's markers are tokens, and not special ones
            "{{ messages[-1].content }}{# <tool_call> #}",
            ("<tool_call>", "</tool_call>"),
            (),
            "Hi",
            ("Sure.", HERMES % MOVED, f"<think>Why</think>Sure.\n{HERMES % MOVED}"),
            tuple(HERMES % call for call in BAD_CALLS),
        ),
        (
            MISTRAL,
            (),
            ("[TOOL_CALLS]", "[ARGS]"),
            "Hi",
            ("Sure.", 'Sure.[TOOL_CALLS]move[ARGS]{"to": "a"}[TOOL_CALLS]wait[ARGS]{}'),
            ("[TOOL_CALLS]move[ARGS]{}", "[TOOL_CALLS]jump[ARGS]{}"),
        ),
        *(
            (
                f"{{# <｜tool▁calls▁begin｜> {template} #}}",
                (),
                DEEPSEEK,
                "Hi",
                ("Sure.", f"Sure.{''.join(parts)}", two_of(parts, "\n")),
                ("".join(parts).replace('"to"', '"too"'), "".join(parts).replace("move", "jump")),
            )
            for template, parts in (("", DEEPSEEK_NEW), ("```json", DEEPSEEK_OLD))
        ),
    ],
)
def test_calls_of_strict_functions_obey_their_schema(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    template: str,
    tokens: tuple[str, ...],
    special: tuple[str, ...],
    prompt: str,
    good: tuple[str, ...],
    bad: tuple[str, ...],
) -> None:
    tokenizer = with_tokens(tokenizers["byte_level"], template, *special, tokens=tokens)
    _, grammar = read(tokenizer, tokenizer.encode(prompt), tools=STRICT)
    assert [text for text in (*good, *bad) if accepts(tokenizer, grammar, text)] == [*good]


def test_text_after_calls_of_strict_functions_is_content(thinker: ModelTokenizer) -> None:
    reading, _ = read(thinker, thinker.encode("Hi<think>\n"), tools=STRICT)
    message = whole_message(reading.message(), f"Why</think>Sure.\n{CALLS} Done.")
    assert (message["reasoning"], message["content"]) == ("Why", "Sure. Done.")
    assert [name for name, _ in calls_of(message)] == ["move", "wait"]


@pytest.mark.parametrize(
    ("template", "special", "one", "two"),
    [
        (
            "{# <tool_call> #}",
            (),
            HERMES % MOVED,
            f"{HERMES % MOVED}\n{HERMES % MOVED}",
        ),
        (
            MISTRAL,
            ("[TOOL_CALLS]", "[ARGS]"),
            '[TOOL_CALLS]move[ARGS]{"to": "a"}',
            '[TOOL_CALLS]move[ARGS]{"to": "a"}[TOOL_CALLS]move[ARGS]{"to": "}"}',
        ),
        (
            "{# <|tool_calls_section_begin|> #}",
            (*KIMI, "<|tool_call_argument_begin|>"),
            KIMI[0] + KIMI_CALL % 0 + KIMI[1],
            KIMI[0] + KIMI_CALL % 0 + KIMI_CALL % 1 + KIMI[1],
        ),
        (
            "{# <|python_tag|> #}",
            (),
            '{"name": "move", "parameters": {"to": "a"}}',
            '{"name": "move", "parameters": {"to": "a"}}; {"name": "move", "parameters": {"to": "}"}}',
        ),
        ("{# <｜tool▁calls▁begin｜> #}", DEEPSEEK, "".join(DEEPSEEK_NEW), two_of(DEEPSEEK_NEW, "")),
        ("{# <｜tool▁calls▁begin｜> ```json #}", DEEPSEEK, "".join(DEEPSEEK_OLD), two_of(DEEPSEEK_OLD, "\n")),
    ],
)
def test_forced_calls_have_the_form_of_the_family(
    tokenizers: dict[str, PreTrainedTokenizerFast], template: str, special: tuple[str, ...], one: str, two: str
) -> None:
    tokenizer = with_tokens(tokenizers["byte_level"], template, *special)
    named = {"type": "function", "function": {"name": "move"}}
    for fields, is_several in (
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": named}, False),
    ):
        reading, grammar = read(tokenizer, [5], tools=STRICT, **fields)
        assert accepts(tokenizer, grammar, one)
        assert accepts(tokenizer, grammar, two) == is_several
        assert not accepts(tokenizer, grammar, f"Sure.{one}")
        for text, count in ((one, 1), (two, 2))[: 1 + is_several]:
            detokenizer = tokenizer.detokenizer(shown=reading.shown)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            pieces = [*map(detokenizer.add, token_ids), detokenizer.flush()]
            message = reading.message()
            deltas = [message.delta([piece], None) for piece in pieces] + [message.delta([""], "stop")]
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            assert len([call for call in calls if "id" in call]) == count
            assert len(calls) > 3 * count, "the arguments come while they are written"
            assert whole_message(reading.message(), *pieces)["content"] is None


ROUTE = {
    "type": "object",
    "properties": {
        "to": {"type": "string"},
        "days": {"type": "integer"},
        "kind": {"type": "string", "enum": ["road", "rail"]},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
    },
    "required": ["to", "days"],
    "$defs": {"stop": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
QWEN = "<tool_call>\n<function=plan>\n{}</function>\n</tool_call>"
QWEN_VALUE = "<parameter={}>\n{}\n</parameter>\n"
GLM, GLM_VALUE = "<tool_call>plan\n{}</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
GLM_MARKS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
WHOLE = {"to": 'Bonn "a" </x>\n{1', "days": "3", "kind": "rail", "stops": '[{"x": 1}]'}


@pytest.mark.parametrize("marks", ["no tokens", "tokens", "special tokens"])
@pytest.mark.parametrize(
    ("template", "call", "value", "tokens"),
    [
        ("{# <tool_call> <function= #}", QWEN, QWEN_VALUE, GLM_MARKS[:2]),
        ("{# <tool_call> <arg_key> #}", GLM, GLM_VALUE, GLM_MARKS),
        ("{# <tool_call> <arg_key> #}", GLM.replace("\n", ""), GLM_VALUE.replace("\n", ""), GLM_MARKS),
    ],
)
def test_forced_calls_between_tags_obey_their_schema(
    tokenizers: dict[str, PreTrainedTokenizerFast],
    template: str,
    call: str,
    value: str,
    tokens: tuple[str, ...],
    marks: str,
) -> None:
    special = tokens[:2] if marks == "special tokens" else ()
    plain = tokens if marks == "tokens" else ()
    tokenizer = with_tokens(tokenizers["byte_level"], template, *special, tokens=plain)
    tools = [{"type": "function", "function": {"name": "plan", "parameters": ROUTE}}, TOOLS[1]]

    def written(**values: str) -> str:
        return call.format("".join(value.format(*pair) for pair in values.items()))

    reading, grammar = read(tokenizer, [5], reads=False, tools=tools, tool_choice="required")
    few = {name: WHOLE[name] for name in ("to", "days")}
    for good in (written(**WHOLE), written(**few), written(**{**few, "to": ""})):
        assert accepts(tokenizer, grammar, good)
    for wrong in (
        {"to": "Bonn"},
        {**few, "days": "three"},
        {**WHOLE, "kind": "air"},
        {**WHOLE, "stops": '[{"x": "1"}]'},
        {**few, "more": "1"},
    ):
        assert not accepts(tokenizer, grammar, written(**wrong))
    assert not accepts(tokenizer, grammar, f"Sure.{written(**few)}")
    assert accepts(tokenizer, grammar, f"{written(**few)}\n{written(**WHOLE)}")
    message = message_of(tokenizer, reading, f"{written(**few)}\n{written(**WHOLE)}")
    assert calls_of(message) == [
        ("plan", {"to": WHOLE["to"], "days": 3}),
        ("plan", {"to": WHOLE["to"], "days": 3, "kind": "rail", "stops": [{"x": 1}]}),
    ]
    assert not (message["content"] or "").strip()


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "string", "maxLength": 5},
        {"type": ["string", "integer"]},
        {"$ref": "#/$defs/stop"},
        {"type": "string", "enum": ["a<b"]},
        {},
    ],
)
def test_forced_call_that_tags_cannot_say_is_json(
    tokenizers: dict[str, PreTrainedTokenizerFast], schema: dict[str, Any]
) -> None:
    tokenizer = with_tokens(tokenizers["byte_level"], "{# <tool_call> <function= #}")
    parameters = {"type": "object", "properties": {"to": schema}, "$defs": {"stop": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "plan", "parameters": parameters}}]
    reading, grammar = read(tokenizer, [5], tools=tools, tool_choice="required")
    text = '{"name": "plan", "arguments": {}}'
    assert accepts(tokenizer, grammar, text)
    assert calls_of(whole_message(reading.message(), text)) == [("plan", {})]


GPT_OSS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_CALL = '<|channel|>commentary to=functions.move <|constrain|>json<|message|>{"to": "a"}'


@pytest.mark.parametrize(
    ("thought", "shows_end", "reads"),  # an engine ends at <|call|> and does not show it
    [("", True, True), ("Why", False, True), ("Why", True, False), ("", False, False)],
)
def test_forced_call_of_gpt_oss_has_its_form_after_its_reasoning(
    tokenizers: dict[str, PreTrainedTokenizerFast], thought: str, shows_end: bool, reads: bool
) -> None:
    tokenizer = with_tokens(tokenizers["byte_level"], "{# <|channel|> #}", *GPT_OSS)
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" * bool(thought) + HARMONY_CALL
    for choice in ("required", {"type": "function", "function": {"name": "move"}}):
        prompt = tokenizer.encode("Hi<|start|>assistant", add_special_tokens=False)
        reading, grammar = read(tokenizer, prompt, reads=reads, tools=STRICT, tool_choice=choice)
        assert accepts(tokenizer, grammar, f"{text}<|call|>")
        for wrong in (
            "Sure.<|return|>",
            "<|channel|>final<|message|>Sure.<|return|>",
            text.replace("move", "jump") + "<|call|>",
            text.replace('"to"', '"too"') + "<|call|>",
        ):
            assert not accepts(tokenizer, grammar, wrong)
        message = message_of(tokenizer, reading, text + "<|call|>" * shows_end)
        assert calls_of(message) == [("move", {"to": "a"})]
        assert (message["content"], message.get("reasoning", "")) == (None, thought)


@pytest.mark.parametrize("reads", [True, False])
def test_forced_call_of_any_name_is_read_also_where_others_are_not(
    tokenizers: dict[str, PreTrainedTokenizerFast], reads: bool
) -> None:
    tokenizer = with_tokens(tokenizers["byte_level"], MISTRAL, "[TOOL_CALLS]", "[ARGS]")
    tools = [{"type": "function", "function": {"name": 'say#1 "stop"'}}]
    reading, grammar = read(tokenizer, [5], reads=reads, tools=tools, tool_choice="required")
    text = '[TOOL_CALLS]say#1 "stop"[ARGS]{}'
    assert accepts(tokenizer, grammar, text)
    assert calls_of(message_of(tokenizer, reading, text)) == [('say#1 "stop"', {})]


@cache
def engines_tokenizer(backend: str) -> LLTokenizer:
    return LLTokenizer(backend, eos_token=[0])


def accepts(tokenizer: ModelTokenizer, lark: str, text: str) -> bool:
    """Return whether a text may be an answer, written with the fewest tokens that its letters allow: one each."""
    backend = tokenizer._tokenizer.backend_tokenizer.to_str()
    matcher = new_matcher(engines_tokenizer(backend), Grammar("lark", lark))  # as an engine compiles it
    added = tokenizer.added_tokens()
    parts = re.split(f"({'|'.join(map(re.escape, added))})", text)
    words = [word for part in parts for word in ([part] if part in added else part)]
    token_ids = [token for word in words for token in tokenizer.encode(word, add_special_tokens=False)]
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def test_reasoning_has_no_bound_where_no_token_ends_it(tokenizer: ModelTokenizer, thinker: ModelTokenizer) -> None:
    body = ChatCompletionRequest.model_validate({"messages": HI, "thinking_token_budget": 5})
    assert not MessageFormat(tokenizer).can_bound_reasoning(body, [5])
    assert MessageFormat(tokenizer).reading(body, [5]).grammar is None
    assert MessageFormat(thinker).can_bound_reasoning(body, thinker.encode("Hi"))


def test_budget_beside_strict_tools_is_refused_where_nothing_would_bound_it(thinker: ModelTokenizer) -> None:
    body = ChatCompletionRequest.model_validate({"messages": HI, "tools": STRICT, "thinking_token_budget": 5})
    assert MessageFormat(thinker).reading(body, thinker.encode("Hi<think>\n")).grammar is not None
    with pytest.raises(ApiError, match="strict tools"):
        MessageFormat(thinker).reading(body, thinker.encode("Hi"))


ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
    },
}
FORMATTED = '{"answer": "It is <fine>"}'
LLAMA4_CALL = '[move(to="a")]'
GEMMA_CALL = '<|tool_call>call:move{to:<|"|>a<|"|>}<tool_call|>'
DSML_CALL = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="move">\n'
    '<｜DSML｜parameter name="to" string="true">a</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
K3_CALL = (
    '<|open|>call tool="move"<|sep|>'
    '<|open|>argument key="to" type="string"<|sep|>a<|close|>argument<|sep|><|close|>call<|sep|>'
)


HERMES_CALL = HERMES % '{"name": "move", "arguments": {"to": "a"}}'


@pytest.mark.parametrize(
    ("template", "special", "call", "prompt"),
    [
        ("{# <tool_call> #}", (), HERMES_CALL, "Hi"),
        (THINKING, (), f"</think>\n\n{HERMES_CALL}", "Hi<think>\n"),
        (MISTRAL, ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]move[ARGS]{"to": "a"}', "Hi"),
        (
            "{# <|tool_calls_section_begin|> #}",
            (*KIMI, "<|tool_call_argument_begin|>"),
            KIMI[0] + KIMI_CALL % 0 + KIMI[1],
            "Hi",
        ),
        ("{# <|python_tag|> #}", (), '{"name": "move", "parameters": {"to": "a"}}', "Hi"),
        ("{# <｜tool▁calls▁begin｜> #}", DEEPSEEK, "".join(DEEPSEEK_NEW), "Hi"),
        ("{# <tool_call> <function= #}", (), QWEN.replace("plan", "move").format(QWEN_VALUE.format("to", "a")), "Hi"),
        ("{# <tool_call> <arg_key> #}", (), GLM.replace("plan", "move").format(GLM_VALUE.format("to", "a")), "Hi"),
        ("{# <|python_start|> #}", (), LLAMA4_CALL, "Hi"),
        ("{# <|tool_call> #}", ("<|tool_call>", "<tool_call|>", '<|"|>'), GEMMA_CALL, "Hi"),
        ("{# ｜DSML｜ #}", (), DSML_CALL, "Hi"),
        ("{# <|open|> #}", ("<|open|>", "<|close|>", "<|sep|>"), K3_CALL, "Hi"),
        ("{# <|channel|> #}", GPT_OSS, f"{HARMONY_CALL}<|call|>", "Hi<|start|>assistant"),
    ],
)
def test_answer_beside_a_response_format_is_calls_or_has_the_format(
    tokenizers: dict[str, PreTrainedTokenizerFast], template: str, special: tuple[str, ...], call: str, prompt: str
) -> None:
    tokenizer = with_tokens(tokenizers["byte_level"], template, *special)
    token_ids = tokenizer.encode(prompt, add_special_tokens=False)
    reading, grammar = read(tokenizer, token_ids, tools=TOOLS, response_format=ANSWER)
    before, after = ("</think>\n\n", "") if "<think>" in prompt else ("", "")
    if prompt.endswith("assistant"):
        before, after = "<|channel|>final<|message|>", "<|return|>"
    formatted = f"{before}{FORMATTED}{after}"
    assert accepts(tokenizer, grammar, call)
    assert accepts(tokenizer, grammar, formatted.removesuffix("<|return|>"))
    assert not accepts(tokenizer, grammar, f"{before}Sure.{after}")
    assert not accepts(tokenizer, grammar, f'{before}{{"other": 1}}{after}')
    message = message_of(tokenizer, reading, call)
    assert calls_of(message) == [("move", {"to": "a"})]
    assert not (message["content"] or "").strip()
    message = message_of(tokenizer, reading, formatted)
    assert message["content"] == FORMATTED
    assert "tool_calls" not in message
    plain, _ = read(tokenizer, token_ids, tools=TOOLS, tool_choice="none", response_format=ANSWER)
    assert "tool_calls" not in message_of(tokenizer, plain, formatted)
    _, forced_grammar = read(tokenizer, token_ids, tools=TOOLS, tool_choice="required", response_format=ANSWER)
    assert not accepts(tokenizer, forced_grammar, formatted.removesuffix("<|return|>"))


def test_response_format_holds_alone_where_no_calls_are_read(tokenizer: ModelTokenizer) -> None:
    _, grammar = read(tokenizer, [5], tools=TOOLS, response_format=ANSWER)
    assert json.loads(grammar) == ANSWER["json_schema"]["schema"]
