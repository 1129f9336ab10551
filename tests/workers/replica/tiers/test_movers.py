"""Tiers hold what follows from evictions and loads alone: a thread that moves bytes and a simulated one agree."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.virtual_mover import VirtualMover
from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.replica.tiers.page_copies import PoolCopies
from crossdock.workers.replica.tiers.page_files import PageFiles
from crossdock.workers.replica.tiers.page_mover import Loaded, PageMover, Written
from crossdock.workers.replica.tiers.page_thread import PageThread
from crossdock.workers.replica.tiers.tier_store import TierStore, slots_for
from crossdock.workers.schedule.prefixes.loading import PageLoad, PrefixLoad
from crossdock.workers.schedule.prefixes.tier_pages import PageKey, PageTier
from tests.waiting import eventually

PAGE_BYTES = 64
HOST_PAGES = 6
TIER = PageTier("files", 1.0, 1.0)


class Ended:
    """In place of the loading of a scheduler: notes the loads that have ended."""

    def __init__(self) -> None:
        self.loads: list[PrefixLoad] = []

    def end(self, load: PrefixLoad) -> None:
        self.loads.append(load)


def key_of(number: int) -> PageKey:
    return PageKey(0, number.to_bytes(16))


def load_of(*numbers: int) -> PrefixLoad:
    prefix: Any = None  # who waits for the pages does not matter here
    pages = [PageLoad(at, key_of(number), TIER, (at,)) for at, number in enumerate(numbers)]
    return PrefixLoad(prefix, pages, 1.0)


def virtual(clock: Clock, most_file_bytes: int = 1 << 20) -> VirtualMover:
    """Return a mover to which a page from the host is 1 s and a page from a file 10 s."""
    num_slots = slots_for(HOST_PAGES * PAGE_BYTES, PAGE_BYTES, 1)
    return VirtualMover(clock, num_slots, PAGE_BYTES, 1.0, 10.0, most_file_bytes)


@contextmanager
def store_on(mover: PageMover) -> Iterator[TierStore]:
    store = TierStore(mover, PAGE_BYTES, host_rate=PAGE_BYTES, file_rate=PAGE_BYTES / 10)
    try:
        yield store
    finally:
        store.close()


def settle(store: TierStore, ended: Any) -> None:
    eventually(lambda: (store.take_in(ended), store.is_idle)[1], "a page is still moved")


def test_thread_and_simulation_hold_the_same_pages_after_the_same_history(tmp_path: Path) -> None:
    clock, rng = Clock(), random.Random(5)
    pool = torch.zeros((8, PAGE_BYTES), dtype=torch.uint8)
    copies = PoolCopies(pool, slots_for(HOST_PAGES * PAGE_BYTES, PAGE_BYTES, 1))
    thread = PageThread(copies, PageFiles(FileTier(tmp_path, 1 << 20, bytes(16)), copies))
    with store_on(thread) as real, store_on(virtual(clock)) as simulated:
        stores = (real, simulated)
        ended = (Ended(), Ended())
        for number in range(120):
            name = rng.randrange(30)
            if rng.random() < 0.6:
                for store in stores:
                    store.evicted(0, key_of(name).page_hash, [number % 8], 0.0)
            else:
                for store in stores:
                    store.load([load_of(name, name + 1)])
            clock.run()
            for store, loading in zip(stores, ended, strict=True):
                settle(store, loading)
            held = [[sorted(tier.pages) for tier in store.tiers.tiers] for store in stores]
            counts = [[each[3:] for each in store.counts()] for store in stores]
            assert held[0] == held[1], number
            assert counts[0] == counts[1], number
        landed = [[load.num_landed for load in each.loads] for each in ended]
        assert landed[0] == landed[1]
        assert sum(landed[0]) > 20, "pages were loaded"
        assert any(count < 2 for count in landed[0]), "and some were nowhere"
        assert len(real.tiers.tiers[0].pages) == HOST_PAGES, "the host is full"


def test_simulated_jobs_follow_each_other_and_take_their_seconds() -> None:
    clock = Clock()
    mover = virtual(clock)
    seen = list[tuple[float, type]]()
    mover.on_done.append(lambda: seen.extend((clock.now, type(each)) for each in mover.take_done()))
    mover.write(key_of(1), [0])
    load = load_of(1, 2, 3)
    mover.load(load, [None, [4], [5]])
    clock.run()
    assert seen == [(10.0, Written), (22.0, Loaded)]
    assert load.num_landed == 3


def test_simulated_load_ends_at_a_page_whose_file_is_gone() -> None:
    """The folder has room for two files: the third write deletes the one that was used longest ago, which is not the
    first, since that was loaded."""
    clock = Clock()
    mover = virtual(clock, most_file_bytes=2 * PAGE_BYTES)
    mover.write(key_of(1), [0])
    mover.write(key_of(2), [1])
    mover.load(load_of(1), [None])
    mover.write(key_of(3), [2])
    mover.load(load_of(1, 2, 3), [None, None, None])
    clock.run()
    *_, third, last = mover.take_done()
    assert isinstance(third, Written)
    assert isinstance(last, Loaded)
    assert third.deleted == [key_of(2)]
    assert mover.file_bytes == 2 * PAGE_BYTES
    assert last.from_files == (1, 10.0)
    assert last.lost is not None
    assert last.lost.key == key_of(2)


def test_simulated_file_larger_than_its_folder_is_not_stored() -> None:
    clock = Clock()
    mover = virtual(clock, most_file_bytes=PAGE_BYTES)
    mover.write(key_of(1), [0, 1])
    clock.run()
    (written,) = mover.take_done()
    assert isinstance(written, Written)
    assert not written.is_stored
    assert mover.file_bytes == 0


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_load_that_is_taken_back_ends_with_the_page_that_is_being_moved(num_taken: int) -> None:
    clock = Clock()
    mover = virtual(clock)
    load = load_of(1, 2, 3)
    mover.load(load, [[0], [1], [2]])
    clock.at(num_taken + 0.5, lambda _: load.stop())
    ends = list[float]()
    mover.on_done.append(lambda: ends.append(clock.now))
    clock.run()
    (loaded,) = mover.take_done()
    assert isinstance(loaded, Loaded)
    assert ends == [num_taken + 1.0]
    assert loaded.from_host == (num_taken + 1, num_taken + 1.0)
