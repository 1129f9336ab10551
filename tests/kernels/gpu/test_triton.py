"""The Triton kernels against float64 written out longhand: interpreted on CPUs, compiled where there is a GPU."""

import mmap
import random
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch, reference_paged_attention, reference_store_kv
from tests.kernels.test_attention import Case

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu import triton_attention
from crossdock.kernels.gpu.triton_attention import Tiles, paged_attention, store_kv

pytestmark = pytest.mark.usefixtures("poisoned_memory")

MIXED = [(1, 40), (1, 70), (21, 21), (1, 1), (6, 50), (3, 66)]
DECODES = [(1, 40), (1, 1), (1, 100), (1, 64)]
SHAPES: list[dict[str, Any]] = [
    {"softcap": 2.0, "k_dim": 24, "v_dim": 40, "page_size": 24},
    {"window": 1, "q_heads": 3, "kv_heads": 3, "page_size": 1},
    {"q_heads": 20, "kv_heads": 1, "k_dim": 48, "v_dim": 16},
    {"q_heads": 8, "kv_heads": 1, "page_size": 64, "sinks": True},
    {"attention_chunk": 64, "page_size": 24},
    {"attention_chunk": 1},
]
WIDE: list[dict[str, Any]] = [
    {},
    {"q_heads": 9, "kv_heads": 3, "window": 24},
    {"sinks": True, "softcap": 5.0, "window": 33},
    {"fp8": True, "k_dim": 33, "v_dim": 7, "page_size": 24},
    {"fp8": True, "q_heads": 8, "kv_heads": 1, "attention_chunk": 48},
]
"""Shapes that decodes, chunks and rows that see later keys have."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and parts so small that short contexts have several."""
    monkeypatch.setattr(triton_attention, "tiles_for", lambda *_: Tiles(32, 16, 4, 2))
    monkeypatch.setattr(triton_attention, "PART_TOKENS", 32)
    monkeypatch.setattr(triton_attention, "CHUNK_PART_TOKENS", 16)


