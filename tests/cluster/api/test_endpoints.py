"""The HTTP layer against real sockets: uvicorn in front of a dispatcher whose tokens are known beforehand."""

import asyncio
import contextlib
import json
import pickle
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.exceptions import RayTaskError
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api.bodies import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from crossdock.cluster.api.choices import merge
from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.http_config import HttpConfig
from crossdock.cluster.api.http_guard import HttpGuard
from crossdock.cluster.api.keys import KeyRing
from crossdock.cluster.api.limits import Ledger
from crossdock.cluster.api.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatch import ModelCard, ReplicaLost
from crossdock.workers.schedule.request import (
    FinishReason,
    Grammar,
    InvalidField,
    Overloaded,
    Submission,
    TokenDelta,
    TokenLogprobs,
)

MAX_MODEL_LEN = 200
STORY = "The quick brown fox 🙂 jumps over the lazy dog"
Script = Callable[[Submission], list[TokenDelta | Exception | float]]


class Scripted:
    """A dispatcher whose answers are scripted: deltas, errors, and pauses in seconds. Remembers what became of each."""

    def __init__(self, text: ModelTokenizer) -> None:
        self.text = text
        self.eos = text.encode("<|im_end|>")[0]
        self.is_ready = True
        self.script: Script = self.story
        self.submissions: list[Submission] = []
        self.aborted: list[str] = []
        self.running = 0

    @property
    def model(self) -> ModelCard:
        return ModelCard("tiny", 1_700_000_000, MAX_MODEL_LEN, 620)

    def ready(self) -> bool:
        return self.is_ready

    async def metrics_text(self) -> str:
        return "crossdock_up 1\n"

    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        its = [one for one in self.submissions if one.request_id == request_id and tenant in (None, one.tenant)]
        return [{"id": one.id} for one in its]

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        return [{"id": one.id} for one in self.submissions if tenant in (None, one.tenant)]

    async def generate(self, submission: Submission) -> AsyncIterator[TokenDelta]:
        self.submissions.append(submission)
        self.running += 1
        is_over = False
        try:
            for step in self.script(submission):
                if isinstance(step, float):
                    await asyncio.sleep(step)
                    continue
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    is_over = True
                    raise step
                is_over = step.finish_reason is not None
                yield step
        finally:
            self.running -= 1
            if not is_over:
                self.aborted.append(submission.id)

    def story(self, submission: Submission, words: str = STORY) -> list[TokenDelta | Exception | float]:
        """The story, then EOS; one token a step; with whatever log-probabilities are asked for."""
        sampling = submission.sampling
        ids = [*self.text.encode(words), self.eos][: sampling.max_tokens]
        deltas: list[TokenDelta | Exception | float] = []
        for i, token in enumerate(ids):
            delta = TokenDelta(submission.id, [token])
            if sampling.logprobs is not None:
                delta.logprobs = [self.logprob(token, sampling.logprobs)]
            if i == 0:
                delta.num_cached_tokens = min(4, len(submission.prompt_token_ids))
                if sampling.prompt_logprobs is not None:
                    known = [self.logprob(t, sampling.prompt_logprobs) for t in submission.prompt_token_ids[1:]]
                    delta.prompt_logprobs = [None, *known]
            if i == len(ids) - 1:
                delta.finish_reason = FinishReason.STOP if token == self.eos else FinishReason.LENGTH
                delta.stop_token_id = self.eos if token == self.eos else None
            deltas.append(delta)
        return deltas

    def logprob(self, token: int, count: int) -> TokenLogprobs:
        return TokenLogprobs(token, -0.25, 1, tuple((token + i, -0.25 - i) for i in range(count)))


class LiveServer(uvicorn.Server):
    """uvicorn in a thread of this process."""

    def __init__(self, app: Any) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_level="critical", ws="none", lifespan="off"))
        self.thread = threading.Thread(target=self.run)

    def __enter__(self) -> str:
        self.thread.start()
        eventually(lambda: self.started)
        return f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}"

    def __exit__(self, *exc: object) -> None:
        self.should_exit = True
        self.thread.join(10)


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def text(tokenizers: dict[str, PreTrainedTokenizerFast]) -> ModelTokenizer:
    return ModelTokenizer(tokenizers["byte_level"])


@pytest.fixture(scope="module")
def _engine(text: ModelTokenizer) -> Scripted:
    return Scripted(text)


@pytest.fixture
def engine(_engine: Scripted) -> Iterator[Scripted]:
    """The dispatcher behind `url`. No test may leave a generator open in it."""
    _engine.script, _engine.is_ready = _engine.story, True
    _engine.submissions.clear()
    _engine.aborted.clear()
    yield _engine
    eventually(lambda: _engine.running == 0)


@pytest.fixture(scope="module")
def url(_engine: Scripted, text: ModelTokenizer) -> Iterator[str]:
    config = HttpConfig(max_body_bytes=100_000, model_aliases=("other",), trust_request_chat_template=True)
    with LiveServer(build_api(_engine, text, config)) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture
