"""The replicas of the application, as its other processes see them: which are up, and how each is called."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from crossdock.cluster.dispatch import membership
from crossdock.cluster.dispatch.connections import RemoteMethod, ReplicaDead
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.request import Overloaded, Submission


class ReplicaClient:
    """One replica behind a Serve handle, every call pinned to it. Implements `EngineClient`."""

    def __init__(self, handle: DeploymentHandle, replica_id: str, ingress: str) -> None:
        self._handle = handle.options(session_id=replica_id)
        self._ingress = ingress

    async def messages(self) -> AsyncIterator[Message]:
        try:
            async for message in self._handle.options(stream=True).messages.remote(self._ingress):
                yield message
        except ActorDiedError as error:
            raise ReplicaDead("its process has ended") from error

    async def submit(self, submission: Submission) -> int:
        answer: int | ValueError | Overloaded = await self._handle.submit.remote(self._ingress, submission)
        if isinstance(answer, int):
            return answer
        raise answer

    async def close(self) -> None:
        await self._handle.close.remote(self._ingress)

    async def call(self, method: RemoteMethod, *arguments: Any) -> Any:
        return await getattr(self._handle, method).remote(*arguments)


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
