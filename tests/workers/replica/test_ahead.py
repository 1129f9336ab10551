"""Steps that begin before the tokens of those before them are known give what they would have given after."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor

from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.runner import Runner
from crossdock.workers.model.sampling import sampler
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import PendingTokens, sample
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine, Step
from crossdock.workers.schedule.request import SamplingParams, Submission, TokenDelta
from crossdock.workers.schedule.slo import SloClass
from tests.workers.architectures import build

from .test_engine_thread import Driven, driven

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.3},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95, "top_k": 60},
    {"min_p": 0.1, "min_tokens": 9},
    {"logit_bias": ((5, 4.0), (9, -3.0)), "allowed_token_ids": tuple(range(2, 60))},
    {"stop_token_ids": tuple(range(20, 40)), "temperature": 1.5},
]
NOT_PLAIN: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"logprobs": 2},
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
    return Engine(wrap_module(build("llama", {})), EngineConfig(**settings | config))


def submissions(kinds: list[dict[str, Any]], count: int = 40) -> list[Submission]:
    generator = torch.Generator().manual_seed(4)
    works = []
    for number in range(count):
        length = int(torch.randint(1, 180, (), generator=generator))
        prompt = torch.randint(3, 120, (length,), generator=generator).tolist()
        max_tokens = (0, 1, 2, 60)[number % 4] if number < 4 else 5 + 7 * number % 60
        params = SamplingParams(max_tokens=max_tokens, seed=number, **kinds[number % len(kinds)])
        works.append(Submission(f"{number}", prompt, params, slo_class=CLASSES[number % 3 == 0].name))
    return works


def served(it: Engine, works: list[Submission]) -> tuple[dict[str, list[TokenDelta]], list[Step]]:
    """Four at first, then one more with every step."""
    waiting, steps = iter(works), []
    for _ in range(4):
        it.add(next(waiting))
    while it.has_work:
        steps.append(it.step())
        if (work := next(waiting, None)) is not None:
            it.add(work)
    deltas: dict[str, list[TokenDelta]] = {}
    for step in steps:
        for delta in step.deltas:
            deltas.setdefault(delta.request_id, []).append(delta)
    assert next(waiting, None) is None
    assert it.pages.counts().owned == 0
    return deltas, steps


@pytest.mark.parametrize("heads", [(256, 4096), (4, 8)], ids=["a head is enough", "a head is too little"])
@pytest.mark.parametrize("memory", [8 << 20, 400_000], ids=["ample", "preempting"])
@pytest.mark.parametrize("kinds", [KINDS, KINDS + NOT_PLAIN], ids=["plain", "all"])
def test_all_is_as_it_would_have_been(
    kinds: list[dict[str, Any]], memory: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "HEAD_WIDTHS", heads)
    works = submissions(kinds)
    answers = []
    for is_ahead in (False, True):
        it = engine(async_scheduling=is_ahead, kv_cache_memory=ByteSize(memory))
        answers.append(served(it, works)[0])
        assert bool(it.scheduler.num_preemptions) is (memory < 1 << 20)
    in_turn, ahead = answers
    assert in_turn.keys() == ahead.keys() == {work.id for work in works}
    assert sum(deltas[-1].stop_token_id is not None for deltas in in_turn.values()) > 3
    for name, expected in in_turn.items():
        found = ahead[name]
        assert [it.token_ids for it in found] == [it.token_ids for it in expected]
        assert [it.finish_reason for it in found] == [it.finish_reason for it in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert [it.token_id for it in ours.logprobs or ()] == [it.token_id for it in theirs.logprobs or ()]
            assert len(ours.prompt_logprobs or ()) == len(theirs.prompt_logprobs or ())


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What an engine does, in one letter each: it begins a step, it reads tokens."""
    said: list[str] = []
    finish, read = Runner.finish, PendingTokens.read

    def begins(runner: Runner, *args: Any) -> Any:
        said.append("b")
        return finish(runner, *args)

    def reads(drawn: PendingTokens) -> Any:
        said.append("r")
        return read(drawn)

    monkeypatch.setattr(Runner, "finish", begins)
    monkeypatch.setattr(PendingTokens, "read", reads)
    return said  # type: ignore[return-value]


def test_a_step_begins_before_the_tokens_of_the_one_before_are_read(order: list[str]) -> None:
    it = engine(async_scheduling=True)
    it.add(Submission("a", list(range(3, 103)), SamplingParams(max_tokens=5, ignore_eos=True)))  # two chunks
    while it.has_work:
        it.step()
    assert "".join(order) == "b" + "br" * 5 + "r", "and none behind what is known to be the last"
    order.clear()
    it.add(Submission("a", [5, 6], SamplingParams(max_tokens=5, ignore_eos=True, presence_penalty=0.1)))
    while it.has_work:
        it.step()
    assert "".join(order) == "b" * 5, "whose tokens change the next logits, waits"


def test_steps_take_the_time_between_their_ends() -> None:
    _, steps = served(engine(async_scheduling=True), submissions(KINDS))
    for before, after in pairwise(steps):
        assert after.started >= before.started + before.seconds
        assert after.seconds > 0


def test_a_step_that_fails_behind_another_ends_all_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine(async_scheduling=True)
    works = submissions(KINDS)
    expected, _ = served(it, works)
    for work in works[4:10]:
        it.add(work)
    it.step()
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            it.step()
    failed = it.fail_all("division")
    assert {request.id for request, _ in failed} == {work.id for work in works[4:10]}
    assert not it.has_work
    assert it.pages.counts().owned == 0
    again, _ = served(it, works)
    assert {name: [it.token_ids for it in its] for name, its in again.items()} == {
        name: [it.token_ids for it in its] for name, its in expected.items()
    }


def test_who_leaves_while_two_steps_are_in_flight_frees_all() -> None:
    async def story(it: Driven) -> None:
        await it.submit("stays", 40, max_tokens=60)
        await it.submit("leaves", 40, max_tokens=200)
        for number in range(4):
            await it.run(f"short {number}", 5)
        await it.loop.abort(["leaves"])
        await it.ended["stays"].wait()
        await it.loop.call(lambda: None)
        found = it.of("leaves")
        assert (found["state"], found["finish_reason"]) == ("finished", "abort")
        assert it.loop.engine.pages.counts().owned == 0

    driven(story, async_scheduling=True)


def test_ranks_that_share_a_model_cannot_be_ahead() -> None:
    model = wrap_module(build("llama", {}))
    model.part = replace(model.part, position=RankPosition(tensor_size=2))
    with pytest.raises(ValueError, match="async_scheduling must be false or null"):
        Engine(model, EngineConfig(async_scheduling=True, kv_cache_memory=ByteSize(8 << 20)))


def test_tokens_that_are_drawn_and_read_are_those_that_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "HEAD_WIDTHS", (8, 16))
    logits = torch.randn(21, 300, generator=torch.Generator().manual_seed(0))

    def rows() -> list[SampleRow]:
        params = [SamplingParams(seed=i, **KINDS[i % len(KINDS)]) for i in range(len(logits))]
        return [SampleRow(it, list(range(i + 2)), 2, (7,)) for i, it in enumerate(params)]

    expected = [token.token_id for token in sample(logits, rows())]
    given: Tensor = logits.clone()
    drawn = PendingTokens(given, rows())
    given.fill_(0)
    token_ids, late = drawn.read()
    assert token_ids == expected
    assert late == [i for i, token_id in enumerate(drawn.on_device.tolist()) if token_id < 0]
    assert 0 < len(late) < len(expected)
    assert PendingTokens(logits[:0], []).read() == ([], [])
