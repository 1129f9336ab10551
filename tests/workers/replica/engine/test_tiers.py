"""Pages that leave the pool come back from host memory and files, and tokens stay those of an engine without tiers."""

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.kvtransfer.calls import GrantCall
from crossdock.kvtransfer.records import GroupPages
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig, TransferConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.metrics import EngineMetrics
from crossdock.workers.replica.serving.observed import ObservedEngine
from crossdock.workers.replica.transfer.handover import connect
from crossdock.workers.replica.transfer.replica_dock import ReplicaDock
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.submission import Submission
from tests.waiting import eventually
from tests.workers.architectures import SERVED, build
from tests.workers.multimodal import (
    NO_PLACEHOLDERS,
    PicturePrompt,
    build_multimodal,
    continuation,
    picture,
)
from tests.workers.replica.engines import greedy, run, served, tokens_of

PAGE_SIZE, MAX_MODEL_LEN = 8, 120
_TIERED = ("gemma3_text", "llama4_text", "lfm2 conv", "deepseek_v3", "glm_moe_dsa", "minimax_m3_vl_text")
MODELS = {name: SERVED[name] for name in _TIERED} | {"llama": {}}
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
    engine = new_engine(model, EngineConfig(kv_cache_memory=memory, **settings), weights="tiny")
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


def test_prompt_is_computed_from_its_beginning_while_it_is_loaded_from_its_end(tmp_path: Path) -> None:
    """With a cost by which a page takes 8 ms to compute, and as long to load."""
    model = model_of("llama")
    with engine_on(model, 20) as plain:
        expected, _ = answers(plain, PROMPTS)
    for tier in ("kv_cache_host_memory", "kv_cache_files"):
        with engine_on(model, 20, **settings_of(tier, tmp_path)) as tiered:
            first, _ = answers(tiered, PROMPTS)
            tiered.scheduler.learn(StepCost(base=0.0, per_prefill_token=1e-3), 1.0)
            tiered.scheduler.loading.tiers.tiers[0].load_s = 8e-3
            second, cached = answers(tiered, PROMPTS)
            assert tiered.pages.counts().owned == 0
        assert first == second == expected
        assert sum(0 < count < 88 for count in cached) > 0, cached


def test_each_token_of_a_prompt_whose_end_is_loaded_counts_as_computed_or_cached(tmp_path: Path) -> None:
    with engine_on(model_of("llama"), 20, **settings_of("kv_cache_host_memory", tmp_path)) as engine:
        answers(engine, PROMPTS)
        engine.scheduler.learn(StepCost(base=0.0, per_prefill_token=1e-3), 1.0)
        engine.scheduler.loading.tiers.tiers[0].load_s = 8e-3
        observed, cached = ObservedEngine(engine), 0
        for number, prompt in enumerate(PROMPTS):
            submission = Submission(f"{number}", prompt, greedy(5))
            engine.add(submission)
            request = engine.scheduler.table.get(submission.id)
            assert request is not None
            observed.timelines.add(submission, request, 0.0, 0.0)
            while engine.has_work:
                observed.metrics.progressed(observed.stepped(engine.step()))
            settle(engine)
            cached += request.num_cached_tokens
    sample = observed.metrics.registry.get_sample_value
    sources = ("pool", "host", "files", "replica")
    by_source = {source: sample("crossdock_cached_tokens_total", {"source": source}) or 0.0 for source in sources}
    [host] = engine.scheduler.loading.tiers.tiers
    assert by_source["host"] == host.num_loads * PAGE_SIZE > 0
    assert by_source["files"] == by_source["replica"] == 0
    assert sum(by_source.values()) == cached
    assert sample("crossdock_prompt_tokens_total") == sum(map(len, PROMPTS)) - cached


def test_prompt_with_a_picture_is_loaded_and_another_picture_is_not(tmp_path: Path) -> None:
    family = "qwen3_vl"
    prompts = [PicturePrompt.of(5, picture(family, number, (2, 3)), 40, seed=1) for number in (1, 2)]
    wanted = [continuation(build_multimodal(family), prompt, 5) for prompt in prompts]
    others = [PicturePrompt.of(90, seed=number) for number in range(10, 14)]
    model = wrap_module(build_multimodal(family), LoadOptions(MAX_MODEL_LEN))
    with engine_on(model, 20, **settings_of("both", tmp_path)) as engine:
        for number, prompt in enumerate([prompts[0], *others, prompts[0], prompts[1]]):
            sampling = replace(greedy(5), logit_bias=NO_PLACEHOLDERS)
            engine.add(Submission(f"{number}", prompt.token_ids, sampling, items=prompt.items))
            deltas = run(engine)[f"{number}"]
            settle(engine)
            if prompt in prompts:
                assert tokens_of(deltas) == wanted[prompts.index(prompt)]
            loaded = sum(tier.num_loads for tier in engine.scheduler.loading.tiers.tiers)
            assert (loaded > 0) == (number >= 5)
            assert number < 6 or deltas[0].num_cached_tokens < 8, "another picture is another prefix"


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
        expected, _ = answers(plain, PROMPTS)
    with engine_on(model, 60, **settings_of(tier, tmp_path)) as tiered:
        tokens, cached = answers(tiered, [*PROMPTS, *PROMPTS])
    assert tokens == expected * 2
    assert cached == [0] * len(PROMPTS) + [88] * len(PROMPTS)


