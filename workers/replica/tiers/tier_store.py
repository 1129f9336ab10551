"""Stores evicted pages in tiers and loads them again, in a thread of its own: no step waits for a file.

The engine's thread copies an evicted page to the host's memory before the page is used again. From there the other
thread writes files. Work and results travel in two queues, and the engine's thread takes results in between steps.

A page that cannot be stored or loaded, for whatever reason, is a page that is not stored, or a miss. A thread that has
ended ends the replica, see `is_alive`.
"""

import logging
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeAlias

from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.schedule.memory.block_pool import BlockPool
from crossdock.workers.schedule.prefixes.loading import PageLoad, PrefixLoad, TierLoading
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier, TierCounts, TierPages
from crossdock.workers.schedule.request.page_hashes import PageHash

logger = logging.getLogger(__name__)

# Bytes per second, until the first pages are measured.
_HOST_RATE = 5e9
_FILE_RATE = 5e8
_MOST_OFFERED = 8  # cached pages on their way to files while there is nothing to compute
_CHANGES_S = 10.0  # from one look for other replicas' files to the next
_CLOSE_S = 30.0  # until `close` leaves a thread that waits for a volume
_STUCK_S = 30.0  # after which one page, or one look, is told of as stuck

_Job: TypeAlias = Callable[[], Callable[[TierLoading], None]]
"""Runs in the other thread, and returns what the engine's thread is to do then."""

Slots: TypeAlias = Sequence[int] | None
"""The slots in the host's memory that hold a page; None: the page is in a file."""


