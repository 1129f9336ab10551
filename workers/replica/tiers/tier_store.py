"""Which evicted pages are stored in tiers, which give way, and what loads bring back. Decides; a `PageMover` moves.

An evicted page is copied to the host's memory before anything is written to the page again. From there it is written
to a file.
Results are taken in between steps: no step waits for a file.

A page that cannot be stored or loaded, for whatever reason, is a page that is not stored, or a miss.
"""

from collections.abc import Sequence

from crossdock.workers.replica.tiers.host_tier import HostTier
from crossdock.workers.replica.tiers.page_mover import Loaded, PageMover, Seen, Written
from crossdock.workers.schedule.memory.block_pool import BlockPool
from crossdock.workers.schedule.prefixes.loading import PrefixLoad, TierLoading
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierCounts, TierName, TierPages
from crossdock.workers.schedule.request.page_hashes import PageHash

# Bytes per second, until the first pages are measured.
HOST_RATE = 5e9
FILE_RATE = 5e8
_MOST_OFFERED = 8  # cached pages on their way to files while there is nothing to compute
_STAGING_BYTES = 64 << 20  # of host memory on the way to files, where no memory is given to pages


def slots_for(host_bytes: int, page_bytes: int, most_pages: int) -> int:
    """Return how many slots a `PageMover` needs in the host's memory.

    `host_bytes`: for pages that stay; 0: slots are for pages on their way to files. `most_pages`: of the largest entry,
    a state: the last slots are for one that is read from files.
    """
    return most_pages + (host_bytes // page_bytes or max(_STAGING_BYTES // page_bytes, 2 * most_pages))


class TierStore:
    """The tiers of one engine. Its methods belong to the engine's thread."""

    def __init__(
        self,
        mover: PageMover,
        page_bytes: int,
        *,
        host_rate: float | None,
        file_rate: float | None,
        most_pages: int = 1,
    ) -> None:
        """`page_bytes`: of all ranks. Rates in bytes per second, until pages are measured. `host_rate` None: slots are
        for pages on their way to files. `file_rate` None: there are no files. `most_pages`: as in `slots_for`."""
        self._mover = mover
        self._host = HostTier(mover.num_slots - most_pages)
        self._page_bytes = page_bytes
        self._host_tier = _tier("host", page_bytes, host_rate)
        self._file_tier = _tier("files", page_bytes, file_rate)
        self.tiers = TierPages([tier for tier in (self._host_tier, self._file_tier) if tier is not None])
        self.on_done = mover.on_done
        self.tell_if_stuck = mover.tell_if_stuck
        self.close = mover.close
        self._num_pending = 0  # writes and loads whose result has not been taken in
        self._writing = set[PageKey]()
        self._offers: list[int] | None = None  # cached pages to look at, last one first; None: a step has come since
        for moved in mover.take_done():  # routers hear of files before the first step
            assert isinstance(moved, Seen)
            self._see(moved)

    @property
    def is_idle(self) -> bool:
        """Return whether every write and every load has ended, and its result was taken in."""
        return not self._num_pending

    @property
    def is_alive(self) -> bool:
        """Return whether pages are moved. If not, no load would ever end."""
        return self._mover.is_alive

    def counts(self) -> list[TierCounts]:
        """Return the counts of each tier, fastest first; bytes of files are those of all models and replicas."""
        num_bytes = {"host": self._host.num_used * self._page_bytes, "files": self._mover.file_bytes}
        return [
            TierCounts(
                each.name, len(each.pages), num_bytes[each.name], each.num_stores, each.num_loads, each.num_misses
            )
            for each in self.tiers.tiers
        ]

    # -- stores ------------------------------------------------------------------------------------------------------

    def evicted(self, group: int, page_hash: PageHash, pages: Sequence[int], compute_s: float) -> None:
        """Store the content of evicted pages where that is worth it; see `OnEvict`. Without a free slot it is lost."""
        self.tiers.returns.evicted(page_hash)
        key = PageKey(group, page_hash)
        self._store(key, pages, self.tiers.worth_storing(key, compute_s))

    def offer(self, block_pool: BlockPool) -> None:
        """Write some of the cached pages to files, so that a restart finds them. Call this while there is nothing to
        compute, after every result."""
        if self._file_tier is None:
            return
        if self._offers is None:
            self._offers = block_pool.cached.newest_first()[::-1]
        while self._offers and self._num_pending < _MOST_OFFERED:
            block_pool.offer(self._offers.pop(), self._write_only)

    def _write_only(self, group: int, page_hash: PageHash, pages: Sequence[int], compute_s: float) -> None:
        """Store the content of a page in files; see `OnEvict`. The page is still in the pool, too."""
        key = PageKey(group, page_hash)
        self._store(key, pages, [tier for tier in self.tiers.worth_storing(key, compute_s) if tier is self._file_tier])

    def _store(self, key: PageKey, pages: Sequence[int], tiers: Sequence[PageTier]) -> None:
        writes = self._file_tier is not None and self._file_tier in tiers and key not in self._writing
        if key not in self._host:
            if not tiers or not (writes or self._host_tier in tiers):
                return
            slots, gone = self._host.take(key, len(pages))
            if not slots:
                return
            self._mover.copy_out(pages, slots)
            if self._host_tier is not None:
                self._host_tier.drop(gone)
                self._host_tier.stored(key, None)
                self._learn_copies()
        if writes:
            self._writing.add(key)
            self._num_pending += 1
            self._mover.write(key, self._host.use(key))

    def _learn_copies(self) -> None:
        """Learn the seconds of the copies to the host that have ended."""
        for seconds in self._mover.take_copied():
            if self._host_tier is not None:
                self._host_tier.took(seconds)

    # -- loads -------------------------------------------------------------------------------------------------------

    def load(self, loads: Sequence[PrefixLoad]) -> None:
        """Begin to fill the pages of prefixes. Called once for every step."""
        self._offers = None
        for load in loads:
            slots = [self._host.use(each.key) if self._is_held(each.key) else None for each in load.pages]
            self._num_pending += 1
            self._mover.load(load, slots)

    def _is_held(self, key: PageKey) -> bool:
        """Return whether a page is in the host's memory to stay, and not only on its way to a file."""
        return self._host_tier is not None and key in self._host

    def take_in(self, loading: TierLoading) -> None:
        """Apply what has ended: pages that have landed, and what tiers hold now."""
        self._learn_copies()
        for moved in self._mover.take_done():
            match moved:
                case Loaded():
                    self._end_load(moved, loading)
                case Written():
                    self._end_write(moved)
                case Seen():
                    self._see(moved)

    def _see(self, seen: Seen) -> None:
        assert self._file_tier is not None
        self._file_tier.hold(seen.came)
        self._file_tier.drop(seen.gone)

    def _end_write(self, written: Written) -> None:
        assert self._file_tier is not None
        self._num_pending -= 1
        self._writing.discard(written.key)
        self._host.end_use(written.key)
        if self._host_tier is None:
            self._host.drop(written.key)
        self._file_tier.drop(written.deleted)
        if written.is_stored:
            self._file_tier.stored(written.key, written.seconds)

    def _end_load(self, loaded: Loaded, loading: TierLoading) -> None:
        self._num_pending -= 1
        for each, held in zip(loaded.load.pages, loaded.slots, strict=True):
            if held is not None:
                self._host.end_use(each.key)
        if loaded.lost is not None:
            loaded.lost.tier.lost(loaded.lost.key)
        for tier, (count, seconds) in ((self._host_tier, loaded.from_host), (self._file_tier, loaded.from_files)):
            if tier is not None and count:
                tier.loaded(count, seconds)
        loading.end(loaded.load)


def _tier(name: TierName, page_bytes: int, rate: float | None) -> PageTier | None:
    return None if rate is None else PageTier(name, page_bytes / rate, page_bytes / rate)
