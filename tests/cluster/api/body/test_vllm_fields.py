"""vLLM's fields of requests and answers over sockets, whole and streamed, as OpenAI's client reads them."""

from typing import Any

import httpx
import openai
import pytest

from crossdock.cluster.api import bounds
from crossdock.cluster.api.http.keys import ApiKey
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from tests.cluster.api.engine_api import EngineApi, lose_after
from tests.cluster.api.scripted_api import (
    HI,
    STORY,
    VOCAB_SIZE,
    ScriptedDispatcher,
    Serve,
    complete,
    events,
    refused,
)

TOOL = {"type": "function", "function": {"name": "f"}}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def chat(http: httpx.Client, **fields: Any) -> Any:
    """Return the body of a chat's answer, which must succeed; the events of a stream."""
    answer = http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert answer.status_code == 200, answer.text
    return events(answer) if fields.get("stream") else answer.json()


# -- log-probabilities -------------------------------------------------------------------------------------------------


def listed(
    http: httpx.Client, path: str, stream: bool, count: int, **fields: Any
) -> list[tuple[str, dict[str, float]]]:
    """Return the token ids of an answer, each with its listed log-probabilities."""
    is_chat = path == "/v1/chat/completions"
    body = {"messages": HI, "logprobs": True, "top_logprobs": count} if is_chat else {"prompt": "Hi", "logprobs": count}
    body |= {"max_tokens": 100, "return_tokens_as_token_ids": True, "stream": stream, **fields}
    answer = http.post(path, json=body)
    choices = [chunk["choices"][0] for chunk in (events(answer) if stream else [answer.json()])]
    shapes = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    if not is_chat:
        return [pair for shape in shapes for pair in zip(shape["tokens"], shape["top_logprobs"], strict=True)]
    entries = [entry for shape in shapes for entry in shape["content"]]
    return [(entry["token"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]}) for entry in entries]


STREAMS = pytest.mark.parametrize("stream", [False, True])
PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


@STREAMS
@PATHS
def test_tokens_are_written_as_ids(http: httpx.Client, engine: ScriptedDispatcher, path: str, stream: bool) -> None:
    found = listed(http, path, stream, 2)
    ids = [*engine.tokenizer.encode(STORY), engine.eos]
    assert [token for token, _ in found] == [f"token_id:{token}" for token in ids]
    assert found[0][1] == {f"token_id:{ids[0]}": -0.25, f"token_id:{ids[0] + 1}": -1.25}


@STREAMS
@PATHS
def test_listed_tokens_replace_the_likeliest(
    http: httpx.Client, engine: ScriptedDispatcher, path: str, stream: bool
) -> None:
    names = [300, 5, 301]
    found = listed(http, path, stream, 0, logprob_token_ids=names)
    first = engine.tokenizer.encode(STORY)[0]
    assert found[0][1].keys() == {f"token_id:{token}" for token in (first, *names)}
    assert engine.submissions[0].sampling.logprob_token_ids == tuple(names)


@STREAMS
@PATHS
def test_minus_one_lists_the_whole_vocabulary(
    wide: httpx.Client, engine: ScriptedDispatcher, path: str, stream: bool
) -> None:
    assert len(listed(wide, path, stream, -1, max_tokens=2)[0][1]) == VOCAB_SIZE
    assert engine.submissions[-1].sampling.logprobs == VOCAB_SIZE


def test_minus_one_lists_the_whole_vocabulary_for_each_prompt_token(wide: httpx.Client) -> None:
    answer = chat(wide, prompt_logprobs=-1, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["prompt_logprobs"][1]) == VOCAB_SIZE
    [choice] = complete(wide, "Hi there", echo=True, logprobs=-1, max_tokens=0, return_tokens_as_token_ids=True)[
        "choices"
    ]
    assert len(choice["logprobs"]["top_logprobs"][1]) == VOCAB_SIZE


@pytest.mark.parametrize(("field", "num_tokens"), [("logprobs", 190), ("prompt_logprobs", 1)])
def test_more_logprobs_than_an_answer_may_list_are_refused(
    wide: httpx.Client, engine: ScriptedDispatcher, field: str, num_tokens: int
) -> None:
    body = {"prompt": [5, 6], field: 619, "max_tokens": num_tokens, "n": 128}
    if field == "prompt_logprobs":
        body["prompt"] = [5] * 100
    error = refused(wide.post("/v1/completions", json=body), 400, param=field)
    assert str(bounds.MANY_LOGPROBS) in error["message"]
    assert "logprob_token_ids" in error["message"]
    assert engine.submissions == []
    body[field] = 20
    assert wide.post("/v1/completions", json={**body, "n": 8}).status_code == 200


# -- streams -----------------------------------------------------------------------------------------------------------


