"""A prefix on its way from a replica that has it to the one that computes the rest of the prompt.

Does in simulated time what `Fetches` and the docks do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.replica import Action, SimulatedReplica
from crossdock.cluster.simulate.transfer import SimulatedNetwork
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request

_DEADLINE_S = 10.0  # the default of `transfer.deadline_s`


@dataclass(slots=True, eq=False)
class SimulatedFetch:
    """The fetch of one prefix."""

    source: SimulatedReplica
    target: SimulatedReplica
    clock: Clock
    network: SimulatedNetwork
    latency_s: float  # of a message between replicas
    _key: str = ""  # of the fetch, and owner of the pages at the source
    _hashes: Sequence[PageHash] = field(default_factory=tuple)
    _num_tokens: int = 0  # tokens that the source has

    def ask(self, request: Request, now: float) -> None:
        """The target has taken the request."""
        self._key = f"{request.owner}/prefix"
        self._hashes = self.target.scheduler.borrowed.expect(self._key, request, now, _DEADLINE_S)
        self._send(self.source, self._asked, now)
        self._look_again(now)

    def lose_target(self, now: float) -> None:
        """The target has died: the source has its pages back."""
        self.source.post(self._release, now)

    def _send(self, replica: SimulatedReplica, action: Action, now: float) -> None:
        self.clock.at(now + self.latency_s, partial(replica.post, action))

    def _asked(self, now: float) -> None:
        if self.target.until is not None:
            return
        pages = self.source.scheduler.pages
        hit = pages.prefixes.match(self._hashes)
        if not hit.num_pages:
            self._send(self.target, self._fail, now)
            return
        pages.share(self._key, hit)
        self._num_tokens = hit.num_pages * pages.page_size
        self._send(self.target, self._offered, now)

    def _offered(self, now: float) -> None:
        prefix = self.target.scheduler.borrowed.grant(self._key, self._num_tokens, now)
        if prefix is None:
            self._fail(now)
            self._send(self.source, self._release, now)
            return
        num_bytes = (len(prefix.empty) + len(prefix.state)) * self.target.pool.profile.page_bytes
        departure, arrival = self.network.send(self.source, self.target, num_bytes, now + self.latency_s)
        self.clock.at(arrival, partial(self._sent, num_bytes, arrival - departure))

    def _sent(self, num_bytes: int, seconds: float, now: float) -> None:
        is_dead = self.source.until is not None
        self._send(self.target, self._lost if is_dead else self._landed, now)
        self.source.publisher.transferred(num_bytes, seconds)
        self._send(self.source, self._release, now)

    def _landed(self, now: float) -> None:
        borrowed = self.target.scheduler.borrowed
        borrowed.land(self._key, self._num_tokens, now)
        borrowed.end(self._key, may_be_written=False)
        borrowed.stopped(self._key)

    def _lost(self, now: float) -> None:
        self._fail(now)
        self.target.scheduler.borrowed.stopped(self._key)

    def _fail(self, now: float) -> None:
        """Let the request compute what is missing. Its pages come back when nothing is on its way."""
        self.target.scheduler.borrowed.end(self._key, may_be_written=True)

    def _release(self, now: float) -> None:
        self.source.scheduler.pages.release(self._key)

    def _look_again(self, now: float) -> None:
        """End the fetch where the request has waited too long, and else look again when it will have."""
        borrowed = self.target.scheduler.borrowed
        if self._key in borrowed.overdue(now):
            self._fail(now)
        elif (patience := borrowed.patience_of(self._key, now)) is not None:
            self.clock.at(now + patience, partial(self.target.post, self._look_again))
