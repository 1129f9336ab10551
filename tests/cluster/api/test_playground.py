"""The playground is the scheduler: its steps obey what the scheduler promises, and cost what StepCost says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from crossdock.cluster.api.playground import Scenario, play
from crossdock.workers.schedule.cost import StepWork

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
def test_prompts_are_covered_once_and_steps_cost_what_they_should(
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
    told = play(scenario)
    steps = told["steps"]
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
    assert not told["is_cut"]
    assert done == [tokens] * prompts
    assert len(told["first_tokens_s"]) == prompts
    if policy == "whole":
        assert all(chunk["num_tokens"] == tokens for step in steps for chunk in step["chunks"])


def test_what_the_page_is_there_to_show() -> None:
    """A long prompt makes streams wait: entirely without chunks, less with a budget, within the promise with slack."""
    told = {policy: play(Scenario(policy=policy, prompt_tokens=16384)) for policy in ("adaptive", "fixed", "whole")}  # type: ignore[arg-type]
    gap = {policy: it["gap_max_s"] for policy, it in told.items()}
    assert gap["adaptive"] <= 1.25 * 0.05 < gap["fixed"] < gap["whole"] / 4
    assert gap["whole"] > max(told["whole"]["first_tokens_s"]) * 0.9
    assert told["adaptive"]["late_share"] == 0
    assert all(step["num_decodes"] == 16 for step in told["adaptive"]["steps"][:20]), "no stream is left out"


def test_it_ends() -> None:
    """However much is asked for, there is an answer after a bounded number of steps."""
    told = play(
        Scenario(policy="fixed", max_num_batched_tokens=160, num_decodes=128, prompt_tokens=65536, num_prompts=8)
    )
    assert told["is_cut"]
    assert len(told["steps"]) <= 1012
    free = dict.fromkeys(("base", "per_prefill_token", "per_attended", "per_decode", "per_context"), 0.0)
    assert not play(Scenario.model_validate(free))["is_cut"]
    assert play(Scenario(num_decodes=0))["gap_max_s"] is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"max_num_batched_tokens \(64\) must be at least num_decodes"):
        Scenario(max_num_batched_tokens=64, num_decodes=64)
    for field in ({"prompt_tokens": 10**9}, {"num_decodes": -1}, {"policy": "best"}, {"polcy": "fixed"}):
        with pytest.raises(ValidationError):
            Scenario.model_validate(field)
