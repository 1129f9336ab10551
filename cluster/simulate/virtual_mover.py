"""Moves the pages of a simulated replica's tiers: pages that are counted and not there, in their predicted seconds."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from crossdock.cluster.simulate.clock import Clock
from crossdock.workers.replica.tiers.page_mover import Loaded, Moved, Slots, Written
from crossdock.workers.schedule.prefixes.loading import PrefixLoad
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

_Job: TypeAlias = Iterator[float]
"""Yields the seconds of each page that is moved next, until the job has ended."""


@dataclass(slots=True, eq=False)
class VirtualMover:
    """Does its jobs one after the other, as the thread of a `PageThread`. Each replica has a folder of its own.

    Copies to the host take no time: on a GPU they run beside the steps.
    """

    clock: Clock
    num_slots: int
    page_bytes: int
    host_page_s: float  # seconds of a page from the host's memory, or to it
    file_page_s: float  # likewise of files
    most_file_bytes: int
    on_done: list[Callable[[], None]] = field(default_factory=list)
    is_alive: bool = True
    _files: OrderedDict[PageKey, int] = field(default_factory=OrderedDict)  # bytes of each, used longest ago first
    _jobs: deque[_Job] = field(default_factory=deque)
    _done: list[Moved] = field(default_factory=list)
    _free_at: float = 0.0  # when the page that is being moved will be there
    _looks_at: float = -1.0  # time of the next look
    _num_copied: int = 0  # to slots, since `take_copied`

    @property
    def file_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(self._files.values())

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Count a copy to slots, beside the steps."""
        self._num_copied += 1

    def take_copied(self) -> Sequence[float]:
        """Return the seconds of each copy to slots since the last call."""
        num_copied, self._num_copied = self._num_copied, 0
        return [self.host_page_s] * num_copied

    def write(self, key: PageKey, slots: Sequence[int]) -> None:
        """Begin to write a page to its file, behind the jobs before."""
        self._begin(self._write(key, len(slots)))

    def load(self, load: PrefixLoad, slots: Sequence[Slots]) -> None:
        """Begin to fill the pages of a load, behind the jobs before."""
        self._begin(self._load(load, slots))

    def take_done(self) -> Sequence[Moved]:
        """Return the results of jobs that ended by now. A step computes pages of a tail that have not begun to load."""
        self._go_on()
        done = self._done
        self._done = []
        return done

    def tell_if_stuck(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _begin(self, job: _Job) -> None:
        if not self._jobs:
            self._free_at = self.clock.now
        self._jobs.append(job)
        self._go_on()
        if self._done:
            self.clock.at(self.clock.now, self._look)

    def _go_on(self) -> None:
        """Begin and end what is due by now, and look again when the next page will be there."""
        while self._jobs and self._free_at <= self.clock.now:
            seconds = next(self._jobs[0], None)
            if seconds is None:
                self._jobs.popleft()
            else:
                self._free_at += seconds
        if self._jobs and self._looks_at != self._free_at:
            self._looks_at = self._free_at
            self.clock.at(self._free_at, self._look)

    def _look(self, now: float) -> None:
        self._go_on()
        if self._done:
            for listener in self.on_done:
                listener()

    def _write(self, key: PageKey, num_pages: int) -> _Job:
        seconds = num_pages * self.file_page_s
        yield seconds
        num_bytes = num_pages * self.page_bytes
        deleted = list[PageKey]()
        left = self.most_file_bytes - self.file_bytes - num_bytes
        while left < 0 and self._files:
            old, freed = self._files.popitem(last=False)
            deleted.append(old)
            left += freed
        if left >= 0:
            self._files[key] = num_bytes
        self._done.append(Written(key, left >= 0, seconds, deleted))

    def _load(self, load: PrefixLoad, slots: Sequence[Slots]) -> _Job:
        counts = [0, 0]
        lost = None
        while lost is None and (number := load.take()) is not None:
            each = load.pages[number]
            is_in_file = slots[number] is None
            if is_in_file and each.key not in self._files:
                lost = each
                continue
            if is_in_file:
                self._files.move_to_end(each.key)
            yield len(each.pages) * (self.file_page_s if is_in_file else self.host_page_s)
            load.land()
            counts[is_in_file] += len(each.pages)
        from_host = counts[0], counts[0] * self.host_page_s
        from_files = counts[1], counts[1] * self.file_page_s
        self._done.append(Loaded(load, slots, from_host, from_files, lost))
