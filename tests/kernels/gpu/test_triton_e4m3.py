"""Rows in e4m3 against torch's own rounding: interpreted on CPUs, compiled where there is a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from crossdock.kernels import packed
from crossdock.kernels.packed import PackedMatrix, scaled_product

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu import triton_e4m3
from crossdock.kernels.gpu.triton_e4m3 import rows_in_e4m3

pytestmark = pytest.mark.usefixtures("poisoned_memory")
E4M3 = torch.float8_e4m3fn


def grid_rows(num_rows: int, size: int) -> Tensor:
    """Return rows that e4m3 holds exactly at a scale of a power of two: the interpreter rounds wrongly elsewhere."""
    codes = (torch.randn(num_rows, size) * 60).clamp(-400, 400).to(E4M3).float()
    codes[:, size // 2] = -448.0
    return codes * 2.0 ** torch.arange(-3, num_rows - 3)[:, None]


@pytest.mark.parametrize("size", [1, 100, 300])
def test_rows_are_rounded_as_torch_rounds_them(size: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_e4m3, "BLOCK", 128)
    rows = grid_rows(6, size)
    codes, scales = rows_in_e4m3(rows.to(device))
    expected = rows.abs().amax(1, keepdim=True) / 448
    assert torch.equal(scales.cpu(), expected)
    assert torch.equal(codes.cpu().float(), (rows / expected).to(E4M3).float())
    wide = torch.zeros(6, size + 7)
    wide[:, :size] = rows
    assert torch.equal(rows_in_e4m3(wide.to(device)[:, :size])[0].cpu().float(), codes.cpu().float())


def test_rows_of_zeros_stay_zero_and_what_is_not_finite_shows(device: str) -> None:
    rows = torch.zeros(3, 64)
    rows[1, 5], rows[2, 7] = torch.nan, torch.inf
    codes, scales = (each.cpu() for each in rows_in_e4m3(rows.to(device)))
    values = codes.float() * scales
    assert torch.equal(values[0], rows[0])
    assert values[1:].isnan().all()


class Launches(TorchDispatchMode):
    """Notes the operations of torch that would launch a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_product_of_e4m3_is_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding the rows took eight of torch's."""
    x, launched = grid_rows(4, 64), list[int]()
    weight = PackedMatrix("e4m3", torch.randn(32, 64).to(E4M3), torch.rand(32, 1) + 0.5, None, 64)
    expected = scaled_product(x, weight)
    rounded = rows_in_e4m3(x)

    def counted(rows: Tensor) -> tuple[Tensor, Tensor]:
        launched.append(len(rows))
        return rounded

    monkeypatch.setattr(packed, "_has_kernels", lambda _: True)
    assert torch.equal(scaled_product(x, weight), expected)
    monkeypatch.setattr(triton_e4m3, "rows_in_e4m3", counted)
    with Launches() as noted:
        assert torch.equal(scaled_product(x, weight), expected)
    assert launched == [4]
    assert [name for name in noted.names if name != "aten::equal"] == ["aten::_scaled_mm"]
