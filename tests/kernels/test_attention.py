"""Paged attention and the KV store: every path against float64 written out longhand."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels.attention import (
    AttentionBatch,
    reference_paged_attention,
    reference_store_kv,
    store_kv,
)
from crossdock.kernels.backend import CPP
from tests.sweeps import shared_out

pytestmark = pytest.mark.usefixtures("poisoned_memory")


paged_attention = CPP.paged_attention
THREADS = (1, 2, 5)
TYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass
class Case:
    """A ragged batch: (query_len, kv_len) per sequence, and the shape of the heads.

    `blocks`: spans of positions within which every row sees all keys, by sequence, in order.
    """

    lengths: list[tuple[int, int]]
    q_heads: int = 4
    kv_heads: int = 2
    k_dim: int = 32
    v_dim: int = 32
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    attention_chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    fp8: bool = False  # pages of e4m3
    blocks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    seed: int = 0
    k_pages: Tensor = field(init=False)
    v_pages: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        S = len(self.lengths)
        P = max(-(-kv // self.page_size) for _, kv in self.lengths) + 2
        num_pages, num_layers, layer = S * P + 3, 3, 1
        # The pool's own layout, [page, head, layer, k|v, token, dim], all NaN until written.
        row = (self.k_dim + self.v_dim) * self.page_size
        elements = num_pages * self.kv_heads * num_layers * row
        self.pool = torch.full((elements,), float("nan")).to(torch.float8_e4m3fn if self.fp8 else self.dtype)
        strides = (self.kv_heads * num_layers * row, num_layers * row)
        self.k_pages = self.pool.as_strided(
            (num_pages, self.kv_heads, self.page_size, self.k_dim), (*strides, self.k_dim, 1), layer * row
        )
        self.v_pages = self.pool.as_strided(
            (num_pages, self.kv_heads, self.page_size, self.v_dim),
            (*strides, self.v_dim, 1),
            layer * row + self.page_size * self.k_dim,
        )
        page_table = torch.randperm(num_pages, generator=rng)[: S * P].view(S, P).int()
        T = sum(q for q, _ in self.lengths)
        query_start = torch.tensor([0, *[q for q, _ in self.lengths]]).cumsum(0).int()
        kv_len = torch.tensor([kv for _, kv in self.lengths]).int()
        self.keys = [torch.randn(kv, self.kv_heads, self.k_dim, generator=rng).to(self.dtype) for _, kv in self.lengths]
        self.values = [
            torch.randn(kv, self.kv_heads, self.v_dim, generator=rng).to(self.dtype) for _, kv in self.lengths
        ]
        self.scales: dict[str, Tensor] = {}
        if self.fp8:  # keys and values as they are read from such pages
            self.scales = {name: torch.rand(self.kv_heads, generator=rng) + 0.01 for name in ("k_scale", "v_scale")}
            self.keys = [rounded(keys, self.scales["k_scale"]) for keys in self.keys]
            self.values = [rounded(values, self.scales["v_scale"]) for values in self.values]
        # One fused buffer, so that q is a strided view, as in the models.
        fused = torch.randn(T, self.q_heads * self.k_dim + 7, generator=rng).to(self.dtype)
        self.q = fused[:, : self.q_heads * self.k_dim].view(T, self.q_heads, self.k_dim)
        self.sink_logits = torch.randn(self.q_heads, generator=rng).to(self.dtype) if self.sinks else None
        self.slots_of = [
            page_table[s].long().repeat_interleave(self.page_size)[:kv] * self.page_size
            + torch.arange(kv) % self.page_size
            for s, (_, kv) in enumerate(self.lengths)
        ]
        slots = torch.cat([slots[kv - q :] for slots, (q, kv) in zip(self.slots_of, self.lengths, strict=True)])
        self.batch = AttentionBatch(
            query_start=query_start,
            kv_len=kv_len,
            page_table=page_table,
            slots=slots,
            max_query_len=max(q for q, _ in self.lengths),
            max_kv_len=max(kv for _, kv in self.lengths),
            num_decodes=next((s for s, (q, _) in enumerate(self.lengths) if q > 1), S),
        )
        if self.blocks:
            rows = [(s, kv - q + i) for s, (q, kv) in enumerate(self.lengths) for i in range(q)]
            self.batch.key_end = torch.tensor([self.key_end(*row) for row in rows]).int()

    def first_key(self, position: int) -> int:
        """Return the first key that the row at a position sees."""
        first = max(0, position - self.window + 1) if self.window is not None else 0
        while self.attention_chunk is not None and first + self.attention_chunk <= position:
            first += self.attention_chunk
        return first

    def key_end(self, sequence: int, position: int) -> int:
        """Return the end of the keys that the row at a position of a sequence sees."""
        ends = [end for start, end in self.blocks.get(sequence, ()) if start <= position < end]
        assert all(end <= self.lengths[sequence][1] for end in ends)
        return max([position + 1, *ends])

    def fill(self) -> None:
        """Write every sequence's keys and values to its pages; all other slots stay NaN."""
        for keys, values, slots in zip(self.keys, self.values, self.slots_of, strict=True):
            reference_store_kv(keys, values, self.k_pages, self.v_pages, slots, **self.scales)

    def arguments(self) -> dict[str, Any]:
        return {
            "scale": self.k_dim**-0.5,
            **({"window": self.window} if self.attention_chunk is None else {"attention_chunk": self.attention_chunk}),
            "softcap": self.softcap,
            "sinks": self.sink_logits,
            **self.scales,
        }

    def expected(self) -> Tensor:
        """Return attention head by head in float64, from the keys and values before they were stored to any page."""
        out = torch.empty(len(self.q), self.q_heads, self.v_dim, dtype=torch.float64)
        group, row = self.q_heads // self.kv_heads, 0
        for s, (q_len, kv_len) in enumerate(self.lengths):
            rows, row = slice(row, row + q_len), row + q_len
            is_hidden = torch.ones(q_len, kv_len, dtype=torch.bool)
            for i, position in enumerate(range(kv_len - q_len, kv_len)):
                is_hidden[i, self.first_key(position) : self.key_end(s, position)] = False
            for head in range(self.q_heads):
                k, v = (of[s][:, head // group].double() for of in (self.keys, self.values))  # [L, D]
                scores = self.q[rows, head].double() @ k.T * self.k_dim**-0.5  # [q, L]
                if self.softcap is not None:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                scores = scores.masked_fill(is_hidden, -torch.inf)
                if self.sink_logits is not None:
                    scores = torch.cat([scores, self.sink_logits[head].double().expand(q_len, 1)], 1)
                out[rows, head] = scores.softmax(1)[:, :kv_len] @ v
        return out

    def tolerance(self) -> float:
        return 2e-5 if self.dtype == torch.float32 else 2e-2


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """Return x [T, H, D] rounded to e4m3 with a scale per head: the nearest of all numbers that e4m3 has."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()]
    nearest = (x.double()[..., None] / scale.double()[:, None, None] - numbers).abs().argmin(-1)
    return (numbers[nearest] * scale[:, None]).float()


MIXED = [(1, 40), (37, 37), (1, 1), (20, 90), (1, 257), (3, 130)]
LONG = [(1, 1500), (70, 700), (1, 513), (1, 512), (2, 1025)]  # longer than the kernel's spans of 512
SHAPES: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 24},
    {"attention_chunk": 1},
    {"attention_chunk": 24},
    {"softcap": 2.0},
    {"sinks": True, "softcap": 5.0, "window": 33},
    {"sinks": True, "softcap": 5.0, "attention_chunk": 33},
    {"k_dim": 48, "v_dim": 16, "page_size": 1},
    {"k_dim": 24, "v_dim": 40, "page_size": 24},
    {"k_dim": 33, "v_dim": 7},
    {"q_heads": 3, "kv_heads": 3},
    {"q_heads": 9, "kv_heads": 3, "k_dim": 64, "v_dim": 64},
    {"q_heads": 8, "kv_heads": 2, "k_dim": 128, "v_dim": 128, "page_size": 32},
    {"q_heads": 8, "kv_heads": 1, "k_dim": 192, "v_dim": 128, "page_size": 8},
    {"q_heads": 4, "kv_heads": 1, "k_dim": 256, "v_dim": 256, "page_size": 64},
]


def random_blocks(rng: random.Random, lengths: list[tuple[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """Return spans of some sequences; none crosses the end of its sequence."""
    blocks: dict[int, list[tuple[int, int]]] = {}
    for s, (_, kv) in enumerate(lengths):
        end = 0
        while (start := end + rng.randint(0, 40)) < kv and rng.random() < 0.8:
            end = min(start + rng.choice([1, 7, 64, 130]), kv)
            blocks.setdefault(s, []).append((start, end))
    return blocks


def check(case: Case, attention: Any) -> None:
    case.fill()
    out = attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())
    assert out.is_contiguous()
    assert out.dtype == case.dtype
    torch.testing.assert_close(out.double(), case.expected(), atol=case.tolerance(), rtol=case.tolerance())


# Every shape by both kernels, each in one of the two types; the other type in the long run.
SWEEP = [
    pytest.param(attention, dtype, shape, marks=() if (number + by_torch + half) % 2 else pytest.mark.soak)
    for number, shape in enumerate(SHAPES)
    for by_torch, attention in enumerate((reference_paged_attention, paged_attention))
    for half, dtype in enumerate((torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("attention", "dtype", "shape"), SWEEP)
def test_attention_matches_longhand(attention: Any, dtype: torch.dtype, shape: dict[str, Any], seed: int) -> None:
    check(Case(MIXED, dtype=dtype, seed=seed, **shape), attention)


@pytest.mark.parametrize(("shape", "dtype"), shared_out(2, [*SHAPES[:9], SHAPES[11]], TYPES))
def test_attention_over_e4m3_pages_matches_longhand(dtype: torch.dtype, shape: dict[str, Any], seed: int) -> None:
    check(Case(MIXED, dtype=dtype, seed=seed, fp8=True, **shape), reference_paged_attention)


LONG_SHAPES: list[dict[str, Any]] = [
    *({}, {"window": 600}, {"window": 3}, {"attention_chunk": 600}, {"attention_chunk": 512}, {"sinks": True})
]


@pytest.mark.parametrize(
    ("threads", "shape", "dtype"), shared_out(3, THREADS, LONG_SHAPES, TYPES), indirect=["threads"]
)
def test_attention_over_contexts_longer_than_a_span_matches_longhand(
    dtype: torch.dtype, shape: dict[str, Any], seed: int, threads: int
) -> None:
    check(Case(LONG, q_heads=3, kv_heads=1, dtype=dtype, seed=seed, **shape), paged_attention)
    check(Case([(1, 1300)], q_heads=3, kv_heads=1, dtype=dtype, seed=seed, **shape), paged_attention)


def test_attention_of_random_batches_matches_longhand(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        lengths = []
        for _ in range(rng.randint(1, 6)):
            kv = rng.randint(1, 300)
            lengths.append((1 if rng.random() < 0.5 else rng.randint(1, kv), kv))
        kv_heads = rng.choice([1, 2, 3])
        case = Case(
            lengths,
            q_heads=kv_heads * rng.choice([1, 3, 4, 8, 100 // kv_heads]),
            kv_heads=kv_heads,
            k_dim=rng.choice([2, 16, 31, 32, 64, 80]),
            v_dim=rng.choice([1, 16, 32, 48, 64, 80]),
            page_size=rng.choice([1, 8, 16, 32, 64]),
            dtype=rng.choice([torch.float32, torch.bfloat16]),
            softcap=rng.choice([None, None, 1.5, 50.0]),
            sinks=rng.random() < 0.3,
            blocks=random_blocks(rng, lengths) if rng.random() < 0.5 else {},
            seed=rng.randrange(2**31),
            **rng.choice([{}, {"window": rng.randint(1, 200)}, {"attention_chunk": rng.randint(1, 200)}]),
        )
        check(case, paged_attention)


BLOCKS = {1: [(0, 9), (10, 37)], 3: [(60, 74), (80, 90)], 5: [(100, 129)]}  # of MIXED: whole, and begun before
LONG_BLOCKS = {1: [(10, 620), (640, 700)], 4: [(1000, 1025)]}  # of LONG


@pytest.mark.parametrize(("attention", "dtype", "shape"), SWEEP)
def test_rows_that_see_later_keys_match_longhand(
    attention: Any, dtype: torch.dtype, shape: dict[str, Any], seed: int
) -> None:
    check(Case(MIXED, dtype=dtype, seed=seed, blocks=BLOCKS, **shape), attention)


@pytest.mark.parametrize(
    ("threads", "shape"), shared_out(3, THREADS, [*LONG_SHAPES[:3], {"sinks": True}]), indirect=["threads"]
)
def test_rows_that_see_keys_of_later_spans_match_longhand(shape: dict[str, Any], seed: int, threads: int) -> None:
    check(Case(LONG, q_heads=3, kv_heads=1, seed=seed, blocks=LONG_BLOCKS, **shape), paged_attention)
    whole = Case([(1200, 1300)], q_heads=3, kv_heads=1, seed=seed, blocks={0: [(300, 1290)]}, **shape)
    check(whole, paged_attention)


def test_causal_rows_have_the_same_bits_beside_rows_that_see_later_keys(seed: int) -> None:
    """The end of a row's keys says the same as its position where it is the same."""
    case = Case(MIXED, seed=seed, window=33, sinks=True)
    case.fill()
    plain = paged_attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())
    case.blocks, starts = BLOCKS, case.batch.query_start.tolist()
    rows = [(s, kv - q + i) for s, (q, kv) in enumerate(case.lengths) for i in range(q)]
    ends = [case.key_end(*row) for row in rows]
    case.batch.key_end = torch.tensor(ends).int()
    out = paged_attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())
    is_causal = torch.tensor([end == position + 1 for end, (_, position) in zip(ends, rows, strict=True)])
    assert torch.equal(out[is_causal], plain[is_causal])
    assert not torch.isclose(out[~is_causal], plain[~is_causal]).all(dim=(1, 2)).any()
    assert not is_causal[starts[1] : starts[2]].all()


