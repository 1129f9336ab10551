"""The replicas of the application, as its other processes see them: which are up, and how each is called."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.serve._private.common import ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from crossdock.cluster.dispatch import membership
from crossdock.cluster.dispatch.connections import RemoteMethod
from crossdock.cluster.dispatch.message_stream import MessageStream
from crossdock.router.actions import ReplicaBroken, ReplicaDead
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.submission import Submission

_Unsent: TypeAlias = tuple[Submission, "asyncio.Future[int]"]
_MOST_TOKENS = 16_384  # of the prompts in one call: packing them stops the event loop


class ReplicaClient:
    """One replica behind a Serve handle, every call pinned to it. Implements `EngineClient`."""

    def __init__(self, handle: DeploymentHandle, replica_id: str, ingress: str) -> None:
        self._handle = handle.options(session_id=replica_id)
        self._actor = ReplicaID(replica_id, handle.deployment_id).to_full_id_str()
        self._ingress = ingress
        self._stream: MessageStream | None = None  # the last one
        self._unsent: list[_Unsent] = []  # of this turn of the event loop
        self._calling: set[asyncio.Task[None]] = set()

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
        """Submit a request, in one call with others of this turn of the event loop.

        A call costs both processes a millisecond, and a request may have a thousand outputs. A request with a grammar
        has a call of its own: it is answered when the grammar is compiled.
        """
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if submission.sampling.grammar is not None:
            self._send([(submission, answer)])
        else:
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send_all)
            self._unsent.append((submission, answer))
        return await answer

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        batch, num_tokens = list[_Unsent](), 0
        for submission, answer in unsent:
            num_tokens += len(submission.prompt_token_ids)
            if batch and num_tokens > _MOST_TOKENS:
                self._send(batch)
                batch, num_tokens = [], len(submission.prompt_token_ids)
            batch.append((submission, answer))
        self._send(batch)

    def _send(self, batch: "list[_Unsent]") -> None:
        calling = asyncio.ensure_future(self._call(batch))
        self._calling.add(calling)
        calling.add_done_callback(self._calling.discard)

    async def _call(self, batch: "list[_Unsent]") -> None:
        results: Sequence[int | BaseException]
        try:
            with _named_losses():
                results = await self._handle.submit.remote(self._ingress, [submission for submission, _ in batch])
        except BaseException as error:
            results = [error] * len(batch)
        for (_, answer), result in zip(batch, results, strict=True):
            if answer.done():  # its reader has left
                continue
            if isinstance(result, int):
                answer.set_result(result)
            else:
                answer.set_exception(result)

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
