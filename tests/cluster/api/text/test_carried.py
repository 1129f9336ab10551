"""Every role and every part of a message, in the templates of many families: its text is shown, or it is a 400."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.body.bodies import ChatCompletionRequest
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.call_ids import CALL_IDS
from crossdock.cluster.api.text.families import family_in
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ModelCard
from tests.cluster.api.scripted_api import ScriptedDispatcher, serving
from tests.cluster.api.text.chat_templates import TEMPLATES
from tests.cluster.small_tokenizers import CHATML as SMALL

Message: TypeAlias = dict[str, Any]
Asked: TypeAlias = tuple[PromptEncoder, ModelTokenizer]
CARD = ModelCard("tiny", 1, 1 << 16, 620, 0)
TOOL = {"type": "function", "function": {"name": "look-up", "parameters": {"type": "object", "properties": {}}}}


def says(role: str, text: str, **fields: Any) -> Message:
    return {"role": role, "content": text, **fields}


def call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number: int, text: str) -> Message:
    return says("tool", text, tool_call_id=f"call_{number}")


QUESTION, ANSWER, MORE = says("user", "QUESTION"), says("assistant", "ANSWER"), says("user", "MORE")
LOOKED = says("assistant", "", tool_calls=[call(1, "look-up", x="WHERE")])
TOLD = says("assistant", "MOMENT", tool_calls=[call(1, "look-up", x="WHERE")])
BOTH = says("assistant", "", tool_calls=[call(1, "look-up", x="WHERE"), call(2, "measure", x="WHAT")])
RESULT, OTHER = result(1, "RESULT"), result(2, "OTHER")
THOUGHT = says("assistant", "MOMENT", tool_calls=[call(1, "look-up", x="WHERE")], reasoning_content="since")
CHATS = {
    "question": [QUESTION],
    "system": [says("system", "RULES"), QUESTION],
    "developer": [says("developer", "RULES"), QUESTION],
    "system and developer": [says("system", "FIRST"), says("developer", "RULES"), QUESTION],
    "later system": [QUESTION, ANSWER, says("system", "RULES"), MORE],
    "later developer": [QUESTION, ANSWER, says("developer", "RULES"), MORE],
    "last developer": [QUESTION, says("developer", "RULES")],
    "function": [QUESTION, ANSWER, says("function", "RESULT", name="look-up")],
    "unknown role": [QUESTION, says("narrator", "MEANWHILE"), MORE],
    "turns": [says("system", "RULES"), QUESTION, ANSWER, MORE],
    "parts": [says("user", [{"type": "text", "text": "QUESTION"}, {"type": "text", "text": "DETAIL"}])],  # type: ignore[arg-type]
    "call": [QUESTION, LOOKED, RESULT],
    "call with rules": [says("system", "RULES"), QUESTION, LOOKED, RESULT],
    "call and text": [QUESTION, TOLD, RESULT],
    "call and text, answered": [QUESTION, TOLD, RESULT, ANSWER, MORE],
    "call, text and thought": [QUESTION, THOUGHT, RESULT],
    "two calls": [QUESTION, BOTH, RESULT, OTHER],
    "two calls and text": [QUESTION, {**BOTH, "content": "MOMENT"}, OTHER, RESULT, ANSWER, MORE],
    "result with name": [QUESTION, LOOKED, {**RESULT, "name": "look-up"}],
}
ROLES_ALONE = ("command_r", "deepseek_r1", "glm", "gpt_oss", "mistral", "phi3", "qwen3", "qwen3.5")  # they know
NO_CALLS = ("gemma2", "phi3")


def is_refused(template: str, chat: str) -> bool:
    """Return whether a chat cannot be written for a template. All others are answered."""
    if chat in ("function", "unknown role"):
        return template in ROLES_ALONE or (template, chat) == ("gemma2", "function")
    return template in NO_CALLS and any(each["role"] == "tool" for each in CHATS[chat])


def texts(value: Any) -> Iterator[str]:
    """Yield the words in capitals of messages, and the names of called functions."""
    if isinstance(value, str):
        if value.isupper() or value in ("look-up", "measure"):
            yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            if not (name == "name" and "role" in value):
                yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


@pytest.fixture(scope="module")
def asks(tokenizers: dict[str, PreTrainedTokenizerFast], model_dir: Path) -> dict[str, Asked]:
    """An encoder for each template: those of the tests, and the default model's own."""
    shipped = (model_dir / "chat_template.jinja").read_text()
    found = {}
    for name, template in {**TEMPLATES, "small": SMALL, "default": shipped}.items():
        backend = deepcopy(tokenizers["byte_level"])
        backend.chat_template = template
        tokenizer = ModelTokenizer(backend)
        tokenizer.takes_parts = tokenizer.loses_strings()
        ids = CALL_IDS.get(family_in(tokenizer.chat_template) or "")
        found[name] = (PromptEncoder(tokenizer, trusts_templates=True, call_ids=ids), tokenizer)
    return found