@pytest.mark.parametrize("writer", ["another replica", "sleep"])
def test_evicted_pages_are_in_memory_before_anything_but_a_step_writes_to_them(writer: str, tmp_path: Path) -> None:
    """A page is copied when it is written to. Transfers and sleep write without a step."""
    with engine_on(model_of("llama"), 60, **settings_of("kv_cache_host_memory", tmp_path)) as engine:
        expected, _ = answers(engine, PROMPTS)
        pages = engine.pages.allocate("other", 60)
        pool = engine.model.pool
        if writer == "sleep":
            pool.sleep()
            pool.wake()
        else:
            dock = connect(engine, "m", "decode", TransferConfig(transport="tcp", host="127.0.0.1"), print, print).dock
            assert isinstance(dock, ReplicaDock)
            dock.call(GrantCall("r", 1, 0, (GroupPages(0, tuple(pages)),)))
            assert dock._own.drain(60)
            dock.close()
        pool.by_page.fill_(0)
        engine.pages.release("other")
        assert answers(engine, PROMPTS) == (expected, [88] * len(PROMPTS))


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        pytest.param({"kv_cache_dtype": "fp8"}, {}, id="fp8 pages"),
        pytest.param({}, {"async_scheduling": True}, id="steps ahead"),
        pytest.param({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, id="drafts"),
    ],
)
def test_pages_are_loaded_beside_other_settings(
    options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Four prompts at a time in a pool for one: requests are preempted, too."""
    model = wrap_module(build("llama", {}), LoadOptions(MAX_MODEL_LEN, **options))
    with engine_on(model, 30, **settings) as plain:
        expected, _ = answers_together(plain)
    with engine_on(model, 30, **settings, **settings_of("both", tmp_path)) as tiered:
        assert answers(tiered, PROMPTS)[0] == expected
        tokens, num_loaded = answers_together(tiered)
    assert tokens == expected
    assert num_loaded > 0


def answers_together(engine: Engine) -> tuple[list[list[int]], int]:
    """Return the tokens after prompts that come at once, and how many pages were loaded."""
    tokens = served(engine, PROMPTS, 5)
    num_loaded = 0 if engine.tiers is None else sum(tier.num_loads for tier in engine.tiers.tiers.tiers)
    return tokens, num_loaded


def test_metrics_count_pages_by_tier(tmp_path: Path) -> None:
    model = model_of("llama")
    with engine_on(model, 20, **settings_of("both", tmp_path)) as engine:
        answers(engine, [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
        text = EngineMetrics(engine).text(None)
    lines = [line.split() for line in text.splitlines() if line.startswith("crossdock_tier")]
    found = {name: float(value) for name, value in lines}
    loaded = found['crossdock_tier_loaded_pages_total{tier="host"}']
    assert loaded > 0
    assert found['crossdock_tier_loaded_pages_total{tier="files"}'] == 0
    for tier in ("host", "files"):
        assert found[f'crossdock_tier_pages{{tier="{tier}"}}'] > 0
        assert found[f'crossdock_tier_bytes{{tier="{tier}"}}'] > 0


@pytest.mark.parametrize("harm", ["deleted", "spoilt", "folder gone"])
def test_files_that_are_lost_while_the_engine_runs_are_computed(harm: str, tmp_path: Path) -> None:
    model, prompts = model_of("llama"), PROMPTS[:4]
    with engine_on(model, 20) as plain:
        expected, _ = answers(plain, prompts)
    with engine_on(model, 20, **settings_of("kv_cache_files", tmp_path / "kv")) as tiered:
        first, _ = answers(tiered, prompts)
        if harm == "folder gone":
            shutil.rmtree(tmp_path / "kv")
        for path in [path for path in (tmp_path / "kv").glob("*/*/*") if path.is_file()][::2]:
            path.unlink() if harm == "deleted" else path.write_bytes(path.read_bytes()[:-1] + b"?")
        second, cached = answers(tiered, prompts)
        assert tiered.scheduler.loading.tiers.tiers[0].num_misses > 0
    assert first == second == expected
    assert sum(cached) < 88 * len(prompts)


def test_engine_that_starts_again_finds_what_an_idle_one_has_written(tmp_path: Path) -> None:
    """Nothing was evicted: the pages were written while there was nothing to compute."""
    model = model_of("lfm2 conv")
    with engine_on(model, 60, **settings_of("kv_cache_files", tmp_path)) as engine:
        expected, cached = answers(engine, PROMPTS[:1])
        offer_all(engine)
    with engine_on(model, 60, **settings_of("kv_cache_files", tmp_path)) as again:
        tokens, cached = answers(again, PROMPTS[:1])
    assert (tokens, cached) == (expected, [88])


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    settings = settings_of("kv_cache_files", tmp_path)
    with engine_on(model_of("llama"), 20, **settings) as one:
        expected, _ = answers(one, PROMPTS[:2])
        offer_all(one)
        with engine_on(model_of("llama"), 20, **settings) as other:
            assert answers(other, PROMPTS[:2]) == (expected, [88, 88])


def offer_all(engine: Engine) -> None:
    """Let an engine without work write all its cached pages."""
    assert engine.tiers is not None
    before = -1
    while (count := engine.tiers.tiers.tiers[0].num_stores) > before:
        before = count
        engine.tiers.offer(engine.pages.block_pool)
        settle(engine)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"kv_cache_files": "/tmp"}, "kv_cache_files must be a folder and a size, /var/cache/kv,100GiB, not '/tmp'"),
        ({"kv_cache_files": "/tmp,many"}, "kv_cache_files must be a folder and a size"),
        ({"kv_cache_files": "/tmp,1GiB", "enable_prefix_caching": False}, "must be null without enable_prefix_caching"),
    ],
)
def test_settings_that_make_no_tier_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineConfig.model_validate(settings)
