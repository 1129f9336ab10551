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
from functools import partial
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crossdock.cluster.api.http.http_guard import as_api_error
from crossdock.cluster.api.http.keys import owner_of
from crossdock.workers.schedule.shares import Shares

logger = logging.getLogger("ray.serve")

SETTLE_S = (0.2, 1.0, 5.0)  # waits until replicas have ended their parts, which they do soon after the answer
LAST_S = 3.0  # at the end: wait for spans not yet made, and again for spans not yet exported
_MOST_ASKED = 32  # requests at once that clients' traces have chosen; each asks every replica, up to three times
_NS = 1_000_000_000
_SPANS = {"local": "serve", "send": "prefill", "receive": "decode"}  # by leg
_CLIENT_LEFT = 499  # as proxies report it; here also a request over its time limit

Timelines = Callable[[str, str | None], Awaitable[Sequence[Mapping[str, Any]]]]


class Tracing:
    """ASGI middleware inside `HttpGuard`.

    Reads the scope's `state`: `request_id` from the guard, `submission_ids` from the application. Spans show an error's
    status as the guard answers it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        exporter: SpanExporter,
        sample_ratio: float,
        timelines: Timelines,
        paths: Collection[str],
    ) -> None:
        """`sample_ratio`: share of the requests that arrive without a trace; a client's own trace decides for itself.

        `timelines` fetches the timelines of a request by its id and owner. `paths`: the paths to trace.
        """
        self._app = app
        self._exporter = exporter
        resource = Resource.create({SERVICE_NAME: "crossdock"})
        self._provider = TracerProvider(ParentBased(TraceIdRatioBased(sample_ratio)), resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))  # has a thread; drops spans at overload
        self._tracer = self._provider.get_tracer("crossdock")
        self._timelines = timelines
        self._paths = paths
        self._background: set[asyncio.Task[None]] = set()
        self._asked = Shares(_MOST_ASKED)

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
        """Export the remaining spans, within twice `LAST_S` seconds."""
        if self._background:
            await asyncio.wait(self._background, timeout=LAST_S)
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, LAST_S)
        if sending.is_alive():  # the collector does not answer; this ends the retries
            self._exporter.shutdown()

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        context = TraceContextTextMapPropagator().extract(
            {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        )
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=context,
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
            api_error = as_api_error(error)
            status = status or api_error.status
            if api_error.status >= 500:
                span.set_status(trace.StatusCode.ERROR, str(api_error))
            raise
        finally:
            span.set_attribute("http.response.status_code", status or _CLIENT_LEFT)
            span.end()
            ids = state.get("submission_ids", ())
            if ids and span.get_span_context().trace_flags.sampled:
                work = partial(self._add_parts, span, state["request_id"], ids)
                is_chosen_here = not trace.get_current_span(context).get_span_context().is_valid
                self._spawn(work, None if is_chosen_here else owner_of(state.get("api_key")))

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], owner: str | None) -> None:
        """Run `work` outside the request's context: Serve would cancel its calls when that client leaves.

        `owner`: whose trace it is, which has a share of `_MOST_ASKED`. None: this server chose to trace the request.
        """
        if owner is not None:
            if not self._asked.room(owner):
                return
            self._asked.take(owner, 1)
        task = contextvars.Context().run(asyncio.get_running_loop().create_task, work())
        self._background.add(task)
        task.add_done_callback(self._forget)
        if owner is not None:
            task.add_done_callback(lambda _: self._asked.release(owner, 1))

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a request could not be traced", exc_info=task.exception())

    async def _add_parts(self, root: trace.Span, request_id: str, ids: Collection[str]) -> None:
        """Add the spans of every replica's part. A lost replica's part is lost with it."""
        parts: list[Mapping[str, Any]] = []
        for wait in SETTLE_S:
            await asyncio.sleep(wait)
            # A client may use its id twice, and another client the same. Traces are the operator's: they show all.
            parts = [part for part in await self._timelines(request_id, None) if part["id"] in ids]
            if all(part["ended_s"] is not None for part in parts):
                break
        for part in parts:
            self._add_part(root, part)

    def _add_part(self, root: trace.Span, part: Mapping[str, Any]) -> None:
        """Add a span for a replica's part of the request, with children. Timelines are in seconds after arrival."""
        arrived: float = part["arrived"]
        end: float = time.time() - arrived if part["ended_s"] is None else part["ended_s"]
        name = _SPANS[part["leg"]]
        counts = ("epoch", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens")
        attributes = _named(part, "replica", "slo_class", *counts, "state")
        if part["finish_reason"] is not None:
            attributes |= _named(part, "finish_reason")
        span = self._span(root, name, arrived, 0.0, end, attributes)
        if part["chunks"]:
            self._span(span, "queue", arrived, 0.0, part["queued_s"], {})
        for chunk in part["chunks"]:
            attributes = _named(chunk, "start", "num_tokens", "num_decodes", "reason", "limit")
            self._span(span, "chunk", arrived, chunk["started_s"], chunk["started_s"] + chunk["step_s"], attributes)
        for transfer in part["transfers"]:
            attributes = _named(transfer, "direction", "outcome", "num_bytes", "num_pages", "num_writes")
            ended = transfer["ended_s"]
            self._span(span, "transfer", arrived, max(ended - transfer["total_s"], 0.0), ended, attributes)
        if part["num_decode_steps"]:
            attributes = _named(part, "num_decode_steps", "gap_p50_s", "gap_max_s")
            start = max(end - part["tpot_s"] * part["num_decode_steps"], 0.0)
            self._span(span, "tokens", arrived, start, end, attributes)

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
    """Return an exporter to a collector. Raises ValueError if its package is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        reason = "http.otlp_endpoint: a package is missing: pip install opentelemetry-exporter-otlp-proto-http"
        raise ValueError(reason) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint)
    return exporter
