"""Errors from behind the API: their status before the first token, their event after it."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from ray.exceptions import RayTaskError

from crossdock.cluster.api.text.choices import merge
from crossdock.cluster.dispatch.dispatcher import ReplicaLost, SlowReader, SuspectRequest
from crossdock.workers.schedule.request.failures import NotFinite
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import InvalidField, Overloaded, Submission
from tests.cluster.api.routes.test_messages_api import refused as refused_by_messages
from tests.cluster.api.scripted_api import (
    HI,
    ScriptedDispatcher,
    events,
    refused,
)

FAILURES = [
    (InvalidField("prompt has token id 7", "prompt"), 400, "invalid_request_error", "invalid_value"),
    (Overloaded("try later", 2.3), 429, "rate_limit_error", "rate_limit_exceeded"),
    (ReplicaLost("secret traceback"), 503, "server_error", "service_unavailable"),
    (SuspectRequest("secret names"), 400, "invalid_request_error", "suspect_request"),
    (RuntimeError("secret /etc/passwd"), 500, "server_error", "internal_error"),
    (NotFinite("the model computed NaN"), 500, "server_error", "not_finite"),
    (SlowReader("secret count"), 408, "invalid_request_error", "slow_reader"),
    (TimeoutError("not ours"), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("failure", "status", "kind", "code"), FAILURES)
def test_failure_before_first_token_has_its_status(
    http: httpx.Client,
    engine: ScriptedDispatcher,
    failure: Exception,
    status: int,
    kind: str,
    code: str,
    n: int,
    stream: bool,
) -> None:
    engine.script = lambda s: [failure]
    bodies: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "Hi"}, "/v1/chat/completions": {"messages": HI}}
    single = {"/v1/responses": {"input": "Hi"}, "/v1/messages": {"messages": HI, "max_tokens": 9}} if n == 1 else {}
    for path, body in {**bodies, **single}.items():
        answer = http.post(path, json={**body, **({"n": n} if path in bodies else {}), "stream": stream})
        assert "secret" not in answer.text
        if path == "/v1/messages":
            anthropics = {429: "rate_limit_error", 503: "overloaded_error", 500: "api_error"}
            refused_by_messages(answer, status, anthropics.get(status, "invalid_request_error"))
            continue
        error = refused(answer, status, type=kind, code=code)
        if code == "invalid_value":
            assert [error["param"]] == list(body), "the field of this body that holds the prompt"
        is_final = code in ("suspect_request", "not_finite")
        assert answer.headers.get("x-should-retry") == ("false" if is_final else None)
        if status == 429:
            assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("failure", "status", "kind", "code"), FAILURES)
def test_failure_after_first_token_is_an_event(
    http: httpx.Client, engine: ScriptedDispatcher, failure: Exception, status: int, kind: str, code: str, n: int
) -> None:
    def script(submission: Submission) -> Iterator[TokenDelta | Exception | float]:
        yield from engine.story(submission)[:3]
        while engine.running < n:  # not all choices have begun
            yield 0.001
        yield failure

    engine.script = script
    for path, body in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": HI})):
        *chunks, last = events(http.post(path, json={**body, "n": n, "stream": True}))
        assert chunks
        assert all("error" not in chunk for chunk in chunks)
        assert (last["error"]["type"], last["error"]["code"]) == (kind, code)
        assert "secret" not in last["error"]["message"]
        refused(http.post(path, json={**body, "n": n}), status, type=kind, code=code)


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"error": "adapter 'a' does not fit", "error_field": "model"}, 400, "invalid_value", "model"),
        ({"error": "the grammar has ended", "error_field": "grammar"}, 400, "invalid_value", "guided_regex"),
        ({"error": "the model computed NaN", "is_not_finite": True}, 500, "not_finite", None),
        ({"error": "secret names"}, 500, "internal_error", None),
    ],
)
def test_end_with_an_error_says_whose_fault_that_is(
    http: httpx.Client,
    engine: ScriptedDispatcher,
    num_before: int,
    fields: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
) -> None:
    """An engine's last delta has the reason; before the first token it becomes the status, later an event."""
    engine.script = lambda s: [
        *engine.story(s)[:num_before],
        TokenDelta(s.id, [], finish_reason=FinishReason.ERROR, **fields),
    ]
    body = {"prompt": "Hi", "guided_regex": "a"}
    answer = http.post("/v1/completions", json=body)
    error = refused(answer, status, code=code, param=param)
    assert error["message"].startswith("Internal" if code == "internal_error" else fields["error"])
    assert answer.headers.get("x-should-retry") == ("false" if code == "not_finite" else None)
    *_, last = events(http.post("/v1/completions", json={**body, "stream": True})) if num_before else [answer.json()]
    assert (last["error"]["code"], last["error"]["param"]) == (code, param)


