"""Moves pages between the pool, the host's memory and files, in a thread of its own: no step waits for a file.

Copies to the host are made before anything is written to the page again. Jobs and results travel in two
queues. A job that fails, for whatever reason, is a page that is not stored, or a miss. A thread that has ended ends the
replica, see `is_alive`.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.replica.tiers.page_files import PageFiles
from crossdock.workers.replica.tiers.page_mover import Loaded, Moved, Seen, Slots, Written
from crossdock.workers.schedule.prefixes.loading import PageLoad, PrefixLoad
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

logger = logging.getLogger(__name__)

_CHANGES_S = 10.0  # from one look for other replicas' files to the next
_CLOSE_S = 30.0  # until `close` leaves a thread that waits for a volume
_STUCK_S = 30.0  # after which one page, or one look, is told of as stuck

_Job: TypeAlias = Callable[[], Moved]


class PageThread:
    """Moves the pages of one engine. Its methods belong to the engine's thread; `on_done` is called in its own."""

    def __init__(self, copies: PoolCopies, files: PageFiles | None, most_pages: int = 1) -> None:
        """`most_pages`: of the largest entry, a state: the last slots are for one that is read from files."""
        self._files = files
        self._copies = copies
        self.num_slots = len(copies.slots)
        self.copy_out = copies.copy_out
        self.take_copied = copies.take_copied
        self.on_done: list[Callable[[], None]] = []
        self._from_files = range(self.num_slots - most_pages, self.num_slots)
        self._reasons: dict[str, str] = {}  # reasons that were logged last, by the action that failed
        self._since: float | None = None  # s on the monotonic clock: when the thread has begun its job
        self._is_stuck = False  # whether the log says that the thread is stuck
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: deque[Moved] = deque()
        if files is not None:
            self._done.append(Seen(*files.changes()))
        self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    @property
    def file_bytes(self) -> int:
        """Return the bytes of all files, those of other models and replicas too."""
        return 0 if self._files is None else self._files.num_bytes

    def tell_if_stuck(self) -> None:
        """Log once that the thread waits for a volume. Prompts are computed meanwhile."""
        since = self._since
        now = time.monotonic()
        is_stuck = since is not None and now - since > _STUCK_S
        if is_stuck and not self._is_stuck:
            logger.error("kv_cache_files: the volume does not answer; prompts are computed until it does")
        self._is_stuck = is_stuck

    def write(self, key: PageKey, slots: Sequence[int]) -> None:
        """Write the content of slots to the file of a page."""
        assert self._files is not None
        self._jobs.put(partial(self._write, key, slots, self._files.mark()))

    def load(self, load: PrefixLoad, slots: Sequence[Slots]) -> None:
        """Fill the pages of a load."""
        mark = 0 if self._files is None else self._files.mark()
        self._jobs.put(partial(self._load, load, slots, mark))

    def take_done(self) -> Iterator[Moved]:
        """Return the results of jobs since the last call, in order."""
        while self._done:
            yield self._done.popleft()

    def close(self) -> None:
        """End the thread, after the jobs that were given before. One that waits for a volume is left behind."""
        self._jobs.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error("kv_cache_files: a volume does not answer; its last pages are not stored")

    # -- in the thread -----------------------------------------------------------------------------------------------

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

    def _look(self) -> Seen:
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
        return Seen(came, gone)

    def _write(self, key: PageKey, slots: Sequence[int], mark: int) -> Written:
        assert self._files is not None
        started = time.perf_counter()
        deleted = set[PageKey]()
        error = ""
        try:
            deleted = self._files.write(key, slots, mark)
        except Exception as reason:
            error = _text(reason)
        self._log_once("a page is not stored", error)
        return Written(key, not error, time.perf_counter() - started, deleted)

    def _load(self, load: PrefixLoad, slots: Sequence[Slots], mark: int) -> Loaded:
        counts = [0, 0]
        seconds = [0.0, 0.0]
        lost = None
        error = self._expect(load, slots)
        while lost is None and (number := load.take()) is not None:
            each = load.pages[number]
            held = slots[number]
            started = time.perf_counter()
            is_in_file = int(held is None)
            is_there = True
            try:
                if held is None:
                    is_there = self._load_file(each, mark)
                else:
                    self._copies.copy_in(held, each.pages)
            except Exception as reason:
                is_there = False
                error = _text(reason)
            self._since = time.monotonic()  # it answers
            if not is_there:
                lost = each
                continue
            load.land()
            counts[is_in_file] += len(each.pages)
            seconds[is_in_file] += time.perf_counter() - started
        self._log_once("a page is not loaded", error)
        return Loaded(load, slots, (counts[0], seconds[0]), (counts[1], seconds[1]), lost)

    def _expect(self, load: PrefixLoad, slots: Sequence[Slots]) -> str:
        """Tell the files which pages a load will read. Returns why that has failed; empty: it has not."""
        in_order = range(len(load.pages)) if load.tail is None else reversed(range(len(load.pages)))
        keys = [load.pages[number].key for number in in_order if slots[number] is None]
        if self._files is not None and keys:
            try:
                self._files.expect(keys)
            except Exception as reason:
                return _text(reason)
        return ""

    def _log_once(self, what: str, error: str) -> None:
        """Log why something has failed, unless it failed for the same reason the last time."""
        if error and error != self._reasons.get(what):
            logger.error("kv_cache_files: %s: %s", what, error)
        self._reasons[what] = error

    def _load_file(self, wanted: PageLoad, mark: int) -> bool:
        """Fill a page from its file; False: it is lost."""
        slots = self._from_files[: len(wanted.pages)]
        return self._files is not None and self._files.load(wanted.key, slots, wanted.pages, mark)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
