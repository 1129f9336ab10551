"""Replicas to route over: real schedulers whose steps take the seconds that their cost says, without a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.legs import query_of
from crossdock.router.placement import Placement
from crossdock.router.query import Query
from crossdock.workers.report.live_profile import LiveProfile, Room, WaitingRequest
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.report.publisher import Publisher
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.items import NO_ITEMS, Item
from crossdock.workers.schedule.request.page_hashes import hash_pages
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES
from crossdock.workers.schedule.request.submission import Leg, Submission
from crossdock.workers.schedule.scheduler import Scheduler
from tests.workers.schedule.model_free_replica import ModelFreeReplica, new_scheduler

COST = StepCost(base=2e-3, per_prefill_token=1e-4, per_attended=1e-8, per_decode=2e-4, per_context=1e-7)
LONG_STEPS = replace(COST, base=10e-3)
"""A cost whose knee of throughput, 100 ms, is beyond the 512 tokens that a step of `profile` may hold."""
ENCODER = EncoderCost(base=1e-3, per_embedding_token=1e-4, per_square=1e-7)  # 24 ms for a picture of 200 rows
PAGE_SIZE = 16
SETTINGS = SchedulerConfig.model_fields.keys() & SchedulingProfile.model_fields.keys()
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


def with_pictures(name: str, rows: Sequence[int], num_text: int = 100, **fields: Any) -> Submission:
    """Return a submission of pictures with so many rows each, unlike any other's, and `num_text` tokens after them."""
    items, start = list[Item](), 0
    for number, num_embedding_tokens in enumerate(rows):
        items.append(
            Item(start, num_embedding_tokens, num_embedding_tokens, "image", f"{name}/{number}".encode().ljust(16))
        )
        start += num_embedding_tokens
    return Submission(name, [9] * start + list(range(num_text)), items=items, **fields)


def picture_query(submission: Submission, may_refuse: bool = False) -> Query:
    """Return the query of a submission before it has an output."""
    return query_of(submission, (), PAGE_SIZE, may_ship=True, may_refuse=may_refuse)


_PARTS: Mapping[str, tuple[str, str]] = {  # a figure: the part of a live profile that has it, and its name there
    **{name: ("learnt", name) for name in ("cost", "interval_share", "overrun", "gap_share", "encoder_cost")},
    "prompts": ("prefills", "groups"),
    **{name: ("prefills", name) for name in ("in_flight_seconds", "started_seconds", "done_seconds", "tenants")},
    "streams": ("streams", "counts"),
    **{name: ("streams", name) for name in ("context_tokens", "arriving", "leaving", "lead_s")},
    **{name: ("room", name) for name in Room._fields},
    "prompt_shares": ("shares", "prompts"),
    "stream_share": ("shares", "streams"),
    "load_seconds": ("tiers", "page_seconds"),
    "load_queue": ("tiers", "queue_seconds"),
    "adapters": ("adapters", "fingerprints"),
    "adapter_load_s": ("adapters", "load_s"),
    "adapter_use": ("adapters", "use"),
}


def live_profile(incarnation: str, sequence: int, **figures: Any) -> LiveProfile:
    """Return a live profile with these figures, each in its part."""
    return changed(LiveProfile(incarnation, sequence), **figures)


def changed(found: LiveProfile, **figures: Any) -> LiveProfile:
    """Return a live profile with some figures changed, each in its part."""
    for name in {"lacking", "starting"} & figures.keys():
        figures[name] = tuple(WaitingRequest(*each) for each in figures[name])
    for name, value in figures.items():
        part, figure = _PARTS.get(name, ("", name))
        found = structs.replace(
            found, **{part or name: getattr(found, part)._replace(**{figure: value}) if part else value}
        )
    return found


def live(sequence: int = 1, incarnation: str = "first life", **fields: Any) -> LiveProfile:
    """Return the live profile of an idle replica, unless `fields` report work."""
    return live_profile(incarnation, sequence, **{"slots": (64,) * 3, "free_pages": (4000,) * 3} | fields)


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
    fleet.book(request, placement)
    return placement


@dataclass(slots=True)
class Replica:
    """A replica without a model, and the publisher of its live profiles."""

    profile: SchedulingProfile
    max_loras: int = 0
    engine: ModelFreeReplica = field(init=False)
    publisher: Publisher = field(init=False)

    def __post_init__(self) -> None:
        scheduler = new_scheduler(
            num_pages=self.profile.num_pages,
            max_model_len=self.profile.max_model_len,
            cost=self.profile.cost,
            **{name: getattr(self.profile, name) for name in SETTINGS},
            depth=self.profile.pipeline_parallel_size,
            interval_share=self.profile.interval_share,
            encoding=Encoding(100_000, self.profile.encoder_cost) if self.profile.encoder_cost is not None else None,
            max_loras=self.max_loras,
        )
        self.engine = ModelFreeReplica(scheduler, self.profile.cost.seconds, sample=lambda tokens: 7)
        self.publisher = Publisher(scheduler, "first")

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def now(self) -> float:
        return self.engine.now

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        slo_class: str = "standard",
        max_tokens: int = 20,
        leg: Leg = Leg.LOCAL,
        items: Sequence[Item] = NO_ITEMS,
        **fields: Any,
    ) -> int:
        """Take a request. Return the number of the last live profile that does not include it."""
        self.engine.add(name, prompt, slo_class, max_tokens, leg, items=items, **fields)
        for change in self.scheduler.adapters_to_load(self.now):
            self.scheduler.adapters.end(change.loads.fingerprint, 0.1)
        return self.publisher.sequence

    def step(self) -> list[str]:
        """Run one step. Return the requests that got a token."""
        return [delta.request_id for delta in self.engine.step().deltas]

    def step_until_token(self, name: str) -> None:
        """Run steps until the request gets a token."""
        while name not in self.step():
            pass

    def report(self, fleet: Fleet, name: str, now: float) -> None:
        """Send the router a live profile, and the page changes since the last one."""
        fleet.hear(name, self.publisher.live(self.now), now)
        for changes in self.publisher.page_changes():
            fleet.hear_pages(name, changes)
