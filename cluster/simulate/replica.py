"""One simulated replica: the real scheduler and pages, and a clock where the model would be.

Works in the order of `EngineThread`: posted actions, then a step, then transfers. A replica that runs ahead schedules a
step when the one before it begins. While no request comes or ends, steps that are alike are taken at once
(fast_forward.py). That changes nothing but the time that the simulation takes.
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
from crossdock.cluster.simulate.fleet import SimulatedAdapters, SimulatedPool
from crossdock.cluster.simulate.tiers import SimulatedTiers
from crossdock.workers.report.publisher import Publisher
from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.cost.stages import Stages
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.fast_forward import advance, steady_steps
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.request.request import Request, TokenDelta, adapter_work
from crossdock.workers.schedule.scheduler import Scheduler

TOKEN = 2**32 - 1  # the token that every simulated model samples
_SAMPLED = SampledToken(TOKEN)
_ROWS = 100_000  # of embeddings, where the profile does not say how many a replica keeps
_DRAFT_SEED = 1  # sets their random numbers apart from those of noise

Action: TypeAlias = Callable[[float], None]
"""A function of the time, in seconds, at which it is called."""


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


@dataclass(slots=True)
class DrawnDrafts:
    """Draws how many drafts are accepted, each with the same probability if all before it are."""

    probability: float
    seed: tuple[int, int]  # of the simulation, and the replica's number
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng([*self.seed, _DRAFT_SEED])

    def sampled(self, part: Scheduled) -> SampledToken:
        """Return the token that the step sampled for a part."""
        if not part.drafts:
            return _SAMPLED
        is_rejected = self._random.random(len(part.drafts)) >= self.probability
        num_accepted = int(is_rejected.argmax()) if is_rejected.any() else len(part.drafts)
        return SampledToken(TOKEN, accepted=[_SAMPLED] * num_accepted)


class Observer(Protocol):
    """Gets the results of a replica's work: the simulation."""

    def scheduled(self, replica: "SimulatedReplica", batch: Batch, now: float) -> None:
        """Note that a step begins."""

    def streamed(self, requests: Sequence[Request], times: Sequence[float]) -> None:
        """Note that each of the requests has made a token at each of the times."""

    def stepped(self, replica: "SimulatedReplica", batch: Batch, deltas: Sequence[TokenDelta], now: float) -> None:
        """Note that a step has ended."""

    def granted(self, replica: "SimulatedReplica", granted: Request, now: float) -> None:
        """Note that there are pages for a prompt that another replica computes."""

    def returned(self, replica: "SimulatedReplica", returned: Request, now: float) -> None:
        """Note that a request has ended on the replica to make way for a more urgent one."""

    def published(self, replica: "SimulatedReplica", now: float) -> None:
        """Report the replica's live profile to the routers and the scaler."""


