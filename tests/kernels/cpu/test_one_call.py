"""All layers as one call: the same as a step at a time, and no row depends on the batch."""

import ctypes
import shutil
from dataclasses import fields, replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch, reference_paged_attention
from crossdock.kernels.cpu import build, decoder
from crossdock.kernels.cpu.choice import only
from crossdock.kernels.cpu.decoder import DecoderLayer, DecoderShape, DecoderStack
from crossdock.kernels.cpu.row_deltas import RowDeltas, StackDeltas

PAGE, PAGES, HEADS, KV_HEADS, D, WIDTH, INNER = 16, 24, 6, 2, 32, 112, 80
SHAPE = DecoderShape(WIDTH, HEADS, KV_HEADS, D, INNER, eps=1e-5, qk_eps=1e-6, scale=D**-0.5)
LENGTHS = [(1, 70), (5, 37), (1, 1), (3, 3), (12, 90)]  # rows and keys of each sequence

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler: apt-get install g++"),
    pytest.mark.skipif(not {"avx2", "fma"} <= build.cpu_flags(), reason="needs an x86 CPU with AVX2"),
]


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    """Return numbers that bfloat16 holds."""
    return (torch.randn(*shape, generator=rng) / 4).bfloat16().float()


def layers(rng: torch.Generator) -> list[DecoderLayer]:
    random = partial(normal, rng)
    plain = DecoderLayer(
        *(
            1 + random(WIDTH),
            random(HEADS * D, WIDTH),
            random(KV_HEADS * D, WIDTH),
            random(KV_HEADS * D, WIDTH),
            None,
            None,
            None,
        ),
        *(
            random(WIDTH, HEADS * D),
            1 + random(WIDTH),
            random(INNER, WIDTH),
            random(INNER, WIDTH),
            random(WIDTH, INNER),
            None,
        ),
    )
    normed = replace(plain, qkv_bias=random((HEADS + 2 * KV_HEADS) * D), q_norm=random(D), k_norm=random(D))
    return [plain, replace(normed, window=20), replace(normed, up=random(INNER, WIDTH))]


