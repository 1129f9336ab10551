"""An engine on a text encoder: vectors and labels are those of transformers, whatever shares their steps.

tests/workers/model/test_text_encoder.py compares all families in every run.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import load_engine, load_text_engine
from crossdock.workers.replica.engine.text_engine import calibrate_texts
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.failures import NOT_FINITE
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import InvalidField, SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.replica.engines import run
from tests.workers.text_encoders import FAMILIES, POSITIONS, TYPED, VECTORS, hidden_of, logits_of, pooled, saved

COST = StepCost(base=0.001, per_prefill_token=0.003)  # at whose knee a step has fewer tokens than the longest text


def spec_of(folder: Path, **engine: Any) -> ReplicaSpec:
    return ReplicaSpec(ModelSpec(str(folder), "float32"), EngineConfig(**engine), num_threads=1)


def wanted(name: str, text: list[int], pooling: str, **fields: Any) -> Submission:
    return Submission(name, text, SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling), **fields)


def vector_of(deltas: list[TokenDelta]) -> NDArray[np.float32]:
    [delta] = deltas
    assert delta.finish_reason is FinishReason.LENGTH
    assert delta.token_ids == []
    assert delta.embedding is not None
    return np.frombuffer(delta.embedding, "<f4")


def texts_of(seed: int, count: int = 12) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(rng.randint(1, POSITIONS))] for _ in range(count)]


def steps_of(engine: Engine) -> tuple[list[list[str]], dict[str, list[TokenDelta]]]:
    """Step until there is no work. Returns the requests of each step, and the deltas by request."""
    steps: list[list[str]] = []
    deltas: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        step = engine.step()
        steps.append([part.request.id for part in step.batch.scheduled])
        assert all(part.start == 0 and part.num_tokens == part.request.num_tokens for part in step.batch.scheduled)
        for delta in step.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    assert engine.pages.counts().owned == 0
    return steps, deltas


@pytest.mark.parametrize("family", rest_in_soak(VECTORS, "bert", "modernbert", "gemma3_text"))
def test_vectors_of_texts_that_share_steps_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    engine = load_engine(spec_of(tmp_path, max_num_batched_tokens=120, max_num_seqs=5))
    texts = texts_of(1)
    for i, text in enumerate(texts):
        for pooling in ("cls", "mean", "last"):
            engine.add(wanted(f"{i} {pooling}", text, pooling))
    steps, deltas = steps_of(engine)
    assert any(len(step) > 1 for step in steps)
    for i, text in enumerate(texts):
        hidden = hidden_of(model, text)
        for pooling in ("cls", "mean", "last"):
            found = vector_of(deltas[f"{i} {pooling}"])
            np.testing.assert_allclose(found, pooled(hidden, pooling), atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("family", rest_in_soak(FAMILIES, "bert", "modernbert"))
def test_labels_of_pairs_that_share_steps_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family, 1)
    engine = load_engine(spec_of(tmp_path, max_num_batched_tokens=200))
    texts = [text for text in texts_of(2) if len(text) > 1]
    for i, text in enumerate(texts):
        engine.add(wanted(f"{i}", text, "labels", second_text=len(text) // 2))
    deltas = run(engine)
    for i, text in enumerate(texts):
        given = {}
        if family in TYPED:
            given["token_type_ids"] = torch.tensor([[int(place >= len(text) // 2) for place in range(len(text))]])
        np.testing.assert_allclose(vector_of(deltas[f"{i}"]), logits_of(model, text, **given), atol=5e-5, rtol=1e-3)


@cache
def folder_of_bert(parent: Path) -> Path:
    saved(parent / "bert", "bert")
    return parent / "bert"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_bert(tmp_path_factory.mktemp("encoders"))


def test_small_text_does_not_wait_for_all_texts_of_a_large_request(bert: Path) -> None:
    """With costs, a step has as many texts as fit into its seconds, and the small text soon goes before what waits."""
    engine = load_engine(spec_of(bert, max_num_batched_tokens=2048))
    engine.scheduler.learn(COST, 1.0)
    for i in range(20):
        engine.add(wanted(f"large {i}", [5] * POSITIONS, "mean"))
    first = engine.step()
    assert 1 <= len(first.batch.scheduled) < 20
    engine.add(wanted("small", [5] * 4, "mean"))
    steps, deltas = steps_of(engine)
    assert any("small" in step for step in steps[:2])  # 20 large texts take 20 steps
    assert len(deltas) + len(first.deltas) == 21


def test_text_longer_than_the_seconds_of_a_step_is_computed_alone(bert: Path) -> None:
    engine = load_engine(spec_of(bert))
    engine.scheduler.learn(COST.slowed(1e4), 1.0)
    for i in range(3):
        engine.add(wanted(f"{i}", [5] * POSITIONS, "mean", is_promised=False))
    steps, deltas = steps_of(engine)
    assert [len(step) for step in steps] == [1, 1, 1]
    assert len(deltas) == 3


def test_text_of_all_positions_is_taken_and_a_longer_one_is_refused(bert: Path) -> None:
    engine = load_engine(spec_of(bert))
    engine.add(wanted("longest", [5] * POSITIONS, "mean"))
    with pytest.raises(InvalidField, match=f"takes at most {POSITIONS} "):
        engine.add(wanted("longer", [5] * (POSITIONS + 1), "mean"))
    assert run(engine).keys() == {"longest"}


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(max_tokens=1), "max_tokens"),
        (SamplingParams(max_tokens=1, pooling="mean"), "max_tokens"),
        (SamplingParams(max_tokens=0, pooling="labels"), "pooling"),
    ],
)
def test_what_an_encoder_does_not_answer_is_refused(sampling: SamplingParams, field: str, bert: Path) -> None:
    engine = load_engine(spec_of(bert))
    with pytest.raises(InvalidField) as refusal:
        engine.add(Submission("a", [5, 6], sampling))
    assert refusal.value.field == field


def test_vector_that_is_not_finite_ends_its_request_alone(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    engine, encoder = load_text_engine(spec_of(tmp_path))
    with torch.no_grad():
        encoder.module.embeddings.word_embeddings.weight[7] = torch.inf
    engine.add(wanted("broken", [5, 7], "mean"))
    engine.add(wanted("whole", [5, 6], "mean"))
    deltas = run(engine)
    assert vector_of(deltas["whole"]).size == 48
    [delta] = deltas["broken"]
    assert (delta.finish_reason, delta.error, delta.embedding) == (FinishReason.ERROR, NOT_FINITE, None)
    assert engine.num_not_finite == 1


def test_profile_of_a_calibrated_engine_predicts_and_has_no_pages_in_memory(bert: Path) -> None:
    engine, encoder = load_text_engine(spec_of(bert))
    profile = calibrate_texts(engine, encoder)
    assert not profile.generates
    assert (profile.max_model_len, profile.page_bytes, profile.caches_prefixes) == (POSITIONS, 0, False)
    assert profile.cost.prefill_seconds(0, 64, 64) > 0
    assert engine.executor.memory().nbytes == 0
    engine.add(wanted("after", [5, 6], "mean"))
    assert run(engine).keys() == {"after"}


@pytest.mark.parametrize(
    ("replica", "engine", "name"),
    [
        ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size must be 1"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size must be 1"),
        ({"role": "prefill"}, {}, "role must be mixed"),
        ({}, {"enable_lora": True}, "enable_lora must be false"),
        ({}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config"),
        ({}, {"quantization": "int8"}, "quantization must be null"),
        ({}, {"kv_cache_host_memory": 1 << 20}, "kv_cache_host_memory must be null"),
        ({}, {"kv_cache_files": "/tmp/kv,1GiB"}, "kv_cache_files must be null"),
        ({}, {"kv_cache_memory": 1 << 20}, "kv_cache_memory must be null"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto"),
        ({}, {"attention_backend": "triton"}, "attention_backend must be auto"),
        ({}, {"cpu_kernels": "native"}, "cpu_kernels must be auto"),
        ({}, {"batch_invariant": True}, "batch_invariant must be false"),
        ({}, {"load_format": "runai_streamer"}, "load_format must be auto"),
        ({}, {"async_scheduling": True}, "async_scheduling must be null"),
    ],
)
def test_setting_without_meaning_for_an_encoder_is_refused_by_name(
    replica: dict[str, Any], engine: dict[str, Any], name: str, bert: Path
) -> None:
    model = ModelSpec(str(bert), "float32")
    spec = ReplicaSpec(model, EngineConfig.model_validate(engine), num_threads=1, **replica)
    with pytest.raises(ValueError, match=name):
        load_text_engine(spec)


def test_step_that_cannot_hold_the_longest_text_is_refused(bert: Path) -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(90\) must be at least max_model_len"):
        load_engine(spec_of(bert, max_num_batched_tokens=90, max_num_seqs=4))
