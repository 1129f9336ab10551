"""Replicas to route over: real schedulers whose steps take the seconds that their cost says, without a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.placement import Placement, Query
from crossdock.workers.report.advertise import LiveProfile, Publisher
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.batch import SampledToken
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.pages import PagePool, hash_pages
from crossdock.workers.schedule.request import Leg, Request, SamplingParams
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.slo import DEFAULT_CLASSES

COST = StepCost(base=2e-3, per_prefill_token=1e-4, per_attended=1e-8, per_decode=2e-4, per_context=1e-7)
PAGE_SIZE = 16
CLASSES = [slo.name for slo in DEFAULT_CLASSES]


def profile(slowness: float = 1.0, role: Role = "mixed", **fields: Any) -> SchedulingProfile:
    """Return the profile of a replica that takes `slowness` times as long as `COST` for everything."""
    cost = StepCost.of([slowness * coefficient for coefficient in COST.coefficients])
    defaults: dict[str, Any] = {
        "max_model_len": 8192,
        "vocab_size": 100,
        "page_size": PAGE_SIZE,
        "num_pages": 4000,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "slo_classes": DEFAULT_CLASSES,
        "role": role,
        "compatibility": "model A",
        "peer": b"somewhere",
        "page_bytes": 100_000,
        "cost": cost,
    }
    return SchedulingProfile(**defaults | fields)


def live(sequence: int = 1, incarnation: str = "first life", **fields: Any) -> LiveProfile:
    """Return the live profile of an idle replica, unless `fields` report work."""
    return LiveProfile(incarnation, sequence, (), places=(64, 64, 64), free_pages=(4000, 4000, 4000), **fields)


def query(name: str, num_tokens: int = 100, prompt: Sequence[int] = (), **fields: Any) -> Query:
    """Return the query for a prompt of `num_tokens` tokens, or of the tokens in `prompt`."""
    hashes = hash_pages(prompt, PAGE_SIZE) if prompt else ()
    return Query(name, len(prompt) or num_tokens, hashes, **fields)


def fleet_of(profiles: dict[str, SchedulingProfile], now: float = 0.0, **config: Any) -> Fleet:
    """Return a router whose replicas have all just reported that they are idle."""
    fleet = Fleet(RouterConfig.model_validate(config))
    for name, replica_profile in profiles.items():
        fleet.join(name, replica_profile, now)
        fleet.hear(name, live(), now)
    return fleet


def place(fleet: Fleet, request: Query, now: float = 0.0) -> Placement:
    """Choose where the request goes, and book it there."""
    placement = fleet.choose(request, now)
    fleet.book(request, placement, now)
    return placement


@dataclass(slots=True)
class Replica:
    """A scheduler on its own clock, and the publisher of its live profiles."""

    profile: SchedulingProfile
    scheduler: Scheduler = field(init=False)
    publisher: Publisher = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=self.profile.max_num_batched_tokens,
            max_num_seqs=self.profile.max_num_seqs,
            chunk_policy=self.profile.chunk_policy,
            min_chunk_tokens=self.profile.min_chunk_tokens,
            admission=self.profile.admission,
            page_size=self.profile.page_size,
        )
        pool = PagePool(self.profile.num_pages, self.profile.page_size)
        self.scheduler = Scheduler(config, pool, self.profile.max_model_len, cost=self.profile.cost)
        self.publisher = Publisher(self.scheduler, "first")

    def add(
        self, name: str, prompt: Sequence[int], slo_class: str = "standard", max_tokens: int = 20, leg: Leg = Leg.LOCAL
    ) -> int:
        """Take a request. Return the number of the last live profile that does not include it."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(name, list(prompt), sampling, slo_class=slo_class, leg=leg, arrival_time=self.now))
        return self.publisher.sequence

    def step(self) -> list[str]:
        """Run one step. Return the requests that got a token."""
        batch = self.scheduler.schedule(self.now)
        self.now += self.profile.cost.seconds(batch.work)
        sampled = {part.request.id: SampledToken(7) for part in batch.scheduled if part.samples}
        return [delta.request_id for delta in self.scheduler.update(batch, sampled, self.now)]

    def step_until_token(self, name: str) -> None:
        """Run steps until the request gets a token."""
        while name not in self.step():
            pass

    def report(self, fleet: Fleet, name: str, now: float) -> None:
        """Send the router a live profile, and the page changes since the last one."""
        fleet.hear(name, self.publisher.live(self.now), now)
        for changes in self.publisher.page_changes():
            fleet.hear_pages(name, changes)