async def prompt_of(asked: Asked, messages: Sequence[Message], **fields: Any) -> str:
    encoder, tokenizer = asked
    has_calls = any("tool_calls" in each for each in messages)
    body = ChatCompletionRequest.of({"messages": messages, **({"tools": [TOOL]} if has_calls else {}), **fields})
    prompt = await encoder.encode_chat(body, CARD, truncates=False, salt="")
    return str(tokenizer.decode(prompt.token_ids))


@pytest.mark.parametrize("template", [*TEMPLATES, "small", "default"])
@pytest.mark.parametrize("chat", CHATS)
async def test_text_of_every_message_is_in_the_prompt_or_the_chat_is_refused(
    asks: dict[str, Asked], template: str, chat: str
) -> None:
    messages = CHATS[chat]
    for _ in range(2):  # the second time, how the chat is written is known
        if is_refused(template, chat):
            with pytest.raises(ApiError) as refused:
                await prompt_of(asks[template], messages)
            assert (refused.value.status, str(refused.value.param)[:8]) == (400, "messages")
            assert next(role for role in ("function", "narrator", "tool") if role in str(refused.value))
            continue
        prompt = await prompt_of(asks[template], messages)
        missing = [text for text in texts(messages) if text not in prompt]
        assert not missing, prompt
        again = await prompt_of(asks[template], messages)
        assert again == prompt


async def test_messages_that_a_template_shows_are_written_as_they_came(asks: dict[str, Asked]) -> None:
    for name in ("qwen3", "kimi_k3", "glm", "deepseek_v3.2"):
        messages = [says("system", "RULES"), QUESTION, BOTH, RESULT, OTHER, ANSWER, MORE]
        given = asks[name][1].render_chat(messages, tools=[TOOL])
        assert await prompt_of(asks[name], messages) == given


async def test_text_and_calls_of_one_message_stand_apart_where_one_of_them_would_be_left_out(
    asks: dict[str, Asked],
) -> None:
    prompt = await prompt_of(asks["llama3"], [QUESTION, {**BOTH, "content": "MOMENT"}, OTHER, RESULT])
    found = [prompt.index(text) for text in ("MOMENT", "WHERE", "RESULT", "WHAT", "OTHER")]
    assert found == sorted(found)
    assert prompt.count("assistant<|end_header_id|>") == 4


async def test_calls_that_a_template_leaves_out_are_written_as_any_model_writes_forced_calls(
    asks: dict[str, Asked],
) -> None:
    prompt = await prompt_of(asks["default"], [QUESTION, TOLD, RESULT])
    assert 'MOMENT\n\n{"name": "look-up", "arguments": {"x": "WHERE"}}<|im_end|>' in prompt