def http(url: str, engine: Scripted) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def client(url: str, engine: Scripted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


HI = [{"role": "user", "content": "Hi"}]


def complete(http: httpx.Client, prompt: Any = "Hi", **fields: Any) -> Any:
    answer = http.post("/v1/completions", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int, **expected: Any) -> dict[str, Any]:
    """Checks OpenAI's error shape, and the fields given."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json().keys() == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    assert {name: error[name] for name in expected} == expected
    return error


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream, which must end in [DONE]."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-1]]


# -- completions -------------------------------------------------------------------------------------------------------


def test_a_completion(client: openai.OpenAI, engine: Scripted, text: ModelTokenizer) -> None:
    answer = client.completions.create(model="tiny", prompt="Once upon", max_tokens=100)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert abs(answer.created - time.time()) < 60
    [choice] = answer.choices
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (STORY, 0, "stop", None)
    num_prompt, num_output = len(text.encode("Once upon")), len(text.encode(STORY)) + 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_output)
    assert answer.usage.total_tokens == num_prompt + num_output
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert engine.submissions[0].prompt_token_ids == text.encode("Once upon")
    assert engine.aborted == []


def test_sixteen_tokens_unless_told_otherwise(http: httpx.Client, engine: Scripted, text: ModelTokenizer) -> None:
    engine.script = lambda s: engine.story(s, STORY * 3)
    answer = complete(http)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == text.decode(text.encode(STORY * 3)[:16]).rstrip("\ufffd")
    assert engine.submissions[0].sampling.temperature == 1.0


def test_prompts_of_token_ids_and_batches(http: httpx.Client, engine: Scripted, text: ModelTokenizer) -> None:
    complete(http, [5, 6, 7])
    assert [list(s.prompt_token_ids) for s in engine.submissions] == [[5, 6, 7]]
    engine.submissions.clear()
    engine.script = lambda s: engine.story(s, f"{len(s.prompt_token_ids)} tokens")
    answer = complete(http, [[5], [6, 7], [8, 9, 10]], max_tokens=50, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in answer["choices"]] == [f"{n} tokens" for n in (1, 1, 2, 2, 3, 3)]
    assert answer["usage"]["prompt_tokens"] == 6  # a prompt counts once, whatever n
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
    engine.submissions.clear()
    complete(http, ["a", "b c"])
    assert sorted(list(s.prompt_token_ids) for s in engine.submissions) == sorted(
        [text.encode("a"), text.encode("b c")]
    )


def test_prompts_of_a_batch_run_at_once(http: httpx.Client, engine: Scripted) -> None:
    engine.script = lambda s: [0.2, *engine.story(s)]
    start = time.monotonic()
    complete(http, ["a"] * 20)
    assert time.monotonic() - start < 2.0  # 4 if one by one


def test_seeds(http: httpx.Client, engine: Scripted) -> None:
    complete(http, n=3, seed=7, best_of=3)
    assert sorted(s.sampling.seed for s in engine.submissions) == [7, 8, 9]
    engine.submissions.clear()
    complete(http, seed=-1)
    complete(http, seed=2**63 - 1, n=2)
    assert all(0 <= s.sampling.seed < 2**63 for s in engine.submissions)
    engine.submissions.clear()
    complete(http)
    complete(http)
    assert len({s.sampling.seed for s in engine.submissions}) == 2  # drawn


def test_echo(http: httpx.Client) -> None:
    answer = complete(http, "The dog €", echo=True, max_tokens=100)
    assert answer["choices"][0]["text"] == "The dog €" + STORY
    answer = complete(http, "<|im_start|>a", echo=True, max_tokens=100)
    assert answer["choices"][0]["text"] == "<|im_start|>a" + STORY


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_nothing_but_the_prompt(
    http: httpx.Client, engine: Scripted, text: ModelTokenizer, stream: bool
) -> None:
    """max_tokens 0: what a prompt's log-probabilities are asked for with."""
    body = {"prompt": "The dog", "echo": True, "logprobs": 2, "max_tokens": 0, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    if stream:
        [chunk] = events(answer)
    else:
        chunk = answer.json()
        assert chunk["usage"]["completion_tokens"] == 0
    [choice] = chunk["choices"]
    ids = text.encode("The dog")
    assert (choice["text"], choice["finish_reason"]) == ("The dog", "length")
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1)
    assert "".join(logprobs["tokens"]) == "The dog"
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert engine.submissions[0].sampling.max_tokens == 1
    assert engine.submissions[0].sampling.prompt_logprobs == 2
    assert complete(http, max_tokens=0)["choices"][0]["text"] == ""


def test_echo_with_logprobs_as_the_evaluation_harness_reads_them(http: httpx.Client, text: ModelTokenizer) -> None:
    """lm-eval's local-completions: token ids in a batch, one token more than needed, sliced by the context's length."""
    contexts, continuations = ["The lazy", "Over the"], [" dog", " quick brown fox"]
    prompts = [text.encode(a + b) for a, b in zip(contexts, continuations, strict=True)]
    answer = complete(http, prompts, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    for choice, prompt, context in zip(choices, prompts, contexts, strict=True):
        start = len(text.encode(context))
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(prompt) + 1
        scored = logprobs["token_logprobs"][start:-1]
        assert scored == [-0.25] * (len(prompt) - start)
        tops = logprobs["top_logprobs"][start:-1]
        assert all(one == max(top.values()) for one, top in zip(scored, tops, strict=True))


def test_text_offsets_point_into_the_text(http: httpx.Client) -> None:
    for echo in (False, True):
        [choice] = complete(http, "Say €: ", logprobs=1, echo=echo, max_tokens=100)["choices"]
        logprobs = choice["logprobs"]
        lengths = {len(values) for values in logprobs.values()}
        assert len(lengths) == 1
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            if not token.startswith("bytes:") and token != "<|im_end|>":
                assert choice["text"][offset:].startswith(token)


def test_the_end_token_has_a_logprob_but_no_text(http: httpx.Client) -> None:
    [choice] = complete(http, logprobs=0, max_tokens=100)["choices"]
    assert choice["text"] == STORY
    assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"


def test_a_streamed_completion(http: httpx.Client, engine: Scripted) -> None:
    body = {"prompt": "Hi", "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(http.post("/v1/completions", json=body))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    *tokens, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in tokens) == STORY
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None] * (len(tokens) - 1) + ["stop"]
    assert all(chunk["usage"] is None for chunk in tokens)
    assert last["choices"] == []
    assert last["usage"] == complete(http, max_tokens=100)["usage"]
    without = events(http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, "stream": True}))
    assert all("usage" not in chunk for chunk in without)


def test_streamed_and_whole_answers_agree(http: httpx.Client) -> None:
    body = {
        "prompt": ["a", "The dog"],
        "n": 2,
        "echo": True,
        "logprobs": 1,
        "max_tokens": 100,
        "return_token_ids": True,
    }
    whole = complete(http, **body)["choices"]
    streamed: dict[int, list[Any]] = {}
    for chunk in events(http.post("/v1/completions", json={**body, "stream": True})):
        for choice in chunk["choices"]:
            streamed.setdefault(choice["index"], []).append(choice)
    for choice in whole:
        parts = streamed[choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_prompt_logprobs_and_token_ids(http: httpx.Client, text: ModelTokenizer, engine: Scripted) -> None:
    ids = text.encode("The dog")
    [choice] = complete(http, "The dog", prompt_logprobs=1, return_token_ids=True, max_tokens=3)["choices"]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == text.encode(STORY)[:3]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(ids[1])]["rank"] == 1
    answer = http.post("/v1/chat/completions", json={"messages": HI, "prompt_logprobs": 0, "return_token_ids": True})
    chat = answer.json()
    assert chat["prompt_token_ids"] == engine.submissions[-1].prompt_token_ids
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert chat["choices"][0]["token_ids"] == [*text.encode(STORY), engine.eos]
    stream = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    refused(http.post("/v1/completions", json=stream), 400, param="prompt_logprobs")


