"""The application with faults inside its replicas: transfer messages that are lost or late, odd answers to submissions.

Serve imports `build` from here in place of the application's own. The replicas are the application's; only their
transports, and their answers to submissions, are disturbed. The environment variable CROSSDOCK_CHAOS holds the
probabilities, as JSON of `Disturbance`.
"""

import asyncio
import json
import math
import os
import random
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from unittest.mock import patch

from ray import serve

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve import app
from crossdock.kvtransfer.messages import MalformedMessage, decode
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import PeerLost, Received, TransportEvent
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.serving.replica import Replica
from crossdock.workers.replica.transfer import replica_dock
from crossdock.workers.schedule.request.submission import Overloaded, Submission

VARIABLE = "CROSSDOCK_CHAOS"
_DELAYS_S = (0.02, 0.3, 1.0, 6.0)  # the last one is longer than the deadline of transfers


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How often something goes wrong inside a replica; probabilities. `folder`: where faults are counted."""

    folder: str = ""
    lost: float = 0.0  # of a transfer message
    late: float = 0.0  # of a transfer message; those behind it on the same connection wait too
    refused: float = 0.0  # of one leg, as if the replica were overloaded
    unanswered: float = 0.0  # of a submission: taken, but answered later than any ingress waits

    @classmethod
    def from_environment(cls) -> "Disturbance":
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def to_environment(self) -> None:
        os.environ[VARIABLE] = json.dumps(asdict(self))

    @property
    def is_any(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self) if field.name != "folder")

    def count(self, fault: str) -> None:
        """Count a fault. One byte in a file: the count survives the process."""
        with (Path(self.folder) / fault).open("ab") as file:
            file.write(b".")


def counts(folder: Path) -> dict[str, int]:
    """Return how often each kind of fault happened in any replica."""
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir())}


class _LossyReceiver:
    """Loses some messages that a transport has received, and holds some back. Keeps their order."""

    disturbance: Disturbance

    def poll(self, seconds: float) -> list[TransportEvent]:
        held: dict[str, deque[tuple[float, Received]]] = self.__dict__.setdefault("_held", {})
        due = min((line[0][0] for line in held.values()), default=math.inf)
        arrived: list[TransportEvent] = super().poll(max(0.0, min(seconds, due - time.monotonic())))  # type: ignore[misc]
        events: list[TransportEvent] = []
        for event in arrived:
            match event:
                case Received(peer):
                    self._receive(event, held.setdefault(peer, deque()))
                case PeerLost(peer):
                    events += [message for _, message in held.pop(peer, ())]
                    events.append(event)
                case _:
                    events.append(event)
        now = time.monotonic()
        for peer, line in [*held.items()]:
            while line and line[0][0] <= now:
                events.append(line.popleft()[1])
            if not line:
                del held[peer]
        return events

    def _receive(self, event: Received, line: deque[tuple[float, Received]]) -> None:
        due = line[-1][0] if line else 0.0
        chance = random.random()
        if chance < self.disturbance.lost:
            self.disturbance.count(f"transfer message lost: {_kind(event.message)}")
            return
        if chance < self.disturbance.lost + self.disturbance.late:
            due = max(due, time.monotonic() + random.choice(_DELAYS_S))
            self.disturbance.count(f"transfer message late: {_kind(event.message)}")
        line.append((due, event))


def _kind(message: bytes) -> str:
    try:
        return type(decode(message)).__name__
    except MalformedMessage:
        return "malformed"


class LossyTcp(_LossyReceiver, TcpTransport):
    pass


class LossyNixl(_LossyReceiver, NixlTransport):
    pass


class FaultyReplica(Replica):
    """A replica whose transport and answers are disturbed."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        self._disturbance = _LossyReceiver.disturbance = Disturbance.from_environment()
        if self._disturbance.lost or self._disturbance.late:
            replica_dock.TcpTransport, replica_dock.NixlTransport = LossyTcp, LossyNixl  # type: ignore[misc]
        await super().__init__(spec)

    async def _submit(self, ingress: str, submission: Submission) -> int | ValueError | RuntimeError:
        disturbance, chance = self._disturbance, random.random()
        if chance < disturbance.refused and submission.may_refuse:
            disturbance.count(f"refusal of one leg: {submission.leg.name}")
            return Overloaded("refused by the chaos benchmark", retry_after=1.0)
        answer = await super()._submit(ingress, submission)
        if disturbance.refused <= chance < disturbance.refused + disturbance.unanswered:
            disturbance.count("submission answered after 12 s")
            await asyncio.sleep(12)
        return answer


def build(args: ClusterConfig) -> serve.Application:
    """Return the application, with faulty replicas where the environment asks for faults."""
    if not Disturbance.from_environment().is_any:
        return app.application(args)
    with patch.object(app, "REPLICA", FaultyReplica):
        return app.application(args)
