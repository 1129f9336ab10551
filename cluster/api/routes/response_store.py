"""Stored responses of one ingress: for a while, within bounds on memory, each owner's apart."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

RECORD_BYTES = 1024  # counted for each record beside its content, so that empty ones are bounded as well
ITEM_BYTES = 256  # … and for each of its items
EVENT_BYTES = 64  # … and for each event
_SWEEP_S = 60.0  # between two looks at the records of owners that store nothing now


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as its client reads it, and the items before it, all as JSON: a GET parses nothing."""

    response: bytes
    items: tuple[tuple[str, bytes], ...]  # the id of each, and the item
    is_background: bool
    events: tuple[bytes, ...] | None = None  # of the stream that it was made as; None: it was none, or they are gone
    is_running: bool = False  # more events may come; of an answer to who follows a response alone

    @property
    def num_bytes(self) -> int:
        """Return how much memory the record counts for."""
        items = sum(ITEM_BYTES + len(name) + len(item) for name, item in self.items)
        events = sum(EVENT_BYTES + len(event) for event in self.events or ())
        return RECORD_BYTES + len(self.response) + items + events


class ResponseStore:
    """Records by owner and id. When there is no place, the owner that uses most loses its oldest."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._owners: dict[
            str, OrderedDict[str, tuple[float, StoredResponse]]
        ] = {}  # when each expires; the oldest first
        self._sizes: dict[str, int] = {}
        self._sweep_at = clock() + _SWEEP_S

    def put(self, owner: str, name: str, record: StoredResponse) -> None:
        """Store a record, in place of an older one of that name."""
        now = self._clock()
        if now >= self._sweep_at:
            self._sweep_at = now + _SWEEP_S
            for each in list(self._owners):
                self._expire(each, now)
        self.delete(owner, name)
        self._owners.setdefault(owner, OrderedDict())[name] = (now + self._ttl_s, record)
        self._count(owner, record.num_bytes)
        while self.num_bytes > self.max_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.delete(largest, next(iter(self._owners[largest])))

    def get(self, owner: str, name: str) -> StoredResponse | None:
        """Return a record; None: there is no such record, or no longer."""
        self._expire(owner, self._clock())
        found = self._owners[owner].get(name) if owner in self._owners else None
        return None if found is None else found[1]

    def delete(self, owner: str, name: str) -> StoredResponse | None:
        """Forget and return a record; None: there is no such record."""
        records = self._owners.get(owner, OrderedDict())
        found = records.pop(name, None)
        if found is None:
            return None
        self._count(owner, -found[1].num_bytes)
        if not records:
            del self._owners[owner], self._sizes[owner]
        return found[1]

    def _expire(self, owner: str, now: float) -> None:
        while owner in self._owners:
            name, (expires, _) = next(iter(self._owners[owner].items()))
            if expires > now:
                return
            self.delete(owner, name)

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._sizes[owner] = self._sizes.get(owner, 0) + num_bytes
