"""Warm-up measures any engine, and leaves no trace in it."""

from dataclasses import replace

import pytest

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.engine import calibrate
from crossdock.workers.replica.engine.calibrate import measure_step, warm_up
from crossdock.workers.replica.serving.metrics import EngineMetrics
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from crossdock.workers.schedule.request.submission import Submission
from tests.workers.architectures import SERVED, build
from tests.workers.replica.engines import engine_on, greedy, tiny_model


@pytest.mark.parametrize(
    ("max_model_len", "config"), [(12, {}), (300, {"max_num_batched_tokens": 40, "max_num_seqs": 5})]
)
def test_warm_up_in_the_smallest_pool_leaves_no_trace(max_model_len: int, config: dict[str, int]) -> None:
    engine = engine_on(tiny_model(max_model_len), num_pages=-(-max_model_len // 16), **config)
    before = engine.pages.counts()
    profile = warm_up(engine)
    assert engine.pages.counts() == before
    assert not engine.has_work
    assert engine.scheduler.forecast.cost == profile.cost
    assert profile.cost.seconds(StepWork.of([(0, 8)], [8])) > 0
    engine.add(Submission("a", [1, 2, 3], greedy(2)))
    assert engine.step().predicted > 0


def test_profile_and_metrics_name_the_kernels_of_fused_layers() -> None:
    wide = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32}
    engine = engine_on(wrap_module(build("llama", wide), LoadOptions(cpu_kernels="onednn")), num_pages=100)
    assert warm_up(engine).kernels == "onednn"
    shown = [sample.labels for metric in EngineMetrics(engine).registry.collect() for sample in metric.samples]
    assert {"kernels": "onednn"} in shown
    engine = engine_on(wrap_module(build("llama", {})), num_pages=100)
    assert warm_up(engine).kernels == ""


def test_profile_of_e4m3_pages_has_their_size() -> None:
    engine = engine_on(wrap_module(build("llama", {}), LoadOptions(kv_cache_dtype="fp8")), num_pages=100)
    profile = warm_up(engine)
    assert (profile.num_pages, profile.page_bytes) == (100, engine.model.layout(16).page_bytes)


def test_measured_step_that_the_pool_does_not_hold_is_none() -> None:
    engine = engine_on(tiny_model(64), num_pages=4)
    assert measure_step(engine, (0, 65), 0, 0) is None
    assert measure_step(engine, None, 5, 1) is None
    measured = measure_step(engine, (16, 16), 2, 8, repeats=2)
    assert measured is not None
    work, seconds = measured
    assert work == StepWork.of([(16, 16)], [8, 8])
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert engine.pages.counts().owned == 0


def test_steps_with_scored_prompts_teach_the_cost_nothing_and_are_predicted_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_on(tiny_model(300), num_pages=40)
    monkeypatch.setattr(calibrate, "remembered_factor", lambda *_: 3.0)
    warm_up(engine)
    scheduler = engine.scheduler
    observed: list[StepWork] = []
    monkeypatch.setattr(StepCostFit, "observe", lambda fit, work, seconds: observed.append(work))
    for name, prompt_logprobs in (("plain", None), ("scored", 1)):
        observed.clear()
        sampling = replace(greedy(1), prompt_logprobs=prompt_logprobs)
        engine.add(Submission(name, list(range(3, 100)), sampling))
        (request,) = scheduler.table.requests()
        seconds = scheduler.forecast.prefill_seconds(request)
        while engine.has_work:
            engine.step()
        assert bool(observed) == (prompt_logprobs is None)
        if prompt_logprobs is None:
            plain = seconds
    assert seconds == pytest.approx(3 * plain)


@pytest.mark.parametrize(("longer", "factor"), [(-0.5, 1.0), (1.5, 2.5), (9.0, 4.0)])
def test_factor_of_scored_prompts_is_measured_within_bounds(
    monkeypatch: pytest.MonkeyPatch, longer: float, factor: float
) -> None:
    """A disturbed measurement may say that a scored chunk takes less. `longer`: how much, of a chunk's seconds."""
    engine = engine_on(tiny_model(300), num_pages=40)
    cost = engine.calibrate([(StepWork.of([(0, tokens)]), 0.01 + 1e-4 * tokens) for tokens in (16, 32, 64)]).cost

    def measured(_: object, chunk: tuple[int, int], *__: int, num_alternatives: int = 0) -> tuple[None, list[float]]:
        return None, [cost.chunk_seconds(*chunk) * (1 + longer * bool(num_alternatives))]

    monkeypatch.setattr(calibrate, "measure_step", measured)
    assert calibrate._scored_factor(engine) == pytest.approx(factor)


def test_swept_step_that_other_work_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = engine_on(tiny_model(64), num_pages=8), list[object]()

    def measured(_: object, *shape: object) -> tuple[StepWork, list[float]]:
        calls.append(shape)
        return StepWork(prefill_tokens=1), [0.01, 0.02, 0.03] if calls.count(shape) == 1 else [0.008] * 3

    monkeypatch.setattr(calibrate, "_REPEATED_S", 0.3)
    monkeypatch.setattr(calibrate, "measure_step", measured)
    sweep = calibrate._sweep(engine)
    assert {seconds for _, seconds in sweep} == {0.008}
    assert len(calls) == 2 * len(sweep)


@pytest.mark.parametrize(("name", "most"), [("deepseek_v32", 13), ("minimax_m3_vl_text", 16)])
def test_profile_of_a_model_with_indexers_has_the_tokens_that_these_choose(name: str, most: int) -> None:
    engine = engine_on(wrap_module(build(name, SERVED[name])), num_pages=100)
    profile = warm_up(engine)
    assert profile.cost.most_context == engine.model.most_context == most
    assert SchedulingProfile.model_validate_json(profile.model_dump_json()) == profile
