"""Vectors of prompts equal those of transformers' own hidden states, whatever else the steps compute."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import InvalidField, SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import random_steps, through_pages
from tests.workers.ranks import DIVISIONS, Ranks
from tests.workers.replica.engines import engine_on, greedy, run, tiny_model, tokens_of
from tests.workers.worker_groups import engine_of_ranks

Vector = NDArray[np.float32]


@cache
def reference() -> PreTrainedModel:
    return build("llama", {"vocab_size": 2000, "max_position_embeddings": 1024})


@torch.inference_mode()
def expected(prompt: list[int], pooling: str, module: PreTrainedModel | None = None) -> Vector:
    """Return the vector of one forward pass of transformers' own model."""
    decoder = (module or reference()).base_model
    hidden = decoder(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    vector: Vector = (hidden[-1] if pooling == "last" else hidden.mean(0)).float().numpy()
    return vector


def vector_of(deltas: list[TokenDelta]) -> Vector:
    [delta] = deltas
    assert delta.embedding is not None
    return np.frombuffer(delta.embedding, "<f4")


def wanted(name: str, prompt: list[int], pooling: str) -> Submission:
    return Submission(name, prompt, SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling))


def prompts_of(seed: int, count: int = 8, most: int = 120) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 2000) for _ in range(rng.randint(1, most))] for _ in range(count)]


def check(engine: Engine, prompts: list[list[int]]) -> None:
    """Compute both vectors of every prompt beside streams, whose tokens must be those that they have alone."""
    streams = {f"stream {i}": [7 + i] * 20 for i in range(3)}
    for name, prompt in streams.items():
        engine.add(Submission(name, prompt, greedy(30)))
    alone = {name: tokens_of(deltas) for name, deltas in run(engine).items()}
    for name, prompt in streams.items():
        engine.add(Submission(name, prompt, greedy(30)))
    for i, prompt in enumerate(prompts):
        for pooling in ("last", "mean"):
            engine.add(wanted(f"{i} {pooling}", prompt, pooling))
    deltas = run(engine)
    assert {name: tokens_of(deltas[name]) for name in streams} == alone
    assert all(delta.embedding is None for name in streams for delta in deltas[name])
    for i, prompt in enumerate(prompts):
        for pooling in ("last", "mean"):
            found = vector_of(deltas[f"{i} {pooling}"])
            np.testing.assert_allclose(found, expected(prompt, pooling), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("seed", range(2))
def test_vectors_at_random_chunks_beside_streams_equal_transformers(seed: int) -> None:
    budget, caching = random.Random(seed).choice([7, 17, 40, 300]), bool(seed % 2)
    engine = engine_on(
        tiny_model(),
        max_num_batched_tokens=budget,
        max_num_seqs=3,
        page_size=4,
        chunk_policy="fixed",
        enable_prefix_caching=caching,
    )
    check(engine, prompts_of(seed))


def test_vectors_of_steps_that_begin_ahead_equal_transformers() -> None:
    check(engine_on(tiny_model(), max_num_batched_tokens=24, async_scheduling=True), prompts_of(7))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vector_of_preempted_prompt_equals_transformers(pooling: str) -> None:
    engine = engine_on(tiny_model(), max_num_batched_tokens=24, enable_prefix_caching=pooling == "last")
    for prompt in prompts_of(5, 6, 90):
        prompt = prompt * (1 + 90 // len(prompt))
        engine.add(wanted("a", prompt, pooling))
        for _ in range(2):
            assert not engine.step().deltas
        [request] = engine.scheduler.table.requests()
        assert 0 < request.num_computed_tokens < len(prompt)
        engine.scheduler.table.preempt(request)
        found = vector_of(run(engine)["a"])
        assert request.num_preemptions == 1
        np.testing.assert_allclose(found, expected(prompt, pooling), atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("division", rest_in_soak(DIVISIONS, (2, 2)))
def test_vectors_of_a_worker_group_equal_transformers(ranks: Ranks, tmp_path: Path, division: tuple[int, int]) -> None:
    module = build("llama", {})
    module.save_pretrained(tmp_path)
    prompts = [[3 + i % 100 for i in prompt] for prompt in prompts_of(9, 6)]
    with engine_of_ranks(ranks, tmp_path, *division, max_num_batched_tokens=30) as engine:
        for i, prompt in enumerate(prompts):
            engine.add(wanted(f"{i}", prompt, ("last", "mean")[i % 2]))
        engine.add(Submission("stream", [5] * 20, greedy(20)))
        deltas = run(engine)
    for i, prompt in enumerate(prompts):
        vector = expected(prompt, ("last", "mean")[i % 2], module)
        np.testing.assert_allclose(vector_of(deltas[f"{i}"]), vector, atol=2e-4, rtol=2e-3)


def test_last_token_uses_cached_pages_and_mean_does_not() -> None:
    engine = engine_on(tiny_model(), max_num_batched_tokens=64)
    prompt = [11 + i % 50 for i in range(100)]
    for name, pooling, cached in (("a", "last", 0), ("b", "last", 96), ("c", "mean", 0), ("d", "last", 96)):
        engine.add(wanted(name, prompt, pooling))
        deltas = run(engine)[name]
        assert deltas[0].num_cached_tokens == cached, name
        np.testing.assert_allclose(vector_of(deltas), expected(prompt, pooling), atol=2e-4, rtol=2e-3)


def test_model_without_hidden_states_refuses_vectors_and_goes_on() -> None:
    engine = engine_on(tiny_model())
    engine.model.tap.is_possible = False
    with pytest.raises(InvalidField, match="no hidden states"):
        engine.add(wanted("a", [5] * 10, "last"))
    engine.add(Submission("b", [5] * 10, greedy(2)))
    assert len(tokens_of(run(engine)["b"])) == 2


@pytest.mark.parametrize("name", rest_in_soak(SERVED, "llama", "gpt2", "llama4_text", "qwen3_next"))
def test_hidden_states_of_every_architecture_are_those_before_its_output_projection(name: str) -> None:
    module = build(name, SERVED[name])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 120, (length,), generator=generator) for length in (9, 33)]
    references = [hidden_states(module, prompt) for prompt in prompts]
    model, seen = wrap_module(module), list[torch.Tensor]()
    forward = LoadedModel.forward

    def watched(self: LoadedModel, *inputs: Any) -> torch.Tensor:
        logits = forward(self, *inputs)
        assert self.tap.hidden is not None
        seen.append(self.tap.hidden.clone())
        return logits

    steps = random_steps([9, 33], 0)
    with pytest.MonkeyPatch.context() as patch, model.tap.opened():
        patch.setattr(LoadedModel, "forward", watched)
        through_pages(model, prompts, steps)
    for parts, hidden in zip(steps, seen, strict=True):
        lengths = [end - first for _, first, end in parts]
        for (sequence, first, end), part in zip(parts, hidden.split(lengths), strict=True):
            torch.testing.assert_close(part, references[sequence][first:end], atol=2e-3, rtol=2e-3)


@torch.inference_mode()
def hidden_states(module: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states [T, E] of transformers' own forward."""
    module.set_attn_implementation("eager")
    base = module.base_model if module.base_model is not module else module.model  # Llama 4 names another prefix
    hidden: torch.Tensor = base(input_ids=prompt[None], use_cache=False).last_hidden_state[0]
    return hidden
