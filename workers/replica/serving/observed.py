"""The notes of an engine's thread about its work. Other threads may ask for them while the engine steps."""

import json
import logging
import time
import uuid
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from crossdock.kvtransfer.events import Figures
from crossdock.workers.replica.engine.engine import Engine, Step, progress_of
from crossdock.workers.replica.serving.kv_events import KVEventPublisher
from crossdock.workers.replica.serving.metrics import EngineMetrics
from crossdock.workers.replica.serving.readers import AttemptKey, Readers
from crossdock.workers.report.live_profile import LiveProfile, PageChanges
from crossdock.workers.report.publisher import Publisher
from crossdock.workers.report.recent_steps import RecentSteps
from crossdock.workers.report.timeline import Progress, Timeline, Timelines
from crossdock.workers.schedule.prefixes.tier_pages import TierCounts
from crossdock.workers.schedule.request.request import Status

request_logger = logging.getLogger("crossdock.requests")
"""One line of JSON for each request that ended, at INFO: `Timeline.summary`, which has nothing of its text."""


def log_ended(ended: Sequence[Timeline]) -> None:
    for timeline in ended:
        request_logger.info(json.dumps(timeline.summary(timeline.ended)))


class ObservedEngine:
    """An engine with its metrics, the timelines of its requests, its recent steps, and what it tells routers."""

    def __init__(self, engine: Engine, kv_events: KVEventPublisher | None = None) -> None:
        """`kv_events`: publishes the events of cached pages, which `engine` takes down; None: they stay unpublished."""
        self.engine = engine
        self.kv_events = kv_events
        self.readers = Readers()
        self.metrics = EngineMetrics(engine)
        unix_at_zero = time.time() - engine.clock()
        self.timelines = Timelines(engine.config.slo_classes, unix_at_zero)
        self.steps = RecentSteps(unix_at_zero, uuid.uuid4().hex)
        self.publisher = Publisher(engine.scheduler, uuid.uuid4().hex)
        self.num_computed = 0  # tokens, since the start
        if kv_events is not None:
            self.metrics.watch_kv_events(kv_events)

    def stepped(self, step: Step) -> Progress:
        """Note a step that has ended. Returns the progress of its requests."""
        progress = self.timelines.stepped(step.batch, step.deltas, step.started, step.seconds, step.predicted)
        if step.batch:
            self.num_computed += sum(part.num_tokens for part in step.batch.scheduled)
            self.metrics.stepped(step)
            self.steps.record(step.batch, progress.chunks, step.started, step.seconds, step.predicted)
        return progress

    def news(self, interval: float) -> tuple[LiveProfile | None, Sequence[PageChanges]]:
        """Return the live profile and the changes of the prefix index, where they are due; else None and no change.

        `interval`: seconds of the last step, after the one before it.
        """
        now = self.engine.clock()
        if not self.publisher.is_due(now):
            return None, ()
        return self.publisher.live(now, interval), self.publisher.page_changes()

    def offer_pages(self) -> None:
        """Publish the events of cached pages; write cached pages to files while there is nothing to compute, so that a
        restart finds them."""
        if self.kv_events is not None and (log := self.engine.pages.prefixes.events) is not None:
            self.kv_events.publish(log.take())
        self.engine.offer_to_tiers()

    def tell_of_stuck_tiers(self) -> None:
        """Log once that tiers wait for a volume. May be called on any thread."""
        if self.engine.tiers is not None:
            self.engine.tiers.tell_if_stuck()

    def close_parts(self) -> None:
        """End the threads of the tiers, of adapters, and of the events of pages."""
        if self.kv_events is not None:
            self.kv_events.close()
        if self.engine.adapters is not None:
            self.engine.adapters.close()
        if self.engine.tiers is not None:
            self.engine.tiers.close()

    def transferred(self, request_id: str, direction: str, figures: Figures, outcome: str) -> None:
        """Note a transfer that has ended: `sent`, `received`, or a prefix `fetched` or `lent`."""
        if direction in ("sent", "lent") and figures.write_seconds:
            self.publisher.transferred(figures.num_bytes, figures.write_seconds)
        self.metrics.transferred(direction, figures, outcome)
        self.timelines.transferred(request_id, direction, figures, outcome, self.engine.clock())

    async def find_timelines(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
        """Return the timelines of all requests that a client's request led to here; see `Timelines.find`."""
        return self.timelines.find(request_id, owner, self.engine.clock())

    async def progress(self, attempts: Sequence[AttemptKey]) -> list[list[int | str] | None]:
        """Return how far each attempt is: numbers, one of which differs whenever the attempt has moved. None: not here.

        A waiting attempt moves whenever this replica computes anything, and every one while this replica is paused.
        A submission that the engine's thread has not taken yet waits too.
        """
        return [self._progress(*each) for each in attempts]

    def _progress(self, request_id: str, epoch: int) -> list[int | str] | None:
        found = progress_of(self.engine, request_id, epoch, self.num_computed)
        if found is None and self.readers.has(request_id, epoch):
            return ["submitted", self.num_computed]
        return found

    async def live_requests(self, owner: str | None) -> list[dict[str, Any]]:
        """Return the requests that have not ended here; see `Timelines.live`."""
        return self.timelines.live(owner, self.engine.clock())

    async def metrics_text(self, vllm_model: str | None = None) -> str:
        """Return the metrics of this replica in Prometheus' text format; arguments as in `EngineMetrics.text`."""
        return self.metrics.text(vllm_model)

    def watched(self, seen: Mapping[str, int], owner: str | None) -> dict[str, Any]:
        """Return the replica's state and its steps after those already `seen`, by incarnation: JSON for a dashboard.

        May be called while the engine steps: a number may be one step older than its neighbour.

        `owner`: who reads, and sees its own requests alone; None: one who may see all.
        """
        engine = self.engine
        own = None if owner is None else self.timelines.ids(owner)
        requests = Tally(
            request.status.value for request in engine.scheduler.table.requests() if own is None or request.id in own
        )
        fit = engine.cost_fit
        return {
            "now": time.time(),
            # Pages show how long others' prompts are.
            "pages": asdict(engine.pages.counts()) if owner is None else None,
            "requests": {status.value: requests[status.value] for status in Status if status is not Status.FINISHED},
            "tiers": [each._asdict() for each in self._tiers()] if owner is None else None,
            "charged_s": engine.scheduler.table.tenants.by_name() if owner is None else None,
            "cost": None if fit is None else asdict(fit.cost),
            "overrun": None if fit is None else fit.overrun,
            "interval_share": None if fit is None else engine.intervals.share,
            "step_error": None if fit is None else fit.error(0.5),
            **self.steps.after(seen, owner),
        }

    def _tiers(self) -> list[TierCounts]:
        return [] if self.engine.tiers is None else self.engine.tiers.counts()
