"""A cluster in simulated time: requests arrive, routers place them, replicas work, some fail.

Drives the same `RequestLife` as the dispatcher, deadlines and questions too, without a network and on a clock that only
events move. A replica answers, hangs, or is known to have died. Requests without a token are suspect then, as in a
server, and take turns.
"""

import gc
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.device import TOKEN, Noise
from crossdock.cluster.simulate.fleet import Failure, SimulatedFleet, SimulatedPool
from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.cluster.simulate.requests import SimulatedRequest, submission_of
from crossdock.cluster.simulate.scaler import Decision, SimulatedScaler
from crossdock.cluster.simulate.virtual_dock import VirtualNetwork
from crossdock.router.actions import (
    DEFAULT_TIMEOUTS,
    Action,
    Ask,
    Detach,
    Fail,
    PlaceAgain,
    ReplicaDead,
    ReplicaLost,
    Submit,
)
from crossdock.router.fleet import Fleet
from crossdock.router.request_life import RequestLife
from crossdock.router.turn_queue import TurnQueue
from crossdock.workers.replica.engine.engine import progress_of
from crossdock.workers.report.live_profile import HEARTBEAT_S, LiveProfile
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import Request, TokenDelta
from crossdock.workers.schedule.request.submission import Leg, Overloaded, Submission

_NOT_YET = 2**63 - 1  # as the number of a live profile: a request is in none so far


@dataclass(frozen=True, slots=True)
class Placed:
    """The router's prediction for one request, and the time to its first token."""

    reason: str
    predicted_ttft: float  # seconds
    ttft: float


@dataclass(slots=True)
class Outcome:
    """The result of a simulation."""

    fleet: SimulatedFleet
    seed: int
    samples: list[Sample]  # in order of arrival
    placed: list[Placed]
    replicas: list[SimulatedReplica]
    duration: float  # seconds, from the first arrival to the last end
    decisions: list[Decision]  # about sizes of pools and roles of replicas, in order of time


