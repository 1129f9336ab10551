"""Tiny engines, requests run to their end on one, and transformers' own tokens for the same prompts."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import ByteSize
from transformers import PreTrainedModel

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine, OnScheduled, Step
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.architectures import build

VOCAB_SIZE = 2000
MAX_MODEL_LEN = 1024


def tiny_model(max_model_len: int | None = None) -> LoadedModel:
    """Return a random fp32 llama of four layers that takes as many tokens as SmolLM2's tests need."""
    module = build("llama", {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN})
    return wrap_module(module, LoadOptions(max_model_len))


def engine_on(model: LoadedModel, num_pages: int = 1000, **config: Any) -> Engine:
    """Return an engine whose pool has `num_pages` pages. It refuses no request, however slow the machine."""
    memory = num_pages * model.layout(config.get("page_size", 16)).page_bytes
    settings = {"admission": "queue"} | config
    return new_engine(model, EngineConfig(kv_cache_memory=ByteSize(memory), **settings))


def before_each_step(engine: Engine, note: Callable[[Batch], None]) -> None:
    """Call `note` with the batch of each step before the engine computes the step."""
    step = engine.step

    def noted(on_scheduled: OnScheduled = lambda _: None) -> Step:
        def both(batch: Batch) -> None:
            on_scheduled(batch)
            note(batch)

        return step(both)

    engine.step = noted  # type: ignore[method-assign]


def run(engine: Engine) -> dict[str, list[TokenDelta]]:
    """Step until there is no work. Returns the deltas by request; no page may be owned in the end."""
    deltas: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step().deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    assert engine.pages.counts().owned == 0
    return deltas


def tokens_of(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def greedy(num_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, min_tokens=num_tokens, temperature=0.0, **params)


def served(engine: Engine, prompts: Sequence[list[int]], num_tokens: int, **fields: Any) -> list[list[int]]:
    """Return the greedy tokens after prompts that come at once. `fields`: others of each `Submission`."""
    for number, prompt in enumerate(prompts):
        engine.add(Submission(f"{number}", prompt, greedy(num_tokens), **fields))
    deltas = run(engine)
    return [tokens_of(deltas[f"{number}"]) for number in range(len(prompts))]


def generated(module: PreTrainedModel, prompts: Sequence[list[int]], num_tokens: int = 12) -> list[list[int]]:
    """Return transformers' greedy tokens after each prompt, none of which ends it. Our engine guesses them first.

    One pass of transformers over a prompt and its guess shows where the guess is wrong, and the right token there.
    Passes follow until the guess is what transformers chooses: so the answer is its own, however bad the guess was.
    """
    engine = engine_on(wrap_module(copy.deepcopy(module)), max_num_batched_tokens=512, admission="queue")
    guesses = served(engine, prompts, num_tokens)
    return [_chosen(module, prompt, guess) for prompt, guess in zip(prompts, guesses, strict=True)]


@torch.inference_mode()
def _chosen(module: PreTrainedModel, prompt: list[int], guess: list[int]) -> list[int]:
    while True:
        logits = module(input_ids=torch.tensor([prompt + guess[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        logits[:, module.config.eos_token_id] = -torch.inf
        chosen: list[int] = logits.argmax(-1).tolist()
        right = next((at for at, (ours, theirs) in enumerate(zip(guess, chosen, strict=True)) if ours != theirs), None)
        if right is None:
            return guess
        guess = guess[:right] + chosen[right:]
