"""One simulated replica: the real scheduler and pages, and a clock where the model would be.

Works in the order of `EngineThread`: posted actions, then a step, then transfers. While no request comes or ends, steps
that are alike are taken at once (`Scheduler.advance`). That changes nothing but the time that the simulation takes.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp
from typing import Protocol, TypeAlias

import numpy as np

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.fleet import SimulatedPool
from crossdock.workers.report.advertise import Publisher
from crossdock.workers.schedule.batch import Batch, SampledToken
from crossdock.workers.schedule.pages import PagePool
from crossdock.workers.schedule.request import Request, TokenDelta
from crossdock.workers.schedule.scheduler import Scheduler

TOKEN = 2**32 - 1  # the token that every simulated model samples
_SAMPLED = SampledToken(TOKEN)

Action: TypeAlias = Callable[[float], None]
"""A function of the time, in seconds, at which it is called."""


class Observer(Protocol):
    """Receives the results of a replica's work."""

    def streamed(self, requests: Sequence[Request], times: Sequence[float]) -> None:
        """Each of the requests has made a token at each of the times."""

    def stepped(self, replica: "SimulatedReplica", batch: Batch, deltas: Sequence[TokenDelta], now: float) -> None:
        """A step has ended."""

    def scheduled(self, replica: "SimulatedReplica", batch: Batch, now: float) -> None:
        """A step begins that computes chunks of prompts."""

    def returned(self, replica: "SimulatedReplica", request: Request, now: float) -> None:
        """A request has ended here to make way for a more urgent one."""

    def granted(self, replica: "SimulatedReplica", request: Request, now: float) -> None:
        """There are pages for a prompt that another replica computes."""

    def published(self, replica: "SimulatedReplica", now: float) -> None:
        """A report of the replica to the routers is due."""


