"""Requests with pictures on replicas of several ranks: transformers' tokens, whatever happens to them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.schedule.request.request import FinishReason
from tests.workers.multimodal import (
    BOTH_WAYS,
    FAMILIES,
    PicturePrompt,
    build_multimodal,
    continuation,
    paged_multimodal,
    picture,
)
from tests.workers.ranks import DIVISIONS, Ranks, saved
from tests.workers.replica.engine.test_pictures import NUM_TOKENS, broken, expected_of, prompts_of, served, submission
from tests.workers.replica.engines import run, tokens_of
from tests.workers.replica.ranks.test_worker_group_graphs import follow_recording, stand_in
from tests.workers.replica.sides import Side, closing, ship
from tests.workers.worker_groups import engine_of_ranks

CHUNKS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "page_size": 8}


@pytest.mark.parametrize(
    ("family", "division"),
    [  # all pairs in the soak; without, embeddings after layers of both stages, and rows that see each other
        pytest.param(family, division, marks=[] if is_usual else [pytest.mark.soak])
        for family in [*FAMILIES, *BOTH_WAYS]
        for division in DIVISIONS
        for is_usual in [(family, division) in (("qwen3_vl", (2, 2)), (*BOTH_WAYS, (1, 2)))]
    ],
)
def test_tokens_of_a_worker_group_equal_transformers(
    ranks: Ranks, tmp_path: Path, family: str, division: tuple[int, int]
) -> None:
    """In small chunks; then again from cached pages; then after the embeddings are gone."""
    path, prompts, expected = saved(build_multimodal(family), tmp_path), prompts_of(family), expected_of(family)
    chunks = CHUNKS | ({"max_num_batched_tokens": 40} if family in BOTH_WAYS else {})  # a whole picture in a step
    with engine_of_ranks(ranks, path, *division, **chunks) as engine:
        encoding = engine.scheduler.encoding
        assert served(engine, prompts) == expected
        encoded = encoding.totals.num_encoded
        assert served(engine, prompts) == expected
        assert encoding.totals.num_encoded == encoded, "from cached pages"
        engine.pages.block_pool.clear_cache()
        encoding.clear()
        assert engine.model.encoder is not None
        engine.model.encoder.clear()
        assert served(engine, prompts) == expected
        assert encoding.totals.num_encoded > encoded


@pytest.mark.parametrize(
    ("division", "config"),
    [((2, 1), {"async_scheduling": True}), ((1, 2), {"mm_encoder_cache": True})],
    ids=["ahead", "small cache of stages"],
)
def test_settings_of_a_worker_group_do_not_change_tokens(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int], config: dict[str, Any]
) -> None:
    family = "qwen3_vl"
    path, prompts = saved(build_multimodal(family), tmp_path), prompts_of(family)
    if "mm_encoder_cache" in config:  # as many rows as the largest picture has
        encoder = paged_multimodal(family).encoder
        assert encoder is not None
        rows = max(item.num_embedding_tokens for prompt in prompts.values() for item in prompt.items)
        config = {"mm_encoder_cache": ByteSize(rows * encoder.embedding_token_bytes)}
    with engine_of_ranks(ranks, path, *division, **CHUNKS | config) as engine:
        assert served(engine, prompts) == expected_of(family)
        assert bool(engine.scheduler.encoding.totals.num_evicted) == ("mm_encoder_cache" in config)


def test_preemption_inside_a_picture_of_a_worker_group_encodes_again_and_tokens_stay(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The embeddings are gone by then, and no page is cached."""
    module, prompt = build_multimodal("qwen3_vl"), PicturePrompt.of(5, picture("qwen3_vl", 1, (5, 6)), 9)
    config = {"max_num_batched_tokens": 9, "max_num_seqs": 1, "page_size": 8, "enable_prefix_caching": False}
    with engine_of_ranks(ranks, saved(module, tmp_path), 2, 2, **config) as engine:
        engine.add(submission("one", prompt))
        engine.step()
        while not engine.pipeline.is_empty:
            engine.finish_step()
        request, encoding = engine.scheduler.table.get("one"), engine.scheduler.encoding
        assert request is not None
        assert engine.model.encoder is not None
        item = request.items[0]
        assert item.start < request.num_computed_tokens < item.end
        engine.scheduler.table.preempt(request)
        encoding.clear()
        engine.model.encoder.clear()
        assert tokens_of(run(engine)["one"]) == continuation(module, prompt, NUM_TOKENS)
        assert encoding.totals.num_encoded == 2