class HostTier:
    """The slots of pages. All calls belong to the engine's thread; slots in use may be read by another one."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._held: OrderedDict[PageKey, Sequence[int]] = OrderedDict()  # least recently used first
        self._uses: Counter[PageKey] = Counter()

    def __contains__(self, key: PageKey) -> bool:
        return key in self._held

    @property
    def num_used(self) -> int:
        """Return how many slots hold pages."""
        return self._num_slots - len(self._free)

    def take(self, key: PageKey, num_slots: int) -> tuple[Sequence[int], list[PageKey]]:
        """Return slots for a page that is not here, and the pages that give way. No slot: too many are in use."""
        gone = list[PageKey]()
        missing = num_slots - len(self._free)
        for old, slots in self._held.items():
            if missing <= 0:
                break
            if old not in self._uses:
                gone.append(old)
                missing -= len(slots)
        if missing > 0:
            return [], []
        for old in gone:
            self.drop(old)
        self._held[key] = taken = [self._free.pop() for _ in range(num_slots)]
        return taken, gone

    def use(self, key: PageKey) -> Sequence[int]:
        """Return the slots of a page, which stays until `end_use`."""
        self._held.move_to_end(key)
        self._uses[key] += 1
        return self._held[key]

    def end_use(self, key: PageKey) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]

    def drop(self, key: PageKey) -> None:
        """Free the slots of a page, if it is here."""
        with suppress(KeyError):
            self._free += self._held.pop(key)


class _Loaded(NamedTuple):
    """How far a load came: pages and seconds of host and files, and the first page that is lost."""

    by_tier: Sequence[tuple[int, float]]
    lost: PageLoad | None


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
        self._host = HostTier(num_slots)
        self._files = files
        self._copies = copies
        self._page_bytes = page_bytes
        self._host_tier = PageTier("host", page_bytes / _HOST_RATE, page_bytes / _HOST_RATE) if stay else None
        self._file_tier = (
            PageTier("files", page_bytes / _FILE_RATE, page_bytes / _FILE_RATE) if files is not None else None
        )
        self.tiers = TierPages([tier for tier in (self._host_tier, self._file_tier) if tier is not None])
        self.on_done: list[Callable[[], None]] = []  # called when there is a result to take in
        self._from_files = range(num_slots, len(copies.slots))
        self._copying: deque[Callable[[], float | None]] = deque()  # copies to the host, oldest first
        self._num_pending = 0  # writes and loads whose result has not been taken in
        self._writing = set[PageKey]()
        self._offers: list[int] | None = None  # cached pages to look at, last one first; None: a step has come since
        self._reasons: dict[str, str] = {}  # reasons that were logged last, by the action that failed
        self._since: float | None = None  # s on the monotonic clock: when the other thread has begun its job
        self._is_stuck = False  # whether the log says that the thread is stuck
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

    @property
    def is_alive(self) -> bool:
        """Return whether the other thread runs."""
        return self._thread.is_alive()

    def tell_if_stuck(self) -> None:
        """Log once that the other thread waits for a volume. Prompts are computed meanwhile."""
        since = self._since
        now = time.monotonic()
        is_stuck = since is not None and now - since > _STUCK_S
        if is_stuck and not self._is_stuck:
            logger.error("kv_cache_files: the volume does not answer; prompts are computed until it does")
        self._is_stuck = is_stuck

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

    def offer(self, block_pool: BlockPool) -> None:
        """Write some of the cached pages to files. Call this while there is nothing to compute, after every result."""
        if self._file_tier is None:
            return
        if self._offers is None:
            self._offers = block_pool.cached.newest_first()[::-1]
        while self._offers and self._num_pending < _MOST_OFFERED:
            block_pool.offer(self._offers.pop(), self._write_only)

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
        self._learn_copies()
        while self._done:
            self._done.popleft()(loading)

    def _learn_copies(self) -> None:
        """Learn the seconds of the copies to the host that have ended: a GPU copies beside the steps."""
        while self._copying and (seconds := self._copying[0]()) is not None:
            self._copying.popleft()
            if self._host_tier is not None:
                self._host_tier.took(seconds)

    def close(self) -> None:
        """End the other thread, after the work that was queued before. One that waits for a volume is left behind."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error("kv_cache_files: a volume does not answer; its last pages are not stored")

    def _store(self, key: PageKey, pages: Sequence[int], tiers: Sequence[PageTier]) -> None:
        writes = self._file_tier is not None and self._file_tier in tiers and key not in self._writing
        if key not in self._host:
            if not tiers or not (writes or self._host_tier in tiers):
                return
            slots, gone = self._host.take(key, len(pages))
            if not slots:
                return
            seconds = self._copies.copy_out(pages, slots)
            if self._host_tier is not None:
                self._host_tier.drop(gone)
                self._host_tier.stored(key, None)
                self._copying.append(seconds)
                self._learn_copies()
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
        self._log_once("a page is not stored", error)
        if not error:
            self._file_tier.stored(key, seconds)

    def _end_load(self, load: PrefixLoad, slots: Sequence[Slots], loaded: _Loaded, loading: TierLoading) -> None:
        self._num_pending -= 1
        for each, held in zip(load.pages, slots, strict=True):
            if held is not None:
                self._host.end_use(each.key)
        if loaded.lost is not None:
            loaded.lost.tier.lost(loaded.lost.key)
        for tier, (count, seconds) in zip((self._host_tier, self._file_tier), loaded.by_tier, strict=True):
            if tier is not None and count:
                tier.loaded(count, seconds)
        loading.end(load)

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
        self._since = time.monotonic()
        self._done.append(job())
        self._since = None
        for listener in self.on_done:
            listener()

    def _look(self) -> Callable[[TierLoading], None]:
        """Look for files that other replicas have written or deleted."""
        assert self._files is not None
        came = set[PageKey]()
        gone = set[PageKey]()
        error = ""
        try:
            came, gone = self._files.changes()
        except Exception as reason:
            error = _text(reason)
        self._log_once("a look for other replicas' pages has failed", error)

        def apply(_: TierLoading) -> None:
            assert self._file_tier is not None
            self._file_tier.hold(came)
            self._file_tier.drop(gone)

        return apply

    def _write(self, key: PageKey, slots: Sequence[int]) -> Callable[[TierLoading], None]:
        assert self._files is not None
        started = time.perf_counter()
        deleted = set[PageKey]()
        error = ""
        try:
            self._copies.wait()
            deleted = self._files.write(key, [self._copies.slots[slot].numpy().data for slot in slots])
        except Exception as reason:
            error = _text(reason)
        return partial(self._end_write, key, deleted, time.perf_counter() - started, error)

    def _load_all(self, load: PrefixLoad, slots: Sequence[Slots]) -> Callable[[TierLoading], None]:
        counts = [0, 0]
        seconds = [0.0, 0.0]
        lost = None
        error = ""
        while lost is None and (number := load.take()) is not None:
            each = load.pages[number]
            held = slots[number]
            started = time.perf_counter()
            is_in_file = int(held is None)
            try:
                self._copies.wait()
                held = self._read(each) if held is None else held
                if held is not None:
                    self._copies.copy_in(held, each.pages)
            except Exception as reason:
                held = None
                error = _text(reason)
            self._since = time.monotonic()  # it answers
            if held is None:
                lost = each
                continue
            load.land()
            counts[is_in_file] += len(each.pages)
            seconds[is_in_file] += time.perf_counter() - started
        self._log_once("a page is not loaded", error)
        return partial(self._end_load, load, slots, _Loaded([*zip(counts, seconds, strict=True)], lost))

    def _log_once(self, what: str, error: str) -> None:
        """Log why something has failed, unless it failed for the same reason the last time."""
        if error and error != self._reasons.get(what):
            logger.error("kv_cache_files: %s: %s", what, error)
        self._reasons[what] = error

    def _read(self, wanted: PageLoad) -> Slots:
        """Return the bytes of a page from its file; None: the page is lost."""
        slots = self._from_files[: len(wanted.pages)]
        into = self._copies.slots[slots.start : slots.stop].view(-1)
        is_found = self._files is not None and self._files.read(wanted.key, into.numpy().data)
        return slots if is_found else None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
