"""The device of a simulated replica: steps that take their predicted seconds, drawn tokens, and loads of adapters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import exp
from pathlib import Path

import numpy as np

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.fleet import SimulatedAdapters, SimulatedPool
from crossdock.cluster.simulate.virtual_mover import VirtualMover
from crossdock.kvtransfer.transport import Memory
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.emulated import EmulatedRunner, EmulatedSampler, NoGrammars, pool_spec_of
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.executor import Executor
from crossdock.workers.replica.tiers.tier_store import TierStore, slots_for
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.adapter_slots import AdapterSlots, SlotChange
from crossdock.workers.schedule.cost.stages import Stages
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.batch import SampledToken, Scheduled
from crossdock.workers.schedule.request.request import Request

TOKEN = 2**32 - 1  # the token that every simulated model samples
_SAMPLED = SampledToken(TOKEN)
_ROWS = 100_000  # of embeddings, where the profile does not say how many a replica keeps
_DRAFT_SEED = 1  # sets their random numbers apart from those of noise


@dataclass(slots=True)
class Noise:
    """Random factors of the steps' seconds around their prediction: log-normal, with mean 1."""

    spread: float
    seed: tuple[int, int]  # of the simulation, and the replica's number
    num_steps: int = 0  # that have begun
    _block: int = -1
    _factors: list[float] = field(default_factory=list)

    @property
    def overrun(self) -> float:
        """Return the 95th percentile of the factors, which a real replica measures: see `StepCostFit.overrun`."""
        return max(exp(1.645 * self.spread - self.spread**2 / 2), 1.0)

    def vary(self, predicted: float) -> float:
        """Return the seconds of the next step."""
        self.num_steps += 1
        return predicted * self.factor(self.num_steps - 1)

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

    def add(self, request: Request) -> None:
        pass

    def remove(self, request_id: str) -> None:
        pass


@dataclass(slots=True)
class SimulatedDrafts:
    """Drafts that cost nothing, as many as are wanted. `DrawnDrafts` draws which of them are accepted."""

    policy: DraftPolicy

    def add(self, request: Request) -> None:
        pass

    def remove(self, request_id: str) -> None:
        pass

    def drafts(self, wanted: Mapping[str, int]) -> dict[str, Sequence[int]]:
        """Return so many drafts for each request."""
        return {name: [TOKEN] * count for name, count in wanted.items()}


@dataclass(slots=True)
class SimulatedAdapterLoads:
    """Loads of adapters that take equal seconds, and never fail."""

    clock: Clock
    load_s: float
    on_done: list[Callable[[], None]] = field(default_factory=list)
    _done: list[str] = field(default_factory=list)  # fingerprints of adapters that are loaded

    def begin(self, changes: Sequence[SlotChange]) -> None:
        """Begin loads."""
        for change in changes:
            self.clock.at(self.clock.now + self.load_s, partial(self._end, change.loads.fingerprint))

    def take_in(self, slots: AdapterSlots) -> list[tuple[Request, str]]:
        """Note the loads that have ended."""
        for fingerprint in self._done:
            slots.end(fingerprint, self.load_s)
        self._done.clear()
        return []

    def check(self, folder: Path) -> None:
        """Take every adapter."""

    def close(self) -> None:
        pass

    def _end(self, fingerprint: str, now: float) -> None:
        self._done.append(fingerprint)
        for listener in self.on_done:
            listener()


def clocked_engine(
    pool: SimulatedPool, clock: Clock, noise: Noise, adapters: SimulatedAdapters
) -> tuple[EmulatedRunner, Engine]:
    """Return a runner and its engine, whose steps begin at times of `clock`: finish each when the runner's `ends` has
    come."""
    profile = pool.profile
    speculative = pool.speculative_config
    settings = {"enable_prefix_caching": pool.enable_prefix_caching, "max_loras": adapters.slots}
    config = EngineConfig.model_validate(pool.engine.model_dump() | settings)
    depth = profile.pipeline_parallel_size
    page_bytes = max(profile.page_bytes, profile.page_size)  # a profile may not say it
    stages = Stages.of(depth, profile.interval_share)
    tiers = _tiers(profile, clock)
    pages = PagePool(
        profile.num_pages,
        profile.page_size,
        pool.enable_prefix_caching,
        profile.windows,
        profile.state_pages,
        None if tiers is None else tiers.evicted,
    )
    runner = EmulatedRunner(profile.cost, profile.encoder_cost, stages, clock.time, noise.vary)
    executor = Executor(
        config,
        runner,
        EmulatedSampler(DrawnDrafts(pool.draft_acceptance, noise.seed), clock.time, _never_late),
        NoGrammars(),
        pages,
        lambda: Memory(0, profile.num_pages * page_bytes, bytes_per_second=profile.bytes_per_second),
        profile.max_model_len,
        TOKEN + 1,
        (),
        is_ahead=profile.runs_ahead and depth == 1 and speculative is None,
        check=lambda _: None,
        spec_of=lambda name: pool_spec_of(profile, profile.page_size, page_bytes, profile.num_pages, name),
        encoding=Encoding(profile.encoder_tokens or _ROWS, profile.encoder_cost, profile.keeps_items_whole),
        speculation=SimulatedDrafts(DraftPolicy(speculative)) if speculative is not None else None,
        adapters=SimulatedAdapterLoads(clock, adapters.load_s) if adapters.count else None,
        tiers=tiers,
    )
    engine = Engine(executor, clock.time)
    engine.scheduler.learn(profile.cost, max(profile.overrun, noise.overrun), stages.interval_share)
    return runner, engine


def _tiers(profile: SchedulingProfile, clock: Clock) -> TierStore | None:
    """Return the tiers of a profile; None: it has none."""
    sizes = {size.name: size for size in profile.tiers if size.num_bytes}
    if not sizes:
        return None
    host, files = sizes.get("host"), sizes.get("files")
    page_bytes = max(profile.page_bytes, 1)
    most_pages = max(profile.state_pages, 1)
    mover = VirtualMover(
        clock,
        slots_for(0 if host is None else host.num_bytes, page_bytes, most_pages),
        page_bytes,
        host_page_s=0.0 if host is None else page_bytes / host.bytes_per_second,
        file_page_s=0.0 if files is None else page_bytes / files.bytes_per_second,
        most_file_bytes=0 if files is None else files.num_bytes,
    )
    return TierStore(
        mover,
        page_bytes,
        host_rate=None if host is None else host.bytes_per_second,
        file_rate=None if files is None else files.bytes_per_second,
        most_pages=most_pages,
    )


def _never_late(seconds: float) -> None:
    raise AssertionError(f"a step was finished {seconds} s before its end")
