"""Events of cached pages: in runs, with their tokens, and in order. Any history is in test_any_history.py."""

from crossdock.workers.schedule.memory.page_events import (
    ClearedPages,
    PageEvents,
    RemovedPages,
    StoredPages,
    TieredPages,
)
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Adapter, Submission
from tests.workers.schedule.page_reader import PageReader

SIZE = 4


def fill(pool: PagePool, name: str, tokens: list[int], salt: str = "", adapter: Adapter | None = None) -> Request:
    """Give a request pages for all its tokens, and index the full ones."""
    request = Request(Submission(name, tokens, cache_salt=salt, adapter=adapter))
    hashes = request.prefix_hashes(len(tokens), SIZE)
    pool.share(request.owner, hit := pool.prefixes.match(hashes))
    pool.allocate(request.owner, len(hashes) - hit.num_pages)
    pool.index(request.owner, hashes, hit.num_pages, request)
    return request


def test_stored_pages_continue_the_page_before_them() -> None:
    events = PageEvents(SIZE)
    pool = PagePool(8, SIZE, events=events)
    first = fill(pool, "a", [1] * 8)
    second = fill(pool, "b", [1] * 8 + [2] * 5)
    assert events.take() == [
        StoredPages(first.page_hashes, None, [1] * 8, [b"", b""], "", ""),
        StoredPages(second.page_hashes[2:], first.page_hashes[1], [2] * 4, [b""], "", ""),
    ]
    assert events.take() == []


def test_evicted_pages_are_one_event_before_the_pages_that_take_their_place() -> None:
    events = PageEvents(SIZE)
    pool = PagePool(3, SIZE, events=events)
    first = fill(pool, "a", [1] * 12)
    pool.release(first.owner)
    events.take()
    second = fill(pool, "b", [2] * 8)
    removed, stored = events.take()
    assert isinstance(removed, RemovedPages)
    assert removed.hashes == [*reversed(first.page_hashes[1:])]
    assert isinstance(stored, StoredPages)
    assert stored.hashes == second.page_hashes


def test_pages_that_were_indexed_in_between_divide_an_event() -> None:
    events = PageEvents(SIZE)
    pool = PagePool(8, SIZE, events=events)
    whole = Request(Submission("a", [1] * 12))
    hashes = whole.prefix_hashes(12, SIZE)
    pool.share(whole.owner, pool.prefixes.match(()))
    pool.allocate(whole.owner, 3)
    pool.prefixes.add(0, {hashes[1]: 7})  # of another request
    pool.index(whole.owner, hashes, 0, whole)
    assert [(each.hashes, each.parent) for each in events.take() if isinstance(each, StoredPages)] == [
        ([hashes[0]], None),
        ([hashes[2]], hashes[1]),
    ]


def test_cleared_cache_is_one_event() -> None:
    events = PageEvents(SIZE)
    pool = PagePool(8, SIZE, events=events)
    pool.release(fill(pool, "a", [1] * 8).owner)
    pool.block_pool.clear_cache()
    [only] = events.take()
    assert isinstance(only, ClearedPages)


def test_pages_of_a_tier_that_was_filled_before_are_announced_and_then_each_change() -> None:
    events = PageEvents(SIZE)
    tier = PageTier("files", 1.0, 1.0)
    first, second, third = (bytes([number]) * 16 for number in range(3))
    tier.hold([PageKey(0, first), PageKey(0, second), PageKey(1, third)])
    tier.announce_in(events)
    assert events.take() == [TieredPages([first, second], "files")]
    tier.lost(PageKey(0, first))
    tier.stored(PageKey(0, third), None)
    tier.stored(PageKey(0, third), None)
    assert events.take() == [RemovedPages([first], "files"), TieredPages([third], "files")]


def test_cleared_cache_leaves_the_pages_of_tiers() -> None:
    events = PageEvents(SIZE)
    pool = PagePool(8, SIZE, events=events)
    pool.release(fill(pool, "a", [1] * 8).owner)
    events.tiered(b"page", "host")
    pool.block_pool.clear_cache()
    events.removed(b"page", "host")
    cleared, *of_tier = events.take()
    assert isinstance(cleared, ClearedPages)
    assert of_tier == [TieredPages([b"page"], "host"), RemovedPages([b"page"], "host")]


def test_events_name_the_adapter_and_the_salt_of_their_request() -> None:
    events = PageEvents(SIZE)
    pool = PagePool(8, SIZE, events=events)
    fill(pool, "a", [1] * 4, "tenant", Adapter("sql", "/adapters/sql", "f" * 32))
    [stored] = events.take()
    assert isinstance(stored, StoredPages)
    assert (stored.adapter, stored.cache_salt) == ("sql", "tenant")


def test_reader_of_events_knows_the_index() -> None:
    events = PageEvents(SIZE)
    pool, reader = PagePool(4, SIZE, events=events), PageReader(SIZE)
    for number in range(6):
        pool.release(fill(pool, f"r{number}", [number] * 12).owner)
        reader.read(events.take())
        assert reader.hashes == set(pool.prefixes.findable())
    assert reader.num_stored == 18
