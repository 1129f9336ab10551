"""A run of the simulator's page is the real scheduler's: steps cover each prompt once and cost what is predicted."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from benchmarks.simulator_page import PAGE, WEB, stored_runs
from crossdock.cluster.simulate.scenario import Scenario
from crossdock.cluster.simulate.scenario_run import play
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.cost.cost import StepWork

POLICIES = ("adaptive", "fixed", "alternating", "whole")


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(POLICIES), st.integers(128, 4096), st.integers(0, 12), st.integers(1, 3), st.integers(1, 5000))
def test_steps_of_any_scenario_cover_each_prompt_once_in_order(
    policy: str, budget: int, streams: int, prompts: int, tokens: int
) -> None:
    scenario = Scenario.model_validate(
        {
            "policy": policy,
            "max_num_batched_tokens": budget,
            "num_streams": streams,
            "num_prompts": prompts,
            "prompt_tokens": tokens,
        }
    )
    result = play(scenario)
    done = [0] * prompts
    end = 0.0
    cost = preset("h100-8b").cost
    for step in result["steps"]:
        assert step["started"] >= end - 1e-5
        end = step["started"] + step["seconds"]
        chunks = [(chunk["start"], chunk["num_tokens"]) for chunk in step["chunks"]]
        for chunk in step["chunks"]:
            assert chunk["start"] == done[chunk["prompt"] - 1]
            done[chunk["prompt"] - 1] += chunk["num_tokens"]
        assert policy == "whole" or step["num_decodes"] + sum(num for _, num in chunks) <= budget
        assert policy != "alternating" or not chunks or not step["num_decodes"]
        assert step["seconds"] >= cost.seconds(StepWork.of(chunks)) - 1e-5
    assert not result["is_cut"]
    assert done == [tokens] * prompts
    assert len(result["ttft_s"]) == prompts


def test_long_prompt_delays_decodes_less_the_smaller_its_chunks() -> None:
    results = {policy: play(Scenario.model_validate({"policy": policy, "prompt_tokens": 16384})) for policy in POLICIES}
    longest = {policy: result["tpot_s"]["p99"] for policy, result in results.items()}
    assert longest["adaptive"] < 1.25 * 0.05 < longest["fixed"] < longest["alternating"] < longest["whole"] / 4
    assert results["whole"]["ttft_s"][0] == min(result["ttft_s"][0] for result in results.values())
    assert all(step["num_decodes"] == 16 for step in results["adaptive"]["steps"][:20]), "no decode is left out"


def test_larger_budget_gives_shorter_ttft_and_longer_tpot() -> None:
    small, large = (
        play(Scenario(policy="fixed", prompt_tokens=16384, max_num_batched_tokens=budget)) for budget in (512, 8192)
    )
    assert large["ttft_s"][0] < small["ttft_s"][0]
    assert large["tpot_s"]["p99"] > 2 * small["tpot_s"]["p99"]


def test_largest_scenario_ends_after_bounded_steps() -> None:
    result = play(
        Scenario(policy="fixed", max_num_batched_tokens=128, num_streams=64, prompt_tokens=65536, num_prompts=8)
    )
    assert result["is_cut"]
    assert result["ttft_s"] == [None] * 8
    assert 1000 <= len(result["steps"]) <= 1020


@pytest.mark.parametrize(
    "wrong",
    [{"prompt_tokens": 10**9}, {"num_streams": -1}, {"policy": "best"}, {"polcy": "fixed"}, {"profile": "a.json"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_scenario_out_of_bounds_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Scenario.model_validate(wrong)


def test_static_page_has_the_runs_and_the_scripts_of_now() -> None:
    """If this fails, run benchmarks/simulator_page.py."""
    text = PAGE.read_text()
    found = re.search(r'<script type="application/json" id="runs">(.*)</script>', text)
    assert found is not None
    kept, made = json.loads(found[1]), json.loads(json.dumps(stored_runs()))
    assert kept["choices"] == made["choices"]
    for query, run in made["runs"].items():
        assert kept["runs"][query] == run, query
    script = (WEB / "simulator.js").read_text()
    assert script[script.index("const POLICIES") :] in text
