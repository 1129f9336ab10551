"""Serves requests from an ingress: drives each request's life with real replicas, and asks these for timelines."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from crossdock.cluster.dispatch.attempt import Attempt, DeltaReader, ReplicaConnection
from crossdock.cluster.dispatch.connections import ReplicaConnections, SlowReader, lost_by
from crossdock.cluster.dispatch.engine_client import EngineClient, RemoteMethod
from crossdock.cluster.dispatch.gate import Gate, PauseMode
from crossdock.cluster.dispatch.ingress_metrics import IngressMetrics, merge_metrics
from crossdock.cluster.dispatch.loop_clock import LoopClock
from crossdock.cluster.dispatch.shared_answer import SharedAnswer
from crossdock.cluster.dispatch.suspect_turns import SuspectTurns
from crossdock.router.actions import (
    DEFAULT_TIMEOUTS,
    Accepted,
    Action,
    Ask,
    Detach,
    Fail,
    PlaceAgain,
    ReplicaBroken,
    ReplicaLost,
    Submit,
    SuspectRequest,
    Timeouts,
)
from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.request_life import MOST_PLACEMENTS, RequestLife
from crossdock.router.turn_queue import TurnQueue
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import Overloaded, Submission
from crossdock.workers.schedule.shares import Shares

__all__ = [
    "DeltaReader",
    "Dispatcher",
    "ModelCard",
    "ReplicaLost",
    "SlowReader",
    "SuspectRequest",
    "Timeouts",
    "TokenSource",
]

logger = logging.getLogger("ray.serve")

MOST_QUEUED = 4096  # requests; with prompts of 2,000 tokens about 0.3 GiB at the ingress
_FULL_QUEUE_S = 10.0  # until a client should try again: minutes of work are queued


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The properties of the served model that clients may know."""

    name: str
    created: int  # Unix seconds
    max_model_len: int  # tokens; of several replicas what each of them takes
    vocab_size: int
    cache_page_size: int = 0  # tokens of a page that prompts share; 0: they share none
    least_output: int = 1  # tokens that are computed even for no output; 0: by a text encoder


class TokenSource(Protocol):
    """Makes the tokens of submissions: a dispatcher in front of replicas, or an engine of the same process."""

    @property
    def model(self) -> ModelCard: ...
    def generate(self, submission: Submission, reader: DeltaReader | None = None) -> AsyncIterator[TokenDelta]:
        """Yield the submission's tokens. `reader` may read some while the next is waited for; these are not yielded."""


