"""Sampling that requests leave open: the model's file, a directory, an override; and the longest output."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, CompletionRequest, GenerationBody
from crossdock.cluster.api.body.generation_defaults import GenerationConfig, GenerationDefaults
from tests.cluster.api.scripted_api import HI, ScriptedDispatcher, Serve, complete

CHAT = ChatCompletionRequest.parse(b'{"messages": [{"role": "user", "content": "Hi"}]}')
SHORT_CHAT = ChatCompletionRequest.parse(b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 70}')
COMPLETION = CompletionRequest.parse(b'{"prompt": "Hi"}')


def folder(path: Path, content: Any) -> Path:
    path.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (path / "generation_config.json").write_text(text)
    return path


def test_embedded_model_recommends_the_likeliest_tokens(model_dir: Path) -> None:
    defaults = GenerationDefaults.read(model_dir)
    assert (defaults.sampling, defaults.max_tokens) == ({"temperature": 0.0}, None)


def test_source_and_override_decide_the_sampling(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", {"temperature": 0.6, "top_k": 20, "min_p": None, "eos_token_id": [2]})
    other = folder(tmp_path / "other", {"repetition_penalty": 1.1})
    override = GenerationConfig(temperature=0.0)
    assert GenerationDefaults.read(model).sampling == {"temperature": 0.6, "top_k": 20}
    assert GenerationDefaults.read(model, "vllm").sampling == {}
    assert GenerationDefaults.read(model, str(other)).sampling == {"repetition_penalty": 1.1}
    assert GenerationDefaults.read(model, "auto", override).sampling == {"temperature": 0.0, "top_k": 20}
    assert GenerationDefaults.read(model, "vllm", override).sampling == {"temperature": 0.0}
    (tmp_path / "bare").mkdir()
    assert GenerationDefaults.read(tmp_path / "bare").sampling == {}


@pytest.mark.parametrize(
    ("source", "override", "lengths"),
    [  # of a chat without a limit, one with 70, a completion, whose default is 16
        ("vllm", None, (100, 70, 16)),
        ("auto", None, (50, 70, 16)),  # the authors' value is a default
        ("DIR", None, (12, 12, 12)),  # the operator's limits every request
        ("auto", 12, (12, 12, 12)),
        ("vllm", 60, (60, 60, 16)),
    ],
)
def test_max_new_tokens_of_the_model_is_a_default_and_that_of_the_operator_a_limit(
    tmp_path: Path, source: str, override: int | None, lengths: tuple[int, ...]
) -> None:
    model = folder(tmp_path / "model", {"max_new_tokens": 50})
    other = folder(tmp_path / "other", {"max_new_tokens": 12})
    config = None if override is None else GenerationConfig(max_new_tokens=override)
    defaults = GenerationDefaults.read(model, str(other) if source == "DIR" else source, config)
    cases: list[tuple[int, GenerationBody]] = [(100, CHAT), (70, SHORT_CHAT), (16, COMPLETION)]
    assert tuple(defaults.limit(fits, body) for fits, body in cases) == lengths


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"temperature": 3}, r"temperature: must be less than or equal to 2, not 3"),
        ('{"temperature": NaN}', r"temperature: must be a finite number"),
        ({"top_k": "many"}, "top_k: must be a valid integer"),
        ({"max_new_tokens": 0}, "max_new_tokens: must be greater than or equal to 1"),
    ],
)
def test_unusable_file_is_refused_by_field_with_the_way_out(tmp_path: Path, content: Any, message: str) -> None:
    model = folder(tmp_path / "model", content)
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}.*generation_config: vllm ignores"):
        GenerationDefaults.read(model)
    assert GenerationDefaults.read(model, "vllm") == GenerationDefaults()


def test_source_that_is_no_directory_with_the_file_is_refused(tmp_path: Path) -> None:
    for source in ("none", str(tmp_path)):
        with pytest.raises(ValueError, match=r"must be auto .* vllm .* or a directory with generation_config\.json"):
            GenerationDefaults.read(tmp_path, source)


def test_defaults_apply_to_fields_that_the_body_leaves_out(serve: Serve, engine: ScriptedDispatcher) -> None:
    defaults = GenerationDefaults({"temperature": 0.6, "top_k": 20}, max_tokens=30)
    http = serve(defaults)
    complete(http)
    complete(http, temperature=0, top_k=-1)
    http.post("/v1/chat/completions", json={"messages": HI}).raise_for_status()
    http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 40}).raise_for_status()
    params = [submission.sampling for submission in engine.submissions]
    assert [(each.temperature, each.top_k) for each in params] == [(0.6, 20), (0.0, 0), (0.6, 20), (0.6, 20)]
    assert [each.max_tokens for each in params][2:] == [30, 40]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 4),
        ("no_repeat_ngram_size", 3),
        ("suppress_tokens", [5]),
        ("bad_words_ids", [[5]]),
        ("forced_eos_token", "x"),
        ("min_new_tokens", 10),
        ("guidance_scale", 1.5),
        ("typical_p", 0.9),
        ("stop_strings", ["END"]),
        ("something_new", "x"),
    ],
)
def test_field_that_no_request_would_follow_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=rf"generation_config\.json: {name} is .*vllm ignores this file"):
        GenerationDefaults.read(tmp_path)
    assert GenerationDefaults.read(tmp_path, "vllm") == GenerationDefaults()


def test_fields_without_effect_are_passed_over(tmp_path: Path) -> None:
    """Such fields stand in files that transformers writes, and in published ones."""
    written = transformers.GenerationConfig().to_dict() | {"max_length": 4096, "cache_implementation": "hybrid"}
    written |= {
        "_from_model_config": True,
        "num_beams": 1,
        "length_penalty": 1.0,
        "chat_format": "chatml",
        "do_sample": True,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert not GenerationDefaults.read(tmp_path).sampling
