"""The replicas of the application, as its other processes see them: which are up, and how each is called."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from crossdock.cluster.dispatch import membership
from crossdock.cluster.dispatch.engine_client import RemoteMethod
from crossdock.cluster.dispatch.message_stream import MessageStream
from crossdock.router.actions import ReplicaBroken, ReplicaDead
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.request.submission import Submission


class ReplicaClient:
    """One replica behind a Serve handle, every call pinned to it. Implements `EngineClient`."""

    def __init__(self, handle: DeploymentHandle, replica_id: str, ingress: str) -> None:
        self._handle = handle.options(session_id=replica_id)
        self._actor = ReplicaID(replica_id, handle.deployment_id).to_full_id_str()
        self._ingress = ingress
        self._stream: MessageStream | None = None  # the last one

    async def messages(self) -> AsyncIterator[Message]:
        with _named_losses():
            opening = self._handle.options(stream=True).messages.remote(self._ingress)
            self._stream = stream = await MessageStream.open(await anext(opening))
            try:
                async for message in stream.messages():
                    yield message
            finally:
                stream.close()
            async for _ in opening:  # ends with the stream: Ray knows whether the process has
                pass

    async def submit(self, submission: Submission) -> int:
        if self._stream is None:
            raise ReplicaBroken("it has no open connection")
        return await self._stream.submit(submission)

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def still_reads(self) -> None:
        if self._stream is not None:
            self._stream.sign_of_life()

    async def call(self, method: RemoteMethod, *arguments: Any) -> Any:
        with _named_losses():
            return await getattr(self._handle, method).remote(*arguments)

    async def is_dead(self) -> bool:
        """Return whether Ray has given up the actor: it frees the name of an actor once its process has ended."""
        try:
            await asyncio.to_thread(ray.get_actor, self._actor, SERVE_NAMESPACE)
        except ValueError:
            return True
        return False


@contextmanager
def _named_losses() -> Iterator[None]:
    """Raise ReplicaDead where the actor's process has ended, ReplicaBroken where that is not known."""
    try:
        yield
    except ActorDiedError as error:
        raise ReplicaDead("its process has ended") from error
    except RayActorError as error:
        raise ReplicaBroken("the connection to its process broke") from error


Join = Callable[[str, ReplicaClient, SchedulingProfile], None]


def follow_members(
    engines: Mapping[str, DeploymentHandle], reader: str, join: Join, leave: Callable[[str], None]
) -> None:
    """Call `join` and `leave`, in the running event loop, as replicas of the deployments come and go.

    `reader` is the name of this process at the replicas.
    """
    loop = asyncio.get_running_loop()
    known: dict[str, set[str]] = {deployment: set() for deployment in engines}

    def update(deployment: str, members: membership.Members) -> None:
        for name in known[deployment] - set(members):
            known[deployment].remove(name)
            leave(name)
        for name, advertised in members.items():
            if name not in known[deployment]:
                profile = SchedulingProfile(**advertised)
                known[deployment].add(name)
                join(name, ReplicaClient(engines[deployment], name, reader), profile)

    def on_members(deployment: str, members: membership.Members) -> None:
        loop.call_soon_threadsafe(update, deployment, members)

    for deployment, handle in engines.items():
        membership.subscribe(deployment, partial(on_members, deployment))
        handle._init()  # a handle is sent its replicas only after its first use; this counts as one, without a call
