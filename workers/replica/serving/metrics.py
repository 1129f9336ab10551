"""The metrics of one replica, for Prometheus. No ray: the ingress fetches the text and merges it."""

from collections import Counter as Tally
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from crossdock.kvtransfer.events import Figures
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.replica.engine.sleep import level_of
from crossdock.workers.replica.serving.kv_events import KVEventPublisher
from crossdock.workers.replica.transfer.replica_dock import TransferDock
from crossdock.workers.report.timeline import Progress, Timeline
from crossdock.workers.report.vllm_names import OF_REPLICAS, exposition
from crossdock.workers.schedule.drafts.verify import DraftTotals
from crossdock.workers.schedule.policies.pace import promises_beyond
from crossdock.workers.schedule.prefixes.awaited import PageSource
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import Leg

_STEP_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
_CHUNK_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHUNK_WAIT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_ITERATIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
_TTFT = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAP = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_TRANSFER = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_PHASE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_STEP_TOKENS = (1, 2, 4, 8, *_CHUNK_TOKENS)
_DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_PREFILL_TOKENS = (*_CHUNK_TOKENS, 32768, 65536, 131072)
_PHASES = ("queue", "prefill", "decode", "inference")
_KINDS = ("chunks", "decodes", "mixed")
_ACTIVE = (Status.WAITING, Status.RUNNING, Status.HELD)
_POOL = "pool"  # value of the label source: the tokens came from nowhere else
_SHARED = {True: "true", False: "false"}  # values of the label prefill_shared


