"""Tool loops: an answer goes to its client, comes back with the tool's result, and is read by the family's template."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.call_ids import CALL_IDS, with_own_ids
from crossdock.cluster.api.text.families import FAMILIES
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import ScriptedDispatcher, events, named_events, serving
from tests.cluster.api.text.chat_templates import TEMPLATES

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
JSON = '{"city": "Paris"}'
DSML = "<｜DSML｜"
# For each family, a template of its kind, and a call as the model writes it.
LOOPS: Mapping[str, tuple[str, str]] = {
    "hermes": ("qwen3", f'<tool_call>\n{{"name": "weather", "arguments": {JSON}}}\n</tool_call>'),
    "qwen3_xml": (
        "qwen3.5",
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    ),
    "seed_oss": (
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
    ),
    "minimax_m2": (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    ),
    "step3": (
        "step3",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
        '<steptml:parameter name="city">Paris</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
    ),
    "internlm": (
        "internlm",
        f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {JSON}}}<|action_end|>',
    ),
    "lfm2": ("lfm2", '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>'),
    "deepseek_v3": (
        "deepseek_r1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_dsml": (
        "deepseek_v3.2",
        f'{DSML}function_calls>{DSML}invoke name="weather">\n{DSML}parameter name="city" string="true">Paris'
        "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
    ),
    "kimi_k2": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "kimi_k3": (
        "kimi_k3",
        '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris'
        "<|close|>argument<|sep|><|close|>call<|sep|>",
    ),
    "gemma4": ("gemma4", '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'),
    "mistral": ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}, "id": "Ab3dEf6hI"}}]'),
    "llama3_json": ("llama3", f'{{"name": "weather", "parameters": {JSON}}}'),
    "llama4_pythonic": ("llama4", '<|python_start|>[weather(city="Paris")]<|python_end|>'),
    "gpt_oss": ("gpt_oss", f" to=functions.weather<|channel|>commentary json<|message|>{JSON}<|call|>"),
}
OWN = {"kimi_k2": "functions.weather:0", "mistral": "Ab3dEf6hI"}  # ids that the models have written


def test_every_family_with_calls_has_a_loop() -> None:
    assert LOOPS.keys() == {name for name, family in FAMILIES.items() if family.calls} | {"gpt_oss"}


class Loop:
    """A model of a family: it calls the function, and then answers."""

    def __init__(self, backend: PreTrainedTokenizerFast, family: str) -> None:
        template, self.words = LOOPS[family]
        own = deepcopy(backend)
        own.chat_template = TEMPLATES[template]
        self.family = family
        self.tokenizer = ModelTokenizer(own)
        self.tokenizer.takes_parts = self.tokenizer.loses_strings()
        self.engine = ScriptedDispatcher(self.tokenizer, 4096)
        self.engine.script = lambda submission: self.engine.story(submission, self.words)

    @contextmanager
    def served(self) -> Iterator[httpx.Client]:
        with serving(self.engine, self.tokenizer, HttpConfig(tool_call_parser="auto")) as http:
            yield http

    def prompt(self, number: int = -1) -> str:
        return self.tokenizer.decode(self.engine.submissions[number].prompt_token_ids)

    def ids(self) -> list[str]:
        """Return the ids of calls and of results in the newest prompt, where the family's template shows them."""
        form = {"kimi_k2": r"functions\.\w+:\d+", "mistral": r'id": "(\w*)"'}.get(self.family, "(?!)")
        return re.findall(form, self.prompt())


@pytest.fixture(params=LOOPS)
def loop(tokenizers: dict[str, PreTrainedTokenizerFast], request: pytest.FixtureRequest) -> Loop:
    return Loop(tokenizers["byte_level"], request.param)


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check_second_turn(loop: Loop, call_id: str) -> None:
    """Check the second prompt: it goes on where the first answer ended, and the result has the id of the call."""
    assert "RAIN" in loop.prompt()
    assert "Paris" in loop.prompt()
    if loop.family in OWN:
        assert call_id == OWN[loop.family]
        assert loop.ids() == [call_id, call_id]
    if loop.family not in ("llama4_pythonic", "llama3_json", "gpt_oss"):  # which write white space otherwise
        begun = loop.prompt(-2) + loop.words
        assert loop.prompt()[: len(begun)].replace(" ", "") == begun.replace(" ", "")


