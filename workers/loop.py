"""The engine in a thread of its own, with asyncio in front: submit, abort, and one message per step."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from crossdock.kvtransfer.events import Event
from crossdock.workers.engine import Engine, Step
from crossdock.workers.handover import Handover
from crossdock.workers.metrics import EngineMetrics
from crossdock.workers.request import Submission, TokenDelta

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Channel:
    """What one reader has not fetched yet. All deltas of a step arrive together."""

    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _deltas: list[TokenDelta] = field(default_factory=list)
    _closed: bool = False

    def put(self, deltas: Sequence[TokenDelta]) -> None:
        self._deltas.extend(deltas)
        self._ready.set()

    def close(self) -> None:
        self._closed = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[list[TokenDelta]]:
        """One list per step, or per several where the reader is slower than the engine."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            deltas, self._deltas = self._deltas, []
            if deltas:
                yield deltas
            if self._closed:
                return


class EngineLoop:
    """Steps an engine for as long as it has work. All public methods belong to the event loop that constructed it."""

    def __init__(
        self,
        engine: Engine,
        metrics: EngineMetrics | None = None,
        connect: Callable[[Callable[[Event], None]], Handover] | None = None,
    ) -> None:
        """`connect` makes the engine's handover, given where its dock's events go; None: all work is local."""
        self.engine = engine
        self.metrics = metrics or EngineMetrics()
        self.metrics.watch(engine)
        self.channels: dict[str, Channel] = {}
        self._channel_of: dict[str, Channel] = {}  # by request
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[Callable[[], None]] = deque()  # what to do between two steps, in the engine's thread
        self._wake = threading.Condition()
        self._stopping = False
        self._is_blocked = False  # by pages that are on their way in or out: no step can do anything until they moved
        self.handover = connect(self._on_event) if connect is not None else None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def channel(self, name: str) -> Channel:
        """The channel of one reader (an ingress). A second call replaces the first, whose reader is ended."""
        if name in self.channels:
            self.channels[name].close()
        self.channels[name] = channel = Channel()
        return channel

    async def close_channel(self, name: str, channel: Channel) -> None:
        """Ends a reader: requests that nobody else will read are aborted."""
        if self.channels.get(name) is channel:
            del self.channels[name]
        orphans = [request for request, its in self._channel_of.items() if its is channel]
        await self.abort(orphans)

    async def submit(self, name: str, submission: Submission) -> None:
        """Queues a request whose deltas go to channel `name`; raises what `Engine.add` raises."""
        channel = self.channels.get(name)
        if channel is None:
            raise RuntimeError(f"no channel {name!r} is open")
        done: asyncio.Future[None] = self._loop.create_future()
        self._channel_of[submission.id] = channel

        def add() -> None:
            try:
                self.engine.add(submission)
                if self.handover is not None:
                    self.handover.add(submission)
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, done, error)
            else:
                self._loop.call_soon_threadsafe(_settle, done, None)

        self._post(add)
        try:
            await done
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

        def abort() -> None:
            for request_id in request_ids:
                request = self.engine.abort(request_id)
                if request is not None:
                    self.metrics.aborted(request, self.engine)
                    if self.handover is not None:
                        self.handover.aborted(request)

        if request_ids:
            self._post(abort)

    async def call(self, function: Callable[[], None]) -> None:
        """Runs `function` between two steps, in the engine's thread."""
        done: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            function()
            self._loop.call_soon_threadsafe(_settle, done, None)

        self._post(run)
        await done

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

    def _on_event(self, event: Event) -> None:
        """Of the dock's, on its thread: handled between two steps."""

        def handle() -> None:
            assert self.handover is not None
            self._send(self.handover.handle(event))

        self._post(handle)

    def _run(self) -> None:
        while True:
            patience = self.handover.patience if self.handover is not None else None
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopping or self._can_step, patience)
                if self._stopping:
                    return
            while self._inbox:
                self._inbox.popleft()()
            step = self._step() if self.engine.has_work else None
            self._is_blocked = step is not None and not step.batch
            if self.handover is not None:
                self.handover.step(step)
            if step is not None:
                self._send(step.deltas)

    @property
    def _can_step(self) -> bool:
        return self.engine.has_work and not self._is_blocked

    def _step(self) -> Step | None:
        try:
            step = self.engine.step()
        except Exception as error:  # one bad step must not end the replica: its requests are told, others go on
            logger.exception("a step failed; its requests end with an error")
            failed = self.engine.fail_all(f"{type(error).__name__}: {error}")
            if self.handover is not None:
                for request, _ in failed:
                    self.handover.aborted(request)
            self._send([delta for _, delta in failed])
            return None
        self.metrics.stepped(step)
        return step

    def _send(self, deltas: Sequence[TokenDelta]) -> None:
        if deltas:
            self._loop.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: Sequence[TokenDelta]) -> None:
        by_channel: dict[int, tuple[Channel, list[TokenDelta]]] = {}
        for delta in deltas:
            channel = self._channel_of.get(delta.request_id)
            if channel is None:
                continue  # aborted while its last step ran
            by_channel.setdefault(id(channel), (channel, []))[1].append(delta)
            if delta.finish_reason is not None:
                del self._channel_of[delta.request_id]
        for channel, its in by_channel.values():
            channel.put(its)


def _settle(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
