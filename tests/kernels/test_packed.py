"""Packed matrices beside sums written out element by element, and their parts beside parts of the whole."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.torch_version import TorchVersion

from crossdock.kernels import packed
from crossdock.kernels.packed import Kind, PackedMatrix, packed_product, plain_rows, scaled_product

_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])
_SIGNED_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def _packed(kind: Kind, rows: int, columns: int, group: int, block_rows: int, has_offsets: bool) -> PackedMatrix:
    generator = torch.Generator().manual_seed(rows * columns + group)
    grid = (-(-rows // block_rows), -(-columns // group))
    codes = torch.randint(0, 256, (rows, columns // (2 if kind in ("int4", "e2m1") else 1)), generator=generator)
    codes = codes.to(torch.uint8)
    if kind == "int8":
        codes = codes.view(torch.int8)
    if kind == "e4m3":
        codes = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(grid, generator=generator) + 0.1
    offsets = torch.randn(grid, generator=generator) if has_offsets else None
    return PackedMatrix(kind, codes, scales, offsets, group, block_rows)


def _element(packed: PackedMatrix, row: int, column: int) -> float:
    if packed.kind in ("int4", "e2m1"):
        nibble = int(packed.codes[row, column // 2]) >> (4 * (column % 2)) & 15
        signed = nibble - 8 if packed.offsets is None else nibble
        value = float(signed if packed.kind == "int4" else _SIGNED_E2M1[nibble])
    else:
        value = float(packed.codes[row, column])
    place = row // packed.block_rows, column // packed.group
    offset = 0.0 if packed.offsets is None else float(packed.offsets[place])
    return float(packed.scales[place]) * value + offset


def _whole(packed: PackedMatrix) -> Tensor:
    rows, columns = packed.shape
    return torch.tensor([[_element(packed, row, column) for column in range(columns)] for row in range(rows)])


@pytest.mark.parametrize("kind", ["int4", "int8", "e4m3", "e2m1"])
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize(("group", "block_rows"), [(4, 1), (12, 1), (5, 3), (12, 7)])
def test_dequantise_of_every_kind_gives_scale_times_code_plus_offset(
    kind: Kind, has_offsets: bool, group: int, block_rows: int
) -> None:
    packed = _packed(kind, 7, 12, group, block_rows, has_offsets)
    torch.testing.assert_close(packed.dequantise(torch.float32), _whole(packed))
    torch.testing.assert_close(packed.dequantise(torch.float64, slice(2, 5)).float(), _whole(packed)[2:5])


def test_few_rows_at_a_time_give_the_whole_weight_and_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_PANEL_BYTES", {"cpu": 4 * 12 * 3})
    matrices, x = [_packed("int4", rows, 12, 4, 2, True) for rows in (7, 2, 3)], torch.eye(12)
    whole = torch.cat([_whole(each) for each in matrices])
    torch.testing.assert_close(plain_rows(matrices, torch.float32), whole)
    torch.testing.assert_close(packed_product(x, matrices[0]), whole[:7].T)


@given(st.sampled_from(["int4", "int8", "e4m3", "e2m1"]), st.integers(0, 1), st.data())
def test_part_along_groups_and_blocks_equals_part_of_whole(kind: Kind, dim: int, data: st.DataObject) -> None:
    group, block_rows = data.draw(st.sampled_from([2, 4, 16])), data.draw(st.sampled_from([1, 4, 8]))
    packed = _packed(kind, 8, 16, group, block_rows, data.draw(st.booleans()))
    size, unit = packed.shape[dim], (block_rows, group)[dim]
    unit = unit if unit < size else 2
    start = data.draw(st.integers(0, size // unit - 1)) * unit
    end = data.draw(st.integers(start // unit + 1, size // unit)) * unit
    part = packed.part(dim, start, end).dequantise(torch.float32)
    assert torch.equal(part, packed.dequantise(torch.float32).narrow(dim, start, end - start))


@pytest.mark.parametrize(("dim", "start", "end"), [(0, 0, 2), (0, 2, 8), (1, 0, 6), (1, 2, 16)])
def test_part_that_would_cut_a_group_or_block_is_refused(dim: int, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="would cut"):
        _packed("int4", 8, 16, 4, 4, False).part(dim, start, end)


def test_columns_in_another_order_are_those_of_the_input() -> None:
    plain = _packed("int4", 3, 8, 4, 1, True)
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    packed = PackedMatrix("int4", plain.codes, plain.scales, plain.offsets, 4, columns=order)
    x = torch.randn(2, 8)
    expected = x[:, order] @ plain.dequantise(torch.float32).T
    torch.testing.assert_close(x @ packed.dequantise(torch.float32).T, expected)
    with pytest.raises(ValueError, match="act-order"):
        packed.part(1, 0, 4)


def test_matrix_of_wrong_shapes_is_refused_by_name() -> None:
    codes = torch.zeros(4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="scales of a matrix int8"):
        PackedMatrix("int8", codes, torch.ones(4, 1), None, 4)
    with pytest.raises(ValueError, match="codes of a matrix e4m3"):
        PackedMatrix("e4m3", codes, torch.ones(4, 2), None, 4)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("num_scales", [1, 48])
def test_product_of_e4m3_equals_that_of_the_rounded_operands(num_scales: int, device: str) -> None:
    """Rows of x differ by orders of magnitude; one is zero."""
    rng = torch.Generator().manual_seed(0)
    codes = torch.randn(48, 64, generator=rng).to(torch.float8_e4m3fn)
    scales = torch.rand(num_scales, 1, generator=rng) + 0.5
    matrix = PackedMatrix("e4m3", codes.to(device), scales.to(device), None, 64, block_rows=48 // num_scales)
    x = (torch.randn(2, 5, 64, generator=rng) * 10.0 ** torch.arange(-2, 3)[:, None]).bfloat16()
    x[1, 3], bias = 0, torch.randn(48, generator=rng).bfloat16()
    found = scaled_product(x.to(device), matrix, bias.to(device)).cpu().double()
    peaks = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
    rounded = (x.double() / peaks).float().to(torch.float8_e4m3fn).double() * peaks
    weight = codes.double() * scales.double()
    expected = rounded @ weight.T + bias.double()
    if device == "cpu":  # a GPU rounds a few scales, and by these some codes, otherwise
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    assert ((found - expected).norm(dim=-1) <= 0.02 * expected.norm(dim=-1)).all()
    exact = x.double() @ weight.T + bias.double()
    assert (found - exact).norm() <= 0.05 * exact.norm()


def test_gpus_with_e4m3_multiply_in_it_where_scales_are_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for a GPU: blocks of scales, other dtypes and older GPUs keep the dequantised product."""
    x: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    other: Any = SimpleNamespace(device=x.device, dtype=torch.float16)
    codes = torch.zeros(32, 64).to(torch.float8_e4m3fn)
    of_rows, of_blocks = (
        PackedMatrix("e4m3", codes, torch.ones(*shape), None, group, block_rows=block)
        for shape, group, block in (((32, 1), 64, 1), ((2, 2), 32, 16))
    )
    capability = [(8, 9)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability[0])
    assert packed.multiplies_e4m3(of_rows, x.dtype, x.device)
    assert not packed.multiplies_e4m3(of_blocks, x.dtype, x.device)
    assert not packed.multiplies_e4m3(of_rows, other.dtype, other.device)
    capability[0] = (8, 6)
    assert not packed.multiplies_e4m3(of_rows, x.dtype, x.device)


@pytest.mark.parametrize(
    ("version", "capability", "is_refused"),
    [("2.11.0+cu130", (8, 9), True), ("2.12.0", (8, 9), False), ("2.11.0", (9, 0), False), ("2.13.1", (8, 9), False)],
)
def test_products_of_e4m3_are_refused_where_torch_launches_them_beside_the_current_stream(
    version: str, capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with pytest.raises(ValueError, match=r"FP8 weights need torch 2\.12") if is_refused else nullcontext():
        packed.require_e4m3_products(torch.device("cuda"))
