"""The prefix index equals one plain set of hashes per replica, after any history of messages."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.prefixes import Prefixes, pages_by_slot
from crossdock.workers.report.live_profile import PageChanges
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.page_hashes import PageHash, hash_pages

SLOTS = 5


def lengths(prefixes: Prefixes, hashes: list[PageHash]) -> dict[int, int]:
    """Return by slot how many pages of the prefix the replica has, as `match` reports it."""
    found: dict[int, int] = {}
    matched = prefixes.match(hashes)[0]
    for length, bits in enumerate(matched, 1):
        assert bits, "the list ends with the longest prefix"
        for slot in range(bits.bit_length()):
            if bits >> slot & 1:
                assert found.get(slot, 0) == length - 1, "a replica has the pages before, too"
                found[slot] = length
    assert pages_by_slot(matched, SLOTS).tolist() == [found.get(slot, 0) for slot in range(SLOTS)]
    return found


def lengths_in_sets(sets: list[set[PageHash]], hashes: list[PageHash]) -> dict[int, int]:
    """Return the expected result of `lengths`, by brute force."""
    wanted = {}
    for slot, has in enumerate(sets):
        length = 0
        while length < len(hashes) and hashes[length] in has:
            length += 1
        if length:
            wanted[slot] = length
    return wanted


def random_hashes(rng: random.Random) -> list[PageHash]:
    """Return the page hashes of a prompt that shares its beginning with many others."""
    tokens = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randrange(1, 12))]
    return hash_pages(tokens, 1, rng.choice(["", "", "tenant"]))


class Index:
    """A prefix index, and the same knowledge as plain sets."""

    def __init__(self) -> None:
        self.prefixes = Prefixes(10_000)
        self.reported: list[set[PageHash]] = [set() for _ in range(SLOTS)]
        self.expected: list[tuple[int, list[PageHash]]] = []
        self.numbers = [0] * SLOTS

    def change(self, rng: random.Random) -> None:
        """Apply one random message or in-flight load to both."""
        slot, hashes = rng.randrange(SLOTS), random_hashes(rng)
        match rng.randrange(8):
            case 0 | 1 | 2:
                gone = [page_hash for page_hash in self.reported[slot] if rng.random() < 0.3]
                self.numbers[slot] += 1
                self.prefixes.hear(slot, PageChanges("one", self.numbers[slot], hashes, gone))
                self.reported[slot] = (self.reported[slot] - set(gone)) | set(hashes)
            case 3:  # a message was lost: earlier ones no longer count
                self.numbers[slot] += 2
                self.prefixes.hear(slot, PageChanges("one", self.numbers[slot], hashes))
                self.reported[slot] = set(hashes)
            case 4:
                self.prefixes.hear(slot, PageChanges("one", self.numbers[slot], hashes, is_all=True))
                self.reported[slot] = set(hashes)
            case 5:
                self.prefixes.expect(slot, hashes)
                self.expected.append((slot, hashes))
            case 6 if self.expected:
                self.prefixes.end_expected(*self.expected.pop(rng.randrange(len(self.expected))))
            case 7:
                self.prefixes.forget(slot)
                self.reported[slot], self.numbers[slot] = set(), 0
                self.expected = [(other, pages) for other, pages in self.expected if other != slot]

    def sets(self) -> list[set[PageHash]]:
        """Return the hashes that each replica has reported or is expected to have."""
        sets = [set(reported) for reported in self.reported]
        for slot, hashes in self.expected:
            sets[slot].update(hashes)
        return sets


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_match_after_any_history_equals_plain_sets(rng: random.Random) -> None:
    index = Index()
    for _ in range(rng.randrange(1, 60)):
        index.change(rng)
        sets = index.sets()
        assert len(index.prefixes) == len(set().union(*sets))
        for _ in range(3):
            hashes = random_hashes(rng)
            assert lengths(index.prefixes, hashes) == lengths_in_sets(sets, hashes)


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_match_with_tiers_equals_the_union_of_their_sets(rng: random.Random) -> None:
    levels = [Index() for _ in range(3)]
    for _ in range(rng.randrange(1, 60)):
        rng.choice(levels).change(rng)
    pool, *below = [level.prefixes for level in levels]
    for _ in range(3):
        hashes, union = random_hashes(rng), [set[PageHash]() for _ in range(SLOTS)]
        for level, matched in zip(levels, pool.match(hashes, below), strict=True):
            union = [had | more for had, more in zip(union, level.sets(), strict=True)]
            wanted = lengths_in_sets(union, hashes)
            assert pages_by_slot(matched, SLOTS).tolist() == [wanted.get(slot, 0) for slot in range(SLOTS)]


@given(st.randoms(use_true_random=False), st.integers(0, 30))
@settings(deadline=None, max_examples=40)
def test_index_beyond_its_bound_forgets_pages_and_reports_no_wrong_one(rng: random.Random, most: int) -> None:
    prefixes = Prefixes(most)
    reported: list[set[PageHash]] = [set() for _ in range(SLOTS)]
    for number in range(1, 30):
        slot, hashes = rng.randrange(SLOTS), random_hashes(rng)
        prefixes.hear(slot, PageChanges("one", number, hashes, is_all=True))
        reported[slot] = set(hashes)
        prefixes.expect(slot, hashes)
        prefixes.end_expected(slot, hashes)
        assert len(prefixes) <= most
        hashes = random_hashes(rng)
        true = lengths_in_sets(reported, hashes)
        assert all(length <= true.get(slot, 0) for slot, length in lengths(prefixes, hashes).items())


def test_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    prefixes = Prefixes(6)
    one, other = hash_pages([1] * 4, 1), hash_pages([2] * 4, 1)
    prefixes.hear(0, PageChanges("a", 1, one))
    assert lengths(prefixes, one) == {0: 4}
    prefixes.hear(0, PageChanges("a", 2, other))
    assert lengths(prefixes, one) == {0: 2}
    assert lengths(prefixes, other) == {0: 4}


def test_new_incarnation_has_no_pages_of_the_previous_one() -> None:
    prefixes = Prefixes(100)
    one, other = hash_pages([1] * 4, 1), hash_pages([2] * 4, 1)
    prefixes.hear(3, PageChanges("a", 1, one))
    prefixes.hear(3, PageChanges("b", 2, other))
    assert lengths(prefixes, one) == {}
    assert lengths(prefixes, other) == {3: 4}
    prefixes.hear(3, PageChanges("b", 2, one))  # doubled, or late
    assert lengths(prefixes, one) == {}


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_reader_of_a_pools_changes_has_the_pools_index(rng: random.Random) -> None:
    """From the pool to the router, for a reader of all changes, and for one that sometimes reads everything instead."""
    pool, early, late = PagePool(12, 1), Prefixes(1000), Prefixes(1000)
    number = 0
    for step in range(rng.randrange(1, 40)):
        owner = f"{step}"
        hashes = random_hashes(rng)[:8]
        shared = pool.prefixes.match(hashes)
        if pool.block_pool.can_allocate(len(hashes) - shared.num_pages, shared.pages):
            pool.share(owner, shared)
            pool.allocate(owner, len(hashes) - shared.num_pages)
            pool.index(owner, hashes, shared.num_pages)
        for old in range(step + 1):
            if rng.random() < 0.4:
                pool.release(f"{old}")
        if rng.random() < 0.05:
            pool.block_pool.clear_cache()
        if rng.random() < 0.5:
            number += 1
            changes = PageChanges("one", number, *pool.prefixes.changes.take())
            everything = PageChanges("one", number, pool.prefixes.findable(), is_all=True)
            early.hear(0, changes)
            late.hear(0, changes if rng.random() < 0.8 else everything)
            wanted_hashes = random_hashes(rng)
            matched = pool.prefixes.match(wanted_hashes).num_pages
            wanted = {0: matched} if matched else {}
            assert lengths(early, wanted_hashes) == wanted
            assert len(early) == len(pool.prefixes.findable())
            if len(late) == len(early):
                assert lengths(late, wanted_hashes) == wanted
            assert lengths(late, wanted_hashes).get(0, 0) <= lengths(early, wanted_hashes).get(0, 0)
