"""Layers with a window give pages back while a request runs, and its tokens stay those of transformers."""

import random
from typing import Any

import pytest
import torch
from pydantic import ByteSize

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.batch import Batch
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk
from crossdock.workers.schedule.request import Submission
from tests.workers.architectures import SERVED, WINDOW, build
from tests.workers.replica.engine.test_engine import generated
from tests.workers.replica.engines import greedy, run, tokens_of

NUM_TOKENS = 40
MAX_MODEL_LEN = 256
WIDE = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}  # as layers must be to be fused
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": SERVED["gemma2"],
    "gemma3_text": SERVED["gemma3_text"],
    "gemma4_text": {**SERVED["gemma4_text"], "global_head_dim": 24, "num_global_key_value_heads": 1},
    "gpt_oss": SERVED["gpt_oss"],
    "llama4_text": SERVED["llama4_text"],
    "mistral": SERVED["mistral"],
    "mistral fused": {**SERVED["mistral"], **WIDE},
}


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    shared = [rng.randrange(3, 128) for _ in range(100)]
    lengths = (1, 15, 16, 17, 40, 63, 64, 65, 130, 200)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in lengths] + [[*shared, 7], [*shared, 8, 9]]


def engine_on(model: LoadedModel, num_tokens: int, **config: Any) -> Engine:
    """Return an engine with the memory that `num_tokens` tokens take where every layer keeps its pages."""
    memory = ByteSize(num_tokens * model.layout(8).page_bytes // 8)
    settings = {"page_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 12} | config
    return Engine(model, EngineConfig(kv_cache_memory=memory, **settings))


def unowned(engine: Engine) -> list[int]:
    """Return the pages that no request has. Without prefix caching none of them may be read."""
    pages, requests = engine.pages, engine.scheduler.table.requests()
    owned = {
        page for each in requests for group in range(pages.num_groups) for page in pages.pages_of(each.owner, group)
    }
    return [page for page in range(pages.num_pages) if page not in owned]


def served(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        engine.add(Submission(str(number), prompt, greedy(NUM_TOKENS)))
    deltas = run(engine)
    return [tokens_of(deltas[str(number)]) for number in range(len(prompts))]


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    model_name: str = request.param
    return model_name


@pytest.fixture(scope="module")
def model(name: str) -> LoadedModel:
    return wrap_module(build(name, MODELS[name]))


@pytest.fixture(scope="module")
def expected(name: str) -> list[list[int]]:
    return generated(build(name, MODELS[name]), prompts(), NUM_TOKENS)


@pytest.mark.parametrize(
    "config", [{"max_num_batched_tokens": size} for size in (20, 33, 64, 300)] + [{"page_size": 4}]
)
def test_pages_that_windows_have_passed_are_never_read(
    model: LoadedModel, name: str, expected: list[list[int]], config: dict[str, Any]
) -> None:
    engine = engine_on(model, 1500, enable_prefix_caching=False, **config)
    assert bool(model.kernels) == ("fused" in name)
    window = AttentionChunk(WINDOW) if name == "llama4_text" else WINDOW
    assert [group.window for group in engine.model.groups] == ([window] if "mistral" in name else [None, window])

    def poison(batch: Batch) -> None:
        model.pool.tensor.view(engine.pages.num_pages, -1)[unowned(engine)] = torch.nan

    engine.on_scheduled = poison
    assert served(engine, prompts()) == expected


@pytest.mark.parametrize("is_ahead", [False, True])
def test_tokens_from_cached_prefixes_and_under_preemption_are_those_of_transformers(
    model: LoadedModel, expected: list[list[int]], is_ahead: bool
) -> None:
    engine = engine_on(model, 500, async_scheduling=is_ahead, max_num_batched_tokens=40)
    assert served(engine, prompts()) == expected
    assert served(engine, prompts()) == expected
    assert served(engine, prompts()[-1:]) == expected[-1:]
    engine.add(Submission("again", prompts()[-1], greedy(NUM_TOKENS)))
    engine.step()
    assert engine.scheduler.table.requests()[0].num_cached_tokens >= 64, "the prefix was found in every group"
    run(engine)


def test_pool_serves_a_context_that_it_could_not_hold_without_windows() -> None:
    module = build(
        "gemma3_text", SERVED["gemma3_text"] | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    )
    model, prompt = wrap_module(module), prompts()[9]
    with pytest.raises(ValueError, match="max_model_len"):
        engine_on(model, 192, disable_hybrid_kv_cache_manager=True, max_num_batched_tokens=32)
    engine = engine_on(model, 192, max_num_batched_tokens=32)
    assert [group.window for group in engine.model.groups] == [None, WINDOW, WINDOW, WINDOW]
    expected = generated(
        build("gemma3_text", SERVED["gemma3_text"] | {"layer_types": module.config.layer_types}), [prompt], NUM_TOKENS
    )
    assert served(engine, [prompt]) == expected
    with pytest.raises(ValueError, match=r"kv_cache_memory .* max_model_len \(256\) needs"):
        engine_on(model, 100, max_num_batched_tokens=32)


def test_layers_keep_their_pages_where_windows_cannot_pass_them(caplog: pytest.LogCaptureFixture) -> None:
    gemma = wrap_module(build("gemma3_text", MODELS["gemma3_text"]))
    qwen = wrap_module(build("qwen2", {**SERVED["qwen2 sliding"], **WIDE}))
    caplog.set_level("INFO")
    for model, config, reason in (
        (gemma, {"disable_hybrid_kv_cache_manager": True}, "disable_hybrid_kv_cache_manager"),
        (qwen, {}, "fused layers"),
    ):
        engine = engine_on(model, 1500, **config)
        assert not engine.model.groups
        assert not engine.pages.has_windows
        assert reason in caplog.text


def test_replica_with_windows_is_calibrated(model: LoadedModel) -> None:
    engine = engine_on(model, 2000)
    profile = warm_up(engine)
    assert profile.page_bytes * profile.num_pages == model.pool.tensor.nbytes  # type: ignore[union-attr]
    assert engine.pages.counts().owned == 0
