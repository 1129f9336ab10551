"""Low-rank products in Triton against float64: interpreted on CPUs, compiled where there is a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu import triton_low_rank
from crossdock.kernels.gpu.triton_low_rank import LowRankRows, most_blocks

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_rows_of_many_adapters_match_float64(dtype: torch.dtype, tolerance: float, device: str, seed: int) -> None:
    """The third adapter leaves this linear alone, rows of the second are scattered, and some rows have no adapter.

    Not in bfloat16, whose products the interpreter does not compute.
    """
    rng, (T, K, N, ranks) = torch.Generator().manual_seed(seed), (64, 1100, 200, (5, 20, 0))
    rows = [np.arange(3, 25), np.array([1, 60, 30]), np.arange(40, 50)]
    x, y = torch.randn(T, K, generator=rng).to(dtype), torch.randn(T, 2 * N, generator=rng).to(dtype)
    pairs = [tuple(torch.randn(r, n, generator=rng).to(dtype) / 8 for n in (K, N)) for r in ranks]
    exact = y.double()
    for (a, b), own in zip(pairs, rows, strict=True):
        exact[own, N:] += x[own].double() @ a.double().T @ b.double()
    held = [(a.to(device), b.to(device)) for a, b in pairs]
    tables = torch.zeros(3, 4, 3, dtype=torch.int64)
    for number, (a, b) in enumerate(held):
        tables[number, 2] = torch.tensor([a.data_ptr() if len(a) else 0, b.data_ptr() if len(a) else 0, len(a)])
    found = y.to(device, copy=True)
    LowRankRows.of(tables, rows, torch.device(device)).add(2, x.to(device), found[:, N:])
    assert torch.equal(found[:, :N].cpu(), y[:, :N])
    changed = np.concatenate(rows[:2])
    untouched = np.setdiff1d(np.arange(T), changed)
    assert torch.equal(found[untouched].cpu(), y[untouched])
    scale = exact[changed].abs().mean()
    assert (found.cpu().double() - exact)[changed].abs().max() <= tolerance * 20 * scale


def test_linears_of_one_input_are_computed_together(device: str, seed: int) -> None:
    """Three linears of unlike outputs lie side by side; each of two adapters leaves another one of them alone."""
    (T, K), sizes, ranks = (20, 70), (200, 130, 40), ((5, 0, 9), (0, 16, 3))
    generator = torch.Generator().manual_seed(seed)
    rows = [np.arange(2, 19), np.array([19, 0])]
    x, y = (torch.randn(T, width, generator=generator) for width in (K, sum(sizes)))
    exact, held, tables = y.double(), list[Tensor](), torch.zeros(2, 4, 3, dtype=torch.int64)
    for number, own in enumerate(rows):
        start = 0
        for linear, (size, rank) in enumerate(zip(sizes, ranks[number], strict=True)):
            a, b = (torch.randn(rank, n, generator=generator) / 8 for n in (K, size))
            exact[own, start : start + size] += x[own].double() @ a.T.double() @ b.double()
            start += size
            held += [a.to(device), b.to(device)]
            if rank:
                tables[number, 1 + linear] = torch.tensor([held[-2].data_ptr(), held[-1].data_ptr(), rank])
    found = y.to(device, copy=True)
    LowRankRows.of(tables, rows, torch.device(device)).add(1, x.to(device), found, sizes)
    torch.testing.assert_close(found.cpu().double(), exact, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[1].cpu(), y[1]), "a row without an adapter"


class WithoutWaits(TorchFunctionMode):
    """Copies to a GPU stay on the CPU here, and each is noted: whether the host would wait for the GPU's earlier work.

    It would for a copy from memory that is not pinned, and for a value that is read back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[bool] = []
        self.reads: list[str] = []
        self._pinned: set[int] = set()

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.empty and given.pop("pin_memory", False):
            made = func(*args, **given)
            self._pinned.add(made.untyped_storage().data_ptr())
            return made
        if func is Tensor.pin_memory:
            self._pinned.add(args[0].untyped_storage().data_ptr())
            return args[0]
        if func is Tensor.copy_:
            is_pinned = args[1].untyped_storage().data_ptr() in self._pinned
            self.copies.append(not (is_pinned and given.get("non_blocking", False)))
            return func(*args, **given)
        if func is Tensor.to and "cuda" in str(args[1:]):
            is_pinned = args[0].untyped_storage().data_ptr() in self._pinned
            self.copies.append(not (is_pinned and given.get("non_blocking", False)))
            return args[0]
        if func in (Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero):
            self.reads.append(func.__name__)
        return func(*args, **given)


