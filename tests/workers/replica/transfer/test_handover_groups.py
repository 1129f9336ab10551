"""Models whose layers have windows or recurrent state, in two pools: tokens are transformers', of windows only the end
travels, and states travel once."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from transformers import PreTrainedModel

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, first_visible_page
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.submission import Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, WINDOW, build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import before_each_step, generated
from tests.workers.replica.sides import (
    NEEDS_NIXL,
    Side,
    closing,
    prompts,
    ship,
    start,
)
from tests.workers.replica.sides import submission as submission_of
from tests.workers.replica.speculating import Oracle, fixed, speculating
from tests.workers.worker_groups import engine_of_ranks

FAMILIES = {
    "gemma3_text": (None, WINDOW),
    "gpt_oss": (None, WINDOW),
    "llama4_text": (None, AttentionChunk(WINDOW)),
    "mistral": (WINDOW,),  # no layer without a window
    "gemma3_text 3:1": (None, WINDOW, WINDOW, WINDOW),
    "qwen3_next": (None,),  # gated delta net and attention
    "granitemoehybrid": (None,),  # Mamba-2 and attention
    "lfm3 conv": (None, WINDOW),  # short convolutions, attention with and without a window
}
NUM_TOKENS = 20  # of an output: more than a window
PAGE_SIZE = 4
LONG = prompts()[6]  # 223 tokens


def submission(prompt: list[int]) -> Submission:
    """Return a greedy request whose output is as long as that of `generated`, which never samples an end."""
    return submission_of(prompt, NUM_TOKENS, min_tokens=NUM_TOKENS)


def module_of(name: str) -> PreTrainedModel:
    layers = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]} if "3:1" in name else {}
    options = SERVED[name] if name in SERVED else SERVED[name.split()[0]]
    return build(name, options | layers | {"max_position_embeddings": 512})


def side(name: str, transport: str = "tcp", deadline_s: float = 60.0, **config: Any) -> Side:
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "page_size": PAGE_SIZE} | config
    engine = new_engine(wrap_module(module_of(name)), EngineConfig(kv_cache_memory=ByteSize(4 << 20), **settings))
    if not settings.get("disable_hybrid_kv_cache_manager"):
        assert engine.pages.windows == FAMILIES[name]
    return Side(transport, deadline_s=deadline_s, engine=engine)


def unowned(engine: Engine) -> list[int]:
    """Return the pages that no request has. Without prefix caching none of them may be read."""
    pages, owners = engine.pages, [each.owner for each in engine.scheduler.table.requests()]
    owned = {page for owner in owners for group in range(pages.num_groups) for page in pages.pages_of(owner, group)}
    owned |= {page for owner in owners for page in pages.states.newest(owner)}
    return [page for page in range(pages.num_pages) if page not in owned]


def poison(engine: Engine) -> None:
    """Fill pages without an owner with NaN before each step. No prefix may be cached."""

    def fill(batch: Batch) -> None:
        engine.model.pool.tensor.view(engine.pages.num_pages, -1)[unowned(engine)] = torch.nan

    before_each_step(engine, fill)


@pytest.fixture(scope="module", params=rest_in_soak(FAMILIES, "mistral", "lfm3 conv"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [*prompts(7), [*LONG[:100], 7], [*LONG[:100], 8, 9], LONG]


@pytest.fixture(scope="module")
def expected(name: str, texts: list[list[int]]) -> list[list[int]]:
    return generated(module_of(name), texts, NUM_TOKENS)


@pytest.mark.parametrize(
    ("transport", "budget"), [("tcp", 20), pytest.param("nixl", 300, marks=[NEEDS_NIXL, pytest.mark.soak])]
)
async def test_shipped_tokens_are_those_of_transformers(
    name: str, transport: str, budget: int, texts: list[list[int]], expected: list[list[int]]
) -> None:
    """At once, and then once more from cached prefixes at either side."""
    sides = (side(name, transport, max_num_batched_tokens=budget) for _ in range(2))
    async with closing(*sides) as (prefill, decode):
        for _ in range(2):
            works = [submission(text) for text in texts]
            assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == expected
        assert {outcome for _, is_sent, _, outcome in prefill.ended if is_sent} == {"shipped"}


async def test_shipped_tokens_are_those_of_transformers_where_the_decode_replica_verifies_drafts(
    name: str, texts: list[list[int]], expected: list[list[int]]
) -> None:
    works = [submission(text) for text in texts]
    answers = {work.id: tokens for work, tokens in zip(works, expected, strict=True)}
    decode = side(name, speculative_config=fixed(3))
    speculating(decode.engine, Oracle(answers, 0.8, random.Random(1), decode.engine.model.vocab_size))
    async with closing(side(name), decode) as (prefill, _):
        assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == expected
    assert decode.engine.scheduler.verification is not None
    totals = decode.engine.scheduler.verification.totals
    assert 10 < sum(totals.num_accepted_at) < totals.num_tokens


async def test_no_page_without_an_owner_is_read_at_either_side(
    name: str, texts: list[list[int]], expected: list[list[int]]
) -> None:
    async with closing(*(side(name, enable_prefix_caching=False) for _ in range(2))) as (prefill, decode):
        for each in (prefill, decode):
            await each.on_engine(lambda each=each: poison(each.engine))  # type: ignore[misc]
        works = [submission(text) for text in texts]
        assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == expected


async def test_pages_travel_that_tokens_after_the_prompt_see_and_states_once(name: str) -> None:
    async with closing(side(name), side(name)) as (prefill, decode):
        await ship(prefill, decode, submission(LONG))
        pages = -(-len(LONG) // PAGE_SIZE)
        numbers = [pages - first_visible_page(window, len(LONG), PAGE_SIZE) for window in FAMILIES[name]]
        model = prefill.engine.model
        layouts = model.layouts(PAGE_SIZE)
        itemsize = model.kv_dtype.itemsize
        sizes = [sum(4 * 2 * (s.key_dim + s.value_dim) for s in layout.layers) * itemsize for layout in layouts]
        for each in (prefill, decode):
            (figures,) = [figures for _, _, figures, _ in each.ended]
            state_pages = model.state_pages(PAGE_SIZE)
            assert figures.num_pages == sum(numbers) + state_pages
            num_bytes = sum(n * size for n, size in zip(numbers, sizes, strict=True))
            assert figures.num_bytes == num_bytes + state_pages * layouts[0].page_bytes
        whole = pages * model.layout(PAGE_SIZE).page_bytes
        assert num_bytes <= whole
        if FAMILIES[name] != (None,):
            assert num_bytes < 0.6 * whole


async def test_shared_prefix_does_not_travel_again_where_windows_have_passed_it(name: str) -> None:
    """The decode side has the prefix in groups without a window alone, which is all that it needs of it."""
    other = [*LONG[:100], *((7 * at) % 90 + 3 for at in range(60))]

    async with closing(side(name), side(name)) as (prefill, decode):
        await ship(prefill, decode, submission(LONG))
        assert await ship(prefill, decode, submission(other)) == generated(module_of(name), [other], NUM_TOKENS)[0]
        cached = 100 // PAGE_SIZE if None in FAMILIES[name] else 0
        firsts = [max(first_visible_page(window, 160, PAGE_SIZE), cached) for window in FAMILIES[name]]
        *_, (_, _, figures, _) = prefill.ended
        state_pages = prefill.engine.model.state_pages(PAGE_SIZE)
        assert figures.num_pages == sum(160 // PAGE_SIZE - first for first in firsts) + state_pages


async def test_groups_shipped_between_unequal_shards_give_the_tokens_of_transformers(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The layers of a group are those of the whole model, however it is divided among ranks."""
    family, texts = "gemma3_text 3:1", prompts(7)
    path = saved(module_of(family), tmp_path)
    with engine_of_ranks(ranks, path, 2, 2, page_size=PAGE_SIZE, max_num_batched_tokens=48) as engine:
        assert engine.pages.windows == FAMILIES[family]
        async with closing(side(family), Side("tcp", engine=engine)) as (prefill, decode):
            works = [submission(text) for text in texts]
            found = await asyncio.gather(*(ship(prefill, decode, work) for work in works))
            assert found == generated(module_of(family), texts, NUM_TOKENS)
            assert {outcome for _, is_sent, _, outcome in prefill.ended if is_sent} == {"shipped"}


async def test_pools_with_unlike_groups_are_refused_with_both_printed() -> None:
    one = side("gemma3_text", disable_hybrid_kv_cache_manager=True)
    async with closing(side("gemma3_text"), one) as (grouped, whole):
        with pytest.raises(RuntimeError, match=r"(?s)pools differ in groups.*all layers in one"):
            await start(whole, grouped, submission([1, 2, 3]))
