"""KV pages on their way from a prefill replica to a decode replica, chunk by chunk, behind the other messages on the
two replicas' links. Does in simulated time what `Handover` and the docks do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.device import TOKEN
from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.workers.schedule.memory.prefix_index import first_visible_page
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import Leg

MAX_WRITE_BYTES = 32 << 20  # of one write of a rank: the default of `Dock`
GRACE_S = 1.0  # after a replica's death, until its writes cannot land any more: the default of `transfer.grace_s`


@dataclass(slots=True)
class SimulatedNetwork:
    """Links: one out of and one into every replica. One message at a time, first come first served."""

    _free: dict[tuple[str, bool], float] = field(default_factory=dict)  # by replica and whether out: when it is free

    def send(
        self, sender: SimulatedReplica, receiver: SimulatedReplica, num_bytes: float, now: float
    ) -> tuple[float, float]:
        """Return when a message that is sent now begins to travel, and when it will have arrived.

        While a message waits for the receiver's link, the sender's link has time for others.
        """
        out = (sender.name, True)
        into = (receiver.name, False)
        seconds = num_bytes / min(replica.pool.profile.bytes_per_second for replica in (sender, receiver))
        begin = max(now, self._free.get(out, 0.0))
        self._free[out] = begin + seconds
        self._free[into] = end = max(begin, self._free.get(into, 0.0)) + seconds
        return begin, end


@dataclass(slots=True, eq=False)
class SimulatedTransfer:
    """The pages of one prompt. The transfer is over when all have arrived, or when either side has given up."""

    request_id: str
    attempt: int
    sender: SimulatedReplica
    receiver: SimulatedReplica
    clock: Clock
    network: SimulatedNetwork
    latency_s: float  # of a message between replicas
    on_arrived: Callable[["SimulatedTransfer", float], None]  # all pages are at the receiver
    is_over: bool = False
    is_cancelled: bool = False  # the request was aborted, or its first token was its last
    _is_offered: bool = False  # the receiver has been notified that the sender has pages for the prompt
    _granted: int | None = None  # the first page that the receiver does not have
    _firsts: Sequence[int] = ()  # the first page that travels, of each group of layers
    _computed: int = 0  # tokens
    _is_complete: bool = False
    _sent: int = 0  # pages
    _is_writing: bool = False
    _is_last: bool = False  # all writes have begun
    _bytes: int = 0
    _seconds: float = 0.0  # on the way

    @property
    def owner(self) -> str:
        return Request.owner_name(self.request_id, self.attempt)

    def offer(self, now: float) -> None:
        """The sender has pages for the prompt. Does nothing where that is known."""
        if not self._is_offered and not self.is_over:
            self._is_offered = True
            self.clock.at(now + self.latency_s, partial(self.receiver.post, self._offered))

    def grant(self, request: Request, now: float) -> None:
        """The receiver has pages for the request."""
        pages = self.receiver.scheduler.pages
        first = request.num_computed_tokens // pages.page_size
        seen = [first_visible_page(window, request.num_tokens, pages.page_size) for window in pages.windows]
        self._firsts = [max(first, each) for each in seen]

        def arrive(now: float) -> None:
            self._granted = first
            self._send(now)

        self.clock.at(now + self.latency_s, arrive)

    def computed(self, num_tokens: int, is_complete: bool, now: float) -> None:
        """The sender has computed `num_tokens` of the prompt; where `is_complete`, all of them and the first token."""
        self._computed = num_tokens
        self._is_complete = is_complete
        self._send(now)

    def cancel(self, now: float) -> None:
        """Send no more pages. The receiver's pages are free again when the sender has been notified."""
        if not self.is_over:
            self.is_over = self.is_cancelled = True
            self.clock.at(now + 2 * self.latency_s, partial(self.receiver.post, self._end_quarantine))

    def lose_sender(self, now: float) -> None:
        """The sender has died: the receiver computes the tokens whose pages have not arrived."""
        if not self.is_over:
            self.is_over = True
            self.receiver.post(self._take_over, now)
            self.clock.at(now + GRACE_S, partial(self.receiver.post, self._end_quarantine))

    def _take_over(self, now: float) -> None:
        request = self.receiver.scheduler.table.get(self.request_id)
        if request is not None and request.leg is Leg.RECEIVE and request.epoch == self.attempt:
            self.receiver.scheduler.handoff.take_over(self.request_id, now)

    def _offered(self, now: float) -> None:
        request = self.receiver.scheduler.table.get(self.request_id)
        if request is not None and request.epoch == self.attempt:
            self.receiver.scheduler.handoff.offer(self.request_id)

    def _end_quarantine(self, now: float) -> None:
        """No replica writes to the receiver's pages any more."""
        self.receiver.scheduler.pages.end_quarantine(self.owner)

    def _send(self, now: float) -> None:
        """Begin the next write, as `Sender` does: one at a time, so that transfers share the link."""
        if self._granted is None or self.is_over or self._is_writing or self._is_last:
            return
        size = self.sender.scheduler.pages.page_size
        ready = -(-self._computed // size) if self._is_complete else self._computed // size
        begin = max(self._sent, self._granted)
        if ready <= begin and not self._is_complete:
            return
        profile = self.receiver.pool.profile
        page_bytes = profile.page_bytes  # of all its ranks
        most = MAX_WRITE_BYTES * self.sender.pool.gpus // max(page_bytes * len(self._firsts), 1)
        self._sent = min(max(begin, ready), begin + max(most, 1))
        self._is_last = self._is_complete and self._sent >= ready
        num_pages = sum(max(self._sent - max(begin, first), 0) for first in self._firsts)
        num_pages += profile.state_pages if self._is_last else 0
        departure, arrival = self.network.send(self.sender, self.receiver, num_pages * page_bytes, now)
        self._bytes += num_pages * page_bytes
        self._seconds += arrival - departure
        self._is_writing = True
        self.clock.at(arrival, self._written)
        if self._sent >= ready:
            arrived = partial(self._arrived, self._computed, self._is_last)
            self.clock.at(arrival + self.latency_s, partial(self.receiver.post, arrived))

    def _written(self, now: float) -> None:
        self._is_writing = False
        self._send(now)

    def _arrived(self, num_tokens: int, is_last: bool, now: float) -> None:
        if self.is_over:
            return
        scheduler = self.receiver.scheduler
        request = scheduler.table.get(self.request_id)
        assert request is not None, "a receiver has the request until the transfer is over"
        assert request.status is Status.HELD
        assert request.leg is Leg.RECEIVE
        if not is_last:
            scheduler.handoff.commit(self.request_id, num_tokens)
            return
        self.receiver.engine.arrive(self.request_id, TOKEN)
        self.is_over = True
        self.on_arrived(self, now)
        self.clock.at(now + self.latency_s, lambda now: self.sender.post(self._shipped, now))

    def _shipped(self, now: float) -> None:
        scheduler = self.sender.scheduler
        if self._bytes:
            self.sender.publisher.transferred(self._bytes, self._seconds)
        request = scheduler.table.get(self.request_id)
        if request is not None and request.epoch == self.attempt:
            self.sender.engine.ship(self.request_id)
        scheduler.pages.release(self.owner)


def abort(replica: SimulatedReplica, request_id: str, owner: str, now: float) -> None:
    """End a request on a replica. A sender's pages stay until they are not read any more."""
    replica.engine.abort(request_id)
    replica.scheduler.pages.release(owner)
