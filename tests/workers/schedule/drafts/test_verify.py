"""Drafts in a step: what fits, what it takes from others, and what is given back."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.drafts.drafting import DraftPolicy, FreeDrafts
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.fast_forward import steady_steps
from crossdock.workers.schedule.request.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.scheduler import Scheduler
from tests.workers.schedule.model_free_replica import CLASSES, new_request, new_scheduler

FIXED = SpeculativeConfig(method="ngram", num_speculative_tokens=6, adaptive=False)
COST = StepCost(base=1e-3, per_prefill_token=1e-3, per_decode=1e-3)


def scheduler_of(*requests: Request, **config: Any) -> Scheduler:
    """Return a scheduler whose requests have made their first token."""
    scheduler = new_scheduler(drafting=DraftPolicy(FIXED), slo_classes=CLASSES, admission="queue", **config)
    for request in requests:
        scheduler.add(request)
    while any(not request.is_decoding for request in requests):
        land(scheduler, scheduler.schedule(0.0), {})
    return scheduler


def land(scheduler: Scheduler, batch: Batch, accepted: Mapping[str, int], now: float = 0.0) -> dict[str, list[int]]:
    """End a step in which so many drafts of each request are accepted. Returns the new tokens."""
    deltas = scheduler.update(batch, {part.request.id: sampled(part, accepted) for part in batch.scheduled}, now)
    return {delta.request_id: delta.token_ids for delta in deltas}


def sampled(part: Scheduled, accepted: Mapping[str, int]) -> SampledToken:
    count = accepted.get(part.request.id, 0)
    return SampledToken(99, accepted=[SampledToken(token) for token in part.drafts[:count]])


def num_pages(scheduler: Scheduler, request: Request) -> int:
    return len(scheduler.pages.pages_of(request.owner))


def test_stream_with_drafts_gets_the_accepted_ones_and_one_more() -> None:
    stream = new_request("a", [1, 2, 3], max_tokens=20)
    scheduler = scheduler_of(stream)
    batch = scheduler.schedule(0.0, {"a": [11, 12, 13, 14, 15, 16]})
    [part] = batch.scheduled
    assert (part.start, part.num_tokens, part.drafts) == (3, 7, [11, 12, 13, 14, 15, 16])
    assert (batch.num_decodes, batch.num_drafts, batch.work.drafts) == (1, 6, 6)
    assert num_pages(scheduler, stream) == 3, "10 tokens in pages of 4"
    assert land(scheduler, batch, {"a": 2}) == {"a": [11, 12, 99]}
    assert stream.token_ids == [1, 2, 3, 99, 11, 12, 99]
    assert (stream.num_computed_tokens, num_pages(scheduler, stream)) == (6, 2), "rejected drafts keep no page"
    assert stream.drafts == (6, 2)
    assert scheduler.verification is not None
    assert scheduler.verification.totals.num_accepted_at == [1, 1, 0, 0, 0, 0]


def test_decodes_without_drafts_come_first() -> None:
    scheduler = scheduler_of(*(new_request(name, [1], max_tokens=20) for name in "abc"))
    batch = scheduler.schedule(0.0, {"a": [5], "b": [], "c": [6, 7]})
    assert [(part.request.id, len(part.drafts)) for part in batch.scheduled] == [("b", 0), ("a", 1), ("c", 2)]
    assert batch.num_decodes == 3


def test_drafts_preempt_no_request_and_take_the_pages_that_are_left() -> None:
    first, second = new_request("a", [1] * 7, max_tokens=9), new_request("b", [2] * 7, max_tokens=9)
    scheduler = scheduler_of(first, second)
    scheduler.pages.allocate("another owner", scheduler.pages.block_pool.num_available - 1)
    batch = scheduler.schedule(0.0, {"a": [5] * 6, "b": [6] * 6})  # 8 tokens in 2 pages each, so that one page is left
    assert [(part.request.id, len(part.drafts)) for part in batch.scheduled] == [("b", 0), ("a", 4)]
    assert scheduler.table.num_preemptions == 0


def test_drafts_beside_a_prompt_leave_its_chunk_as_it_is() -> None:
    for drafts in ({}, {"a": [5] * 6}):
        stream, prompt = new_request("a", [1], max_tokens=20), new_request("b", [2] * 60)
        scheduler = scheduler_of(stream, chunk_policy="fixed")
        scheduler.add(prompt)
        batch = scheduler.schedule(0.0, drafts)
        assert [(part.request.id, part.num_tokens) for part in batch.scheduled] == [
            ("a", 1 + 3 * bool(drafts)),
            ("b", 28),
        ]


@pytest.mark.parametrize(("due", "expected"), [(0.02, 6), (0.0075, 3), (0.004, 0), (0.001, 6)])
def test_drafts_fit_the_slack_of_streams_that_are_in_time(due: float, expected: int) -> None:
    """A step of two takes 3 ms, and a draft 1 ms more. 0.9 of the slack may be filled. A late stream bounds nothing."""
    scheduler = scheduler_of(new_request("a", [1], max_tokens=20), other := new_request("b", [2], max_tokens=20))
    scheduler.learn(COST, overrun=1.0)
    for stream in scheduler.table.running:
        stream.due = 1.0
    other.due = due
    batch = scheduler.schedule(0.0, {"a": [5] * 6})
    assert batch.num_drafts == expected


def test_step_has_so_many_drafts_that_their_logits_fit() -> None:
    names = [f"{number}" for number in range(60)]
    streams = [new_request(name, [number + 1], max_tokens=20) for number, name in enumerate(names)]
    scheduler = scheduler_of(*streams, num_pages=400, max_num_batched_tokens=2000, max_num_seqs=80)
    batch = scheduler.schedule(0.0, dict.fromkeys(names, [5] * 6))
    assert [len(part.drafts) for part in batch.scheduled] == [4] * 60, "240 of at most 256"


def test_several_tokens_at_once_move_the_deadline_by_the_longest_gap_at_most() -> None:
    stream = new_request("a", [1], max_tokens=20)
    scheduler = scheduler_of(stream)
    land(scheduler, scheduler.schedule(1.0, {"a": [5] * 4}), {"a": 4}, now=1.0)
    assert stream.due == pytest.approx(1.0 + 1.25 * 0.02)


class Dictated(FreeDrafts):
    """Grammars that dictate so many tokens of each request."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = counts

    def forced(self, request_ids: Sequence[str]) -> Mapping[str, int]:
        return {name: self.counts[name] for name in request_ids if name in self.counts}


