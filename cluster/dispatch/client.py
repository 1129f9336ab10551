"""The replicas of the application, as its other processes see them: which are up, and how each is called."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from crossdock.cluster.dispatch import membership
from crossdock.cluster.dispatch.dispatch import ReplicaDead
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.request import Overloaded, Submission


class ReplicaClient:
    """One replica behind a Serve handle, every call pinned to it."""

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

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._handle.abort.remote(request_ids)

    async def close(self) -> None:
        await self._handle.close.remote(self._ingress)

    async def progress(self, request_id: str) -> int | None:
        num_steps: int | None = await self._handle.progress.remote(request_id)
        return num_steps

    async def assign_role(self, role: Role) -> None:
        await self._handle.assign_role.remote(role)

    async def peer_dead(self, peer: bytes) -> None:
        await self._handle.peer_dead.remote(peer)

    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._handle.timelines.remote(request_id, tenant)
        return found

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self._handle.live_requests.remote(tenant)
        return found

    async def watched(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]:
        found: dict[str, Any] = await self._handle.watched.remote(seen, tenant)
        return found

    async def metrics_text(self) -> str:
        text: str = await self._handle.metrics_text.remote()
        return text


Join = Callable[[str, ReplicaClient, SchedulingProfile], None]


def follow_members(
    engines: Mapping[str, DeploymentHandle], reader: str, join: Join, leave: Callable[[str], None]
) -> None:
    """From now on calls `join` and `leave`, in the running event loop, as replicas of the deployments come and go.
    `reader` is what this process calls itself to them."""
    loop = asyncio.get_running_loop()
    known: dict[str, set[str]] = {deployment: set() for deployment in engines}

    def update(deployment: str, members: membership.Members) -> None:
        for name in known[deployment] - set(members):
            leave(name)
        for name, advertised in members.items():
            if name not in known[deployment]:
                client = ReplicaClient(engines[deployment], name, reader)
                join(name, client, SchedulingProfile(**advertised))
        known[deployment] = set(members)

    def on_members(deployment: str, members: membership.Members) -> None:
        loop.call_soon_threadsafe(update, deployment, members)

    for deployment, handle in engines.items():
        membership.subscribe(deployment, partial(on_members, deployment))
        handle._init()  # a handle hears of its replicas only from its first use on; this is that, without a call
