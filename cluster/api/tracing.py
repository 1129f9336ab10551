"""One OpenTelemetry trace for each sampled request: ingress, chunks of its prompt, transfer of its pages, tokens.

Nothing is traced while a request runs. When it has ended, its ingress asks the replicas for its timelines, as
`/v1/requests/{id}` does, and makes the spans from those: replicas know nothing of traces, and no step waits for one.
"""

import asyncio
import contextvars
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crossdock.cluster.api.http_guard import as_api_error

logger = logging.getLogger("ray.serve")

_SETTLE_S = (0.2, 1.0, 5.0)  # waits for replicas to end their parts, which they do soon after the answer
_LAST_S = 3.0  # at the end, for what is not yet told, and again for what is not yet sent
_NS = 1_000_000_000
_CLIENT_LEFT = 499  # as proxies count it; here also: its time was over

Timelines = Callable[[str, str | None], Awaitable[Sequence[Mapping[str, Any]]]]


class Tracing:
    """ASGI middleware inside the gate, whose `state` it reads: the request's id and key, and, from the application,
    `submission_ids`. What an error became is told as the gate tells it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        exporter: SpanExporter,
        sample_ratio: float,
        timelines: Timelines,
        paths: Collection[str],
    ) -> None:
        """`sample_ratio`: of requests that come without a trace; what a client's own says of sampling is kept to.
        `timelines` fetches what became of a request by its id and tenant; `paths`: whose requests are traced."""
        self._app = app
        self._exporter = exporter
        resource = Resource.create({SERVICE_NAME: "crossdock"})
        self._provider = TracerProvider(ParentBased(TraceIdRatioBased(sample_ratio)), resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))  # has a thread and drops what is too much
        self._tracer = self._provider.get_tracer("crossdock")
        self._timelines = timelines
        self._paths = paths
        self._background: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._ending(send))
        elif scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in self._paths:
            await self._traced(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _ending(self, send: Send) -> Send:
        async def ended(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await self.close()
            await send(message)

        return ended

    async def close(self) -> None:
        """Sends what there is, for some seconds at most."""
        if self._background:
            await asyncio.wait(self._background, timeout=_LAST_S)
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _LAST_S)
        if sending.is_alive():  # no collector answers; this ends its retries
            self._exporter.shutdown()

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=TraceContextTextMapPropagator().extract(
                {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            ),
            kind=trace.SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "crossdock.request_id": state["request_id"],
            },
        )
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            told = as_api_error(error)
            status = status or told.status
            if told.status >= 500:
                span.set_status(trace.StatusCode.ERROR, str(told))
            raise
        finally:
            span.set_attribute("http.response.status_code", status or _CLIENT_LEFT)
            span.end()
            ids = state.get("submission_ids", ())
            if ids and span.get_span_context().trace_flags.sampled:
                key = state["api_key"]
                self._spawn(self._tell(span, state["request_id"], None if key is None else key.tenant, ids))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Outside the request: Serve would cancel its calls when that client leaves."""
        task = contextvars.Context().run(asyncio.get_running_loop().create_task, work)
        self._background.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a request could not be traced", exc_info=task.exception())

    async def _tell(self, root: trace.Span, request_id: str, tenant: str | None, ids: Collection[str]) -> None:
        """What was on a replica that is lost is lost with it; the rest is told."""
        legs: list[Mapping[str, Any]] = []
        for wait in _SETTLE_S:
            await asyncio.sleep(wait)
            # A client may use its id twice.
            legs = [it for it in await self._timelines(request_id, tenant) if it["id"] in ids]
            if all(it["ended_s"] is not None for it in legs):
                break
        for leg in legs:
            self._leg(root, leg)

    def _leg(self, root: trace.Span, it: Mapping[str, Any]) -> None:
        """A replica's part of the request, and what it was made of. Times in timelines are seconds after arrival."""
        arrived: float = it["arrived"]
        end: float = time.time() - arrived if it["ended_s"] is None else it["ended_s"]
        name = {"local": "serve", "send": "prefill", "receive": "decode"}[it["leg"]]
        told = _named(
            it, "replica", "slo_class", "epoch", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "state"
        )
        if it["finish_reason"] is not None:
            told |= _named(it, "finish_reason")
        span = self._span(root, name, arrived, 0.0, end, told)
        if it["chunks"]:
            self._span(span, "queue", arrived, 0.0, it["queued_s"], {})
        for chunk in it["chunks"]:
            told = _named(chunk, "start", "num_tokens", "num_decodes", "reason", "limit")
            self._span(span, "chunk", arrived, chunk["started_s"], chunk["started_s"] + chunk["step_s"], told)
        for transfer in it["transfers"]:
            told = _named(transfer, "direction", "outcome", "num_bytes", "num_pages", "num_writes")
            ended = transfer["ended_s"]
            self._span(span, "transfer", arrived, max(ended - transfer["total_s"], 0.0), ended, told)
        if it["num_decode_steps"]:
            told = _named(it, "num_decode_steps", "gap_p50_s", "gap_max_s")
            self._span(span, "tokens", arrived, max(end - it["tpot_s"] * it["num_decode_steps"], 0.0), end, told)

    def _span(
        self, parent: trace.Span, name: str, arrived: float, start: float, end: float, attributes: Mapping[str, Any]
    ) -> trace.Span:
        context = trace.set_span_in_context(parent)
        began = int((arrived + start) * _NS)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=began)
        span.end(int((arrived + end) * _NS))
        return span


def _named(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {f"crossdock.{name}": values[name] for name in names}


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to a collector. ValueError where the package for that is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        reason = "http.otlp_endpoint: traces need the extra 'tracing': pip install 'crossdock[tracing]'"
        raise ValueError(reason) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint)
    return exporter