class Simulation:
    """Plays jobs on a fleet, once. The arguments decide all that happens."""

    def __init__(self, fleet: SimulatedFleet, seed: int = 0, at_once: bool = True) -> None:
        """`at_once` False simulates every step by itself: much slower, with the same result."""
        self.fleet = fleet
        self.clock = Clock()
        models = [model.name for model in fleet.models] or [""]
        self.routers = {model: [Fleet(fleet.router) for _ in range(fleet.routers)] for model in models}
        self._turns = defaultdict[tuple[str, int], TurnQueue](
            partial(TurnQueue, DEFAULT_TIMEOUTS.suspect_s)
        )  # by router
        self.held: dict[str, list[SimulatedRequest]] = {}  # by model without replicas: the requests that wait for one
        self.replicas: dict[str, SimulatedReplica] = {}  # living replicas, by name
        self._silent: dict[str, SimulatedReplica] = {}  # replicas that hang and are given up, by name
        self.requests: dict[str, SimulatedRequest] = {}  # by id, those that have not ended
        self._scaler = SimulatedScaler(fleet, self) if fleet.is_elastic else None
        decisions = self._scaler.decisions if self._scaler is not None else []
        self._outcome = Outcome(fleet, seed, [], [], [], 0.0, decisions)
        self._at_once = at_once
        self._network = VirtualNetwork(self.clock, fleet.latency_s / 2)
        self._reports: dict[str, tuple[LiveProfile, float]] = {}  # by replica: its last report, and when it was made
        self._started: dict[str, int] = {pool.name: 0 for pool in fleet.pools}
        self._default_class = fleet.pools[0].engine.default_slo_class
        self._is_arriving = True
        self._num_pausing = 0  # follow-ups that will be sent
        self._until = inf
        for pool in fleet.pools:
            for _ in range(pool.replicas):
                self.start(pool, 0.0)
        for failure in fleet.failures:
            self.clock.at(failure.at, partial(self._fail, failure))

    def run(self, jobs: Iterable[Job], until: float = inf) -> Outcome:
        """Play `jobs`, which come in order of arrival, each with its time, and their follow-ups due before `until`.

        Raises:
            ValueError: a job has no time: its arrival would depend on the end of another.
        """
        self._jobs: Iterator[Job] = iter(jobs)
        self._until = until
        self._await_next()
        self.clock.at(HEARTBEAT_S, self._beat)
        if self._scaler is not None:
            self._scaler.run()
        was_enabled = gc.isenabled()
        gc.disable()  # no cycles are made here, and the search for them takes a third of the time
        try:
            self.clock.run()
        finally:
            if was_enabled:
                gc.enable()
        for request in list(self.requests.values()):
            request.life.close()
            self._over(request, self.clock.now, "it never ended")
        self._outcome.duration = max((sample.ended for sample in self._outcome.samples), default=0.0)
        return self._outcome

    # -- requests ----------------------------------------------------------------------------------------------------

    def _await_next(self) -> None:
        job = next(self._jobs, None)
        self._is_arriving = job is not None
        if job is None:
            return
        if job.due is None:
            raise ValueError("jobs: each must be due at a time; a closed loop cannot be simulated")
        self.clock.at(job.due, partial(self._arrive, job))

    def _arrive(self, job: Job, now: float) -> None:
        self._await_next()
        self._send(job, now)

    def _follow(self, job: Job, now: float) -> None:
        self._num_pausing -= 1
        self._send(job, now)

    def _send(self, job: Job, now: float) -> None:
        number = len(self._outcome.samples)
        slo_class = job.service_tier or self._default_class
        submission = submission_of(str(number), job, slo_class, self.fleet.adapters.of(str(number)))
        model = self.fleet.model_of(str(number), now)
        routers = self.routers[model]
        num_tokens = len(submission.prompt_token_ids)  # of pictures too
        sample = Sample(job.role, job.output_tokens, num_tokens, now, array("d"), bytearray())
        sample.service_tier, sample.tenant, sample.model = slo_class, job.tenant, model
        self._outcome.samples.append(sample)
        which = number % len(routers)
        life, turns = RequestLife(submission, routers[which], now), self._turns[model, which]
        request = self.requests[submission.id] = SimulatedRequest(life, sample, job.follow_ups, turns)
        if self._is_up(model):
            self._do(request, life.place(now), now)
        else:
            self.held.setdefault(model, []).append(request)

    def _is_up(self, model: str) -> bool:
        """Return whether a model that may be without replicas has one of each role; others always count as up."""
        pools = [pool for pool in self.fleet.pools if pool.model == model] if self._scaler is not None else ()
        if not pools or any(pool.replicas for pool in pools):
            return True
        roles = {each.pool.role for each in self.replicas.values() if each.pool.model == model and each.takes_requests}
        return roles == {pool.role for pool in pools}

    def _do(self, request: SimulatedRequest, actions: Sequence[Action], now: float) -> None:
        """Carry out what the life of a request asks for."""
        for action in actions:
            match action:
                case TokenDelta():
                    self._stream(request, action, now)
                case Submit():
                    self._submit(request, action, now)
                case Detach():
                    self._detach(request, action, now)
                case Ask():
                    self.clock.at(now + self.fleet.latency_s, partial(self._ask, request, action))
                case PlaceAgain():
                    self._place_again(request, now)
                case Fail(error):
                    is_refused = isinstance(error, Overloaded)
                    self._over(request, now, "HTTP 429" if is_refused else str(error), is_refused)
                case _:  # Accepted: only a live client is notified
                    pass

    def _place_again(self, request: SimulatedRequest, now: float) -> None:
        """Begin the next attempt, where a suspect request has its turn."""
        self._leave_turn(request, now)
        if not request.life.is_suspect:
            self._do(request, request.life.place(now), now)
            return
        request.turns.enter(request.life.submission.id, now)
        self._begin_turn(request.turns, now)

    def _begin_turn(self, turns: TurnQueue, now: float) -> None:
        """Place the suspect request whose turn begins now, if one does, and look again when its turn ends by itself."""
        if (begun := turns.begin(now)) is not None:
            self.clock.at(turns.ends_at, partial(self._begin_turn, turns))
            request = self.requests[begun]
            self._do(request, request.life.place(now), now)

    def _leave_turn(self, request: SimulatedRequest, now: float) -> None:
        if request.turns.leave(request.life.submission.id):
            self.clock.at(now, partial(self._begin_turn, request.turns))  # an event: a thousand may fail in a row

    def _stream(self, request: SimulatedRequest, delta: TokenDelta, now: float) -> None:
        """Give tokens to the client."""
        times = request.sample.times
        if delta.token_ids:
            if not times:
                placement = request.life.placement
                assert placement is not None
                placed = Placed(placement.reason, placement.predicted_ttft, now - request.sample.sent)
                self._outcome.placed.append(placed)
                request.sample.cached_tokens = delta.num_cached_tokens
            times.extend([now] * len(delta.token_ids))
            self._leave_turn(request, now)
        if delta.finish_reason is not None:
            self._over(request, now)

    def _watch(self, request: SimulatedRequest, now: float) -> None:
        """Let the life of a request act where nothing was heard of it in time, and look again.

        Every deadline is set `answer_s` ahead, or more: looks as often as that miss none."""
        if not request.life.is_over:
            self._do(request, request.life.tick(now), now)
            at = min(request.life.deadline, now + DEFAULT_TIMEOUTS.answer_s)
            self.clock.at(at if at > now else now + DEFAULT_TIMEOUTS.answer_s, partial(self._watch, request))

    def _ask(self, request: SimulatedRequest, asked: Ask, now: float) -> None:
        """Ask a replica how far it is with a request. One that hangs does not answer."""
        replica = self.replicas.get(asked.replica)
        if replica is not None and not replica.is_hung and not request.life.is_over:
            num_computed = replica.num_prefilled + replica.num_decoded
            numbers = progress_of(replica.engine, request.life.submission.id, asked.attempt, num_computed)
            if numbers is None and (asked.replica, asked.attempt) in request.untaken:
                numbers = ["submitted", num_computed]
            self._do(request, request.life.progress(asked.replica, asked.attempt, numbers, now), now)

    def _submit(self, request: SimulatedRequest, action: Submit, now: float) -> None:
        """Send one leg of an attempt to its replica."""
        replica, submission = self.replicas[action.replica], action.submission
        if not request.is_watched:
            request.is_watched = True
            self._watch(request, now)
        if action.peer is not None:
            submission = replace(submission, peer=self.replicas[action.peer].handover.dock.blob)
        if action.source is not None:
            submission = replace(submission, source=self.replicas[action.source].handover.dock.blob)
        if submission.leg is Leg.RECEIVE:
            # The answer of the decode replica is not waited for: it takes all that the prefill replica takes.
            self._do(request, request.life.taken(replica.name, submission.epoch, _NOT_YET, now), now)
        request.untaken.add((replica.name, submission.epoch))
        post = partial(replica.post, partial(self._take, request, replica, submission))
        self.clock.at(now + self.fleet.latency_s, post)

    def _take(self, request: SimulatedRequest, replica: SimulatedReplica, submission: Submission, now: float) -> None:
        """Between two steps of the replica: it takes its leg of an attempt, or refuses."""
        life, attempt = request.life, submission.epoch
        request.untaken.discard((replica.name, attempt))
        if life.is_over or life.attempt != attempt or life.query is None:
            return  # given up: the replica of the other leg has refused, or has died
        try:
            replica.add(submission, life.query.page_hashes, now)
        except (Overloaded, ValueError) as refusal:
            actions = life.refused(replica.name, attempt, refusal, now)
        except RuntimeError as error:
            actions = life.refused(replica.name, attempt, ReplicaLost(str(error)), now)
        else:
            actions = life.taken(replica.name, attempt, replica.publisher.sequence, now)
        self._do(request, actions, now)

    def _detach(self, request: SimulatedRequest, action: Detach, now: float) -> None:
        """End an attempt at one of its replicas."""
        replica = self.replicas.get(action.replica)
        if replica is not None and action.is_running:
            request_id = request.life.submission.id
            replica.post(lambda _: replica.abort(request_id, action.attempt), now, request_id)

    def _over(self, request: SimulatedRequest, now: float, error: str | None = None, is_refused: bool = False) -> None:
        sample = request.sample
        sample.ended, sample.error, sample.refused = now, error, is_refused
        sample.counts = bytearray(b"\1") * len(sample.times)
        del self.requests[request.life.submission.id]
        self._leave_turn(request, now)
        for follow_up in request.follow_ups:
            if now + follow_up.pause_s < self._until:
                self._num_pausing += 1
                self.clock.at(now + follow_up.pause_s, partial(self._follow, follow_up.job))

    # -- reports of replicas -----------------------------------------------------------------------------------------

    def streamed(self, requests: Sequence[Request], times: Sequence[float]) -> None:
        """Note that each of the requests has made a token at each of the times."""
        tokens = [TOKEN] * len(times)
        for each in requests:
            request = self.requests[each.id]
            request.life.streamed(tokens, times[-1])
            request.sample.times.extend(times)

    def stepped(self, replica: SimulatedReplica, batch: Batch, deltas: Sequence[TokenDelta], now: float) -> None:
        """Note that a step has ended."""
        self.told(replica, deltas, now)

    def told(self, replica: SimulatedReplica, deltas: Sequence[TokenDelta], now: float) -> None:
        """Note what is new of requests, between two steps too."""
        for delta in deltas:
            request = self.requests.get(delta.request_id)
            if request is None:
                continue
            actions = request.life.tokens(replica.name, delta, now)
            if len(actions) == 1 and actions[0] is delta:  # nearly always
                self._stream(request, delta, now)
            else:
                self._do(request, actions, now)

    def published(self, replica: SimulatedReplica, now: float) -> None:
        """Report a replica's live profile to the routers and the scaler."""
        live, pages = replica.publisher.live(now, replica.step_s), replica.publisher.page_changes()
        self._reports[replica.name] = live, now
        for router in self.routers[replica.pool.model]:
            router.hear(replica.name, live, now)
            for changes in pages:
                router.hear_pages(replica.name, changes)
        if self._scaler is not None:
            self._scaler.scaling.hear(replica.name, live, now)

    def _beat(self, now: float) -> None:
        """Repeat the last report of every replica that has been silent."""
        for name, replica in self.replicas.items():
            live, at = self._reports[name]
            if now - at >= HEARTBEAT_S and not replica.is_hung:
                for router in self.routers[replica.pool.model]:
                    router.hear(name, live, now)
        for name, replica in [*self.replicas.items()]:
            if (silent_s := now - replica.hung_at) > DEFAULT_TIMEOUTS.silence_s:
                self._lose(name, ReplicaLost(f"replica {name} has been silent for {silent_s:.3g} s"), now)
        if self.clock.is_due:  # else no event will ever follow
            self.clock.at(now + HEARTBEAT_S, self._beat)

    # -- replicas come and go ----------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight or still to come."""
        return self._is_arriving or self._num_pausing > 0 or bool(self.requests)

    def start(self, pool: SimulatedPool, now: float) -> None:
        name = f"{pool.name}/{self._started[pool.name]}"
        self._started[pool.name] += 1
        noise = Noise(self.fleet.noise, (self._outcome.seed, len(self._outcome.replicas)))
        settings = noise, self.fleet.publish_s, self._at_once
        adapters = self.fleet.adapters
        replica = SimulatedReplica(name, pool, self.clock, self, self._network, *settings, adapters=adapters, since=now)
        self.replicas[name] = replica
        self._outcome.replicas.append(replica)
        profile = pool.profile.model_copy(update={"peer": replica.handover.dock.blob})
        for router in self.routers[pool.model]:
            router.join(name, profile, now)
            router.hear_pages(name, replica.publisher.all_pages())
        if self._scaler is not None:
            self._scaler.scaling.join(name, pool.name, pool.profile)
        self.published(replica, now)
        if pool.model in self.held and self._is_up(pool.model):
            for request in self.held.pop(pool.model):
                self._do(request, request.life.place(now), now)

    def retire(self, name: str, now: float) -> None:
        """Send a replica no new requests, and end it when its running ones have ended."""
        replica = self.replicas[name]
        replica.takes_requests = False
        for router in self.routers[replica.pool.model]:
            router.leave(name)
        self._end_idle(name, now)

    def _end_idle(self, name: str, now: float) -> None:
        if name not in self.replicas:
            return
        placements = [request.life.placement for request in self.requests.values()]
        if any(each is not None and name in (each.decode, each.prefill) for each in placements):
            self.clock.at(now + HEARTBEAT_S, partial(self._end_idle, name))
            return
        self.replicas.pop(name).die(now)

    def _fail(self, failure: Failure, now: float) -> None:
        for pool in self.fleet.pools:
            if pool.name == failure.add:
                self.start(pool, now)
        if failure.kill is not None:
            self._kill(failure.kill, now)
        if failure.hang is not None and failure.hang in self.replicas:
            self.replicas[failure.hang].hang(now)

    def _kill(self, name: str, now: float) -> None:
        replica = self.replicas.get(name) or self._silent.pop(name, None)
        if replica is None:
            return
        replica.die(now)
        if name in self.replicas:
            self._lose(name, ReplicaDead(f"replica {name} has died"), now)

    def _lose(self, name: str, loss: ReplicaLost, now: float) -> None:
        """Let routers, the scaler and the requests of a replica know that it is lost."""
        replica = self.replicas.pop(name)
        if replica.is_hung:
            self._silent[name] = replica
        if self._scaler is not None:
            self._scaler.scaling.leave(name)
        for router in self.routers[replica.pool.model]:
            router.leave(name)
        for request in list(self.requests.values()):
            self._do(request, request.life.lost(name, request.life.attempt, loss, now), now)