# -- chats -------------------------------------------------------------------------------------------------------------


def test_a_chat(client: openai.OpenAI, engine: Scripted, text: ModelTokenizer) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", STORY, "stop")
    [submission] = engine.submissions
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text.decode(submission.prompt_token_ids) == prompt
    # Nothing said: the answer may fill what is left of the context.
    assert submission.sampling.max_tokens == MAX_MODEL_LEN - len(submission.prompt_token_ids)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_chats_limit(http: httpx.Client, engine: Scripted, field: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, field: 5}).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


def test_content_in_parts(http: httpx.Client, engine: Scripted, text: ModelTokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert "user\na\nb<|im_end|>" in text.decode(engine.submissions[0].prompt_token_ids)
    image = [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": image}]})
    refused(answer, 400, param="messages[0].content[0]")


def test_a_streamed_chat(client: openai.OpenAI, engine: Scripted) -> None:
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
    assert usage.usage.completion_tokens == len(engine.text.encode(STORY)) + 1
    assert engine.aborted == []


def test_every_choice_of_a_streamed_chat_begins_with_its_role(http: httpx.Client) -> None:
    chunks = events(http.post("/v1/chat/completions", json={"messages": HI, "n": 3, "stream": True}))
    for index in range(3):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == STORY
        assert deltas[-1] == {}


def test_chat_logprobs(client: openai.OpenAI, text: ModelTokenizer) -> None:
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


def test_what_reaches_the_template(http: httpx.Client, engine: Scripted, text: ModelTokenizer) -> None:
    def prompt(**fields: Any) -> str:
        answer = http.post("/v1/chat/completions", json={"messages": HI, **fields})
        assert answer.status_code == 200, answer.text
        return text.decode(engine.submissions[-1].prompt_token_ids)

    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert '"weather"' in prompt(tools=tools)
    assert '"weather"' not in prompt(tools=tools, tool_choice="none")
    assert prompt(add_generation_prompt=False).endswith("<|im_end|>\n")
    assert prompt(chat_template_kwargs={"mood": "glad"}).endswith("(glad)<|im_start|>assistant\n")
    assert prompt(chat_template="{{ messages[0].content }}!") == "Hi!"
    half = [*HI, {"role": "assistant", "content": "Well,"}]
    assert prompt(messages=half, continue_final_message=True).endswith("assistant\nWell,")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "forbidden", "content": ""}]}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template": "{% if"}, "messages"),
        ({"chat_template": " "}, None),
        ({"chat_template": "{{ '' }}"}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_chats_that_cannot_be(http: httpx.Client, fields: dict[str, Any], param: str | None) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": HI, **fields})
    if param is None:
        assert answer.status_code == 200
    else:
        refused(answer, 400, param=param, type="invalid_request_error")


def test_the_templates_of_requests_are_not_trusted_by_default(engine: Scripted, text: ModelTokenizer) -> None:
    with served(engine, text, HttpConfig()) as http:
        body = {"messages": HI, "chat_template": "{{ messages[0].content }}"}
        refused(http.post("/v1/chat/completions", json=body), 400, param="chat_template")


def test_response_format_becomes_a_grammar(http: httpx.Client, engine: Scripted) -> None:
    http.post("/v1/chat/completions", json={"messages": HI, "response_format": {"type": "json_object"}})
    assert engine.submissions[0].sampling.grammar == Grammar("json_object")


def test_vllms_fields_reach_the_engine(client: openai.OpenAI, engine: Scripted) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "cache_salt": "s", "priority": 1}
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], extra_body=extra)
    [submission] = engine.submissions
    sampling = submission.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.ignore_eos) == (5, 0.1, 1.2, True)
    assert submission.cache_salt == "s"


def test_a_models_defaults_apply_unless_given(engine: Scripted, text: ModelTokenizer) -> None:
    with_defaults = ModelTokenizer(text._tokenizer, defaults={"temperature": 0.6, "top_k": 20})
    with served(engine, with_defaults, HttpConfig()) as http:
        complete(http)
        complete(http, temperature=0)
    assert [(s.sampling.temperature, s.sampling.top_k) for s in engine.submissions] == [(0.6, 20), (0.0, 20)]


# -- stops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"stop": "brown"}, "The quick "),
        ({"stop": ["zebra", "own fox 🙂 ju"]}, "The quick br"),
        ({"stop": "brown", "include_stop_str_in_output": True}, "The quick brown"),
        ({"stop": ["o", "zebra"], "min_tokens": 4}, None),
    ],
)
def test_a_stop_string_ends_the_request(
    http: httpx.Client, engine: Scripted, text: ModelTokenizer, stream: bool, fields: dict[str, Any], shown: str | None
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 100, "stream": stream, **fields})
    choices = [c["choices"][0] for c in events(answer)] if stream else answer.json()["choices"]
    output = "".join(choice["text"] for choice in choices)
    if shown is None:  # the first "o" after four tokens, which is not the first
        head = len(text.decode(text.encode(STORY)[:4]))
        shown = STORY[: STORY.index("o", head)]
        assert "o" in shown
    assert output == shown
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] in fields["stop"]
    eventually(lambda: engine.aborted == [engine.submissions[0].id])


def test_nothing_is_held_back_at_the_end(http: httpx.Client) -> None:
    [choice] = complete(http, stop="dog!", max_tokens=100)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (STORY, "stop")
    assert choice["stop_reason"] is None


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped(
    http: httpx.Client, engine: Scripted, text: ModelTokenizer
) -> None:
    ids = text.encode(STORY)
    engine.script = lambda s: [TokenDelta(s.id, ids), TokenDelta(s.id, [engine.eos], finish_reason=FinishReason.STOP)]
    answer = complete(http, stop="quick", max_tokens=100, return_token_ids=True)
    assert answer["choices"][0]["text"] == "The "
    kept = answer["choices"][0]["token_ids"]
    assert kept == ids[: len(kept)]
    assert text.decode(kept).startswith("The quick")
    assert answer["usage"]["completion_tokens"] == len(kept) < len(ids)


