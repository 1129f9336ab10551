"""Chunks deep in a long prompt on a modelled GPU: Llama-3.1-8B in bf16 on an H200, with the launches of our kernels.

The seconds are an engineer's estimates, not measured: no kernel has run on a GPU yet. A multiprocessor computes one
tile of a chunk's rows over 64 tokens of context in 1.3 us. A decode reads a token of context in 43 ns. Weights are read
in 3.9 ms, and 191 rows or more take 0.0205 ms each.
"""

import random

import pytest

from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from tests.workers.schedule.cost.test_cost_fit_of_devices import sweep

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu.triton_attention import CHUNK_PART_TOKENS, num_blocks, num_chunk_parts, tiles_for

MULTIPROCESSORS, LAYERS, KV_HEADS, GROUP = 132, 32, 8, 4
TILE_S = 1.3e-6
TARGET_S, LIMIT_S = 37.5e-3, 45e-3  # what a stream of 50 ms leaves for a step, and what the step may take
STREAMS = StepWork.of([], [1024] * 64)


def attention_seconds(start: int, tokens: int, is_split: bool) -> float:
    """Return the seconds of a chunk's attention in all layers, its programs given to multiprocessors in order."""
    tiles = tiles_for(128, 128, 2, has_chunks=True)
    queries = tiles.rows // GROUP
    blocks = num_blocks(tokens, 1, tiles.rows, GROUP)
    most = num_chunk_parts(blocks * KV_HEADS, MULTIPROCESSORS) if is_split else 1
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
    tokens = cost.tokens_within(TARGET_S, depth, STREAMS)
    tokens -= tokens % 16
    assert tokens >= 128
    assert seconds(STREAMS.plus_chunk(depth, tokens)) <= LIMIT_S
    assert seconds(STREAMS.plus_chunk(depth, tokens)) >= TARGET_S * 0.7, "prompts would crawl"


def test_whole_contexts_of_deep_chunks_take_longer_than_any_choice_allows() -> None:
    """So the limit above depends on the parts."""
    assert seconds(STREAMS.plus_chunk(122_880, 16), is_split=False) > LIMIT_S > seconds(STREAMS.plus_chunk(122_880, 16))