def test_refusal_from_another_process_shows_message_and_field_only(
    http: httpx.Client, engine: ScriptedDispatcher
) -> None:
    """Ray's stand-in for a remote ValueError is also a ValueError, but its text is the remote traceback."""
    cause = pickle.loads(pickle.dumps(InvalidField("the value must not be 3", "temperature")))
    remote = RayTaskError("submit", "Traceback (most recent call last): secret.py", cause).as_instanceof_cause()
    engine.script = lambda s: [remote]
    error = refused(http.post("/v1/completions", json={"prompt": "Hi"}), 400, param="temperature")
    assert error["message"] == "the value must not be 3"


@pytest.mark.parametrize(
    ("field", "body", "param"),
    [
        ("grammar", {"guided_regex": "a"}, "guided_regex"),
        ("grammar", {"response_format": {"type": "json_object"}}, "response_format"),
        ("grammar", {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ("priority_in_class", {"priority": 1}, "priority"),
        ("request_id", {"request_id": "mine"}, None),  # the server made the id that it names
    ],
)
def test_refusal_names_the_field_as_the_client_does(
    http: httpx.Client, engine: ScriptedDispatcher, field: str, body: dict[str, Any], param: str | None
) -> None:
    engine.script = lambda s: [InvalidField("it cannot be served", field)]
    refused(http.post("/v1/completions", json={"prompt": "Hi", **body}), 400, param=param, code="invalid_value")


def test_openai_client_raises_on_error_event(client: openai.OpenAI, engine: ScriptedDispatcher) -> None:
    engine.script = lambda s: [*engine.story(s)[:3], ReplicaLost("the replica died")]
    stream = client.completions.create(model="tiny", prompt="Hi", stream=True)
    with pytest.raises(openai.APIError, match="not available"):
        list(stream)


@pytest.mark.parametrize("last", [[TokenDelta("", [], finish_reason=FinishReason.ERROR, error="cuda")], []])
def test_end_without_result_is_an_error(http: httpx.Client, engine: ScriptedDispatcher, last: list[TokenDelta]) -> None:
    engine.script = lambda s: [*engine.story(s)[:3], *last]
    answer = http.post("/v1/completions", json={"prompt": "Hi"})
    refused(answer, 500, type="server_error")
    assert "cuda" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_failure_of_one_choice_aborts_others(http: httpx.Client, engine: ScriptedDispatcher, stream: bool) -> None:
    def script(submission: Submission) -> list[TokenDelta | Exception | float]:
        if list(submission.prompt_token_ids) == [6]:
            return [0.05, ReplicaLost("the replica died")]
        return [30.0]

    engine.script = script
    answer = http.post("/v1/completions", json={"prompt": [[5], [6], [7]], "stream": stream})
    refused(answer, 503)
    others = {s.id for s in engine.submissions if list(s.prompt_token_ids) != [6]}
    assert set(engine.aborted) == others  # all of it before the answer


async def test_merged_streams_end_together() -> None:
    closed: list[int] = []
    begun = asyncio.Event()

    async def stream(index: int, count: int, error: Exception | None = None) -> AsyncIterator[tuple[int, int]]:
        try:
            for i in range(count):
                await asyncio.sleep(0)
                yield index, i
            if error:
                raise error
            if index == 9:
                begun.set()
                await asyncio.sleep(60)
        finally:
            closed.append(index)

    async def late(stream: AsyncIterator[tuple[int, int]]) -> AsyncIterator[tuple[int, int]]:
        await begun.wait()
        async for item in stream:
            yield item

    async def collect(*streams: Any) -> list[Any]:
        return [item async for item in merge(streams)]

    items = await collect(stream(0, 50), stream(1, 3), stream(2, 0))
    assert len(items) == 53
    assert [i for index, i in items if index == 0] == list(range(50))
    closed.clear()
    with pytest.raises(RuntimeError, match="one"):
        await collect(stream(0, 5), stream(9, 0), late(stream(1, 2, RuntimeError("one"))))
    assert sorted(closed) == [0, 1, 9]