def test_stop_tokens_are_not_text(http: httpx.Client, engine: Scripted, text: ModelTokenizer) -> None:
    last = text.encode(STORY)[-1]

    def script(submission: Submission) -> list[TokenDelta | Exception | float]:
        ids = text.encode(STORY)
        deltas: list[TokenDelta | Exception | float] = [TokenDelta(submission.id, [token]) for token in ids[:-1]]
        return [*deltas, TokenDelta(submission.id, [last], finish_reason=FinishReason.STOP, stop_token_id=last)]

    engine.script = script
    [choice] = complete(http, stop_token_ids=[last], max_tokens=100)["choices"]
    assert choice["text"] == STORY.removesuffix(text.decode([last]))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", last)
    [choice] = complete(http, stop_token_ids=[last], include_stop_str_in_output=True, max_tokens=100)["choices"]
    assert choice["text"] == STORY


def test_special_tokens(http: httpx.Client, engine: Scripted) -> None:
    engine.script = lambda s: engine.story(s, "a<|im_start|>b")
    assert complete(http)["choices"][0]["text"] == "ab"
    assert complete(http, skip_special_tokens=False)["choices"][0]["text"] == "a<|im_start|>b"


def test_half_a_character_is_never_sent(http: httpx.Client, engine: Scripted, text: ModelTokenizer) -> None:
    engine.script = lambda s: engine.story(s, "🙂🙃")
    ids = text.encode("🙂🙃")
    for count in range(1, len(ids)):
        [choice] = complete(http, max_tokens=count)["choices"]
        assert choice["text"] in ("", "🙂")
    chunks = events(http.post("/v1/completions", json={"prompt": "Hi", "stream": True, "max_tokens": 100}))
    assert [c["choices"][0]["text"] for c in chunks if c["choices"][0]["text"]] == ["🙂", "🙃"]


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": [0, 620]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"logprobs": 99}, "logprobs", "invalid_value"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens", "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
        ({"model": "gpt-5"}, "model", "model_not_found"),
    ],
)
def test_a_refusal_names_the_field(
    http: httpx.Client, engine: Scripted, stream: bool, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi", "stream": stream, **fields})
    status = 404 if param == "model" else 400
    refused(answer, status, param=param, code=code, type="invalid_request_error")
    assert engine.submissions == []


def test_stream_options_need_a_stream(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "stream_options": {"include_usage": True}}
    refused(http.post("/v1/completions", json=body), 400, param="stream_options")


@pytest.mark.parametrize("prompt", ["dog " * 250, [5] * 300, "d" * 50_000])
def test_a_prompt_that_is_too_long(http: httpx.Client, engine: Scripted, text: ModelTokenizer, prompt: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 10})
    message = refused(answer, 400, param="prompt", code="context_length_exceeded")["message"]
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in message
    if len(prompt) < 10_000:
        count = len(prompt) if isinstance(prompt, list) else len(text.encode(prompt))
        assert f"{count + 10} tokens ({count} in the prompt, 10 in the completion)" in message
    else:
        assert "at least" in message  # not worth tokenising
    assert engine.submissions == []


def test_the_whole_context_may_be_used(http: httpx.Client, engine: Scripted) -> None:
    complete(http, [5] * 190, max_tokens=10)
    refused(http.post("/v1/completions", json={"prompt": [5] * 191, "max_tokens": 10}), 400, param="prompt")
    complete(http, [5] * 191)  # the default of 16 gives way
    assert engine.submissions[-1].sampling.max_tokens == 9
    refused(http.post("/v1/completions", json={"prompt": [5] * 200}), 400, code="context_length_exceeded")
    many = [{"role": "user", "content": "dog " * 250}]
    answer = http.post("/v1/chat/completions", json={"messages": many})
    assert "messages" in refused(answer, 400, param="messages", code="context_length_exceeded")["message"]
    answer = http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 500})
    refused(answer, 400, param="messages", code="context_length_exceeded")


def test_truncated_prompts_keep_their_end(http: httpx.Client, engine: Scripted, text: ModelTokenizer) -> None:
    complete(http, list(range(5, 305)), truncate_prompt_tokens=3)
    assert list(engine.submissions[-1].prompt_token_ids) == [302, 303, 304]
    complete(http, list(range(5, 305)), truncate_prompt_tokens=-1, max_tokens=10)
    assert list(engine.submissions[-1].prompt_token_ids) == list(range(115, 305))
    complete(http, "dog " * 5000, truncate_prompt_tokens=4)
    assert len(engine.submissions[-1].prompt_token_ids) == 4
    answer = complete(http, "The dog", truncate_prompt_tokens=1, echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == text.decode(text.encode("The dog")[-1:])
    refused(http.post("/v1/completions", json={"prompt": [5], "truncate_prompt_tokens": 0}), 400, param="prompt")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}'])
def test_bad_json(http: httpx.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers={"content-type": "application/json"})
    refused(answer, 400, code="invalid_json", type="invalid_request_error")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
def test_other_content_types(http: httpx.Client, content_type: str) -> None:
    body = json.dumps({"prompt": "Hi"})
    answer = http.post("/v1/completions", content=body, headers={"content-type": content_type})
    refused(answer, 415, code="unsupported_media_type")
    accepted = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post("/v1/completions", content=body, headers=accepted).status_code == 200


