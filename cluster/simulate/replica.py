"""Drive the real engine, transfers and reports of one replica on a clock, in place of an `EngineThread`.

What a replica decides stands in `Engine`, `Handover` and `Publisher`, which both drivers call in the same order: posted
actions, then a step, then transfers. This driver differs in two things. It never waits: an event ends each step, where
a thread blocks on its inbox. While no request comes or ends, it takes steps that are alike at once (fast_forward.py).
That changes nothing but the time that the simulation takes.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol, TypeAlias

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.device import TOKEN, Noise, clocked_engine
from crossdock.cluster.simulate.fleet import SimulatedAdapters, SimulatedPool
from crossdock.cluster.simulate.virtual_dock import VirtualDock, VirtualNetwork
from crossdock.kvtransfer.events import Event, Figures
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.engine.emulated import EmulatedRunner
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.replica.engine.pipeline import StepInFlight
from crossdock.workers.replica.transfer.handover import Handover
from crossdock.workers.report.publisher import Publisher
from crossdock.workers.schedule.fast_forward import advance, steady_steps
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import Request, TokenDelta, adapter_work
from crossdock.workers.schedule.request.submission import Submission
from crossdock.workers.schedule.scheduler import Scheduler

Action: TypeAlias = Callable[[float], None]
"""A function of the time, in seconds, at which it is called."""


class Observer(Protocol):
    """Gets the results of a replica's work: the simulation."""

    def streamed(self, requests: Sequence[Request], times: Sequence[float]) -> None:
        """Note that each of the requests has made a token at each of the times."""

    def stepped(self, replica: "SimulatedReplica", batch: Batch, deltas: Sequence[TokenDelta], now: float) -> None:
        """Note that a step has ended."""

    def told(self, replica: "SimulatedReplica", deltas: Sequence[TokenDelta], now: float) -> None:
        """Note what is new of requests, between two steps too."""

    def published(self, replica: "SimulatedReplica", now: float) -> None:
        """Report the replica's live profile to the routers and the scaler."""