class EngineMetrics:
    """The metrics of one engine, on a registry of their own. Its gauges are read at every scrape."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._landed = engine.scheduler.awaited.num_tokens
        self._counted = Tally[PageSource]()  # of the tokens that have landed, those that a prompt has found
        self._token_bytes = engine.page_bytes * engine.pages.num_groups // engine.config.page_size
        self._define_step_metrics()
        self._define_chunk_metrics()
        self._define_latency_metrics([slo.name for slo in engine.config.slo_classes])
        self._define_request_metrics()
        self._define_transfer_metrics()
        self.registry.register(_Gauges(engine))

    def _define_step_metrics(self) -> None:
        steps = self._counter("crossdock_steps", "Engine steps.", "kind")
        step_seconds = self._histogram("crossdock_step_seconds", "Duration of a step.", _STEP_SECONDS, "kind")
        self._predicted = self._histogram(
            "crossdock_step_predicted_seconds", "Predicted duration of a step.", _STEP_SECONDS
        )
        self._of_kind = {kind: (steps.labels(kind), step_seconds.labels(kind)) for kind in _KINDS}
        self._skipped = self._counter(
            "crossdock_decodes_skipped", "Decodes left out of a step in favour of more urgent ones."
        )
        self._step_tokens = self._histogram("crossdock_step_tokens", "Tokens of a step, of both kinds.", _STEP_TOKENS)
        self._step_prompt_tokens = self._histogram(
            "crossdock_step_prompt_tokens", "Prompt tokens of a step that has chunks.", _CHUNK_TOKENS
        )
        self._encoder_seconds = self._histogram(
            "crossdock_encoder_seconds", "Seconds of a step in which pictures were encoded.", _STEP_SECONDS
        )
        self._encoder_limited = self._counter(
            "crossdock_steps_limited_by_encoder", "Steps whose chunks end before a picture: it did not fit, or waits."
        )
        decodes = self._histogram("crossdock_step_decodes", "Decodes of a step that has some.", _DECODES, "kind")
        self._step_decodes = {kind: decodes.labels(kind) for kind in _KINDS if kind != "chunks"}

    def _define_chunk_metrics(self) -> None:
        self._chunks = self._histogram("crossdock_chunk_tokens", "Prompt tokens per chunk.", _CHUNK_TOKENS)
        self._chunk_wait = self._histogram(
            "crossdock_chunk_wait_seconds",
            "From when a request could have had a chunk to the step that computed one.",
            _CHUNK_WAIT,
            "slo_class",
        )
        self._iterations = self._histogram(
            "crossdock_prefill_iterations", "Chunks of a request up to its first token.", _ITERATIONS, "slo_class"
        )
        self._prefill_tokens = self._histogram(
            "crossdock_prefill_tokens", "Prompt tokens computed for a request, without cached ones.", _PREFILL_TOKENS
        )

    def _define_latency_metrics(self, slo_classes: Sequence[str]) -> None:
        self._ttft = self._histogram(
            "crossdock_time_to_first_token_seconds",
            "From arrival at the replica to the first token.",
            _TTFT,
            "slo_class",
        )
        gap = self._histogram(
            "crossdock_inter_token_seconds",
            "Between two tokens of a stream; prefill_shared: whether a chunk was computed in between.",
            _GAP,
            "prefill_shared",
            "slo_class",
        )
        self._gap = {
            (name, is_shared): gap.labels(label, name) for name in slo_classes for is_shared, label in _SHARED.items()
        }
        phases = self._histogram(
            "crossdock_request_phase_seconds",
            "Of a request on this replica: queue: until its first chunk; prefill: until its first token; decode: until "
            "its last token; inference: prefill and decode.",
            _PHASE,
            "phase",
        )
        self._phase = {phase: phases.labels(phase) for phase in _PHASES}
        self._slo_ttft = self._counter(
            "crossdock_slo_ttft",
            "Requests by outcome: whether the first token met the class's time to first token.",
            "slo_class",
            "outcome",
        )
        self._slo_tpot = self._counter(
            "crossdock_slo_tpot",
            "Finished requests by outcome: whether the tokens met the class's time per output token.",
            "slo_class",
            "outcome",
        )

    def _define_request_metrics(self) -> None:
        self._prompt_tokens = self._counter("crossdock_prompt_tokens", "Prompt tokens computed.")
        cached = self._counter(
            "crossdock_cached_tokens",
            "Prompt tokens found in the prefix cache, by where their pages were: in the pool, in a tier, or at another "
            "replica.",
            "source",
        )
        self._cached_tokens = {source: cached.labels(source) for source in (_POOL, *get_args(PageSource))}
        self._output_tokens = self._counter("crossdock_output_tokens", "Tokens generated.")
        self._finished = self._counter("crossdock_requests", "Requests ended.", "finish_reason", "slo_class")
        self._refused = self._counter(
            "crossdock_requests_refused",
            "Requests this replica refused (429): the first token would be late.",
            "slo_class",
        )
        self._cancelled_bytes = self._counter(
            "crossdock_cancelled_kv_bytes", "KV bytes computed for requests that were aborted."
        )

    def _define_transfer_metrics(self) -> None:
        self._transfers = self._counter(
            "crossdock_transfers",
            "Ended transfers; direction `fetched` and `lent`: of prefixes.",
            "direction",
            "outcome",
        )
        self._transfer_bytes = self._counter("crossdock_transfer_bytes", "Bytes of KV pages moved.", "direction")
        self._transfer_seconds = self._histogram(
            "crossdock_transfer_seconds", "Seconds of one sent transfer, by phase.", _TRANSFER, "phase"
        )
        self._hidden = self._counter(
            "crossdock_transfer_hidden_seconds", "Seconds of writing during which later chunks were computed."
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

    def stepped(self, step: Step) -> None:
        """Count a step that has ended."""
        batch = step.batch
        chunks = batch.scheduled[batch.num_decodes :]
        kind = "mixed" if batch.num_decodes and chunks else "decodes" if batch.num_decodes else "chunks"
        count, seconds = self._of_kind[kind]
        count.inc()
        seconds.observe(step.seconds)
        if step.predicted:
            self._predicted.observe(step.predicted)
        self._step_tokens.observe(batch.num_tokens)
        if chunks:
            self._step_prompt_tokens.observe(sum(part.num_tokens for part in chunks))
        if batch.num_decodes:
            self._step_decodes[kind].observe(batch.num_decodes)
        if step.encoder_seconds:
            self._encoder_seconds.observe(step.encoder_seconds)
        if batch.limit.startswith("encoder"):
            self._encoder_limited.inc()
        if batch.num_skipped:
            self._skipped.inc(batch.num_skipped)

    def progressed(self, progress: Progress) -> None:
        """Count the chunks, tokens and ends of requests that a step brought."""
        for timeline, chunk in progress.chunks:
            self._chunks.observe(chunk.num_tokens)
            self._prompt_tokens.inc(chunk.num_tokens)
            self._chunk_wait.labels(timeline.slo.name).observe(chunk.waited_s)
            # Tokens before a chunk were found, unless a chunk before this one had them: a prompt that is computed from
            # its beginning while its end is loaded finds that end after its first chunk.
            before = timeline.chunks[-2] if timeline.num_chunks > 1 else None
            known = 0 if before is None else before.start + before.num_tokens
            self._found(max(min(chunk.start, timeline.num_prompt_tokens) - known, 0))
        if progress.num_tokens:
            self._output_tokens.inc(progress.num_tokens)
        for timeline in progress.tokens:
            if timeline.gap is not None:
                self._gap[timeline.slo.name, timeline.is_gap_shared].observe(timeline.gap)
            elif timeline.first_token is not None:
                self._first_token(timeline)
        for timeline in progress.finished:
            self._end(timeline)

    def _found(self, num_tokens: int) -> None:
        """Count cached tokens of a prompt. As many as have landed and were not found before came from elsewhere."""
        for source, landed in self._landed.items():
            count = min(landed - self._counted[source], num_tokens)
            self._counted[source] += count
            self._cached_tokens[source].inc(count)
            num_tokens -= count
        self._cached_tokens[_POOL].inc(num_tokens)

    def aborted(self, timeline: Timeline) -> None:
        """Count a request that was aborted, and the KV bytes that were computed for it."""
        self._end(timeline)
        counts = timeline.counts()
        self._cancelled_bytes.inc(max(counts.computed - counts.cached, 0) * self._token_bytes)
        if timeline.first_token is None and timeline.ttft_met(timeline.ended) is False:
            self._slo_ttft.labels(timeline.slo.name, "missed").inc()  # late already when it was aborted

    def transferred(self, direction: str, figures: Figures, outcome: str) -> None:
        """Count a transfer that has ended: `sent`, `received`, or a prefix `fetched` or `lent`."""
        self._transfers.labels(direction, outcome).inc()
        self._transfer_bytes.labels(direction).inc(figures.num_bytes)
        if direction == "sent" and figures.num_writes:
            self._transfer_seconds.labels("write").observe(figures.write_seconds)
            self._transfer_seconds.labels("handshake").observe(figures.handshake_seconds or 0.0)
            self._transfer_seconds.labels("grant").observe(figures.grant_wait_seconds or 0.0)
            self._hidden.inc(figures.hidden_seconds)

    def watch(self, docks: Sequence[TransferDock]) -> None:
        """Show at every scrape how many transfers are under way, where there are docks."""
        if not docks:
            return
        open_ = Gauge("crossdock_transfers_open", "Transfers under way, both directions.", registry=self.registry)
        open_.set_function(lambda: sum(dock.counts().num_open for dock in docks))
        dropped = Gauge(
            "crossdock_transfer_messages_dropped",
            "Stale or malformed messages, since the start.",
            registry=self.registry,
        )
        dropped.set_function(lambda: sum(each.num_unknown + each.num_malformed for each in (d.counts() for d in docks)))

    def watch_kv_events(self, publisher: KVEventPublisher) -> None:
        """Show at every scrape how many batches of events were published, and how many were lost."""
        text = "Batches of KV events, since the start: published, or lost because the queue was full."
        batches = Gauge("crossdock_kv_event_batches", text, ["outcome"], registry=self.registry)
        batches.labels("published").set_function(lambda: publisher.num_batches - publisher.num_lost)
        batches.labels("lost").set_function(lambda: publisher.num_lost)

    def started(self, ages: Mapping[str, float]) -> None:
        """Show the seconds of each phase of the start. `ages`: those of the process when each phase ended, in order."""
        text = "Seconds that each phase of this replica's start took."
        gauge = Gauge("crossdock_start_seconds", text, ["phase"], registry=self.registry)
        for (phase, age), before in zip(ages.items(), [0.0, *ages.values()], strict=False):
            gauge.labels(phase).set(age - before)

    def refused(self, slo_class: str) -> None:
        """Count a request that was refused for its time to first token."""
        self._refused.labels(slo_class).inc()

    def _first_token(self, timeline: Timeline) -> None:
        assert timeline.ttft is not None
        name = timeline.slo.name
        self._ttft.labels(name).observe(timeline.ttft)
        self._iterations.labels(name).observe(timeline.num_chunks)
        self._prefill_tokens.observe(timeline.num_prompt_tokens - timeline.counts().cached)
        self._slo_ttft.labels(name, "met" if timeline.ttft <= timeline.ttft_deadline else "missed").inc()

    def _end(self, timeline: Timeline) -> None:
        assert timeline.finish_reason is not None
        name = timeline.slo.name
        self._finished.labels(timeline.finish_reason.value, name).inc()
        for phase, seconds in _phases(timeline).items():
            self._phase[phase].observe(seconds)
        if (is_met := timeline.tpot_met()) is not None:
            self._slo_tpot.labels(name, "met" if is_met else "missed").inc()

    def text(self, vllm_model: str | None = None) -> str:
        """Return Prometheus' text. `vllm_model`: also under vLLM's names, with this name of the model."""
        return exposition(self.registry, OF_REPLICAS, vllm_model)


def _phases(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each of `_PHASES` that an ended request had on this replica.

    A replica that computed no chunk has no queue and no prefill; one that ships after the first token has no decode.
    """
    found = {} if timeline.first_chunk is None else {"queue": timeline.first_chunk - timeline.arrived}
    if timeline.begun is None:
        return found
    if timeline.first_chunk is not None:
        found["prefill"] = timeline.begun - timeline.first_chunk
    if timeline.gap_summary().number:
        found["decode"] = timeline.last_token - timeline.begun
    return found | {"inference": found.get("prefill", 0.0) + found.get("decode", 0.0)}


