"""PagePool: every page in one state, prefixes found under their own salt only, nothing reused while quarantined."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import HOLE, AttentionChunk
from crossdock.workers.schedule.request.page_hashes import hash_pages


def test_hash_of_a_page_depends_on_all_tokens_before() -> None:
    tokens = list(range(64))
    hashes = hash_pages(tokens, 16)
    assert len(hashes) == 4
    assert hash_pages([*tokens[:17], 999, *tokens[18:]], 16)[0] == hashes[0]
    assert not set(hash_pages([999, *tokens[1:]], 16)) & set(hashes)  # one early token changes every later hash


@given(st.lists(st.integers(0, 2**31), max_size=70), st.integers(1, 9), st.integers(0, 5))
def test_hashes_grow_incrementally(tokens: list[int], size: int, known: int) -> None:
    whole = hash_pages(tokens, size, "salt")
    assert len(whole) == len(tokens) // size
    assert hash_pages(tokens, size, "salt", whole[:known]) == whole


def test_hashes_under_another_salt_differ() -> None:
    tokens = list(range(32))
    assert not set(hash_pages(tokens, 16, "a")) & set(hash_pages(tokens, 16, "b"))


def fill(pool: PagePool, owner: str, tokens: list[int]) -> list[bytes]:
    hashes = hash_pages(tokens, pool.page_size)
    pool.allocate(owner, -(-len(tokens) // pool.page_size))
    pool.index(owner, hashes, 0)
    return hashes


def test_pages_of_a_running_request_are_sharable() -> None:
    pool = PagePool(8, 4)
    hashes = fill(pool, "a", list(range(10)))
    hits = pool.prefixes.match(hashes)
    assert hits.pages == list(pool.pages_of("a"))[:2]
    pool.share("b", hits)
    assert pool.release("a") == 1  # only the partial page had no other owner
    assert pool.counts().owned == 2
    assert pool.release("b") == 2
    assert pool.counts().cached == 2
    assert pool.counts().free == 6


def test_least_recently_used_prefix_is_evicted_first_and_from_its_end() -> None:
    pool = PagePool(4, 4)
    old, new = list(range(8)), list(range(100, 108))
    old_hashes, new_hashes = fill(pool, "old", old), fill(pool, "new", new)
    pool.release("old")
    pool.release("new")
    pool.allocate("x", 1)
    assert pool.prefixes.match(old_hashes).num_pages == 1
    assert pool.prefixes.match(new_hashes).num_pages == 2
    pool.share("again", pool.prefixes.match(old_hashes))  # used again: now the newer prefix is the older use
    pool.release("again")
    pool.allocate("y", 1)
    assert pool.prefixes.match(old_hashes).num_pages == 1
    assert pool.prefixes.match(new_hashes).num_pages == 1


def test_page_with_indexed_content_is_not_indexed_again() -> None:
    pool = PagePool(8, 4)
    first = fill(pool, "a", list(range(4)))
    fill(pool, "b", list(range(4)))
    assert pool.prefixes.match(first).pages == list(pool.pages_of("a"))
    assert pool.release("b") == 1
    assert pool.counts().free == 7


def test_num_freed_by_counts_pages_without_another_owner() -> None:
    pool = PagePool(8, 4)
    hits = pool.prefixes.match(fill(pool, "a", list(range(10))))
    pool.share("b", hits)
    assert pool.num_freed_by(["a"]) == 1
    assert pool.num_freed_by(["a", "b"]) == 3
    assert pool.num_freed_by(["a", "b"], besides=hits.pages) == 1
    assert pool.num_freed_by(["unknown"]) == 0


@given(
    shared=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    besides=st.sets(st.integers(0, 31)),
)
def test_pages_freed_in_turn_are_those_that_releases_free(shared: list[int], order: Random, besides: set[int]) -> None:
    """Each owner shares some pages of one prompt, and has two of its own."""
    pool = PagePool(32, 4)
    hashes = fill(pool, "first", list(range(16)))
    for number, num_shared in enumerate(shared):
        pool.share(str(number), pool.prefixes.match(hashes[:num_shared]))
        pool.allocate(str(number), 2)
    owners = ["first", "unknown", *map(str, range(len(shared)))]
    order.shuffle(owners)
    predicted = pool.num_freed_in_turn(owners), pool.num_freed_in_turn(owners, besides)
    freed, freed_besides = [], []
    for owner in owners:
        assert pool.block_pool.num_shared == sum(count > 1 for count in pool.block_pool.num_owners)
        held = set(pool.pages_of(owner))
        freed.append(pool.release(owner))
        unowned = {page for page in held if not pool.block_pool.num_owners[page]}
        freed_besides.append(len(unowned - besides))
    assert predicted == (freed, freed_besides)


def test_release_of_an_unknown_owner_frees_nothing() -> None:
    pool = PagePool(2, 4)
    assert pool.release("unknown") == 0


def test_quarantined_pages_are_untouchable_until_the_writer_stops() -> None:
    pool = PagePool(4, 4)
    hashes = fill(pool, "a", list(range(8)))
    pool.share("b", pool.prefixes.match(hashes[:1]))
    assert pool.quarantine("a") == 1  # the shared page has another owner, which only reads
    assert pool.counts().quarantined == 1
    assert pool.block_pool.num_available == 2
    assert pool.prefixes.match(hashes).num_pages == 1  # the content may change
    assert pool.end_quarantine("a") == 1
    assert pool.block_pool.num_available == 3


def test_clear_cache_frees_pages_without_owner() -> None:
    pool = PagePool(4, 4)
    hashes = fill(pool, "a", list(range(8)))
    pool.release("a")
    assert pool.block_pool.clear_cache() == 2
    assert pool.prefixes.match(hashes).pages == []
    assert pool.counts().free == 4


def test_pool_without_caching_indexes_nothing() -> None:
    pool = PagePool(4, 4, enable_prefix_caching=False)
    assert pool.prefixes.match(fill(pool, "a", list(range(8)))).pages == []


def test_impossible_sizes_are_refused_by_field() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(0, 16)


def test_prefix_hit_of_a_window_needs_only_its_last_pages() -> None:
    pool = PagePool(20, 4, windows=(None, 6))
    hashes = hash_pages(list(range(24)), 4)
    for group in range(2):
        pool.allocate("a", 6, group)
    pool.index("a", hashes, 0)
    pool.slide("a", 24)  # token 24 sees tokens 19 to 24
    assert pool.num_held("a", 1) == 2
    assert pool.counts().cached == 4  # until another request needs them
    pool.allocate("b", 8 + 4)  # evicts the pages of tokens 0 to 15
    hit = pool.prefixes.match(hashes)
    assert (hit.num_pages, list(hit.by_group[1][:4])) == (6, [HOLE] * 4)
    assert hit.pages == [*pool.pages_of("a", 0), *pool.pages_of("a", 1)[4:]]
    assert pool.prefixes.match(hashes[:5]).num_pages == 0  # token 20 sees page 3, which is gone
    pool.share("c", hit)
    assert pool.num_held_by("c") == 8
    assert pool.release("a") == 0
    assert pool.release("c") == 8


def test_prefix_hit_ends_where_every_group_can_continue() -> None:
    pool = PagePool(20, 4, windows=(None, 6))
    hashes = hash_pages(list(range(24)), 4)
    pool.allocate("a", 6, 0)
    pool.allocate("a", 3, 1)
    pool.index("a", hashes[:3], 0)
    assert pool.prefixes.match(hashes).num_pages == 3
    pool.slide("a", 12)
    assert pool.num_held("a", 1) == 2


def test_prefix_hit_of_an_attention_chunk_needs_the_pages_since_its_begin() -> None:
    pool = PagePool(20, 4, windows=(None, AttentionChunk(10)))
    hashes = hash_pages(list(range(24)), 4)
    for group in range(2):
        pool.allocate("a", 6, group)
    pool.index("a", hashes, 0)
    pool.slide("a", 19)  # token 19 sees tokens 10 to 19
    assert pool.num_held("a", 1) == 4
    pool.slide("a", 20)  # a chunk begins with token 20
    assert pool.num_held("a", 1) == 1
    pool.allocate("b", 8 + 5)  # evicts the pages of tokens 0 to 19
    hit = pool.prefixes.match(hashes)
    assert (hit.num_pages, list(hit.by_group[1][:5])) == (6, [HOLE] * 5)
    ends_with_chunk = pool.prefixes.match(hashes[:5])
    assert (ends_with_chunk.num_pages, ends_with_chunk.by_group[1]) == (5, [HOLE] * 5)
    assert pool.prefixes.match(hashes[:4]).num_pages == 0  # token 16 sees page 2, which is gone


def test_only_windows_continue_after_a_gap() -> None:
    pool = PagePool(6, 4, windows=(6,))
    hashes = hash_pages(list(range(24)), 4)
    pool.allocate("a", 6)
    pool.index("a", hashes, 0)
    pool.slide("a", 24)
    pool.allocate("b", 4)
    assert pool.prefixes.match(hashes).num_pages == 6
    assert pool.prefixes.match(hashes[:5]).num_pages == 0
