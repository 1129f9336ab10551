"""Ranks of a worker group record and replay the same steps, or none, and begin steps before the driver draws tokens.

There is no GPU here: a stand-in "records" a step by keeping its function, whose sums over ranks go by gloo. A rank that
decided otherwise than another would pass other sizes to these sums, or wait for the other until the deadline.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from crossdock.kernels.packages import triton_is_interpreted
from crossdock.workers.model import load
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.graphs import recording
from crossdock.workers.model.graphs.decode_graphs import DecodeGraphs
from crossdock.workers.model.graphs.mixed_graphs import MixedGraphs
from crossdock.workers.model.graphs.recording import Record
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import load_model
from crossdock.workers.model.lora.adapters import Adapters
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.sampling import heads
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.ranks.rank_socket import WorkerGroupAddress
from crossdock.workers.replica.serving.follower import follow
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.architectures import build
from tests.workers.lora_oracle import tuned
from tests.workers.ranks import Ranks, saved
from tests.workers.replica.engine.test_pipeline import CLASSES, KINDS, MORE_KINDS, served, submissions
from tests.workers.replica.engines import greedy, run, tokens_of
from tests.workers.replica.speculating import fixed
from tests.workers.worker_groups import SETTINGS, engine_of_ranks

NUM_DECODE_GRAPHS, NUM_GRAPHS = 4, 6  # for 1, 2, 4 and 8 sequences; and for 64 and 80 tokens of chunks beside decodes


class Refusal(Exception):
    """Stand in for the error of a GPU: a model raises it here."""


def stand_in(patch: pytest.MonkeyPatch, fails: tuple[str, int] | None = None) -> list[tuple[str, int]]:
    """Have this process record steps, without a device. Returns the steps that it runs from now on, as they come: how
    each is run, and its tokens.

    `fails`: ("rehearse" or "capture", number of the graph at which that raises).
    """
    steps: list[tuple[str, int]] = []
    num_calls = {"rehearse": 0, "capture": 0}

    def count(phase: str) -> None:
        num_calls[phase] += 1
        if fails == (phase, num_calls[phase] - 1):
            raise Refusal("waits for the GPU")

    def rehearse(function: Callable[[], None]) -> None:
        count("rehearse")
        function()

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        count("capture")
        return function

    def kept(kind: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(self: Any, *args: Any) -> Tensor:
            inputs = self if isinstance(self, StepInputs) else args[0]
            steps.append((kind, len(inputs.token_ids)))
            return method(self, *args)

        return noted

    def stream_capture() -> tuple[Callable[[Callable[[], None]], None], Record]:
        return rehearse, capture

    patch.setattr(recording, "_has_graphs", lambda device: True)
    patch.setattr(recording, "_stream_capture", stream_capture)
    for kind, owner in (("decodes", DecodeGraphs), ("mixed", MixedGraphs), ("eager", StepInputs)):
        patch.setattr(owner, "run", kept(kind, owner.run))
    return steps


def follow_recording(
    fails: tuple[str, int] | None, spec: ReplicaSpec, rank: int, address: WorkerGroupAddress
) -> list[tuple[str, int]]:
    with pytest.MonkeyPatch.context() as patch:
        steps = stand_in(patch, fails)
        follow(spec, rank, address)
        return steps


def in_triton(patch: pytest.MonkeyPatch) -> None:
    """Have models that this process loads compute adapters in Triton, as on a GPU; here it is interpreted."""
    patch.setattr(load, "Adapters", lambda *given, **named: Adapters(*given, **(named | {"in_triton": True})))


def follow_with_adapters(spec: ReplicaSpec, rank: int, address: WorkerGroupAddress) -> list[tuple[str, int]]:
    with pytest.MonkeyPatch.context() as patch:
        in_triton(patch)
        return follow_recording(None, spec, rank, address)


def tokens(engine: Engine) -> list[list[int]]:
    """Return the tokens of ten requests, every third sampled, which come one by one to chunks beside decodes."""
    found: dict[str, list[int]] = {f"{number}": [] for number in range(10)}
    waiting = list(found)
    while waiting or engine.has_work:
        if waiting:
            number = int(waiting.pop(0))
            prompt = [(13 * number + 7 * at * at) % 90 + 3 for at in range(1 + 37 * number % 151)]
            params = SamplingParams(max_tokens=6, temperature=0.8 * (number % 3 == 2), seed=number, ignore_eos=True)
            engine.add(Submission(f"{number}", prompt, params))
        for delta in engine.step().deltas:
            found[delta.request_id] += delta.token_ids
    return list(found.values())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(build("llama", {}), tmp_path_factory.mktemp("worker group-graphs"))


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Return the tokens of one rank without graphs."""
    return tokens(new_engine(load_model(ModelSpec(str(path), "float32")), EngineConfig(**SETTINGS)))


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in turn", "ahead"])
def test_all_ranks_replay_the_same_steps(
    ranks: Ranks, path: Path, expected: list[list[int]], is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, answers = stand_in(monkeypatch), list[Any]()
    follower = partial(follow_recording, None)
    with engine_of_ranks(ranks, path, 2, 1, follower, answers, async_scheduling=is_ahead) as engine:
        assert engine.pipeline.is_ahead is is_ahead
        assert engine.pipeline.runner.graphs_text == "decodes, steps with chunks of up to 80 tokens"
        del steps[:]  # those of the check at load
        assert tokens(engine) == expected
        ours = list(steps)
    assert answers[0][-len(ours) :] == ours
    assert {kind for kind, _ in ours} == {"decodes", "mixed"}


def test_all_ranks_verify_drafts_in_recorded_steps(ranks: Ranks, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that repeat themselves have drafts from their own text: eight streams of them, not all of one length."""
    prompts = [[5 + number, 9, 30, 31, 32][: 3 + number % 3] * 8 for number in range(8)]

    def answers_of(engine: Engine) -> dict[str, list[int]]:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add(Submission(f"{number}", prompt, params))
        return {name: tokens_of(deltas) for name, deltas in run(engine).items()}

    plain = answers_of(new_engine(load_model(ModelSpec(str(path), "float32")), EngineConfig(**SETTINGS)))
    steps, answers = stand_in(monkeypatch), list[Any]()
    follower = partial(follow_recording, None)
    with engine_of_ranks(ranks, path, 2, 1, follower, answers, speculative_config=fixed(3)) as engine:
        assert engine.pipeline.runner.graphs_text == (
            "decodes, steps that verify drafts in up to 32 rows, steps with chunks of up to 80 tokens"
        )
        del steps[:]  # those of the check at load
        assert answers_of(engine) == plain
        ours = list(steps)
    assert answers[0][-len(ours) :] == ours
    assert {kind for kind, _ in ours} == {"decodes", "mixed"}
    assert max(rows for kind, rows in ours if kind == "decodes") > 8, "streams verify drafts"


@pytest.mark.skipif(not triton_is_interpreted(), reason="needs Triton, interpreted: pip install triton")
def test_all_ranks_replay_steps_with_adapters(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank adds its part of an adapter in its graph. The tokens are PEFT's."""
    module = build("llama", {"num_hidden_layers": 1})
    first, second = (tuned(module, tmp_path / f"{number}", number, r=3 + number) for number in range(2))
    path = saved(module, tmp_path / "model")
    works = {"first": (first, [7, 3, 9]), "second": (second, [20 + at for at in range(12)])}
    in_triton(monkeypatch)
    steps, answers = stand_in(monkeypatch), list[Any]()
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 24, "rank_timeout_s": 900.0, "start_timeout_s": 900.0}
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2} | limits
    with engine_of_ranks(ranks, path, 2, 1, follow_with_adapters, answers, **options) as engine:
        del steps[:]  # those of the check at load
        for name, (one, prompt) in works.items():
            engine.add(Submission(name, prompt, greedy(3), adapter=one.adapter))
        found = {name: tokens_of(deltas) for name, deltas in run(engine).items()}
        ours = list(steps)
    assert found == {name: one.greedy(prompt, 3) for name, (one, prompt) in works.items()}
    assert answers[0][-len(ours) :] == ours
    assert {kind for kind, _ in ours} == {"decodes", "mixed"}, "no step runs kernel by kernel"


