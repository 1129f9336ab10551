"""The last pages of a prefix, filled from the end by somebody else while their request computes those before."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ArrivingTail:
    """The numbers of pages that neither side has begun with. Who fills takes the last one, who computes the first.

    Both may do so at the same time, in two threads: each call of the deque is atomic.
    """

    owner: str  # of the pages, with all of the prefix
    num_pages: int  # of the prefix
    page_s: float  # predicted seconds to fill a page
    claimed: int  # pages before this one are computed, or will be
    landed_from: int | None = None  # nothing more will be filled, and pages from this one on are; None: not yet
    pending: deque[int] = field(init=False)  # ascending

    def __post_init__(self) -> None:
        self.pending = deque(range(self.claimed, self.num_pages))

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    def claim(self, end: int) -> int:
        """Take the pages before `end` to be computed, up to those that the other side has begun with.

        Returns the end of all pages that were taken so."""
        try:
            while self.pending[0] < end:
                self.claimed = self.pending.popleft() + 1
        except IndexError:  # the other side has begun with all others
            pass
        return self.claimed

    def take_last(self) -> int | None:
        """Return the number of the page to fill next; None: none is left."""
        try:
            return self.pending.pop()
        except IndexError:
            return None
