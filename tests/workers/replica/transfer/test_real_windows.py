"""Gemma-3-270M's real weights: prompts longer than the window of 512, with groups of layers, in two pools.

Run by `make soak` where CROSSDOCK_TEST_GEMMA names the Hugging Face directory that `benchmarks/models/windows.py` makes
of the GGUF file, and which it describes. In float32: in bfloat16 a row of another batch is rounded in another way.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from transformers import AutoModelForCausalLM, AutoTokenizer

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from tests.workers.replica.driven import hold
from tests.workers.replica.engine.test_engine import generated
from tests.workers.replica.sides import Side, closing, ship, start, submission

DIRECTORY = os.environ.get("CROSSDOCK_TEST_GEMMA", "")
WINDOW = 512
NUM_PROMPT_TOKENS, NUM_TOKENS = 1100, 24

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        not DIRECTORY, reason="needs CROSSDOCK_TEST_GEMMA, the directory of Gemma-3-270M (benchmarks/models/windows.py)"
    ),
]


def engine(**config: Any) -> Engine:
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 4, "kv_cache_memory": ByteSize(256 << 20)} | config
    spec = ModelSpec(DIRECTORY, "float32", NUM_PROMPT_TOKENS + NUM_TOKENS)
    found = Engine(load_model(spec), EngineConfig.model_validate(settings))
    is_grouped = not settings.get("disable_hybrid_kv_cache_manager")
    assert (WINDOW in found.pages.windows) == is_grouped
    assert (found.pages.num_groups > 1) == is_grouped
    return found


def side() -> Side:
    return Side("tcp", deadline_s=60.0, engine=engine(), patience_s=300.0)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Return three prompts from our own documents, which no model has learnt by heart."""
    tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
    docs = Path(__file__).parents[4] / "docs"
    names = ["models.md", "serving.md", "operations.md"]
    return [tokenizer((docs / name).read_text())["input_ids"][:NUM_PROMPT_TOKENS] for name in names]


@pytest.fixture(scope="module")
def expected(texts: list[list[int]]) -> list[list[int]]:
    """Return transformers' own greedy tokens."""
    module = AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32, attn_implementation="eager")
    return generated(module.eval(), texts, NUM_TOKENS)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_engine_with_several_long_prompts_gives_the_tokens_of_transformers(
    is_grouped: bool, texts: list[list[int]], expected: list[list[int]]
) -> None:
    one = engine(disable_hybrid_kv_cache_manager=not is_grouped)
    works = [submission(text, NUM_TOKENS) for text in texts]
    for work in works:
        one.add(work)
    answers: dict[str, list[int]] = {work.id: [] for work in works}
    most = 0
    while one.has_work:
        deltas = one.step().deltas
        most = max(most, len(deltas))
        for delta in deltas:
            answers[delta.request_id] += delta.token_ids
    assert list(answers.values()) == expected
    assert most == len(texts)  # decoded at a time


async def test_pools_with_several_long_prompts_give_the_tokens_of_transformers(
    texts: list[list[int]], expected: list[list[int]]
) -> None:
    async with closing(side(), side()) as (prefill, decode):
        works = [submission(text, NUM_TOKENS) for text in texts]
        assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == expected
        assert [outcome for _, is_sent, _, outcome in prefill.ended if is_sent] == ["shipped"] * len(texts)
        full = -(-NUM_PROMPT_TOKENS // decode.engine.config.page_size)
        assert all(figures.num_pages < full * decode.engine.pages.num_groups for _, _, figures, _ in decode.ended)


async def test_decode_side_finishes_alone_where_the_prefill_side_is_killed_beyond_the_window(
    texts: list[list[int]], expected: list[list[int]]
) -> None:
    prefill, decode = side(), side()
    try:
        work = submission(texts[0], NUM_TOKENS)
        await start(prefill, decode, work)
        gate = await hold(prefill.thread)
        while not (requests := prefill.engine.scheduler.table.requests()) or requests[0].num_computed_tokens <= WINDOW:
            gate = await hold(prefill.thread, gate)
        while not await decode.computed(work.id):  # pages have arrived
            await asyncio.sleep(0.01)
        killed = asyncio.create_task(prefill.close())
        await asyncio.sleep(0)
        gate.set()
        await killed
        assert prefill.deltas == {}  # no first token
        await decode.thread.peer_dead(prefill.blob)
        assert await decode.rest(work.id) == expected[0]
        assert await decode.is_clean()
    finally:
        await decode.close()
