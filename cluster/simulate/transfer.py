"""KV pages on their way from the replica that computes a prompt to the one that decodes: chunk by chunk, behind what
else the two replicas' links carry. What `Handover` and the docks do, in simulated time."""

from dataclasses import dataclass, field

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.replica import TOKEN, SimulatedReplica
from crossdock.workers.schedule.request import Leg, Request, Status


@dataclass(slots=True)
class SimulatedNetwork:
    """Every replica has one link out and one in; each carries one message at a time, in the order they were given."""

    _free: dict[tuple[str, bool], float] = field(default_factory=dict)  # by replica, and whether out

    def carry(
        self, sender: SimulatedReplica, receiver: SimulatedReplica, num_bytes: float, now: float
    ) -> tuple[float, float]:
        """When so many bytes that are sent now begin to travel, and when they will have arrived."""
        out, into = (sender.name, True), (receiver.name, False)
        begin = max(now, self._free.get(out, 0.0), self._free.get(into, 0.0))
        rate = min(it.pool.profile.bytes_per_second for it in (sender, receiver))
        self._free[out] = self._free[into] = end = begin + num_bytes / rate
        return begin, end


@dataclass(slots=True, eq=False)
class SimulatedTransfer:
    """The pages of one prompt. It is over when all has arrived, or when either side does not want it any more."""

    request_id: str
    epoch: int
    sender: SimulatedReplica
    receiver: SimulatedReplica
    clock: Clock
    links: SimulatedNetwork
    latency_s: float  # of a message between replicas
    is_over: bool = False
    _granted: int | None = None  # the first page that the receiver does not have
    _computed: int = 0  # tokens
    _is_complete: bool = False
    _sent: int = 0  # pages
    _bytes: int = 0
    _seconds: float = 0.0  # on the way

    @property
    def owner(self) -> str:
        return Request.owner_name(self.request_id, self.epoch)

    def grant(self, request: Request, now: float) -> None:
        """The receiver has pages."""
        first = request.num_computed_tokens // self.receiver.scheduler.pages.page_size

        def heard(now: float) -> None:
            self._granted = first
            self._send(now)

        self.clock.at(now + self.latency_s, heard)

    def computed(self, num_tokens: int, is_complete: bool, now: float) -> None:
        """The sender has so many tokens of the prompt; all of them, and the first of the output, if `is_complete`."""
        self._computed, self._is_complete = num_tokens, is_complete
        self._send(now)

    def _send(self, now: float) -> None:
        if self._granted is None or self.is_over:
            return
        size = self.sender.scheduler.pages.page_size
        end = -(-self._computed // size) if self._is_complete else self._computed // size
        begin = max(self._sent, self._granted)
        if end <= begin and not self._is_complete:
            return
        self._sent = max(begin, end)
        num_bytes = (self._sent - begin) * self.sender.pool.profile.page_bytes
        departure, arrival = self.links.carry(self.sender, self.receiver, num_bytes, now)
        self._bytes += num_bytes
        self._seconds += arrival - departure
        num_tokens, is_last = self._computed, self._is_complete
        arrival += self.latency_s
        self.clock.at(arrival, lambda now: self.receiver.post(lambda now: self._arrived(num_tokens, is_last, now), now))

    def _arrived(self, num_tokens: int, is_last: bool, now: float) -> None:
        if self.is_over:
            return
        scheduler = self.receiver.scheduler
        request = scheduler.get(self.request_id)
        assert request is not None, "who receives has the request for as long as it is not over"
        assert request.status is Status.HELD
        assert request.leg is Leg.RECEIVE
        if not is_last:
            scheduler.commit(self.request_id, num_tokens)
            return
        scheduler.start_decoding(self.request_id, TOKEN, now)
        self.is_over = True
        self.clock.at(now + self.latency_s, lambda now: self.sender.post(self._shipped, now))

    def _shipped(self, now: float) -> None:
        scheduler = self.sender.scheduler
        if self._bytes:
            self.sender.publisher.transferred(self._bytes, self._seconds)
        request = scheduler.get(self.request_id)
        if request is not None and request.epoch == self.epoch:
            scheduler.finish_sent(self.request_id)
        scheduler.pages.release(self.owner)
