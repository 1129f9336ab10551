"""A replica of several ranks gives the logits and tokens of one rank."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.load import load_model
from crossdock.workers.model.memory.kv_memory import PageBudget
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import calibrate
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.step_sampler import StepSampler
from crossdock.workers.replica.ranks.worker_group import common_page_budget
from crossdock.workers.replica.serving.metrics import EngineMetrics
from crossdock.workers.report.timeline import Timelines
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import IntervalShare
from crossdock.workers.schedule.request.batch import Batch, SampledToken
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.known_seconds import known_sweep
from tests.sweeps import SOAK, shared_out
from tests.workers.architectures import DIVISIBLE, SERVED, build
from tests.workers.ranks import DIVISIONS, Ranks, saved
from tests.workers.replica.engines import run, tokens_of
from tests.workers.worker_groups import SETTINGS, engine_of_ranks

# Pages of two widths, biases, latents, indexers, experts beside windows, delta nets, and Mamba-2 beside attention.
CHOSEN = ["gemma4_text", "gpt2", "deepseek_v2", "glm_moe_dsa", "minimax_m3_vl_text", "gpt_oss", "qwen3_next"]
CHOSEN += ["falcon_h1"]
WITHOUT_STAGES = ["longcat_flash"]  # a layer of its list has two attentions
UNDIVIDED = ["beam"]  # tests/workers/model/cut has the reason
WORKER_GROUPS = [  # one division of each of the chosen ones in every run, and all of the others in the soak
    *shared_out(len(DIVISIONS), CHOSEN, DIVISIONS),
    *(
        pytest.param(name, division, marks=SOAK)
        for name in SERVED
        if name not in [*CHOSEN, *UNDIVIDED]
        for division in (DIVISIONS[:1] if name in WITHOUT_STAGES else DIVISIONS)
    ),
]


def works(count: int = 8, num_tokens: int = 8, **params: Any) -> list[Submission]:
    """Return prompts of 1 to 150 tokens, every third sampled."""
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
    """Return the tokens of `works` and their logits by request and position, in whatever steps they are computed."""
    found: dict[tuple[str, int], Tensor] = {}
    sample = StepSampler.sample

    def sampled(sampler: StepSampler, batch: Batch, logits: Tensor, rows: Sequence[range]) -> dict[str, SampledToken]:
        for part, row in zip(batch.scheduled, rows, strict=True):
            for at, number in enumerate(row, part.start + part.num_tokens - len(row)):
                found[part.request.id, at] = logits[number]
        return sample(sampler, batch, logits, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSampler, "sample", sampled)
        return tokens(engine, works(prompt_logprobs=0)), found


def assert_worker_group_equals_one_rank(ranks: Ranks, path: Path, division: tuple[int, int], **settings: Any) -> None:
    """In fp32, whose sums differ by their order: 2e-3 is what test_model allows between paged and eager attention."""
    expected, logits = tokens_and_logits(
        new_engine(load_model(ModelSpec(str(path), "float32")), EngineConfig(**SETTINGS))
    )
    assert len(logits) > 500
    with engine_of_ranks(ranks, path, *division, **settings) as engine:
        ours, found = tokens_and_logits(engine)
        assert ours == expected
        assert found.keys() == logits.keys()
        ours_then_theirs = (torch.stack([each[at] for at in logits]) for each in (found, logits))
        torch.testing.assert_close(*ours_then_theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(("name", "division"), WORKER_GROUPS)
def test_worker_group_of_any_architecture_equals_one_rank(
    ranks: Ranks, tmp_path: Path, name: str, division: tuple[int, int]
) -> None:
    module = build(name, SERVED[name] | DIVISIBLE.get(name, {}))
    for key, parameter in module.named_parameters():
        if key.endswith("bias"):  # else zero: a rank that adds it twice would not be seen
            torch.nn.init.normal_(parameter, std=0.1)
    path = saved(module, tmp_path)
    assert_worker_group_equals_one_rank(ranks, path, division)


def test_stages_have_as_many_steps_in_flight(ranks: Ranks, tmp_path: Path) -> None:
    """Chunks of one prompt follow each other, streams are dealt among the steps, and no request is in two steps where
    its next token is not known. A request that is aborted while in flight leaves nothing."""
    with engine_of_ranks(ranks, saved(build("llama", {}), tmp_path), 1, 3) as engine:
        long = Submission("long", [5 + at % 80 for at in range(220)], SamplingParams(max_tokens=4, temperature=0.0))
        engine.add(long)
        engine.step()
        starts = [part.start for batch in engine.pipeline.batches for part in batch.scheduled]
        assert starts == [80, 160]
        run(engine)
        for submission in works(num_tokens=30):
            engine.add(submission)
        busiest = 0
        while engine.has_work:
            engine.step()
            batches = engine.pipeline.batches
            ids = [part.request.id for batch in batches for part in batch.scheduled if part.samples]
            assert len(ids) == len(set(ids))
            busiest = max(busiest, len(batches))
            if "3" in ids:
                while not engine.pipeline.is_empty:
                    engine.finish_step()
                engine.abort("3")
        assert busiest == 2  # after a step the oldest has ended
        assert engine.pages.counts().owned == 0


def test_warm_up_and_kv_bytes_of_a_worker_group_are_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """The bytes are advertised, and counted for a request that is aborted before its last chunk."""
    path = saved(build("llama", {}), tmp_path)
    whole = load_model(ModelSpec(str(path), "float32")).layout(16)
    with engine_of_ranks(ranks, path, 2, 2) as engine:
        assert engine.model.layout(16).page_bytes < whole.page_bytes
        with patch.object(calibrate, "remembered_sweep", known_sweep):  # the next test measures
            profile = calibrate.warm_up(engine)
        assert profile.page_bytes == engine.page_bytes == whole.page_bytes
        metrics, timelines = EngineMetrics(engine), Timelines(engine.config.slo_classes, 0.0)
        work = Submission("long", [5 + at % 80 for at in range(220)], SamplingParams(max_tokens=4))
        engine.add(work)
        timelines.add(work, engine.scheduler.table.requests()[0], engine.clock(), 0.0)
        engine.step()
        while not engine.pipeline.is_empty:
            engine.finish_step()
        cancelled = engine.abort("long")
        assert cancelled is not None
        computed = cancelled.num_computed_tokens
        assert 0 < computed < 220, "the size of a chunk follows the seconds measured on this machine"
        metrics.aborted(timelines.aborted("long", engine.clock(), 0))
        found = metrics.registry.get_sample_value("crossdock_cancelled_kv_bytes_total")
        assert found == -(-computed // 16) * whole.page_bytes

        assert (profile.tensor_parallel_size, profile.pipeline_parallel_size) == (2, 2)
        assert profile.cost.seconds(StepWork(decodes=1, context=8)) > 0
        expected = tokens(engine, works(4))
        assert engine.cost_fit is not None
        assert tokens(engine, works(4)) == expected


def test_intervals_of_full_steps_refine_the_prediction_of_a_pipeline(ranks: Ranks, tmp_path: Path) -> None:
    """Only those: a step that was alone shows its latency, and no interval."""
    with engine_of_ranks(ranks, saved(build("llama", {}), tmp_path), 1, 2) as engine:
        profile = calibrate.warm_up(engine)
        measured = profile.interval_share
        assert engine.scheduler.forecast.interval_share == measured != 1.0
        tokens(engine, works(1))
        assert engine.intervals.share == measured, "one stream: a step at a time"
        observed: list[tuple[float, float]] = []
        observe = IntervalShare.observe

        def recorded(intervals: IntervalShare, interval: float, latency: float) -> None:
            observed.append((interval, latency))
            observe(intervals, interval, latency)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IntervalShare, "observe", recorded)
            tokens(engine, works(8))
        assert engine.scheduler.forecast.interval_share == engine.intervals.share != measured
        assert len(observed) > 8
        assert all(interval > 0 and latency > 0 for interval, latency in observed)


def test_page_budget_of_a_worker_group_is_that_of_the_poorest_rank() -> None:
    budgets = [PageBudget(100, 4096), PageBudget(90, 4096), PageBudget(120, 2048), PageBudget(95, 2048)]
    assert common_page_budget(budgets) == PageBudget(90, 4096)
