"""The engine in a thread of its own, with asyncio in front: everything a replica does for an ingress, without Ray."""

import asyncio
import json
import logging
import threading
import time
import uuid
from collections import Counter as Tally
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from crossdock.kvtransfer.events import Event, Figures
from crossdock.workers.model.grammar.state import GrammarState
from crossdock.workers.replica.channel import Channel
from crossdock.workers.replica.engine import Engine, Step
from crossdock.workers.replica.handover import Handover
from crossdock.workers.replica.metrics import EngineMetrics
from crossdock.workers.report.advertise import HEARTBEAT_S, LiveProfile, Message, PageChanges, Publisher
from crossdock.workers.report.profile import Role
from crossdock.workers.report.recent_steps import RecentSteps
from crossdock.workers.report.timeline import Progress, Timeline, Timelines
from crossdock.workers.schedule.request import Overloaded, Status, Submission, TokenDelta

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("crossdock.requests")
"""One line of JSON for each request that ended, at INFO: `Timeline.summary`, which has nothing of its text."""


class EngineThread:
    """Steps an engine for as long as it has work. All public methods belong to the event loop that constructed it."""

    def __init__(self, engine: Engine, connect: Callable[[Callable[[Event], None]], Handover] | None = None) -> None:
        """`connect` makes the engine's handover, given a callback for its dock's events; None: all work is local."""
        self.engine = engine
        self.metrics = EngineMetrics(engine)
        unix_at_zero = time.time() - engine.clock()
        self.timelines = Timelines(engine.config.slo_classes, unix_at_zero)
        self.steps = RecentSteps(unix_at_zero)
        self.channels: dict[str, Channel] = {}
        self._num_turns = 0
        self._publisher = Publisher(engine.scheduler, uuid.uuid4().hex)
        self._page_bytes = engine.model.layout(engine.config.page_size).page_bytes
        self._channel_of: dict[str, tuple[Channel, int]] = {}  # by request, with the epoch of its placement
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[], None]] = deque()  # actions for the engine's thread, between two steps
        self._wake = threading.Condition()
        self._stopping = False
        self._is_gang_lost = False  # then nothing may be computed or ended any more
        self._is_blocked = False  # every request waits for pages on their way in or out: no step can do anything
        self.handover = connect(self._on_event) if connect is not None else None
        if self.handover is not None:
            self.handover.on_figures = self._transferred
            self.metrics.watch(self.handover.dock)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether this can serve: neither the engine's thread nor the dock's has failed."""
        return self._thread.is_alive() and (self.handover is None or self.handover.dock.is_alive)

    @property
    def num_posted(self) -> int:
        """How many actions wait for the engine's thread."""
        return len(self._inbox)

    # -- for one ingress ---------------------------------------------------------------------------------------------

    async def messages(self, ingress: str) -> AsyncIterator[Message]:
        """Yield all tokens of the requests of `ingress`, one message per step, with the replica's live profile.

        The first message is empty: from then on `submit` accepts `ingress`. A second without news brings a heartbeat.
        When the reader stops, its requests are aborted.
        """
        channel = self.channel(ingress)
        try:
            yield Message()
            async for message in channel.messages(HEARTBEAT_S):
                yield message
        finally:
            await self.close_channel(ingress, channel)

    async def close_stream(self, ingress: str) -> None:
        """End the `messages` of an ingress that leaves; its requests are aborted."""
        channel = self.channels.get(ingress)
        if channel is not None:
            channel.close()

    def channel(self, ingress: str) -> Channel:
        """Open the channel of a reader. A second call replaces the first channel, and ends its reader."""
        if ingress in self.channels:
            self.channels[ingress].close()
        self.channels[ingress] = channel = Channel()
        self._post(lambda: self._introduce(channel))
        return channel

    async def close_channel(self, ingress: str, channel: Channel) -> None:
        """Forget a reader, and abort the requests whose deltas went to it."""
        if self.channels.get(ingress) is channel:
            del self.channels[ingress]
        orphans = [request for request, (reader, _) in self._channel_of.items() if reader is channel]
        await self.abort(orphans)

    async def submit(self, ingress: str, submission: Submission) -> int:
        """Queue a request whose deltas go to the channel of `ingress`.

        Returns the number of the last live profile that does not include the request. Raises what `Engine.add` raises.
        """
        channel = self.channels.get(ingress)
        if channel is None:
            raise RuntimeError(f"no channel {ingress!r} is open")
        done: asyncio.Future[int] = self._loop.create_future()
        self._channel_of[submission.id] = reader = channel, submission.epoch
        arrived = self.engine.clock()  # here, not between two steps: the step that runs now is time the request waits

        def add() -> None:
            try:
                self._add(submission, arrived, grammar)
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, done, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done, self._publisher.sequence)

        try:
            grammar = await self.engine.compiled(submission)
            if self._channel_of.get(submission.id) is not reader:
                raise RuntimeError(f"{submission.id} was aborted while its grammar was compiled")
            self._post(add)
            return await done
        except asyncio.CancelledError:
            await self.abort([submission.id])
            raise
        except Exception:
            if self._channel_of.get(submission.id) is reader:
                del self._channel_of[submission.id]
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests and free their pages before the next step. No delta follows; unknown ids are ignored."""
        for request_id in request_ids:
            self._channel_of.pop(request_id, None)

        if request_ids:
            self._post(lambda: self._abort(request_ids))

    async def progress(self, request_id: str) -> int | None:
        """Return how often the engine's thread has looked for work; None where it does not have the request."""
        return self._num_turns if self.engine.scheduler.get(request_id) is not None else None

    # -- for all of them ---------------------------------------------------------------------------------------------

    async def assign_role(self, role: Role) -> None:
        """Change this replica's role without a restart. Running requests go on; routers are notified at once."""

        def change() -> None:
            self._publisher.assign_role(role)
            self._publish()

        await self.call(change)

    async def peer_dead(self, peer: bytes) -> None:
        """Fail the transfers with another replica, named by its blob: its process has ended."""
        if self.handover is not None:
            self.handover.dock.peer_dead(peer)

    async def find_timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """Return the timelines of all that a client's request led to here; see `Timelines.find`."""
        return self.timelines.find(request_id, tenant, self.engine.clock())

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return the requests that have not ended here; see `Timelines.live`."""
        return self.timelines.live(tenant, self.engine.clock())

    async def metrics_text(self) -> str:
        """Return the metrics of this replica, in Prometheus' text format."""
        return self.metrics.text()

    def watched(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]:
        """Return the replica's state and its steps after those already `seen`, by incarnation: JSON for a dashboard.

        May be called while the engine steps: a number may be one step older than its neighbour.

        `tenant`: who reads, and sees its own requests alone; None: one who may see all.
        """
        engine = self.engine
        own = None if tenant is None else self.timelines.ids(tenant)
        requests = Tally(
            request.status.value for request in engine.scheduler.requests() if own is None or request.id in own
        )
        fit = engine.cost_fit
        return {
            "now": time.time(),
            "pages": asdict(engine.pages.counts())
            if tenant is None
            else None,  # they show how long others' prompts are
            "requests": {status.value: requests[status.value] for status in Status if status is not Status.FINISHED},
            "cost": None if fit is None else fit.cost.model_dump(),
            "overrun": None if fit is None else fit.overrun,
            "step_error": None if fit is None else fit.error(0.5),
            **self.steps.after(seen, tenant),
        }

    async def call(self, function: Callable[[], None]) -> None:
        """Run `function` between two steps, in the engine's thread."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            function()
            self._loop.call_soon_threadsafe(_settle, done, None)

        self._post(run)
        await done

    async def close(self) -> None:
        """Stop after the running step. Open channels end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        if self.handover is not None:
            await asyncio.to_thread(self.handover.dock.close)
        for channel in self.channels.values():
            channel.close()

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            patience = self.handover.patience if self.handover is not None else None
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopping or self._can_step, patience)
                if self._stopping:
                    return
            while self._inbox:
                self._inbox.popleft()()
            self._num_turns += 1
            self._publish()
            if self.handover is not None:
                self.handover.grant()  # before the step, or a request that has just come waits for the end of two
            step = self._attempt(self.engine.step) if self.engine.has_work else None
            self._is_blocked = step is not None and not step.batch
            if self.handover is not None:
                self._end(self.handover.step(step))

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and not self._is_blocked

    def _attempt(self, run: Callable[[], Step]) -> Step | None:
        """Run a step, or the rest of one. Returns None where it failed.

        Then all requests end with an error, and the replica goes on. A gang ends instead:
        ranks that disagree on the steps done cannot go on.
        """
        try:
            step = run()
        except Exception as error:
            if self.engine.gang is not None:
                self.engine.gang.fail(error)
                self._is_gang_lost = self._stopping = True
                return None
            logger.exception("a step failed; its requests end with an error")
            failed = self.engine.fail_all(f"{type(error).__name__}: {error}")
            if self.handover is not None:
                for request, _ in failed:
                    self.handover.aborted(request)
            deltas = [delta for _, delta in failed]
            self._progressed(self.timelines.ended(deltas, self.engine.clock()), deltas)
            return None
        self._stepped(step)
        return step

    def _finish_steps_of(self, request_ids: Sequence[str]) -> None:
        """Finish the steps in flight if one of them computes any of these requests, which may be about to end."""
        if not any(self.engine.is_in_flight(request_id) for request_id in request_ids):
            return
        while not self.engine.pipeline.is_empty and not self._is_gang_lost:
            step = self._attempt(self.engine.finish_step)
            if step is not None and self.handover is not None:
                self._end(self.handover.step(step))

    def _end(self, deltas: Sequence[TokenDelta]) -> None:
        """Report requests that ended between two steps."""
        if deltas:
            self._progressed(self.timelines.ended(deltas, self.engine.clock()), deltas)

    def _stepped(self, step: Step) -> None:
        progress = self.timelines.stepped(step.batch, step.deltas, step.started, step.seconds, step.predicted)
        if step.batch:
            self.metrics.stepped(step)
            self.steps.record(step.batch, progress.chunks, step.started, step.seconds, step.predicted)
        self._progressed(progress, step.deltas, step.seconds)

    def _progressed(self, progress: Progress, deltas: Sequence[TokenDelta], seconds: float = 0.0) -> None:
        self.metrics.progressed(progress)
        self._publish(deltas, seconds)
        self._log(progress.finished)

    def _publish(self, deltas: Sequence[TokenDelta] = (), seconds: float = 0.0) -> None:
        """Send the deltas of a step that took `seconds` and, when it is due, the replica's live profile."""
        now = self.engine.clock()
        live: LiveProfile | None = None
        pages: Sequence[PageChanges] = ()
        if self._publisher.is_due(now):
            live = self._publisher.live(now, seconds)
            pages = self._publisher.page_changes()
        if deltas or live is not None:
            self._loop.call_soon_threadsafe(self._deliver, deltas, live, pages)

    def _introduce(self, channel: Channel) -> None:
        """Send a new reader the whole prefix index, and the other readers the changes since their last message."""
        live, pages = self._publisher.live(self.engine.clock()), self._publisher.page_changes()
        everything = self._publisher.all_pages()
        self._loop.call_soon_threadsafe(self._deliver, (), live, pages)
        self._loop.call_soon_threadsafe(channel.put, (), live, (everything,))

    # -- the engine's thread, between two steps ----------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Post an event of the dock. Called on the dock's thread."""

        def handle() -> None:
            assert self.handover is not None
            self._finish_steps_of([event.request])
            if self._is_gang_lost:
                return
            self._end(self.handover.handle(event))

        self._post(handle)

    def _transferred(self, request_id: str, is_sent: bool, figures: Figures, outcome: str) -> None:
        self.metrics.transferred(is_sent, figures, outcome)
        if is_sent and figures.write_seconds:
            self._publisher.transferred(figures.num_bytes, figures.write_seconds)
        self.timelines.transferred(request_id, is_sent, figures, outcome, self.engine.clock())

    def _add(self, submission: Submission, arrived: float, grammar: GrammarState | None) -> None:
        try:
            self.engine.add(submission, arrived, grammar)
        except Overloaded:
            self.metrics.refused(submission.slo_class)
            raise
        request = self.engine.scheduler.get(submission.id)
        assert request is not None
        if self.handover is not None:
            self.handover.add(submission)
        self.timelines.add(submission, request, arrived, self.engine.scheduler.prefill_seconds(request))

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._finish_steps_of(request_ids)
        if self._is_gang_lost:
            return
        pages, aborted = self.engine.pages, []
        for request_id in request_ids:
            before = pages.num_available
            request = self.engine.abort(request_id)
            if request is not None:
                freed = (pages.num_available - before) * self._page_bytes
                aborted.append(self.timelines.aborted(request_id, self.engine.clock(), freed))
                if self.handover is not None:
                    self.handover.aborted(request)
        for timeline in aborted:
            self.metrics.aborted(timeline)
        self._log(aborted)

    def _log(self, ended: Sequence[Timeline]) -> None:
        if ended and request_logger.isEnabledFor(logging.INFO):
            self._loop.call_soon_threadsafe(_log, ended)  # the engine's time is dearer than the event loop's

    # -- the event loop ----------------------------------------------------------------------------------------------

    def _deliver(
        self, deltas: Sequence[TokenDelta], live: LiveProfile | None = None, pages: Sequence[PageChanges] = ()
    ) -> None:
        by_channel: dict[int, list[TokenDelta]] = {}
        for delta in deltas:
            channel, epoch = self._channel_of.get(delta.request_id, (None, -1))
            if channel is None or epoch != delta.epoch:
                continue  # aborted while its last step ran; it may have been placed here again since
            by_channel.setdefault(id(channel), []).append(delta)
            if delta.finish_reason is not None:
                del self._channel_of[delta.request_id]
        for channel in self.channels.values():
            found = by_channel.get(id(channel), ())
            if found or live is not None:
                channel.put(found, live, pages)


def _log(ended: Sequence[Timeline]) -> None:
    for timeline in ended:
        request_logger.info(json.dumps(timeline.summary(timeline.ended)))


def _settle(future: "asyncio.Future[Any]", outcome: object) -> None:
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
