"""The Triton steps of a layer against float64 written out longhand: interpreted on CPUs, compiled where there is a GPU.

Every bound counts roundings: a result that is rounded once is off by at most half an epsilon of its dtype. Triton's
interpreter truncates to bfloat16, which is twice that.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels.attention import reference_store_kv

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu import triton_layer_steps
from crossdock.kernels.gpu.triton_e4m3 import rows_in_e4m3
from crossdock.kernels.gpu.triton_layer_steps import add_and_norm, finish_heads, silu_and_multiply
from crossdock.kernels.packed import RoundedRows

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def check(ours: Tensor, exact: Tensor, scale: Tensor, roundings: int) -> None:
    """Check that each element is off by at most so many epsilons of its `scale`, and of the smallest numbers."""
    limits = torch.finfo(ours.dtype)
    allowed = roundings * limits.eps * (scale.abs() + limits.smallest_normal)
    worst = ((ours.cpu().double() - exact).abs() / allowed).max()
    assert worst <= 1, f"off by {float(worst):.2f} times what {roundings} roundings to {ours.dtype} may be"


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 112])
def test_add_and_norm_matches_float64(size: int, dtype: torch.dtype, device: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    hidden, addend = (torch.randn(5, size, generator=rng).to(dtype) for _ in range(2))
    hidden[0] *= 1e-3  # the epsilon of the norm counts
    weight = torch.randn(size, generator=rng).to(dtype)
    given = hidden.to(device, copy=True)
    exact = norm(hidden.double(), weight.double())
    check(add_and_norm(given, None, weight.to(device), EPS), exact, exact, 3)
    assert torch.equal(given.cpu(), hidden)
    normed = add_and_norm(given, addend.to(device), weight.to(device), EPS)
    total = hidden.double() + addend.double()
    check(given, total, total, 1)
    exact = norm(given.cpu().double(), weight.double())  # of the rounded sum, as transformers rounds
    check(normed, exact, exact, 3)


class Heads:
    """Random rows of queries, keys and values, their angles, and an empty pool of pages; on the CPU."""

    def __init__(self, dtype: torch.dtype, rng: torch.Generator, rows: int = 11, dim: int = 12) -> None:
        self.Hq, self.Hkv, self.dim, self.page_size = 4, 2, dim, 4
        self.qkv = torch.randn(rows, (self.Hq + 2 * self.Hkv) * dim, generator=rng).to(dtype)
        self.q_norm, self.k_norm = (torch.randn(dim, generator=rng).to(dtype) for _ in range(2))
        angles = torch.randn(rows, dim // 2, generator=rng).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.pool = torch.full((rows, self.Hkv, 2, self.page_size, dim), float("nan")).to(dtype)
        self.slots = torch.randperm(rows * self.page_size, generator=rng)[:rows]
        self.slots[[0, 8]] = -1

    def pages(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        return pool[:, :, 0], pool[:, :, 1]

    def run(self, device: str, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the queries, and the pool after the step."""
        pool = self.pool.to(device, copy=True)
        rows = (self.qkv.to(device, copy=True), self.cos.to(device), self.sin.to(device))
        options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
        q = finish_heads(*rows, *self.pages(pool), self.slots.to(device), **options)
        return q.cpu(), pool.cpu()

    def stored(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of the rows that have slots, [rows, Hkv, D] each."""
        slots = self.slots[self.slots >= 0]
        keys, values = (x[slots // self.page_size, :, slots % self.page_size] for x in self.pages(pool))
        return keys, values

    def split(self) -> tuple[Tensor, ...]:
        """Return the exact queries, keys and values before the step, [T, heads, D] each."""
        heads = self.qkv.double().view(len(self.qkv), -1, self.dim)
        return heads.split([self.Hq, self.Hkv, self.Hkv], 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [True, False])
def test_finished_heads_match_float64(has_norms: bool, dtype: torch.dtype, device: str, seed: int) -> None:
    heads = Heads(dtype, torch.Generator().manual_seed(seed))
    q, k, v = heads.split()
    options: dict[str, Any] = {}
    if has_norms:
        options = {"q_norm": heads.q_norm, "k_norm": heads.k_norm, "eps": EPS}
        q, k = norm(q, heads.q_norm.double()), norm(k, heads.k_norm.double())
    cos, sin = heads.cos.double()[:, None], heads.sin.double()[:, None]

    def rotated(x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x after rotation, and the length of each rotated pair, relative to which it is rounded."""
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin, (low**2 + high**2).sqrt().repeat(1, 1, 2)

    is_stored = heads.slots >= 0
    got, pool = heads.run(device, **options)
    keys, values = heads.stored(pool)
    (q, q_scale), (k, k_scale) = rotated(q), rotated(k)
    check(got, q, q_scale, 7)  # two of each norm's elements, two products and the sum
    check(keys, k[is_stored], k_scale[is_stored], 7)
    assert torch.equal(values.double(), v[is_stored])
    assert int((~pool.isnan()).sum()) == keys.numel() + values.numel()  # nothing else is written


def test_finished_heads_are_stored_to_e4m3_pages_as_reference(device: str, seed: int) -> None:
    """Numbers of e4m3, and no rotation: Triton's interpreter rounds wrongly where rounding carries."""
    heads = Heads(torch.float32, torch.Generator().manual_seed(seed), dim=16)
    heads.cos, heads.sin = torch.ones_like(heads.cos), torch.zeros_like(heads.sin)
    heads.qkv = (heads.qkv * torch.logspace(-1, 2, heads.qkv.shape[1])).to(torch.float8_e4m3fn).float()
    heads.qkv[heads.qkv.abs() < 2**-4] = 0  # the rest stay numbers of e4m3 when they are divided by 2
    heads.qkv[1, ::5] = 6e4  # is clamped
    heads.pool = torch.zeros_like(heads.pool).to(torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([0.125, 1.0])}
    _, pool = heads.run(device, **scales)
    expected = heads.pool.clone()
    _, k, v = heads.split()
    reference_store_kv(k.float(), v.float(), *heads.pages(expected), heads.slots, **scales)
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))
    assert (pool.float().abs() == 448).any()


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's: exp(300) is infinite
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_multiply_matches_float64(dtype: torch.dtype, device: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    size = 1030  # more than one block
    gate_up = (torch.randn(3, 2 * size, generator=rng) * 4).to(dtype)
    gate_up[0, :2] = torch.tensor([300.0, -300.0])
    gate, up = gate_up.double().chunk(2, -1)
    silu = gate / (1 + torch.exp(-gate))
    ours = silu_and_multiply(gate_up.to(device))
    exact = silu * up
    # A gate that is rounded below the smallest normal number is off by an epsilon of that, times up.
    check(ours, exact, exact.abs() + torch.finfo(dtype).smallest_normal * up.abs(), 3)


@pytest.mark.parametrize("most", [16384, 64])
def test_steps_round_their_rows_as_the_kernel_that_rounds_alone(
    most: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`most`: rows of 100 features are rounded by the step's own program, or by a second one."""
    monkeypatch.setattr(triton_layer_steps, "_ROUNDED", most)
    hidden, weight, gate_up = torch.randn(5, 100), torch.randn(100), torch.randn(5, 200)
    hidden[3], gate_up[1] = 0.0, 0.0
    hidden[4, 7], gate_up[4, 9] = torch.nan, torch.inf

    def room() -> RoundedRows:
        codes = torch.empty(5, 100, dtype=torch.float8_e4m3fn, device=device)
        return RoundedRows(codes, torch.empty(5, 1, device=device))

    for step in (
        lambda rounded: add_and_norm(hidden.clone().to(device), None, weight.to(device), EPS, rounded),
        lambda rounded: silu_and_multiply(gate_up.to(device), rounded),
    ):
        rounded = room()
        plain = step(rounded)
        codes, scales = (each.cpu() for each in rows_in_e4m3(plain))
        assert torch.equal(rounded.codes.cpu().float()[:4], codes.float()[:4])
        torch.testing.assert_close(rounded.scales.cpu(), scales, rtol=0, atol=0, equal_nan=True)
        assert scales[4].isnan()
        torch.testing.assert_close(plain, step(None), rtol=0, atol=0, equal_nan=True)
