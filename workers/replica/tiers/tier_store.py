"""Stores evicted pages in tiers and loads them again, in a thread of its own: no step waits for a file.

The engine's thread copies an evicted page to the host's memory before the page is used again. From there the other
thread writes files. Work and results travel in two queues, and the engine's thread takes results in between steps.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.host_tier import HostTier
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.schedule.memory.page_stock import PageStock
from crossdock.workers.schedule.memory.prefix_index import PageHash
from crossdock.workers.schedule.prefixes.loading import PageLoad, PrefixLoad, TierLoading
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierCounts, TierPages

logger = logging.getLogger(__name__)

_HOST_RATE, _FILE_RATE = 5e9, 5e8  # bytes per second, until the first pages are measured
_MOST_OFFERED = 8  # cached pages on their way to files while there is nothing to compute
_CHANGES_S = 10.0  # from one look for other replicas' files to the next

_Job: TypeAlias = Callable[[], Callable[[TierLoading], None]]
"""Runs in the other thread, and returns what the engine's thread is to do then."""

Slots: TypeAlias = Sequence[int] | None
"""The slots in the host's memory that hold a page; None: the page is in a file."""


class _Loaded(NamedTuple):
    """How far a load came: pages and seconds of host and files, and the first page that is lost."""

    by_tier: Sequence[tuple[int, float]]
    lost: PageLoad | None
    landed_from: int  # of a tail: the first page that has landed