def test_picture_that_a_worker_group_cannot_encode_fails_its_own_request_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Its chunks follow each other through the stages before the driver knows; the ranks go on together."""
    module = build_multimodal("llava")
    good, bad = PicturePrompt.of(5, picture("llava", 1), 9), PicturePrompt.of(5, picture("llava", 2), 30)
    wrong = PicturePrompt(bad.token_ids, [broken(bad.items[0])])
    with engine_of_ranks(ranks, saved(module, tmp_path), 2, 2, **CHUNKS) as engine:
        engine.add(submission("bad", wrong))
        engine.add(submission("good", good))
        deltas = run(engine)
        assert tokens_of(deltas["good"]) == continuation(module, good, NUM_TOKENS)
        assert deltas["bad"][-1].finish_reason is FinishReason.ERROR
        assert "cannot be encoded" in str(deltas["bad"][-1].error)
        engine.add(submission("again", wrong))
        engine.add(submission("well", bad))  # of the same content, which counts as known by now
        deltas = run(engine)
        assert {deltas[name][-1].finish_reason for name in ("again", "well")} == {FinishReason.ERROR}
        assert served(engine, {"good": good})["good"] == continuation(module, good, NUM_TOKENS)


def test_ranks_replay_graphs_for_tokens_and_launch_steps_with_pictures(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank the same, also where a step only forgets embeddings. There is no GPU: `stand_in` keeps functions."""
    usual, is_usual = list[tuple[bool, bool]](), Runner.is_usual

    def noted(self: Runner, inputs: StepInputs) -> bool:
        usual.append((inputs.reads_pictures, is_usual(self, inputs)))
        return usual[-1][1]

    path, prompts, answers = saved(build_multimodal("qwen3_vl"), tmp_path), prompts_of("qwen3_vl"), list[Any]()
    follower = partial(follow_recording, None)
    monkeypatch.setattr(Runner, "is_usual", noted)
    own = stand_in(monkeypatch)
    config = {"async_scheduling": True, "max_num_batched_tokens": 80, "max_num_seqs": 8}
    with engine_of_ranks(ranks, path, 2, 1, follower, answers, **config) as engine:
        own.clear()
        assert served(engine, prompts) == expected_of("qwen3_vl")
        assert {kind for kind, _ in own} == {"eager", "decodes", "mixed"}
        assert len(own) == len(usual)
        assert all(reads != graph for (reads, graph) in usual), "steps of text are graphs, those with pictures are not"
    assert answers[0][-len(own) :] == own


def test_warm_up_of_a_worker_group_measures_the_encoder(ranks: Ranks, tmp_path: Path) -> None:
    with engine_of_ranks(ranks, saved(build_multimodal("qwen2_vl"), tmp_path), 1, 2) as engine:
        profile = warm_up(engine)
        assert profile.encoder_cost is not None
        assert profile.encoder_tokens == engine.scheduler.encoding.capacity
        assert served(engine, prompts_of("qwen2_vl")) == expected_of("qwen2_vl")


async def test_pictures_shipped_between_unequal_shards_have_the_tokens_of_transformers(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The decode replica needs the positions of the prompt alone: it encodes nothing."""
    family = "qwen3_vl"
    prompts, expected, path = prompts_of(family), expected_of(family), saved(build_multimodal(family), tmp_path)

    with engine_of_ranks(ranks, path, 2, 1, max_num_batched_tokens=24) as engine:
        config = EngineConfig(max_num_batched_tokens=24, max_num_seqs=8, kv_cache_memory=ByteSize(4 << 20))
        whole = Side("tcp", engine=new_engine(paged_multimodal(family), config))
        async with closing(whole, Side("tcp", engine=engine)) as (prefill, decode):
            for name, prompt in prompts.items():
                assert await ship(prefill, decode, submission(name, prompt)) == expected[name]
            encodings = [each.engine.scheduler.encoding for each in (prefill, decode)]
            assert [encoding.totals.num_encoded for encoding in encodings if encoding is not None] == [3, 0]