class Dispatcher:
    """Serves requests on the replicas that join. One per ingress; belongs to one event loop."""

    def __init__(
        self,
        model_name: str,
        router: RouterConfig | None = None,
        ingress_texts: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        most_placements: int = MOST_PLACEMENTS,
        *,
        most_queued: int | Shares = MOST_QUEUED,
        vllm_metrics: bool = False,
        metrics_hold_s: float = 1.0,
    ) -> None:
        """`ingress_texts` fetches the metrics of all ingresses, by name; None: this is the only one.

        `most_queued`: requests that may wait for their first token; further ones are refused. Shares: those of all
        models. `vllm_metrics`: whether metrics are shown under vLLM's names too. `metrics_hold_s`: how long their text
        is given to all who ask.
        """
        self._model_name = model_name
        self._created = int(time.time())
        self._card: ModelCard | None = None
        self._lengths: dict[str, int] = {}  # the longest request of each replica, in tokens
        self._timeouts = timeouts
        self._most_placements = most_placements
        # Of owners: their requests in flight that have no token so far.
        self._queue = Shares(most_queued) if isinstance(most_queued, int) else most_queued
        self.fleet = Fleet(router or RouterConfig.model_validate({}))  # the replicas that are up
        self._vllm_model = model_name if vllm_metrics else None
        self.metrics = IngressMetrics(self._vllm_model)
        self.clock = LoopClock()  # of all that replicas and requests are waited for
        self._connections = ReplicaConnections(self.fleet, self._timeouts, self.clock)
        self._suspects = SuspectTurns(TurnQueue(timeouts.suspect_s))
        self.gate = Gate()
        self._lives: dict[str, RequestLife] = {}  # by request, those in flight
        self._ingress_texts = ingress_texts or self._own_text
        self._metrics_text: SharedAnswer[str] = SharedAnswer(self._scrape, self._connections.spawn, metrics_hold_s)
        self.close = self._connections.close
        self.spawn = self._connections.spawn
        self.losses = self._connections.losses

    def join(self, name: str, client: EngineClient, profile: SchedulingProfile) -> None:
        """Serve requests on a replica that is up. `profile`: its advertised profile."""
        shared = profile.page_size if profile.caches_prefixes else 0
        self._lengths[name] = profile.max_model_len
        sizes = min(self._lengths.values()), profile.vocab_size, shared, int(profile.generates)
        self._card = ModelCard(self._model_name, self._created, *sizes)
        self._connections.join(name, client, profile)

    def leave(self, name: str) -> None:
        """Give a replica no new requests. Its running ones go on for as long as it lives."""
        self._lengths.pop(name, None)
        if self._card is not None and self._lengths:
            self._card = replace(self._card, max_model_len=min(self._lengths.values()))
        self._connections.leave(name)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, submission: Submission, reader: DeltaReader | None = None) -> AsyncIterator[TokenDelta]:
        """Yield the request's tokens, one delta per engine step. The first delta is empty: a replica has taken the
        request, and none will refuse it any more. Closing the iterator early, at any moment, aborts the request.

        A replica that is lost on the way is replaced: another goes on after the tokens that were already yielded.
        `reader`: reads deltas that come while the next is waited for, after the first one. These are not yielded.

        Raises:
            ValueError: the replica refuses the request; the message names the field.
            Overloaded: no replica can make the first token in time, or too many requests wait for theirs.
            ReplicaLost: no replica is up, or one after the other was lost.
            SuspectRequest: the request may be what ended the replicas that it was lost at.
            SlowReader: too many tokens waited to be read.
        """
        watch = self.metrics.start(submission)
        life = RequestLife(submission, self.fleet, self.clock.now(), self._timeouts, self._most_placements)
        attempt = Attempt(life, self.clock)
        actions = deque[Action]([PlaceAgain(None)])
        place = ExitStack()  # in the queue, until the first token
        try:
            self._enter_queue(place, submission.tenant or submission.key_owner)
            await self.gate.enter(submission.id)
            self._lives[submission.id] = life
            while submission.id not in self.gate.cut:
                action = actions.popleft() if actions else None
                match action:
                    case None:
                        actions += await attempt.next_actions()
                    case TokenDelta():
                        place.close()
                        watch.read(action)
                        self._suspects.leave(submission.id)
                        yield action
                        if action.finish_reason is not None:
                            return
                        attempt.read_with(reader, watch)
                    case Accepted():
                        assert life.placement is not None
                        watch.placed(life.placement)
                        if watch.num_placements == 1:
                            yield TokenDelta(submission.id, [])
                    case PlaceAgain(loss):
                        attempt, placed = await self._place(life, loss)
                        actions += placed
                    case Submit():
                        self._submit(attempt, action)
                    case Detach(name, _, is_running):
                        self._connections.detach(attempt, name, is_running)
                    case Ask(name):
                        self._connections.ask(attempt, name)
                    case Fail(error):
                        raise error
            watch.finish_reason = FinishReason.ABORT
            yield TokenDelta(submission.id, [], first=len(life.output), finish_reason=FinishReason.ABORT)
        except BaseException as error:
            if isinstance(error, ReplicaLost):
                error.with_retry(self.losses.seconds_until_up())
            watch.failed(error)
            raise
        finally:
            place.close()
            self._close(life, attempt, actions)
            watch.end()

    def _enter_queue(self, place: ExitStack, owner: str) -> None:
        """Count a request of an owner as one without a token, until `place` is closed. Overloaded: too many wait."""
        if not self._queue.room(owner):
            raise _queue_is_full(self._queue)
        self._queue.take(owner, 1)
        place.callback(self._queue.release, owner, 1)

    def _close(self, life: RequestLife, attempt: Attempt, actions: Collection[Action]) -> None:
        """End a life. `actions`: its last ones, such as leaving a replica."""
        self._lives.pop(life.submission.id, None)
        self.gate.leave(life.submission.id)
        self._suspects.leave(life.submission.id)
        for left in (*actions, *life.close()):
            if isinstance(left, Detach):
                self._connections.detach(attempt, left.replica, left.is_running)

    async def _place(self, life: RequestLife, loss: ReplicaLost | None) -> tuple[Attempt, list[Action]]:
        """Begin the next attempt, where a suspect request has its turn and a replica is up, or soon will be."""
        await self.gate.place()
        if loss is not None:
            self.metrics.placed_again.inc()
            logger.warning("request %s goes on elsewhere: %s", life.submission.id, loss)
        self._suspects.leave(life.submission.id)
        if life.is_suspect:
            await self._suspects.enter(life.submission.id)
        await self._connections.wait_until_one_is_open(self._timeouts.answer_s, life.weights)
        actions = life.place(self.clock.now())
        if life.placement is not None and not life.is_over:
            self.metrics.placed(life.placement)
            if loss is not None:
                self.losses.went_on(loss.replica, life.placement.replicas)
        return Attempt(life, self.clock, life.attempt), actions

    def _submit(self, attempt: Attempt, action: Submit) -> None:
        """Submit a leg of an attempt; the answer will be an event of the attempt."""
        connection = self._connections.attach(attempt, action.replica)
        submission = action.submission
        if action.peer is not None:
            submission = replace(submission, peer=self._connections[action.peer].profile.peer)
        if action.source is not None:
            submission = replace(submission, source=self._connections[action.source].profile.peer)
        answering = asyncio.ensure_future(_answer(attempt, connection, submission))
        attempt.submitting[connection.name] = answering

    @property
    def num_queued(self) -> int:
        """Return how many requests in flight have no token so far."""
        return self._queue.num_used

    @property
    def num_replicas(self) -> int:
        """Return how many replicas are up."""
        return len(self.fleet)

    @property
    def deadlines(self) -> dict[str, float]:
        """Return, by request in flight, the time of its next check without an event, in seconds on `clock`."""
        return {request_id: life.deadline for request_id, life in self._lives.items()}

    # -- operators ---------------------------------------------------------------------------------------------------

    async def hold(self, mode: PauseMode) -> None:
        """Let no request of this ingress begin until `release`. Returns once those that run have ended; in mode `keep`
        at once. A caller that is cancelled meanwhile leaves an open gate open."""
        was_open = self.gate.is_open
        self.gate.close(mode)
        self._connections.wake()
        try:
            if mode != "keep":
                await self.gate.wait_until_empty()
        except asyncio.CancelledError:
            if was_open:
                self.gate.open()
            raise

    async def release(self, number: int = 0) -> None:
        """Let requests of this ingress begin and go on, once replicas have reported the update `number` of weights."""
        end = self.clock.now() + self._timeouts.answer_s
        while self.fleet.table.newest.number < number and self.clock.now() < end:
            await asyncio.sleep(0.01)
        self.gate.open()

    async def tell_all(
        self, method: RemoteMethod, *arguments: Any, by_name: Mapping[str, Sequence[Any]] | None = None
    ) -> dict[str, Any]:
        """Call a method of every replica, however long each takes. Returns the answers by name.

        `by_name`: the arguments for each replica, and no others are called; None: `arguments` for all.

        Raises:
            Exception: what the first replica that failed has raised. Replicas that were lost meanwhile do not count.
        """
        connections = [each for each in self._connections.opened() if by_name is None or each.name in by_name]
        given = [arguments if by_name is None else by_name[each.name] for each in connections]
        calls = (self._connections.call(one, method, *each) for one, each in zip(connections, given, strict=True))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found: dict[str, Any] = {}
        for connection, answer in zip(connections, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaLost):
                raise answer
            if not isinstance(answer, BaseException):
                found[connection.name] = answer
        return found

    async def check_adapter(self, folder: str) -> None:
        """Check that all replicas can serve the adapter in a folder.

        Raises:
            ValueError: a replica cannot, with the reason, such as another width than the model's.
            ReplicaLost: no replica answers.
        """
        reasons = await self._ask_all("check_adapter", folder)
        if not reasons:
            raise ReplicaLost("no replica is up to compare an adapter with its model")
        if reason := next(filter(None, reasons.values()), ""):
            raise ValueError(reason)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelCard:
        """Return the properties of the served model.

        Raises:
            ReplicaLost: no replica has been up yet.
        """
        if self._card is None:
            raise ReplicaLost("no replica has been up yet; the model may still be loading")
        return self._card

    def ready(self) -> bool:
        """Return whether tokens can be generated now: a replica is up, and it is not paused.

        Of any role: it serves a request alone where no other may."""
        stopped = self.fleet.table.paused | self.fleet.table.outdated
        return self.gate.is_open and any(each.name not in stopped for each in self._connections.opened())

    def has_heard_all(self) -> bool:
        """Return whether every replica that is up has reported what it does."""
        by_name = self.fleet.table.by_name
        return all(name in by_name and by_name[name].live is not None for name in self._connections.names())

    def check(self) -> None:
        """Raise the error that has ended a task which this ingress cannot do without."""
        self._connections.check()

    def has_roles(self, roles: Collection[Role]) -> bool:
        """Return whether a replica of each of these roles is up."""
        return {*roles} <= {each.profile.role for each in self._connections.opened()}

    async def timelines(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
        """Return the timelines of all that the client's request `request_id` led to, on all replicas, oldest first.
        `owner`: only that owner's; None: all."""
        return await self._collect("timelines", request_id, owner)

    async def live_requests(self, owner: str | None) -> list[dict[str, Any]]:
        """Return the requests in flight on all replicas, oldest first."""
        return await self._collect("live_requests", owner)

    async def replicas(self, seen: Mapping[str, int], owner: str | None) -> list[dict[str, Any]]:
        """Return the state of every replica, by name, and its steps after those already `seen`, by incarnation."""
        answers = await self._ask_all("watched", seen, owner)
        return [{"replica": name, **answer} for name, answer in sorted(answers.items())]

    async def metrics_text(self) -> str:
        """Return the Prometheus text of the whole deployment: every replica's samples, labelled `replica`, and every
        ingress's, labelled `ingress`. At most a second old."""
        return await self._metrics_text.get()

    async def _scrape(self) -> str:
        return await self.replica_metrics() + merge_metrics(await self._ingress_texts(), "ingress")

    async def replica_metrics(self) -> str:
        """Return every replica's samples, labelled `replica`."""
        return merge_metrics(await self._ask_all("metrics_text", self._vllm_model), "replica")

    async def _collect(self, method: RemoteMethod, *arguments: Any) -> list[dict[str, Any]]:
        """Return the entries of every replica's answer, each with the name of the replica, in order of arrival."""
        answers = await self._ask_all(method, *arguments)
        entries = [{"replica": name, **entry} for name, answer in answers.items() for entry in answer]
        return sorted(entries, key=lambda entry: entry["arrived"])

    async def _ask_all(self, method: RemoteMethod, *arguments: Any) -> dict[str, Any]:
        """Return the answer of each replica, by name, without those that fail or do not answer in time."""
        connections = self._connections.opened()
        answering = (
            asyncio.wait_for(connection.client.call(method, *arguments), self._timeouts.answer_s)
            for connection in connections
        )
        answers = await asyncio.gather(*answering, return_exceptions=True)
        return {
            connection.name: answer
            for connection, answer in zip(connections, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    def ingress_text(self) -> str:
        """Return the metrics of this ingress."""
        return self.metrics.text()

    async def _own_text(self) -> dict[str, str]:
        return {"0": self.metrics.text()}


async def _answer(attempt: Attempt, connection: ReplicaConnection, submission: Submission) -> None:
    """Submit a leg, and make an event of the answer in the turn in which it comes: before a loss that comes later."""
    life = attempt.life
    name = connection.name
    number = attempt.number
    try:
        sequence = await connection.client.submit(submission)
    except (Overloaded, ValueError) as refusal:
        attempt.events.put_nowait(partial(life.refused, name, number, refusal))
    except ReplicaBroken as broken:
        loss = type(broken)(f"replica {name} is lost: {broken}").of(name)
        attempt.events.put_nowait(partial(life.lost, name, number, loss))
    except Exception as error:
        no_answer = lost_by(error, name, "did not take the request")
        attempt.events.put_nowait(partial(life.refused, name, number, no_answer))
    else:
        attempt.events.put_nowait(partial(life.taken, name, number, sequence))


def _queue_is_full(queue: Shares) -> Overloaded:
    whose = "requests" if queue.num_used >= queue.most else "requests, of which this API key has its share,"
    number = f"{queue.num_used} {whose} wait for their first token"
    reason = f"{number}; this server lets {queue.most} wait (http.max_queued_requests)"
    return Overloaded(f"{reason}. Retry in {_FULL_QUEUE_S:.0f} s", retry_after=_FULL_QUEUE_S)
