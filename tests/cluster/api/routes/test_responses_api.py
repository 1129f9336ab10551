"""OpenAI's Responses API, as OpenAI's own client reads it."""

import json
import threading
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response as OpenaiResponse
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import BaseModel, TypeAdapter

from crossdock.cluster.api.body.response_items import chat_messages, input_items
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.routes import responses
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ReplicaLost
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Overloaded
from tests.cluster.api.scripted_api import (
    MAX_MODEL_LEN,
    STORY,
    ScriptedDispatcher,
    Serve,
    named_events,
    refused,
    serving,
)
from tests.waiting import eventually

WRITTEN = '{"name": "move", "arguments": {"to": {"x": 3}}}'
MOVE: Any = {"type": "function", "name": "move", "parameters": {"type": "object", "properties": {"to": {}}}}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def ask(http: httpx.Client, given: Any = "Hi", **fields: Any) -> httpx.Response:
    return http.post("/v1/responses", json={"input": given, **fields})


def created(http: httpx.Client, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    """Return a response, which must succeed and have the type of OpenAI's package."""
    answer = ask(http, given, **fields)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    check(response)
    return response


def check(response: dict[str, Any]) -> None:
    """Check that OpenAI's package takes the response as it is."""
    OpenaiResponse.model_validate(response, strict=True)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, of which each must have a type of OpenAI's package."""
    found = named_events(answer)
    for event in found:
        parsed = EVENT.validate_python(event, strict=True)
        assert isinstance(parsed, BaseModel)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_response_is_answered_in_openais_types(client: openai.OpenAI, tokenizer: ModelTokenizer) -> None:
    answer = client.responses.create(model="tiny", input="Hi", metadata={"a": "b"}, temperature=0.5)
    assert answer.output_text == STORY
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.metadata, answer.temperature, answer.model) == ({"a": "b"}, 0.5, "tiny")
    assert answer.usage is not None
    num_tokens = len(tokenizer.encode(STORY)) + 1
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens) == (num_tokens, 4)
    assert answer.usage.total_tokens == answer.usage.input_tokens + num_tokens


def test_response_is_the_submission_of_the_same_chat(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["fox"]}
    talk = [
        {"role": "developer", "content": "No jokes."},
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Ho", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    created(http, talk, instructions="Be brief.", max_output_tokens=20, **fields)
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief.\n\nNo jokes."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Ho"},
            {"role": "user", "content": "a\nb"},
        ],
        "max_completion_tokens": 20,
        **fields,
    }
    assert http.post("/v1/chat/completions", json=chat).status_code == 200
    ours, theirs = engine.submissions
    assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert ours.sampling == theirs.sampling
    assert ours.slo_class == theirs.slo_class


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (STORY, {}),
        (STORY, {"max_output_tokens": 3}),
        (STORY, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
        (WRITTEN, {"tools": [MOVE], "tool_choice": "required", "parallel_tool_calls": False}),
        ('{"x": 3}', {"text": {"format": {"type": "json_schema", "name": "point", "schema": POINT, "strict": True}}}),
        ("", {}),
    ],
)
def test_stream_builds_the_whole_response(
    http: httpx.Client, engine: ScriptedDispatcher, words: str, fields: dict[str, Any]
) -> None:
    engine.script = partial(engine.story, words=words)
    whole = created(http, **fields)
    found = events(ask(http, stream=True, **fields))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert without_ids(found[-1]["response"]) == without_ids(whole)
    assert http.get(f"/v1/responses/{found[-1]['response']['id']}").json() == found[-1]["response"]
    rebuilt: dict[int, str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            rebuilt[event["output_index"]] = rebuilt.get(event["output_index"], "") + event["delta"]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in done]
    assert texts == list(rebuilt.values())


def test_openais_stream_helper_reads_the_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="tiny", input="Hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == STORY


