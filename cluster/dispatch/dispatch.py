"""The life of a request, seen from an ingress: place it on one replica or two, follow its tokens, place it anew when a
replica is lost, end it wherever it is."""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.placement import Placement, Query
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.report.timeline import prompt_length_bucket
from crossdock.workers.schedule.pages import PageHash, hash_pages
from crossdock.workers.schedule.request import FinishReason, Leg, Overloaded, Submission, TokenDelta

logger = logging.getLogger("ray.serve")


_Answer = TypeVar("_Answer")


class ReplicaLost(RuntimeError):
    """A replica does not answer any more, or none is up."""


class ReplicaDead(ReplicaLost):
    """The process of a replica is known to have ended: it writes to nobody any more."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients may know of the served model."""

    name: str
    created: int  # Unix seconds
    max_model_len: int  # tokens
    vocab_size: int


class EngineClient(Protocol):
    """One replica as a dispatcher sees it: behind a Serve handle, or in this process."""

    def messages(self) -> AsyncIterator[Message]: ...
    async def submit(self, submission: Submission) -> int: ...
    async def progress(self, request_id: str) -> int | None: ...
    async def abort(self, request_ids: Sequence[str]) -> None: ...
    async def close(self) -> None: ...
    async def peer_dead(self, peer: bytes) -> None: ...
    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]: ...
    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]: ...
    async def watched(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]: ...
    async def metrics_text(self) -> str: ...


_MOST_PLACEMENTS = 4  # of one request; the last two on one replica alone, whatever the pools
_SILENCE_S = 10.0  # without a message, even an empty one, after which a replica counts as lost
_ANSWER_S = 5.0  # for what a replica is asked, or about to say: a scrape must not wait for one that hangs
_DEAD_PEERS = 64  # remembered for replicas that were out of reach when they died
_REJOIN_S = 1.0  # until a lost replica, which is still a member, is tried again
_PATIENCE_S = 5.0  # without a token, at least, before a replica is asked whether it is still at it
_STUCK_S = 120.0  # without a step after which a replica that says so is not believed; steps may take a minute


@dataclass(slots=True, eq=False)
class _Link:
    """An open connection to one replica and the requests that run over it."""

    name: str
    client: EngineClient
    profile: SchedulingProfile
    arrivals: "dict[str, _Arrivals]" = field(default_factory=dict)  # by request
    is_open: bool = False
    is_leaving: bool = False


_Arrivals: TypeAlias = asyncio.Queue[tuple[_Link, TokenDelta | ReplicaLost]]


@dataclass(slots=True, eq=False)
class _Flight:
    """One placement of a request: the replicas that work on it now, and what comes from them."""

    submission: Submission
    placement: Placement
    decode: _Link
    prefill: _Link | None
    arrivals: _Arrivals = field(default_factory=asyncio.Queue)
    early: list[tuple[_Link, TokenDelta]] = field(default_factory=list)  # came before a token that goes before them
    patience: float = _PATIENCE_S  # seconds until the next token, before it is asked for
    is_computed: bool = False  # its prompt
    turns: tuple[int | None, float] | None = None  # what the replica answered when it was asked, and when first so

    @property
    def links(self) -> list[_Link]:
        return [self.decode, *([self.prefill] if self.prefill is not None else [])]

    def legs(self) -> list[tuple[_Link, Submission]]:
        """What each replica is told."""
        if self.prefill is None:
            return [(self.decode, self.submission)]
        receive = replace(self.submission, leg=Leg.RECEIVE, peer=self.prefill.profile.peer)
        send = replace(self.submission, leg=Leg.SEND, peer=self.decode.profile.peer)
        return [(self.decode, receive), (self.prefill, send)]


