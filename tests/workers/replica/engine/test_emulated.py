"""An emulated device: its steps take the simulator's seconds, and its tokens follow from the request alone."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.emulated import advertised, emulated_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.serving.metrics import EngineMetrics
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.request.submission import Grammar, InvalidField, SamplingParams, Submission
from tests.cluster.simulate.small_fleets import CLASSES, fleet, job, play, profile, times
from tests.workers.replica.sides import Side, closing, local, ship, submission

EOS = 5
SETTINGS = EngineConfig(
    max_num_batched_tokens=256, max_num_seqs=16, chunk_policy="fixed", admission="queue", slo_classes=CLASSES
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weights."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 40, "eos_token_id": EOS}))
    return tmp_path


@dataclass
class Clock:
    """Time that passes only in `sleep`."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run(engine: Engine, *works: Submission) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Return the tokens of each request, and their times. All but the first arrive when its first steps have begun."""
    for work in works:
        engine.add(work)
        while work is works[0] and engine.pipeline.has_room and engine.begin_step():
            pass
    tokens: dict[str, list[int]] = {work.id: [] for work in works}
    ends: dict[str, list[float]] = {work.id: [] for work in works}
    while engine.has_work:
        for delta in engine.step().deltas:
            tokens[delta.request_id] += delta.token_ids
            ends[delta.request_id] += [engine.clock()] * len(delta.token_ids)
    return tokens, ends


def greedy(name: str, num_prompt: int, num_output: int, **sampling: Any) -> Submission:
    params = SamplingParams(max_tokens=num_output, **({"temperature": 0.0} | sampling))
    return Submission(name, [7 + at * len(name) % 30 for at in range(num_prompt)], params)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_no_metric_is_below_zero_at_any_moment(folder: Path, is_ahead: bool) -> None:
    """A scrape may come between the beginning and the end of a step, also of one that runs ahead of its tokens."""
    clock, config = Clock(), SETTINGS.model_copy(update={"async_scheduling": is_ahead})
    engine = emulated_engine(profile(), config, folder, clock=clock, sleep=clock.sleep)
    metrics = EngineMetrics(engine)
    for name, *lengths in (("a", 700, 20), ("bb", 40, 30), ("ccc", 300, 9)):
        engine.add(greedy(name, *lengths))
    num_read = 0
    while engine.has_work:
        while engine.pipeline.has_room and engine.begin_step():
            samples = [sample for family in metrics.registry.collect() for sample in family.samples]
            assert not [sample for sample in samples if sample.value < 0]
            num_read += 1
        engine.step()
    assert num_read > 20


@pytest.mark.parametrize("is_ahead", [False, True])
def test_token_times_of_emulated_engine_equal_those_of_simulator(folder: Path, is_ahead: bool) -> None:
    """Also where a step begins before the host has the tokens of the one before."""
    clock, config = Clock(), SETTINGS.model_copy(update={"async_scheduling": is_ahead})
    engine = emulated_engine(profile(), config, folder, clock=clock, sleep=clock.sleep)
    lengths = {"a": (700, 20), "bb": (40, 30), "ccc": (300, 9)}
    _, found = run(engine, *(greedy(name, *each) for name, each in lengths.items()))
    outcome = play(
        fleet({"profile": profile(runs_ahead=is_ahead)}), [job(name, *each) for name, each in lengths.items()]
    )
    assert list(found.values()) == [pytest.approx(each) for each in times(outcome)]


def test_step_in_pipeline_ends_after_all_stages_and_next_one_after_slowest_stage(folder: Path) -> None:
    """Each step takes 1/64 s and 16 tokens of 1/1024 s; the second waits for 3/4 of the first."""
    clock, slow = Clock(), profile(pipeline_parallel_size=2, interval_share=0.75)
    engine = emulated_engine(slow, SETTINGS, folder, clock=clock, sleep=clock.sleep)
    _, found = run(engine, greedy("a", 16, 1), greedy("bb", 16, 1))
    assert found == {"a": [pytest.approx(1 / 32)], "bb": [pytest.approx(1.75 / 32)]}