def test_chat_goes_on_after_a_call(loop: Loop) -> None:
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with loop.served() as http:
        [choice] = post(http, "/v1/chat/completions", messages=messages, tools=TOOLS)["choices"]
        [call] = choice["message"]["tool_calls"]
        body = {"messages": messages, "tools": TOOLS, "stream": True}
        deltas = [each["choices"][0]["delta"] for each in events(http.post("/v1/chat/completions", json=body))]
        [streamed] = [part["id"] for delta in deltas for part in delta.get("tool_calls", ()) if "id" in part]
        if loop.family in OWN:
            assert streamed == call["id"]
        messages += [choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "RAIN"}]
        loop.words, words = "It rains.", loop.words
        second = post(http, "/v1/chat/completions", messages=messages, tools=TOOLS)
    assert second["choices"][0]["message"]["content"] == "It rains."
    loop.words = words
    check_second_turn(loop, call["id"])


def test_response_goes_on_after_a_call(loop: Loop) -> None:
    tools = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
    with loop.served() as http:
        first = post(http, "/v1/responses", input="Weather?", tools=tools)
        [call] = [item for item in first["output"] if item["type"] == "function_call"]
        loop.words, words = "It rains.", loop.words
        given = [{"type": "function_call_output", "call_id": call["call_id"], "output": "RAIN"}]
        second = post(http, "/v1/responses", input=given, previous_response_id=first["id"], tools=tools)
    assert second["output"][-1]["content"][0]["text"] == "It rains."
    loop.words = words
    check_second_turn(loop, call["call_id"])


def test_message_goes_on_after_a_call(loop: Loop) -> None:
    body = {"tools": [{"name": "weather", "input_schema": CITY}], "max_tokens": 400}
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    with loop.served() as http:
        first = post(http, "/v1/messages", messages=messages, **body)
        [call] = [block for block in first["content"] if block["type"] == "tool_use"]
        streamed = named_events(http.post("/v1/messages", json={"messages": messages, **body, "stream": True}))
        begun = [each["content_block"] for each in streamed if each["type"] == "content_block_start"]
        assert [block["id"] == call["id"] for block in begun] == [loop.family in OWN]
        loop.words, words = "It rains.", loop.words
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "RAIN"}
        messages += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        second = post(http, "/v1/messages", messages=messages, **body)
    assert second["content"][-1]["text"] == "It rains."
    loop.words = words
    check_second_turn(loop, call["id"])


@pytest.mark.parametrize("family", OWN)
def test_ids_of_other_servers_get_the_form_of_the_family_and_keep_it_in_later_turns(
    tokenizers: dict[str, PreTrainedTokenizerFast], family: str
) -> None:
    loop = Loop(tokenizers["byte_level"], family)
    loop.words = "Yes."
    names = ["call_" + "0a" * 16, "toolu_01A", "x", OWN[family], "call_" + "0a" * 16]
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    prompts = []
    with loop.served() as http:
        for number, name in enumerate(names):
            function = {"name": "weather", "arguments": json.dumps({"city": f"city {number}"})}
            messages.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": name, "type": "function", "function": function}],
                }
            )
            messages.append({"role": "tool", "tool_call_id": name, "content": f"rain {number}"})
            post(http, "/v1/chat/completions", messages=messages, tools=TOOLS)
            prompts.append(loop.prompt())
            found = loop.ids()
            assert found[::2] == found[1::2]
            assert len(found) == 2 * number + 2
            assert all(CALL_IDS[family].is_own(each, "weather") for each in found)
        assert found[6] == OWN[family]
    for earlier, later in pairwise(prompts):
        assert later.startswith(earlier.removesuffix("<|im_assistant|>assistant<|im_middle|>"))
    if family == "kimi_k2":
        assert [int(each.rpartition(":")[2]) for each in found[::2]] == [0, 1, 2, 0, 4]


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("family", OWN)
def test_calls_without_a_usable_id_get_one_each(
    tokenizers: dict[str, PreTrainedTokenizerFast], family: str, choice: str
) -> None:
    """A forced call of Kimi K2 has the number that the model writes; two calls of one answer never share an id."""
    loop = Loop(tokenizers["byte_level"], family)
    two = {
        "kimi_k2": LOOPS[family][1].replace(
            "<|tool_calls_section_end|>",
            f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
        ),
        "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {JSON}, "id": "short"}}, '
        f'{{"name": "weather", "arguments": {JSON}}}]',
    }
    loop.words = two[family]
    with loop.served() as http:
        message = post(
            http,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "Weather?"}],
            tools=TOOLS,
            tool_choice=choice,
        )["choices"][0]["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(CALL_IDS[family].is_own(each, "weather") for each in ids)


def test_results_have_the_id_of_the_newest_call_with_theirs() -> None:
    call = {"id": "call_0", "function": {"name": "f", "arguments": {}}}
    asked, told = {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_0"}
    seen = with_own_ids([asked, told, asked, told, {"role": "tool", "tool_call_id": "?"}], CALL_IDS["kimi_k2"])
    assert [message.get("tool_call_id") for message in seen[1::2]] == ["functions.f:0", "functions.f:1"]
    assert asked["tool_calls"][0]["id"] == "call_0"  # type: ignore[index]
