"""Copies between a pool and the host's memory: pinned exactly, made before a page is written to, and priced by their
seconds."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from crossdock.workers.replica.tiers import page_copies
from crossdock.workers.replica.tiers.page_copies import Copied, PoolCopies
from crossdock.workers.replica.tiers.page_thread import PageThread
from crossdock.workers.replica.tiers.tier_store import HOST_RATE, TierStore
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

PAGES = torch.arange(64, dtype=torch.uint8).view(4, 16)


class Runtime:
    """In place of CUDA's runtime: notes what is pinned."""

    def __init__(self, status: int) -> None:
        self.status, self.pinned = status, list[tuple[int, int]]()

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:  # noqa: N802, CUDA's own name
        self.pinned.append((address, num_bytes))
        return self.status


def test_memory_is_pinned_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own pinned memory is rounded up to a power of two: 128 GiB for 96."""
    runtime, memory = Runtime(0), torch.empty(3 << 20, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    page_copies._pin(memory)
    page_copies._pin(memory[:0])
    assert runtime.pinned == [(memory.data_ptr(), 3 << 20)]
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(RuntimeError, match="3145728 bytes of the host's memory cannot be pinned: CUDA error 2"):
        page_copies._pin(memory)


class LateCopies:
    """Copies late, in order, as a stream of a GPU may: when somebody waits for a copy, it makes all up to that one."""

    def __init__(self) -> None:
        self.begun: list[LateCopy] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Copied:
        self.begun.append(LateCopy(self, len(self.begun), list(pairs)))
        return self.begun[-1]

    @property
    def num_ended(self) -> int:
        return sum(each.took is not None for each in self.begun)


class LateCopy:
    def __init__(self, stream: LateCopies, number: int, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.stream, self.number, self.pairs = stream, number, pairs
        self.took: float | None = None

    def seconds(self) -> float | None:
        return self.took

    def wait(self) -> None:
        for each in self.stream.begun[: self.number + 1]:
            if each.took is None:
                for target, source in each.pairs:
                    target.copy_(source)
                each.took = 2.0

    hold_step = wait  # what the device computes next sees the pages as they are then


def late(pages: torch.Tensor, num_slots: int) -> tuple[PoolCopies, LateCopies]:
    copies = PoolCopies(pages, num_slots)
    copies._copier = stream = LateCopies()
    return copies, stream


def test_page_is_copied_when_a_step_is_about_to_write_to_it() -> None:
    copies = PoolCopies(PAGES.clone(), 3)
    copies.copy_out([2, 1], [0, 2])
    copies.claim([0, 3])
    assert not copies.take_copied(), "the step writes to other pages"
    copies.claim([1])
    (seconds,) = copies.take_copied()
    assert seconds > 0
    assert torch.equal(copies.slots[[0, 2]], PAGES[[2, 1]])
    assert not copies.take_copied()


def test_step_waits_for_the_copies_of_its_own_pages_alone() -> None:
    """A prompt that evicts hundreds of pages writes to few of them in a step, and a stream beside it to one."""
    copies, stream = late(PAGES.clone(), 4)
    for page in range(4):
        copies.copy_out([page], [page])
    copies.claim([1, 2])
    assert [len(each.pairs) for each in stream.begun] == [2]
    assert stream.num_ended == 1
    copies.claim([2])
    copies.claim(())
    assert len(stream.begun) == 1, "what has ended is not copied again"
    assert list(copies.take_copied()) == [1.0, 1.0], "copies that began together share their seconds"
    copies.settle(slots=[3])
    assert len(stream.begun) == 2, "no step writes to page 0"


def test_content_whose_slot_goes_to_another_page_is_not_copied() -> None:
    copies, stream = late(PAGES.clone(), 1)
    copies.copy_out([0], [0])
    copies.copy_out([1], [0])
    copies.claim([0])
    assert not stream.begun
    copies.claim([1])
    assert torch.equal(copies.slots[0], PAGES[1])
    copies.settle_all()
    assert torch.equal(copies.slots[0], PAGES[1])


@pytest.mark.parametrize("seed", range(8))
def test_slots_hold_what_the_pages_held_when_they_were_evicted(seed: int) -> None:
    """Whatever is written to these pages afterwards: by steps, by loads, and by others after a grant."""
    rng = random.Random(seed)
    pool = torch.zeros((6, 2), dtype=torch.uint8)
    copies, _ = late(pool, 5)
    expected: dict[int, list[int]] = {}  # by slot
    for number in range(1, 250):
        page, slot = rng.randrange(6), rng.randrange(5)
        match rng.choice(("evict", "evict", "step", "load", "grant", "read")):
            case "evict":
                copies.copy_out([page], [slot])
                expected[slot] = pool[page].tolist()
            case "step":
                copies.claim([page])
                pool[page] = number
            case "load" if slot in expected:
                copies.copy_in([slot], [page])
                assert pool[page].tolist() == expected[slot]
            case "grant":
                copies.settle([page])
                pool[page] = number
            case _:
                copies.settle(slots=[slot])
                assert slot not in expected or copies.slots[slot].tolist() == expected[slot]
    copies.settle_all()
    assert all(copies.slots[slot].tolist() == content for slot, content in expected.items())


def test_price_of_storing_is_learnt_when_the_copy_has_ended() -> None:
    """The launch of a copy takes microseconds. By it a page would be stored for nothing."""
    copies, stream = late(PAGES.clone(), 4)
    store = TierStore(PageThread(copies, None), 16, host_rate=HOST_RATE, file_rate=None)
    (tier,) = store.tiers.tiers
    try:
        loading: Any = None  # of loads, of which there are none
        before = tier.store_s
        for number in range(2):
            store._store(PageKey(0, bytes([number])), [number], [tier])
            copies._begin((copies._by_page, [number]))
        store.take_in(loading)
        assert (tier.store_s, len(tier.pages)) == (before, 2)
        stream.begun[1].took = 9 * before
        store.take_in(loading)
        assert tier.store_s == before, "copies end one after the other"
        stream.begun[0].took = before
        store.take_in(loading)
        assert tier.store_s == pytest.approx(before * 1.8)
    finally:
        store.close()
