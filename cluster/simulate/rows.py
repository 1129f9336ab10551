"""Embeddings on their way from an encode replica to the one that computes the prompt. Does in simulated time what the
docks and `Landing` do."""

from dataclasses import dataclass
from functools import partial

from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.cluster.simulate.transfer import SimulatedTransfer
from crossdock.workers.schedule.pictures.arriving_rows import ArrivingRows
from crossdock.workers.schedule.request import Request


@dataclass(slots=True, eq=False)
class SimulatedRows(SimulatedTransfer):
    """The embeddings of one prompt's pictures. Without them the receiver encodes the pictures itself."""

    def expect(self, request: Request, now: float) -> None:
        """The receiver has taken the request."""
        if self.is_over:
            request.is_encoded_elsewhere = False
            return
        due = self._landing.expect(request, now)
        self.clock.at(due, partial(self.receiver.post, _look_again))

    def land(self, first_page: int, now: float) -> None:
        """The receiver has landing pages for the rows from `first_page` on."""

        def arrive(now: float) -> None:
            self._granted = first_page
            self._send(now)

        self._firsts = [first_page]
        self.clock.at(now + self.latency_s, arrive)

    def refuse(self, now: float) -> None:
        """The receiver needs no more rows: the sender's leg ends."""
        if not self.is_over:
            self.is_over = True
            self.clock.at(now + self.latency_s, self._end_leg)
            self.clock.at(now + 2 * self.latency_s, partial(self.receiver.post, self._end_quarantine))

    def cancel(self, now: float) -> None:
        """Send no more rows. The receiver encodes items with missing rows, if it still has the request."""
        if not self.is_over:
            self.receiver.post(self._take_over, now)
            SimulatedTransfer.cancel(self, now)

    @property
    def _landing(self) -> ArrivingRows:
        assert self.receiver.takes_rows, "routers send rows only where they can land"
        return self.receiver.landing

    @property
    def _page_owner(self) -> SimulatedReplica:
        return self.sender

    def _end_leg(self, now: float) -> None:
        self.on_arrived(self, now)
        self.sender.post(self._abort, now, self.request_id)

    def _abort(self, now: float) -> None:
        scheduler = self.sender.scheduler
        request = scheduler.table.get(self.request_id)
        if request is not None and request.epoch == self.attempt:
            scheduler.abort(self.request_id)
        scheduler.pages.release(self.owner)

    def _offered(self, now: float) -> None:
        self._landing.offer(self.owner)

    def _take_over(self, now: float) -> None:
        self._landing.fail(self.owner)

    def _end_quarantine(self, now: float) -> None:
        self._landing.stop(self.owner)

    def _arrived(self, num_tokens: int, is_last: bool, now: float) -> None:
        if self.is_over:
            return
        if not is_last:  # only full pages have travelled
            size = self.receiver.scheduler.pages.page_size
            self._landing.commit(self.owner, num_tokens // size * size)
            return
        self._landing.arrive(self.owner, num_tokens)
        self.is_over = True
        self.on_arrived(self, now)
        self.clock.at(now + self.latency_s, lambda now: self.sender.post(self._shipped, now))


def _look_again(now: float) -> None:
    """Do nothing: before its next step, the replica notices by itself that the wait is over."""
