"""Copies between a pool and the host's memory: pinned exactly, and priced by the seconds of the copy."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from crossdock.workers.replica.tiers import page_copies
from crossdock.workers.replica.tiers.page_copies import PoolCopies
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


def test_copies_tell_their_seconds() -> None:
    copies = PoolCopies(PAGES, 3)
    seconds = copies.copy_out([2, 1], [0, 2])()
    assert seconds is not None
    assert seconds > 0
    assert torch.equal(copies.slots[[0, 2]], PAGES[[2, 1]])


class LateCopies(PoolCopies):
    """Copies whose seconds are known when the test says so, as those beside the steps of a GPU."""

    def __init__(self, pages: torch.Tensor, num_slots: int) -> None:
        super().__init__(pages, num_slots)
        self.seconds: list[float | None] = []

    def copy_out(self, pages: Sequence[int], slots: Sequence[int]) -> Callable[[], float | None]:
        super().copy_out(pages, slots)
        number = len(self.seconds)
        self.seconds.append(None)
        return lambda: self.seconds[number]


def test_price_of_storing_is_learnt_when_the_copy_has_ended() -> None:
    """The launch of a copy takes microseconds. By it a page would be stored for nothing."""
    copies = LateCopies(PAGES, 4)
    store = TierStore(PageThread(copies, None), 16, host_rate=HOST_RATE, file_rate=None)
    (tier,) = store.tiers.tiers
    try:
        loading: Any = None  # of loads, of which there are none
        before = tier.store_s
        for number in range(2):
            store._store(PageKey(0, bytes([number])), [number], [tier])
        store.take_in(loading)
        assert (tier.store_s, len(tier.pages)) == (before, 2)
        copies.seconds[1] = 9 * before
        store.take_in(loading)
        assert tier.store_s == before, "copies end one after the other"
        copies.seconds[0] = before
        store.take_in(loading)
        assert tier.store_s == pytest.approx(before * 1.8)
    finally:
        store.close()