def test_unknown_paths_and_wrong_methods(http: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/", "/v1/embeddings", "/docs", "/v1/completions/"):
        refused(http.post(path, json={}), 404, type="invalid_request_error")
        refused(http.get(path), 404)
    answer = http.get("/v1/completions")
    refused(answer, 405, type="invalid_request_error")
    assert answer.headers["allow"] == "POST"
    refused(http.delete("/v1/models"), 405)
    refused(http.post("/health"), 405)


ANY_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 300),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(codec="utf-8"), max_size=5),
        st.sampled_from(["user", "text", "json_object", "json_schema", "tiny", "auto", "required"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "json_schema", "schema", "function", "name", "5", "x"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("path", "kind", "sound"),
    [
        ("/v1/completions", CompletionRequest, {"prompt": "Hi"}),
        ("/v1/chat/completions", ChatCompletionRequest, {"messages": HI}),
        ("/tokenize", TokenizeRequest, {"prompt": "Hi"}),
    ],
)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_a_body_says_it_is_served_or_refused_in_openais_shape(
    text: ModelTokenizer, path: str, kind: Any, sound: dict[str, Any], data: st.DataObject
) -> None:
    wrong = data.draw(st.dictionaries(st.sampled_from(sorted(kind.model_fields)), ANY_JSON, max_size=3))

    async def post() -> httpx.Response:
        app = build_api(Scripted(text), text, HttpConfig(trust_request_chat_template=True))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a") as http:
            return await http.post(path, json={**sound, **wrong})

    answer = asyncio.run(post())
    if answer.status_code != 200:
        error = refused(answer, 404 if answer.status_code == 404 else 400, type="invalid_request_error")
        assert error["param"] is not None
        assert re.split(r"[.\[]", error["param"])[0] in kind.model_fields


# -- classes and timelines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_class_is_chosen_and_told(http: httpx.Client, engine: Scripted, path: str) -> None:
    def post(**fields: Any) -> httpx.Response:
        headers = {"X-SLO-Class": fields.pop("header")} if "header" in fields else {}
        return http.post(path, json={"prompt": "Hi", "messages": HI, **fields}, headers=headers)

    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "standard"),
        ({"service_tier": None}, "standard"),
        ({"service_tier": "priority"}, "interactive"),
        ({"service_tier": "batch"}, "batch"),
        ({"header": "batch"}, "batch"),
        ({"header": "interactive", "service_tier": "auto"}, "interactive"),
    ]
    for fields, chosen in cases:
        assert post(**fields).json()["service_tier"] == chosen
        chunks = events(post(**fields, stream=True))
        assert {chunk["service_tier"] for chunk in chunks} == {chosen}
        assert {submission.slo_class for submission in engine.submissions} == {chosen}
        engine.submissions.clear()
    refused(post(service_tier="gold"), 400, param="service_tier", code="invalid_value")
    refused(post(service_tier=5), 400, param="service_tier", code="invalid_value")
    refused(post(header="gold"), 400, param="X-SLO-Class", code="invalid_value")
    refused(post(header="batch", service_tier="priority"), 400, param="service_tier")
    assert not engine.submissions


def test_the_openai_client_knows_tiers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, service_tier="priority")  # type: ignore[arg-type]
    assert answer.service_tier == "interactive"  # type: ignore[comparison-overlap]


def test_a_bound_key(engine: Scripted, text: ModelTokenizer) -> None:
    config = HttpConfig.model_validate({"api_keys": ["first", {"key": "second", "classes": ["batch", "standard"]}]})
    with served(engine, text, config) as http:

        def post(key: str, **fields: Any) -> httpx.Response:
            return http.post(
                "/v1/completions", json={"prompt": "Hi", **fields}, headers={"authorization": f"Bearer {key}"}
            )

        assert post("first", service_tier="interactive").json()["service_tier"] == "interactive"
        assert post("second").json()["service_tier"] == "standard"
        answer = post("second", service_tier="interactive")
        refused(answer, 403, type="permission_error", param="service_tier", code="slo_class_not_allowed")
        assert "second" not in answer.text


def test_a_request_is_found_by_its_id(http: httpx.Client, engine: Scripted) -> None:
    for client_id in ("mine", "a/b", "50%", "cmpl-it"):
        answer = http.post("/v1/completions", json={"prompt": "Hi", "n": 2}, headers={"x-request-id": client_id})
        for name in (client_id, answer.json()["id"]):
            found = http.get(f"/v1/requests/{quote(name)}")
            assert found.status_code == 200, name
            assert (found.json()["id"], len(found.json()["requests"])) == (client_id, 2)
    assert len(http.get("/v1/requests").json()["data"]) == 8
    refused(http.get("/v1/requests/other"), 404, param="id", code="request_not_found")
    refused(http.get(f"/v1/requests/{'x' * 500}"), 404)
    refused(http.post("/v1/requests"), 405)


def test_requests_of_other_keys_are_not_seen(engine: Scripted, text: ModelTokenizer) -> None:
    keys = ["first", "second", {"key": "operator", "sees_all_requests": True}]
    with served(engine, text, HttpConfig.model_validate({"api_keys": keys})) as http:

        def get(path: str, key: str) -> httpx.Response:
            return http.get(path, headers={"authorization": f"Bearer {key}"})

        headers = {"authorization": "Bearer first", "x-request-id": "mine"}
        http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
        assert all("first" not in submission.tenant for submission in engine.submissions)
        assert [get("/v1/requests/mine", key).status_code for key in ("first", "second", "operator")] == [200, 404, 200]
        assert [len(get("/v1/requests", key).json()["data"]) for key in ("first", "second", "operator")] == [1, 0, 1]
        refused(http.get("/v1/requests/mine"), 401)
        refused(http.get("/v1/requests"), 401)


# -- errors from behind ------------------------------------------------------------------------------------------------

FAILURES = [
    (InvalidField("prompt has token id 7", "prompt"), 400, "invalid_request_error", "invalid_value"),
    (Overloaded("try later", 2.3), 429, "rate_limit_error", "rate_limit_exceeded"),
    (ReplicaLost("secret traceback"), 503, "server_error", "service_unavailable"),
    (RuntimeError("secret /etc/passwd"), 500, "server_error", "internal_error"),
    (TimeoutError("not ours"), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("failure", "status", "kind", "code"), FAILURES)
def test_a_failure_before_the_first_token_has_its_status(
    http: httpx.Client, engine: Scripted, failure: Exception, status: int, kind: str, code: str, n: int, stream: bool
) -> None:
    engine.script = lambda s: [failure]
    for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": HI})):
        answer = http.post(path, json={**body, "n": n, "stream": stream})
        error = refused(answer, status, type=kind, code=code)
        assert "secret" not in answer.text
        if status == 400:
            assert error["param"] == "prompt"
        if status == 429:
            assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("failure", "status", "kind", "code"), FAILURES)