def test_tokens_are_equal_on_other_replicas_in_other_batches_and_after_a_failure(folder: Path) -> None:
    def engine() -> Engine:
        clock = Clock()
        return emulated_engine(profile(), SETTINGS, folder, clock=clock, sleep=clock.sleep)

    works = [greedy("a", 700, 20), greedy("bb", 40, 30, temperature=1.0, seed=3), greedy("ccc", 300, 9)]
    together, _ = run(engine(), *works)
    for work in works:
        assert run(engine(), work)[0][work.id] == together[work.id]
        continued = replace(work, output_token_ids=together[work.id][:6], epoch=1)
        assert run(engine(), continued)[0][work.id] == together[work.id][6:]
    assert len({tuple(tokens[:9]) for tokens in together.values()}) == 3
    assert not any(EOS in tokens for tokens in together.values())


def test_end_token_of_the_tokenizer_ends_requests_as_that_of_the_model(folder: Path) -> None:
    """An emulated device makes neither of them."""
    named = {"eos_token": "<end>", "added_tokens_decoder": {"7": {"content": "<end>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    engine = emulated_engine(profile(), SETTINGS, folder, clock=(clock := Clock()), sleep=clock.sleep)
    assert engine.executor.eos_token_ids == {EOS, 7}
    tokens, _ = run(engine, greedy("a", 40, 300))
    assert not {EOS, 7} & set(tokens["a"])


async def test_pages_travel_in_seconds_of_profile_and_both_replicas_give_tokens_of_one(folder: Path) -> None:
    """13 pages of 16 KiB at 1 MiB a second take a fifth of a second; no page has any byte."""
    sides = [Side("tcp", engine=emulated_engine(profile(), SETTINGS, folder)) for _ in range(2)]
    async with closing(*sides) as (prefill, decode):
        work = submission([3 + at % 30 for at in range(200)])
        assert await ship(prefill, decode, work) == await decode.generate(local(work))
        [(_, _, figures, outcome)] = [each for each in prefill.ended if each[1]]
        assert (outcome, figures.num_pages, figures.num_bytes) == ("shipped", 13, 13 * 16 * 1024)
        assert figures.write_seconds >= 13 / 64


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"grammar": Grammar("json_object")}, "grammar"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"pooling": "last"}, "pooling"),
        ({"allowed_token_ids": (7,)}, "allowed_token_ids"),
    ],
)
def test_request_that_needs_logits_is_refused_by_name(folder: Path, sampling: dict[str, Any], field: str) -> None:
    engine = emulated_engine(profile(), SETTINGS, folder)
    with pytest.raises(InvalidField, match=f"{field}: an emulated device computes no logits") as refused:
        engine.add(greedy("a", 16, 1, **sampling))
    assert refused.value.field == field
    assert not engine.has_work


def test_learnt_cost_begins_with_that_of_profile(folder: Path) -> None:
    given = preset("h100-8b")
    engine = emulated_engine(given, EngineConfig(), folder)
    cost = engine.scheduler.forecast.cost
    assert cost is not None
    for streams, context in ((1, 100), (32, 1500), (200, 800)):
        expected = given.cost.decode_step_seconds(streams, streams * context)
        assert cost.decode_step_seconds(streams, streams * context) == pytest.approx(expected, rel=0.02)
    assert cost.chunk_seconds(30_000, 2000) == pytest.approx(given.cost.chunk_seconds(30_000, 2000), rel=0.02)
    told = advertised(engine, given)
    same = {"page_bytes", "num_pages", "max_num_seqs", "max_model_len", "cost", "bytes_per_second"}
    assert told.model_dump(include=same) == given.model_dump(include=same)
    assert told.vocab_size == 40


def test_context_that_fits_the_pages_is_at_most_that_of_the_profile(folder: Path) -> None:
    given = profile()
    for num_pages, longest in ((1, 16), (3, 48), (10**6, given.max_model_len)):
        memory = num_pages * given.page_bytes * SETTINGS.page_size // given.page_size
        config = SETTINGS.model_copy(update={"kv_cache_memory": ByteSize(memory)})
        assert emulated_engine(given, config, folder, fits_memory=True).executor.max_model_len == longest


def test_metrics_of_an_idle_replica_are_short_enough_for_a_fleet(folder: Path) -> None:
    """64 replicas are a scrape of 1.3 MB at most; with every label in use, of 3.8 MB."""
    engine = emulated_engine(preset("h100-8b"), EngineConfig.model_validate({}), folder)
    assert len(EngineMetrics(engine).text()) < 20_000