@dataclass(slots=True)
class _Flight:
    """A step that has begun and not ended. Without a pipeline, also the steps behind it that are alike."""

    batch: Batch
    ends: list[float]


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica. All actions on it come in by `post`, and run between two steps."""

    name: str
    pool: SimulatedPool
    clock: Clock
    observer: "Observer"  # gets the results of its work
    noise: Noise
    publish_s: float  # from one live profile to the next while requests come and go, at least
    at_once: bool = True  # False: one step after the other, to compare with
    adapters: SimulatedAdapters = field(default_factory=lambda: SimulatedAdapters.model_validate({}))
    since: float = 0.0  # when it came up
    until: float | None = None  # when it died
    takes_requests: bool = True  # False: the scaler has given it up
    busy_s: float = 0.0
    num_steps: int = 0
    num_prefilled: int = 0  # prompt tokens computed
    num_decoded: int = 0
    step_s: float = 0.0  # of the last step, without the time before the one before it ended
    tiers: SimulatedTiers = field(init=False)
    scheduler: Scheduler = field(init=False)
    publisher: Publisher = field(init=False)
    _inbox: deque[tuple[Action, str | None]] = field(default_factory=deque)  # with the request that an action ends
    _is_between: bool = False  # two steps
    _flights: deque[_Flight] = field(default_factory=deque)  # oldest first
    _stages: Stages = field(init=False)
    _is_ahead: bool = field(init=False)  # a step is scheduled while the one before it runs
    _drafts: DrawnDrafts = field(init=False)
    _since: float = 0.0  # when the oldest step in flight began, or the step before it ended
    _version: int = 0  # of the plan that is in the clock

    def __post_init__(self) -> None:
        profile = self.pool.profile
        speculative = self.pool.speculative_config
        sizes = (profile.num_pages, profile.page_size)
        windows = profile.windows
        state_pages = profile.state_pages
        self.tiers = SimulatedTiers(profile, self.clock, partial(self.post, self._advance_loads))
        on_evict = self.tiers.evicted if self.tiers.tiers.tiers else None
        pages = PagePool(*sizes, self.pool.enable_prefix_caching, windows, state_pages, on_evict)
        overrun = max(profile.overrun, self.noise.overrun)
        depth = profile.pipeline_parallel_size
        self._stages = Stages.of(depth, profile.interval_share)
        capacity = profile.encoder_tokens or _ROWS
        encoder = (profile.encoder_cost, profile.keeps_items_whole)
        encoding = Encoding(capacity, *encoder)
        self.scheduler = Scheduler(
            self.pool.engine,
            pages,
            profile.max_model_len,
            cost=profile.cost,
            overrun=overrun,
            depth=depth,
            interval_share=self._stages.interval_share,
            drafting=DraftPolicy(speculative) if speculative is not None else None,
            encoding=encoding,
            tiers=self.tiers.tiers,
            max_loras=self.adapters.slots if self.adapters.count else 0,
        )
        self._is_ahead = profile.runs_ahead and depth == 1 and speculative is None
        self._drafts = DrawnDrafts(self.pool.draft_acceptance, self.noise.seed)
        self.publisher = Publisher(self.scheduler, self.name, self.publish_s)

    def post(self, action: Action, now: float, ends: str | None = None) -> None:
        """Run `action` between two steps. `ends`: the request that `action` ends: no step in flight may compute it."""
        if self.until is not None:
            return
        self._inbox.append((action, ends))
        if self._flights:
            flight = self._flights[0]
            is_fast_forward = len(flight.ends) > 1
            if is_fast_forward:  # it ends with the step that runs now
                self._pass(flight, bisect_right(flight.ends, now, hi=len(flight.ends) - 1))
                flight.ends = flight.ends[:1]
            if self._is_ahead and len(self._flights) == 1:
                self._begin_ahead(now)
            if is_fast_forward:
                self._plan()
        elif not self._is_between:
            self._go_round(now)

    def die(self, now: float) -> None:
        """End the replica: no event follows, not even the end of the running step."""
        if self._flights:
            flight = self._flights[0]
            self._pass(flight, bisect_right(flight.ends, now, hi=len(flight.ends) - 1))
            self.busy_s += now - self._since
        self.until = now

    def _go_round(self, now: float) -> None:
        self._is_between = True
        while True:
            while self._inbox and not self._must_wait(self._inbox[0][1]):
                self._inbox.popleft()[0](now)
            self._load_adapters(now)
            if self._is_ahead:  # every live replica reports here; simulations of others keep their figures
                self._publish(now)
            self._grant(now)
            if not self._inbox:
                self._begin_steps(now)
            if not self._flights:
                self._after(now)
            if self._flights or not self._inbox:
                break
        self._is_between = False
        if self._flights:
            self._plan()

    def _load_adapters(self, now: float) -> None:
        for change in self.scheduler.adapters_to_load(now):
            self.clock.at(now + self.adapters.load_s, partial(self._loaded, change.loads.fingerprint))

    def _loaded(self, adapter: str, now: float) -> None:
        def end(_: float) -> None:
            self.scheduler.adapters.end(adapter, self.adapters.load_s)

        self.post(end, now)

    def _must_wait(self, ends: str | None) -> bool:
        """Return whether a step in flight computes the request that an action ends. Then no other step begins first."""
        return any(part.request.id == ends for flight in self._flights for part in flight.batch.scheduled)

    def _begin_steps(self, now: float) -> None:
        while len(self._flights) < len(self._stages.shares) and self.scheduler.table.has_work:
            self._advance_loads(now)
            streams = self.scheduler.choose_streams(now)
            drafts = {name: [TOKEN] * count for name, count in streams.wanted_drafts.items()}
            batch = self.scheduler.schedule(now, drafts, streams)
            if not self._flights:
                self._since = now
            self._take(batch, now, now)
            if not batch:
                return
        if self._is_ahead and len(self._flights) == 1 and not self._fast_forward(self._flights[0]):
            self._begin_ahead(now)

    def _begin_ahead(self, now: float) -> None:
        """Schedule the step behind the one in flight, as `Engine.begin_step` does."""
        flight = self._flights[0]
        table = self.scheduler.table
        if table.needs_preemption:
            return
        ends = flight.ends[-1]
        with assume_ended(table, flight.batch, ends):
            batch = self.scheduler.schedule(ends)
        self._take(batch, ends, now)

    def _take(self, batch: Batch, begins: float, now: float) -> None:
        """Do what was scheduled now: its loads, and its step, if there is one, which begins at `begins`."""
        self._take_returned(now)
        self.tiers.load(self.scheduler.loading.take_begun(), self.scheduler.loading, now)
        if batch:
            self.observer.scheduled(self, batch, now)
            self._flights.append(self._begin(batch, begins))

    def _advance_loads(self, now: float) -> None:
        self.tiers.advance(self.scheduler.loading, now)

    def _begin(self, batch: Batch, now: float) -> _Flight:
        cost = self.pool.profile.cost
        step = self.num_steps + len(self._flights)
        seconds = cost.seconds(batch.work)
        seconds += self.scheduler.encoding.seconds(batch.encoder.items)
        flight = _Flight(batch, [self._stages.begin(seconds * self.noise.factor(step), now)])
        if not self._is_ahead and len(self._stages.shares) == 1:
            self._fast_forward(flight)
        return flight

    def _fast_forward(self, flight: _Flight) -> bool:
        """Add the steps that are alike to the only one in flight. Return whether there are any."""
        batch = flight.batch
        cost = self.pool.profile.cost
        scheduler = self.scheduler
        step = self.num_steps
        more = steady_steps(scheduler.table, scheduler.forecast.cost, batch) - 1 if self.at_once else 0
        due = self.publisher.due
        num_streams = len(batch.scheduled)
        context = sum([part.start for part in batch.scheduled])
        end = flight.ends[0]
        adapters = adapter_work([part.request for part in batch.scheduled])
        while more and end < due:
            more = more - 1
            step = step + 1
            context = context + num_streams
            end += cost.decode_step_seconds(num_streams, context, *adapters) * self.noise.factor(step)
            flight.ends.append(end)
        return len(flight.ends) > 1

    def _plan(self) -> None:
        self._version += 1
        self.clock.at(self._flights[0].ends[-1], partial(self._end, self._version), is_step=True)

    def _pass(self, flight: _Flight, done: int) -> None:
        """Account for the first `done` of the steps in a flight; the next one is running."""
        if not done:
            return
        ends = flight.ends[:done]
        flight.ends = flight.ends[done:]
        for end in ends:  # one by one, as if they had been taken one by one: floats
            self.busy_s += end - self._since
            self._since = end
        requests = [part.request for part in flight.batch.scheduled]
        self.observer.streamed(requests, ends)
        self.num_steps += done
        self.num_decoded += done * len(requests)
        tokens = dict.fromkeys([request.id for request in requests], [TOKEN] * done)
        flight.batch = advance(self.scheduler.table, flight.batch, tokens, ends, self.scheduler.forecast.charge)

    def _end(self, version: int, now: float) -> None:
        if version != self._version or self.until is not None:
            return  # the plan has changed, or the replica has died
        self._pass(self._flights[0], len(self._flights[0].ends) - 1)
        batch = self._flights.popleft().batch
        self._is_between = True
        self.step_s = now - self._since
        self._since = now
        self.busy_s += self.step_s
        self.num_steps += 1
        self.num_decoded += batch.num_decodes
        self.num_prefilled += sum(part.num_tokens for part in batch.scheduled[batch.num_decodes :])
        sampled = {part.request.id: self._drafts.sampled(part) for part in batch.scheduled if part.samples}
        self.num_decoded += sum(len(token.accepted) for token in sampled.values())
        deltas = self.scheduler.update(batch, sampled, now)
        self.observer.stepped(self, batch, deltas, now)
        self._after(now)
        self._go_round(now)

    def _grant(self, now: float) -> None:
        for request in self.scheduler.handoff.grant(now):
            self.observer.granted(self, request, now)
        self._take_returned(now)

    def _take_returned(self, now: float) -> None:
        for request in self.scheduler.table.take_returned():
            self.observer.returned(self, request, now)

    def _after(self, now: float) -> None:
        self._grant(now)
        self._publish(now)

    def _publish(self, now: float) -> None:
        if self.publisher.is_due(now):
            self.observer.published(self, now)
