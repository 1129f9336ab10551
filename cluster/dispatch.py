"""The life of a request, seen from an ingress: choose a replica, submit, follow its tokens, end it wherever it is."""

import asyncio
import contextvars
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from crossdock.router.placement import Bookings, choose
from crossdock.workers.profile import SchedulingProfile
from crossdock.workers.request import FinishReason, Overloaded, Submission, TokenDelta
from crossdock.workers.timeline import prompt_length_bucket

logger = logging.getLogger("ray.serve")


class ReplicaLost(RuntimeError):
    """The replica that served a request is gone, or none is up."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients may know of the served model."""

    name: str
    created: int  # Unix seconds
    max_model_len: int  # tokens
    vocab_size: int


class EngineClient(Protocol):
    """One replica as a dispatcher sees it: behind a Serve handle, or in this process."""

    def tokens(self) -> AsyncIterator[list[TokenDelta]]: ...
    async def submit(self, submission: Submission) -> None: ...
    async def abort(self, request_ids: Sequence[str]) -> None: ...
    async def close(self) -> None: ...
    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]: ...
    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]: ...
    async def metrics_text(self) -> str: ...


_Queue: TypeAlias = asyncio.Queue[TokenDelta | Exception]


@dataclass(slots=True)
class _Link:
    """An open connection to one replica and the requests that run over it."""

    client: EngineClient
    profile: SchedulingProfile
    bookings: Bookings = field(default_factory=Bookings)
    queues: dict[str, _Queue] = field(default_factory=dict)
    pump: asyncio.Task[None] | None = None
    is_open: bool = False
    is_leaving: bool = False


