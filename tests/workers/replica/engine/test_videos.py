"""Requests with videos on an engine: their tokens are those of transformers, whatever happens to them."""

from pathlib import Path
from typing import Any

import pytest

from crossdock.workers.model.model import LoadedModel
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.request.items import divide_frames
from tests.sweeps import rest_in_soak
from tests.workers.model.pictures.test_video import FAMILIES, video
from tests.workers.multimodal import (
    IMAGE,
    VIDEO,
    PicturePrompt,
    build_multimodal,
    continuation,
    paged_multimodal,
    picture,
)
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engine.test_pictures import NUM_TOKENS, served
from tests.workers.replica.engines import before_each_step, engine_on
from tests.workers.worker_groups import engine_of_ranks


@pytest.fixture(scope="module", params=rest_in_soak(FAMILIES, "qwen3_vl"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> LoadedModel:
    return paged_multimodal(family)


@pytest.fixture(scope="module")
def prompts(family: str) -> dict[str, PicturePrompt]:
    """Prompts that share beginnings: the same video and another, whose tokens differ; a picture behind; text alone."""
    one = video(family, 1, 4, (2, 3))
    module, behind = build_multimodal(family), 9
    first = PicturePrompt.of(5, one, behind, seed=1)
    others = (PicturePrompt.of(5, video(family, seed, 4, (2, 3)), behind, seed=1) for seed in range(2, 100))
    tokens = continuation(module, first, NUM_TOKENS)
    return {
        "one": first,
        "longer": PicturePrompt.of(5, one, behind, picture(family, 3), 4, seed=1),
        "other": next(each for each in others if continuation(module, each, NUM_TOKENS) != tokens),
        "text": PicturePrompt.of(40, seed=3),
    }


@pytest.fixture(scope="module")
def expected(family: str, prompts: dict[str, PicturePrompt]) -> dict[str, list[int]]:
    module = build_multimodal(family)
    return {name: continuation(module, prompt, NUM_TOKENS) for name, prompt in prompts.items()}


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "page_size": 8, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 24, "max_num_seqs": 8, "async_scheduling": True, "page_size": 8},
        {
            "max_num_batched_tokens": 64,
            "speculative_config": SpeculativeConfig(
                method="ngram", num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1
            ),
        },
    ],
    ids=["whole", "small chunks", "ahead", "drafts"],
)
def test_tokens_equal_transformers(
    model: LoadedModel, prompts: dict[str, PicturePrompt], expected: dict[str, list[int]], config: dict[str, Any]
) -> None:
    assert served(engine_on(model, **config), prompts) == expected


def test_tokens_of_a_worker_group_equal_transformers(ranks: Ranks, tmp_path: Path) -> None:
    name, module = "qwen3_vl", build_multimodal("qwen3_vl")
    prompts = {
        "video": PicturePrompt.of(5, video(name, 1, 4, (2, 3)), 9, seed=1),
        "both": PicturePrompt.of(picture(name, 3), 3, video(name, 2, 2), 4, seed=1),
        "text": PicturePrompt.of(30, seed=3),
    }
    expected = {each: continuation(module, prompt, NUM_TOKENS) for each, prompt in prompts.items()}
    path = saved(module, tmp_path)
    with engine_of_ranks(ranks, path, 2, 2, max_num_batched_tokens=16, max_num_seqs=8, page_size=8) as engine:
        assert served(engine, prompts) == expected
        assert served(engine, prompts) == expected  # from cached pages


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "qwen2_5_vl"])
def test_long_video_is_encoded_chunk_by_chunk_where_text_divides_its_frames(name: str) -> None:
    """The first of many chunks waits for the frames that it reads. Tokens are those of the video in one piece."""
    whole = PicturePrompt.of(5, video(name, 1, 12, (2, 3)), 40, seed=1)
    [item] = whole.items
    is_taken = [token in (IMAGE, VIDEO) for token in whole.token_ids]
    runs = [
        (at, is_taken[at:].index(False)) for at in range(item.start, item.end) if is_taken[at] and not is_taken[at - 1]
    ]
    parts = divide_frames(item, runs)
    assert len(parts) == (1 if name == "qwen2_5_vl" else 12)  # these number the positions of all frames together
    assert sum(part.num_embedding_tokens for part in parts) == item.num_embedding_tokens
    engine, rows = engine_on(paged_multimodal(name), max_num_batched_tokens=32, page_size=8), list[int]()
    before_each_step(engine, lambda batch: rows.append(sum(each.num_embedding_tokens for each in batch.encoder.items)))
    assert served(engine, {"video": PicturePrompt(whole.token_ids, parts)}) == {
        "video": continuation(build_multimodal(name), whole, NUM_TOKENS)
    }
    assert sum(rows) == item.num_embedding_tokens
    assert rows[0] == item.num_embedding_tokens if len(parts) == 1 else 0 < rows[0] <= 32
