"""The engine in a thread of its own, with asyncio in front: everything a replica does for an ingress, without Ray."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from crossdock.kvtransfer.calls import PeerDeadCall
from crossdock.kvtransfer.events import Event
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.replica.serving.channel import Channel
from crossdock.workers.replica.serving.inbox import Calls, Inbox
from crossdock.workers.replica.serving.kv_events import KVEventPublisher
from crossdock.workers.replica.serving.observed import ObservedEngine, log_ended, request_logger
from crossdock.workers.replica.serving.readers import AttemptKey, Superseded
from crossdock.workers.replica.transfer.handover import Handover, HandoverOpener
from crossdock.workers.replica.transfer.replica_dock import rank_blobs
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.live_profile import HEARTBEAT_S, LiveProfile, PageChanges
from crossdock.workers.report.profile import Role
from crossdock.workers.report.timeline import Progress, Timeline
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import Request, TokenDelta
from crossdock.workers.schedule.request.submission import Overloaded, Submission

logger = logging.getLogger(__name__)
_MOST_FAILURES = 3  # one after the other outside of steps, before the replica ends


class EngineThread(ObservedEngine):
    """Steps an engine for as long as it has work. All public methods belong to the event loop that constructed it."""

    def __init__(
        self, engine: Engine, opener: HandoverOpener | None = None, kv_events: KVEventPublisher | None = None
    ) -> None:
        """`opener`: of the transfers with other replicas; None: all work is local. Others: see `ObservedEngine`."""
        super().__init__(engine, kv_events)
        self._num_failures = 0  # outside of steps, since the last step
        self._page_bytes = engine.page_bytes
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._calls = Calls(self._inbox)
        self.call = self._calls.call
        self._is_worker_group_lost = False  # then nothing may be computed or ended any more
        self._is_blocked = False  # every request waits for pages on their way in or out: no step can do anything
        self.handovers: list[Handover] = [] if opener is None else [opener(self._on_event, self.transferred)]
        self.metrics.watch([each.dock for each in self.handovers])
        engine.watch_loads(partial(self._inbox.post, is_urgent=True))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether every thread that the engine needs runs: its own, those of docks, and that of tiers."""
        tiers = self.engine.tiers
        has_tiers = tiers is None or tiers.is_alive
        return self._thread.is_alive() and has_tiers and all(each.dock.is_alive for each in self.handovers)

    @property
    def addresses(self) -> dict[str, bytes]:
        """Return the fields of the replica's profile at which other replicas reach its docks."""
        return {"peer": self.handovers[0].dock.blob} if self.handovers else {}

    @property
    def num_posted(self) -> int:
        return len(self._inbox)  # actions that wait for the engine's thread

    @property
    def channels(self) -> Mapping[str, Channel]:
        """Return the open channels, by ingress."""
        return self.readers.channels

    # -- for one ingress ---------------------------------------------------------------------------------------------

    async def messages(self, ingress: str) -> AsyncIterator[Message]:
        """Yield all tokens of the requests of `ingress`, one message per step, with the replica's live profile.

        The first message is empty: from then on `submit` accepts `ingress`. A second without news brings a heartbeat.
        When the reader stops, or gives no sign of life for long, its requests are aborted.
        """
        channel = self.channel(ingress)
        try:
            yield Message()
            async for message in channel.messages(HEARTBEAT_S):
                if channel.is_silent:  # else the stream of a stopped reader would hold up this replica's drain
                    return
                yield message
        finally:
            await self.close_channel(ingress, channel)

    def heard(self, ingress: str) -> None:
        """Note that an ingress reads its `messages`. The requests of a silent, so perhaps stopped, ingress end."""
        self.readers.heard(ingress)

    def channel(self, ingress: str) -> Channel:
        """Open the channel of a reader. A second call replaces the first channel, and ends its reader."""
        channel = self.readers.open(ingress)
        self._inbox.post(lambda: self._introduce(channel))
        return channel

    async def close_channel(self, ingress: str, channel: Channel) -> None:
        """Forget a reader, and abort the requests whose deltas went to it."""
        await self.abort(self.readers.close(ingress, channel))

    async def submit(self, ingress: str, submission: Submission) -> int:
        """Queue an attempt at a request, whose deltas go to the channel of `ingress`. It ends any earlier attempt here.

        Returns the number of the last live profile that does not include the request. Raises what `Engine.add` raises,
        and Superseded where the attempt was aborted before this call, or a later attempt is here.
        """
        self.readers.claim(ingress, submission)
        arrived = self.engine.clock()  # here, not between two steps: the step that runs now is time the request waits
        sequence: list[int] = []

        def add() -> None:
            self._add(submission, arrived, grammar)
            sequence.append(self.publisher.sequence)

        try:
            grammar = await self.engine.compiled(submission)
            self.readers.check(submission)
            await self.call(add)
        except asyncio.CancelledError:
            await self.abort([(submission.id, submission.epoch)])
            raise
        except Exception:
            self.readers.release(submission.id, submission.epoch)
            raise
        return sequence[0]

    async def abort(self, attempts: Sequence[AttemptKey]) -> None:
        """End attempts at requests, each (request id, epoch), and earlier ones of these requests.

        Their pages are free before the next step, and no delta follows. A submission that comes later starts nothing.
        """
        self._end_attempts(attempts)

    # -- for all of them ---------------------------------------------------------------------------------------------

    async def assign_role(self, role: Role) -> None:
        """Change this replica's role without a restart. Running requests go on; routers are notified at once."""

        def change() -> None:
            self.publisher.assign_role(role)
            self._publish()

        await self.call(change)

    async def peer_dead(self, peer: bytes) -> None:
        """Fail the transfers with another replica, named by its blob: its process has ended."""
        for each in self.handovers:
            for blob in rank_blobs(peer):
                each.dock.call(PeerDeadCall(blob))

    async def close(self) -> None:
        """Stop after the running step. Open channels end."""
        self._inbox.close()
        await asyncio.to_thread(self._thread.join)
        for each in self.handovers:
            await asyncio.to_thread(each.dock.close)
        await asyncio.to_thread(self.close_parts)
        self._ended()

    def end(self) -> None:
        """Let the engine's thread end after what it does now: this replica cannot serve any more."""
        self._inbox.close()

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._inbox.wait(lambda: self.engine.has_work and not self._is_blocked, self._patience):
                self._turn()
        except BaseException:
            logger.exception("the engine thread has failed: this replica ends")
        finally:
            self._inbox.close()
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._ended)

    def _turn(self) -> None:
        for action in chain(self._inbox.due(), [lambda: self._end(self.engine.load_adapters())]):
            self._guard(action)
        self._publish()
        for each in self.handovers:
            self._guard(partial(self._plan, each))  # before the step, or a new request waits for the end of two
        step = self._attempt(self._step) if self.engine.has_work and not self._is_worker_group_lost else None
        self._is_blocked = step is not None and not step.batch
        self._guard(lambda: self._step_handovers(step))
        self.offer_pages()

    @property
    def _patience(self) -> float | None:
        """Seconds until there may be something to do although nothing happens; None: no limit."""
        limits = [
            self.engine.scheduler.awaited.patience(self.engine.clock()),
            *(each.patience for each in self.handovers),
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    def _guard(self, action: Callable[[], object]) -> None:
        """Run work other than a step. Where the work fails, all requests end with an error, and the replica goes on.

        After `_MOST_FAILURES` without a step between them the thread ends: the replica cannot serve any more.
        """
        if self._is_worker_group_lost:
            return
        try:
            action()
        except Exception as error:
            self._num_failures += 1
            self._fail_all(error)
            if self._num_failures == _MOST_FAILURES:
                raise

    def _step(self) -> Step:
        return self.engine.step(self._scheduled)

    def _scheduled(self, batch: Batch) -> None:
        for each in self.handovers:
            each.scheduled(batch)

    def _attempt(self, run: Callable[[], Step]) -> Step | None:
        """Run a step, or the rest of one. Returns None where it failed.

        Then all requests end with an error, and the replica goes on. A worker group ends: its ranks disagree on the
        steps done.
        """
        try:
            step = run()
            self._stepped(step)
        except Exception as error:
            self._fail_all(error)
            return None
        return step

    def _fail_all(self, error: Exception) -> None:
        if self.engine.worker_group is not None:
            self.engine.worker_group.fail(error)
            self._is_worker_group_lost = True
            self._inbox.close()
            return
        logger.error("the engine failed; its requests end with an error", exc_info=error)
        self.end_all(f"{type(error).__name__}: {error}")

    def end_all(self, error: str) -> None:
        """End every request with an error. Belongs to the engine's thread."""
        failed = self.engine.fail_all(error)
        self._end([delta for _, delta in failed])
        self._notify_aborted([request for request, _ in failed])

    def _finish_steps_of(self, request_ids: Sequence[str]) -> None:
        """Finish the steps in flight if one of them computes any of these requests, which may be about to end."""
        if any(self.engine.is_in_flight(request_id) for request_id in request_ids):
            self.finish_steps()

    def finish_steps(self) -> None:
        """Finish the steps in flight. Belongs to the engine's thread."""
        while not self.engine.pipeline.is_empty and not self._is_worker_group_lost:
            step = self._attempt(self.engine.finish_step)
            if step is not None:
                self._step_handovers(step)

    def _step_handovers(self, step: Step | None) -> None:
        for each in self.handovers:
            self._end(each.step(step))

    def _plan(self, handover: Handover) -> None:
        self._end(handover.plan())

    def _notify_aborted(self, requests: Sequence[Request]) -> None:
        for request in requests:
            for each in self.handovers:
                each.aborted(request)

    def _end(self, deltas: Sequence[TokenDelta]) -> None:
        """Report requests that ended, or got pages, between two steps."""
        if deltas:
            self._progressed(self.timelines.ended(deltas, self.engine.clock()), deltas)

    def _stepped(self, step: Step) -> None:
        progress = self.stepped(step)
        if step.batch:
            self._num_failures = 0
        self._progressed(progress, step.deltas, step.interval)

    def _progressed(self, progress: Progress, deltas: Sequence[TokenDelta], interval: float = 0.0) -> None:
        self.metrics.progressed(progress)
        self._publish(deltas, interval)
        self._log(progress.finished)

    def _publish(self, deltas: Sequence[TokenDelta] = (), interval: float = 0.0) -> None:
        """Send the deltas of a step that ended `interval` seconds after the one before it and, when it is due, the
        replica's live profile."""
        live, pages = self.news(interval)
        if deltas or live is not None:
            self._loop.call_soon_threadsafe(self._deliver, deltas, live, pages)

    def _introduce(self, channel: Channel) -> None:
        """Send a new reader the whole prefix index, and the other readers the changes since their last message."""
        live, pages = self.publisher.live(self.engine.clock()), self.publisher.page_changes()
        self._loop.call_soon_threadsafe(self._deliver, (), live, pages)
        self._loop.call_soon_threadsafe(channel.put, (), live, (self.publisher.all_pages(),))

    # -- the engine's thread, between two steps ----------------------------------------------------------------------

    def _on_event(self, event: Event) -> None:
        """Post an event of the dock. Called on the dock's thread, perhaps before `handovers` is set."""
        self._inbox.post(lambda: self._handle(event), is_urgent=True)

    def _handle(self, event: Event) -> None:
        self._finish_steps_of([event.request])  # its end may be what the event brings
        if not self._is_worker_group_lost:
            self._end(self.handovers[0].handle(event))

    def _add(self, submission: Submission, arrived: float, grammar: Any) -> None:
        if self.readers.has_ended(submission.id, submission.epoch):
            raise Superseded(f"attempt {submission.epoch} at {submission.id} was aborted")
        earlier = self.engine.scheduler.table.get(submission.id)
        if earlier is not None and earlier.epoch < submission.epoch:
            self._abort([(earlier.id, earlier.epoch)])
        try:
            self.engine.add(submission, arrived, grammar)
        except Overloaded:
            self.metrics.refused(submission.slo_class)
            raise
        request = self.engine.scheduler.table.get(submission.id)
        assert request is not None
        try:
            for each in self.handovers:
                each.add(submission)
            self.timelines.add(submission, request, arrived, self.engine.scheduler.forecast.seconds_alone(request))
        except Exception:
            self.engine.abort(submission.id)  # a request without a timeline would fail the steps that compute it
            raise

    def _abort(self, attempts: Sequence[AttemptKey]) -> None:
        found = [self.engine.scheduler.table.get(request_id) for request_id, _ in attempts]
        requests = [
            request
            for request, (_, epoch) in zip(found, attempts, strict=True)
            if request is not None and request.epoch <= epoch
        ]
        self._finish_steps_of([request.id for request in requests])
        if self._is_worker_group_lost:
            return
        pages, aborted = self.engine.pages, []
        for request in requests:
            before = pages.block_pool.num_available
            if self.engine.abort(request.id) is not None:
                freed = (pages.block_pool.num_available - before) * self._page_bytes
                aborted.append(self.timelines.aborted(request.id, self.engine.clock(), freed))
                self._notify_aborted([request])
        for timeline in aborted:
            self.metrics.aborted(timeline)
        self._log(aborted)

    def _log(self, ended: Sequence[Timeline]) -> None:
        if ended and request_logger.isEnabledFor(logging.INFO):
            self._loop.call_soon_threadsafe(log_ended, ended)  # the engine's time is dearer than the event loop's

    # -- the event loop ----------------------------------------------------------------------------------------------

    def _deliver(self, deltas: Sequence[TokenDelta], live: LiveProfile | None, pages: Sequence[PageChanges]) -> None:
        unread = self.readers.deliver(deltas, live, pages)
        if unread:
            logger.error("an ingress is lost or does not read its tokens: its %d requests are aborted", len(unread))
            self._end_attempts(unread)

    def _end_attempts(self, attempts: Sequence[AttemptKey]) -> None:
        for request_id, epoch in attempts:
            self.readers.end(request_id, epoch)
        if attempts:
            self._inbox.post(lambda: self._abort(attempts), is_urgent=True)

    def _ended(self) -> None:
        """End every reader and fail every call: the thread has ended."""
        self.readers.close_all()
        self._calls.fail()
