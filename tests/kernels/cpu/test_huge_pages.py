"""Memory on pages of 2 MiB: tensors of any type that share a mapping, and memory that is taken ahead of its use."""

import mmap
import time
from pathlib import Path

import pytest
import torch

from crossdock.kernels.cpu.huge_pages import HugePages, MemoryTaker

_MIB = 1 << 20


def test_tensors_that_share_memory_lie_close_and_do_not_overlap() -> None:
    memory = HugePages()
    sizes = (1000, 1, 300_000, 40 << 20, 5000)
    taken = [memory.take(size, torch.bfloat16).fill_(number) for number, size in enumerate(sizes)]
    for number, tensor in enumerate(taken):
        assert tensor.eq(number).all(), number
    first, second, third = (tensor.data_ptr() for tensor in taken[:3])
    assert second - first == third - second == 4096
    del memory, taken[1:]
    assert taken[0].eq(0).all(), "the others are freed, this one is not"


def test_new_memory_is_zero_whatever_its_type() -> None:
    memory = HugePages()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        tensor = memory.take(3000, dtype)
        assert tensor.dtype is dtype
        assert tensor.shape == (3000,)
        assert not tensor.float().any()
        tensor.view(torch.uint8).fill_(7)


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_memory_that_is_taken_ahead_is_there_after_a_wait_and_keeps_what_was_written_meanwhile() -> None:
    tensor, before = HugePages().take(160 * _MIB, torch.int8), resident()
    taker = MemoryTaker(tensor)
    tensor[::_MIB] = 7
    taker.wait()
    assert resident() - before > 155 * _MIB
    assert tensor[::_MIB].eq(7).all()
    tensor[::_MIB] = 0
    assert not tensor.any()


def test_taking_memory_ends_when_asked_to() -> None:
    tensor, before = HugePages().take(2048 * _MIB, torch.int8), resident()
    MemoryTaker(tensor).end()
    assert resident() - before < 1024 * _MIB
    del tensor
    assert resident() - before < 32 * _MIB


def test_memory_is_taken_by_writing_where_linux_cannot_take_it_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTaker, "_take", lambda *_: False)
    tensor, before = HugePages().take(80 * _MIB, torch.int8), resident()
    MemoryTaker(tensor).wait()
    assert resident() - before > 75 * _MIB


def test_paused_taker_takes_nothing_until_something_waits() -> None:
    tensor, before = HugePages().take(600 * _MIB, torch.int8), resident()
    taker = MemoryTaker(tensor)
    with taker.paused():
        time.sleep(0.05)  # for a piece that was begun before
        taken = resident() - before
        time.sleep(0.1)
        assert resident() - before - taken < 8 * _MIB
        taker.wait()
        assert resident() - before > 595 * _MIB
