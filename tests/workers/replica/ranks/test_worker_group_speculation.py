"""Ranks that verify drafts with recurrent layers give the tokens of one rank without drafts.

A rejected draft takes every rank back to its own part of the state. Two stages have two steps in flight: the second one
begins before the drafts of the first are verified.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import ByteSize

from crossdock.workers.replica.engine.engine import Engine
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engines import before_each_step, tokens_of
from tests.workers.replica.speculating import (
    NUM_REQUESTS,
    History,
    Oracle,
    check_request,
    expected,
    fixed,
    least_pages,
    module,
    recurrent_model,
    serve,
    speculating,
)
from tests.workers.worker_groups import engine_of_ranks

SEED = 3  # of a history whose outputs are long
NUM_SPARE = 16  # pages beside those without which an engine does not start: states for drafts are scarce
CASES = [("qwen3_next", (2, 1)), ("granitemoehybrid", (1, 2))]  # gated delta net, Mamba-2; tensor ranks, stages


@contextmanager
def drafting_worker_group(ranks: Ranks, folder: Path, name: str, division: tuple[int, int]) -> Iterator[Engine]:
    """Yield an engine on two ranks, which divide the bytes of each page."""
    page_bytes = recurrent_model(name).layout(16).page_bytes // 2
    memory = ByteSize((least_pages(name) + NUM_SPARE) * page_bytes)
    settings = {"kv_cache_memory": memory, "max_num_batched_tokens": 40, "admission": "queue"}
    path = saved(module(name), folder)
    with engine_of_ranks(ranks, path, *division, speculative_config=fixed(4), **settings) as engine:
        yield engine


def draft_known_tokens(engine: Engine, name: str) -> None:
    """Let the engine draft the tokens that the requests of the history are known to get, with some wrong ones."""
    answers = {each: tokens_of(deltas) for each, deltas in expected(SEED, name).items()}
    speculating(engine, Oracle(answers, 0.8, random.Random(SEED)))


@pytest.mark.parametrize(("name", "division"), CASES)
def test_any_history_of_ranks_with_drafts_gives_the_tokens_of_one_without(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    num_flights = set[int]()
    with drafting_worker_group(ranks, tmp_path, name, division) as engine:
        before_each_step(engine, lambda _: num_flights.add(1 + len(engine.pipeline.batches)))
        draft_known_tokens(engine, name)
        found, aborted = serve(engine, History.random(SEED, NUM_REQUESTS))
        for each, deltas in expected(SEED, name).items():
            check_request(found[each], deltas, each in aborted)
        assert engine.pages.counts().owned == 0
        assert engine.scheduler.verification is not None
        totals = engine.scheduler.verification.totals
        assert 20 < sum(totals.num_accepted_at) < 0.95 * totals.num_tokens, "some are rejected"
    assert max(num_flights) == division[1]