async def test_documents_go_to_the_template_that_reads_them(asks: dict[str, Asked]) -> None:
    documents = [{"title": "TITLE", "text": "BODY"}, {"text": "OTHER"}]
    prompt = await prompt_of(asks["command_r"], [QUESTION], documents=documents)
    assert "QUESTION<results>Document: 0\ntitle: TITLE\ntext: BODY\nDocument: 1\ntext: OTHER\n" in prompt
    assert "results" not in await prompt_of(asks["command_r"], [QUESTION])
    chosen = await prompt_of(asks["command_r"], [QUESTION], documents=documents, chat_template="rag")
    assert chosen == prompt
    for name, fields in (
        ("command_r", {"tools": [TOOL]}),
        ("command_r", {"chat_template": "default"}),
        ("qwen3", {}),
        ("qwen3", {"chat_template": "{{ messages[0].content }}{% if false %}{{ documents }}{% endif %}"}),
        ("qwen3", {"chat_template": "{{ messages[0].content }}{{ documents[0] }}"}),
    ):
        with pytest.raises(ApiError) as refused:
            await prompt_of(asks[name], [QUESTION], documents=documents, **fields)
        assert str(refused.value.param).startswith("documents")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[1].function_call"),
        ({"audio": {"id": "a"}}, "messages[1].audio"),
        ({"prefix": True}, "messages[1].prefix"),
    ],
)
async def test_field_of_a_message_that_the_template_does_not_read_is_refused(
    asks: dict[str, Asked], fields: Message, param: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await prompt_of(asks["chatml"], [QUESTION, {**ANSWER, **fields}, MORE])
    assert refused.value.param == param
    reads = "{% for m in messages %}{{ m.content }}{{ m.prefix }}{{ m.audio }}{{ m.function_call }}{% endfor %}"
    await prompt_of(asks["chatml"], [QUESTION, {**ANSWER, **fields}, MORE], chat_template=reads)


async def test_fields_of_our_answers_and_of_openais_come_back_without_harm(asks: dict[str, Asked]) -> None:
    back = {**ANSWER, "refusal": None, "annotations": [], "audio": None, "reasoning": "since", "name": "bot"}
    assert "ANSWER" in await prompt_of(asks["chatml"], [QUESTION, back, MORE])
    refusal = {"role": "assistant", "content": None, "refusal": "NEVER"}
    assert "NEVER" in await prompt_of(asks["chatml"], [QUESTION, refusal, MORE])


@pytest.mark.parametrize("template", [*TEMPLATES, "small", "default"])
async def test_name_or_thought_is_in_the_prompt_or_the_prompt_says_that_it_is_left_out(
    asks: dict[str, Asked], template: str
) -> None:
    encoder, tokenizer = asks[template]
    asked = {**QUESTION, "name": "NAMED"}
    for thought in ({"reasoning_content": "SINCE"}, {"reasoning": "SINCE", "reasoning_content": "SINCE"}):
        for messages in ([asked, {**ANSWER, **thought}, MORE], [asked, {**TOLD, **thought}, RESULT]):
            has_calls = RESULT in messages
            if has_calls and template in NO_CALLS:
                continue
            for _ in range(2):  # the second time, how the chat is written is known
                body = ChatCompletionRequest.of({"messages": messages, "tools": [TOOL] if has_calls else []})
                prompt = await encoder.encode_chat(body, CARD, truncates=False, salt="")
                text = tokenizer.decode(prompt.token_ids)
                left_out = [kind for kind, word in (("name", "NAMED"), ("reasoning", "SINCE")) if word not in text]
                assert list(prompt.unread) == left_out, text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_names_and_thoughts_that_the_template_leaves_out_are_said_in_a_header_of_every_api(
    wide: httpx.Client, is_streamed: bool
) -> None:
    text = {"type": "text", "text": "ANSWER"}
    thinking = [{"type": "thinking", "thinking": "since", "signature": ""}, text]
    since = [{"type": "reasoning_text", "text": "since"}]
    reasoning = {"type": "reasoning", "id": "a", "summary": [], "content": since}
    turns = [{**QUESTION, "name": "Ann"}, {**ANSWER, "reasoning_content": "since"}, MORE]
    asked: list[tuple[str, Message, list[str]]] = [
        ("chat/completions", {"messages": turns}, ["'messages': names", "'messages': thoughts"]),
        ("chat/completions", {"messages": [QUESTION, ANSWER, MORE]}, []),
        ("responses", {"input": [QUESTION, reasoning, ANSWER, MORE]}, ["'input': thoughts"]),
        (
            "messages",
            {"messages": [QUESTION, says("assistant", thinking), MORE], "max_tokens": 5},  # type: ignore[arg-type]
            ["'messages': thoughts"],
        ),
    ]
    for path, body, said in asked:
        answer = wide.post(f"/v1/{path}", json={**body, "stream": is_streamed})
        assert answer.status_code == 200, answer.text
        warnings = answer.headers.get_list("warning")
        assert len(warnings) == len(said)
        for warning, beginning in zip(warnings, said, strict=True):
            assert warning.startswith(f'299 crossdock "{beginning} ')


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_api_refuses_what_the_template_drops(tokenizers: dict[str, PreTrainedTokenizerFast], path: str) -> None:
    backend = deepcopy(tokenizers["byte_level"])
    backend.chat_template = TEMPLATES["phi3"]
    tokenizer = ModelTokenizer(backend)
    engine = ScriptedDispatcher(tokenizer, 1000)
    looked = {**LOOKED, "tool_calls": [{**LOOKED["tool_calls"][0], "function": {"name": "f", "arguments": "{}"}}]}
    bodies: Mapping[str, Message] = {
        "/v1/responses": {
            "input": [
                {"type": "message", "role": "user", "content": "Hi"},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "RESULT"},
            ]
        },
        "/v1/messages": {
            "max_tokens": 5,
            "messages": [
                QUESTION,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "RESULT"}]},
            ],
        },
    }
    with serving(engine, tokenizer, HttpConfig()) as http:
        answer = http.post(path, json=bodies.get(path, {"messages": [QUESTION, looked, RESULT]}))
        assert answer.status_code == 400, answer.text
        assert "role 'tool'" in answer.text
        developer = [says("system", "FIRST"), says("developer", "RULES"), QUESTION]
        answer = http.post("/tokenize", json={"messages": developer})
        assert "RULES" in tokenizer.decode(answer.json()["tokens"])
    assert not engine.submissions