@dataclass(slots=True)
class _Flight:
    """A step that has begun and not ended. Without a pipeline, also the steps behind it that are alike."""

    step: StepInFlight
    ends: list[float]
    goes_on: bool = False  # its last step has begun behind the one before, whose end is the turn of reports and actions


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica. All actions on it come in by `post`, and run between two steps."""

    name: str
    pool: SimulatedPool
    clock: Clock
    observer: "Observer"  # gets the results of its work
    network: VirtualNetwork
    noise: Noise
    publish_s: float  # from one live profile to the next while requests come and go, at least
    at_once: bool = True  # False: one step after the other, to compare with
    adapters: SimulatedAdapters = field(default_factory=lambda: SimulatedAdapters.model_validate({}))
    since: float = 0.0  # when it came up
    until: float | None = None  # when it died
    hung_at: float = inf  # from then on it computes and answers nothing
    takes_requests: bool = True  # False: the scaler has given it up
    busy_s: float = 0.0
    num_steps: int = 0
    num_prefilled: int = 0  # prompt tokens computed
    num_decoded: int = 0
    step_s: float = 0.0  # of the last step, without the time before the one before it ended
    engine: Engine = field(init=False)
    handover: Handover = field(init=False)
    publisher: Publisher = field(init=False)
    _inbox: deque[tuple[Action, str | None]] = field(default_factory=deque)  # with the request that an action ends
    _is_between: bool = False  # two steps
    _flights: deque[_Flight] = field(default_factory=deque)  # oldest first
    _runner: EmulatedRunner = field(init=False)
    _since: float = 0.0  # when the oldest step in flight began, or the step before it ended
    _looks_at: float = -1.0  # when it looks again, although nothing happens
    _version: int = 0  # of the plan that is in the clock

    def __post_init__(self) -> None:
        self._runner, self.engine = clocked_engine(self.pool, self.clock, self.noise, self.adapters)
        self.publisher = Publisher(self.scheduler, self.name, self.publish_s)
        self.engine.watch_loads(self._post_now)
        config = TransferConfig.model_validate({})
        rates = self.pool.profile.bytes_per_second, self.pool.gpus
        dock = VirtualDock(self.name, self.engine.pool_spec(""), self.network, *rates, config.grace_s, self._on_event)
        self.handover = Handover(self.engine, dock, config, self._transferred)

    @property
    def is_hung(self) -> bool:
        return self.hung_at < inf

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def add(self, submission: Submission, page_hashes: Sequence[PageHash], now: float) -> None:
        """Queue an attempt at a request. Raises what `Engine.add` and `Handover.add` raise."""
        self.engine.add(submission, now, page_hashes=page_hashes)
        self.handover.add(submission)

    def abort(self, request_id: str, attempt: int) -> None:
        """End an attempt at a request, or an earlier one. No step in flight may compute it."""
        request = self.scheduler.table.get(request_id)
        if request is not None and request.epoch <= attempt:
            self.engine.abort(request_id)
            self.handover.aborted(request)

    def post(self, action: Action, now: float, ends: str | None = None) -> None:
        """Run `action` between two steps. `ends`: the request that `action` ends: no step in flight may compute it."""
        if self.until is not None or self.is_hung:
            return
        self._inbox.append((action, ends))
        if self._flights:
            flight = self._flights[0]
            is_cut = len(flight.ends) > 1 + flight.goes_on
            if is_cut:  # it ends with the step that runs now, or with the one that has begun behind that
                self._pass(flight, bisect_right(flight.ends, now, hi=len(flight.ends) - 1))
                flight.ends = flight.ends[: 1 + self._is_ahead]
                flight.goes_on = len(flight.ends) > 1
            if self._is_ahead and len(self._flights) == 1 and not flight.goes_on:
                self._begin(now)
            if is_cut:
                self._plan()
        elif not self._is_between:
            self._go_round(now)

    def _post_now(self, action: Callable[[], object]) -> None:
        def act(_: float) -> None:
            action()

        self.post(act, self.clock.now)

    def hang(self, now: float) -> None:
        """Compute and answer nothing from now on, not even the running step; the dock is silent too."""
        if self._flights:
            flight = self._flights[0]
            self._pass(flight, bisect_right(flight.ends, now, hi=len(flight.ends) - 1))
            self.busy_s += now - self._since
        self.hung_at = now
        self.network.hung.add(self.name)

    def die(self, now: float) -> None:
        """End the replica: no event follows, not even the end of the running step."""
        if self._flights and not self.is_hung:
            flight = self._flights[0]
            self._pass(flight, bisect_right(flight.ends, now, hi=len(flight.ends) - 1))
            self.busy_s += now - self._since
        self.until = now
        self.handover.dock.close()

    def _go_round(self, now: float) -> None:
        self._is_between = True
        while True:
            has_come = bool(self._inbox)  # else nothing has changed since `_after`, which has reported and planned
            while self._inbox and not self._must_wait(self._inbox[0][1]):
                self._inbox.popleft()[0](now)
            self.engine.load_adapters()
            if has_come:
                if self._is_ahead:  # every live replica reports here; simulations of others keep their figures
                    self._publish(now)
                self._tell(self.handover.plan(), now)
            if not self._inbox:
                self._begin_steps(now)
            if not self._flights:
                self._after(None, now)
            if self._flights or not self._inbox:
                break
        self._is_between = False
        if self._flights:
            self._plan()
        else:
            self._wait(now)

    def _wait(self, now: float) -> None:
        """Look again in time, although nothing happens."""
        self.engine.offer_to_tiers()
        limits = self.scheduler.awaited.patience(now), self.handover.patience
        patience = min((limit for limit in limits if limit is not None), default=None)
        if patience is not None and not now <= self._looks_at <= now + patience:
            self._looks_at = now + patience
            self.clock.at(self._looks_at, partial(self.post, _look))

    def _must_wait(self, ends: str | None) -> bool:
        """Return whether a step in flight computes the request that an action ends. Then no other step begins first."""
        return any(part.request.id == ends for flight in self._flights for part in flight.step.batch.scheduled)

    @property
    def _is_ahead(self) -> bool:
        return self.engine.pipeline.is_ahead

    def _begin_steps(self, now: float) -> None:
        while len(self._flights) < self._runner.num_stages and self.scheduler.table.has_work:
            if not self._flights:
                self._since = now
            if not self._begin(now):
                return
        if self._is_ahead and len(self._flights) == 1 and not self._fast_forward(self._flights[0]):
            self._begin(now)

    def _begin(self, now: float) -> bool:
        """Begin a step behind those in flight. Return whether there was one that can begin now."""
        if not self.engine.begin_step(self.handover.scheduled):
            return False
        step = self.engine.pipeline.newest
        assert step is not None
        self._flights.append(flight := _Flight(step, [self._runner.ends]))
        if not self._is_ahead and self._runner.num_stages == 1:
            self._fast_forward(flight)
        return True

    def _fast_forward(self, flight: _Flight) -> bool:
        """Add the steps that are alike to the only one in flight. Return whether there are any.

        They end when a report is due, or one step later where steps run ahead: that one has begun by then.
        """
        batch = flight.step.batch
        cost = self.pool.profile.cost
        scheduler = self.scheduler
        step = self.num_steps  # the number of this one
        more = steady_steps(scheduler.table, scheduler.forecast.cost, batch) - 1 if self.at_once else 0
        due = self.publisher.due
        num_streams = len(batch.scheduled)
        context = sum([part.start for part in batch.scheduled])
        end = flight.ends[0]
        adapters = adapter_work([part.request for part in batch.scheduled])
        noise = self.noise.factor if self.noise.spread else None
        while more and not flight.goes_on:  # short: this runs for every step
            if end >= due:
                if not self._is_ahead:
                    break
                flight.goes_on = True
            more = more - 1
            step = step + 1
            context = context + num_streams
            seconds = cost.decode_step_seconds(num_streams, context, *adapters)
            end += seconds if noise is None else seconds * noise(step)
            flight.ends.append(end)
        return len(flight.ends) > 1

    def _plan(self) -> None:
        self._version += 1
        flight = self._flights[0]
        then = self._go_on if flight.goes_on else self._end
        self.clock.at(flight.ends[-1 - flight.goes_on], partial(then, self._version), is_step=True)

    def _go_on(self, version: int, now: float) -> None:
        """End all steps of a flight but the last one, as `_end` ends one, and go on with that."""
        if self._is_over(version):
            return
        flight = self._flights[0]
        flight.goes_on = False
        self._pass(flight, len(flight.ends) - 1)
        self._is_between = True
        self._after(None, now)
        self._go_round(now)

    def _pass(self, flight: _Flight, done: int) -> None:
        """Account for the first `done` of the steps in a flight; the next one is running."""
        if not done:
            return
        ends = flight.ends[:done]
        flight.ends = flight.ends[done:]
        for end in ends:  # one by one, as if they had been taken one by one: floats
            self.step_s = end - self._since
            self.busy_s += self.step_s
            self._since = end
        requests = [part.request for part in flight.step.batch.scheduled]
        self.observer.streamed(requests, ends)
        self.num_steps += done
        self.num_decoded += done * len(requests)
        tokens = dict.fromkeys([request.id for request in requests], [TOKEN] * done)
        charge = self.scheduler.forecast.charge
        flight.step.batch = advance(self.scheduler.table, flight.step.batch, tokens, ends, charge)
        flight.step.started = self._since
        self._runner.stages.begin(0.0, flight.ends[0])  # the device is busy until then
        self.noise.num_steps += done

    def _end(self, version: int, now: float) -> None:
        if self._is_over(version):
            return
        self._pass(self._flights[0], len(self._flights[0].ends) - 1)
        self._flights.popleft()
        self._is_between = True
        step = self.engine.finish_step()
        batch = step.batch
        self.step_s = step.interval
        self._since = now
        self.busy_s += self.step_s
        self.num_steps += 1
        self.num_decoded += batch.num_decodes
        self.num_prefilled += sum(part.num_tokens for part in batch.scheduled[batch.num_decodes :])
        self.num_decoded += sum(max(len(delta.token_ids) - 1, 0) for delta in step.deltas)  # accepted drafts
        self.observer.stepped(self, batch, step.deltas, now)
        self._after(step, now)
        self._go_round(now)

    def _is_over(self, version: int) -> bool:
        """Return whether the plan has changed, or the replica has died or hangs."""
        return version != self._version or self.until is not None or self.is_hung

    def _after(self, step: Step | None, now: float) -> None:
        self._tell(self.handover.step(step), now)
        self._publish(now)

    def _tell(self, deltas: Sequence[TokenDelta], now: float) -> None:
        if deltas:
            self.observer.told(self, deltas, now)

    def _on_event(self, event: Event) -> None:
        def handle(now: float) -> None:
            self._tell(self.handover.handle(event), now)

        self.post(handle, self.clock.now, ends=event.request)

    def _transferred(self, request_id: str, direction: str, figures: Figures, outcome: str) -> None:
        if direction in ("sent", "lent") and figures.write_seconds:
            self.publisher.transferred(figures.num_bytes, figures.write_seconds)

    def _publish(self, now: float) -> None:
        if self.publisher.is_due(now):
            self.observer.published(self, now)


def _look(now: float) -> None:
    """Do nothing: each turn of a replica ends what is overdue."""
