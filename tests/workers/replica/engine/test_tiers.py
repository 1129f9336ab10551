"""Pages that leave the pool come back from host memory and files, and tokens stay those of an engine without tiers."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.submission import Submission
from tests.waiting import eventually
from tests.workers.architectures import SERVED, build
from tests.workers.replica.engines import greedy, run, tokens_of

PAGE_SIZE, MAX_MODEL_LEN = 8, 120
MODELS = {name: SERVED[name] for name in ("gemma3_text", "llama4_text", "lfm2 conv", "deepseek_v3")} | {"llama": {}}
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 120) for _ in range(90)] for _ in range(6)]
"""Each fills most of a small pool, so that the ones before are evicted."""


def model_of(name: str) -> LoadedModel:
    return wrap_module(build(name, MODELS[name]), LoadOptions(MAX_MODEL_LEN))


@contextmanager
def engine_on(model: LoadedModel, num_pages: int, **config: Any) -> Iterator[Engine]:
    """Yield an engine whose pool has `num_pages` pages; its tiers are closed in the end."""
    settings = {"page_size": PAGE_SIZE, "max_num_batched_tokens": 64, "max_num_seqs": 4, "admission": "queue"} | config
    memory = ByteSize(num_pages * model.layout(PAGE_SIZE).page_bytes)
    engine = Engine(model, EngineConfig(kv_cache_memory=memory, **settings), weights="tiny")
    try:
        yield engine
    finally:
        if engine.tiers is not None:
            engine.tiers.close()


def answers(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens after each prompt, one after the other, and how many tokens of each were cached."""
    tokens, cached = [], []
    for number, prompt in enumerate(prompts):
        engine.add(Submission(f"{number}", prompt, greedy(5)))
        deltas = run(engine)[f"{number}"]
        settle(engine)
        tokens.append(tokens_of(deltas))
        cached.append(deltas[0].num_cached_tokens)
    return tokens, cached


def settle(engine: Engine) -> None:
    """Wait until every page that was to be stored is stored."""
    tiers = engine.tiers
    if tiers is not None:
        eventually(lambda: (tiers.take_in(engine.scheduler.loading), tiers.is_idle)[1], "the tiers still write")


def settings_of(tier: str, folder: Path) -> dict[str, Any]:
    both = {"kv_cache_host_memory": ByteSize(64 << 20), "kv_cache_files": f"{folder},1GiB"}
    return {name: value for name, value in both.items() if tier in ("both", name)}


@pytest.mark.parametrize(
    ("tier", "name"),
    [
        *(("kv_cache_host_memory", name) for name in ("llama", "lfm2 conv")),
        *(("kv_cache_files", name) for name in MODELS),
        ("both", "gemma3_text"),
    ],
)
def test_prompt_whose_pages_were_evicted_is_loaded(tier: str, name: str, tmp_path: Path) -> None:
    model = model_of(name)
    with engine_on(model, 60) as plain:
        expected, _ = answers(plain, [*PROMPTS, *PROMPTS])
    with engine_on(model, 60, **settings_of(tier, tmp_path)) as tiered:
        tokens, cached = answers(tiered, [*PROMPTS, *PROMPTS])
    assert tokens == expected
    assert cached == [0] * len(PROMPTS) + [88] * len(PROMPTS)