def test_every_event_of_a_completion_has_the_usage_of_its_choice(http: httpx.Client, tokenizer: ModelTokenizer) -> None:
    body = {"prompt": ["Hi", "The dog"], "n": 2, "max_tokens": 5, "stream": True, **USAGE}
    *chunks, last = events(http.post("/v1/completions", json=body))
    seen: dict[int, list[int]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        numbers = chunk["usage"]
        assert numbers["prompt_tokens"] == len(tokenizer.encode("Hi" if choice["index"] < 2 else "The dog"))
        assert numbers["total_tokens"] == numbers["prompt_tokens"] + numbers["completion_tokens"]
        seen.setdefault(choice["index"], []).append(numbers["completion_tokens"])
    assert sorted(seen) == [0, 1, 2, 3]
    for counts in seen.values():
        assert counts == sorted(counts)
        assert counts[-1] == 5
    assert last["usage"]["completion_tokens"] == 20


def test_every_event_of_a_chat_has_the_usage_of_its_choice(client: openai.OpenAI) -> None:
    options: Any = USAGE["stream_options"]
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options=options))  # type: ignore[arg-type]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts[0] == 0
    assert counts[1] == 1
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2]


def test_usage_in_every_event_without_usage_is_no_usage_as_in_vllm(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert all(event.get("usage") is None for event in events(http.post("/v1/completions", json=body)))


def test_prompt_token_ids_are_streamed_once(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    """A chat has them in its first event, beside the choices, as vLLM does; a completion in each choice's first."""
    first, *others = chat(http, stream=True, n=2, return_token_ids=True)
    assert first["prompt_token_ids"] == engine.submissions[0].prompt_token_ids
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert not any("prompt_token_ids" in chunk or "prompt_token_ids" in chunk["choices"][0] for chunk in others)
    for index in range(2):
        deltas = [chunk["choices"][0] for chunk in others if chunk["choices"][0]["index"] == index]
        assert [token for delta in deltas for token in delta.get("token_ids", ())][-1] == engine.eos
    body = {"prompt": ["a", "The dog"], "return_token_ids": True, "stream": True}
    having: dict[int, int] = {}
    for chunk in events(http.post("/v1/completions", json=body)):
        [choice] = chunk["choices"]
        having[choice["index"]] = having.get(choice["index"], 0) + ("prompt_token_ids" in choice)
    assert having == {0: 1, 1: 1}


async def test_stream_of_a_lost_replica_goes_on_with_right_usage_and_ids(tokenizer: ModelTokenizer) -> None:
    async with EngineApi(tokenizer, num_replicas=2) as api:
        body: dict[str, Any] = {"prompt": [5] * 20, "max_tokens": 200, "ignore_eos": True, "seed": 3, "stream": True}
        body |= {"return_token_ids": True, "logprobs": 0, **USAGE}

        async def ask() -> list[Any]:
            return events(await api.http.post("/v1/completions", json=body))

        wanted = await ask()
        lose_after(api, 50)
        found = await ask()
        assert 'crossdock_ingress_placed_again_total{ingress="0"} 1.0' in await api.dispatcher.metrics_text()
        for chunks in (wanted, found):
            choices = [chunk["choices"][0] for chunk in chunks[:-1]]
            assert [choice for choice in choices if "prompt_token_ids" in choice] == [choices[0]]
            num_tokens = 0
            for chunk in chunks[:-1]:
                num_tokens += len(chunk["choices"][0]["token_ids"])
                assert len(chunk["choices"][0]["logprobs"]["tokens"]) == len(chunk["choices"][0]["token_ids"])
                assert chunk["usage"]["completion_tokens"] == num_tokens
            assert chunks[-1]["usage"]["completion_tokens"] == num_tokens == 200
        assert _token_ids(found) == _token_ids(wanted)


def _token_ids(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks[:-1] for token in chunk["choices"][0]["token_ids"]]


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_chat_begins_with_the_assistants_text(http: httpx.Client, stream: bool) -> None:
    """A user's last message is not repeated: the answer is the assistant's."""

    def texts(**fields: Any) -> list[str]:
        answer = chat(http, stream=stream, n=2, **fields)
        if not stream:
            return [choice["message"]["content"] for choice in answer["choices"]]
        parts = [chunk["choices"][0] for chunk in answer]
        return ["".join(p["delta"].get("content", "") for p in parts if p["index"] == i) for i in range(2)]

    half = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    assert texts(messages=half, echo=True, continue_final_message=True) == ["Well, " + STORY] * 2
    assert texts(messages=half, continue_final_message=True) == [STORY] * 2
    assert texts(echo=True) == [STORY] * 2


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-3, None)), ("right", slice(0, 3)), (None, slice(-3, None))])
def test_prompt_is_cut_at_the_side_asked_for(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer, side: str | None, kept: slice
) -> None:
    text = "The quick brown fox jumps"
    complete(http, text, truncate_prompt_tokens=3, truncation_side=side)
    assert engine.submissions[-1].prompt_token_ids == tokenizer.encode(text)[kept]
    complete(http, text, truncation_side=side)
    assert engine.submissions[-1].prompt_token_ids == tokenizer.encode(text)
    complete(http, [7] * 300, truncate_prompt_tokens=-1, truncation_side=side, max_tokens=20)
    assert engine.submissions[-1].prompt_token_ids == [7] * 180


