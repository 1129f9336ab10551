"""The JSON of `--speculative-config`: vLLM's names, and errors that name the field and what is accepted."""

from typing import Any

import pytest
from pydantic import ValidationError

from crossdock.workers.schedule.drafts.speculative_config import METHODS, SpeculativeConfig


def test_vllm_lookup_config_is_accepted() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    config = SpeculativeConfig.model_validate(given)
    assert config.model_dump(include=set(given)) == given
    assert config.adaptive


def test_vllm_config_of_a_head_is_accepted() -> None:
    given = {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}
    assert SpeculativeConfig.model_validate(given).model_dump(include=set(given)) == given


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "hy_v3_mtp", "nemotron_h_mtp", "qwen3_5_mtp"])
def test_vllm_names_of_the_head_in_a_checkpoint_are_one_method(method: str) -> None:
    config = SpeculativeConfig.model_validate({"method": method, "num_speculative_tokens": 1})
    assert (config.method, config.model, config.num_speculative_tokens) == ("mtp", None, 1)


def test_model_alone_means_draft_model() -> None:
    assert SpeculativeConfig(model="org/small", num_speculative_tokens=4).method == "draft_model"


@pytest.mark.parametrize(("given", "both"), [({"prompt_lookup_max": 4}, 4), ({"prompt_lookup_min": 3}, 3)])
def test_one_bound_of_the_match_is_both_as_in_vllm(given: dict[str, int], both: int) -> None:
    config = SpeculativeConfig.model_validate({"method": "ngram", **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (both, both)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, [*METHODS, "model"]),
        ({"method": "medusa"}, ["medusa", *METHODS, "heads of this kind"]),
        ({"method": "ernie_mtp"}, ["ernie_mtp", *METHODS, "heads of this kind"]),
        ({"method": "guess"}, ["guess", *METHODS]),
        ({"method": 3}, ["3", *METHODS]),
        ({"method": "draft_model"}, ["model", "directory", "small model"]),
        ({"method": "eagle3"}, ["model", "directory", "head"]),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, ["draft_tensor_parallel_size", "1"]),
        ({"method": "ngram", "max_model_len": 24}, ["max_model_len", "prompt_lookup_max"]),
        ({"method": "ngram", "model": "org/small"}, ["model", "ngram", "draft_model"]),
        ({"method": "suffix", "prompt_lookup_max": 5}, ["prompt_lookup_max", "suffix", "ngram"]),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, ["prompt_lookup_min (5)", "(4)"]),
        ({"method": "ngram", "num_speculative_tokens": 0}, ["num_speculative_tokens", "1"]),
        ({"method": "ngram", "num_speculative_tokens": 65}, ["num_speculative_tokens", "64"]),
    ],
)  # fmt: skip
def test_bad_config_is_refused_with_its_field_and_what_is_accepted(given: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        SpeculativeConfig.model_validate(given)
    for name in named:
        assert name in str(caught.value)
