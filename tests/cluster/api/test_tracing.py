"""Traces of requests over engines in this process, as an exporter and as a collector get them."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.api import endpoints, tracing
from crossdock.cluster.api.endpoints import build_api
from crossdock.cluster.api.http_config import HttpConfig
from crossdock.cluster.api.listener import listen
from crossdock.cluster.api.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatch import Dispatcher
from crossdock.router.fleet import RouterConfig
from tests.cluster.dispatch.test_dispatch import InProcess
from tests.cluster.ports import free_port

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = ({"traceparent": f"00-{TRACE}-{PARENT}-{flags}"} for flags in ("01", "00"))


@pytest.fixture(scope="module")
def text(tokenizers: dict[str, PreTrainedTokenizerFast]) -> ModelTokenizer:
    return ModelTokenizer(tokenizers["byte_level"])


class Traced:
    """The API in front of replicas, and its ASGI lifespan, at whose end all spans have been exported."""

    def __init__(self, text: ModelTokenizer, replicas: Sequence[InProcess], **http: Any) -> None:
        self.replicas = replicas
        self.dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
        config = HttpConfig.model_validate({"otlp_endpoint": "http://127.0.0.1:1", "trace_sample_ratio": 1.0} | http)
        self.app = build_api(self.dispatcher, text, config)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://a")
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def __aenter__(self) -> "Traced":
        self.life = asyncio.create_task(self.app({"type": "lifespan"}, self.messages.get, self._said))
        await self.messages.put({"type": "lifespan.startup"})
        for number, replica in enumerate(self.replicas):
            self.dispatcher.join(f"r{number}", replica, replica.profile)
        while not all(link.is_open for link in self.dispatcher._links.values()):
            await asyncio.sleep(0.001)
        return self

    async def _said(self, message: Any) -> None:
        assert message["type"] in ("lifespan.startup.complete", "lifespan.shutdown.complete")

    async def __aexit__(self, *error: object) -> None:
        await self.messages.put({"type": "lifespan.shutdown"})
        await self.life
        await self.http.aclose()
        await self.dispatcher.close()
        for replica in self.replicas:
            await replica.loop.close()

    async def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"prompt": [5] * 100, "max_tokens": 8, "ignore_eos": True, "temperature": 0} | fields
        return await self.http.post("/v1/completions", json=body, headers=headers)


Story = Callable[[Traced], Awaitable[None]]


def run(text: ModelTokenizer, replicas: Callable[[], Sequence[InProcess]], story: Story, **http: Any) -> None:
    async def whole() -> None:
        async with Traced(text, replicas(), **http) as it:
            await story(it)

    asyncio.run(whole())
    for thread in threading.enumerate():
        if "Otel" in thread.name:
            thread.join(10)  # at most what one answer of the collector still takes
            assert not thread.is_alive()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[ReadableSpan]]:
    """What was exported so far."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(endpoints, "otlp_exporter", lambda endpoint: exporter)
    monkeypatch.setattr(tracing, "_SETTLE_S", (0.05, 0.2, 0.5))
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


def told(span: ReadableSpan, name: str) -> Any:
    assert span.attributes is not None
    return span.attributes[name]


