"""A cluster in simulated time: requests arrive, routers place them, replicas work, some fail. What the dispatcher does
for each request, without a network and on a clock that only events move."""

import gc
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import blake2b

from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.fleet import Failure, SimulatedFleet, SimulatedPool
from crossdock.cluster.simulate.replica import TOKEN, Noise, SimulatedReplica
from crossdock.cluster.simulate.transfer import SimulatedNetwork, SimulatedTransfer
from crossdock.router.fleet import Fleet
from crossdock.router.placement import Placement, Query
from crossdock.workers.report.advertise import LiveProfile
from crossdock.workers.schedule.batch import Batch
from crossdock.workers.schedule.pages import hash_pages
from crossdock.workers.schedule.request import Leg, Overloaded, Request, SamplingParams, TokenDelta

MOST_PLACEMENTS = 4  # of one request, refusals apart; as the dispatcher's
HEARTBEAT_S = (
    1.0  # after which a replica that has nothing new to say says that it lives, as `workers/replica/replica.py` has it
)
GRACE_S = 1.0  # after a replica's death, until its writes cannot land any more: `transfer.grace_s`


@dataclass(slots=True, eq=False)
class Call:
    """One request of a client, and where it has got to."""

    id: str
    job: Job
    slo_class: str
    sample: Sample
    router: Fleet
    query: Query
    prompt: list[int]  # tokens
    placement: Placement | None = None
    decode: SimulatedReplica | None = None
    prefill: SimulatedReplica | None = None  # until its pages are shipped
    transfer: SimulatedTransfer | None = None
    given: int = 0  # tokens that its client had when it was placed
    epoch: int = 0  # how often it has been placed before
    losses: int = 0  # of these, because a replica died
    refused_by: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Placed:
    """What the routers did with one request: for comparing predictions with what came."""

    reason: str
    predicted_ttft: float  # seconds
    ttft: float


@dataclass(slots=True)
class Outcome:
    """What came of a simulation."""

    fleet: SimulatedFleet
    seed: int
    samples: list[Sample]  # in order of arrival
    placed: list[Placed]
    replicas: list[SimulatedReplica]
    duration: float  # seconds, from the first arrival to the last end


