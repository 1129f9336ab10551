"""PagePool with recurrent states: what is evicted first, and how long a hit is."""

import pytest

from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import Window
from crossdock.workers.schedule.request.page_hashes import hash_pages

SIZE = 2


def test_snapshot_is_evicted_as_a_whole_and_before_the_pages_in_front_of_it() -> None:
    pool = PagePool(14, SIZE, state_pages=3)
    hashes = hash_pages(list(range(8)), SIZE)
    pool.allocate("a", 4)
    pool.states.allocate("a")
    for end in (2, 4):
        read, written = pool.states.next("a", end)
        pool.index("a", hashes[:end], end - 2)
        pool.states.index("a", written, hashes[:end])
        pool.states.end_read("a", read)
    assert pool.release("a") == 4 + 3 + 3
    assert pool.counts().cached == 4 + 3 + 3
    found = []
    for _ in range(4):
        pool.allocate("other", 1 + pool.counts().free)
        found.append((pool.prefixes.match(hashes).num_pages, pool.prefixes.match(hashes).num_indexed))
    assert found == [(2, 4), (2, 3), (2, 2), (0, 2)]


@pytest.mark.parametrize("windows", [(None,), (None, 3)])
def test_hit_without_a_state_is_as_long_as_the_pages_reach(windows: tuple[Window, ...]) -> None:
    pool = PagePool(20, SIZE, windows=windows, state_pages=1)
    hashes = hash_pages(list(range(8)), SIZE)
    for group in range(pool.num_groups):
        pool.allocate("a", 4, group)
    pool.index("a", hashes, 0)
    assert pool.prefixes.match(hashes).num_pages == 0
    assert pool.prefixes.match(hashes).num_indexed == 4
    hit = pool.prefixes.match(hashes, needs_state=False)
    assert (hit.num_pages, list(hit.snapshot)) == (4, [])