class TierStore:
    """The tiers of one engine. Its methods belong to the engine's thread; `on_done` is called in the other one."""

    def __init__(
        self,
        copies: PoolCopies,
        page_bytes: int,
        files: FileTier | None,
        *,
        stay: bool,
        most_pages: int = 1,
    ) -> None:
        """`page_bytes`: of all ranks. `stay`: pages stay in the slots of `copies`; else these are for pages on their
        way to files. `most_pages`: of the largest entry, a state: the last slots are for one that is read from files.
        """
        num_slots = len(copies.slots) - most_pages
        self._host, self._files, self._copies, self._page_bytes = HostTier(num_slots), files, copies, page_bytes
        self._host_tier = PageTier("host", page_bytes / _HOST_RATE, page_bytes / _HOST_RATE) if stay else None
        self._file_tier = (
            PageTier("files", page_bytes / _FILE_RATE, page_bytes / _FILE_RATE) if files is not None else None
        )
        self.tiers = TierPages([tier for tier in (self._host_tier, self._file_tier) if tier is not None])
        self.on_done: list[Callable[[], None]] = []  # called when there is a result to take in
        self._from_files = range(num_slots, len(copies.slots))
        self._num_pending = 0  # writes and loads whose result has not been taken in
        self._writing = set[PageKey]()
        self._offers: list[int] | None = None  # cached pages to look at, last one first; None: a step has come since
        self._failed_write = ""  # the reason that was logged last
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[Callable[[TierLoading], None]] = deque()
        if self._file_tier is not None and files is not None:
            self._file_tier.hold(files.changes()[0])
        self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
        self._thread.start()

    @property
    def num_slots(self) -> int:
        """Return how many pages' bytes each rank has beside its pool."""
        return len(self._copies.slots)

    @property
    def is_idle(self) -> bool:
        """Return whether every write and every load has ended, and its result was taken in."""
        return not self._num_pending

    def counts(self) -> list[TierCounts]:
        """Return the counts of each tier, fastest first; bytes of files are those of all models and replicas."""
        in_slots = self._host.num_used * self._page_bytes
        num_bytes = {"host": in_slots, "files": 0 if self._files is None else self._files.num_bytes}
        return [
            TierCounts(
                each.name, len(each.pages), num_bytes[each.name], each.num_stores, each.num_loads, each.num_misses
            )
            for each in self.tiers.tiers
        ]

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def evicted(self, group: int, page_hash: PageHash, pages: Sequence[int], compute_s: float) -> None:
        """Store the content of evicted pages where that is worth it; see `OnEvict`. Without a free slot it is lost."""
        self.tiers.returns.evicted(page_hash)
        self._store(PageKey(group, page_hash), pages, self.tiers.worth_storing(PageKey(group, page_hash), compute_s))

    def offer(self, stock: PageStock) -> None:
        """Write some of the cached pages to files. Call this while there is nothing to compute, after every result."""
        if self._file_tier is None:
            return
        if self._offers is None:
            self._offers = stock.cached.newest_first()[::-1]
        while self._offers and self._num_pending < _MOST_OFFERED:
            stock.offer(self._offers.pop(), self._write_only)

    def _is_held(self, key: PageKey) -> bool:
        """Return whether a page is in the host's memory to stay, and not only on its way to a file."""
        return self._host_tier is not None and key in self._host

    def _write_only(self, group: int, page_hash: PageHash, pages: Sequence[int], compute_s: float) -> None:
        """Store the content of a page in files; see `OnEvict`. The page is still in the pool, too."""
        key = PageKey(group, page_hash)
        self._store(key, pages, [tier for tier in self.tiers.worth_storing(key, compute_s) if tier is self._file_tier])

    def load(self, loads: Sequence[PrefixLoad]) -> None:
        """Begin to fill the pages of prefixes. Called once for every step."""
        self._offers = None
        for load in loads:
            slots = [self._host.use(each.key) if self._is_held(each.key) else None for each in load.pages]
            self._queue(partial(self._load_all, load, slots))

    def take_in(self, loading: TierLoading) -> None:
        """Apply what the other thread has done: pages that have landed, and what tiers hold now."""
        while self._done:
            self._done.popleft()(loading)

    def close(self) -> None:
        """End the other thread, after the work that was queued before."""
        self._jobs.put(None)
        self._thread.join()

    def _store(self, key: PageKey, pages: Sequence[int], tiers: Sequence[PageTier]) -> None:
        writes = self._file_tier is not None and self._file_tier in tiers and key not in self._writing
        if key not in self._host:
            if not tiers or not (writes or self._host_tier in tiers):
                return
            started = time.perf_counter()
            slots, gone = self._host.take(key, len(pages))
            if not slots:
                return
            self._copies.copy_out(pages, slots)
            if self._host_tier is not None:
                self._host_tier.drop(gone)
                self._host_tier.stored(key, time.perf_counter() - started)
        if writes:
            self._writing.add(key)
            self._queue(partial(self._write, key, self._host.use(key)))

    def _queue(self, job: _Job) -> None:
        self._num_pending += 1
        self._jobs.put(job)

    def _end_write(self, key: PageKey, deleted: set[PageKey], seconds: float, error: str, _: TierLoading) -> None:
        assert self._file_tier is not None
        self._num_pending -= 1
        self._writing.discard(key)
        self._host.end_use(key)
        if self._host_tier is None:
            self._host.drop(key)
        self._file_tier.drop(deleted)
        if error and error != self._failed_write:
            logger.error("kv_cache_files: a page is not stored: %s", error)
        self._failed_write = error
        if not error:
            self._file_tier.stored(key, seconds)

    def _end_load(self, load: PrefixLoad, slots: Sequence[Slots], loaded: _Loaded, loading: TierLoading) -> None:
        self._num_pending -= 1
        num_pages = len(load.prefix.hashes)
        for each, held in zip(load.pages, slots, strict=True):
            if held is not None:
                self._host.end_use(each.key)
        if loaded.lost is not None:
            num_pages = loaded.lost.number
            loaded.lost.tier.lost(loaded.lost.key)
        for tier, (count, seconds) in zip((self._host_tier, self._file_tier), loaded.by_tier, strict=True):
            if tier is not None and count:
                tier.loaded(count, seconds)
        if load.tail is not None:
            loading.meet(load, loaded.landed_from)
        else:
            loading.finish(load, num_pages)

    # -- the other thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = time.monotonic()
        while True:
            try:
                job = self._jobs.get(timeout=_CHANGES_S if self._files is not None else None)
            except queue.Empty:
                job = self._look
            if job is None:
                return
            self._do(job)
            if self._files is not None and time.monotonic() - looked > _CHANGES_S:
                looked = time.monotonic()
                self._do(self._look)

    def _do(self, job: _Job) -> None:
        self._done.append(job())
        for listener in self.on_done:
            listener()

    def _look(self) -> Callable[[TierLoading], None]:
        """Look for files that other replicas have written or deleted."""
        assert self._files is not None
        came, gone = self._files.changes()

        def apply(_: TierLoading) -> None:
            assert self._file_tier is not None
            self._file_tier.hold(came)
            self._file_tier.drop(gone)

        return apply

    def _write(self, key: PageKey, slots: Sequence[int]) -> Callable[[TierLoading], None]:
        assert self._files is not None
        self._copies.wait()
        started, deleted, error = time.perf_counter(), set[PageKey](), ""
        try:
            deleted = self._files.write(key, [self._copies.slots[slot].numpy().data for slot in slots])
        except OSError as reason:
            error = f"{type(reason).__name__}: {reason}"
        return partial(self._end_write, key, deleted, time.perf_counter() - started, error)

    def _load_all(self, load: PrefixLoad, slots: Sequence[Slots]) -> Callable[[TierLoading], None]:
        counts, seconds, lost = [0, 0], [0.0, 0.0], None
        self._copies.wait()
        landed_from = len(load.prefix.hashes)
        for each, held in _in_order(load, slots):
            started, number = time.perf_counter(), int(held is None)
            if held is None:
                held = self._read(each)
            if held is None:
                lost = each
                break
            self._copies.copy_in(held, each.pages)
            counts[number] += len(each.pages)
            seconds[number] += time.perf_counter() - started
            landed_from = each.number
        return partial(self._end_load, load, slots, _Loaded([*zip(counts, seconds, strict=True)], lost, landed_from))

    def _read(self, wanted: PageLoad) -> Slots:
        """Return the bytes of a page from its file; None: the page is lost."""
        slots = self._from_files[: len(wanted.pages)]
        into = self._copies.slots[slots.start : slots.stop].view(-1)
        is_found = self._files is not None and self._files.read(wanted.key, into.numpy().data)
        return slots if is_found else None


def _in_order(load: PrefixLoad, slots: Sequence[Slots]) -> Iterator[tuple[PageLoad, Slots]]:
    """Yield the pages to load; of a tail from the last one backward, as long as no step computes them."""
    pairs = list(zip(load.pages, slots, strict=True))
    if load.tail is None:
        yield from pairs
        return
    first = load.pages[0].number
    while (number := load.tail.take_last()) is not None:
        yield pairs[number - first]
