"""Requests for which the model computes NaN end with an error that says so. The requests beside them go on."""

import copy
from typing import Any

import pytest
import torch

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.metrics import EngineMetrics
from crossdock.workers.schedule.request.failures import NOT_FINITE
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.architectures import build
from tests.workers.replica.engines import engine_on, greedy, run, tokens_of

BROKEN = 77  # a token whose embedding becomes NaN
GOOD = [[7, 3, 9, 11, 5], [20 + i for i in range(50)]]


def engine_of(module: Any, **settings: Any) -> Engine:
    return engine_on(wrap_module(copy.deepcopy(module)), **settings)


@torch.no_grad()
def break_weight(engine: Engine, name: str, row: int) -> None:
    engine.model.module.state_dict()[name][row] = float("nan")


def is_failed(deltas: list[TokenDelta]) -> bool:
    last = deltas[-1]
    if last.finish_reason is FinishReason.ERROR:
        assert (last.error, last.is_not_finite, last.error_field) == (NOT_FINITE, True, "")
        assert not tokens_of(deltas), "no token is made of NaN"
    return last.finish_reason is FinishReason.ERROR


KINDS: dict[str, SamplingParams] = {
    "greedy": greedy(6),
    "sampled": SamplingParams(max_tokens=6, seed=3, top_p=0.9),
    "log-probabilities": greedy(6, logprobs=2),
    "prompt": greedy(6, prompt_logprobs=1),
    "last state": greedy(1, pooling="last"),
    "mean state": greedy(1, pooling="mean"),
    "masked": greedy(6, allowed_token_ids=(5, 6, 7)),
}


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 64}], ids=str)
def test_request_whose_numbers_are_not_finite_ends_and_others_go_on(settings: dict[str, Any]) -> None:
    module = build("llama", {})
    fine = engine_of(module)
    engine = engine_of(module, **settings)
    break_weight(engine, "model.embed_tokens.weight", BROKEN)
    bad = [5, 9, BROKEN, *range(30, 70)]
    for name, sampling in KINDS.items():
        for number, prompt in enumerate(GOOD):
            fine.add(Submission(f"{name} {number}", prompt, sampling))
            engine.add(Submission(f"{name} {number}", prompt, sampling))
        engine.add(Submission(f"{name} bad", bad, sampling))
    expected, found = run(fine), run(engine)
    assert {name for name, deltas in found.items() if is_failed(deltas)} == {f"{name} bad" for name in KINDS}
    for name, deltas in expected.items():
        assert tokens_of(found[name]) == tokens_of(deltas)
    assert engine.num_not_finite == len(KINDS)
    assert f"crossdock_not_finite_total {len(KINDS)}.0" in EngineMetrics(engine).text()


def test_prompt_whose_log_probabilities_alone_are_not_finite_ends_with_the_error() -> None:
    """The weights are broken in the prompt's first chunk alone: a token could be drawn."""
    engine = engine_of(build("llama", {}), max_num_batched_tokens=64)
    norm = engine.model.module.model.norm.weight
    saved = norm.clone()
    engine.add(Submission("a", [3 + i % 90 for i in range(200)], greedy(4, prompt_logprobs=0)))
    break_weight(engine, "model.norm.weight", 3)
    engine.step()
    with torch.no_grad():
        norm.copy_(saved)
    assert is_failed(run(engine)["a"])


SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


@pytest.mark.parametrize(
    "settings", [{}, {"speculative_config": SPECULATION}, {"async_scheduling": True}], ids=["", "drafts", "ahead"]
)
def test_stream_that_breaks_in_the_middle_ends_with_the_error(settings: dict[str, Any]) -> None:
    """The tokens before are delivered, and nothing is left of the request."""
    engine = engine_of(build("llama", {}), **settings)
    for name in ("one", "two"):
        engine.add(Submission(name, [9 + i % 3 for i in range(33)], greedy(40)))
    before = [delta for _ in range(6) for delta in engine.step().deltas]
    assert len(tokens_of(before)) >= 8
    assert not any(delta.is_not_finite for delta in before)
    break_weight(engine, "model.norm.weight", 0)
    after = run(engine)
    assert [deltas[-1].is_not_finite for deltas in after.values()] == [True, True]
    assert {deltas[-1].finish_reason for deltas in after.values()} == {FinishReason.ERROR}
    assert after.keys() == {"one", "two"}
    assert not engine.scheduler.table.requests()
