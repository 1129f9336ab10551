"""One rank's end of all its transfers: a thread that owns the transport and drives a sender and a receiver.

Calls come in from any thread and return at once. Events go out through one callback, on the dock's thread. A caller's
error is raised at the call; anything that fails later is an event. calls.py has the calls, and their order.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from crossdock.kvtransfer.calls import (
    DockCall,
    GrantCall,
    check_pages,
)
from crossdock.kvtransfer.checksums import Checksums
from crossdock.kvtransfer.dock_core import MAX_WRITE_BYTES, DockCore, DockCounts, Partner
from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.transport import (
    Memory,
    Peer,
    Transport,
    TransportEvent,
    host_view,
)

logger = logging.getLogger(__name__)

_MAX_FAILED_POLLS = 20  # in a row: then the transport is beyond repair, and the dock ends
_FAILED_POLL_SECONDS = 0.1  # pause after a failed poll
_PAUSE_SHARE = 0.125
"""Pause between two polls while a transfer is open, as a share of the time since the last event. So an event is noticed
late by at most this share of the time it took to come, and a transfer whose prompt is still being computed costs few
polls. `python benchmarks/page_transfers.py` measures both."""
_MAX_PAUSE_SECONDS = 0.005


class Dock:
    """One rank's end of all its transfers.

    Opens `transport` for the pool at `memory`, which `spec` describes and the caller keeps alive. `role` begins the
    dock's name in logs ("prefill"). `on_event` is called on the dock's thread, in order, and must return soon: put the
    event in a queue. `grace_seconds` is how long after a peer's death one of its writes may still land.
    `max_write_bytes` bounds how long one transfer keeps others waiting. With `has_checksums` this dock sums what it
    writes, and checks what arrives with a sum: then `memory` must be ordinary memory, else ValueError. `before_grant`
    takes the pages of a grant, on the dock's thread, and returns when others may write to them; None: they may at once.
    """

    def __init__(
        self,
        transport: Transport,
        memory: Memory,
        spec: PoolSpec,
        role: str,
        on_event: Callable[[Event], None],
        *,
        grace_seconds: float = 1.0,
        max_write_bytes: int = MAX_WRITE_BYTES,
        has_checksums: bool = False,
        before_grant: Callable[[Iterable[int]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if memory.nbytes < spec.nbytes:
            raise ValueError(f"memory has {memory.nbytes} bytes; {spec.num_pages} pages need {spec.nbytes}")
        self.name = f"{role}-{uuid.uuid4().hex}"
        self.spec = spec
        self._transport = transport
        self._clock = clock
        self._before_grant = before_grant
        self.blob = blob = Peer(self.name, transport.kind, transport.open(self.name, memory), spec).pack()
        """The blob that the other side's `ship` or `expect` needs to reach this dock."""
        checksums = Checksums(host_view(memory), spec) if has_checksums else None
        self._core = DockCore(transport, spec, blob, on_event, grace_seconds, max_write_bytes, clock, checksums)
        self._calls: deque[tuple[DockCall, dict[str, Partner], float]] = deque()  # each with its partners and its time
        self._num_failed_polls = 0
        self._is_closing = False
        self._error: BaseException | None = None
        self._last_event_at = clock()
        self._thread = threading.Thread(target=self._run, name=f"dock {role}", daemon=True)
        self._thread.start()

    def call(self, call: DockCall) -> None:
        """Make a call, which the dock's thread carries out. Raises what the record of the call says.

        Raises:
            RuntimeError: the dock is closed, or has failed.
        """
        check_pages(call, self.spec)
        partners = self._core.partners_of(call)
        if self._error or self._is_closing:
            raise RuntimeError("the dock is closed") from self._error
        self._calls.append((call, partners, self._clock()))
        self._transport.wake()

    @property
    def is_alive(self) -> bool:
        """Whether the dock has not failed. May be called from any thread."""
        return self._error is None

    def counts(self) -> DockCounts:
        """Return the counts as of the thread's latest turn. May be called from any thread.

        Raises:
            RuntimeError: the dock has failed.
        """
        if self._error:
            raise RuntimeError("the dock is closed") from self._error
        return self._core.counts

    def drain(self, timeout: float) -> bool:
        """Wait until no transfer is under way, at most `timeout` seconds. Return whether that was reached."""
        end = time.monotonic() + timeout
        while self._calls or self._core.counts.num_open:
            if time.monotonic() > end or not self._thread.is_alive():
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """End the thread and the transport. Transfers under way end without an event."""
        self._is_closing = True
        self._transport.wake()
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except BaseException as error:  # the owner's next call raises it: no failure stays silent
            logger.exception("the dock %s has failed", self.name)
            self._error = error
        finally:
            self._transport.close()

    def _turn(self) -> None:
        events = self._poll()
        if events or self._calls:
            self._last_event_at = self._clock()
        while self._calls:
            call, partners, called_at = self._calls[0]
            if self._before_grant is not None and isinstance(call, GrantCall):
                self._before_grant(call.pages)
            self._core.make(call, partners, called_at)
            self._calls.popleft()  # only now: `drain` sees the call or the transfer that it began
        for event in events:
            self._core.handle(event)
        self._core.tick()

    def _poll(self) -> Sequence[TransportEvent]:
        """Poll the transport. A poll may fail for a passing reason; raises what many polls in a row raise."""
        try:
            events = self._transport.poll(self._poll_seconds())
        except Exception:
            self._num_failed_polls += 1
            if self._num_failed_polls == _MAX_FAILED_POLLS:
                raise
            if self._num_failed_polls == 1:
                logger.exception("%s could not be polled; it is tried again", self.name)
            time.sleep(_FAILED_POLL_SECONDS)
            return ()
        self._num_failed_polls = 0
        return events

    def _poll_seconds(self) -> float:
        """Return how long the next poll may block."""
        if self._calls:
            return 0.0
        if not self._core.counts.num_open:
            return self._transport.idle_seconds
        # A transfer is open for as long as its prompt is computed, and silent for most of that time.
        now = self._clock()
        pause = min((now - self._last_event_at) * _PAUSE_SHARE, _MAX_PAUSE_SECONDS)
        return min(max(self._transport.busy_seconds, pause), max(0.0, self._core.next_deadline - now))