def test_a_failure_after_the_first_token_is_an_event(
    http: httpx.Client, engine: Scripted, failure: Exception, status: int, kind: str, code: str, n: int
) -> None:
    engine.script = lambda s: [*engine.story(s)[:3], 0.01, failure]
    for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": HI})):
        *chunks, last = events(http.post(path, json={**body, "n": n, "stream": True}))
        assert chunks
        assert all("error" not in chunk for chunk in chunks)
        assert (last["error"]["type"], last["error"]["code"]) == (kind, code)
        assert "secret" not in last["error"]["message"]
        refused(http.post(path, json={**body, "n": n}), status, type=kind, code=code)


def test_a_refusal_from_another_process_shows_its_message_alone(http: httpx.Client, engine: Scripted) -> None:
    """Ray's stand-in for a remote ValueError is one too, but its text is the remote traceback."""
    cause = pickle.loads(pickle.dumps(InvalidField("the value must not be 3", "temperature")))
    remote = RayTaskError("submit", "Traceback (most recent call last): secret.py", cause).as_instanceof_cause()
    engine.script = lambda s: [remote]
    error = refused(http.post("/v1/completions", json={"prompt": "Hi"}), 400, param="temperature")
    assert error["message"] == "the value must not be 3"


def test_the_client_raises_on_an_error_event(client: openai.OpenAI, engine: Scripted) -> None:
    engine.script = lambda s: [*engine.story(s)[:3], ReplicaLost("it died")]
    stream = client.completions.create(model="tiny", prompt="Hi", stream=True)
    with pytest.raises(openai.APIError, match="not available"):
        list(stream)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (TokenDelta("", [], finish_reason=FinishReason.ERROR, error="cuda"), 500),
        (TokenDelta("", [], finish_reason=FinishReason.ABORT), 503),
        (None, 500),
    ],
)
def test_an_end_that_is_none(http: httpx.Client, engine: Scripted, last: TokenDelta | None, status: int) -> None:
    engine.script = lambda s: [*engine.story(s)[:3], *([last] if last else [])]
    answer = http.post("/v1/completions", json={"prompt": "Hi"})
    refused(answer, status, type="server_error")
    assert "cuda" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_one_failure_aborts_the_others(http: httpx.Client, engine: Scripted, stream: bool) -> None:
    def script(submission: Submission) -> list[TokenDelta | Exception | float]:
        if list(submission.prompt_token_ids) == [6]:
            return [0.05, ReplicaLost("it died")]
        return [30.0]

    engine.script = script
    answer = http.post("/v1/completions", json={"prompt": [[5], [6], [7]], "stream": stream})
    refused(answer, 503)
    others = {s.id for s in engine.submissions if list(s.prompt_token_ids) != [6]}
    assert set(engine.aborted) == others  # all of it before the answer


def test_not_ready(http: httpx.Client, engine: Scripted) -> None:
    assert http.get("/ready").status_code == 200
    engine.is_ready = False
    refused(http.get("/ready"), 503, code="not_ready")
    assert http.get("/health").status_code == 200


# -- the gate ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(engine: Scripted, text: ModelTokenizer, config: HttpConfig) -> Iterator[httpx.Client]:
    app = build_api(engine, text, config)  # type: ignore[arg-type]
    with LiveServer(app) as url, httpx.Client(base_url=url, timeout=20) as http:
        yield http


def test_api_keys(engine: Scripted, text: ModelTokenizer) -> None:
    with served(engine, text, HttpConfig(api_keys=("first", "schlüssel"))) as http:

        def post(authorization: str | None) -> httpx.Response:
            headers = {} if authorization is None else {"authorization": authorization.encode()}
            return http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)  # type: ignore[arg-type]

        for right in ("Bearer first", "bearer first", "Bearer schlüssel"):
            assert post(right).status_code == 200
        for wrong in (None, "", "Bearer", "Bearer firs", "Bearer first2", "Basic first", "first"):
            answer = post(wrong)
            refused(answer, 401, type="invalid_request_error", code="invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "first" not in answer.text
        refused(http.get("/v1/models"), 401)
        refused(http.get("/v1/nothing"), 401)
        refused(http.get("/v1/../v1/models"), 401)
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200
    assert "schlüssel" not in repr(HttpConfig(api_keys=("schlüssel",)))


def test_what_costs_work_is_guarded_and_what_tells_health_is_not(engine: Scripted, text: ModelTokenizer) -> None:
    with served(engine, text, HttpConfig(api_keys=("k",))) as http:
        for path in ("/tokenize", "/detokenize", "/v1/completions", "/v1/requests", "/anything", "/health/"):
            refused(http.post(path, json={"prompt": "Hi"}), 401)


def test_keys_from_a_file_are_rotated_without_a_restart(engine: Scripted, text: ModelTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("old")
    with served(engine, text, HttpConfig(api_keys_file=str(path))) as http:

        def status(key: str) -> int:
            return http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

        assert (status("old"), status("new")) == (200, 401)
        path.write_text("new")
        eventually(lambda: (status("old"), status("new")) == (401, 200))
    with pytest.raises(ValueError, match=r"http\.api_keys_file"):
        build_api(engine, text, HttpConfig(api_keys_file=str(tmp_path / "other")))  # type: ignore[arg-type]


def test_limits_of_a_key(engine: Scripted, text: ModelTokenizer) -> None:
    limits = {"key": "k", "requests_per_minute": 4, "tokens_per_minute": 100, "max_concurrent_requests": 1}
    config = HttpConfig.model_validate({"api_keys": [limits, "free"]})
    with served(engine, text, config) as http:

        def post(key: str = "k", num_tokens: int = 10, **fields: Any) -> httpx.Response:
            body = {"prompt": [5] * num_tokens, "max_tokens": 5, **fields}
            return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        first = post()
        assert first.status_code == 200
        assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == (
            "4",
            "3",
        )
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        engine.script = lambda submission: [TokenDelta(submission.id, []), 0.5, *engine.story(submission)]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda _: post(), range(2)))
        assert sorted(answer.status_code for answer in answers) == [200, 429], "one at a time"
        engine.script = engine.story
        refused(post(num_tokens=90), 429, code="rate_limit_exceeded", type="rate_limit_error")
        assert post(stream=True).status_code == 200
        late = post()
        error = refused(late, 429, code="rate_limit_exceeded")
        assert "4 requests per minute" in error["message"]
        assert int(late.headers["retry-after"]) >= 1
        assert late.headers.get_list("x-ratelimit-remaining-requests") == ["0"]
        assert "x-ratelimit-limit-requests" not in post("free").headers
        assert http.get("/v1/models", headers={"authorization": "Bearer k"}).status_code == 200, "looking costs nothing"


