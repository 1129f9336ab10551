"""Rotary scaling lengthens the context, and logits beyond the model's own positions are transformers'."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from crossdock.workers.model.context_length import longest_request
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.weights import read_config
from tests.sweeps import shared_out
from tests.workers.architectures import build
from tests.workers.model.paged import assert_near, in_random_steps, monolithic, random_prompts, through_pages

POSITIONS = 64
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LENGTHENED: dict[str, tuple[dict[str, Any], int]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, 256),
    "linear by a part": ({"rope_type": "linear", "factor": 2.5}, 160),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "yarn from fewer positions": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}, 192),
}
AS_BEFORE: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, POSITIONS),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, POSITIONS),
    "yarn that max_position_embeddings tells": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        POSITIONS,
    ),
    "llama3": ({"rope_type": "llama3", "factor": 2.0, **_LLAMA3}, POSITIONS),
}
FORMS = ("rope_parameters", "rope_scaling", "rope_scaling type")


def write(folder: Path, scaling: dict[str, Any], form: str = "rope_parameters", architecture: str = "llama") -> Any:
    """Write a checkpoint whose config.json asks for a scaling in one of the forms that transformers reads."""
    module = build(architecture, {"max_position_embeddings": POSITIONS})
    module.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    if form == "rope_scaling type":
        scaling = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    if form == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": 10000.0, **scaling}
    else:
        config |= {"rope_theta": 10000.0, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    return type(module).from_pretrained(folder).eval()


@pytest.mark.parametrize(("name", "form"), shared_out(len(FORMS), [*LENGTHENED], FORMS))
def test_scaled_context_equals_transformers_at_every_chunk_boundary(name: str, form: str, tmp_path: Path) -> None:
    scaling, longest = LENGTHENED[name]
    module = write(tmp_path, scaling, form)
    model = load_model(ModelSpec(str(tmp_path), "float32"))
    assert model.max_model_len == longest
    asked = random_prompts(longest, POSITIONS + 1, 20)
    assert_near(in_random_steps(model, asked, seed=3), [monolithic(module, prompt) for prompt in asked])


@pytest.mark.parametrize("name", AS_BEFORE)
def test_scaling_that_lengthens_nothing_more_equals_transformers_up_to_the_positions(name: str, tmp_path: Path) -> None:
    scaling, longest = AS_BEFORE[name]
    module = write(tmp_path, scaling)
    model = load_model(ModelSpec(str(tmp_path), "float32"))
    assert model.max_model_len == longest
    asked = random_prompts(longest, 5)
    steps = [[(0, 0, 40), (1, 0, 5)], [(0, 40, longest)]]
    assert_near(through_pages(model, asked, steps), [monolithic(module, prompt) for prompt in asked])


def test_dynamic_scaling_beyond_the_positions_has_one_base_for_all_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longest = 200
    module = write(tmp_path, AS_BEFORE["dynamic"][0])
    model = load_model(ModelSpec(str(tmp_path), "float32", max_model_len=longest))
    assert model.max_model_len == longest
    assert "max_model_len (200) is more than the model's 64 positions" in caplog.text
    asked = random_prompts(longest, POSITIONS + 1, 20)
    found = in_random_steps(model, asked, seed=3)
    assert_near(found[:1], [monolithic(module, asked[0])])  # transformers' own base at this length
    width = module.config.head_dim
    base = 10000.0 * (4.0 * longest / POSITIONS - 3.0) ** (width / (width - 2))
    module.model.rotary_emb.rope_type = "default"
    module.model.rotary_emb.inv_freq = base ** -(torch.arange(0, width, 2) / width)
    assert_near(found, [monolithic(module, prompt) for prompt in asked])


def test_pages_of_dynamic_scaling_are_those_of_one_length(tmp_path: Path) -> None:
    write(tmp_path, AS_BEFORE["dynamic"][0])
    variants = [
        load_model(ModelSpec(str(tmp_path), "float32", max_model_len=longest)).variant
        for longest in (None, POSITIONS, POSITIONS + 1, 256)
    ]
    assert variants == ["", "", f"dynamic rope of {POSITIONS + 1}", "dynamic rope of 256"]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            r"own 256 positions; .*--hf-overrides .*\"factor\": 16.0",
        ),
        (LENGTHENED["yarn from fewer positions"][0], r"own 192 positions; .*\"factor\": 21.0"),
        (
            {"rope_type": "dynamic", "factor": 4.0},
            r"own 64 positions, and than 256 with its dynamic scaling; .*\"factor\": 16.0",
        ),
        (
            AS_BEFORE["llama3"][0],
            r"own 64 positions; for more, give --hf-overrides .*\"max_position_embeddings\": 1000",
        ),
    ],
)
def test_refusal_of_a_longer_context_says_what_to_override(
    scaling: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, scaling)
    with pytest.raises(ValueError, match=message):
        load_model(ModelSpec(str(tmp_path), "float32", max_model_len=1000))


SCALINGS = [{"rope_type": "default"}, LENGTHENED["linear"][0], LENGTHENED["yarn"][0], AS_BEFORE["dynamic"][0]]


@pytest.mark.parametrize(("scaling", "form"), shared_out(len(FORMS), SCALINGS, FORMS))
def test_overrides_that_the_refusal_names_serve_the_longer_context(
    scaling: dict[str, Any], form: str, tmp_path: Path
) -> None:
    write(tmp_path, scaling, form)
    with pytest.raises(ValueError, match=r"own (64|256) positions") as refused:
        load_model(ModelSpec(str(tmp_path), "float32", max_model_len=1000))
    overrides = json.loads(re.findall(r"--hf-overrides '(.*)'", str(refused.value))[0])
    spec = ModelSpec(str(tmp_path), "float32", max_model_len=1000, hf_overrides=overrides)
    assert load_model(spec).max_model_len == 1000


@pytest.mark.parametrize("form", FORMS)
def test_scaling_of_overrides_gives_the_logits_of_a_checkpoint_with_that_scaling(form: str, tmp_path: Path) -> None:
    """The base of the model's own rotation stays, wherever it stands."""
    scaling, longest = LENGTHENED["yarn"]
    expected = write(tmp_path / "a", scaling, form)
    write(tmp_path / "b", {"rope_type": "default"}, form)
    for folder in ("a", "b"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        part = config if form != "rope_parameters" else config[form]
        part["rope_theta"] = 777.0
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    expected = type(expected).from_pretrained(tmp_path / "a").eval()
    model = load_model(ModelSpec(str(tmp_path / "b"), "float32", hf_overrides={"rope_scaling": scaling}))
    assert model.max_model_len == longest
    asked = random_prompts(longest, POSITIONS + 1)
    assert_near(in_random_steps(model, asked, seed=3), [monolithic(expected, prompt) for prompt in asked])


def test_layers_that_scale_apart_and_models_without_rotation_keep_their_positions(tmp_path: Path) -> None:
    gemma = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    for number, (name, options) in enumerate((("gemma3_text", gemma), ("gpt2", {"n_positions": 256}))):
        build(name, options).save_pretrained(tmp_path / str(number))
        config = read_config(tmp_path / str(number))
        assert longest_request(config, None) == 256
        with pytest.raises(ValueError, match="own 256 positions; a longer context needs another model"):
            longest_request(config, 300)
