"""Requests of models with recurrent layers get transformers' tokens from several ranks, whatever happens to their
states."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pydantic import ByteSize

from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.engine import calibrate
from crossdock.workers.schedule.request.submission import Submission
from tests.known_seconds import known_sweep
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.ranks import DIVISIONS, Ranks, saved
from tests.workers.replica.engine.test_states_and_windows import NUM_TOKENS, prompts, served_under_preemption
from tests.workers.replica.engines import generated, greedy, run, served
from tests.workers.worker_groups import engine_of_ranks

LINEAR, FULL = "linear_attention", "full_attention"
SETTINGS: dict[str, Any] = {"page_size": 8, "max_num_batched_tokens": 40, "max_num_seqs": 12}
FEW = prompts()[4:10]
UNEVEN = {
    "more states on the first stage": [LINEAR, LINEAR, FULL, LINEAR, FULL, FULL],
    "no state on the last stage": [LINEAR, LINEAR, FULL, FULL, FULL, FULL],
    "no state on the first stage": [FULL, FULL, FULL, LINEAR, LINEAR, FULL],
}


@pytest.mark.parametrize(
    ("name", "division"),
    [
        ("lfm3 conv", (2, 2)),  # both divisions; test_worker_group has the other kinds of states, undisturbed
        pytest.param("falcon_h1", (1, 2), marks=pytest.mark.soak),
        pytest.param("qwen3_next", (2, 1), marks=pytest.mark.soak),
    ],
)
def test_tokens_of_ranks_under_preemption_and_after_a_snapshot_are_those_of_transformers(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    module, texts = build(name, SERVED[name]), prompts()[6:]
    expected = generated(module, texts, NUM_TOKENS)
    with engine_of_ranks(
        ranks, saved(module, tmp_path), *division, kv_cache_memory=ByteSize(1 << 20), **SETTINGS
    ) as engine:
        assert served_under_preemption(engine, texts) == expected
        assert engine.scheduler.table.num_preemptions > 0
        assert served(engine, texts[-3:], NUM_TOKENS) == expected[-3:]
        engine.add(Submission("again", prompts()[-1], greedy(NUM_TOKENS)))
        engine.step()
        assert engine.scheduler.table.requests()[0].num_cached_tokens >= 64, "a snapshot was found"
        run(engine)
        assert engine.pages.counts().owned == 0


def test_tokens_of_ranks_whose_steps_begin_ahead_are_those_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    module = build("qwen3_next", SERVED["qwen3_next"])
    with engine_of_ranks(ranks, saved(module, tmp_path), 2, 1, async_scheduling=True, **SETTINGS) as engine:
        expected = generated(module, FEW, 12)
        for _ in range(2):
            assert served(engine, FEW, 12) == expected


@pytest.mark.parametrize("case", rest_in_soak(UNEVEN, *[*UNEVEN][:2]))
def test_state_has_the_pages_of_the_largest_on_every_stage(ranks: Ranks, tmp_path: Path, case: str) -> None:
    layers = {"layer_types": UNEVEN[case], "num_hidden_layers": 6}
    module = build("qwen3_next", SERVED["qwen3_next"] | layers)
    path = saved(module, tmp_path)
    with engine_of_ranks(ranks, path, 1, 2, **SETTINGS) as engine:
        states = engine.model.states  # of the last stage
        assert states is not None
        assert len({shape.layer for shape in states.shapes}) == UNEVEN[case][3:].count(LINEAR)
        own, common = states.num_pages(engine.model.layout(8).page_bytes), engine.pages.state_pages
        assert common == own if case == "no state on the first stage" else common > own
        assert served(engine, FEW, 12) == generated(module, FEW, 12)


@pytest.mark.parametrize("division", rest_in_soak(DIVISIONS, *DIVISIONS[-1:]))
def test_state_of_ranks_is_counted_as_theirs_together(ranks: Ranks, tmp_path: Path, division: tuple[int, int]) -> None:
    path = saved(build("qwen3_next", SERVED["qwen3_next"]), tmp_path)
    whole = load_model(ModelSpec(str(path), "float32"))
    with engine_of_ranks(ranks, path, *division, **SETTINGS) as engine:
        with patch.object(calibrate, "remembered_sweep", known_sweep):
            profile = calibrate.warm_up(engine)
        assert profile.page_bytes == whole.layout(8).page_bytes
        assert profile.state_pages == engine.pages.state_pages == whole.state_pages(8)