class _Gauges(Collector):
    """The state of an engine at this moment.

    A scrape reads while the engine's thread writes. Requests are copied in one operation, which no thread can
    interrupt. A number may be one step older than its neighbour.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        counts = engine.pages.counts()
        pages = {state: getattr(counts, state) for state in ("free", "owned", "cached", "quarantined")}
        yield _gauge("crossdock_pages", "KV pages by state.", pages, "state")
        config = engine.config
        info = (str(config.page_size), str(counts.total), config.kv_cache_dtype, str(config.enable_prefix_caching))
        labels = ("page_size", "num_pages", "kv_cache_dtype", "enable_prefix_caching")
        yield _gauge("crossdock_kv_cache_info", "1; the labels are the settings of the KV pages.", {info: 1}, *labels)
        text = "Number of the last update of weights; 0: those of the start. The label names them."
        weights = engine.scheduler.weights
        yield _gauge("crossdock_weight_version", text, {weights.name: weights.number}, "version")
        text = "1 for the replica's level of sleep. 0: awake; 1: its pages are given up; 2: also its weights are lost."
        level = level_of(engine)
        yield _gauge("crossdock_sleep_level", text, {each: each == level for each in range(3)}, "level")
        yield from self._requests(engine.scheduler.table.requests())
        yield from self._cost()
        if kernels := engine.executor.cpu_kernels:
            text = "Always 1; the label says which kernels compute the matrix products of fused layers."
            yield _gauge("crossdock_cpu_kernels", text, {kernels: 1}, "kernels")
        text = "Requests that ended because the model computed NaN or infinity."
        yield _counter("crossdock_not_finite", text, engine.num_not_finite)
        text = "Requests preempted: their pages went to other requests."
        yield _counter("crossdock_preemptions", text, engine.scheduler.table.num_preemptions)
        yield self._charged()
        yield from self._drafts()
        yield from self._pictures()
        yield from self._tiers()
        yield from self._adapters()
        yield from self._experts()

    def _experts(self) -> Iterator[Metric]:
        """Yield how evenly experts are used by the ranks; nothing where none move. No rank is asked."""
        model = self._engine.executor.model
        if model is None or model.balance is None:
            return
        yield _counter("crossdock_experts_moved", "Experts that were sent to another rank.", model.balance.num_moved)
        if (balancedness := model.balance.balancedness) is not None:
            text = "Mean rows of a rank / most, before the last rearrangement of experts; 1: ranks had equal work."
            yield _gauge("crossdock_expert_balancedness", text, balancedness)

    def _adapters(self) -> Iterator[Metric]:
        """Yield the counts of LoRA adapters; there are none where the replica takes none."""
        slots = self._engine.scheduler.adapters
        if slots.num_slots:
            loaded = len(slots.table.loaded_adapters)
            yield _gauge("crossdock_adapters", "LoRA adapters in the replica's slots.", loaded)
            yield _counter("crossdock_adapter_loads", "LoRA adapters that were loaded.", slots.num_loads)
            yield _gauge("crossdock_adapter_load_seconds", "Recent mean seconds of a load.", slots.load_s)

    def _charged(self) -> Metric:
        """Return the seconds that tenants were charged; without a sample where tenants are not told apart."""
        text = "Predicted seconds of steps that owners were charged; `others`: owners beyond the first 64."
        classes = self._engine.config.slo_classes
        charged = dict(self._engine.scheduler.table.tenants.charged)
        samples = {(name, classes[priority].name): seconds for (name, priority), seconds in charged.items()}
        return _counter("crossdock_charged_seconds", text, samples, "tenant", "slo_class")

    def _tiers(self) -> Iterator[Metric]:
        """Yield the counts of the tiers below the pool; there are none without tiers."""
        if self._engine.tiers is None:
            return
        counts = self._engine.tiers.counts()

        def of(field: str) -> dict[str, int]:
            return {each.name: getattr(each, field) for each in counts}

        yield _gauge("crossdock_tier_pages", "Pages and states outside the pool, by tier.", of("pages"), "tier")
        yield _gauge("crossdock_tier_bytes", "Bytes of all pages in a tier.", of("bytes"), "tier")
        yield _counter("crossdock_tier_stored_pages", "Pages that were stored.", of("stored"), "tier")
        yield _counter("crossdock_tier_loaded_pages", "Pages that were loaded.", of("loaded"), "tier")
        text = "Pages that were to be loaded and were lost, or were not what was stored."
        yield _counter("crossdock_tier_missed_pages", text, of("missed"), "tier")

    def _pictures(self) -> Iterator[Metric]:
        """Yield the counts of the encoder, which are 0 for a model of text alone."""
        encoding = self._engine.scheduler.encoding
        totals = encoding.totals
        text = "Pictures, and groups of frames of videos, that were encoded."
        yield _counter("crossdock_items_encoded", text, totals.num_encoded)
        text = "Embedding tokens that the encoder made."
        yield _counter("crossdock_encoder_rows", text, totals.num_embedding_tokens)
        text = "Pictures and groups of frames whose embeddings were in memory when a request reached them."
        yield _counter("crossdock_item_hits", text, totals.num_hits)
        yield _gauge("crossdock_item_rows", "Embedding tokens in memory.", encoding.num_embedding_tokens)

    def _drafts(self) -> Iterator[Metric]:
        """Yield the counts of verified drafts, which are 0 without speculation."""
        verification = self._engine.scheduler.verification
        totals = verification.totals if verification is not None else DraftTotals()
        accepted = list(totals.num_accepted_at)
        wasted = verification.policy.wasted_s if verification is not None else 0.0
        forced = verification.policy.forced if verification is not None else 0
        text = "Drafts that steps verified: one for each stream and step."
        yield _counter("crossdock_drafts", text, totals.num_drafts)
        yield _counter("crossdock_draft_tokens", "Drafted tokens that steps verified.", totals.num_tokens)
        yield _counter("crossdock_draft_tokens_accepted", "Drafted tokens that the model chose too.", sum(accepted))
        text = "Drafted tokens that a grammar dictated; they are accepted."
        yield _counter("crossdock_draft_tokens_forced", text, forced)
        text = "Predicted seconds by which drafted tokens that were rejected made steps longer."
        yield _counter("crossdock_draft_wasted_seconds", text, wasted)
        text = "Accepted drafted tokens by their place in a draft."
        by_position = dict(enumerate(accepted))
        yield _counter("crossdock_draft_tokens_accepted_at", text, by_position, "position")

    def _requests(self, requests: list[Request]) -> Iterator[Metric]:
        classes = [slo.name for slo in self._engine.config.slo_classes]
        active = Tally((request.status, request.slo_class) for request in requests)
        every = {(status.value, name): active[status, name] for status in _ACTIVE for name in classes}
        yield _gauge("crossdock_requests_active", "Requests by status.", every, "status", "slo_class")
        tokens = dict.fromkeys(classes, 0)
        seconds = dict.fromkeys(classes, 0.0)
        for request in requests:
            if request.is_decoding or request.status is Status.HELD or request.leg is Leg.RECEIVE:
                continue
            tokens[request.slo_class] += request.num_uncached_tokens
            seconds[request.slo_class] += self._engine.scheduler.forecast.prefill_seconds(request)
        text = "Prompt tokens that requests without a first token still have to compute."
        yield _gauge("crossdock_uncached_tokens_waiting", text, tokens, "slo_class")
        text = "Predicted seconds to compute the waiting prompt tokens."
        yield _gauge("crossdock_backlog_seconds", text, seconds, "slo_class")

    def _cost(self) -> Iterator[Metric]:
        fit = self._engine.cost_fit
        if fit is None:
            return
        text = "Coefficients of StepCost, the prediction of a step's duration."
        yield _gauge("crossdock_step_cost_seconds", text, asdict(fit.cost), "coefficient")
        text = "Least seconds of a token, of the classes that promise less: beyond this machine."
        beyond = promises_beyond(fit.cost, self._engine.config.slo_classes)
        yield _gauge("crossdock_promise_beyond_seconds", text, beyond, "slo_class")
        text = "Interval at which steps end while there is enough to do, as a share of what each takes; "
        text += "below 1 in a pipeline."
        yield _gauge("crossdock_step_interval_share", text, self._engine.intervals.share)
        text = "|predicted - actual| / actual duration of recent steps."
        errors = {q: fit.error(q) for q in (0.5, 0.9)}
        yield _gauge("crossdock_step_relative_error", text, errors, "quantile")
        text = "Steps too far from their prediction to be learnt from."
        yield _counter("crossdock_step_outliers", text, fit.num_rejected)


def _counter(name: str, text: str, samples: Mapping[Any, float] | float, *labels: str) -> Metric:
    """Return a counter. `samples`: its value; with `labels`, by their values, a tuple where there are several."""
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _gauge(name: str, text: str, samples: Mapping[Any, float] | float, *labels: str) -> Metric:
    """Return a gauge; arguments as of `_counter`."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Mapping[Any, float] | float) -> Metric:
    for values, number in samples.items() if isinstance(samples, Mapping) else [((), samples)]:
        family.add_metric([*map(str, values)] if isinstance(values, tuple) else [str(values)], number)
    return family