def test_a_refused_request_leaves_its_place_and_its_tokens(engine: Scripted, text: ModelTokenizer) -> None:
    """Whatever way a request ends, the next one may come."""
    key = {"key": "k", "max_concurrent_requests": 1, "tokens_per_minute": 1000}
    with served(engine, text, HttpConfig.model_validate({"api_keys": [key], "max_body_bytes": 1000})) as http:
        headers = {"authorization": "Bearer k"}
        for body in (b"{", b'{"prompt": 5}', b"x" * 2000, b'{"prompt": "Hi", "n": 999}'):
            answer = http.post("/v1/completions", content=body, headers=headers | {"content-type": "application/json"})
            assert answer.status_code in (400, 413)
        engine.script = lambda submission: [RuntimeError("broken")]
        assert http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 500
        engine.script = engine.story
        assert http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).status_code == 200


def test_tenants_share_no_cached_prefix(engine: Scripted, text: ModelTokenizer) -> None:
    keys = ["first", "second", {"key": "third", "cache_group": "us"}, {"key": "fourth", "cache_group": "us"}]

    def salts(http: httpx.Client, headers: list[dict[str, str]], **fields: Any) -> list[str]:
        engine.submissions.clear()
        for header in headers:
            assert http.post("/v1/completions", json={"prompt": "Hi", **fields}, headers=header).status_code == 200
        return [submission.cache_salt for submission in engine.submissions]

    with served(engine, text, HttpConfig.model_validate({"api_keys": keys})) as http:
        names = [{"authorization": f"Bearer {key}"} for key in ("first", "second", "third", "fourth", "first")]
        one, two, three, four, again = salts(http, names)
        assert one == again != two
        assert three == four not in (one, two)
        assert not {"first", "second"} & {one, two}, "a salt is not the key"
        assert len({*salts(http, names, cache_salt="s"), one, two, three}) == 6
    with served(engine, text, HttpConfig()) as http:
        assert salts(http, [{}], cache_salt="mine") == ["mine"]


def test_a_body_that_stops_coming_is_not_waited_for(
    engine: Scripted, text: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.cluster.api.http_guard._SILENCE_S", 0.2)
    with served(engine, text, HttpConfig()) as http, raw(str(http.base_url)) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nabc")
        assert b"408" in wire.recv(4096)


def test_more_messages_than_a_chat_has(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [{}] * 4097})
    refused(answer, 400, param="messages")


def test_a_refused_client_is_not_listened_to(url: str, engine: Scripted, text: ModelTokenizer) -> None:
    """No key, no reading: the answer is there before the body."""
    with served(engine, text, HttpConfig(api_keys=("k",))) as http, raw(str(http.base_url)) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n")
        assert b"401" in wire.recv(4096)


