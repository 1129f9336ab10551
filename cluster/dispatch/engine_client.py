"""The protocol by which an ingress asks one replica."""

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol, TypeAlias

from crossdock.workers.report.advertise import Message
from crossdock.workers.schedule.request.submission import Submission

RemoteMethod: TypeAlias = Literal[
    "abort",
    "assign_role",
    "call_weights",
    "catch_up",
    "check_adapter",
    "checksums",
    "given_up",
    "live_requests",
    "metrics_text",
    "may_sleep",
    "num_ranks",
    "pause",
    "peer_dead",
    "progress",
    "put_weights",
    "read_objects",
    "reset_cache",
    "resume",
    "sleep",
    "timelines",
    "wake_up",
    "watched",
]
"""The methods of `Replica` that are called with plain data and return plain data."""


class EngineClient(Protocol):
    """One replica: behind a Serve handle, or in this process."""

    def messages(self) -> AsyncIterator[Message]:
        """Open the stream of this ingress and yield what the replica sends. From its first message on, the replica
        accepts submissions."""

    async def submit(self, submission: Submission) -> int:
        """Submit a request. Returns the number of the last live profile that does not include it.

        Raises:
            ValueError: the request can never be served; the message names the field.
            Overloaded: its class's promise cannot be kept.
            ReplicaBroken: the replica's process has ended, or is out of reach.
        """

    async def close(self) -> None:
        """End the stream of this ingress; its requests are aborted."""

    def still_reads(self) -> None:
        """Notify the replica that this ingress reads its stream, though it may send nothing else for long."""

    async def call(self, method: RemoteMethod, *arguments: Any) -> Any:
        """Call a method of the replica."""

    async def is_dead(self) -> bool:
        """Return whether the replica's process is known to have ended."""
