"""The part that an engine's thread knows of a kind of transfers: of KV pages (handover)."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, TypeAlias

from crossdock.kvtransfer.events import Event, Figures
from crossdock.workers.replica.engine.engine import Step
from crossdock.workers.replica.transfer.replica_dock import ReplicaDock
from crossdock.workers.schedule.request import Request, TokenDelta
from crossdock.workers.schedule.submission import Submission

OnFigures: TypeAlias = Callable[[str, str, Figures, str], None]
"""Called at a transfer's end: request id, `sent` or `received`, figures, outcome."""

SideOpener: TypeAlias = Callable[[Callable[[Event], None], OnFigures], "Side"]
"""Opens the dock of a side, given what to call with the dock's events, on the dock's threads, and `OnFigures`."""


class Side(Protocol):
    """One kind of transfers of an engine. Its calls must not overlap with the engine's own."""

    ends_requests: ClassVar[bool]  # by `handle`: first the steps in flight end that compute the request
    address: ClassVar[str]  # the field of `SchedulingProfile` that tells other replicas `dock.blob`
    dock: ReplicaDock

    @property
    def patience(self) -> float | None:
        """Seconds until `plan` and `step` should be called again although nothing happens; None: no limit."""

    def add(self, submission: Submission) -> None:
        """Begin the transfer of a request that the engine has just queued. RuntimeError: place it elsewhere."""

    def plan(self) -> None:
        """Call the dock for what can begin before a step."""

    def step(self, step: Step | None) -> Sequence[TokenDelta]:
        """Take in a step that ended; None: something else happened. Returns the deltas of requests that ended by it."""

    def handle(self, event: Event) -> Sequence[TokenDelta]:
        """Apply an event of the dock. Returns the deltas of requests that ended by the event."""

    def aborted(self, request: Request) -> None:
        """End the transfer of a request that was aborted here."""
