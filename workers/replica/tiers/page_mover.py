"""Movers of pages for a `TierStore`, between the pool, slots in the host's memory and files, and their answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from crossdock.workers.schedule.prefixes.loading import PageLoad, PrefixLoad
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

Slots: TypeAlias = Sequence[int] | None
"""The slots in the host's memory that hold a page; None: the page is in a file."""


@dataclass(frozen=True, slots=True)
class Written:
    """The end of a write to a file."""

    key: PageKey
    is_stored: bool
    seconds: float
    deleted: Iterable[PageKey] = ()  # pages whose files were deleted to make room


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load."""

    load: PrefixLoad
    slots: Sequence[Slots]  # of each of its pages, as they were given
    from_host: tuple[int, float]  # pages of the pool that were filled, and seconds
    from_files: tuple[int, float]
    lost: PageLoad | None  # the first page that could not be loaded: the load ended there


@dataclass(frozen=True, slots=True)
class Seen:
    """Files that other replicas have written or deleted."""

    came: Iterable[PageKey]
    gone: Iterable[PageKey]


Moved: TypeAlias = Written | Loaded | Seen


class PageMover(Protocol):
    """Moves pages, one job after the other: `PageThread`, and `VirtualMover` of simulations."""

    num_slots: int
    """Slots in the host's memory. The last ones, as many as the largest entry has pages, are for reading files."""

    on_done: list[Callable[[], None]]
    """Called when `take_done` has something to return, perhaps in another thread."""

    @property
    def is_alive(self) -> bool:
        """Return whether jobs are done."""

    @property
    def file_bytes(self) -> int:
        """Return the bytes of all files."""

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages of the pool to slots, before anything is written to these pages."""

    def take_copied(self) -> Iterable[float]:
        """Return the seconds of each copy to slots that has ended since the last call."""

    def write(self, key: PageKey, slots: Sequence[int]) -> None:
        """Write the content of slots to the file of a page, behind the jobs before. Answers `Written`."""

    def load(self, load: PrefixLoad, slots: Sequence[Slots]) -> None:
        """Fill the pages of a load, behind the jobs before. Answers `Loaded`. `slots`: where each page lies."""

    def take_done(self) -> Iterable[Moved]:
        """Return the results of jobs since the last call, in order."""

    def tell_if_stuck(self) -> None:
        """Log once that a job does not end."""

    def close(self) -> None:
        """End, after the jobs that were given before."""
