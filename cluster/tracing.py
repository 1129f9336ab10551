"""One OpenTelemetry trace for each sampled request: ingress, chunks of its prompt, transfer of its pages, tokens.

Nothing is traced while a request runs. When it has ended, its ingress asks the replicas for its timeline, as
`/v1/requests/{id}` does, and makes the spans from that: replicas know nothing of traces, and no step waits for one.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SETTLE_S = 0.2  # after the answer, in which its replicas end their parts
_NS = 1_000_000_000

Timelines = Callable[[str], Awaitable[Sequence[Mapping[str, Any]]]]


class Tracing:
    """ASGI middleware inside the gate, which has given the request its id."""

    def __init__(self, app: ASGIApp, *, provider: TracerProvider, timelines: Timelines, paths: Collection[str]) -> None:
        """`timelines` fetches what became of a request, by its id; `paths`: whose requests are traced."""
        self._app = app
        self._tracer = provider.get_tracer("crossdock")
        self._timelines = timelines
        self._paths = paths
        self._background: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) not in self._paths:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = scope["state"]["request_id"]
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={"crossdock.request_id": request_id, "url.path": scope["path"]},
        )
        status = 499  # the client left, as proxies count it

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            span.set_attribute("http.response.status_code", status)
            span.end()
            if span.is_recording() or span.get_span_context().trace_flags.sampled:
                self._spawn(self._tell(span, request_id))

    def _spawn(self, work: Any) -> None:
        """Outside the request: Serve would cancel its calls when that client leaves."""
        task = contextvars.Context().run(asyncio.get_running_loop().create_task, work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tell(self, root: trace.Span, request_id: str) -> None:
        await asyncio.sleep(_SETTLE_S)
        for timeline in await self._timelines(request_id):
            self._leg(root, timeline)

    def _leg(self, root: trace.Span, it: Mapping[str, Any]) -> None:
        """A replica's part of the request, and what it was made of. Times in timelines are seconds after arrival."""
        arrived: float = it["arrived"]
        end = it["ended_s"] if it["ended_s"] is not None else it["queued_s"]
        leg = {"local": "serve", "send": "prefill", "receive": "decode"}[it["leg"]]
        attributes = {
            f"crossdock.{name}": it[name]
            for name in ("replica", "slo_class", "epoch", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
        }
        attributes["crossdock.finish_reason"] = it["finish_reason"] or "running"
        span = self._span(root, leg, arrived, 0.0, end, attributes)
        if it["chunks"]:
            self._span(span, "queue", arrived, 0.0, it["queued_s"])
        for chunk in it["chunks"]:
            told = {f"crossdock.{name}": chunk[name] for name in ("start", "num_tokens", "num_decodes", "limit")}
            self._span(span, "chunk", arrived, chunk["started_s"], chunk["started_s"] + chunk["step_s"], told)
        for transfer in it["transfers"]:
            told = {f"crossdock.{name}": transfer[name] for name in ("direction", "outcome", "num_bytes", "num_pages")}
            took = sum(transfer[name] or 0.0 for name in ("handshake_s", "grant_wait_s", "write_s"))
            self._span(span, "transfer", arrived, max(transfer["ended_s"] - took, 0.0), transfer["ended_s"], told)
        if it["num_decode_steps"] and it["tpot_s"] is not None:
            tokens = {"crossdock.num_decode_steps": it["num_decode_steps"], "crossdock.gap_max_s": it["gap_max_s"]}
            self._span(span, "tokens", arrived, max(end - it["tpot_s"] * it["num_decode_steps"], 0.0), end, tokens)

    def _span(
        self,
        parent: trace.Span,
        name: str,
        arrived: float,
        start: float,
        end: float,
        attributes: Mapping[str, Any] | None = None,
    ) -> trace.Span:
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(parent),
            attributes=dict(attributes or {}),
            start_time=int((arrived + start) * _NS),
        )
        span.end(end_time=int((arrived + max(end, start)) * _NS))
        return span


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to a collector. ValueError where the package for that is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        reason = "http.otlp_endpoint: traces need the extra 'tracing': pip install 'crossdock[tracing]'"
        raise ValueError(reason) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint)
    return exporter


def provider(sample_ratio: float) -> TracerProvider:
    """Spans of `crossdock`. What a client's own trace says of sampling is kept to."""
    sampler = ParentBased(TraceIdRatioBased(sample_ratio))
    return TracerProvider(sampler, Resource.create({SERVICE_NAME: "crossdock"}), shutdown_on_exit=False)
