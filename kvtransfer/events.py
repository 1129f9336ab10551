"""Events that a dock reports to its owner. Every transfer ends with one of a few of them, which free its pages.

The source's transfer ends with `Released`; the target's with `Arrived`, or with `WriterStopped` after a failure.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from crossdock.kvtransfer.records import Count, Seconds


class Reason(Enum):
    """Why a transfer failed."""

    DEADLINE = "deadline"  # the other side sent nothing, or took no data, for longer than it may
    PEER_LOST = "peer_lost"  # the connection broke, or the process is known to be dead
    PEER_STOPPED = "peer_stopped"  # the other side gave the transfer up
    SUPERSEDED = "superseded"  # this epoch had already ended, or a later one has begun
    CHECKSUM = "checksum"  # pages did not arrive as they were sent
    PROTOCOL = "protocol"  # the other side broke the protocol, or granted too few pages


@dataclass(slots=True)
class Figures:
    """Times and amounts of one transfer, for metrics and the request's timeline.

    Seconds count from the start of the transfer; None for a point that was never reached. A source counts bytes that
    it wrote, a target bytes that were written to it. A target does not see writes begin, hence has no write seconds.
    """

    handshake_seconds: Seconds | None = None  # until the first message from the other side
    grant_wait_seconds: Seconds | None = None  # until the last grant was given
    total_seconds: Seconds = 0.0
    num_bytes: Count = 0
    num_pages: Count = 0  # of the request, each counted once, however many ranks hold parts of it
    num_writes: Count = 0
    write_seconds: Seconds = 0.0  # while at least one write was open
    hidden_seconds: Seconds = 0.0  # of the write seconds, those before `finish`: behind the computation of later chunks
    hidden_bytes: Count = 0  # bytes of writes that completed before `finish`

    @property
    def overlap(self) -> float:
        """The share of the write seconds that was hidden, 0 to 1; 1 if nothing was written."""
        return self.hidden_seconds / self.write_seconds if self.write_seconds else 1.0


@dataclass(frozen=True, slots=True)
class OfTransfer:
    """An event of the transfer of one epoch of one request."""

    request: str
    epoch: Count


@dataclass(frozen=True, slots=True)
class Released(OfTransfer):
    """To the source, exactly once per `ship`: no write of this epoch is open, and none will begin.

    Once every epoch that was shipped of a request is released, no transfer reads the request's pages."""

    arrived: bool  # whether every page and the result were delivered
    figures: Figures = field(compare=False)


@dataclass(frozen=True, slots=True)
class Offered(OfTransfer):
    """To the target: every source rank has pages for the prompt. May come before `expect`, and more than once.

    `num_tokens`: of a prefix that the target has asked for, those at the source; 0: the source computes the prompt."""

    num_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class Asked(OfTransfer):
    """To the source: a replica asks for the pages of the prefix `hashes`. Ship what is here to `peers`, or cancel."""

    peers: tuple[bytes, ...]
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Committed(OfTransfer):
    """To the target: the first `num_tokens` tokens are in place, without gaps, from every source rank."""

    num_tokens: Count


@dataclass(frozen=True, slots=True)
class Arrived(OfTransfer):
    """To the target: every page is in place, and no further write will come. The successful end of an `expect`."""

    num_tokens: Count
    result: bytes
    figures: Figures = field(compare=False)


@dataclass(frozen=True, slots=True)
class WriterStopped(OfTransfer):
    """To the target, after `Failed` or `cancel_expect`: no process will write to the granted pages any more."""


@dataclass(frozen=True, slots=True)
class Failed(OfTransfer):
    """To either side, at most once: the transfer will not be completed.

    `Released` or `WriterStopped` follows, at once or when that is safe. Tokens that a target has committed stay valid.
    """

    sending: bool  # True: shipped from this dock; False: expected at this dock
    reason: Reason
    detail: str = field(compare=False)


Event: TypeAlias = Asked | Released | Offered | Committed | Arrived | WriterStopped | Failed
