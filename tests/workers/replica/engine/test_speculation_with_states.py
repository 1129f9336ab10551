"""Engines of models with recurrent layers that verify drafts give the tokens of those that do not.

A rejected draft takes such a request back to the state before the drafts.
"""

import random
from pathlib import Path

import pytest

from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import Status, TokenDelta
from tests.sweeps import rest_in_soak
from tests.workers.ranks import saved
from tests.workers.replica.engines import before_each_step, tokens_of
from tests.workers.replica.speculating import (
    NUM_REQUESTS,
    History,
    Oracle,
    check_history,
    check_request,
    engine_of,
    expected,
    fixed,
    forms,
    grammar_of,
    least_pages,
    module,
    serve,
    speculating,
)

NAMES = ["qwen3_next", "granitemoehybrid", "falcon_h1", "lfm2 conv"]
"""A gated delta net, two models with Mamba-2, the second with attention in the same layers, and short convolutions."""


def draft_counts(engine: Engine) -> tuple[int, int]:
    """Return how many drafts were verified, and how many of them accepted."""
    assert engine.scheduler.verification is not None
    totals = engine.scheduler.verification.totals
    return totals.num_tokens, sum(totals.num_accepted_at)


@pytest.mark.parametrize("name", rest_in_soak(NAMES, "lfm2 conv"))
def test_any_history_of_a_recurrent_model_with_drafts_gives_the_tokens_without(name: str) -> None:
    totals = [check_history(seed, name) for seed in range(4)]
    num_accepted = sum(sum(each.num_accepted_at) for each in totals)
    assert 50 < num_accepted < 0.9 * sum(each.num_tokens for each in totals), "some are rejected"


@pytest.mark.parametrize("name", rest_in_soak(["qwen3_next", "lfm2 conv"], "qwen3_next"))
def test_requests_preempted_between_steps_get_the_tokens_without_drafts(name: str) -> None:
    """Some are preempted while accepted tokens are to be computed again."""
    reference, history = expected(3, name), History.random(3, NUM_REQUESTS)
    engine = engine_of(model=name, speculative_config=fixed(4))
    speculating(engine, Oracle({each: tokens_of(deltas) for each, deltas in reference.items()}, 0.8, random.Random(3)))
    for work in history.works:
        engine.add(work, grammar=grammar_of(work))
    found: dict[str, list[TokenDelta]] = {work.id: [] for work in history.works}
    num_behind = num_steps = 0
    while engine.has_work:
        for delta in engine.step().deltas:
            found[delta.request_id].append(delta)
        num_steps += 1
        for request in engine.scheduler.table.requests() if num_steps % 5 == 0 else ():
            if request.status is Status.RUNNING:
                num_behind += request.num_verified_tokens > 0
                engine.scheduler.table.preempt(request)
                break
    assert num_behind > 0
    for each, deltas in reference.items():
        check_request(found[each], deltas, was_aborted=False)


@pytest.mark.parametrize("method", rest_in_soak(["grammar", "draft_model"], "grammar"))
def test_every_method_gives_a_recurrent_model_the_tokens_without_drafts(tmp_path: Path, method: str) -> None:
    """The small model has no recurrent layers. Without spare pages few states have pages for a second one."""
    small = {"model": str(saved(module(), tmp_path))} if method == "draft_model" else {}
    config = {"method": method, "num_speculative_tokens": 6, "adaptive": False, **small}
    history = History(forms(), [*range(len(forms()))], {})
    reference = serve(engine_of(model="qwen3_next"), history)[0]
    engine = engine_of(least_pages("qwen3_next"), "qwen3_next", speculative_config=config, max_num_seqs=4)
    found = serve(engine, history)[0]
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    num_drafted, num_accepted = draft_counts(engine)
    assert num_drafted >= num_accepted > 50
    assert method != "grammar" or num_accepted >= 0.9 * num_drafted


def test_drafts_that_seconds_pay_for_give_the_tokens_without_in_fewer_steps() -> None:
    """With a step of nearly the same seconds whatever its rows, drafts of which some are wrong still pay."""
    reference, history = expected(1, "lfm2 conv"), History.random(1, NUM_REQUESTS)
    answers = {name: tokens_of(deltas) for name, deltas in reference.items()}
    config = {"method": "ngram", "num_speculative_tokens": 4}
    num_steps = []
    for share_right in (0.0, 0.8):
        engine = engine_of(model="lfm2 conv", speculative_config=config)
        engine.scheduler.learn(StepCost(base=1e-2, per_prefill_token=1e-5, per_decode=1e-5), overrun=1.0)
        speculating(engine, Oracle(answers, share_right, random.Random(1)))
        steps = list[Batch]()
        before_each_step(engine, steps.append)
        found, aborted = serve(engine, History(history.works, [0] * NUM_REQUESTS, {}))
        for name, deltas in reference.items():
            check_request(found[name], deltas, name in aborted)
        num_steps.append(len(steps))
    assert num_steps[1] < 0.7 * num_steps[0]


def test_small_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    config = {"model": str(saved(module("lfm2 conv"), tmp_path)), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="has recurrent layers: a small model that drafts may have none"):
        engine_of(model="qwen3_next", speculative_config=config)
