"""A reader of page events, as routers outside the cluster have one: it knows the index from the events alone."""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from crossdock.workers.schedule.memory.page_events import (
    ClearedPages,
    PageEvent,
    RemovedPages,
    StoredPages,
    TieredPages,
)


class PageReader:
    """The hashes of the pages that are cached, and of those in each tier, as the events tell."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.hashes: set[bytes] = set()
        self.in_tiers: defaultdict[str, set[bytes]] = defaultdict(set)
        self.num_stored = 0

    def read(self, events: Sequence[PageEvent]) -> None:
        for event in events:
            if isinstance(event, ClearedPages):
                self.hashes.clear()
            elif isinstance(event, RemovedPages):
                held = self.in_tiers[event.tier] if event.tier else self.hashes
                assert held.issuperset(event.hashes), "a page is removed that was never stored"
                held.difference_update(event.hashes)
            elif isinstance(event, TieredPages):
                assert self.hashes.issuperset(event.hashes), "a page comes to a tier, and its tokens are not known"
                assert self.in_tiers[event.tier].isdisjoint(event.hashes), "a page comes to a tier twice"
                self.in_tiers[event.tier].update(event.hashes)
            else:
                self._store(event)

    def _store(self, event: StoredPages) -> None:
        """Add pages, whose hashes follow from the hash before them, their tokens and their pictures."""
        size = self.page_size
        parent = event.parent
        if parent is None:
            parent = blake2b(event.cache_salt.encode(), digest_size=16).digest()
        assert len(event.token_ids) == size * len(event.hashes)
        for number, (page_hash, key) in enumerate(zip(event.hashes, event.page_keys, strict=True)):
            content = array("I", event.token_ids[number * size : (number + 1) * size]).tobytes()
            parent = blake2b(parent + content + key, digest_size=16).digest()
            assert page_hash == parent, "the page has other tokens than the event says"
            assert page_hash not in self.hashes, "a page is stored twice"
            self.hashes.add(page_hash)
            self.num_stored += 1
