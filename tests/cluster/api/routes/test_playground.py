"""The playground runs the real scheduler: steps cover every prompt once and cost what StepCost predicts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from crossdock.cluster.api.routes.playground import Scenario, play
from crossdock.workers.schedule.cost.cost import StepWork

POLICIES = st.sampled_from(["adaptive", "fixed", "whole"])


@settings(max_examples=40, deadline=None)
@given(
    POLICIES,
    st.integers(200, 4096),
    st.integers(0, 40),
    st.integers(1, 2000),
    st.integers(1, 3),
    st.integers(1, 5000),
    st.floats(0.01, 0.5),
)
def test_steps_cover_prompts_once_at_predicted_cost(
    policy: str, budget: int, decodes: int, context: int, prompts: int, tokens: int, tpot: float
) -> None:
    scenario = Scenario.model_validate(
        {
            "policy": policy,
            "max_num_batched_tokens": budget,
            "num_decodes": decodes,
            "decode_context": context,
            "num_prompts": prompts,
            "prompt_tokens": tokens,
            "tpot_s": tpot,
        }
    )
    result = play(scenario)
    steps = result["steps"]
    done = [0] * prompts
    now = 0.0
    for step in steps:
        assert step["started"] == pytest.approx(now, abs=1e-4)
        now = step["started"] + step["seconds"]
        for chunk in step["chunks"]:
            assert chunk["start"] == done[chunk["prompt"] - 1]
            done[chunk["prompt"] - 1] += chunk["num_tokens"]
        total = step["num_decodes"] + sum(chunk["num_tokens"] for chunk in step["chunks"])
        assert policy == "whole" or total <= budget
        chunks = [(chunk["start"], chunk["num_tokens"]) for chunk in step["chunks"]]
        without = scenario.cost.seconds(StepWork.of(chunks))
        assert step["seconds"] >= without - 1e-5
    assert not result["is_cut"]
    assert done == [tokens] * prompts
    assert len(result["first_tokens_s"]) == prompts
    if policy == "whole":
        assert all(chunk["num_tokens"] == tokens for step in steps for chunk in step["chunks"])


def test_long_prompt_delays_streams_less_with_smaller_chunks() -> None:
    """Streams wait for the whole prompt without chunks, less with a budget, and within their target with slack."""
    results = {policy: play(Scenario(policy=policy, prompt_tokens=16384)) for policy in ("adaptive", "fixed", "whole")}  # type: ignore[arg-type]
    gap = {policy: result["gap_max_s"] for policy, result in results.items()}
    assert gap["adaptive"] <= 1.25 * 0.05 < gap["fixed"] < gap["whole"] / 4
    assert gap["whole"] > max(results["whole"]["first_tokens_s"]) * 0.9
    assert results["adaptive"]["late_share"] == 0
    assert all(step["num_decodes"] == 16 for step in results["adaptive"]["steps"][:20]), "no stream is left out"


def test_largest_scenario_ends_after_bounded_steps() -> None:
    result = play(
        Scenario(policy="fixed", max_num_batched_tokens=160, num_decodes=128, prompt_tokens=65536, num_prompts=8)
    )
    assert result["is_cut"]
    assert len(result["steps"]) <= 1012
    free = dict.fromkeys(("base", "per_prefill_token", "per_attended", "per_decode", "per_context"), 0.0)
    assert not play(Scenario.model_validate(free))["is_cut"]
    assert play(Scenario(num_decodes=0))["gap_max_s"] is None


def test_impossible_scenario_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"max_num_batched_tokens \(64\) must be at least num_decodes"):
        Scenario(max_num_batched_tokens=64, num_decodes=64)
    for field in ({"prompt_tokens": 10**9}, {"num_decodes": -1}, {"policy": "best"}, {"polcy": "fixed"}):
        with pytest.raises(ValidationError):
            Scenario.model_validate(field)