@pytest.mark.parametrize("attention", [reference_paged_attention, paged_attention])
@pytest.mark.parametrize("sight", [{"window": 20}, {"attention_chunk": 40}], ids=str)
def test_pages_that_no_row_sees_are_never_read(attention: Any, sight: dict[str, int], seed: int) -> None:
    case = Case([(1, 200), (9, 130)], seed=seed, **sight)
    case.fill()
    pages = case.batch.page_table
    spare = next(p for p in range(len(case.k_pages)) if p not in pages)
    assert case.k_pages[spare].isnan().all()
    for s, (q_len, kv_len) in enumerate(case.lengths):
        pages[s, : case.first_key(kv_len - q_len) // case.page_size] = spare
    out = attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-5, rtol=2e-5)


SIGHTS: list[dict[str, int]] = [{}, {"window": 70}, {"attention_chunk": 70}]


@pytest.mark.parametrize(("threads", "sight", "dtype"), shared_out(3, THREADS, SIGHTS, TYPES), indirect=["threads"])
def test_row_alone_or_in_chunks_gives_same_bits_as_in_batch(
    dtype: torch.dtype, sight: dict[str, int], seed: int, threads: int
) -> None:
    n = 1200
    case = Case([(n, n), (40, 600), (1, 30)], q_heads=6, dtype=dtype, sinks=True, seed=seed, **sight)
    case.fill()
    whole = paged_attention(case.q, case.k_pages, case.v_pages, case.batch, **case.arguments())[:n]
    for start, end in [(0, 7), (7, 8), (8, 511), (511, 513), (513, 1199), (1199, 1200), (700, 701)]:
        batch = AttentionBatch(
            query_start=torch.tensor([0, end - start]).int(),
            kv_len=torch.tensor([end]).int(),
            page_table=case.batch.page_table[:1],
            slots=case.batch.slots[start:end],
            max_query_len=end - start,
            max_kv_len=end,
            num_decodes=int(end - start == 1),
        )
        part = paged_attention(case.q[start:end], case.k_pages, case.v_pages, batch, **case.arguments())
        assert torch.equal(part, whole[start:end]), (start, end)


