"""A replica of several ranks gives the tokens of one rank, and ends as a whole when a rank ends."""

import multiprocessing
import os
import queue
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ByteSize
from torch import Tensor

from crossdock.workers.model.kv_memory import PageBudget
from crossdock.workers.model.load import load_model
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.docks import RankDock
from crossdock.workers.replica.engine import Engine, warm_up
from crossdock.workers.replica.ranks import Channel, Gang, _Follower, follow
from crossdock.workers.schedule.batch import Batch
from crossdock.workers.schedule.request import SamplingParams, Submission
from tests.workers.architectures import SERVED, build
from tests.workers.gangs import SETTINGS, ganged, spec_of
from tests.workers.ranks import DIVISIONS, Ranks, saved

from .test_engine import run, tokens_of

# A model for each style of plan: gathered queries, biases, fused and latent attention, experts, no plan at all, ...
CHOSEN = ["llama", "gemma2", "gemma4_text", "phi", "phi3", "gpt_neox", "gpt2", "olmo2", "cohere2", "mixtral"]
CHOSEN += ["deepseek_v2", "gpt_oss"]
REST = [pytest.param(name, marks=pytest.mark.soak) for name in SERVED if name not in CHOSEN]


def works(count: int = 10, num_tokens: int = 8, **params: Any) -> list[Submission]:
    """Prompts of 1 to 150 tokens, every third sampled."""
    prompts = [[(13 * number + 7 * at * at) % 90 + 3 for at in range(1 + 37 * number % 151)] for number in range(count)]
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **params)
    return [
        Submission(f"{number}", prompt, replace(sampling, temperature=0.8 * (number % 3 == 2), seed=number))
        for number, prompt in enumerate(prompts)
    ]


def tokens(engine: Engine, submissions: list[Submission]) -> list[list[int]]:
    for submission in submissions:
        engine.add(submission)
    deltas = run(engine)
    return [tokens_of(deltas[submission.id]) for submission in submissions]