def ends(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def test_a_shipped_request_is_one_trace(text: ModelTokenizer, spans: Spans) -> None:
    """From the client's own span over the ingress to both replicas, each with its side of the transfer."""
    began = time.time_ns()

    async def story(it: Traced) -> None:
        answer = await it.ask(SAMPLED | {"X-Request-Id": "mine"})
        assert answer.status_code == 200

    run(text, pair, story)
    found = spans()
    assert {span.context.trace_id for span in found if span.context} == {int(TRACE, 16)}
    root = named(found, "POST /v1/completions")
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert root.parent.span_id == int(PARENT, 16)
    assert (told(root, "crossdock.request_id"), told(root, "http.response.status_code")) == ("mine", 200)
    prefill, decode = named(found, "prefill"), named(found, "decode")
    assert {span.name for span in children(found, root)} == {"prefill", "decode"}
    assert (told(prefill, "crossdock.replica"), told(decode, "crossdock.replica")) == ("r0", "r1")
    assert told(prefill, "crossdock.finish_reason") == "shipped"
    assert (told(decode, "crossdock.finish_reason"), told(decode, "crossdock.num_output_tokens")) == ("length", 8)
    chunks = [span for span in children(found, prefill) if span.name == "chunk"]
    assert sum(told(chunk, "crossdock.num_tokens") for chunk in chunks) == 100
    for side, direction, outcome in ((prefill, "sent", "shipped"), (decode, "received", "arrived")):
        transfer = named(children(found, side), "transfer")
        assert (told(transfer, "crossdock.direction"), told(transfer, "crossdock.outcome")) == (direction, outcome)
        assert told(transfer, "crossdock.num_pages") > 0
        assert ends(transfer)[0] < ends(transfer)[1]
    assert named(children(found, prefill), "queue")
    assert told(named(children(found, decode), "tokens"), "crossdock.num_decode_steps") == 6
    for span in found:  # timelines have milliseconds
        start, end = ends(span)
        assert began - 5_000_000 <= start <= end <= time.time_ns()
    for chunk in chunks:
        assert ends(prefill)[0] <= ends(chunk)[0] <= ends(chunk)[1] <= ends(prefill)[1] + 1_000_000


def test_where_the_ingress_listens_itself(text: ModelTokenizer, spans: Spans) -> None:
    async def story(it: Traced) -> None:
        port = free_port()
        server = await listen(it.app, "127.0.0.1", port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as it.http:
            assert (await it.ask(SAMPLED)).status_code == 200
        server.should_exit = True
        await asyncio.sleep(0.2)

    run(text, one, story)
    assert [span.name for span in children(spans(), named(spans(), "POST /v1/completions"))] == ["serve"]


def test_every_choice_has_its_part_and_an_id_used_twice_is_two_traces(text: ModelTokenizer, spans: Spans) -> None:
    async def story(it: Traced) -> None:
        for _ in range(2):
            assert (await it.ask({"X-Request-Id": "same"}, n=2, temperature=1)).status_code == 200

    run(text, one, story)
    found = spans()
    roots = [span for span in found if span.parent is None]
    assert len(roots) == len({span.context.trace_id for span in roots if span.context}) == 2
    for root in roots:
        assert [span.name for span in children(found, root)] == ["serve", "serve"]


@pytest.mark.parametrize(("ratio", "headers", "is_traced"), [(0.0, {}, False), (0.0, SAMPLED, True), (1.0, {}, True)])
def test_who_is_sampled(
    text: ModelTokenizer, spans: Spans, ratio: float, headers: dict[str, str], is_traced: bool
) -> None:
    async def story(it: Traced) -> None:
        assert (await it.ask(headers)).status_code == 200
        assert (await it.ask(NOT_SAMPLED)).status_code == 200
        assert (await it.http.get("/v1/models")).status_code == 200

    run(text, one, story, trace_sample_ratio=ratio)
    assert len([span for span in spans() if span.kind is SpanKind.SERVER]) == is_traced


def test_refusals_have_their_status(text: ModelTokenizer, spans: Spans) -> None:
    """Also that of a client without a key, of whom there is no trace at all."""

    async def story(it: Traced) -> None:
        key = {"Authorization": "Bearer secret"}
        assert (await it.ask(key, max_tokens=-1)).status_code == 400
        it.dispatcher.leave("r0")
        assert (await it.ask(key)).status_code == 503
        assert (await it.ask(SAMPLED)).status_code == 401

    run(text, one, story, api_keys=["secret"])
    found = spans()
    assert [told(span, "http.response.status_code") for span in found] == [400, 503]
    assert [span.status.status_code for span in found] == [StatusCode.UNSET, StatusCode.ERROR]


def test_a_client_that_leaves(text: ModelTokenizer, spans: Spans) -> None:
    async def story(it: Traced) -> None:
        body = {"prompt": [5] * 30, "max_tokens": 200, "ignore_eos": True, "stream": True}
        asking = asyncio.create_task(it.http.post("/v1/completions", json=body))
        while not any(live["num_output_tokens"] > 2 for live in await it.dispatcher.live_requests(None)):
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(text, one, story)
    leg = named(spans(), "serve")
    assert told(leg, "crossdock.finish_reason") == "abort"
    assert 2 < told(leg, "crossdock.num_output_tokens") < 200


def test_what_a_lost_replica_did_is_lost_and_the_rest_is_told(text: ModelTokenizer, spans: Spans) -> None:
    async def story(it: Traced) -> None:
        asking = asyncio.create_task(it.ask(max_tokens=150))
        while not any(live["num_output_tokens"] > 5 for live in await it.dispatcher.live_requests(None)):
            await asyncio.sleep(0.001)
        (victim,) = (live["replica"] for live in await it.dispatcher.live_requests(None))
        it.replicas[int(victim[1:])].is_killed = True
        it.dispatcher._members.pop(victim)  # Serve has given it up
        assert (await asking).json()["usage"]["completion_tokens"] == 150

    run(text, lambda: [InProcess(), InProcess()], story)
    found = spans()
    (leg,) = children(found, named(found, "POST /v1/completions"))
    assert (told(leg, "crossdock.epoch"), told(leg, "crossdock.finish_reason")) == (1, "length")


def test_timelines_that_fail_disturb_nobody(
    text: ModelTokenizer, spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    class Another(InProcess):
        """A replica of another version."""

        async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
            return [it | {"leg": "both"} for it in await super().timelines(request_id, tenant)]

    async def story(it: Traced) -> None:
        assert (await it.ask()).status_code == 200

    run(text, lambda: [Another()], story)
    assert "a request could not be traced" in caplog.text
    assert [span.name for span in spans()] == ["POST /v1/completions"]


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@contextmanager
def collector(status: int = 200, delay: float = 0.0) -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """What is posted to its URL."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            received.append(ExportTraceServiceRequest.FromString(body))
            time.sleep(delay)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_it_by_otlp(text: ModelTokenizer) -> None:
    async def story(it: Traced) -> None:
        assert (await it.ask(SAMPLED)).status_code == 200

    with collector() as (url, received):
        run(text, pair, story, otlp_endpoint=url)
    resources = [resource for request in received for resource in request.resource_spans]
    assert {it.value.string_value for each in resources for it in each.resource.attributes if it.key == "service.name"}
    found = [span for each in resources for scope in each.scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in found} == {TRACE}
    by_id = {span.span_id: span for span in found}
    (root,) = (span for span in found if span.parent_span_id.hex() == PARENT)
    tree = {(by_id[span.parent_span_id].name, span.name) for span in found if span is not root}
    wanted = {("prefill", "queue"), ("prefill", "chunk"), ("prefill", "transfer"), ("decode", "transfer")}
    assert tree >= wanted | {(root.name, "prefill"), (root.name, "decode"), ("decode", "tokens")}


@pytest.mark.parametrize("kind", ["nobody", "unavailable", "slow"])
def test_a_collector_that_is_down_slows_no_request(text: ModelTokenizer, kind: str) -> None:
    """Nor the end of the ingress, by more than some seconds."""

    async def story(it: Traced) -> None:
        await it.ask()
        began = time.monotonic()
        for _ in range(20):
            assert (await it.ask()).status_code == 200
        assert time.monotonic() - began < 4

    began = time.monotonic()
    if kind == "nobody":
        run(text, one, story, otlp_endpoint=f"http://127.0.0.1:{free_port()}/v1/traces")
    else:
        with collector(503 if kind == "unavailable" else 200, 4.0 if kind == "slow" else 0.0) as (url, _):
            run(text, one, story, otlp_endpoint=url)
    assert time.monotonic() - began < 15