@pytest.mark.parametrize("adaptive", [True, False])
def test_method_grammar_drafts_what_grammars_dictate_alone(adaptive: bool) -> None:
    config = SpeculativeConfig(method="grammar", num_speculative_tokens=6, adaptive=adaptive)
    scheduler = new_scheduler(drafting=DraftPolicy(config, Dictated({"a": 3, "b": 9})), admission="queue")
    for name, max_tokens in (("a", 20), ("b", 6), ("c", 20)):
        scheduler.add(new_request(name, [1, 2, 3], max_tokens=max_tokens))
    while any(not request.is_decoding for request in scheduler.table.requests()):
        land(scheduler, scheduler.schedule(0.0), {})
    scheduler.learn(StepCost(base=1.0, per_prefill_token=1e-3, per_decode=1e-3), overrun=1.0)
    for stream in scheduler.table.running:
        stream.due = 1e6
    assert scheduler.choose_streams(0.0).wanted_drafts == {"a": 3, "b": 4}, "b may get five more tokens"


def test_share_of_a_gap_follows_from_accepted_drafts_and_longer_steps() -> None:
    """Steps of 2 ms make one token, steps of 4 ms with two drafts three: 2/3 of the time. Half of them have drafts."""
    stream = new_request("a", [1], max_tokens=990)
    scheduler = scheduler_of(stream, num_pages=400, max_model_len=1000)
    scheduler.learn(COST, overrun=1.0)
    assert scheduler.verification is not None
    for number in range(400):
        stream.due = 1e6
        assert scheduler.choose_streams(0.0).wanted_drafts == {"a": 6}
        land(scheduler, scheduler.schedule(0.0, {"a": [5, 5]} if number % 2 else {}), {"a": 2})
    assert scheduler.verification.gap_share == pytest.approx((1 + 2 / 3) / 2, abs=0.01)


def test_scheduler_with_drafts_takes_one_step_at_a_time() -> None:
    scheduler = scheduler_of(new_request("a", [1], max_tokens=20))
    assert steady_steps(scheduler.table, scheduler.forecast.cost, scheduler.schedule(0.0)) == 1
