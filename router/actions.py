"""The actions that the life of a request asks of its driver, its timeouts, and the errors that it ends with."""

from dataclasses import dataclass
from typing import Self, TypeAlias

from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Submission


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long replicas are waited for, in seconds."""

    silence_s: float = 10.0  # for a message, even an empty one, of a live replica
    taken_s: float = 10.0  # for the answer to a submission, before its replica is asked whether it waits there
    answer_s: float = 5.0  # for the answer to any other question: a scrape must not wait for a replica that hangs
    patience_s: float = 5.0  # for a token, at least, before the replicas are asked for progress
    stuck_s: float = 120.0  # for a live replica's word about a request, and for any progress of one that it has:
    # a step may take a minute, and so may a call on a busy machine
    rejoin_s: float = 1.0  # until a lost replica that is still a member is tried again
    suspect_s: float = 3.0  # for the first token of a suspect request, before the next suspect is tried beside it


DEFAULT_TIMEOUTS = Timeouts()


class ReplicaLost(RuntimeError):
    """A replica does not answer any more, or none is up."""

    replica: str = ""  # the one that was lost, where there is one
    retry_after: float = 5.0  # seconds after which a client may try again

    def of(self, replica: str) -> Self:
        """Name the replica that was lost."""
        self.replica = replica
        return self

    def with_retry(self, seconds: float) -> Self:
        """Note after how many seconds a client may try again."""
        self.retry_after = seconds
        return self


class ReplicaBroken(ReplicaLost):
    """The connection to a replica broke in the middle: its process has ended, or is out of reach."""


class ReplicaDead(ReplicaBroken):
    """The process of a replica is known to have ended: it does not write to any memory any more."""


class SuspectRequest(RuntimeError):
    """Several replicas broke off while they worked on the request: it is not tried again.

    The client must not repeat it either: it may be what ended them.
    """

    @classmethod
    def after(cls, num_deaths: int) -> "SuspectRequest":
        return cls(
            f"{num_deaths} replicas broke off, one after the other, while they worked on this request. It may be what "
            "ended them, so it is not tried again; do not repeat it unchanged."
        )


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit one leg of an attempt to `replica`. `submission.epoch` is the number of the attempt."""

    replica: str
    submission: Submission
    peer: str | None = None  # the replica of the other leg
    source: str | None = None  # the replica that sends pages of the prompt's prefix to `replica`


@dataclass(frozen=True, slots=True)
class Accepted:
    """Every replica of the attempt has taken its leg."""


@dataclass(frozen=True, slots=True)
class Detach:
    """`replica` has nothing more to do for this attempt. Comes once for each leg that was submitted."""

    replica: str
    attempt: int
    is_running: bool  # it may hold the request, or the submission may still be on its way: abort this attempt there


@dataclass(frozen=True, slots=True)
class PlaceAgain:
    """Call `place`, as soon as there is a replica to choose and, where the life is suspect, no other suspect is tried.

    Aborts need not be answered before: each names its attempt.
    """

    loss: ReplicaLost | None  # the loss behind the action; None: a replica refused or returned the request


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask `replica` how far it is with this attempt, and pass its answer to `progress`."""

    replica: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The request has ended with this error."""

    error: Exception


Action: TypeAlias = Submit | Accepted | Detach | PlaceAgain | Ask | Fail | TokenDelta
"""A `TokenDelta` is for the client; with a finish reason it is the last action."""
