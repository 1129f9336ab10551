"""Low-rank products in Triton against float64: interpreted on CPUs, compiled where there is a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu.triton_low_rank import LowRankRows

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
    LowRankRows(tables, rows, torch.device(device)).add(2, x.to(device), found[:, N:])
    assert torch.equal(found[:, :N].cpu(), y[:, :N])
    changed = np.concatenate(rows[:2])
    untouched = np.setdiff1d(np.arange(T), changed)
    assert torch.equal(found[untouched].cpu(), y[untouched])
    scale = exact[changed].abs().mean()
    assert (found.cpu().double() - exact)[changed].abs().max() <= tolerance * 20 * scale


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
        found = LowRankRows(tables, rows, torch.device("cuda"))
    assert noted.copies == [False]
    assert not noted.reads
    assert torch.equal(found._tables, tables)
    assert found._rows.tolist()[2] == [1, 60, 30] + [-1] * 13
    assert found._owners.tolist() == [0, 0, 1, 2]
    assert all(each.data_ptr() % 16 == 0 for each in (found._tables, found._rows, found._owners))
