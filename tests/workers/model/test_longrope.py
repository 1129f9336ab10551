"""Models with longrope are served with one set of factors: no request changes another's, and no stream its own keys."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from tests.workers.architectures import build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts, through_pages

ORIGINAL = 32  # positions
SHORT, LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5], [1.0, 2.0, 4.0, 9.0, 17.0, 30.0]
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {},
    "phi3 partial": {"partial_rotary_factor": 0.5},  # as Phi-4-mini
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def longrope(name: str, short: list[float] = SHORT, long: list[float] = LONG) -> PreTrainedModel:
    options = MODELS[name]
    count = 3 if "partial_rotary_factor" in options else 6
    rope = {**ROPE, "short_factor": short[:count], "long_factor": long[:count]}
    if name == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.25}
    if "partial_rotary_factor" in options:
        rope["partial_rotary_factor"] = options["partial_rotary_factor"]
    return build(name, {**options, "rope_parameters": rope, "original_max_position_embeddings": ORIGINAL})


@pytest.mark.parametrize("name", MODELS)
def test_prompts_beyond_the_original_length_equal_transformers_beside_short_ones(name: str) -> None:
    asked = random_prompts(100, 5, 70, ORIGINAL + 1, 20)
    expected = [monolithic(longrope(name), prompt) for prompt in asked]
    got = in_random_steps(wrap_module(longrope(name)), asked, seed=7)
    for prompt, ours, theirs in zip(asked, got, expected, strict=True):
        if len(prompt) > ORIGINAL:
            assert_near([ours], [theirs])


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_a_server_for_the_original_length_equal_transformers(name: str) -> None:
    asked = random_prompts(5, ORIGINAL, 20)
    expected = [monolithic(longrope(name), prompt) for prompt in asked]
    model = wrap_module(longrope(name), LoadOptions(ORIGINAL))
    assert_near(in_random_steps(model, asked, seed=7), expected)


def test_short_prompts_of_a_server_for_more_use_the_long_factors() -> None:
    """transformers would take the short ones: the documented difference."""
    asked = random_prompts(5, 20)
    got = through_pages(wrap_module(longrope("phi3")), asked, [[(0, 0, 5), (1, 0, 20)]])
    for prompt, ours in zip(asked, got, strict=True):
        assert_near([ours], [monolithic(longrope("phi3", short=LONG), prompt)])
        assert not torch.allclose(ours, monolithic(longrope("phi3"), prompt), atol=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_stream_that_grows_past_the_original_length_equals_transformers_one_pass(name: str) -> None:
    (prompt,) = random_prompts(ORIGINAL + 8)
    steps = [[(0, 0, ORIGINAL - 4)], *([(0, at, at + 1)] for at in range(ORIGINAL - 4, len(prompt)))]
    found = through_pages(wrap_module(longrope(name)), [prompt], steps)
    assert_near(found, [monolithic(longrope(name), prompt)])


@pytest.mark.parametrize("max_model_len", [ORIGINAL, None])
@pytest.mark.parametrize("name", MODELS)
def test_prompt_beside_a_longer_one_keeps_its_logits(name: str, max_model_len: int | None) -> None:
    """A batch's longest position must not choose for all."""
    asked = random_prompts(ORIGINAL if max_model_len else 90, 12)
    model = wrap_module(longrope(name), LoadOptions(max_model_len))
    alone = through_pages(model, asked[1:], [[(0, 0, 12)]])
    beside = through_pages(model, asked, [[(0, 0, len(asked[0])), (1, 0, 12)]])
    assert_near(beside[1:], alone)
