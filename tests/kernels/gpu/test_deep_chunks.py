"""Chunks deep in a long prompt on a modelled GPU: Llama-3.1-8B in bf16 on an H200, with the launches of our kernels.

The seconds are an engineer's estimates, not measured: no kernel has run on a GPU yet. A multiprocessor computes one
tile of a chunk's rows over 64 tokens of context in 1.3 us. A decode reads a token of context in 43 ns. Weights are read
in 3.9 ms, and 191 rows or more take 0.0205 ms each.
"""

import random

import pytest
import torch

from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model.graphs import mixed_graphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.schedule.cost.test_cost_fit_of_devices import sweep

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu.triton_attention import (
    CHUNK_PART_TOKENS,
    num_blocks,
    num_chunk_parts,
    num_chunk_programs,
    tiles_for,
    with_rows_for,
)
from crossdock.kernels.gpu.triton_chunks import block_kernel, num_listed

MULTIPROCESSORS, LAYERS, KV_HEADS, GROUP = 132, 32, 8, 4
TILE_S = 1.3e-6
TARGET_S, LIMIT_S = 37.5e-3, 45e-3  # what a stream of 50 ms leaves for a step, and what the step may take
STREAMS = StepWork.of([], [1024] * 64)


def attention_seconds(start: int, tokens: int, is_split: bool) -> float:
    """Return the seconds of a chunk's attention in all layers, its programs given to multiprocessors in order."""
    tiles = tiles_for(128, 128, 2, has_chunks=True)
    queries = tiles.rows // GROUP
    blocks = -(-tokens // queries)
    most = -(-num_chunk_parts(blocks, KV_HEADS, MULTIPROCESSORS) // blocks) if is_split else 1
    busy = [0] * MULTIPROCESSORS  # tiles until each is free
    for first in reversed(range(0, tokens, queries)):
        seen = -(-(start + min(first + queries, tokens)) // tiles.tokens)
        part = max(-(-seen // most), CHUNK_PART_TOKENS // tiles.tokens) if is_split else seen
        for _ in range(KV_HEADS):
            for at in range(0, seen, part):
                busy.sort()
                busy[0] += min(part, seen - at)
    return max(busy) * TILE_S * LAYERS


def seconds(work: StepWork, is_split: bool = True) -> float:
    """Return the seconds of a step with at most one chunk."""
    products = max(3.9e-3, 0.0205e-3 * work.rows)
    step = products + 1e-3 + 43e-9 * work.context
    if not work.prefill_tokens:
        return step
    return step + 0.9e-3 + attention_seconds(int(work.chunk_context), int(work.prefill_tokens), is_split)


@pytest.mark.parametrize(("depth", "milliseconds"), [(16_384, 19.2), (32_768, 29.3), (122_880, 86.5)])
def test_modelled_gpu_takes_the_estimated_seconds_with_whole_contexts(depth: int, milliseconds: float) -> None:
    for tokens in (16, 64, 128):
        step = STREAMS.plus_chunk(depth, tokens)
        assert seconds(step, is_split=False) == pytest.approx(milliseconds / 1e3, rel=0.05)


@pytest.mark.parametrize("depth", [0, 16_384, 32_768, 122_880])
@pytest.mark.parametrize("most_tokens", [512, 4096])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chunk_at_any_depth_takes_little_longer_than_chosen(depth: int, most_tokens: int, seed: int) -> None:
    """The cost is learnt from the warm-up alone, with its largest chunk."""
    cost = StepCostFit(sweep(seconds, most_tokens, 131_072, random.Random(seed))).cost
    tokens = int(cost.tokens_within(TARGET_S, depth, STREAMS))
    tokens -= tokens % 16
    assert tokens >= 128
    assert seconds(STREAMS.plus_chunk(depth, tokens)) <= LIMIT_S
    assert seconds(STREAMS.plus_chunk(depth, tokens)) >= TARGET_S * 0.7, "prompts would crawl"


def test_whole_contexts_of_deep_chunks_take_longer_than_any_choice_allows() -> None:
    """So the limit above depends on the parts."""
    assert seconds(STREAMS.plus_chunk(122_880, 16), is_split=False) > LIMIT_S > seconds(STREAMS.plus_chunk(122_880, 16))


def deep_programs(chunks: list[tuple[int, int]], graph: int, multiprocessors: int, is_hopper: bool) -> int:
    """Return how many programs read the contexts of chunks, (start, tokens) of each, in a graph of `graph` tokens."""
    whole = Request(Submission("a", [0] * max(start + tokens for start, tokens in chunks), SamplingParams()))
    pages = list(range(-(-whole.num_tokens // 16)))
    scheduled = [Scheduled(whole, start, tokens, pages, True) for start, tokens in chunks]
    inputs, D = StepInputs.of(Batch(scheduled, 0), 16)[0], 8
    query_start = torch.from_numpy(mixed_graphs.padded_with_chunks(inputs, D, graph, 16).query_start)
    S = len(query_start) - 1
    queries = with_rows_for(tiles_for(128, 128, 2, True, is_hopper), graph * GROUP).rows // GROUP
    parts = num_chunk_parts(-(-graph // queries), KV_HEADS, multiprocessors)
    P = num_chunk_programs(num_blocks(graph, S - D, queries), parts)
    listed = torch.full((num_listed(P),), -1, dtype=torch.int32)
    block_kernel[1,](listed, query_start, S, D, P, QUERIES=queries, BLOCK_S=4)
    owners = listed[1 : 1 + int(listed[0])]
    assert len(owners) * -(-parts // len(owners)) <= P
    return int((owners < D + len(chunks)).sum()) * -(-parts // len(owners)) * KV_HEADS


@pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("multiprocessors", "is_hopper"), [(132, True), (108, False), (188, False)])
def test_deep_chunks_of_every_recorded_size_fill_the_device(multiprocessors: int, is_hopper: bool) -> None:
    """Most sequences of a graph are empty. Counted as blocks, they left half of an H200 idle: 27 became 40 ms."""
    sizes = mixed_graphs._CHUNK_TOKENS
    for smaller, graph in zip((0, *sizes), sizes, strict=False):
        for tokens in (smaller + 1, graph):
            assert deep_programs([(122_880, tokens)], graph, multiprocessors, is_hopper) >= multiprocessors
    assert deep_programs([(122_880, 4)] * 7, 64, multiprocessors, is_hopper) >= multiprocessors


@pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("lengths", [[0, 5, 0, 0, 9, 1], [0, 0, 0, 0], [3], [16, 4, 0, 8]])
def test_blocks_are_those_of_sequences_with_rows(lengths: list[int]) -> None:
    query_start = torch.tensor([0, *lengths]).cumsum(0).int() + 2
    P, D = num_blocks(sum(lengths), len(lengths), 4), 0
    listed = torch.full((num_listed(max(P, 1)),), -1, dtype=torch.int32)
    block_kernel[1,](listed, query_start, len(lengths), D, max(P, 1), QUERIES=4, BLOCK_S=2)
    expected = [(s, first) for s, length in enumerate(lengths) for first in range(0, length, 4)]
    assert int(listed[0]) == len(expected) <= P
    places = zip(listed[1:], listed[1 + max(P, 1) :], strict=False)
    assert [(int(s), int(first)) for s, first in places][: len(expected)] == expected


@pytest.mark.parametrize(("rows", "tile"), [(2, 16), (16, 16), (17, 64), (64, 64), (65, 256), (9000, 256)])
def test_short_chunks_have_small_tiles(rows: int, tile: int) -> None:
    assert with_rows_for(tiles_for(128, 128, 2, True, is_hopper=True), rows).rows == tile