def test_steps_ahead_give_the_tokens_of_steps_in_turn(
    ranks: Ranks, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare all kinds of sampling, without graphs. Some tokens only the driver finds, after the next step began."""
    monkeypatch.setattr(heads, "WIDTHS", (4, 8))
    kinds = KINDS + MORE_KINDS
    works = [_shorter(work) for work in submissions(kinds, len(kinds))]
    answers, num_ahead = list[Any](), 0
    from_driver = Collectives.from_driver

    def counted(collectives: Collectives, x: Tensor) -> Tensor:
        nonlocal num_ahead
        num_ahead += 1
        return from_driver(collectives, x)

    monkeypatch.setattr(Collectives, "from_driver", counted)
    for is_ahead in (False, True):
        with engine_of_ranks(ranks, path, 2, 1, async_scheduling=is_ahead, slo_classes=CLASSES) as engine:
            deltas, _ = served(engine, works)
            answers.append({name: [token for delta in deltas[name] for token in delta.token_ids] for name in deltas})
            assert bool(num_ahead) is is_ahead
    assert answers[0] == answers[1]
    assert answers[0].keys() == {work.id for work in works}


def _shorter(work: Submission) -> Submission:
    """Return a request for at most twenty tokens."""
    return replace(work, sampling=replace(work.sampling, max_tokens=min(work.sampling.max_tokens, 20)))


@pytest.mark.parametrize(("rank", "fails"), [(0, ("rehearse", 0)), (1, ("capture", NUM_DECODE_GRAPHS - 1))])
def test_one_rank_that_cannot_record_leaves_no_rank_with_graphs(
    ranks: Ranks,
    path: Path,
    expected: list[list[int]],
    rank: int,
    fails: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps, answers = stand_in(monkeypatch, fails if rank == 0 else None), list[Any]()
    follower = partial(follow_recording, fails if rank == 1 else None)
    with engine_of_ranks(ranks, path, 2, 1, follower, answers) as engine:
        assert engine.pipeline.runner.graphs_text == f"none: rank {rank}: Refusal: waits for the GPU"
        assert not engine.pipeline.runner.graphs
        assert tokens(engine) == expected
    assert {kind for kind, _ in steps} == {kind for kind, _ in answers[0]} == {"eager"}
    assert f"decode steps run without CUDA graphs: rank {rank}: Refusal: waits for the GPU" in caplog.messages


def test_one_rank_that_cannot_record_chunks_leaves_all_ranks_their_decodes(
    ranks: Ranks, path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, answers = stand_in(monkeypatch), list[Any]()
    follower = partial(follow_recording, ("rehearse", NUM_GRAPHS - 1))
    with engine_of_ranks(ranks, path, 2, 1, follower, answers) as engine:
        assert (
            engine.pipeline.runner.graphs_text
            == "decodes; steps with chunks are not: rank 1: Refusal: waits for the GPU"
        )
        assert tokens(engine) == expected
    assert {kind for kind, _ in steps} == {kind for kind, _ in answers[0]} == {"eager", "decodes"}


def test_stages_of_a_pipeline_say_why_they_record_nothing(
    ranks: Ranks, path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    with engine_of_ranks(ranks, path, 1, 2, partial(follow_recording, None)) as engine:
        assert engine.pipeline.runner.graphs_text == "none: a pipeline's stages exchange hidden states within a step"
        assert tokens(engine) == expected


def test_eager_ranks_are_not_asked_to_record(ranks: Ranks, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would wait for a driver that does not come."""
    stand_in(monkeypatch)
    with engine_of_ranks(ranks, path, 2, 1, partial(follow_recording, None), enforce_eager=True) as engine:
        assert engine.pipeline.runner.graphs_text == ""
        assert not engine.pipeline.runner.graphs
        engine.add(Submission("a", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True)))
        assert len(tokens_of(run(engine)["a"])) == 3