def views(case: Case, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pages of keys and of values in a copy of the case's pool."""
    keys, values = (pool.as_strided(x.shape, x.stride(), x.storage_offset()) for x in (case.k_pages, case.v_pages))
    return keys, values


def run(case: Case, device: str) -> Tensor:
    """Return the kernel's output for the case, on the CPU."""
    pool, batch = case.pool.to(device), case.batch
    k_pages, v_pages = views(case, pool)
    for name in ("query_start", "kv_len", "page_table"):
        setattr(batch, name, getattr(batch, name).to(device))
    batch.key_end = None if batch.key_end is None else batch.key_end.to(device)
    arguments = case.arguments()
    if case.sink_logits is not None:
        arguments["sinks"] = case.sink_logits.to(device)
    arguments |= {name: scale.to(device) for name, scale in case.scales.items()}
    flat = case.q.as_strided((case.q.untyped_storage().nbytes() // case.q.itemsize,), (1,), 0)
    q = flat.to(device).as_strided(case.q.shape, case.q.stride())  # with the same strides
    return paged_attention(q, k_pages, v_pages, batch, **arguments).cpu()


def check(case: Case, device: str) -> None:
    case.fill()
    out = run(case, device)
    assert out.is_contiguous()
    assert out.dtype == case.dtype
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[case.dtype]
    torch.testing.assert_close(out.double(), case.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [*WIDE, *SHAPES], ids=str)
def test_attention_matches_longhand(shape: dict[str, Any], device: str, seed: int) -> None:
    check(Case(MIXED, seed=seed, **shape), device)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", WIDE[1:4], ids=str)
def test_rows_that_see_later_keys_match_longhand(shape: dict[str, Any], device: str, seed: int) -> None:
    check(Case(MIXED, seed=seed, blocks={2: [(0, 9), (10, 21)], 4: [(30, 49)], 5: [(40, 65)]}, **shape), device)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_attention_of_batches_without_chunks_matches_longhand(shape: dict[str, Any], device: str, seed: int) -> None:
    check(Case(DECODES, seed=seed, **shape), device)


REAL = [[*MIXED, (3, 130)], [*DECODES, (1, 257)], [(40, 40)]]


@pytest.mark.parametrize(
    ("lengths", "dim", "fp8", "dtype"),
    # Triton's interpreter multiplies bfloat16 by its bits.
    [(REAL[0], 64, True, torch.float32), (REAL[1], 128, False, torch.float16), (REAL[2], 128, True, torch.float16)]
    + [
        pytest.param(*case, marks=pytest.mark.soak)
        for case in product(REAL, (64, 128), (False, True), (torch.float32, torch.float16, torch.bfloat16))
    ],
)
def test_attention_with_real_tiles_matches_longhand(
    lengths: list[tuple[int, int]], dim: int, fp8: bool, dtype: torch.dtype, device: str, seed: int
) -> None:
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("not in the interpreter")
    check(Case(lengths, q_heads=8, kv_heads=2, k_dim=dim, v_dim=dim, dtype=dtype, fp8=fp8, seed=seed), device)


@pytest.mark.usefixtures("small")
def test_attention_of_random_batches_matches_longhand(device: str, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2 if device == "cpu" else 12):
        lengths = []
        for _ in range(rng.randint(1, 6)):
            kv = rng.randint(1, 200)
            lengths.append((1 if rng.random() < 0.6 else rng.randint(1, min(kv, 60)), kv))
        kv_heads = rng.choice([1, 2])
        case = Case(
            lengths,
            q_heads=kv_heads * rng.choice([1, 3, 4, 8]),
            kv_heads=kv_heads,
            k_dim=rng.choice([2, 16, 31, 32, 80]),
            v_dim=rng.choice([1, 16, 32, 48]),
            page_size=rng.choice([1, 8, 16, 24, 64]),
            softcap=rng.choice([None, None, 1.5, 50.0]),
            sinks=rng.random() < 0.3,
            fp8=rng.random() < 0.3,
            seed=rng.randrange(2**31),
            **rng.choice([{}, {"window": rng.randint(1, 150)}, {"attention_chunk": rng.randint(1, 150)}]),
        )
        check(case, device)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("sight", [{"window": 20}, {"attention_chunk": 40}], ids=str)
def test_pages_that_no_row_sees_are_never_read(sight: dict[str, int], device: str, seed: int) -> None:
    case = Case([(1, 200), (9, 130), (40, 120)], seed=seed, **sight)
    case.fill()
    pages = case.batch.page_table
    spare = next(p for p in range(len(case.k_pages)) if p not in pages)
    assert case.k_pages[spare].isnan().all()
    for s, (q_len, kv_len) in enumerate(case.lengths):
        pages[s, : case.first_key(kv_len - q_len) // case.page_size] = spare
    torch.testing.assert_close(run(case, device).double(), case.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("small")
def test_sequences_without_rows_change_no_output(device: str, seed: int) -> None:
    """A decode batch is padded to a size for which there is a graph."""
    case = Case(DECODES, seed=seed)
    case.fill()
    batch = case.batch
    batch.query_start = torch.cat([batch.query_start, batch.query_start[-1:].expand(3)])
    batch.kv_len = torch.cat([batch.kv_len, torch.zeros(3, dtype=torch.int32)])
    batch.page_table = torch.cat([batch.page_table, torch.zeros_like(batch.page_table[:3])])
    torch.testing.assert_close(run(case, device).double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_queries_with_strided_elements_match_longhand(device: str) -> None:
    case = Case([(5, 20), (1, 9)])
    case.q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    check(case, device)


def test_scores_far_apart_do_not_overflow(device: str) -> None:
    case = Case([(40, 90), (1, 64)], seed=1)
    case.q *= 300
    case.fill()
    assert (run(case, device).double() - case.expected()).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_store_writes_only_its_slots(dtype: torch.dtype, page_size: int, device: str) -> None:
    case = Case([(5, 20), (1, 17), (30, 30)], k_dim=24, v_dim=40, dtype=dtype, page_size=page_size)
    fused = torch.randn(36, 2 * (24 + 40)).to(dtype)
    slots = case.batch.slots
    slots[[0, 7, 35]] = -1
    pool, rows = case.pool.to(device), fused.to(device)
    k_pages, v_pages = views(case, pool)
    store_kv(rows[:, :48].view(36, 2, 24), rows[:, 48:].view(36, 2, 40), k_pages, v_pages, slots.to(device))
    is_stored = slots >= 0
    pages, offsets = slots[is_stored] // page_size, slots[is_stored] % page_size
    assert torch.equal(k_pages.cpu()[pages, :, offsets], fused[is_stored, :48].view(-1, 2, 24))
    assert torch.equal(v_pages.cpu()[pages, :, offsets], fused[is_stored, 48:].view(-1, 2, 40))
    assert int((~pool.isnan()).sum()) == fused[is_stored].numel()


def test_offsets_beyond_32_bits_are_stored_and_read(device: str) -> None:
    """The pages lie in address space that costs no memory until it is written."""
    if device != "cpu":
        pytest.skip("a GPU has no memory that is reserved but not used")
    far = (1 << 30) + 64  # elements; twice as far does not fit into int32, and would lie before the first page
    pool = torch.frombuffer(mmap.mmap(-1, 4 * far * 2 + 4096), dtype=torch.float16)
    k_pages, v_pages = (pool.as_strided((2, 3, 16, 16), (512, far, 16, 1), 2 * far + side) for side in (0, 256))
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(20, 3, 16, generator=rng).half() for _ in range(3))
    store_kv(k, v, k_pages, v_pages, torch.arange(20))
    assert torch.equal(k_pages[1, :, :4], k[16:].transpose(0, 1))
    assert torch.equal(v_pages[0], v[:16].transpose(0, 1))
    table = torch.tensor([[0, 1]]).int()
    batch = AttentionBatch(torch.tensor([0, 20]).int(), torch.tensor([20]).int(), table, torch.arange(20), 20, 20, 0)
    last = AttentionBatch(torch.tensor([0, 1]).int(), torch.tensor([20]).int(), table, torch.arange(1), 1, 20, 1)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    expected = expected.transpose(0, 1)
    for rows, step in ((q.transpose(0, 1), batch), (q[:, -1:].transpose(0, 1), last)):
        out = paged_attention(rows, k_pages, v_pages, step, scale=16**-0.5)
        torch.testing.assert_close(out.double(), expected[-len(rows) :], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_store_to_e4m3_rounds_and_clamps(dtype: torch.dtype, device: str, seed: int) -> None:
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("not in the interpreter")
    case = Case([(30, 30)], k_dim=24, v_dim=40, fp8=True, seed=seed)
    case.scales = {name: torch.tensor([0.5, 0.125]) for name in case.scales}
    rng = torch.Generator().manual_seed(seed)
    rows = [torch.randn(30, 2, dim, generator=rng) * torch.logspace(-3, 3, dim) for dim in (24, 40)]
    if device == "cpu":  # Triton's interpreter rounds wrongly where rounding carries: give it numbers of e4m3
        rows = [x.clamp(-400, 400).to(torch.float8_e4m3fn).float() for x in rows]
    k, v = (x.to(dtype) for x in rows)
    k[0, 0, :2] = torch.tensor([6e4, -6e4])
    pool = case.pool.clone().to(device)
    k_pages, v_pages = views(case, pool)
    scales = {name: scale.to(device) for name, scale in case.scales.items()}
    store_kv(k.to(device), v.to(device), k_pages, v_pages, case.batch.slots.to(device), **scales)
    reference_store_kv(k, v, case.k_pages, case.v_pages, case.batch.slots, **case.scales)
    assert torch.equal(pool.cpu().view(torch.uint8), case.pool.view(torch.uint8))
    assert (case.pool.float().abs() == 448).any()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("lengths", "case"), [(MIXED, {"fp8": True}), (DECODES, {"dtype": torch.float16}), (MIXED[:4], {})], ids=str
)
def test_triton_over_latents_equals_torch(lengths: list[tuple[int, int]], case: dict[str, Any], device: str) -> None:
    """24 query heads attend in groups of eight to latents of 40 elements, with 12 more in their keys."""
    latents = Case(lengths, 24, 1, 52, 0, **case)
    latents.fill()
    tensors = latents.q.to(device), latents.k_pages.to(device)
    batch, scale = latents.batch, latents.scales.get("k_scale")
    expected = reference_paged_attention(latents.q, latents.k_pages, latents.k_pages[..., :40], batch, **scaled(scale))
    for name in ("query_start", "kv_len", "page_table"):
        setattr(batch, name, getattr(batch, name).to(device))
    scale = scale.to(device) if scale is not None else None
    out = paged_attention(*tensors, tensors[1][..., :40], batch, **scaled(scale)).cpu()
    tolerance = 2e-5 if latents.dtype is torch.float32 else 2e-3
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def scaled(scale: Tensor | None) -> dict[str, Any]:
    return {"scale": 0.2} if scale is None else {"scale": 0.2, "k_scale": scale, "v_scale": scale}