class Dispatcher:
    """Serves requests on the replicas it is told of. One per ingress; belongs to one event loop."""

    def __init__(
        self,
        model_name: str,
        router: RouterConfig | None = None,
        ingress_texts: Callable[[], Awaitable[Mapping[str, str]]] | None = None,
    ) -> None:
        """`ingress_texts` fetches the metrics of all ingresses, by name; None: this is the only one."""
        self._model_name = model_name
        self._created = int(time.time())
        self._card: ModelCard | None = None
        self._members: dict[str, tuple[EngineClient, SchedulingProfile]] = {}  # as Serve has it
        self._links: dict[str, _Link] = {}  # to those that take new requests
        self.fleet = Fleet(router or RouterConfig.model_validate({}))  # those of them that are up
        self._dead: deque[bytes] = deque(maxlen=_DEAD_PEERS)  # whose KV transfers are over for good
        self.deadlines: dict[str, float] = {}
        """By request in flight: when it is looked after though nothing is heard of it; `time.monotonic` seconds."""
        self._background: set[asyncio.Task[Any]] = set()
        self.metrics = _IngressMetrics()
        self._ingress_texts = ingress_texts or self._own_text

    # -- the story ---------------------------------------------------------------------------------------------------

    async def generate(self, submission: Submission) -> AsyncIterator[TokenDelta]:
        """The request's tokens, one delta per engine step. The first delta is empty: a replica has taken the request,
        and none will refuse it any more. Closing the iterator early, at any moment, aborts it.

        A replica that is lost on the way is replaced: another goes on after the tokens that were already given out.
        They are never repeated or changed, since each depends on the seed and its position alone.

        Raises:
            ValueError: the replica refuses the request; the message names the field.
            Overloaded: no replica can give it its first token in time.
            ReplicaLost: none is up, or one after the other was lost.
        """
        watch = self.metrics.start(submission)
        self.deadlines[submission.id] = watch.last + _SILENCE_S
        output: list[int] = []
        lost: set[str] = set()
        try:
            for epoch in range(_MOST_PLACEMENTS):
                flight = await self._place(replace(submission, epoch=epoch, output_token_ids=tuple(output)), lost)
                watch.placed(flight.placement)
                ended_at: _Link | None = None
                is_stopped = False
                try:
                    if epoch == 0:
                        yield TokenDelta(submission.id, [])
                    while ended_at is None:
                        link, delta = await self._next(flight, len(output))
                        ended_at = link if delta.finish_reason is not None else None
                        if delta.finish_reason is FinishReason.ERROR:
                            raise RuntimeError(delta.error)
                        fresh = _unseen(delta, len(output))
                        output += fresh.token_ids
                        watch.tokens(len(fresh.token_ids))
                        yield fresh
                    return
                except ReplicaLost as loss:
                    if epoch + 1 == _MOST_PLACEMENTS:
                        raise
                    self.metrics.placed_again.inc()
                    logger.warning("request %s goes on elsewhere: %s", submission.id, loss)
                    lost.add(flight.decode.name)
                    await self._stop(flight.links, submission)
                    is_stopped = True
                finally:
                    self.fleet.settle(submission.id)
                    for link in flight.links:
                        self._part(link, submission, is_running=link is not ended_at and not is_stopped)
        except Overloaded:
            watch.refused()
            raise
        finally:
            self.deadlines.pop(submission.id, None)
            watch.end()

    async def _next(self, flight: _Flight, num_seen: int) -> tuple[_Link, TokenDelta]:
        """What comes after the first `num_seen` tokens of the output, from whom. That the replica of the prompt is
        done, or lost, is no end: the other has its pages, or goes on with those that had arrived. Only where the first
        token, which comes from the replica of the prompt, went with it, the placement is lost too.
        """
        while True:
            if flight.early and flight.early[0][1].first <= num_seen:
                return flight.early.pop(0)
            if flight.early and flight.prefill is None:
                raise ReplicaLost("the first token was lost with the replica that had computed it")
            try:
                async with self._deadline(flight.submission, flight.patience):
                    link, item = await flight.arrivals.get()
            except TimeoutError:
                await self._ask(flight)
                continue
            if isinstance(item, TokenDelta) and item.epoch != flight.submission.epoch:
                continue  # on its way when that placement was given up
            if isinstance(item, ReplicaLost):
                if link is not flight.prefill:
                    raise item
                flight.prefill = None
            elif item.finish_reason is FinishReason.SHIPPED:
                flight.prefill = None
                self._part(link, flight.submission, is_running=False)
            else:
                if not flight.is_computed:
                    flight.is_computed = True
                    flight.patience = max(_PATIENCE_S, 20 * flight.placement.predicted_gap)
                    self.fleet.first_token(flight.submission.id, time.monotonic())
                if item.first <= num_seen:
                    return link, item
                flight.early.append((link, item))

    async def _ask(self, flight: _Flight) -> None:
        """The deadline of a request has passed: its replica must say that it still has it. Raises ReplicaLost if it has
        not, and if it has made no step for so long that it will not make another."""
        request_id, link, now = flight.submission.id, flight.decode, time.monotonic()
        try:
            async with self._deadline(flight.submission, _ANSWER_S):
                turns = await link.client.progress(request_id)
        except Exception as error:
            raise ReplicaLost(f"replica {link.name} does not say what became of {request_id}") from error
        if flight.turns is None or flight.turns[0] != turns:
            flight.turns = turns, now
            if turns is None:  # its last word may be on the way
                flight.patience = _PATIENCE_S
        elif turns is None:
            raise ReplicaLost(f"replica {link.name} does not have {request_id} any more")
        elif now - flight.turns[1] > _STUCK_S:
            raise ReplicaLost(f"replica {link.name} has made no step for {now - flight.turns[1]:.0f} s")

    def _deadline(self, submission: Submission, seconds: float) -> asyncio.Timeout:
        """For whatever is awaited of a request."""
        self.deadlines[submission.id] = time.monotonic() + seconds
        return asyncio.timeout(seconds)

    async def _place(self, submission: Submission, lost: Collection[str]) -> _Flight:
        """Gives the request to the replicas that are best for it; where one is overloaded, or does not answer, to the
        next best. If none takes it, raises the refusal that asks for the shortest wait. Those that it was `lost` at
        before come last."""
        refusals: dict[str, Overloaded | ReplicaLost] = {}
        if self._links and not self.ready():  # in an upgrade all that are up may be new, and have said nothing yet
            with contextlib.suppress(TimeoutError):
                async with self._deadline(submission, _ANSWER_S):
                    while self._links and not self.ready():
                        await asyncio.sleep(0.02)
        query = self._query(submission)
        while True:
            flight = self._choose(submission, query, refusals, lost)
            for link in flight.links:
                link.arrivals[submission.id] = flight.arrivals
            self.fleet.book(query, flight.placement, time.monotonic())
            submitting = [asyncio.ensure_future(self._submit(*leg)) for leg in flight.legs()]
            try:
                answers = await asyncio.gather(*submitting)
            except BaseException as error:
                for task in submitting:
                    task.cancel()
                self.fleet.settle(submission.id)
                for link in flight.links:  # for all that is known here it runs there
                    self._part(link, submission, is_running=not isinstance(error, ValueError) or len(submitting) > 1)
                raise
            for link, answer in zip(flight.links, answers, strict=True):
                if isinstance(answer, int):
                    self.fleet.taken(submission.id, link.name, answer)
                else:
                    refusals[link.name] = answer
            if not any(link.name in refusals for link in flight.links):
                return flight
            self.fleet.settle(submission.id)
            await self._stop([link for link in flight.links if link.name not in refusals], submission)
            for link in flight.links:
                self._part(link, submission, is_running=False)

    def _query(self, submission: Submission) -> Query:
        """What of a request decides where it goes."""
        token_ids = [*submission.prompt_token_ids, *submission.output_token_ids]
        hashes: Sequence[PageHash] = ()
        if submission.sampling.prompt_logprobs is None:  # else nothing cached is of use: all logits are wanted
            hashes = hash_pages(token_ids, self.fleet.page_size, submission.cache_salt)
        return Query(
            submission.id,
            len(token_ids),
            hashes,
            submission.slo_class,
            max(submission.sampling.max_tokens - len(submission.output_token_ids), 0),
            may_ship=submission.epoch < _MOST_PLACEMENTS - 2,
            may_refuse=not submission.output_token_ids,
        )

    def _choose(
        self, submission: Submission, query: Query, refusals: Mapping[str, Exception], lost: Collection[str]
    ) -> _Flight:
        """The best placement on replicas that have not refused."""
        overloaded = [refusal for refusal in refusals.values() if isinstance(refusal, Overloaded)]
        try:
            try:
                placement = self.fleet.choose(query, time.monotonic(), {*refusals, *lost})
            except LookupError:
                placement = self.fleet.choose(query, time.monotonic(), refusals)
        except Overloaded as refusal:
            raise min([*overloaded, refusal], key=lambda it: it.retry_after) from None
        except LookupError:
            if overloaded:
                raise min(overloaded, key=lambda it: it.retry_after) from None
            if refusals:
                raise next(iter(refusals.values())) from None
            raise ReplicaLost("no replica is up; the model may still be loading") from None
        self.metrics.placements.labels(placement.reason).inc()
        prefill = self._links[placement.prefill] if placement.prefill is not None else None
        patience = max(_PATIENCE_S, 2 * placement.predicted_ttft)
        return _Flight(submission, placement, self._links[placement.decode], prefill, patience=patience)

    async def _stop(self, links: Sequence[_Link], submission: Submission) -> None:
        """Ends a placement before the next begins: an abort that came late would end that one."""
        aborting = (link.client.abort([submission.id]) for link in links if link.is_open)
        with contextlib.suppress(TimeoutError):
            async with self._deadline(submission, _ANSWER_S):
                await asyncio.gather(*aborting, return_exceptions=True)

    def _part(self, link: _Link, submission: Submission, *, is_running: bool) -> None:
        """Request and replica have nothing more to do with each other."""
        link.arrivals.pop(submission.id, None)
        if is_running and link.is_open:
            self._spawn(link.client.abort([submission.id]))
        self._close_if_done(link)

    async def _submit(self, link: _Link, submission: Submission) -> int | Overloaded | ReplicaLost:
        """Why the replica does not take it; or after which of its live profiles it has. ValueError: none would."""
        try:
            async with self._deadline(submission, _SILENCE_S):
                return await link.client.submit(submission)
        except Overloaded as refusal:
            return refusal
        except (ValueError, asyncio.CancelledError):
            raise
        except Exception as error:
            loss = ReplicaLost(f"replica {link.name} did not take the request: {error}")
            loss.__cause__ = error
            return loss

    # -- replicas come and go ----------------------------------------------------------------------------------------

    def join(self, name: str, client: EngineClient, profile: SchedulingProfile) -> None:
        """A replica is up, and this is what it advertises."""
        if name in self._members:
            return
        self._members[name] = client, profile
        self._card = ModelCard(self._model_name, self._created, profile.max_model_len, profile.vocab_size)
        self._open(name)

    def leave(self, name: str) -> None:
        """A replica takes no new requests. Its running ones go on for as long as it lives."""
        _, profile = self._members.pop(name, (None, None))
        link = self._links.pop(name, None)
        if link is None and profile is not None:  # it was lost, and Serve has given it up too
            self._tell_dead(profile.peer)
        if link is not None:
            self.fleet.leave(name)
            link.is_leaving = True
            self._close_if_done(link)

    async def close(self) -> None:
        """Leaves every replica; what runs there for this ingress is aborted."""
        links = list(self._links.values())
        self._members.clear()
        await asyncio.gather(*(link.client.close() for link in links), return_exceptions=True)

    def _close_if_done(self, link: _Link) -> None:
        """An open stream counts as a running request: left open, it would hold up the replica's drain."""
        if link.is_leaving and not link.arrivals and link.is_open:
            self._spawn(link.client.close())

    def _open(self, name: str) -> None:
        link = self._links[name] = _Link(name, *self._members[name])
        self._spawn(self._follow(link))

    async def _follow(self, link: _Link) -> None:
        """Hands every message of a replica's stream to the requests it is for, until the stream ends."""
        loss = ReplicaLost(f"replica {link.name} ended its stream")
        stream = link.client.messages()
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    message = await anext(stream)
                if not link.is_open:
                    self._opened(link)
                if message.live is not None:
                    self.fleet.hear(link.name, message.live, time.monotonic())
                for changes in message.pages:
                    self.fleet.hear_pages(link.name, changes)
                for delta in message.deltas:
                    arrivals = link.arrivals.get(delta.request_id)
                    if arrivals is not None:
                        arrivals.put_nowait((link, delta))
        except StopAsyncIteration:
            pass
        except TimeoutError:
            loss = ReplicaLost(f"replica {link.name} has been silent for {_SILENCE_S:.0f} s")
        except ReplicaLost as known:
            loss = known
        except Exception as cause:
            loss = ReplicaLost(f"replica {link.name} is lost: {type(cause).__name__}")
            loss.__cause__ = cause
        finally:
            self._lost(link, loss)

    def _opened(self, link: _Link) -> None:
        link.is_open = True
        for peer in self._dead:
            self._spawn(link.client.peer_dead(peer))
        if self._links.get(link.name) is link:  # it may have left already
            self.fleet.join(link.name, link.profile, time.monotonic())

    def _lost(self, link: _Link, loss: ReplicaLost) -> None:
        link.is_open = False
        for arrivals in link.arrivals.values():
            arrivals.put_nowait((link, loss))
        if self._links.get(link.name) is link:
            del self._links[link.name]
            self.fleet.leave(link.name)
        if isinstance(loss, ReplicaDead):
            self._tell_dead(link.profile.peer)
        if link.name in self._members:
            logger.warning("%s", loss)
            self._spawn(self._rejoin(link.name))

    def _tell_dead(self, peer: bytes) -> None:
        """Every replica hears that a process has ended: it may keep pages from a writer that nobody else asks about
        any more, whose request was aborted before."""
        if peer and peer not in self._dead:
            self._dead.append(peer)
            for link in self._links.values():
                if link.is_open:
                    self._spawn(link.client.peer_dead(peer))

    async def _rejoin(self, name: str) -> None:
        """Serve says when a member is gone for good; until then it may only have been out of reach."""
        await asyncio.sleep(_REJOIN_S)
        if name in self._members and name not in self._links:
            self._open(name)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs `work` outside the request that asked for it: Serve would cancel its calls when that client leaves."""
        task = contextvars.Context().run(asyncio.get_running_loop().create_task, work)
        self._background.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("a background call to a replica failed: %s", task.exception())

    # -- what the outside may ask ------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelCard:
        if self._card is None:
            raise ReplicaLost("no replica has been up yet; the model may still be loading")
        return self._card

    def ready(self) -> bool:
        return any(link.is_open for link in self._links.values())

    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """What became of all that the client's request `request_id` led to, on whichever replicas, oldest first.
        `tenant`: only what is its; None: everyone's."""
        found = await self._ask_all(lambda client: client.timelines(request_id, tenant))
        return sorted(found, key=lambda timeline: timeline["arrived"])

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        """The requests in flight on all replicas, oldest first."""
        found = await self._ask_all(lambda client: client.live_requests(tenant))
        return sorted(found, key=lambda request: request["arrived"])

    async def replicas(self, seen: Mapping[str, int], tenant: str | None) -> list[dict[str, Any]]:
        """How every replica does, by name, and its steps after those that were `seen`, by its incarnation."""
        answers = await self._answers(lambda client: client.watched(seen, tenant))
        return [{"replica": name, **answer} for name, answer in sorted(answers.items())]

    async def _ask_all(self, ask: Callable[[EngineClient], Awaitable[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        """What every replica that can answer says, each with its name."""
        answers = await self._answers(ask)
        return [{"replica": name, **item} for name, answer in answers.items() for item in answer]

    async def metrics_text(self) -> str:
        """Prometheus text of the whole deployment: every replica's samples, labelled `replica`, and every ingress's,
        labelled `ingress`."""
        texts = await self._answers(lambda client: client.metrics_text())
        return merge_metrics(texts, "replica") + merge_metrics(await self._ingress_texts(), "ingress")

    async def _answers(self, ask: Callable[[EngineClient], Awaitable[_Answer]]) -> dict[str, _Answer]:
        """What each replica says, by name; one that hangs or fails is left out, and keeps nobody waiting."""
        links = [link for link in self._links.values() if link.is_open]
        asked = (asyncio.wait_for(ask(link.client), _ANSWER_S) for link in links)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {
            link.name: answer
            for link, answer in zip(links, answers, strict=True)
            if not isinstance(answer, BaseException)
        }

    async def _own_text(self) -> dict[str, str]:
        return {"0": self.metrics.text()}


def _unseen(delta: TokenDelta, num_seen: int) -> TokenDelta:
    """What a delta has beyond the first `num_seen` tokens of the output."""
    seen = min(max(num_seen - delta.first, 0), len(delta.token_ids))
    if not seen:
        return delta
    logprobs = delta.logprobs[seen:] if delta.logprobs is not None else None
    return replace(delta, token_ids=delta.token_ids[seen:], first=delta.first + seen, logprobs=logprobs)


def merge_metrics(texts: Mapping[str, str], label: str) -> str:
    """One exposition out of several: every sample gains `label`, its value the text's name; every family is described
    once."""
    families: dict[str, list[str]] = {}
    for source, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                families.setdefault(name, [line])
            elif line.startswith("# TYPE "):
                if len(families[name]) == 1:
                    families[name].append(line)
            elif line:
                families[name].append(_with_label(line, label, source))
    return "".join(line + "\n" for lines in families.values() for line in lines)


def _with_label(sample: str, label: str, value: str) -> str:
    metric, _, number = sample.rpartition(" ")
    if metric.endswith("}"):
        return f'{metric[:-1]},{label}="{value}"}} {number}'
    return f'{metric}{{{label}="{value}"}} {number}'


_TTFT = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAP = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)


_ERROR = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)


class _IngressMetrics:
    """What clients of this ingress experience."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.in_flight = Gauge("crossdock_ingress_requests", "Requests in flight.", registry=registry)
        self.started = Counter("crossdock_ingress_requests_started", "Requests taken.", registry=registry)
        self.refused = Counter(
            "crossdock_ingress_requests_refused", "Requests answered 429.", ["slo_class"], registry=registry
        )
        self.placements = Counter(
            "crossdock_router_decisions", "Placements, by what decided them.", ["reason"], registry=registry
        )
        self.ttft_error = Histogram(
            "crossdock_router_ttft_relative_error",
            "|predicted - actual| / actual time to the first token, of requests placed once.",
            buckets=_ERROR,
            registry=registry,
        )
        self.placed_again = Counter(
            "crossdock_ingress_placed_again", "Requests that went on elsewhere: a replica was lost.", registry=registry
        )
        self.ttft = Histogram(
            "crossdock_ingress_time_to_first_token_seconds",
            "From submission to the first token, as this ingress sees it.",
            ["prompt_tokens", "slo_class"],
            buckets=_TTFT,
            registry=registry,
        )
        self.gap = Histogram(
            "crossdock_ingress_inter_token_seconds",
            "Between two tokens of a stream, as this ingress sees it.",
            ["slo_class"],
            buckets=_GAP,
            registry=registry,
        )

    def start(self, submission: Submission) -> "_Watch":
        self.in_flight.inc()
        self.started.inc()
        return _Watch(self, submission, self.gap.labels(submission.slo_class), time.monotonic())

    def text(self) -> str:
        return generate_latest(self.registry).decode()


@dataclass(slots=True)
class _Watch:
    """One request's."""

    metrics: _IngressMetrics
    submission: Submission
    gap: Histogram
    last: float
    has_first: bool = False
    predicted: float | None = None  # seconds until its first token; None: it was placed more than once
    num_placements: int = 0

    def placed(self, placement: Placement) -> None:
        self.num_placements += 1
        self.predicted = placement.predicted_ttft if self.num_placements == 1 else None

    def tokens(self, count: int) -> None:
        now = time.monotonic()
        if not self.has_first and self.predicted is not None:
            actual = now - self.last
            self.metrics.ttft_error.observe(abs(self.predicted - actual) / max(actual, 1e-6))
        if not self.has_first:
            bucket = prompt_length_bucket(len(self.submission.prompt_token_ids))
            self.metrics.ttft.labels(bucket, self.submission.slo_class).observe(now - self.last)
            self.has_first = True
        elif count:
            self.gap.observe((now - self.last) / count)
        self.last = now

    def refused(self) -> None:
        self.metrics.refused.labels(self.submission.slo_class).inc()

    def end(self) -> None:
        self.metrics.in_flight.dec()
