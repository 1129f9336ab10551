"""The engine in a thread of its own, with asyncio in front: submit, abort, and one message per step."""

import asyncio
import json
import logging
import threading
import time
import uuid
from collections import Counter as Tally
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from crossdock.kvtransfer.events import Event, Figures
from crossdock.workers.replica.engine import Engine, Step
from crossdock.workers.replica.handover import Handover
from crossdock.workers.replica.metrics import EngineMetrics
from crossdock.workers.report.advertise import LiveProfile, Message, PageChanges, Publisher
from crossdock.workers.report.profile import Role
from crossdock.workers.report.recent_steps import RecentSteps
from crossdock.workers.report.timeline import Progress, Timeline, Timelines
from crossdock.workers.schedule.request import Overloaded, Status, Submission, TokenDelta

logger = logging.getLogger(__name__)
_MOST_PAGES = 100_000  # hashes kept for a reader that is behind
request_logger = logging.getLogger("crossdock.requests")
"""One line of JSON for each request that ended, at INFO: `Timeline.summary`, which has nothing of its text."""


@dataclass(slots=True)
class Channel:
    """What one reader has not fetched yet. All deltas of a step arrive together, with what else there is to say."""

    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _message: Message = field(default_factory=Message)
    _live: LiveProfile | None = None  # the last one
    _closed: bool = False

    def put(
        self, deltas: Sequence[TokenDelta] = (), live: LiveProfile | None = None, pages: Sequence[PageChanges] = ()
    ) -> None:
        self._message.deltas.extend(deltas)
        if live is not None:
            self._live = self._message.live = live
        if pages:
            behind = [*self._message.pages, *pages]
            while sum(len(it.added) + len(it.evicted) for it in behind) > _MOST_PAGES:
                del behind[0]  # the reader sees that one is missing
            self._message.pages = behind
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    async def messages(self, heartbeat_s: float | None = None) -> AsyncIterator[Message]:
        """One per step, or per several where the reader is slower than the engine. Where there was nothing for
        `heartbeat_s`, one that says what was last said, so that the reader knows that we live."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(heartbeat_s):  # Python 3.11's wait_for may swallow a cancellation
                    await self._ready.wait()
            is_quiet = not self._ready.is_set()
            self._ready.clear()
            message, self._message = self._message, Message()
            if is_quiet:
                message.live = self._live
            if not self._closed or message.deltas:
                yield message
            if self._closed:
                return


class EngineThread:
    """Steps an engine for as long as it has work. All public methods belong to the event loop that constructed it."""

    def __init__(self, engine: Engine, connect: Callable[[Callable[[Event], None]], Handover] | None = None) -> None:
        """`connect` makes the engine's handover, given where its dock's events go; None: all work is local."""
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
        self._inbox: deque[Callable[[], None]] = deque()  # what to do between two steps, in the engine's thread
        self._wake = threading.Condition()
        self._stopping = False
        self._is_blocked = False  # by pages that are on their way in or out: no step can do anything until they moved
        self.handover = connect(self._on_event) if connect is not None else None
        if self.handover is not None:
            self.handover.on_figures = self._transferred
            self.metrics.watch(self.handover.dock)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def channel(self, name: str) -> Channel:
        """The channel of one reader (an ingress). A second call replaces the first, whose reader is ended."""
        if name in self.channels:
            self.channels[name].close()
        self.channels[name] = channel = Channel()
        self._post(lambda: self._introduce(channel))
        return channel

    async def close_channel(self, name: str, channel: Channel) -> None:
        """Ends a reader: requests that nobody else will read are aborted."""
        if self.channels.get(name) is channel:
            del self.channels[name]
        orphans = [request for request, (its, _) in self._channel_of.items() if its is channel]
        await self.abort(orphans)

    async def submit(self, name: str, submission: Submission) -> int:
        """Queues a request whose deltas go to channel `name`; raises what `Engine.add` raises. Returns the number of
        the last live profile that does not include it."""
        channel = self.channels.get(name)
        if channel is None:
            raise RuntimeError(f"no channel {name!r} is open")
        done: asyncio.Future[int] = self._loop.create_future()
        self._channel_of[submission.id] = channel, submission.epoch
        arrived = self.engine.clock()  # here, not between two steps: the step that runs now is time it waits

        def add() -> None:
            try:
                self._add(submission, arrived)
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, done, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done, self._publisher.sequence)

        self._post(add)
        try:
            return await done
        except asyncio.CancelledError:
            await self.abort([submission.id])
            raise
        except Exception:
            self._channel_of.pop(submission.id, None)
            raise

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests before the next step begins. No delta follows; unknown ids are ignored."""
        for request_id in request_ids:
            self._channel_of.pop(request_id, None)

        if request_ids:
            self._post(lambda: self._abort(request_ids))

    def progress(self, request_id: str) -> int | None:
        """How often the engine's thread has looked for work, if it has the request; None: it has not."""
        return self._num_turns if self.engine.scheduler.get(request_id) is not None else None

    async def keep_for(self, role: Role) -> None:
        """This replica is kept for something else from now on. What runs goes on; routers hear of it at once."""

        def change() -> None:
            self._publisher.assign_role(role)
            self._publish()

        await self.call(change)

    async def peer_dead(self, peer: bytes) -> None:
        """The process of another replica, by its blob, has ended: who waits for its pages goes on without."""
        if self.handover is not None:
            self.handover.dock.peer_dead(peer)

    async def call(self, function: Callable[[], None]) -> None:
        """Runs `function` between two steps, in the engine's thread."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            function()
            self._loop.call_soon_threadsafe(_settle, done, None)

        self._post(run)
        await done

    def watched(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]:
        """As JSON, for a dashboard: the replica as it is now, and its steps after those that were `seen`, by
        incarnation. May be called while the engine steps: a number may be one step older than its neighbour."""
        engine = self.engine
        requests = Tally(request.status.value for request in engine.scheduler.requests())
        fit = engine.cost_fit
        return {
            "now": time.time(),
            "pages": asdict(engine.pages.counts()),
            "requests": {status.value: requests[status.value] for status in Status if status is not Status.FINISHED},
            "cost": None if fit is None else fit.cost.model_dump(),
            "overrun": None if fit is None else fit.overrun,
            "step_error": None if fit is None else fit.error(0.5),
            **self.steps.after(seen, tenant),
        }

    async def close(self) -> None:
        """Stops after the running step. Open channels end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        if self.handover is not None:
            await asyncio.to_thread(self.handover.dock.close)
        for channel in self.channels.values():
            channel.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

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
            step = self._step() if self.engine.has_work else None
            self._is_blocked = step is not None and not step.batch
            if self.handover is not None:
                self.handover.step(step)

    # -- steps, in the engine's thread ---------------------------------------------------------------------------------

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and not self._is_blocked

    def _step(self) -> Step | None:
        try:
            step = self.engine.step()
        except Exception as error:  # one bad step must not end the replica: its requests are told, others go on
            if self.engine.gang is not None:  # but ranks that do not agree on where they are cannot go on
                self.engine.gang.fail(error)
                self._stopping = True
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

    def _stepped(self, step: Step) -> None:
        progress = self.timelines.stepped(step.batch, step.deltas, step.started, step.seconds, step.predicted)
        if step.batch:
            self.metrics.stepped(step)
            self.steps.record(step.batch, progress.chunks, step.started, step.seconds, step.predicted)
        self._progressed(progress, step.deltas, step.seconds)

    def _land(self, request_ids: Sequence[str]) -> None:
        """Ends what is in flight if it computes any of these requests, which may be about to end."""
        if any(self.engine.is_in_flight(request_id) for request_id in request_ids):
            for step in self.engine.land():
                self._stepped(step)
                if self.handover is not None:
                    self.handover.step(step)

    def _progressed(self, progress: Progress, deltas: Sequence[TokenDelta], seconds: float = 0.0) -> None:
        self.metrics.progressed(progress)
        self._publish(deltas, seconds)
        self._log(progress.finished)

    def _publish(self, deltas: Sequence[TokenDelta] = (), seconds: float = 0.0) -> None:
        """Sends what a step of so many `seconds` made, and where it is time, what there is to say of this replica."""
        now = self.engine.clock()
        live: LiveProfile | None = None
        pages: Sequence[PageChanges] = ()
        if self._publisher.is_due(now):
            live = self._publisher.live(now, seconds)
            pages = self._publisher.page_changes()
        if deltas or live is not None:
            self._loop.call_soon_threadsafe(self._deliver, deltas, live, pages)

    def _introduce(self, channel: Channel) -> None:
        """Tells a new reader all, and the others what they have not been told of it."""
        live, pages = self._publisher.live(self.engine.clock()), self._publisher.page_changes()
        everything = self._publisher.all_pages()
        self._loop.call_soon_threadsafe(self._deliver, (), live, pages)
        self._loop.call_soon_threadsafe(channel.put, (), live, (everything,))

    # -- between two steps, in the engine's thread ---------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Of the dock's, on its thread."""

        def handle() -> None:
            assert self.handover is not None
            self._land([event.request])
            deltas = self.handover.handle(event)
            self._progressed(self.timelines.ended(deltas, self.engine.clock()), deltas)

        self._post(handle)

    def _transferred(self, request_id: str, is_sent: bool, figures: Figures, outcome: str) -> None:
        self.metrics.transferred(is_sent, figures, outcome)
        if is_sent and figures.write_seconds:
            self._publisher.transferred(figures.num_bytes, figures.write_seconds)
        self.timelines.transferred(request_id, is_sent, figures, outcome, self.engine.clock())

    def _add(self, submission: Submission, arrived: float) -> None:
        try:
            self.engine.add(submission, arrived)
        except Overloaded:
            self.metrics.refused(submission.slo_class)
            raise
        request = self.engine.scheduler.get(submission.id)
        assert request is not None
        if self.handover is not None:
            self.handover.add(submission)
        self.timelines.add(submission, request, arrived, self.engine.scheduler.prefill_seconds(request))

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._land(request_ids)
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

    # -- in the event loop ---------------------------------------------------------------------------------------------

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
            its = by_channel.get(id(channel), ())
            if its or live is not None:
                channel.put(its, live, pages)


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