def tokens_and_logits(engine: Engine) -> tuple[list[list[int]], dict[tuple[str, int], Tensor]]:
    """Of `works`, whatever steps they are computed in; logits by request and position."""
    found: dict[tuple[str, int], Tensor] = {}
    collect = Engine._collect_prompt_logprobs

    def collected(self: Engine, batch: Batch, logits: Tensor, rows: Sequence[range]) -> None:
        for part, row in zip(batch.scheduled, rows, strict=True):
            for at, number in enumerate(row, part.start + part.num_tokens - len(row)):
                found[part.request.id, at] = logits[number]
        collect(self, batch, logits, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_collect_prompt_logprobs", collected)
        return tokens(engine, works(prompt_logprobs=0)), found


def assert_gangs_equal_one_rank(ranks: Ranks, path: Path, **config: Any) -> None:
    """fp32, whose sums differ by their order: 2e-3 is what test_model allows between paged and eager attention."""
    expected, logits = tokens_and_logits(Engine(load_model(path, torch.float32), EngineConfig(**SETTINGS | config)))
    assert len(logits) > 500
    for tensor_size, num_stages in DIVISIONS:
        with ganged(ranks, path, tensor_size, num_stages, **config) as engine:
            ours, found = tokens_and_logits(engine)
            assert ours == expected
            assert found.keys() == logits.keys()
            for at, row in found.items():
                torch.testing.assert_close(row, logits[at], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", [*CHOSEN, *REST])
def test_logits_and_tokens_equal_those_of_one_rank(ranks: Ranks, tmp_path: Path, name: str) -> None:
    module = build(name, SERVED[name])
    for key, parameter in module.named_parameters():
        if key.endswith("bias"):  # else zero: whoever adds it twice would not be seen
            torch.nn.init.normal_(parameter, std=0.1)
    assert_gangs_equal_one_rank(ranks, saved(module, tmp_path))


def test_real_weights(ranks: Ranks, model_dir: Path) -> None:
    """SmolLM2: nine query heads over three KV heads, which two ranks divide as one and two."""
    assert_gangs_equal_one_rank(ranks, model_dir, kv_cache_memory=ByteSize(400 << 20))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_several_steps_are_in_flight(ranks: Ranks, tmp_path: Path, num_stages: int) -> None:
    """As many as there are stages: chunks of one prompt after another, streams dealt among them, no request twice where
    its next token is not known; and all ends well for what is aborted on the way."""
    path = saved(build("llama", {}), tmp_path)
    with ganged(ranks, path, 1, num_stages) as engine:
        long = Submission("long", [5 + at % 80 for at in range(220)], SamplingParams(max_tokens=4, temperature=0.0))
        engine.add(long)
        engine.step()
        flights = list(engine._flights)
        assert [part.start for flight in flights for part in flight.batch.scheduled] == [80, 160][: num_stages - 1]
        run(engine)
        for submission in works(8, num_tokens=30):
            engine.add(submission)
        busiest = 0
        while engine.has_work:
            engine.step()
            ids = [part.request.id for flight in engine._flights for part in flight.batch.scheduled if part.samples]
            assert len(ids) == len(set(ids))
            busiest = max(busiest, len(engine._flights))
            if "3" in ids:
                engine.land()
                engine.abort("3")
        assert busiest == num_stages - 1  # after a step the oldest has ended
        assert engine.pages.counts().owned == 0


def test_warm_up_measures_the_gang(ranks: Ranks, tmp_path: Path) -> None:
    with ganged(ranks, saved(build("llama", {}), tmp_path), 2, 2) as engine:
        profile = warm_up(engine)
        assert (profile.tensor_parallel_size, profile.pipeline_parallel_size) == (2, 2)
        assert profile.cost.base > 0
        expected = tokens(engine, works())
        assert engine.cost_fit is not None
        assert tokens(engine, works()) == expected


def test_ranks_agree_on_as_many_pages_as_the_poorest_has_room_for(path: Path) -> None:
    gang = Gang(spec_of(path, 2, 2), "127.0.0.1", lambda _: None)
    gang._room = PageBudget(100, 4096)
    for rank, room in [(0, PageBudget(90, 4096)), (1, PageBudget(120, 2048)), (3, PageBudget(95, 2048))]:
        gang._followers[rank] = _Follower(Channel(socket.socket()), (), room)
    assert gang.room == PageBudget(90, 4096)
    gang.close()


# -- the end of a rank is the end of all ------------------------------------------------------------------------------


class Victim:
    """A gang of two whose follower may be done harm: it has a process of its own."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.spec = spec_of(path, 2, 1, **options)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.gang = Gang(self.spec, "127.0.0.1", self.lost.put)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=follow, args=(self.spec, 1, self.gang.address, RankDock), daemon=True)
        self.process.start()

    def engine(self) -> Engine:
        return Engine(self.gang.load(), EngineConfig(**SETTINGS), gang=self.gang)

    def close(self) -> None:
        self.gang.close()
        self.process.kill()
        self.process.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return saved(build("llama", {}), tmp_path)


@pytest.fixture
def victim(path: Path) -> Iterator[Victim]:
    it = Victim(path, deadline_s=3.0)
    yield it
    it.close()


def harm(victim: Victim, signal_: signal.Signals) -> float:
    """Seconds from the signal, under load, to the driver's knowing."""
    assert victim.process.pid is not None
    engine = victim.engine()
    for submission in works(8, num_tokens=80):
        engine.add(submission)
    for _ in range(5):
        engine.step()
    os.kill(victim.process.pid, signal_)
    since = time.monotonic()
    with pytest.raises(RuntimeError) as failure:
        for _ in iter(engine.step, None):
            pass
    victim.gang.fail(failure.value)
    return time.monotonic() - since


def test_a_killed_rank_is_noticed_at_once(victim: Victim) -> None:
    harm(victim, signal.SIGKILL)
    assert "its process has ended" in victim.lost.get(timeout=5)
    assert victim.lost.empty(), "told once"


def test_a_hung_rank_is_noticed_at_the_deadline(victim: Victim) -> None:
    assert harm(victim, signal.SIGSTOP) > 2
    assert "rank 0 " in victim.lost.get(timeout=5)  # who waited for it


def test_a_follower_ends_with_its_driver(path: Path) -> None:
    """Whatever it is doing: no process is left behind."""
    victim = Victim(path)
    victim.engine()
    for follower in victim.gang._followers.values():
        follower.channel.close()  # as the death of the driver's process does
    victim.process.join(10)
    assert victim.process.exitcode == 1
    victim.close()


def test_a_rank_that_cannot_start_says_why(path: Path) -> None:
    """In the driver's words: the rank's own. And nobody else is listened to."""
    victim = Victim(path, max_model_len=100_000)  # of 256 positions
    with socket.create_connection((victim.gang.address.host, victim.gang.address.port)) as stranger:
        channel = Channel(stranger)
        channel.send("hello", b"guess", 1)
        with pytest.raises(EOFError):
            channel.receive()
    with pytest.raises(Exception, match="max_model_len"):
        victim.gang.load()
    assert "max_model_len (100000) is more than the model's own 256" in victim.lost.get(timeout=20)
    victim.close()


def test_no_rank_comes_is_said_after_the_start_s(path: Path) -> None:
    gang = Gang(spec_of(path, 2, 1, start_s=1.0), "127.0.0.1", lambda _: None)
    with pytest.raises(Exception, match=r"[Tt]imeout|[Tt]imed out"):
        gang.load()
    gang.close()
    torch.distributed.distributed_c10d._world.group_count = 0  # it counts the one it tried; the next gang's must agree