def test_template_gets_documents_and_effort(
    wide: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    def prompt(template: str, **fields: Any) -> str:
        chat(wide, chat_template=f"{template}{{{{ messages[0].content }}}}", **fields)
        return tokenizer.decode(engine.submissions[-1].prompt_token_ids).removesuffix("Hi")

    assert prompt("{{ documents[0].text }}!", documents=[{"text": "fox"}]) == "fox!"
    effort = "{{ reasoning_effort }} {{ enable_thinking }}"
    assert prompt(effort, reasoning_effort="low") == "low True"
    assert prompt(effort, reasoning_effort="none") == "none False"
    assert prompt(effort, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}) == "low False"
    assert prompt("{{ enable_thinking }}", reasoning_effort="max") == "True"
    assert prompt("{{ verbosity }}", verbosity="low") == "low"


def test_tokenize_shows_documents_as_chats_do(wide: httpx.Client, engine: ScriptedDispatcher) -> None:
    template = "{% for each in documents %}[{{ each.text }}]{% endfor %}{{ messages[0].content }}"
    fields = {"documents": [{"text": "fox"}, {"text": "dog"}], "chat_template": template}
    chat(wide, **fields)
    found = wide.post("/tokenize", json={"messages": HI, **fields}).json()
    assert found["tokens"] == engine.submissions[-1].prompt_token_ids
    unread = {**fields, "chat_template": "{{ messages[0].content }}"}
    for body in ({"messages": HI, **unread}, {"prompt": "Hi", "documents": fields["documents"]}):
        refused(wide.post("/tokenize", json=body), 400, param="documents")
    assert wide.post("/tokenize", json={"prompt": "Hi", "documents": []}).status_code == 200


UNREAD = ("reasoning_effort", "verbosity", "thinking_token_budget")


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("chat/completions", {"messages": HI, **dict(zip(UNREAD, ("low", "high", 5), strict=True))}, UNREAD),
        ("chat/completions", {"messages": HI, "reasoning_effort": "none", "verbosity": "medium"}, ()),
        ("responses", {"input": "Hi", "reasoning": {"effort": "high"}}, ("reasoning.effort",)),
        ("responses", {"input": "Hi", "text": {"verbosity": "low"}}, ("text.verbosity",)),
        (
            "messages",
            {"messages": HI, "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            ("thinking.budget_tokens",),
        ),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_field_that_this_model_cannot_follow_is_taken_and_a_header_says_so(
    http: httpx.Client, path: str, fields: dict[str, Any], names: tuple[str, ...], is_streamed: bool
) -> None:
    """Agents set an effort once for all models."""
    answer = http.post(f"/v1/{path}", json={**fields, "stream": is_streamed})
    assert answer.status_code == 200, answer.text
    warnings = answer.headers.get_list("warning")
    assert len(warnings) == len(names)
    for warning, name in zip(warnings, names, strict=True):
        assert warning.startswith(f"299 crossdock \"'{name}' changes nothing: ")


def test_neutral_fields_are_accepted_where_the_model_cannot_follow_them(http: httpx.Client) -> None:
    neutral = {"documents": [], "reasoning_effort": "none", "parallel_tool_calls": False, "functions": []}
    assert chat(http, **neutral)["choices"][0]["message"]["content"] == STORY


# -- the request -------------------------------------------------------------------------------------------------------


def test_bad_words_reach_engine_in_both_spellings(
    http: httpx.Client, engine: ScriptedDispatcher, tokenizer: ModelTokenizer
) -> None:
    complete(http, bad_words=["dog", " lazy fox", "dog"])
    words = ("dog", " dog", "lazy fox", " lazy fox")
    assert engine.submissions[0].sampling.bad_words == tuple(tuple(tokenizer.encode(word)) for word in words)
    refused(http.post("/v1/completions", json={"prompt": "Hi", "bad_words": ["dog", "  "]}), 400, param="bad_words")


def test_priority_reaches_engine(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    complete(http, priority=-7, n=2)
    complete(http)
    assert [submission.priority_in_class for submission in engine.submissions] == [-7, -7, 0]


def test_key_cannot_pass_other_keys_by_priority(serve: Serve, engine: ScriptedDispatcher) -> None:
    http = serve(api_keys=(ApiKey(key="k"),))
    http.headers["authorization"] = "Bearer k"
    refused(http.post("/v1/completions", json={"prompt": "Hi", "priority": -1}), 400, param="priority")
    complete(http, priority=1)
    assert [submission.priority_in_class for submission in engine.submissions] == [1]


def test_request_id_of_body_names_the_answer_unless_the_header_does(
    http: httpx.Client, engine: ScriptedDispatcher
) -> None:
    body = {"messages": HI, "request_id": "mine"}
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("chatcmpl-mine", "mine")
    assert http.get("/v1/requests/mine").status_code == 200
    answer = http.post("/v1/chat/completions", json={**body, "stream": True}, headers={"x-request-id": "theirs"})
    assert (events(answer)[0]["id"], answer.headers["x-request-id"]) == ("chatcmpl-theirs", "theirs")
    assert [submission.request_id for submission in engine.submissions] == ["mine", "theirs"]