class Simulation:
    """Plays jobs on a fleet, once. All that happens is decided by the arguments."""

    def __init__(self, fleet: SimulatedFleet, seed: int = 0, at_once: bool = True) -> None:
        """`at_once` False takes every step by itself: much slower, and the same."""
        self.fleet = fleet
        self.clock = Clock()
        self.routers = [Fleet(fleet.router) for _ in range(fleet.routers)]
        self.replicas: dict[str, SimulatedReplica] = {}
        self.calls: dict[str, Call] = {}  # by request, those that have not ended
        self._outcome = Outcome(fleet, seed, [], [], [], 0.0)
        self._at_once = at_once
        self._links = SimulatedNetwork()
        self._said: dict[str, tuple[LiveProfile, float]] = {}  # by replica: last, and when
        self._started: dict[str, int] = {pool.name: 0 for pool in fleet.pools}
        self._default_class = fleet.pools[0].engine.default_slo_class
        self._page_size = fleet.pools[0].engine.page_size
        for pool in fleet.pools:
            for _ in range(pool.replicas):
                self._start(pool, 0.0)
        for failure in fleet.failures:
            self.clock.at(failure.at, partial(self._fail, failure))

    def run(self, jobs: Iterable[Job]) -> Outcome:
        """`jobs` in order of arrival, each with its time."""
        self._jobs: Iterator[Job] = iter(jobs)
        self._await_next()
        self.clock.at(HEARTBEAT_S, self._beat)
        was_enabled = gc.isenabled()
        gc.disable()  # nothing here makes cycles, and looking for them takes a third of the time
        try:
            self.clock.run()
        finally:
            if was_enabled:
                gc.enable()
        for call in list(self.calls.values()):
            self._over(call, self.clock.now, "it never ended")
        self._outcome.duration = max((sample.ended for sample in self._outcome.samples), default=0.0)
        return self._outcome

    # -- requests ----------------------------------------------------------------------------------------------------

    def _await_next(self) -> None:
        job = next(self._jobs, None)
        if job is None:
            return
        if job.due is None:
            raise ValueError("jobs: each must be due at a time; a closed loop cannot be simulated")
        self.clock.at(job.due, partial(self._arrive, job))

    def _arrive(self, job: Job, now: float) -> None:
        self._await_next()
        number = len(self._outcome.samples)
        slo_class = job.service_tier or self._default_class
        sample = Sample(job.role, job.output_tokens, job.prompt_tokens, now, array("d"), bytearray())
        sample.service_tier = slo_class
        self._outcome.samples.append(sample)
        call_id = str(number)
        prompt = token_ids(job)
        hashes = hash_pages(prompt, self._page_size)
        query = Query(call_id, len(prompt), hashes, slo_class, job.output_tokens)
        router = self.routers[number % len(self.routers)]
        call = self.calls[call_id] = Call(call_id, job, slo_class, sample, router, query, prompt)
        self._place(call, now)

    def _place(self, call: Call, now: float) -> None:
        try:
            placement = call.router.choose(call.query, now, call.refused_by)
        except (Overloaded, LookupError) as refusal:
            is_refused = isinstance(refusal, Overloaded) or bool(call.refused_by)
            self._over(call, now, "HTTP 429" if is_refused else "no replica is up", is_refused)
            return
        call.router.book(call.query, placement, now)
        call.placement, call.given = placement, len(call.sample.times)
        call.decode = self.replicas[placement.decode]
        call.prefill = self.replicas[placement.prefill] if placement.prefill is not None else None
        self.clock.at(now + self.fleet.latency_s, partial(self._submit, call, call.epoch))

    def _submit(self, call: Call, epoch: int, now: float) -> None:
        if call.epoch != epoch or call.decode is None:
            return
        if call.prefill is None:
            call.decode.post(partial(self._take, call, call.decode, Leg.LOCAL, epoch), now)
            return
        if call.prefill.until is not None:  # it does not answer
            self._withdraw(call, now)
            self._place(call, now)
            return
        half = self.fleet.latency_s / 2
        call.transfer = SimulatedTransfer(call.id, epoch, call.prefill, call.decode, self.clock, self._links, half)
        for replica, leg in ((call.decode, Leg.RECEIVE), (call.prefill, Leg.SEND)):
            replica.post(partial(self._take, call, replica, leg, epoch), now)

    def _take(self, call: Call, replica: SimulatedReplica, leg: Leg, epoch: int, now: float) -> None:
        """Between two steps of the replica: it takes the request, or refuses."""
        if call.epoch != epoch or call.decode is None:
            return  # the other replica has refused already
        request = Request(
            call.id,
            call.prompt,
            _sampling(call.job.output_tokens),
            slo_class=call.slo_class,
            output_token_ids=[TOKEN] * call.given,
            leg=leg,
            epoch=epoch,
            arrival_time=now,
            page_hashes=list(call.query.page_hashes),
        )
        try:
            replica.scheduler.add(request)
        except Overloaded:
            call.refused_by.add(replica.name)
            self._withdraw(call, now)
            self._place(call, now)
        except ValueError as error:
            self._withdraw(call, now)
            self._over(call, now, str(error))
        else:
            call.router.taken(call.id, replica.name, replica.publisher.sequence)

    def _withdraw(self, call: Call, now: float) -> None:
        """Ends a placement, wherever it has got to."""
        call.router.settle(call.id)
        owner = Request.owner_name(call.id, call.epoch)
        call.epoch += 1
        if call.transfer is not None:
            call.transfer.is_over = True
            receiver = call.transfer.receiver
            self.clock.at(now + self.fleet.latency_s, partial(receiver.post, partial(_forgive, receiver, owner)))
        for replica in (call.decode, call.prefill):
            if replica is not None:
                replica.post(partial(_abort, replica, call.id, owner), now)
        call.decode = call.prefill = call.transfer = None

    def _over(self, call: Call, now: float, error: str | None = None, is_refused: bool = False) -> None:
        call.router.settle(call.id)
        call.sample.ended, call.sample.error, call.sample.refused = now, error, is_refused
        call.sample.counts = bytearray(b"\1") * len(call.sample.times)
        del self.calls[call.id]

    # -- what replicas did -------------------------------------------------------------------------------------------

    def streamed(self, requests: Sequence[Request], times: Sequence[float]) -> None:
        for request in requests:
            self.calls[request.id].sample.times.extend(times)

    def stepped(self, replica: SimulatedReplica, batch: Batch, deltas: Sequence[TokenDelta], now: float) -> None:
        for delta in deltas:
            call = self.calls.get(delta.request_id)
            if call is None or replica not in (call.decode, call.prefill) or _is_late(call, batch):
                continue  # withdrawn while its step ran
            if delta.token_ids and delta.first >= len(call.sample.times):  # else its client has that token already
                if not call.sample.times:
                    self._first_token(call, now)
                call.sample.times.append(now)
            if delta.finish_reason is not None:
                self._ended(call, replica, now)
        for part in batch.scheduled[batch.num_decodes :]:
            request = part.request
            if request.leg is Leg.SEND and (call := self.calls.get(request.id)) and call.transfer is not None:
                is_complete = request.num_output_tokens > len(request.output_token_ids)
                call.transfer.computed(request.num_computed_tokens, is_complete, now)

    def _first_token(self, call: Call, now: float) -> None:
        call.router.first_token(call.id, now)
        assert call.placement is not None
        placed = Placed(call.placement.reason, call.placement.predicted_ttft, now - call.sample.sent)
        self._outcome.placed.append(placed)

    def _ended(self, call: Call, replica: SimulatedReplica, now: float) -> None:
        """Its last token is made: both its replicas are done with it."""
        if call.transfer is not None and not call.transfer.is_over:  # its first token was its last
            self._withdraw(call, now)
        self._over(call, now)

    def granted(self, replica: SimulatedReplica, request: Request, now: float) -> None:
        call = self.calls.get(request.id)
        if call is not None and call.transfer is not None and call.decode is replica:
            call.transfer.grant(request, now)

    def published(self, replica: SimulatedReplica, now: float) -> None:
        live, pages = replica.publisher.live(now, replica.step_s), replica.publisher.page_changes()
        self._said[replica.name] = live, now
        for router in self.routers:
            router.hear(replica.name, live, now)
            for changes in pages:
                router.hear_pages(replica.name, changes)

    def _beat(self, now: float) -> None:
        """All who have been silent say what they last said."""
        for name in self.replicas:
            live, at = self._said[name]
            if now - at >= HEARTBEAT_S:
                for router in self.routers:
                    router.hear(name, live, now)
        if self.clock.is_due:  # else nothing will ever happen again
            self.clock.at(now + HEARTBEAT_S, self._beat)

    # -- replicas come and go ----------------------------------------------------------------------------------------

    def _start(self, pool: SimulatedPool, now: float) -> None:
        name = f"{pool.name}/{self._started[pool.name]}"
        self._started[pool.name] += 1
        noise = Noise(self.fleet.noise, (self._outcome.seed, len(self._outcome.replicas)))
        replica = SimulatedReplica(name, pool, self.clock, self, noise, self._at_once, since=now)
        replica.publisher.interval_s = self.fleet.publish_s
        self.replicas[name] = replica
        self._outcome.replicas.append(replica)
        profile = pool.profile.model_copy(update={"peer": name.encode()})
        for router in self.routers:
            router.join(name, profile, now)
            router.hear_pages(name, replica.publisher.all_pages())
        self.published(replica, now)

    def _fail(self, failure: Failure, now: float) -> None:
        for pool in self.fleet.pools:
            if pool.name == failure.add:
                self._start(pool, now)
        if failure.kill is not None:
            self._kill(failure.kill, now)

    def _kill(self, name: str, now: float) -> None:
        replica = self.replicas.pop(name, None)
        if replica is None:
            return
        replica.die(now)
        for router in self.routers:
            router.leave(name)
        for call in list(self.calls.values()):
            if call.decode is replica:
                self._lost(call, now)
            elif call.prefill is replica and call.transfer is not None and not call.transfer.is_over:
                self._take_over(call, now)

    def _lost(self, call: Call, now: float) -> None:
        """The request goes on elsewhere, after the tokens that its client has."""
        self._withdraw(call, now)
        call.losses += 1
        call.refused_by.clear()
        if call.losses == MOST_PLACEMENTS:
            self._over(call, now, "one replica after the other was lost")
            return
        given = len(call.sample.times)
        may_ship = call.losses < MOST_PLACEMENTS - 2
        num_tokens = len(call.prompt) + given
        call.query = replace(call.query, num_tokens=num_tokens, may_ship=may_ship, may_refuse=not given)
        self._place(call, now)

    def _take_over(self, call: Call, now: float) -> None:
        """Who waits for the pages of a replica that died goes on with those that have arrived."""
        transfer, replica = call.transfer, call.decode
        assert transfer is not None
        assert replica is not None
        transfer.is_over, call.prefill = True, None

        def take_over(now: float) -> None:
            request = replica.scheduler.get(call.id)
            if request is not None and request.leg is Leg.RECEIVE:
                replica.scheduler.take_over(call.id, now)

        replica.post(take_over, now)
        self.clock.at(now + GRACE_S, partial(replica.post, partial(_forgive, replica, transfer.owner)))


def _is_late(call: Call, batch: Batch) -> bool:
    """Whether a step was of an earlier placement."""
    return call.epoch > 0 and any(
        part.request.id == call.id and part.request.epoch < call.epoch for part in batch.scheduled
    )


def _abort(replica: SimulatedReplica, request_id: str, owner: str, now: float) -> None:
    replica.scheduler.abort(request_id)
    replica.scheduler.pages.release(owner)  # who sends keeps its pages until nobody reads them any more


def _forgive(replica: SimulatedReplica, owner: str, now: float) -> None:
    """Nobody writes to those pages any more."""
    replica.scheduler.pages.end_quarantine(owner)


def token_ids(job: Job) -> list[int]:
    """A prompt that has an equal beginning with another exactly where their segments are equal."""
    ids: list[int] = []
    for segment in job.prompt:
        digest = blake2b(segment.key.encode(), digest_size=8).digest()
        pair = [int.from_bytes(digest[:4]), int.from_bytes(digest[4:])]
        ids += (pair * (segment.tokens // 2 + 1))[: segment.tokens]
    return ids


@cache
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)