def test_answer_that_reaches_its_limit_is_incomplete(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    response = created(http, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert events(ask(http, max_output_tokens=3, stream=True))[-1]["type"] == "response.incomplete"
    engine.script = partial(engine.story, words="dog " * 300)
    assert created(http, max_output_tokens=100_000)["usage"]["total_tokens"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "move"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "move"}]},
    ],
)
def test_forced_call_is_a_function_call_for_openais_client(
    client: openai.OpenAI, engine: ScriptedDispatcher, choice: Any
) -> None:
    engine.script = partial(engine.story, words=WRITTEN)
    tools: Any = [{"type": "function", "name": name} for name in ("m", "move")]
    with client.responses.stream(model="tiny", input="Hi", tools=tools, tool_choice=choice) as stream:
        streamed = stream.get_final_response()
    whole = client.responses.create(model="tiny", input="Hi", tools=tools, tool_choice=choice)
    for answer in (whole, streamed):
        [call] = answer.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("move", {"to": {"x": 3}})
        assert call.call_id.startswith("call_")


THOUGHT = (
    '<think>Hm</think>Go<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)
PARSERS = HttpConfig.model_validate({"tool_call_parser": "hermes", "reasoning_parser": "qwen3"})


def test_reasoning_text_and_calls_are_items_whole_and_streamed(tokenizer: ModelTokenizer) -> None:
    engine = ScriptedDispatcher(tokenizer, max_model_len=1000)
    engine.script = partial(engine.story, words=THOUGHT)
    fields: Any = {"tools": [{"type": "function", "name": name} for name in "fg"]}
    with serving(engine, tokenizer, PARSERS) as http:
        whole = created(http, **fields)
        found = events(ask(http, stream=True, **fields))
        created(
            http, [{"type": "function_call_output", "call_id": "c", "output": "1"}], previous_response_id=whole["id"]
        )
        [single] = [
            item
            for item in created(http, parallel_tool_calls=False, **fields)["output"]
            if item["type"] == "function_call"
        ]
    for response in (whole, found[-1]["response"]):
        reasoning, message, first, second = response["output"]
        assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm"}]
        assert message["content"][0]["text"] == "Go"
        assert [(call["name"], json.loads(call["arguments"])) for call in (first, second)] == [
            ("f", {"a": 1}),
            ("g", {}),
        ]
        assert first["call_id"] != second["call_id"]
        assert 0 < response["usage"]["output_tokens_details"]["reasoning_tokens"] < 10
    assert single["name"] == "f"
    kinds = {event["type"] for event in found}
    assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    assert without_ids(found[-1]["response"]) == without_ids(whole)


def test_structured_text_has_the_grammar_of_the_same_chat(
    http: httpx.Client, client: openai.OpenAI, engine: ScriptedDispatcher
) -> None:
    class Point(BaseModel):
        x: int

    engine.script = partial(engine.story, words='{"x": 3}')
    assert client.responses.parse(model="tiny", input="Hi", text_format=Point).output_parsed == Point(x=3)
    created(http, text={"format": {"type": "json_schema", "name": "p", "schema": POINT}})
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}
    http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "response_format": schema})
    assert engine.submissions[-1].sampling.grammar == engine.submissions[-2].sampling.grammar is not None


def test_items_become_the_messages_of_a_chat() -> None:
    items = input_items(
        [
            {"role": "system", "content": "One"},
            {"role": "user", "content": "Go"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
            {"type": "message", "role": "assistant", "content": "Going"},
            {"type": "function_call", "call_id": "c1", "name": "move", "arguments": '{"to": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "move", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "there"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Again"}]},
            {"type": "function_call", "call_id": "c3", "name": "move", "arguments": "{}"},
            {"role": "developer", "content": "Two"},
        ]
    )
    calls = [
        {"id": name, "type": "function", "function": {"name": "move", "arguments": arguments}}
        for name, arguments in (("c1", '{"to": 1}'), ("c2", "{}"), ("c3", "{}"))
    ]
    assert chat_messages("Zero", items, len(items)) == [
        {"role": "system", "content": "Zero\n\nOne"},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "Going", "reasoning_content": "Hm", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "there"},
        {"role": "tool", "tool_call_id": "c2", "content": "no"},
        {"role": "assistant", "content": "", "reasoning_content": "Again", "tool_calls": calls[2:]},
        {"role": "system", "content": "Two"},
    ]


def test_conversation_goes_on_after_a_stored_response(client: openai.OpenAI, engine: ScriptedDispatcher) -> None:
    first = client.responses.create(model="tiny", input="Hi", instructions="Be brief.")
    second = client.responses.create(model="tiny", input="More", previous_response_id=first.id)
    talk: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": STORY}]
    client.responses.create(model="tiny", input=[*talk, {"role": "user", "content": "More"}], store=False)
    client.responses.create(model="tiny", input=first.output, store=False)  # type: ignore[arg-type]
    _, chained, sent, _ = engine.submissions
    assert chained.prompt_token_ids == sent.prompt_token_ids  # instructions are those of one response
    items = client.responses.input_items.list(second.id, order="asc")
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]


