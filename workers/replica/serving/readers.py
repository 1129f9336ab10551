"""The ingresses that read from a replica: which reader gets the tokens of which attempt. Belongs to the event loop."""

from collections.abc import Sequence

from crossdock.kvtransfer.fence import Fence
from crossdock.workers.replica.serving.channel import Channel
from crossdock.workers.report.live_profile import LiveProfile, PageChanges
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission

AttemptKey = tuple[str, int]
"""The id of a request and the epoch of one attempt at it."""


class Superseded(RuntimeError):
    """The attempt was aborted before its submission came, or a later attempt at the request is here."""


class Readers:
    """The open channels, by ingress, and the attempts whose tokens go to them."""

    def __init__(self) -> None:
        self.channels: dict[str, Channel] = {}
        self._reader_of: dict[str, tuple[Channel, int]] = {}  # by request, with the epoch of its last attempt
        self._peer = b""  # where other replicas reach this one's pages; empty: as since the start
        self._ended = Fence()  # aborted attempts: a submission that comes late must not start

    def open(self, ingress: str) -> Channel:
        """Open the channel of a reader. A second call replaces the first channel, and ends its reader."""
        if ingress in self.channels:
            self.channels[ingress].close()
        self.channels[ingress] = channel = Channel()
        if self._peer:
            channel.tell_peer(self._peer)
        return channel

    def announce(self, peer: bytes) -> None:
        """Tell all readers, and those that come later, where other replicas reach this one's pages from now on."""
        self._peer = peer
        for channel in self.channels.values():
            channel.tell_peer(peer)

    def close(self, ingress: str, channel: Channel) -> list[AttemptKey]:
        """Forget a reader. Return the attempts whose tokens went to it: no other reader wants them."""
        if self.channels.get(ingress) is channel:
            del self.channels[ingress]
        return [(request, epoch) for request, (reader, epoch) in self._reader_of.items() if reader is channel]

    def claim(self, ingress: str, submission: Submission) -> None:
        """Send the tokens of an attempt to the reader `ingress` from now on.

        Raises:
            RuntimeError: no such reader is open.
            Superseded: the attempt was aborted, or this attempt or a later one is here already.
        """
        channel = self.channels.get(ingress)
        if channel is None:
            raise RuntimeError(f"no channel {ingress!r} is open")
        channel.hear()
        _, epoch = self._reader_of.get(submission.id, (None, -1))
        if epoch >= submission.epoch or self.has_ended(submission.id, submission.epoch):
            raise Superseded(f"attempt {submission.epoch} at {submission.id} is over")
        self._reader_of[submission.id] = channel, submission.epoch

    def heard(self, ingress: str) -> None:
        """Note a sign of life of a reader."""
        if ingress in self.channels:
            self.channels[ingress].hear()

    def check(self, submission: Submission) -> None:
        """Raise Superseded where an attempt that was claimed has been aborted or replaced since."""
        if self._reader_of.get(submission.id, (None, -1))[1] != submission.epoch:
            raise Superseded(f"attempt {submission.epoch} at {submission.id} is over")

    def has(self, request_id: str, epoch: int) -> bool:
        """Return whether the tokens of an attempt go to a reader: it was submitted, and has not ended."""
        return self._reader_of.get(request_id, (None, -1))[1] == epoch

    def release(self, request_id: str, epoch: int) -> None:
        """Send no more tokens of an attempt, which was refused."""
        if self._reader_of.get(request_id, (None, -1))[1] == epoch:
            del self._reader_of[request_id]

    def end(self, request_id: str, epoch: int) -> None:
        """Send no more tokens of an attempt or of an earlier one, and let none of them start any more."""
        self._ended.end(request_id, epoch)
        if self._reader_of.get(request_id, (None, epoch + 1))[1] <= epoch:
            del self._reader_of[request_id]

    def has_ended(self, request_id: str, epoch: int) -> bool:
        """Return whether this attempt or a later one was aborted. May be called from any thread."""
        return self._ended.has_ended(request_id, epoch)

    def deliver(
        self, deltas: Sequence[TokenDelta], live: LiveProfile | None, pages: Sequence[PageChanges]
    ) -> list[AttemptKey]:
        """Put the deltas of a step into the channels of their readers, and the replica's news into all channels.

        Returns the attempts of readers that are too far behind, or silent for too long. These attempts get no more
        tokens.
        """
        by_channel: dict[int, list[TokenDelta]] = {}
        for delta in deltas:
            channel, epoch = self._reader_of.get(delta.request_id, (None, -1))
            if channel is None or epoch != delta.epoch:
                continue  # aborted while its last step ran; it may have been placed here again since
            by_channel.setdefault(id(channel), []).append(delta)
            if delta.finish_reason is not None:
                del self._reader_of[delta.request_id]
        unread: list[AttemptKey] = []
        for ingress, channel in [*self.channels.items()]:
            found = by_channel.get(id(channel), ())
            is_silent = bool(found) and channel.is_silent
            if is_silent:
                channel.close()
            if is_silent or ((found or live is not None) and not channel.put(found, live, pages)):
                unread += self.close(ingress, channel)
        return unread

    def close_all(self) -> None:
        """End every reader after what is queued for it."""
        for channel in self.channels.values():
            channel.close()