@pytest.mark.parametrize("attention", [reference_paged_attention, paged_attention])
def test_attention_chunk_that_no_row_leaves_gives_the_bits_of_causal_attention(attention: Any, seed: int) -> None:
    case = Case(MIXED, seed=seed)
    case.fill()
    arguments = (case.q, case.k_pages, case.v_pages, case.batch)
    plain = attention(*arguments, **case.arguments())
    assert torch.equal(attention(*arguments, **case.arguments() | {"attention_chunk": 257}), plain)
    assert not torch.equal(attention(*arguments, **case.arguments() | {"attention_chunk": 256}), plain)


def test_scores_far_apart_do_not_overflow() -> None:
    case = Case([(40, 90), (1, 64)], seed=1)
    case.q *= 300
    case.fill()
    arguments = (case.q, case.k_pages, case.v_pages, case.batch)
    out, theirs = (f(*arguments, **case.arguments()).double() for f in (paged_attention, reference_paged_attention))
    exact = case.expected()
    # scores in the thousands multiply fp32's rounding in the weights: the kernel must be as exact as torch, not more
    assert (out - exact).abs().max() <= 3 * (theirs - exact).abs().max() + 1e-6


def test_tensors_the_kernel_does_not_take_go_to_torch() -> None:
    case = Case([(5, 20), (1, 9)], dtype=torch.float64)
    check(case, paged_attention)
    case = Case([(5, 20), (1, 9)])
    case.fill()
    strided = case.q.transpose(1, 2).contiguous().transpose(1, 2)  # elements of a head are not adjacent
    out = paged_attention(strided, case.k_pages, case.v_pages, case.batch, **case.arguments())
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("store", [reference_store_kv, store_kv])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_store_writes_only_its_slots(store: Any, dtype: torch.dtype, page_size: int) -> None:
    case = Case([(5, 20), (1, 17), (30, 30)], k_dim=24, v_dim=40, dtype=dtype, page_size=page_size)
    fused = torch.randn(36, 2 * (24 + 40)).to(dtype)
    k = fused[:, :48].view(36, 2, 24)
    v = fused[:, 48:].view(36, 2, 40)
    slots = case.batch.slots
    slots[[0, 7, 35]] = -1
    store(k, v, case.k_pages, case.v_pages, slots)
    is_stored = slots >= 0
    pages, offsets = slots[is_stored] // page_size, slots[is_stored] % page_size
    assert torch.equal(case.k_pages[pages, :, offsets], k[is_stored])
    assert torch.equal(case.v_pages[pages, :, offsets], v[is_stored])
    assert int((~case.pool.isnan()).sum()) == fused[is_stored].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_store_to_e4m3_rounds_to_nearest_and_clamps(dtype: torch.dtype, seed: int) -> None:
    """Within half a step of the exact quotient, at every magnitude; never beyond the largest number, never NaN."""
    case = Case([(30, 30)], k_dim=24, v_dim=40, fp8=True, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    k, v = ((torch.randn(30, 2, dim, generator=rng) * torch.logspace(-3, 3.5, dim)).to(dtype) for dim in (24, 40))
    k[0, 0, 0], k[0, 1, 0] = float("inf"), float("-inf")
    reference_store_kv(k, v, case.k_pages, case.v_pages, case.batch.slots, **case.scales)
    at, offsets = case.batch.slots // 16, case.batch.slots % 16
    for x, pages, scale in ((k, case.k_pages, case.scales["k_scale"]), (v, case.v_pages, case.scales["v_scale"])):
        stored = pages.float()[at, :, offsets].double()
        exact = x.double() / scale.double()[:, None]
        clamped = exact.clamp(-448, 448)
        half_step = torch.exp2(clamped.abs().clamp_min(2**-6).log2().floor() - 4)
        assert ((stored - clamped).abs() <= half_step * 1.0001).all()
        assert (stored.abs() <= 448).all()
        assert (exact.abs() > 448).any()
    assert int((~case.pool.float().isnan()).sum()) == k.numel() + v.numel()
