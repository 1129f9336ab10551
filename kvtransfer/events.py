"""What a dock tells its owner. Every transfer ends in one of few ways, and each says whose pages are free again."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias


class Reason(Enum):
    """Why a transfer failed."""

    DEADLINE = "deadline"  # the other side said nothing, or took no data, for longer than it may
    PEER_LOST = "peer_lost"  # the connection broke, or the process is known to be dead
    PEER_STOPPED = "peer_stopped"  # the other side gave the transfer up
    SUPERSEDED = "superseded"  # this epoch had already ended, or a later one has begun
    PROTOCOL = "protocol"  # the other side broke the rules, or granted too few pages


@dataclass(slots=True)
class Figures:
    """What one transfer took, for metrics and the request's timeline. Seconds since it began, if never reached: None.

    A source counts what it wrote; a target, what was written to it (it sees no write begin, hence no write seconds).
    """

    handshake_seconds: float | None = None  # until the other side was first heard
    grant_wait_seconds: float | None = None  # until the last grant was given
    total_seconds: float = 0.0
    num_bytes: int = 0
    num_pages: int = 0
    num_writes: int = 0
    write_seconds: float = 0.0  # while at least one write was open
    hidden_seconds: float = 0.0  # of these, before `finish` was called: behind the computation of later chunks
    hidden_bytes: int = 0  # bytes whose write had completed by then

    @property
    def overlap(self) -> float:
        """The share of the writing that cost no time, 0 to 1; 1 where nothing was written."""
        return self.hidden_seconds / self.write_seconds if self.write_seconds else 1.0

    @property
    def gb_per_second(self) -> float:
        return self.num_bytes / self.write_seconds / 1e9 if self.write_seconds else 0.0


@dataclass(frozen=True, slots=True)
class Granted:
    """To the source: every target rank has said where its pages go. Nothing needs to be done."""

    request: str
    epoch: int
    first_page: int  # so many leading pages the target has already (the fewest of all its ranks)


@dataclass(frozen=True, slots=True)
class Released:
    """To the source, exactly once per `ship`: no write of this epoch is open, none will begin. If every epoch shipped
    of a request is released, nothing reads its pages any more."""

    request: str
    epoch: int
    arrived: bool  # whether all of it, with the state, was delivered
    figures: Figures = field(compare=False)


@dataclass(frozen=True, slots=True)
class Committed:
    """To the target: the first `num_tokens` tokens are in place, without gaps, from every source rank."""

    request: str
    epoch: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """To the target: all is in place, and no write will come any more. The good end of an `expect`."""

    request: str
    epoch: int
    num_tokens: int
    state: bytes
    figures: Figures = field(compare=False)


@dataclass(frozen=True, slots=True)
class WriterStopped:
    """To the target, after `Failed` or `cancel_expect`: nobody will write to the granted pages any more."""

    request: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Failed:
    """To either side, at most once: the transfer will not be completed. `Released` or `WriterStopped` follows, at
    once or when it is safe. What a target has committed stays good."""

    request: str
    epoch: int
    sending: bool  # whether it was shipped from here, or expected here
    reason: Reason
    detail: str = field(compare=False)


Event: TypeAlias = Granted | Released | Committed | Arrived | WriterStopped | Failed
