"""When a replica publishes, and under which numbers; and the shares of its time, averaged."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf

from crossdock.workers.report.advertise import observe
from crossdock.workers.report.link import LinkFit
from crossdock.workers.report.live_profile import MEMORY_S, LiveProfile, PageChanges, RecentShares
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.prefixes.tier_pages import PageTier
from crossdock.workers.schedule.scheduler import Scheduler

_STEADY_S = 1.0  # between two live profiles while streams only go on


@dataclass(slots=True)
class TimeShares:
    """Shares of a replica's time, averaged over the last `MEMORY_S`: for prompts of each class, and for streams."""

    scheduler: Scheduler
    prompts: list[float] = field(init=False)  # by priority
    streams: float = 0.0
    _measured: float = 0.0  # when they were last measured, in seconds
    _tokens: list[int] = field(default_factory=list)  # prompt tokens computed until then, by priority
    _streams_then: float = 0.0  # share of streams at that time

    def __post_init__(self) -> None:
        self.prompts = [0.0] * len(self.scheduler.config.slo_classes)

    def measure(self, now: float) -> None:
        """Average the shares since the last call with the earlier ones."""
        seconds = now - self._measured
        self._measured = now
        old = exp(-seconds / MEMORY_S)
        self.streams = old * self.streams + (1 - old) * self._streams_then
        self._streams_then = 1 - self.scheduler.forecast.prefill_share(0)
        cost = self.scheduler.forecast.cost.per_prefill_token if self.scheduler.forecast.cost is not None else 0.0
        cost *= self.scheduler.forecast.interval_share  # several steps in flight compute at the same time
        tokens = [self.scheduler.table.prefilled.tokens_by_priority[priority] for priority in range(len(self.prompts))]
        before = self._tokens or tokens
        self._tokens = tokens
        if seconds > 0:
            for priority, mean in enumerate(self.prompts):
                share = min((tokens[priority] - before[priority]) * cost / seconds, 1.0)
                self.prompts[priority] = old * mean + (1 - old) * share


@dataclass(slots=True)
class Publisher:
    """Numbers what a replica publishes, and limits how often.

    A live profile is due at once when the replica starts to work and when it has finished. It is due every `interval_s`
    at most while requests arrive, end or have prompts computed. It is due every second while streams only go on,
    because routers can extrapolate that.
    """

    scheduler: Scheduler
    incarnation: str
    interval_s: float = 0.05
    role: Role | None = None
    sequence: int = 0  # of the last live profile: a request added now is included in the next one
    _num_page_changes: int = 0
    _was_busy: bool = False  # at the last live profile
    _published: float = 0.0  # time of the last live profile, in seconds
    _activity: tuple[int, ...] = ()  # at the last live profile, see `_current_activity`
    _shares: TimeShares = field(init=False)
    _step_seconds: float = 0.0
    _link: LinkFit = field(default_factory=LinkFit)

    def __post_init__(self) -> None:
        self._shares = TimeShares(self.scheduler)

    def is_due(self, now: float) -> bool:
        """Return whether a live profile is due at `now`, in seconds."""
        return now >= self.due

    @property
    def due(self) -> float:
        """Return the time at which the next live profile is due if streams only go on until then."""
        is_busy = self._is_busy
        if not is_busy or not self._was_busy:
            return inf if is_busy == self._was_busy else -inf
        return self._published + (self.interval_s if self._current_activity != self._activity else _STEADY_S)

    def live(self, now: float, step_seconds: float = 0.0) -> LiveProfile:
        """Return the live profile at `now`.

        `step_seconds`: of the last step, without the time before another ended; 0: no step since the last call.
        """
        self.sequence += 1
        self._was_busy = self._is_busy
        self._activity = self._current_activity
        self._published = now
        self._step_seconds = step_seconds or self._step_seconds
        self._shares.measure(now)
        return observe(
            self.scheduler,
            self.incarnation,
            self.sequence,
            RecentShares(tuple(self._shares.prompts), self._shares.streams),
            self._step_seconds if self.scheduler.table.has_work else 0.0,
            self._link.cost,
            self.role,
        )

    def assign_role(self, role: Role) -> None:
        """Change the role; a live profile is due at once."""
        self.role = role
        self.renew()

    def renew(self) -> None:
        """Make a live profile due at once: what routers must know has changed."""
        self._was_busy = not self._is_busy

    def transferred(self, num_bytes: int, seconds: float) -> None:
        """Note a transfer of pages to another replica."""
        self._link.observe(num_bytes, seconds)

    def page_changes(self) -> Sequence[PageChanges]:
        """Return the changes of the prefix index and of the tiers since the last call, if any."""
        added, evicted = self.scheduler.pages.prefixes.changes.take()
        tiers = [tier.changes.take() for tier in self._tiers]
        if not any((added, evicted, *(part for both in tiers for part in both))):
            return ()
        self._num_page_changes += 1
        stored = [came for came, _ in tiers]
        lost = [went for _, went in tiers]
        return (PageChanges(self.incarnation, self._num_page_changes, added, evicted, stored=stored, lost=lost),)

    def all_pages(self) -> PageChanges:
        """Return the complete prefix index for a new reader. The next `page_changes` continue from there.

        Call this after the other readers were given the result of `page_changes`.
        """
        stored = [tier.findable() for tier in self._tiers]
        index = self.scheduler.pages.prefixes
        return PageChanges(self.incarnation, self._num_page_changes, index.findable(), is_all=True, stored=stored)

    @property
    def _tiers(self) -> Sequence[PageTier]:
        return self.scheduler.loading.tiers.tiers

    @property
    def _is_busy(self) -> bool:
        table = self.scheduler.table
        return bool(table.running or table.waiting or table.held)

    @property
    def _current_activity(self) -> tuple[int, ...]:
        """Return numbers of which one differs whenever a request arrived, ended, or had prompt tokens computed."""
        scheduler = self.scheduler
        return (
            len(scheduler.table.waiting),
            len(scheduler.table.running),
            len(scheduler.table.held),
            scheduler.table.prefilled.tokens,
        )
