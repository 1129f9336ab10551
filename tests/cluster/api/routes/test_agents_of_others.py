"""Read what tool runners and coding agents send beside the usual fields: threads, namespaces, references to items."""

import json
from collections.abc import Iterable
from typing import Any

import anthropic
import httpx
import pytest
from openai.types.responses import Response as OpenaiResponse

from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission
from tests.cluster.api.scripted_api import STORY, ScriptedDispatcher, refused, serving

CALL = '{"name": "move", "arguments": {"to": "a"}}'
SCHEMA = {"type": "object", "properties": {"to": {"type": "string"}}}
MOVE = {"type": "function", "name": "move", "description": "Go", "parameters": SCHEMA}
LEGS = {"type": "namespace", "name": "legs", "description": "To walk with.", "tools": [MOVE]}


def respond(http: httpx.Client, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    answer = http.post("/v1/responses", json={"input": given, **fields})
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    OpenaiResponse.model_validate(response, strict=True)
    return response


@anthropic.beta_tool
def move(to: str) -> str:
    """Go.

    Args:
        to: where
    """
    return f"at {to}"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropics_tool_runner_without_a_thread_runs_to_its_end(tokenizer: ModelTokenizer, is_streamed: bool) -> None:
    """It asks for a thread first, and reads from the refusal that it should send the whole conversation."""

    def call_then_story(submission: Submission) -> Iterable[TokenDelta | Exception | float]:
        is_first = len(engine.submissions) == 1
        return engine.story(submission, f"<tool_call>{CALL}</tool_call>" if is_first else STORY)

    engine = ScriptedDispatcher(tokenizer, max_model_len=2000)
    engine.script = call_then_story
    with (
        serving(engine, tokenizer, HttpConfig(tool_call_parser="hermes")) as http,
        anthropic.Anthropic(base_url=str(http.base_url), api_key="none", max_retries=0, timeout=240) as client,
    ):
        runner: Any = client.beta.messages.tool_runner(
            model="tiny",
            max_tokens=60,
            messages=[{"role": "user", "content": "Hi"}],
            tools=[move],
            max_iterations=2,
            stream=is_streamed,
        )
        turns = [turn.get_final_message() if is_streamed else turn for turn in runner]
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert len(engine.submissions) == 2


def test_thread_is_refused_with_the_details_that_anthropics_clients_read(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "thread": {"type": "create"}}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "send the whole conversation" in error["message"]


def test_call_of_function_in_namespace_names_the_namespace(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    engine.script = lambda submission: engine.story(submission, CALL)
    fields: dict[str, Any] = {"tools": [LEGS], "tool_choice": "required", "parallel_tool_calls": False}
    response = respond(http, client_metadata={"thread_id": "a"}, **fields)
    [call] = response["output"]
    assert (call["name"], call["namespace"], json.loads(call["arguments"])) == ("move", "legs", {"to": "a"})
    prompt = engine.tokenizer.decode(engine.submissions[-1].prompt_token_ids)
    assert "To walk with.\\nGo" in prompt
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "there"}
    engine.script = engine.story
    after = respond(http, [call, output])["id"]
    items = http.get(f"/v1/responses/{after}/input_items", params={"order": "asc"}).json()["data"]
    assert items[0]["namespace"] == "legs"


def test_reference_to_stored_item_is_that_item(http: httpx.Client, engine: ScriptedDispatcher) -> None:
    first = respond(http)
    [message] = first["output"]
    hi, more = ({"role": "user", "content": text} for text in ("Hi", "More"))
    respond(http, [hi, {"type": "item_reference", "id": message["id"]}, more])
    respond(http, "More", previous_response_id=first["id"])
    assert engine.submissions[-2].prompt_token_ids == engine.submissions[-1].prompt_token_ids
    assert len(engine.submissions[-1].prompt_token_ids) > len(engine.submissions[0].prompt_token_ids)


def test_reference_to_unknown_item_is_refused(http: httpx.Client) -> None:
    response = respond(http)
    mine = response["output"][0]["id"]
    for name, status in (("msg_1", 404), (mine[:-1] + "9", 400), (5, 400), ("x" * 500, 404)):
        given = [{"type": "item_reference", "id": name}]
        refused(http.post("/v1/responses", json={"input": given}), status, param="input[0].id")
    unkept = respond(http, store=False)["output"][0]["id"]
    refused(http.post("/v1/responses", json={"input": [{"type": "item_reference", "id": unkept}]}), 404)
