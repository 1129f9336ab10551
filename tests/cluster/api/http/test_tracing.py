"""Traces of requests over engines in this process, as an exporter and as a collector receive them."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from crossdock.cluster.api import endpoints
from crossdock.cluster.api.http import tracing
from crossdock.cluster.api.http.http_config import HttpConfig
from crossdock.cluster.api.http.keys import ApiKey
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.router.fleet import RouterConfig
from tests.cluster.api.engine_api import all_up
from tests.cluster.api.http.otlp_collector import collector
from tests.cluster.api.one_model import one_model_api
from tests.cluster.dispatch.in_process import InProcess
from tests.waiting import eventually, until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = ({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"} for flags in ("01", "00"))


class TracedApi:
    """The API in front of replicas. At the end of its ASGI lifespan all spans have been exported."""

    def __init__(self, tokenizer: ModelTokenizer, replicas: Sequence[InProcess], **http: Any) -> None:
        self.replicas = replicas
        self.dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
        config = HttpConfig.model_validate({"otlp_endpoint": "http://127.0.0.1:1", "trace_sample_ratio": 1.0} | http)
        self.app = one_model_api(self.dispatcher, tokenizer, config)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._lifespan = asyncio.create_task(self.app({"type": "lifespan"}, self._messages.get, self._check))
        await self._messages.put({"type": "lifespan.startup"})
        for number, replica in enumerate(self.replicas):
            self.dispatcher.join(f"r{number}", replica, replica.profile)
        await all_up(self.dispatcher, len(self.replicas))
        return self

    async def _check(self, message: Any) -> None:
        assert message["type"] in ("lifespan.startup.complete", "lifespan.shutdown.complete")

    async def __aexit__(self, *error: object) -> None:
        await self._messages.put({"type": "lifespan.shutdown"})
        await self._lifespan
        await self.http.aclose()
        await self.dispatcher.close()
        for replica in self.replicas:
            await replica.engine_thread.close()

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"prompt": [5] * 100, "max_tokens": 8, "ignore_eos": True, "temperature": 0} | fields
        return await self.http.post("/v1/completions", json=body, headers=headers)


@pytest.fixture(autouse=True)
def _no_exporter_left() -> Iterator[None]:
    """Exporters end with the API, after at most the time of one answer of the collector."""
    yield
    for thread in threading.enumerate():
        if "Otel" in thread.name:
            thread.join(240)
            assert not thread.is_alive()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[ReadableSpan]]:
    """Return the spans exported so far."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(endpoints, "otlp_exporter", lambda endpoint: exporter)
    monkeypatch.setattr(tracing, "SETTLE_S", (0.05, 0.2, 0.5))
    return lambda: list(exporter.get_finished_spans())


Spans = Callable[[], list[ReadableSpan]]


def pair() -> list[InProcess]:
    return [InProcess(role="prefill"), InProcess(role="decode")]


def one() -> list[InProcess]:
    return [InProcess()]