class Dispatcher:
    """Serves requests on the replicas it is told of. One per ingress; belongs to one event loop."""

    def __init__(
        self, model_name: str, ingress_texts: Callable[[], Awaitable[Mapping[str, str]]] | None = None
    ) -> None:
        """`ingress_texts` fetches the metrics of all ingresses, by name; None: this is the only one."""
        self._model_name = model_name
        self._created = int(time.time())
        self._card: ModelCard | None = None
        self._links: dict[str, _Link] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self.metrics = _IngressMetrics()
        self._ingress_texts = ingress_texts or self._own_text

    # -- the story ---------------------------------------------------------------------------------------------------

    async def generate(self, submission: Submission) -> AsyncIterator[TokenDelta]:
        """The request's tokens, one delta per engine step. The first delta is empty: a replica has taken the request,
        and none will refuse it any more. Closing the iterator early, at any moment, aborts it.

        Raises:
            ValueError: the replica refuses the request; the message names the field.
            Overloaded: no replica can give it its first token in time.
            ReplicaLost: its replica died, or none is up.
        """
        watch = self.metrics.start(submission)
        link: _Link | None = None
        ended = False
        try:
            link, queue = await self._place(submission)
            yield TokenDelta(submission.id, [])
            while not ended:
                delta = await queue.get()
                if isinstance(delta, Exception):
                    ended = True
                    raise delta
                ended = delta.finish_reason is not None
                if delta.finish_reason is FinishReason.ERROR:
                    raise RuntimeError(delta.error)
                link.bookings.first_token(submission.id)
                watch.tokens(len(delta.token_ids))
                yield delta
        except Overloaded:
            watch.refused()
            raise
        finally:
            watch.end()
            if link is not None:
                self._part(link, submission, is_running=not ended)

    async def _place(self, submission: Submission) -> tuple[_Link, _Queue]:
        """Gives the request to the replica that is best for it; where that one is overloaded, to the next best. If
        all are, raises the refusal that asks for the shortest wait."""
        refusals: dict[str, Overloaded] = {}
        while True:
            name = self._choose(submission, refusals)
            if name is None:
                raise min(refusals.values(), key=lambda refusal: refusal.retry_after)
            link, queue = self._links[name], _Queue()
            link.queues[submission.id] = queue
            link.bookings.book(submission.id, len(submission.prompt_token_ids))
            try:
                await self._submit(link, submission)
            except Overloaded as refusal:
                refusals[name] = refusal
                self._part(link, submission, is_running=False)
            except ValueError:
                self._part(link, submission, is_running=False)
                raise
            except BaseException:
                self._part(link, submission, is_running=True)  # for all that is known here
                raise
            else:
                return link, queue

    def _choose(self, submission: Submission, refusals: Mapping[str, Overloaded]) -> str | None:
        """The best replica of those that have not refused; None if all have."""
        candidates = {
            name: (link.profile, link.bookings)
            for name, link in self._links.items()
            if link.is_open and name not in refusals
        }
        if not candidates:
            if refusals:
                return None
            raise ReplicaLost("no replica is up; the model may still be loading")
        return choose(candidates, len(submission.prompt_token_ids))

    def _part(self, link: _Link, submission: Submission, *, is_running: bool) -> None:
        """Request and replica have nothing more to do with each other."""
        link.bookings.settle(submission.id)
        link.queues.pop(submission.id, None)
        if is_running and link.is_open:
            self._spawn(link.client.abort([submission.id]))
        self._close_if_done(link)

    async def _submit(self, link: _Link, submission: Submission) -> None:
        try:
            await link.client.submit(submission)
        except (ValueError, Overloaded, asyncio.CancelledError):
            raise
        except Exception as error:
            raise ReplicaLost(f"the replica did not take the request: {error}") from error

    # -- replicas come and go ----------------------------------------------------------------------------------------

    def join(self, name: str, client: EngineClient, profile: SchedulingProfile) -> None:
        """A replica is up, and this is what it advertises."""
        if name in self._links:
            return
        self._card = ModelCard(self._model_name, self._created, profile.max_model_len, profile.vocab_size)
        link = self._links[name] = _Link(client, profile)
        link.pump = self._spawn(self._follow(name, link))

    def leave(self, name: str) -> None:
        """A replica takes no new requests. Its running ones go on for as long as it lives."""
        link = self._links.pop(name)
        link.is_leaving = True
        self._close_if_done(link)

    def names(self) -> set[str]:
        return set(self._links)

    async def close(self) -> None:
        """Leaves every replica; what runs there for this ingress is aborted."""
        links = list(self._links.values())
        await asyncio.gather(*(link.client.close() for link in links), return_exceptions=True)

    def _close_if_done(self, link: _Link) -> None:
        """An open stream counts as a running request: left open, it would hold up the replica's drain."""
        if link.is_leaving and not link.queues and link.is_open:
            self._spawn(link.client.close())

    async def _follow(self, name: str, link: _Link) -> None:
        """Hands every message of a replica's stream to the requests it is for, until the stream ends."""
        error: Exception = ReplicaLost(f"replica {name} ended its stream")
        try:
            async for deltas in link.client.tokens():
                link.is_open = True
                for delta in deltas:
                    queue = link.queues.get(delta.request_id)
                    if queue is not None:
                        queue.put_nowait(delta)
        except Exception as cause:
            logger.warning("replica %s is lost: %s", name, cause)
            error = ReplicaLost(f"replica {name} is lost: {type(cause).__name__}")
        finally:
            link.is_open = False
            self._links.pop(name, None)
            for queue in link.queues.values():
                queue.put_nowait(error)

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

    async def _ask_all(self, ask: Callable[[EngineClient], Awaitable[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        """What every replica that can answer says, each with its name."""
        names = [name for name, link in self._links.items() if link.is_open]
        answers = await asyncio.gather(*(ask(self._links[name].client) for name in names), return_exceptions=True)
        return [
            {"replica": name, **item}
            for name, answer in zip(names, answers, strict=True)
            if isinstance(answer, list)
            for item in answer
        ]

    async def metrics_text(self) -> str:
        """Prometheus text of the whole deployment: every replica's samples, labelled `replica`, and every ingress's,
        labelled `ingress`."""
        names = [name for name, link in self._links.items() if link.is_open]
        texts = await asyncio.gather(
            *(self._links[name].client.metrics_text() for name in names), return_exceptions=True
        )
        parts = {name: text for name, text in zip(names, texts, strict=True) if isinstance(text, str)}
        return merge_metrics(parts, "replica") + merge_metrics(await self._ingress_texts(), "ingress")

    async def _own_text(self) -> dict[str, str]:
        return {"0": self.metrics.text()}


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


class _IngressMetrics:
    """What clients of this ingress experience."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.in_flight = Gauge("crossdock_ingress_requests", "Requests in flight.", registry=registry)
        self.started = Counter("crossdock_ingress_requests_started", "Requests taken.", registry=registry)
        self.refused = Counter(
            "crossdock_ingress_requests_refused", "Requests answered 429.", ["slo_class"], registry=registry
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

    def tokens(self, count: int) -> None:
        now = time.monotonic()
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
