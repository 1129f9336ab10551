"""The pages of a prefix that come for a request from elsewhere: from a tier below the pool, or from another replica."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ArrivingTail:
    """The last pages of a prefix, filled from the end by somebody else while their request computes those before.

    `pending` are those that neither side has begun with. Who fills takes the last one, who computes the first.

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


@dataclass(slots=True, eq=False)
class ComingPages:
    """Tells until when a request waits for pages from elsewhere, and which come while it computes others."""

    until: float = 0.0  # while waiting: time up to which it waits for them, see awaited.py
    is_looked_up: bool = False  # while waiting: in the tiers below the pool
    tail: ArrivingTail | None = None  # pages that are loaded while it computes those before
    num_awaited: int = 0  # prefixes from elsewhere that it has waited for

    def forget(self) -> None:
        """Wait for none: the request begins again."""
        self.until = 0.0
        self.is_looked_up = False
        self.tail = None