def test_step_with_adapters_begins_with_one_copy_that_the_host_does_not_wait_for() -> None:
    tables = torch.zeros(3, 4, 3, dtype=torch.int64)
    tables[..., 2] = 20
    rows = [np.arange(3, 25), np.array([1, 60, 30]), np.arange(40, 50)]
    with WithoutWaits() as noted:
        found = LowRankRows.of(tables, rows, torch.device("cuda"))
    assert noted.copies == [False]
    assert not noted.reads
    assert torch.equal(found._tables, tables)
    assert found._rows.tolist()[2] == [1, 60, 30] + [-1] * 13
    assert found._owners.tolist() == [0, 0, 1, 2]
    assert all(each.data_ptr() % 16 == 0 for each in (found._tables, found._rows, found._owners))


def test_recorded_steps_add_what_each_step_has_and_read_the_same_memory(device: str, seed: int) -> None:
    """One room serves steps of any rows and adapters, one after the other. A program without rows does nothing.

    The last linear has no matrices in any adapter: nothing may be written there.
    """
    rng, (T, K, N, ranks) = np.random.default_rng(seed), (64, 70, 40, (3, 16, 9))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, K, generator=generator)
    pairs = [tuple(torch.randn(r, n, generator=generator) / 8 for n in (K, N)) for r in ranks]
    held = [(a.to(device), b.to(device)) for a, b in pairs]
    tables = torch.zeros(3, 2, 3, dtype=torch.int64)
    for number, (a, b) in enumerate(held):
        tables[number, 0] = torch.tensor([a.data_ptr(), b.data_ptr(), len(a)])
    room = LowRankRows.room(3, 2, T, 16, torch.device(device))
    addresses = [part.data_ptr() for part in (room._tables, room._rows, room._owners)]
    given = x.to(device)
    for size, step in ((64, (40, 3, 20)), (64, (0, 1, 0)), (24, (2, 0, 17)), (64, (16, 16, 32)), (1, (0, 0, 1))):
        order = rng.permutation(size)
        present = [number for number, count in enumerate(step) if count]
        rows = np.split(order[: sum(step)], np.cumsum(step)[:-1])
        exact = torch.ones(size, N, dtype=torch.float64)
        for number in present:
            a, b = (matrix.double() for matrix in pairs[number])
            exact[rows[number]] += x[rows[number]].double() @ a.T @ b
        room.enter(tables[present], [rows[number] for number in present])
        first = room.first(size)
        found = torch.ones(size, N, device=device)
        first.add(0, given[:size], found)
        torch.testing.assert_close(found.cpu().double(), exact, atol=1e-4, rtol=1e-4)
        first.add(1, given[:size], found)
        torch.testing.assert_close(found.cpu().double(), exact, atol=1e-4, rtol=1e-4)
        assert [part.data_ptr() for part in (first._tables, first._rows, first._owners)] == addresses


def test_recorded_step_gets_its_adapters_in_one_copy_that_the_host_does_not_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = LowRankRows.room(3, 4, 64, 16, torch.device("cpu"))
    staged = triton_low_rank._staged
    monkeypatch.setattr(triton_low_rank, "_staged", lambda *given: staged(*given[:-1], torch.device("cuda")))
    with WithoutWaits() as noted:
        room.enter(torch.ones(2, 4, 3, dtype=torch.int64), [np.arange(3, 25), np.array([1, 60, 30])])
    assert noted.copies == [False]
    assert not noted.reads
    assert room._owners.tolist() == [0, 0, 1, -1, -1, -1]
    assert room._rows[2].tolist() == [1, 60, 30] + [-1] * 13


def test_blocks_of_a_recorded_step_hold_any_rows_of_any_adapters(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(300):
        rows, adapters = int(rng.integers(1, 300)), int(rng.integers(1, 20))
        counts = rng.multinomial(rng.integers(0, rows + 1), np.full(adapters, 1 / adapters))
        assert sum(-(-int(count) // 16) for count in counts) <= most_blocks(rows, adapters)
    assert most_blocks(64, 8) == 8 + 3
    assert most_blocks(256, 8) == 8 + 15
    assert most_blocks(1, 8) == 1
