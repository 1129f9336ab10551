"""An engine that verifies drafts gives the tokens of one that does not, whatever is drafted."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import SamplingParams
from tests.sweeps import rest_in_soak
from tests.workers.quantised import CASES, SIZES, write
from tests.workers.ranks import DIVISIONS, Ranks, saved
from tests.workers.replica.driven import driving
from tests.workers.replica.engines import tokens_of
from tests.workers.replica.speculating import (
    MAX_MODEL_LEN,
    NUM_REQUESTS,
    VOCAB_SIZE,
    History,
    Oracle,
    check_history,
    check_request,
    engine_of,
    expected,
    fixed,
    forms,
    module,
    serve,
    speculating,
)
from tests.workers.worker_groups import engine_of_ranks

FORMS = History(forms(), [*range(len(forms()))], {})


@pytest.mark.parametrize("seed", range(3))  # the soak has a thousand
def test_any_history_with_drafts_gives_the_tokens_without(seed: int) -> None:
    check_history(seed)


@pytest.mark.parametrize("seed", rest_in_soak([2, 5, 9], 2))
def test_request_that_goes_on_elsewhere_with_drafts_gets_the_rest_of_its_tokens(seed: int) -> None:
    """As after a loss: the client has some tokens, and the grammar begins after these."""
    history, reference = History.random(seed, NUM_REQUESTS), expected(seed)
    works = [
        replace(work, output_token_ids=tokens_of(reference[work.id])[: len(tokens_of(reference[work.id])) // 2])
        for work in history.works
    ]
    answers = {name: tokens_of(deltas)[len(tokens_of(deltas)) // 2 :] for name, deltas in reference.items()}
    engine = speculating(engine_of(speculative_config=fixed(4)), Oracle(answers, 0.8, random.Random(seed)))
    found, _ = serve(engine, History(works, history.arrivals, {}))
    assert {name: tokens_of(deltas) for name, deltas in found.items()} == answers


@pytest.mark.parametrize("is_quantised", [False, True])
def test_engine_whose_drafts_come_from_a_model_gives_the_tokens_without(tmp_path: Path, is_quantised: bool) -> None:
    """The small model is the same one, or the same in AWQ: under greedy sampling, its drafts are accepted."""
    sizes = SIZES | {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    target = write(tmp_path, CASES["awq"], sizes=sizes) if is_quantised else module()
    path = tmp_path if is_quantised else saved(target, tmp_path)
    config = {"model": str(path), "num_speculative_tokens": 3, "adaptive": False, "draft_kv_cache_memory": 4 << 20}
    greedy = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    works = [replace(work, sampling=greedy) for work in History.random(4, NUM_REQUESTS).works]
    history = History(works, [*range(NUM_REQUESTS)], {})
    engine = engine_of(target=target, speculative_config=config)
    found, reference = serve(engine, history)[0], serve(engine_of(target=target), history)[0]
    for name, deltas in reference.items():
        check_request(found[name], deltas, was_aborted=False)
    assert engine.scheduler.verification is not None
    totals = engine.scheduler.verification.totals
    assert sum(totals.num_accepted_at) > 0.9 * totals.num_tokens > 100


@pytest.fixture(scope="module")
def written_forms() -> dict[str, list[TokenDelta]]:
    """The deltas of `forms` without drafts."""
    return serve(engine_of(), FORMS)[0]


@pytest.mark.parametrize(
    ("method", "adaptive"), [("grammar", False), ("ngram", True), ("suffix", False), ("draft_model", True)]
)
def test_tokens_that_grammars_dictate_are_drafted_and_accepted_under_every_method(
    tmp_path: Path, written_forms: dict[str, list[TokenDelta]], method: str, adaptive: bool
) -> None:
    """With 8 pages, requests wait for each other's pages, or are preempted and computed again."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 6, "adaptive": adaptive}
    config |= {"model": str(saved(module(), tmp_path))} if method == "draft_model" else {}
    engine = engine_of(8, speculative_config=config, max_num_seqs=4)
    found = serve(engine, FORMS)[0]
    for name, deltas in written_forms.items():
        check_request(found[name], deltas, was_aborted=False)
    assert engine.scheduler.verification is not None
    policy = engine.scheduler.verification.policy
    assert policy.forced > 60
    assert policy.accepted >= 0.9 * policy.forced, "some come after the last token that a request may have"
    assert method != "grammar" or policy.drafted == policy.forced


async def test_timeline_and_metrics_count_drafts_and_all_tokens_of_a_step() -> None:
    async with driving(is_warm=False, speculative_config=fixed(3)) as driven:
        await driven.run("a", 40, max_tokens=60)
        timeline = driven.timeline("a")
        drafted, accepted = timeline["num_drafted_tokens"], timeline["num_accepted_tokens"]
        assert 0 < accepted < drafted
        assert timeline["num_output_tokens"] == 60 == driven.metric("crossdock_output_tokens_total")
        assert timeline["num_decode_steps"] == 59 - accepted
        assert driven.metric("crossdock_draft_tokens_total") == drafted
        assert driven.metric("crossdock_draft_tokens_accepted_total") == accepted
        assert driven.metric("crossdock_draft_tokens_accepted_at_total") == accepted
        assert driven.metric("crossdock_draft_tokens_accepted_at_total", position="0") >= accepted / 3


def test_steps_ahead_of_known_tokens_are_refused_with_drafts() -> None:
    with pytest.raises(ValueError, match="async_scheduling must be false or null with speculative_config"):
        engine_of(speculative_config=fixed(4), async_scheduling=True)


@pytest.mark.parametrize("division", rest_in_soak(DIVISIONS, (2, 2)))
def test_worker_group_with_drafts_gives_the_tokens_of_one_rank_without(
    ranks: Ranks, tmp_path: Path, division: tuple[int, int]
) -> None:
    path, reference = saved(module(), tmp_path), expected(1)
    answers = {name: tokens_of(deltas) for name, deltas in reference.items()}
    config = {"speculative_config": fixed(4), "admission": "queue"}
    with engine_of_ranks(ranks, path, *division, **config) as engine:
        found, aborted = serve(
            speculating(engine, Oracle(answers, 0.8, random.Random(1))), History.random(1, NUM_REQUESTS)
        )
        assert engine.scheduler.verification is not None
        assert sum(engine.scheduler.verification.totals.num_accepted_at) > 20
    for name, deltas in reference.items():
        check_request(found[name], deltas, name in aborted)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_hundred_histories_with_drafts_give_the_tokens_without(first: int) -> None:
    assert sum(sum(check_history(seed).num_accepted_at) for seed in range(first, first + 100)) > 1000
    expected.cache_clear()
