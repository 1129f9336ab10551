"""Tokens of models with latents or indexers are transformers': alone, in worker groups, under preemption, in pools."""

import asyncio
import random
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.engine.engine import Engine
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engine.test_engine import assert_tokens
from tests.workers.replica.engines import engine_on, generated, served
from tests.workers.replica.sides import NEEDS_NIXL, Side, closing, local, prompts, ship, submission
from tests.workers.replica.speculating import Oracle, fixed, speculating
from tests.workers.worker_groups import engine_of_ranks

FAMILIES = ["deepseek_v3", "longcat_flash", "deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"]
"""One latent a layer; two a layer, and scaled; with an indexer in each layer; with layers that share its choice; an
indexer that chooses blocks for KV heads."""
KV_HEADS = {"minimax_m3_vl_text": 2}  # of others one: all heads share a latent


def module_of(name: str) -> PreTrainedModel:
    return build(name, SERVED[name] | {"max_position_embeddings": 512})


def engine_of(name: str, **config: object) -> Engine:
    return engine_on(wrap_module(module_of(name)), **config)


@pytest.fixture(scope="module", params=rest_in_soak(FAMILIES, "deepseek_v3", "glm_moe_dsa", "minimax_m3_vl_text"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Prompts of 1 to 150 tokens, half of which begin alike."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 120) for _ in range(60)]
    return [shared * (at % 2) + [rng.randrange(3, 120) for _ in range(1 + 31 * at % 90)] for at in range(12)]


@pytest.fixture(scope="module")
def expected(name: str, texts: list[list[int]]) -> list[list[int]]:
    return generated(module_of(name), texts)


@pytest.mark.parametrize("budget", [24, 512])
def test_greedy_tokens_equal_generate(
    name: str, texts: list[list[int]], expected: list[list[int]], budget: int
) -> None:
    """Twice: the second time from cached prefixes. A budget of 512 has chunks whose latents are expanded."""
    engine = engine_of(name, max_num_batched_tokens=budget)
    assert {shape.num_kv_heads for shape in engine.model.layers} == {KV_HEADS.get(name, 1)}
    for _ in range(2):
        assert_tokens(engine, texts, expected)


def test_tensor_parallel_ranks_hold_all_latents_or_a_kv_head_each(
    ranks: Ranks, tmp_path: Path, name: str, texts: list[list[int]], expected: list[list[int]]
) -> None:
    path = saved(module_of(name), tmp_path)
    with engine_of_ranks(ranks, path, 2, 1) as engine:
        assert {shape.num_kv_heads for shape in engine.model.layers} == {1}
        assert_tokens(engine, texts, expected)


@pytest.mark.parametrize(
    ("family", "transport", "kv_cache_dtype"),
    [
        ("deepseek_v3", "tcp", "auto"),
        ("glm_moe_dsa", "tcp", "auto"),
        ("minimax_m3_vl_text", "tcp", "auto"),
        pytest.param("deepseek_v3", "nixl", "fp8", marks=NEEDS_NIXL),
    ],
)
async def test_shipped_latents_give_the_tokens_of_local_ones(family: str, transport: str, kv_cache_dtype: str) -> None:
    """The bytes that travel are those of the latents and of the indexers' keys."""

    def side() -> Side:
        return Side(transport, engine=wrapped(family, kv_cache_dtype))

    async with closing(side(), side()) as (prefill, decode):
        works = [submission(prompt, temperature=0.8 * (n % 2), seed=n) for n, prompt in enumerate(prompts(9))]
        wanted = await asyncio.gather(*(decode.generate(local(work)) for work in works))
        await decode.on_engine(decode.engine.pages.block_pool.clear_cache)
        assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == wanted
        shapes = prefill.engine.model.layers
        page_bytes = sum(shape.num_kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes) * 16
        page_bytes *= prefill.engine.model.kv_dtype.itemsize
        sent = [figures for _, is_sent, figures, _ in prefill.ended if is_sent]
        assert all(figures.num_bytes == figures.num_pages * page_bytes for figures in sent)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "minimax_m3_vl_text"])
@pytest.mark.parametrize("is_prefill_whole", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_keys_of_indexers_travel_between_unlike_ranks(
    ranks: Ranks, tmp_path: Path, family: str, is_prefill_whole: bool
) -> None:
    path = saved(module_of(family), tmp_path)
    with engine_of_ranks(ranks, path, 2, 2, max_num_batched_tokens=80) as engine:
        whole, divided = Side("tcp", engine=wrapped(family)), Side("tcp", engine=engine)
        sides = (whole, divided) if is_prefill_whole else (divided, whole)
        async with closing(*sides) as (prefill, decode):
            works = [submission(prompt) for prompt in prompts(6)]
            expected = await asyncio.gather(*(whole.generate(local(work)) for work in works))
            await whole.on_engine(whole.engine.pages.block_pool.clear_cache)
            assert await asyncio.gather(*(ship(prefill, decode, work) for work in works)) == expected
            assert {outcome for _, is_sent, _, outcome in prefill.ended if is_sent} == {"shipped"}


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text"])
def test_tokens_of_preempted_streams_with_indexers_equal_generate(texts: list[list[int]], family: str) -> None:
    """A pool for one long request: streams that start together on 15 tokens each outgrow it together."""
    module = module_of(family)
    starts = [text[:15] for text in texts if len(text) >= 15]
    engine = engine_on(wrap_module(module, LoadOptions(256)), num_pages=16, max_num_batched_tokens=512)
    found = served(engine, starts, 24)
    assert engine.scheduler.table.num_preemptions > 0
    assert found == generated(module_of(family), starts, 24)


@pytest.mark.parametrize("family", ["glm_moe_dsa", "minimax_m3_vl_text"])
def test_accepted_and_rejected_drafts_change_no_token_of_a_model_with_indexers(
    texts: list[list[int]], family: str
) -> None:
    expected = generated(module_of(family), texts)
    engine = engine_of(family, speculative_config=fixed(4))
    answers = {f"{number}": tokens for number, tokens in enumerate(expected)}
    speculating(engine, Oracle(answers, 0.8, random.Random(0), vocab_size=128))
    assert_tokens(engine, texts, expected)
    assert engine.scheduler.verification is not None
    totals = engine.scheduler.verification.totals
    assert 0 < sum(totals.num_accepted_at) < totals.num_tokens


def wrapped(name: str, kv_cache_dtype: str = "auto") -> Engine:
    model = wrap_module(module_of(name), LoadOptions(kv_cache_dtype=kv_cache_dtype))  # type: ignore[arg-type]
    return engine_on(model, num_pages=600, max_num_batched_tokens=80, max_num_seqs=8, kv_cache_dtype=kv_cache_dtype)
