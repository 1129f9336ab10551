"""What the index says a replica has is what a plain set per replica says, after any history of messages."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.prefixes import Prefixes
from crossdock.workers.report.advertise import PageChanges
from crossdock.workers.schedule.pages import PageHash, PagePool, hash_pages

SLOTS = 5


def lengths(prefixes: Prefixes, hashes: list[PageHash]) -> dict[int, int]:
    """Pages that each replica has of the prefix, read from `match`."""
    found: dict[int, int] = {}
    for bits, length in prefixes.match(hashes):
        for slot in range(bits.bit_length()):
            if bits >> slot & 1:
                assert slot not in found, "each replica once"
                found[slot] = length
    return found


def brute_force(sets: list[set[PageHash]], hashes: list[PageHash]) -> dict[int, int]:
    wanted = {}
    for slot, has in enumerate(sets):
        length = 0
        while length < len(hashes) and hashes[length] in has:
            length += 1
        if length:
            wanted[slot] = length
    return wanted


def chain(rng: random.Random) -> list[PageHash]:
    """The page hashes of a prompt that shares its beginning with many of the others."""
    tokens = [rng.choice([1, 1, 1, 2]) for _ in range(rng.randrange(1, 12))]
    return hash_pages(tokens, 1, rng.choice(["", "", "tenant"]))


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_matches_are_those_of_plain_sets(rng: random.Random) -> None:
    prefixes = Prefixes(10_000)
    known: list[set[PageHash]] = [set() for _ in range(SLOTS)]
    expected: list[tuple[int, list[PageHash]]] = []
    numbers = [0] * SLOTS
    for _ in range(rng.randrange(1, 60)):
        slot, hashes = rng.randrange(SLOTS), chain(rng)
        match rng.randrange(8):
            case 0 | 1 | 2:
                gone = [it for it in known[slot] if rng.random() < 0.3]
                numbers[slot] += 1
                prefixes.hear(slot, PageChanges("one", numbers[slot], hashes, gone))
                known[slot] = (known[slot] - set(gone)) | set(hashes)
            case 3:  # a message was lost: nothing of before is believed any more
                numbers[slot] += 2
                prefixes.hear(slot, PageChanges("one", numbers[slot], hashes))
                known[slot] = set(hashes)
            case 4:
                prefixes.hear(slot, PageChanges("one", numbers[slot], hashes, is_all=True))
                known[slot] = set(hashes)
            case 5:
                prefixes.expect(slot, hashes)
                expected.append((slot, hashes))
            case 6 if expected:
                done = expected.pop(rng.randrange(len(expected)))
                prefixes.end_expected(*done)
            case 7:
                prefixes.forget(slot)
                known[slot], numbers[slot] = set(), 0
                expected = [it for it in expected if it[0] != slot]
        sets = [has | {it for at, its in expected if at == slot for it in its} for slot, has in enumerate(known)]
        assert len(prefixes) == len(set().union(*sets))
        for _ in range(3):
            asked = chain(rng)
            assert lengths(prefixes, asked) == brute_force(sets, asked)


@given(st.randoms(use_true_random=False), st.integers(0, 30))
@settings(deadline=None, max_examples=100)
def test_it_is_bounded_and_then_knows_less_and_nothing_wrong(rng: random.Random, most: int) -> None:
    prefixes = Prefixes(most)
    known: list[set[PageHash]] = [set() for _ in range(SLOTS)]
    for number in range(1, 30):
        slot, hashes = rng.randrange(SLOTS), chain(rng)
        prefixes.hear(slot, PageChanges("one", number, hashes, is_all=True))
        known[slot] = set(hashes)
        prefixes.expect(slot, hashes)
        prefixes.end_expected(slot, hashes)
        assert len(prefixes) <= most
        asked = chain(rng)
        true = brute_force(known, asked)
        assert all(length <= true.get(slot, 0) for slot, length in lengths(prefixes, asked).items())


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    prefixes = Prefixes(6)
    one, other = hash_pages([1] * 4, 1), hash_pages([2] * 4, 1)
    prefixes.hear(0, PageChanges("a", 1, one))
    assert lengths(prefixes, one) == {0: 4}
    prefixes.hear(0, PageChanges("a", 2, other))
    assert lengths(prefixes, one) == {0: 2}
    assert lengths(prefixes, other) == {0: 4}


def test_another_incarnation_has_nothing_of_the_first() -> None:
    prefixes = Prefixes(100)
    one, other = hash_pages([1] * 4, 1), hash_pages([2] * 4, 1)
    prefixes.hear(3, PageChanges("a", 1, one))
    prefixes.hear(3, PageChanges("b", 2, other))
    assert lengths(prefixes, one) == {}
    assert lengths(prefixes, other) == {3: 4}
    prefixes.hear(3, PageChanges("b", 2, one))  # again, or late
    assert lengths(prefixes, one) == {}


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_a_reader_of_a_pools_changes_has_its_index(rng: random.Random) -> None:
    """From the pool to the router: whatever the pool does between two readings, and for a reader that comes late."""
    pool, early, late = PagePool(12, 1), Prefixes(1000), Prefixes(1000)
    number = 0
    for step in range(rng.randrange(1, 40)):
        owner = f"{step}"
        hashes = chain(rng)[:8]
        shared = pool.match_prefix(hashes)
        if pool.can_allocate(len(hashes) - len(shared), shared):
            pool.share(owner, shared)
            pool.allocate(owner, len(hashes) - len(shared))
            pool.index(owner, hashes, len(shared))
        for old in range(step + 1):
            if rng.random() < 0.4:
                pool.release(f"{old}")
        if rng.random() < 0.05:
            pool.clear_cache()
        if rng.random() < 0.5:
            number += 1
            changes = PageChanges("it", number, *pool.take_changes())
            early.hear(0, changes)
            late.hear(0, changes if rng.random() < 0.8 else PageChanges("it", number, pool.findable(), is_all=True))
            asked = chain(rng)
            wanted = {0: len(pool.match_prefix(asked))} if pool.match_prefix(asked) else {}
            assert lengths(early, asked) == wanted
            assert len(early) == len(pool.findable())
            if len(late) == len(early):
                assert lengths(late, asked) == wanted
            assert lengths(late, asked).get(0, 0) <= lengths(early, asked).get(0, 0)