def named(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def children(spans: Sequence[ReadableSpan], of: ReadableSpan) -> list[ReadableSpan]:
    assert of.context is not None
    return [span for span in spans if span.parent is not None and span.parent.span_id == of.context.span_id]


def attribute(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes[name]


def ends(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


async def test_shipped_request_is_one_trace(tokenizer: ModelTokenizer, spans: Spans) -> None:
    """The trace leads from the client's span over the ingress to both replicas and their sides of the transfer."""
    began = time.time_ns()
    async with TracedApi(tokenizer, pair()) as api:
        answer = await api.ask(SAMPLED | {"X-Request-Id": "mine"})
        assert answer.status_code == 200
    found = spans()
    assert {span.context.trace_id for span in found if span.context} == {int(TRACE, 16)}
    root = named(found, "POST /v1/completions")
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert root.parent.span_id == int(PARENT, 16)
    assert (attribute(root, "crossdock.request_id"), attribute(root, "http.response.status_code")) == ("mine", 200)
    prefill, decode = named(found, "prefill"), named(found, "decode")
    assert {span.name for span in children(found, root)} == {"prefill", "decode"}
    assert (attribute(prefill, "crossdock.replica"), attribute(decode, "crossdock.replica")) == ("r0", "r1")
    assert attribute(prefill, "crossdock.finish_reason") == "shipped"
    assert (attribute(decode, "crossdock.finish_reason"), attribute(decode, "crossdock.num_output_tokens")) == (
        "length",
        8,
    )
    chunks = [span for span in children(found, prefill) if span.name == "chunk"]
    assert sum(attribute(chunk, "crossdock.num_tokens") for chunk in chunks) == 100
    for side, direction, outcome in ((prefill, "sent", "shipped"), (decode, "received", "arrived")):
        transfer = named(children(found, side), "transfer")
        assert (attribute(transfer, "crossdock.direction"), attribute(transfer, "crossdock.outcome")) == (
            direction,
            outcome,
        )
        assert attribute(transfer, "crossdock.num_pages") > 0
        assert ends(transfer)[0] < ends(transfer)[1]
    assert named(children(found, prefill), "queue")
    assert attribute(named(children(found, decode), "tokens"), "crossdock.num_decode_steps") == 6
    for span in found:  # timelines have milliseconds
        start, end = ends(span)
        assert began - 5_000_000 <= start <= end <= time.time_ns()
    for chunk in chunks:
        assert ends(prefill)[0] <= ends(chunk)[0] <= ends(chunk)[1] <= ends(prefill)[1] + 1_000_000


async def test_choices_have_spans_and_repeated_id_has_two_traces(tokenizer: ModelTokenizer, spans: Spans) -> None:
    async with TracedApi(tokenizer, one()) as api:
        for _ in range(2):
            assert (await api.ask({"X-Request-Id": "same"}, n=2, temperature=1)).status_code == 200
    found = spans()
    roots = [span for span in found if span.parent is None]
    assert len(roots) == len({span.context.trace_id for span in roots if span.context}) == 2
    for root in roots:
        assert [span.name for span in children(found, root)] == ["serve", "serve"]


@pytest.mark.parametrize(("ratio", "headers", "is_traced"), [(0.0, {}, False), (0.0, SAMPLED, True), (1.0, {}, True)])
async def test_sampling_follows_ratio_and_client(
    tokenizer: ModelTokenizer, spans: Spans, ratio: float, headers: dict[str, str], is_traced: bool
) -> None:
    async with TracedApi(tokenizer, one(), trace_sample_ratio=ratio) as api:
        assert (await api.ask(headers)).status_code == 200
        assert (await api.ask(NOT_SAMPLED)).status_code == 200
        assert (await api.http.get("/v1/models")).status_code == 200
    assert len([span for span in spans() if span.kind is SpanKind.SERVER]) == is_traced


async def test_traces_that_one_key_chose_leave_questions_to_other_keys_and_to_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_MOST_ASKED", 4)
    monkeypatch.setattr(tracing, "SETTLE_S", (0.0,))
    asked, ended, gate = list[str](), list[str](), asyncio.Event()

    async def timelines(request_id: str, owner: str | None) -> list[Any]:
        asked.append(request_id)
        await gate.wait()
        ended.append(request_id)
        return []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ignore(message: Any) -> None:
        pass

    traced = tracing.Tracing(app, exporter=InMemorySpanExporter(), sample_ratio=1.0, timelines=timelines, paths={"/x"})

    async def ask(name: str, key: str, headers: dict[str, str]) -> None:
        state = {"request_id": name, "submission_ids": {name}, "api_key": ApiKey(key=key)}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": pairs, "state": state}
        await traced(scope, ignore, ignore)  # type: ignore[arg-type]

    for number in range(4):
        await ask(f"a{number}", "a", SAMPLED)
    await ask("b", "b", SAMPLED)
    for number in range(3):
        await ask(f"chosen{number}", "a", {})
    await until(lambda: len(asked) >= 6)
    assert asked == ["a0", "a1", "b", "chosen0", "chosen1", "chosen2"]
    gate.set()
    await until(lambda: len(ended) == 6)
    await ask("a later", "a", SAMPLED)
    await until(lambda: asked[-1] == "a later")
    await traced.close()


async def test_refusal_has_its_status(tokenizer: ModelTokenizer, spans: Spans) -> None:
    """A request without a key leaves no trace."""
    async with TracedApi(tokenizer, one(), api_keys=["secret"]) as api:
        key = {"Authorization": "Bearer secret"}
        assert (await api.ask(key, max_tokens=-1)).status_code == 400
        api.dispatcher.leave("r0")
        assert (await api.ask(key)).status_code == 503
        assert (await api.ask(SAMPLED)).status_code == 401
    found = spans()
    assert [attribute(span, "http.response.status_code") for span in found] == [400, 503]
    assert [span.status.status_code for span in found] == [StatusCode.UNSET, StatusCode.ERROR]


async def test_request_of_client_that_left_is_traced(tokenizer: ModelTokenizer, spans: Spans) -> None:
    async with TracedApi(tokenizer, one()) as api:
        body = {"prompt": [5] * 30, "max_tokens": 200, "ignore_eos": True, "stream": True}
        asking = asyncio.create_task(api.http.post("/v1/completions", json=body))
        while not any(live["num_output_tokens"] > 2 for live in await api.dispatcher.live_requests(None)):
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    leg = named(spans(), "serve")
    assert attribute(leg, "crossdock.finish_reason") == "abort"
    assert 2 < attribute(leg, "crossdock.num_output_tokens") < 200


async def test_lost_replica_has_no_span_and_others_do(tokenizer: ModelTokenizer, spans: Spans) -> None:
    async with TracedApi(tokenizer, [InProcess(), InProcess()]) as api:
        asking = asyncio.create_task(api.ask(max_tokens=150))
        while not any(live["num_output_tokens"] > 5 for live in await api.dispatcher.live_requests(None)):
            await asyncio.sleep(0.001)
        (victim,) = (live["replica"] for live in await api.dispatcher.live_requests(None))
        api.replicas[int(victim[1:])].is_killed = True
        api.dispatcher.leave(victim)  # Serve has given the replica up
        assert (await asking).json()["usage"]["completion_tokens"] == 150
    found = spans()
    (leg,) = children(found, named(found, "POST /v1/completions"))
    assert (attribute(leg, "crossdock.epoch"), attribute(leg, "crossdock.finish_reason")) == (1, "length")


async def test_failing_timelines_disturb_no_request(
    tokenizer: ModelTokenizer, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    class Another(InProcess):
        """A replica of another version."""

        async def timelines(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
            return [part | {"leg": "both"} for part in await super().timelines(request_id, owner)]

    async with TracedApi(tokenizer, [Another()]) as api:
        assert (await api.ask()).status_code == 200
    assert "a request could not be traced" in caplog.text
    assert [span.name for span in spans()] == ["POST /v1/completions"]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


async def test_collector_receives_spans_by_otlp(tokenizer: ModelTokenizer) -> None:
    with collector() as (url, received):
        async with TracedApi(tokenizer, pair(), otlp_endpoint=url) as api:
            assert (await api.ask(SAMPLED)).status_code == 200
    resources = [resource for request in received for resource in request.resource_spans]
    assert {
        entry.value.string_value
        for each in resources
        for entry in each.resource.attributes
        if entry.key == "service.name"
    }
    found = [span for each in resources for scope in each.scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in found} == {TRACE}
    by_id = {span.span_id: span for span in found}
    (root,) = (span for span in found if span.parent_span_id.hex() == PARENT)
    tree = {(by_id[span.parent_span_id].name, span.name) for span in found if span is not root}
    wanted = {("prefill", "queue"), ("prefill", "chunk"), ("prefill", "transfer"), ("decode", "transfer")}
    assert tree >= wanted | {(root.name, "prefill"), (root.name, "decode"), ("decode", "tokens")}


@pytest.mark.parametrize("is_silent", [False, True])
async def test_collector_that_is_down_delays_no_request(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """Nor the end of the ingress: a silent collector answers only after that."""
    monkeypatch.setattr(tracing, "LAST_S", 1.0)
    answers = threading.Event()
    if not is_silent:
        answers.set()
    with collector(503, answers) as (url, received):
        async with asyncio.timeout(240):
            async with TracedApi(tokenizer, one(), otlp_endpoint=url) as api:
                for _ in range(20):
                    assert (await api.ask()).status_code == 200
        eventually(lambda: received, "it is asked")
        answers.set()
