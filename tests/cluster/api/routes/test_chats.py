"""POST /v1/chat/completions over sockets: templates, streams and log-probabilities, as OpenAI's client reads them."""

from typing import Any

import httpx
import openai
import pytest

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.scripted_api import HI, MAX_MODEL_LEN, STORY, ScriptedDispatcher, Serve, events, refused


def test_chat_matches_openais_model(
    client: openai.OpenAI, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", STORY, "stop")
    [submission] = engine.submissions
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(submission.prompt_token_ids) == prompt
    # Without a limit, the answer may fill the rest of the context.
    assert submission.sampling.max_tokens == MAX_MODEL_LEN - len(submission.prompt_token_ids)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_chat_with_limit_ends_at_limit(http: httpx.Client, engine: ScriptedDispatcher, field: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, field: 5}).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_streamed_chat_matches_openais_model(client: openai.OpenAI, engine: ScriptedDispatcher) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *middle, last, usage = list(stream)
    assert first.object == "chat.completion.chunk"
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in [*middle, last])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == STORY
    assert all(chunk.choices[0].finish_reason is None for chunk in middle)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "stop")
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(engine.tokenizer.encode(STORY)) + 1
    assert engine.aborted == []


def test_streamed_chat_begins_every_choice_with_its_role(http: httpx.Client) -> None:
    chunks = events(http.post("/v1/chat/completions", json={"messages": HI, "n": 3, "stream": True}))
    for index in range(3):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == STORY
        assert deltas[-1] == {}


def test_chat_logprobs_are_alike_streamed_and_whole(client: openai.OpenAI, tokenizer: ModelTokenizer) -> None:
    fields: Any = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 3, "max_tokens": 100}
    whole = client.chat.completions.create(**fields).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    raw = b"".join(bytes(token.bytes or []) for token in whole.content[:-1])
    assert raw.decode() == STORY
    assert all(len(token.top_logprobs) == 3 for token in whole.content)
    streamed = [
        token
        for chunk in client.chat.completions.create(**fields, stream=True)
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == whole.content


def test_chat_fields_reach_template(http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer) -> None:
    def prompt(**fields: Any) -> str:
        answer = http.post("/v1/chat/completions", json={"messages": HI, **fields})
        assert answer.status_code == 200, answer.text
        return tokenizer.decode(engine.submissions[-1].prompt_token_ids)

    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert '"weather"' in prompt(tools=tools)
    assert '"weather"' not in prompt(tools=tools, tool_choice="none")
    assert prompt(add_generation_prompt=False).endswith("<|im_end|>\n")
    assert prompt(chat_template_kwargs={"mood": "glad"}).endswith("(glad)<|im_start|>assistant\n")
    assert prompt(chat_template="{{ messages[0].content }}!") == "Hi!"
    half = [*HI, {"role": "assistant", "content": "Well,"}]
    assert prompt(messages=half, continue_final_message=True).endswith("assistant\nWell,")
    prompt(messages=[{"role": "user", "content": " "}], chat_template=" ")  # a prompt of white space is one


def test_chat_template_of_request_is_refused_by_default(serve: Serve) -> None:
    http = serve()
    body = {"messages": HI, "chat_template": "{{ messages[0].content }}"}
    refused(http.post("/v1/chat/completions", json=body), 400, param="chat_template")
