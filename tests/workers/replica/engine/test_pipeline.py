"""Steps that begin ahead of the tokens of the step before give what they would have given after them."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.runner import Runner
from crossdock.workers.model.sampling import heads
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import PendingTokens, sample
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine, Step
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Grammar, SamplingParams, Submission
from tests.sweeps import rest_in_soak
from tests.workers.architectures import build
from tests.workers.replica.driven import driving
from tests.workers.replica.speculating import (
    NUM_REQUESTS,
    History,
    check_request,
    engine_of,
    grammar_of,
    least_pages,
    serve,
)
from tests.workers.replica.speculating import (
    expected as expected_of,
)

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95, "top_k": 60},
    {"min_p": 0.1, "min_tokens": 9},
    {"logit_bias": ((5, 4.0), (9, -3.0)), "allowed_token_ids": tuple(range(2, 60))},
    {"stop_token_ids": tuple(range(20, 40)), "temperature": 1.5},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.0},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.1, "min_tokens": 12, "top_p": 0.9},
]
MORE_KINDS: list[dict[str, Any]] = [
    {"bad_words": ((5, 6), (7, 8, 9))},
    {"logprobs": 2},
    {"logprobs": 1, "logprobs_mode": "processed_logprobs", "presence_penalty": 0.7, "top_p": 0.9},
    {"prompt_logprobs": 1, "temperature": 0.0},
]
CLASSES = (SloClass(name="standard", ttft_s=1e3, tpot_s=1e3), SloClass(name="batch", ttft_s=1e3, tpot_s=1e3))


def engine(**config: Any) -> Engine:
    settings: dict[str, Any] = {
        "max_num_batched_tokens": 80,
        "max_num_seqs": 9,
        "kv_cache_memory": ByteSize(8 << 20),
        "slo_classes": CLASSES,
    }
    return new_engine(wrap_module(build("llama", {})), EngineConfig(**settings | config))


def submissions(kinds: list[dict[str, Any]], count: int = 28) -> list[Submission]:
    generator = torch.Generator().manual_seed(4)
    works = []
    for number in range(count):
        length = int(torch.randint(1, 180, (), generator=generator))
        prompt = torch.randint(3, 120, (length,), generator=generator).tolist()
        max_tokens = (0, 1, 2, 60)[number % 4] if number < 4 else 5 + 7 * number % 60
        params = SamplingParams(max_tokens=max_tokens, seed=number, **kinds[number % len(kinds)])
        works.append(Submission(f"{number}", prompt, params, slo_class=CLASSES[number % 3 == 0].name))
    return works


def served(engine: Engine, works: list[Submission]) -> tuple[dict[str, list[TokenDelta]], list[Step]]:
    """Add four requests at first, then one more with every step. Returns all deltas, by request, and all steps."""
    waiting, steps = iter(works), []
    for _ in range(4):
        engine.add(next(waiting))
    while engine.has_work:
        steps.append(engine.step())
        if (work := next(waiting, None)) is not None:
            engine.add(work)
    deltas: dict[str, list[TokenDelta]] = {}
    for step in steps:
        for delta in step.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    assert next(waiting, None) is None
    assert engine.pages.counts().owned == 0
    return deltas, steps


@cache
def served_in_turn(has_all_kinds: bool, memory: int) -> dict[str, list[TokenDelta]]:
    in_turn = engine(async_scheduling=False, kv_cache_memory=ByteSize(memory))
    answers, _ = served(in_turn, submissions(KINDS + MORE_KINDS * has_all_kinds))
    assert bool(in_turn.scheduler.table.num_preemptions) is (memory < 1 << 20)
    return answers


@pytest.mark.parametrize(
    ("has_all_kinds", "memory", "widths"),
    [
        pytest.param(False, 400_000, (4, 8), id="plain-preempting-a head is too little"),
        pytest.param(True, 400_000, (256, 4096), id="all-preempting-a head is enough"),
        pytest.param(True, 8 << 20, (4, 8), id="all-ample-a head is too little"),
    ],
)
def test_steps_ahead_give_the_deltas_of_steps_in_turn(
    has_all_kinds: bool, memory: int, widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the device does not find a token itself, since its sorted head of the logits is too short."""
    in_turn = served_in_turn(has_all_kinds, memory)
    monkeypatch.setattr(heads, "WIDTHS", widths)
    works = submissions(KINDS + MORE_KINDS * has_all_kinds)
    running_ahead = engine(async_scheduling=True, kv_cache_memory=ByteSize(memory))
    ahead, _ = served(running_ahead, works)
    assert bool(running_ahead.scheduler.table.num_preemptions) is (memory < 1 << 20)
    assert in_turn.keys() == ahead.keys() == {work.id for work in works}
    assert sum(deltas[-1].stop_token_id is not None for deltas in in_turn.values()) > 3
    for name, expected in in_turn.items():
        found = ahead[name]
        assert [delta.token_ids for delta in found] == [delta.token_ids for delta in expected]
        assert [delta.finish_reason for delta in found] == [delta.finish_reason for delta in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert [entry.token_id for entry in ours.logprobs or ()] == [
                entry.token_id for entry in theirs.logprobs or ()
            ]
            values = [entry.logprob for entry in theirs.logprobs or ()]
            assert [entry.logprob for entry in ours.logprobs or ()] == pytest.approx(values, abs=1e-4)
            assert len(ours.prompt_logprobs or ()) == len(theirs.prompt_logprobs or ())


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the actions of an engine, in one letter each: b, it begins a step; r, it reads tokens."""
    actions: list[str] = []
    finish, read = Runner.finish, PendingTokens.read

    def begins(runner: Runner, *args: Any) -> Any:
        actions.append("b")
        return finish(runner, *args)

    def reads(drawn: PendingTokens) -> Any:
        actions.append("r")
        return read(drawn)

    monkeypatch.setattr(Runner, "finish", begins)
    monkeypatch.setattr(PendingTokens, "read", reads)
    return actions


def acted(engine: Engine, order: list[str]) -> str:
    """Return the actions of the steps to the end of all work."""
    order.clear()
    while engine.has_work:
        engine.step()
    return "".join(order)


def test_step_ahead_begins_before_the_tokens_of_the_step_before_are_read(order: list[str]) -> None:
    ahead = engine(async_scheduling=True)
    ahead.add(Submission("a", list(range(3, 103)), SamplingParams(max_tokens=5, ignore_eos=True)))  # two chunks
    assert acted(ahead, order) == "b" + "br" * 5 + "r", "and none behind the step that is known to be the last"
    params: list[dict[str, Any]] = [{"presence_penalty": 0.1, "repetition_penalty": 1.2}, {"min_tokens": 4}, {}]
    for number, each in enumerate(params):
        ahead.add(Submission(f"{number}", [5, 6], SamplingParams(max_tokens=5, ignore_eos=True, **each)))
    assert acted(ahead, order) == "b" + "br" * 4 + "r", "penalties and min_tokens look back on the device"
    ahead.add(Submission("a", [5, 6], SamplingParams(max_tokens=5, ignore_eos=True, bad_words=((7, 8),))))
    assert acted(ahead, order) == "b" + "br" * 4 + "r", "the device computes while the host reads the token before"
    grammar = Submission("a", [5, 6], SamplingParams(max_tokens=5, grammar=Grammar("regex", "[ab]{9}")))
    ahead = engine_of(async_scheduling=True)  # its vocabulary has all bytes
    ahead.add(grammar, grammar=grammar_of(grammar))
    assert acted(ahead, order) == "b" + "br" * 4 + "r", "a grammar's mask is made while the device computes"
    ahead.add(Submission("a", [5, 6], SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1)))
    assert acted(ahead, order) == "b" + "br" * 4 + "r", "so are log-probabilities"


@pytest.mark.parametrize("seed", rest_in_soak(range(100), 0, 1))
def test_history_served_ahead_gives_the_deltas_of_steps_in_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of requests, grammars too; requests that come, end and are aborted at any time; few pages or many."""
    draw, reference = random.Random(seed), expected_of(seed)
    monkeypatch.setattr(heads, "WIDTHS", draw.choice([(4, 8), (256, 4096)]))
    pages = draw.choice([0, 2, 6, 92]) + least_pages("llama")
    ahead = engine_of(pages, async_scheduling=True, max_num_batched_tokens=draw.choice([24, 80]))
    found, aborted = serve(ahead, History.random(seed, NUM_REQUESTS))
    for name, deltas in reference.items():
        check_request(found[name], deltas, name in aborted)
    assert ahead.pages.counts().owned == 0


def test_steps_ahead_take_the_time_between_their_ends() -> None:
    _, steps = served(engine(async_scheduling=True), submissions(KINDS, 10))
    for before, after in pairwise(steps):
        assert after.started >= before.started + before.seconds
        assert after.seconds > 0


def test_step_that_fails_behind_another_ends_all_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = engine(async_scheduling=True)
    works = submissions(KINDS, 10)
    expected, _ = served(ahead, works)
    for work in works[4:10]:
        ahead.add(work)
    ahead.step()
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ahead.step()
    failed = ahead.fail_all("division")
    assert {request.id for request, _ in failed} == {work.id for work in works[4:10]}
    assert not ahead.has_work
    assert ahead.pages.counts().owned == 0
    again, _ = served(ahead, works)
    assert {name: [delta.token_ids for delta in deltas] for name, deltas in again.items()} == {
        name: [delta.token_ids for delta in deltas] for name, deltas in expected.items()
    }


async def test_abort_with_two_steps_in_flight_frees_all() -> None:
    async with driving(async_scheduling=True) as driven:
        await driven.submit("stays", 40, max_tokens=60)
        await driven.submit("leaves", 40, max_tokens=200)
        for number in range(4):
            await driven.run(f"short {number}", 5)
        await driven.thread.abort([("leaves", 0)])
        await driven.ended["stays"].wait()
        await driven.thread.call(lambda: None)
        found = driven.timeline("leaves")
        assert (found["state"], found["finish_reason"]) == ("finished", "abort")
        assert driven.engine.pages.counts().owned == 0


async def test_step_in_flight_that_fails_during_an_abort_ends_its_requests_and_not_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with driving(async_scheduling=True) as driven:
        await driven.submit("stays", 40, max_tokens=200)
        await driven.submit("leaves", 40, max_tokens=200)
        for number in range(2):
            await driven.run(f"short {number}", 5)

        def fail(_: PendingTokens) -> None:
            raise RuntimeError("broken on purpose")

        gate = await driven.hold()
        with monkeypatch.context() as patch:
            patch.setattr(PendingTokens, "read", fail)
            assert driven.engine.is_in_flight("leaves")
            await driven.thread.abort([("leaves", 0)])
            gate.set()
            await driven.ended["stays"].wait()
            assert driven.timeline("stays")["finish_reason"] == "error"
        assert driven.thread.is_alive
        assert driven.engine.pages.counts().owned == 0
        await driven.run("after", 40)
        assert driven.timeline("after")["finish_reason"] == "length"


def test_async_scheduling_with_stages_is_refused() -> None:
    model = wrap_module(build("llama", {}))
    model = replace(model, part=replace(model.part, position=RankPosition(1, num_stages=2)))
    with pytest.raises(ValueError, match="async_scheduling must be false or null"):
        new_engine(model, EngineConfig(async_scheduling=True, kv_cache_memory=ByteSize(8 << 20)))


def test_tokens_drawn_and_read_equal_those_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "WIDTHS", (8, 16))
    logits = torch.randn(21, 300, generator=torch.Generator().manual_seed(0))

    def rows() -> list[SampleRow]:
        params = [SamplingParams(seed=i, **KINDS[i % len(KINDS)]) for i in range(len(logits))]
        return [SampleRow(row_params, list(range(i + 2)), 2, (7,)) for i, row_params in enumerate(params)]

    expected = [token.token_id for token in sample(logits, rows())]
    given: Tensor = logits.clone()
    drawn = PendingTokens(given, rows())
    given.fill_(0)
    tokens, late = drawn.read()
    assert [token.token_id for token in tokens] == expected
    assert late == [i for i, token_id in enumerate(drawn.on_device.tolist()) if token_id < 0]
    assert 0 < len(late) < len(expected)
    assert PendingTokens(logits[:0], []).read() == ([], [])
