"""What a replica measures of itself, in Prometheus terms. No ray: the ingress fetches the text and merges it."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from crossdock.workers.engine import Engine, Step
from crossdock.workers.pages import PagePool
from crossdock.workers.request import FinishReason, Request

_STEP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
_CHUNK_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineMetrics:
    """Counters of one engine, on a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._steps = Counter("crossdock_steps", "Engine steps.", ["kind"], registry=registry)
        self._step_seconds = Histogram(
            "crossdock_step_seconds", "Duration of a step.", ["kind"], buckets=_STEP_SECONDS, registry=registry
        )
        self._chunks = Histogram(
            "crossdock_chunk_tokens", "Prompt tokens per chunk.", buckets=_CHUNK_TOKENS, registry=registry
        )
        self._prompt_tokens = Counter("crossdock_prompt_tokens", "Prompt tokens computed.", registry=registry)
        self._cached_tokens = Counter("crossdock_cached_tokens", "Prompt tokens found in cache.", registry=registry)
        self._output_tokens = Counter("crossdock_output_tokens", "Tokens generated.", registry=registry)
        self._finished = Counter("crossdock_requests", "Requests ended.", ["finish_reason"], registry=registry)
        self._cancelled_bytes = Counter(
            "crossdock_cancelled_kv_bytes", "KV bytes computed for requests that were aborted.", registry=registry
        )
        self._pages = Gauge("crossdock_pages", "KV pages by state.", ["state"], registry=registry)
        self._requests = Gauge("crossdock_requests_active", "Requests by status.", ["status"], registry=registry)
        self._preemptions = Gauge("crossdock_preemptions", "Preemptions since start.", registry=registry)

    def watch(self, engine: Engine) -> None:
        """Reads the engine's gauges at every scrape."""
        for state in ("free", "owned", "cached", "quarantined"):
            self._pages.labels(state).set_function(partial(_count, engine.pages, state))
        self._requests.labels("running").set_function(lambda: len(engine.scheduler.running))
        self._requests.labels("waiting").set_function(lambda: len(engine.scheduler.waiting))
        self._preemptions.set_function(lambda: engine.scheduler.num_preemptions)

    def stepped(self, step: Step) -> None:
        num_decodes, num_chunks = step.batch.num_decodes, len(step.batch.scheduled) - step.batch.num_decodes
        kind = "mixed" if num_decodes and num_chunks else "decodes" if num_decodes else "chunks"
        self._steps.labels(kind).inc()
        self._step_seconds.labels(kind).observe(step.seconds)
        for part in step.batch.scheduled[num_decodes:]:
            self._chunks.observe(part.num_tokens)
            self._prompt_tokens.inc(part.num_tokens)
            if part.start == part.request.num_cached_tokens and not part.request.num_preemptions:
                self._cached_tokens.inc(part.start)
        for delta in step.deltas:
            self._output_tokens.inc(len(delta.token_ids))
            if delta.finish_reason is not None:
                self._finished.labels(delta.finish_reason.value).inc()

    def aborted(self, request: Request, engine: Engine) -> None:
        self._finished.labels(FinishReason.ABORT.value).inc()
        computed = request.num_computed_tokens - request.num_cached_tokens
        self._cancelled_bytes.inc(max(computed, 0) * engine.model.layout(engine.config.page_size).token_bytes)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


def _count(pages: PagePool, state: str) -> int:
    count: int = getattr(pages.counts(), state)
    return count