def batch(lengths: list[tuple[int, int]], table: Tensor) -> AttentionBatch:
    starts = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0).int()
    places = [(page, torch.arange(keys - rows, keys)) for page, (rows, keys) in zip(table, lengths, strict=True)]
    slots = torch.cat([pages[at // PAGE].long() * PAGE + at % PAGE for pages, at in places])
    keys = torch.tensor([keys for _, keys in lengths]).int()
    return AttentionBatch(starts, keys, table, slots, 12, 90, 0)


def deltas(rng: torch.Generator, rank: int, sizes: dict[str, tuple[int, int]]) -> list[StackDeltas]:
    """Return an adapter of three layers in float32, and the same numbers in bfloat16.

    `sizes`: outputs and inputs of each matrix that the adapter changes.
    """
    pairs = {name: (normal(rng, rank, k), normal(rng, rank, n).T) for name, (n, k) in sizes.items()}
    narrow = {name: (a.bfloat16(), b.bfloat16()) for name, (a, b) in pairs.items()}
    return [StackDeltas([each] * 3) for each in (pairs, narrow)]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """decoder.cpp for AVX2 alone."""
    flags = [flag for flag in build.FLAGS if not flag.startswith(("-march", "-O"))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", (*flags, "-O1", "-march=x86-64-v3"))
        return build.cpu_library.__wrapped__("decoder", "ROW_TYPE=float")


def test_one_call_in_float32_gives_what_steps_give_and_rows_are_independent(
    library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    monkeypatch.setattr(decoder, "decoder_library", lambda _: library)
    monkeypatch.setattr(decoder, "_MLP_ROWS", 8)  # of 22: several parts, the last not full
    weights = layers(rng)
    own, steps = (
        DecoderStack(SHAPE, weights, only(kernel), reference_paged_attention) for kernel in ("native", "torch")
    )
    pool = torch.randn(PAGES * 2, KV_HEADS, len(weights), 2, PAGE, D, generator=rng)
    table = torch.randperm(PAGES * 2, generator=rng)[: len(LENGTHS) * 6].int().view(len(LENGTHS), 6)
    hidden, angles = (torch.randn(22, size, generator=rng) for size in (WIDTH, D // 2))
    cos, sin = (turned.repeat(1, 2) for turned in (angles.cos(), angles.sin()))
    sizes = {"q": (HEADS * D, WIDTH), "down": (WIDTH, INNER)}
    keys, mlp = (KV_HEADS * D, WIDTH), (INNER, WIDTH)
    every = {**sizes, "k": keys, "v": keys, "out": (WIDTH, HEADS * D), "gate": mlp, "up": mlp}
    none, few, others = RowDeltas(()), deltas(rng, 4, sizes), deltas(rng, 7, every)
    wide, narrow = (  # those of the second sequence; of the first, third and last
        RowDeltas([(one, slice(1, 6)), (other, torch.tensor([0, 6, *range(10, 22)]))])
        for one, other in zip(few, others, strict=True)
    )

    def run(
        stack: DecoderStack,
        first: int,
        last: int,
        changes: RowDeltas = none,
        kept: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of some sequences, and the pool after them. `kept` gets the inputs of two layers."""
        ends = [0, 1, 6, 7, 10, 22]
        rows, pages = slice(ends[first], ends[last]), pool.clone()
        views = [(pages[:, :, layer, 0], pages[:, :, layer, 1]) for layer in range(len(weights))]
        several = batch(LENGTHS[first:last], table[first:last])
        keeping = ((), None) if kept is None else ((0, 2), kept.__setitem__)
        return stack(hidden[rows], cos[rows], sin[rows], views, several, changes, *keeping), pages

    for changes in (none, wide):
        whole, pages = run(own, 0, len(LENGTHS), changes)
        exact, exact_pages = run(steps, 0, len(LENGTHS), changes)
        for got, wanted in ((whole, exact), (pages, exact_pages)):  # at most 2e-5 for 250 seeds
            assert ((got - wanted).norm(dim=-1) <= 1e-4 * wanted.norm(dim=-1)).all()
    assert (whole - run(own, 0, len(LENGTHS))[0]).norm() > 0.1 * whole.norm(), "adapters change something"
    assert torch.equal(whole, run(own, 0, len(LENGTHS), narrow)[0]), "bfloat16 is widened as it is read"
    assert torch.equal(exact, run(steps, 0, len(LENGTHS), narrow)[0])
    whole, _ = run(own, 0, len(LENGTHS))
    for stack, changes in product((own, steps), (none, wide)):
        plain, _ = run(stack, 0, len(LENGTHS), changes)
        kept: dict[int, Tensor] = {}
        parted, _ = run(stack, 0, len(LENGTHS), changes, kept)
        assert torch.equal(parted, plain), "layers whose inputs are kept do not change the result"
        assert torch.equal(kept[0], hidden)
        assert not torch.equal(kept[2], parted)
    for alone, rows in ((0, slice(0, 1)), (1, slice(1, 6)), (4, slice(10, 22))):
        assert torch.equal(run(own, alone, alone + 1)[0], whole[rows])


@pytest.mark.skipif("avx512_bf16" not in build.cpu_flags(), reason="needs a CPU with AVX512-BF16")
@pytest.mark.parametrize("with_amx", [False, True])
def test_one_call_in_bfloat16_gives_what_steps_give_and_decodes_are_independent(with_amx: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    weights = [_narrowed(layer) for layer in layers(rng)]
    own = DecoderStack(SHAPE, weights, only("native"), reference_paged_attention, with_amx=with_amx)
    steps = DecoderStack(SHAPE, weights, only("torch"), reference_paged_attention)
    lengths = [(1, 70), (1, 1), (40, 95), (17, 17), (5, 37)]
    pool = torch.randn(PAGES * 2, KV_HEADS, len(weights), 2, PAGE, D, generator=rng).bfloat16()
    table = torch.randperm(PAGES * 2, generator=rng)[: len(lengths) * 6].int().view(len(lengths), 6)
    hidden, angles = (torch.randn(64, size, generator=rng) for size in (WIDTH, D // 2))
    hidden, cos, sin = hidden.bfloat16(), *(turned.repeat(1, 2).bfloat16() for turned in (angles.cos(), angles.sin()))

    def run(stack: DecoderStack, count: int) -> Tensor:
        """Return the rows of the first sequences."""
        rows, pages = slice(0, sum(rows for rows, _ in lengths[:count])), pool.clone()
        views = [(pages[:, :, layer, 0], pages[:, :, layer, 1]) for layer in range(len(weights))]
        return stack(hidden[rows], cos[rows], sin[rows], views, batch(lengths[:count], table[:count]))

    whole, exact = run(own, len(lengths)), run(steps, len(lengths))
    error = (whole.float() - exact.float()).norm(dim=1) / exact.float().norm(dim=1)
    assert error.max() < 0.05, "0.021 at most for 40 seeds"
    for count in (1, 2, 3):
        assert torch.equal(run(own, count), whole[: len(run(own, count))])


def _narrowed(layer: DecoderLayer) -> DecoderLayer:
    tensors = {
        name: value.bfloat16()
        for name, value in ((field.name, getattr(layer, field.name)) for field in fields(layer))
        if isinstance(value, Tensor)
    }
    return replace(layer, **tensors)