def test_conversation_beyond_its_bound_is_refused(serve: Serve) -> None:
    """Reasoning that the template leaves out would otherwise grow with every turn, without end."""
    thought = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a" * (1 << 20)}]}]
    http = serve()
    name = None
    for _ in range(3):
        name = created(http, [*thought, {"role": "user", "content": ""}], previous_response_id=name)["id"]
    answer = ask(http, thought, previous_response_id=name)
    assert "4194304" in refused(answer, 400, param="input")["message"]
    name = created(http, [{"role": "user", "content": "", "type": "message"}])["id"]
    many = [{"type": "reasoning", "summary": []}] * 4094
    name = created(http, many, previous_response_id=name)["id"]
    refused(ask(http, previous_response_id=name), 400, param="input")


def test_items_of_a_response_come_in_pages(http: httpx.Client) -> None:
    given = [{"role": "user", "content": str(i), "id": f"msg_{i}"} for i in range(5)]
    path = f"/v1/responses/{created(http, given)['id']}/input_items"
    whole = http.get(path).json()
    ResponseItemList.model_validate(whole, strict=True)
    assert [item["id"] for item in whole["data"]] == ["msg_4", "msg_3", "msg_2", "msg_1", "msg_0"]
    page = http.get(path, params={"order": "asc", "limit": 2, "after": "msg_1"}).json()
    assert [item["id"] for item in page["data"]] == ["msg_2", "msg_3"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("msg_2", "msg_3", True)
    for params, param in (({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")):
        refused(http.get(path, params=params), 400, param=param)  # type: ignore[arg-type]


def test_deleted_or_unstored_response_is_not_known(client: openai.OpenAI, http: httpx.Client) -> None:
    stored = client.responses.create(model="tiny", input="Hi")
    assert client.responses.retrieve(stored.id).output_text == STORY
    client.responses.delete(stored.id)
    unstored = created(http, store=False)
    assert unstored["store"] is False
    for name in (stored.id, unstored["id"], "resp_x"):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = http.request(method, f"/v1/responses/{name}{path}")
            assert (
                "Send the whole conversation" in refused(answer, 404, code="response_not_found", param="id")["message"]
            )
        refused(ask(http, previous_response_id=name), 404, param="previous_response_id")


def test_response_of_another_key_is_not_known(serve: Serve) -> None:
    a, b = ({"authorization": f"Bearer {key}"} for key in "ab")
    http = serve(api_keys=["a", {"key": "b", "sees_all_requests": True}])
    name = http.post("/v1/responses", json={"input": "Hi"}, headers=a).json()["id"]
    assert http.get(f"/v1/responses/{name}", headers=a).status_code == 200
    refused(http.get(f"/v1/responses/{name}", headers=b), 404)
    refused(http.delete(f"/v1/responses/{name}", headers=b), 404)
    answer = http.post("/v1/responses", json={"input": "Hi", "previous_response_id": name}, headers=b)
    refused(answer, 404)
    assert http.get(f"/v1/responses/{name}", headers=a).status_code == 200


def test_server_without_a_store_keeps_nothing(serve: Serve) -> None:
    http = serve(response_store_bytes=0)
    response = created(http)
    assert response["store"] is False
    refused(http.get(f"/v1/responses/{response['id']}"), 404)
    refused(ask(http, background=True), 400, param="background")


def test_response_in_the_background_is_fetched_later(client: openai.OpenAI, http: httpx.Client) -> None:
    begun = client.responses.create(model="tiny", input="Hi", background=True)
    assert begun.status == "in_progress"
    eventually(lambda: client.responses.retrieve(begun.id).status == "completed")
    ended = http.get(f"/v1/responses/{begun.id}").json()
    check(ended)
    assert ended["output"][0]["content"][0]["text"] == STORY
    assert client.responses.cancel(begun.id).status == "completed"
    refused(http.post(f"/v1/responses/{created(http)['id']}/cancel"), 400)


def test_cancelled_response_ends_its_request(
    client: openai.OpenAI, http: httpx.Client, engine: ScriptedDispatcher
) -> None:
    engine.script = lambda submission: [*engine.story(submission)[:2], 60.0]
    begun = [client.responses.create(model="tiny", input="Hi", background=True).id for _ in range(3)]
    refused(ask(http, previous_response_id=begun[0]), 400, param="previous_response_id")
    eventually(lambda: engine.running == 3)
    ended = client.responses.cancel(begun[0])
    assert ended.status == "cancelled"
    assert http.get(f"/v1/responses/{begun[0]}").json()["status"] == "cancelled"
    client.responses.delete(begun[1])
    refused(http.get(f"/v1/responses/{begun[1]}"), 404)
    eventually(lambda: len(engine.aborted) == 2)
    client.responses.cancel(begun[2])


def test_stream_in_the_background_is_read_again_from_any_event(
    client: openai.OpenAI, http: httpx.Client, engine: ScriptedDispatcher
) -> None:
    found = events(ask(http, stream=True, background=True))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    ended = found[-1]["response"]
    assert (found[-1]["type"], ended["background"]) == ("response.completed", True)
    path = f"/v1/responses/{ended['id']}"
    eventually(lambda: http.get(path).json() == ended)
    assert named_events(http.get(path, params={"stream": True})) == found
    for number in (0, 5, len(found) - 2):
        again = client.responses.retrieve(ended["id"], stream=True, starting_after=number)
        assert [event.model_dump(exclude_unset=True) for event in again] == found[number + 1 :]
    assert http.get(path, params={"stream": True, "starting_after": len(found) - 1}).content == b""
    refused(http.get(path, params={"starting_after": 3}), 400, param="starting_after")
    refused(http.get(path, params={"stream": True, "starting_after": -1}), 400, param="starting_after")
    assert len(engine.submissions) == 1


def test_stream_in_the_background_goes_on_when_its_client_leaves(
    client: openai.OpenAI, engine: ScriptedDispatcher
) -> None:
    gone = threading.Event()
    engine.script = partial(engine.story_in_two, gone)
    stream = client.responses.create(model="tiny", input="Hi", background=True, stream=True)
    seen = [next(stream) for _ in range(5)]
    stream.close()
    assert seen[0].type == "response.created"
    last = seen[-1].sequence_number
    following = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=last)
    gone.set()
    rest = list(following)
    assert [event.sequence_number for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert rest[-1].type == "response.completed"
    assert rest[-1].response.output_text == STORY
    assert not engine.aborted


@pytest.mark.parametrize("way", ["cancelled", "deleted"])
def test_stream_in_the_background_ends_where_its_response_does(
    client: openai.OpenAI, http: httpx.Client, engine: ScriptedDispatcher, way: str
) -> None:
    engine.script = lambda submission: [*engine.story(submission)[:3], 60.0]
    stream = client.responses.create(model="tiny", input="Hi", background=True, stream=True)
    first = next(stream)
    assert first.type == "response.created"
    path = f"/v1/responses/{first.response.id}"
    if way == "deleted":
        assert http.delete(path).json()["deleted"]
        assert {event.type for event in list(stream)[-1:]} <= {"response.in_progress", "response.output_item.done"}
        refused(http.get(path, params={"stream": True}), 404)
        return
    cancelled = http.post(f"{path}/cancel").json()
    list(stream)
    found = named_events(http.get(path, params={"stream": True}))
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == cancelled["output"]


def test_failure_is_the_last_event_in_the_background(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    engine.script = lambda submission: [*engine.story(submission)[:3], ReplicaLost("gone")]
    found = events(ask(http, stream=True, background=True))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"] == http.get(f"/v1/responses/{found[-1]['response']['id']}").json()


def test_response_without_kept_events_says_how_to_get_them(serve: Serve) -> None:
    """It was not made so, or they are more than an eighth of the store."""
    http = serve(response_store_bytes=16_000)
    for fields in ({}, {"background": True}):
        name = created(http, **fields)["id"]
        refused(http.get(f"/v1/responses/{name}", params={"stream": True}), 400, param="stream")
    found = events(ask(http, stream=True, background=True))
    assert found[-1]["type"] == "response.completed"
    path = f"/v1/responses/{found[-1]['response']['id']}"
    eventually(lambda: http.get(path).json()["status"] == "completed")
    error = refused(http.get(path, params={"stream": True}), 400, param="stream")
    assert "1/8 of http.response_store_bytes" in error["message"]


def test_events_in_the_background_count_as_memory_of_their_request(
    serve: Serve, engine: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are bounded as bodies are: a response whose events take more memory than there is fails."""
    engine.script = lambda submission: engine.story(submission, STORY * 1500)
    monkeypatch.setattr(engine, "max_model_len", 40_000)
    http = serve(request_memory_bytes=1 << 20)
    found = events(ask(http, stream=True, background=True))
    assert found[-1]["type"] == "response.failed"
    assert "http.request_memory_bytes" in found[-1]["response"]["error"]["message"]
    engine.script = engine.story
    assert events(ask(http, stream=True, background=True))[-1]["type"] == "response.completed", "its memory is free"


def test_failure_in_the_background_is_the_error_of_the_response(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    for error, code in (
        (ReplicaLost("gone"), "server_error"),
        (RuntimeError("secret"), "server_error"),
        (Overloaded("later", 3.0), "rate_limit_exceeded"),
        (ValueError("no such token"), "invalid_prompt"),
    ):
        engine.script = partial(lambda error, submission: [error], error)
        name = created(http, background=True)["id"]
        eventually(lambda name=name: http.get(f"/v1/responses/{name}").json()["status"] == "failed")  # type: ignore[misc]
        ended = http.get(f"/v1/responses/{name}").json()
        check(ended)
        assert ended["error"]["code"] == code
        assert "secret" not in ended["error"]["message"]


def test_response_in_the_background_counts_for_its_key(serve: Serve, engine: ScriptedDispatcher) -> None:
    engine.script = lambda submission: [*engine.story(submission)[:2], 60.0]
    http = serve(api_keys=[{"key": "a", "max_concurrent_requests": 1}])
    http.headers["authorization"] = "Bearer a"
    begun = created(http, background=True)["id"]
    refused(ask(http), 429)
    assert http.post(f"/v1/responses/{begun}/cancel").json()["status"] == "cancelled"
    engine.script = engine.story
    created(http)


def test_key_whose_responses_fill_its_share_of_the_background_leaves_places_to_others(
    serve: Serve, engine: ScriptedDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_MOST_IN_BACKGROUND", 4)
    engine.script = lambda submission: [*engine.story(submission)[:2], 60.0]
    http = serve(api_keys=("a", "b"))
    http.headers["authorization"] = "Bearer a"
    begun = [created(http, background=True)["id"] for _ in range(2)]
    error = refused(ask(http, background=True), 429)
    assert "2 responses, of which this API key has its share," in error["message"]
    http.headers["authorization"] = "Bearer b"
    created(http, background=True)
    http.headers["authorization"] = "Bearer a"
    refused(ask(http, background=True), 429)
    for name in begun:
        assert http.post(f"/v1/responses/{name}/cancel").json()["status"] == "cancelled"
    created(http, background=True)


def test_failure_in_a_stream_is_a_failed_response(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    def script(submission: Any) -> list[TokenDelta | Exception | float]:
        return [*engine.story(submission)[:3], ReplicaLost("gone")]

    engine.script = script
    found = events(ask(http, stream=True))
    assert found[-1]["type"] == "response.failed"
    failed = found[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert STORY.startswith(failed["output"][0]["content"][0]["text"])
    refused(http.get(f"/v1/responses/{failed['id']}"), 404)