def test_request_ids(http: httpx.Client, engine: Scripted) -> None:
    def post(given: str | None) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": given} if given else {})

    answers = [post("mine-1"), post("mine-1")]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine-1", "mine-1"]
    assert answers[0].json()["id"] == "cmpl-mine-1"
    assert len({s.id for s in engine.submissions}) == 2  # ours are unique all the same
    assert all("mine-1" in s.id for s in engine.submissions)
    generated = {
        post(None).headers["x-request-id"],
        post("a b").headers["x-request-id"],
        post("x" * 129).headers["x-request-id"],
    }
    assert len(generated) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in generated)
    assert http.get("/nope", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    stream = http.post("/v1/completions", json={"prompt": "Hi", "stream": True}, headers={"x-request-id": "mine-3"})
    assert stream.headers["x-request-id"] == "mine-3"


@contextlib.contextmanager
def raw(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        yield wire


def test_a_body_that_is_too_large(http: httpx.Client, url: str, engine: Scripted) -> None:
    body = b'{"prompt": "' + b"a" * 200_000 + b'"}'
    answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    refused(answer, 413, code="request_too_large", type="invalid_request_error")
    chunks = (body[i : i + 10_000] for i in range(0, len(body), 10_000))
    answer = http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    refused(answer, 413, code="request_too_large")
    # Announced, never sent: nothing is waited for.
    with raw(url) as wire:
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 104857600\r\n\r\n")
        assert b" 413 " in wire.recv(4096)
        assert http.get("/health").status_code == 200


def test_a_hundred_megabytes_are_not_taken(http: httpx.Client) -> None:
    """The connection ends soon after the limit; what the kernel's buffers swallow until then is all that is lost."""
    taken = 0

    def body() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(1600):
            taken += 65536
            yield b" " * 65536

    for headers in ({}, {"content-length": str(1600 * 65536)}):
        taken = 0
        headers = {"content-type": "application/json", **headers}
        refused(http.post("/v1/completions", content=body(), headers=headers), 413)
        assert taken < 50 << 20


def test_no_more_is_read_than_the_limit() -> None:
    received = 0
    sent: list[Any] = []

    async def receive() -> Any:
        nonlocal received
        received += 1000
        return {"type": "http.request", "body": b"a" * 1000, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("not reached")

    gate = HttpGuard(app, keys=KeyRing(), open_paths=(), ledger=Ledger(), max_body_bytes=10_000, request_timeout_s=None)
    for headers, most in (([], 11_000), ([(b"content-length", b"10001")], 0), ([(b"content-length", b"x")], 11_000)):
        received = 0
        asyncio.run(gate({"type": "http", "path": "/", "headers": headers}, receive, send))
        assert received == most
        assert sent[0]["status"] == 413
        sent.clear()


def test_a_client_that_leaves_while_sending() -> None:
    messages = [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def never(*_: Any) -> None:
        raise AssertionError("not reached")

    gate = HttpGuard(never, keys=KeyRing(), open_paths=(), ledger=Ledger(), max_body_bytes=10, request_timeout_s=None)
    asyncio.run(gate({"type": "http", "path": "/", "headers": []}, receive, never))


BODIES: list[Any] = [
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": HI}),
    ("/v1/chat/completions", {"messages": HI, "n": 3}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_client_that_leaves_ends_its_requests(
    url: str, engine: Scripted, path: str, body: dict[str, Any], tokens: int, stream: bool
) -> None:
    """Whether it waits for the first token or is in the midst of them."""
    engine.script = lambda s: [*engine.story(s)[:tokens], 60.0]
    content = json.dumps({**body, "stream": stream}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with raw(url) as wire:
        wire.sendall(head.encode() + content)
        if stream and tokens:
            assert b"200 OK" in wire.recv(4096)
        eventually(lambda: engine.running > 0)
        time.sleep(0.05)
    eventually(lambda: engine.running == 0)
    assert sorted(engine.aborted) == sorted(s.id for s in engine.submissions)


def test_a_client_that_leaves_a_fast_stream(url: str, engine: Scripted) -> None:
    """One that never pauses for long: it ends while a token is being sent as often as while one is waited for."""
    engine.script = lambda s: [TokenDelta(s.id, [5]) for _ in range(100_000)]
    content = json.dumps({"prompt": "a", "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    )
    for _ in range(5):
        with raw(url) as wire:
            wire.sendall(head.encode() + b"\r\n\r\n" + content)
            wire.recv(4096)
        eventually(lambda: engine.running == 0)
    assert len(engine.aborted) == 5


@pytest.mark.parametrize("n", [1, 3])
def test_the_time_limit(engine: Scripted, text: ModelTokenizer, n: int) -> None:
    with served(engine, text, HttpConfig(request_timeout_s=0.3)) as http:
        engine.script = lambda s: [60.0]
        for stream in (False, True):
            answer = http.post("/v1/completions", json={"prompt": "Hi", "n": n, "stream": stream})
            assert "0.3 s" in refused(answer, 504, type="server_error", code="request_timeout")["message"]
        engine.script = lambda s: [*engine.story(s)[:3], 60.0]
        *chunks, last = events(http.post("/v1/completions", json={"prompt": "Hi", "n": n, "stream": True}))
        assert chunks
        assert last["error"]["code"] == "request_timeout"
        refused(http.post("/v1/chat/completions", json={"messages": HI, "n": n}), 504)
        assert len(engine.aborted) == len(engine.submissions) == 4 * n
        engine.script = engine.story
        complete(http)


def test_merged_streams_end_together() -> None:
    closed: list[int] = []

    async def stream(index: int, count: int, error: Exception | None = None) -> AsyncIterator[tuple[int, int]]:
        try:
            for i in range(count):
                await asyncio.sleep(0)
                yield index, i
            if error:
                raise error
            if index == 9:
                await asyncio.sleep(60)
        finally:
            closed.append(index)

    async def collect(*streams: Any) -> list[Any]:
        return [item async for item in merge(streams)]

    items = asyncio.run(collect(stream(0, 50), stream(1, 3), stream(2, 0)))
    assert len(items) == 53
    assert [i for index, i in items if index == 0] == list(range(50))
    closed.clear()
    with pytest.raises(RuntimeError, match="one"):
        asyncio.run(collect(stream(0, 5), stream(1, 2, RuntimeError("one")), stream(9, 0)))
    assert sorted(closed) == [0, 1, 9]


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    model = client.models.retrieve("tiny")
    assert (model.object, model.created, model.owned_by) == ("model", 1_700_000_000, "crossdock")
    assert http.get("/v1/models/other").json()["max_model_len"] == MAX_MODEL_LEN
    refused(http.get("/v1/models/meta-llama/Llama-3"), 404, param="model", code="model_not_found")
    assert complete(http, model="other")["model"] == "other"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="Hi")


def test_tokenize_and_back(http: httpx.Client, text: ModelTokenizer) -> None:
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": STORY, "return_token_strs": True}).json()
    assert answer["tokens"] == text.encode(STORY)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == MAX_MODEL_LEN
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": STORY}
    chat = http.post("/tokenize", json={"messages": HI}).json()
    assert text.decode(chat["tokens"]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat["token_strs"] is None
    assert http.post("/tokenize", json={"prompt": "dog " * 9000}).json()["count"] > MAX_MODEL_LEN
    assert http.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    refused(http.post("/tokenize", json={}), 400, param="prompt")
    refused(http.post("/tokenize", json={"prompt": "a", "messages": HI}), 400, param="prompt")
    refused(http.post("/tokenize", json={"prompt": "a", "model": "b"}), 404, param="model")
    refused(http.post("/detokenize", json={"tokens": [999_999]}), 400, param="tokens")
    refused(http.post("/detokenize", json={"tokens": ["a"]}), 400, param="tokens[0]")
    refused(http.post("/detokenize", json={}), 400, param="tokens")


def test_metrics_and_version(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.text == "crossdock_up 1\n"
    assert answer.headers["content-type"].startswith("text/plain")
    assert re.fullmatch(r"\d+\.\d+.*", http.get("/version").json()["version"])


@pytest.mark.parametrize("fields", [{"port": -1}, {"api_keys": ("",)}, {"max_body_bytes": 0}, {"prot": 1}])
def test_the_config_is_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HttpConfig(**fields)


def test_a_token_is_cheap(engine: Scripted, text: ModelTokenizer) -> None:
    """What the ingress adds to a token, without sockets. Aimed at: 60 µs on a quiet machine; the bound allows for a
    busy one."""
    count = 5000
    ids = text.encode("the lazy dog jumps over " * 1000)[:count]

    class Fast(Scripted):
        async def generate(self, submission: Submission) -> AsyncIterator[TokenDelta]:
            for token in ids[:-1]:
                yield TokenDelta(submission.id, [token])
            yield TokenDelta(submission.id, ids[-1:], finish_reason=FinishReason.LENGTH)

    body = json.dumps({"messages": HI, "stream": True}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def seconds() -> float:
        app = build_api(Fast(text), text, HttpConfig())  # type: ignore[arg-type]
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        num_sent = 0

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            nonlocal num_sent
            num_sent += 1

        start = time.process_time()
        await app(dict(scope), receive, send)
        assert num_sent >= count
        return time.process_time() - start

    best = min(asyncio.run(seconds()) for _ in range(3))
    assert best / count < 60e-6