@dataclass(slots=True)
class Noise:
    """Random factors of the steps' seconds around their prediction: log-normal, with mean 1."""

    spread: float
    seed: tuple[int, int]  # of the simulation, and the replica's number
    _block: int = -1
    _factors: list[float] = field(default_factory=list)

    @property
    def overrun(self) -> float:
        """Return the 95th percentile of the factors, which a real replica measures: see `StepCostFit.overrun`."""
        return max(exp(1.645 * self.spread - self.spread**2 / 2), 1.0)

    def factor(self, step: int) -> float:
        """Return the factor of the step of that number: the same at every call, in any order."""
        if not self.spread:
            return 1.0
        block, place = divmod(step, 1024)
        if block != self._block:
            rng = np.random.default_rng([*self.seed, block])
            self._block, self._factors = block, rng.lognormal(-(self.spread**2) / 2, self.spread, 1024).tolist()
        return self._factors[place]


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica. All actions on it come in by `post`, and run between two steps."""

    name: str
    pool: SimulatedPool
    clock: Clock
    observer: Observer
    noise: Noise
    at_once: bool = True  # False: one step after the other, to compare with
    since: float = 0.0  # when it came up
    until: float | None = None  # when it died
    busy_s: float = 0.0
    num_steps: int = 0
    num_prefilled: int = 0  # prompt tokens computed
    num_decoded: int = 0
    step_s: float = 0.0  # of the last step
    scheduler: Scheduler = field(init=False)
    publisher: Publisher = field(init=False)
    _inbox: deque[Action] = field(default_factory=deque)
    _is_between: bool = False  # two steps
    _batch: Batch | None = None  # of the running step
    _ends: list[float] = field(default_factory=list)  # of the running step and those after it that are alike
    _started: float = 0.0  # when the running step did
    _version: int = 0  # of the plan that is in the clock

    def __post_init__(self) -> None:
        profile = self.pool.profile
        pages = PagePool(profile.num_pages, profile.page_size, self.pool.enable_prefix_caching)
        overrun = max(profile.overrun, self.noise.overrun)
        self.scheduler = Scheduler(self.pool.engine, pages, profile.max_model_len, cost=profile.cost, overrun=overrun)
        self.publisher = Publisher(self.scheduler, self.name)

    def post(self, action: Action, now: float) -> None:
        """Run `action` between two steps."""
        if self.until is not None:
            return
        self._inbox.append(action)
        if self._batch is not None:
            if len(self._ends) > 1:  # a stretch ends with the step that runs now
                self._pass(bisect_right(self._ends, now, hi=len(self._ends) - 1))
                self._plan(self._ends[:1])
        elif not self._is_between:
            self._go_round(now)

    def die(self, now: float) -> None:
        """End the replica: no event follows, not even the end of the running step."""
        if self._batch is not None:
            self._pass(bisect_right(self._ends, now, hi=len(self._ends) - 1))
            self.busy_s += now - self._started
        self.until = now

    def _go_round(self, now: float) -> None:
        self._is_between = True
        while True:
            while self._inbox:
                self._inbox.popleft()(now)
            self._grant(now)
            batch = self.scheduler.schedule(now) if self.scheduler.has_work else None
            self._take_returned(now)
            if not batch:
                self._after(now)
            if batch or not self._inbox:
                break
        self._is_between = False
        if batch:
            if batch.num_decodes < len(batch.scheduled):
                self.observer.scheduled(self, batch, now)
            self._begin(batch, now)

    def _begin(self, batch: Batch, now: float) -> None:
        self._batch = batch
        cost, step = self.pool.profile.cost, self.num_steps
        end = now + cost.seconds(batch.work) * self.noise.factor(step)
        ends = [end]
        more = self.scheduler.steady_steps(batch) - 1 if self.at_once else 0
        if more:
            due, num_streams = self.publisher.due, len(batch.scheduled)
            context = sum([part.start for part in batch.scheduled])
            while more and end < due:
                more, step, context = more - 1, step + 1, context + num_streams
                end += (cost.base + cost.decode_seconds(num_streams, context)) * self.noise.factor(step)
                ends.append(end)
        self._started = now
        self._plan(ends)

    def _plan(self, ends: list[float]) -> None:
        self._ends = ends
        self._version += 1
        self.clock.at(ends[-1], partial(self._end, self._version), is_step=True)

    def _pass(self, done: int) -> None:
        """Account for the first `done` of the steps in `_ends`; the next one is running."""
        if not done:
            return
        assert self._batch is not None
        ends, self._ends = self._ends[:done], self._ends[done:]
        for end in ends:  # one by one, as if they had been taken one by one: floats
            self.busy_s += end - self._started
            self._started = end
        requests = [part.request for part in self._batch.scheduled]
        self.observer.streamed(requests, ends)
        self.num_steps += done
        self.num_decoded += done * len(requests)
        tokens = dict.fromkeys([request.id for request in requests], [TOKEN] * done)
        self._batch = self.scheduler.advance(self._batch, tokens, ends)

    def _end(self, version: int, now: float) -> None:
        if version != self._version or self.until is not None:
            return  # the plan has changed, or the replica has died
        self._pass(len(self._ends) - 1)
        batch, self._batch, self._is_between = self._batch, None, True
        assert batch is not None
        self.step_s = now - self._started
        self.busy_s += self.step_s
        self.num_steps += 1
        self.num_decoded += batch.num_decodes
        self.num_prefilled += sum(part.num_tokens for part in batch.scheduled[batch.num_decodes :])
        sampled = dict.fromkeys([part.request.id for part in batch.scheduled if part.samples], _SAMPLED)
        deltas = self.scheduler.update(batch, sampled, now)
        self.observer.stepped(self, batch, deltas, now)
        self._after(now)
        self._go_round(now)

    def _grant(self, now: float) -> None:
        for request in self.scheduler.grant(now):
            self.observer.granted(self, request, now)
        self._take_returned(now)

    def _take_returned(self, now: float) -> None:
        for request in self.scheduler.take_returned():
            self.observer.returned(self, request, now)

    def _after(self, now: float) -> None:
        self._grant(now)
        if self.publisher.is_due(now):
            self.observer.published(self, now)
