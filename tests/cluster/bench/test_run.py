"""Runs of every workload against a scripted server."""

import asyncio
import json
import random
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from crossdock.cluster.bench import report, run
from crossdock.cluster.bench.http import BenchError, Endpoint, ServerGone
from crossdock.cluster.bench.loops import open_loop
from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.mix import Mix
from crossdock.cluster.bench.run import BenchOptions, bench_jobs
from crossdock.cluster.bench.workloads import SHAPES, WORDS, Interference, Job, arrival_times
from tests.cluster.bench.scripted import Scripted, measure


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"workload": "nap"}, "there is no 'nap'; choose from chat"),
        ({"workload": "trace"}, "need each other"),
        ({"trace": Path("t")}, "need each other"),
        ({"workload": "interference", "request_rate": 1.0}, "arrivals of its own"),
        ({"workload": "mix", "request_rate": 1.0}, "arrivals of its own"),
        ({"workload": "agents", "request_rate": 1.0}, "arrivals of its own"),
        ({"workload": "mix", "service_tier": "batch"}, "classes of its own"),
        ({"burstiness": 0.0}, "burstiness: must be above 0"),
        ({"num_requests": 0}, "num_requests: must be above 0"),
        ({"duration": -1.0}, "duration"),
    ],
)
def test_contradicting_options_raise(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BenchOptions(url="http://h", **options)


def test_jobs_are_bounded_by_number_or_duration() -> None:
    assert len(list(bench_jobs(BenchOptions("http://h")))) == SHAPES["chat"].num_requests
    assert len(list(bench_jobs(BenchOptions("http://h", duration=1.0, num_requests=5)))) == 5
    assert len(list(islice(bench_jobs(BenchOptions("http://h", duration=1.0)), 500))) == 500


def test_open_loop_sends_no_job_before_it_is_due() -> None:
    sent: list[float] = []

    async def send(job: Job) -> Sample:
        sent.append(time.perf_counter())
        return Sample(job.role, 1, 10)

    jobs = [Job((), 1, due=due) for due in (0.0, 0.05, 0.05, 0.2)]
    start = time.perf_counter()
    asyncio.run(open_loop(iter(jobs), send))
    assert [at - start >= job.due - 0.001 for at, job in zip(sent, jobs, strict=True)] == [True] * 4  # type: ignore[operator]


def test_closed_loop_against_scripted_delays_measures_them(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.first_delay, script.gap = 0.2, 0.03
    result = measure(url, num_requests=6, concurrency=3, prompt_tokens=40, output_tokens=5, goodput={"ttft": 0.1})
    summary = result.summary
    assert (summary["requests_ok"], summary["requests_failed"]) == (6, 0)
    assert summary["output_tokens"] == 30
    assert summary["prompt_tokens"] == 240
    assert summary["short_outputs"] == 0
    assert 200 <= summary["ttft_ms"]["p50"] < 20_000
    assert 0 < summary["gap_ms"]["count"] <= 24  # a busy client reads several tokens at once
    for sample in result.samples:
        # A client that reads one token late finds the next sooner than 30 ms: only whole requests have a least time.
        assert sample.ttft + sample.gaps.sum() == pytest.approx(sample.times[-1] - sample.sent)
        assert sample.times[-1] - sample.sent >= 0.2 + 4 * 0.03 - 0.002
    assert 0 < summary["gap_ms"]["p50"] <= summary["gap_ms"]["max"] < 20_000
    assert 0 < summary["tpot_ms"]["p50"] < 20_000
    assert summary["e2e_ms"]["p50"] >= 320
    assert summary["duration_s"] >= 2 * 0.32
    assert summary["goodput"]["share"] == 0
    assert script.most_under_way == 3
    assert result.model == "scripted"
    assert 0 < result.client_cpu_share < 1
    body = script.measured[0]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 5)
    assert all(1000 <= token < 1000 + len(WORDS) for token in body["prompt"])


def test_open_loop_with_slow_server_sends_without_waiting(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.hold_until = 8
    result = measure(url, num_requests=8, request_rate=100.0, output_tokens=3)
    assert script.most_under_way == 8
    assert result.summary["requests_ok"] == 8
    script.hold_until, script.first_delay = 0, 0.1
    capped = measure(url, num_requests=4, request_rate=100.0, concurrency=1, output_tokens=3, duration=60.0)
    assert capped.summary["duration_s"] >= 4 * 0.1


def test_duration_ends_closed_and_open_loops(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.first_delay = 0.1
    result = measure(url, duration=0.45, concurrency=1, output_tokens=3)
    assert 1 <= result.summary["requests_ok"] <= 5
    result = measure(url, duration=0.3, request_rate=10.0, output_tokens=3)
    assert result.summary["requests_ok"] == sum(
        due < 0.3 for due in islice(arrival_times(10.0, random.Random("arrivals/0")), 50)
    )


def test_warmup_requests_are_sent_and_not_counted(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    result = measure(url, num_requests=2, output_tokens=12, warmup=3)
    assert Counter(body["max_tokens"] for body in script.measured) == {8: 3, 12: 2}
    assert result.summary["requests_ok"] == 2


def test_failed_requests_are_counted_with_the_first_error(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.fail_every = 3
    result = measure(url, num_requests=9, concurrency=1, output_tokens=4)
    assert (result.summary["requests_ok"], result.summary["requests_failed"]) == (6, 3)
    assert result.summary["first_error"] == "HTTP 500: scripted failure"
    script.fail_every, script.break_off = 0, True
    result = measure(url, num_requests=2, concurrency=1, output_tokens=4)
    assert result.summary["requests_failed"] == 2
    assert "without a finish reason" in result.summary["first_error"]


def test_refused_requests_of_a_class_are_not_failures(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.refused_tier = "batch"
    ample = {name: {"ttft": 600.0, "tpot": 600.0} for name in ("interactive", "batch")}
    asked = {"num_requests": 4, "output_tokens": 4, "prompt_tokens": 20, "targets": ample}
    result = measure(url, **asked, service_tier="interactive")
    assert [body["service_tier"] for body in script.measured] == ["interactive"] * 4
    assert result.summary["slo"]["classes"]["interactive"]["goodput"]["share"] == 1
    refused = measure(url, **asked, service_tier="batch").summary
    assert (refused["requests_ok"], refused["requests_refused"], refused["requests_failed"]) == (0, 4, 0)
    assert refused["slo"]["goodput"]["share"] == 0
    assert "slo" not in measure(url, **asked).summary
    assert "service_tier" not in script.measured[-1]


def test_mix_beyond_the_servers_context_is_cut_to_it(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.max_model_len = 2000
    mix = Mix(rate=200.0, long_share=0.3, think_s=0.01, answer_tokens=(3, 5), long_answer_tokens=(3, 5))
    result = measure(url, workload="mix", mix=mix, num_requests=40)
    assert result.summary["requests_ok"] == 40
    assert max(len(body["prompt"]) for body in script.measured) == 1995
    assert any("context is 2,000: long prompts are 1,995 to 1,995 tokens" in note for note in result.notes)
    assert {body["service_tier"] for body in script.measured} == {"interactive", "standard", "batch"}
    assert set(result.summary["slo"]["classes"]) == {"interactive", "standard", "batch"}
    assert report.as_json(result)["options"]["mix"]["long_tokens"] == (1995, 1995)


def test_trace_is_replayed_at_its_times(scripted: tuple[Scripted, str], tmp_path: Path) -> None:
    script, url = scripted
    trace = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 600 + i, "output_length": 3 + i, "hash_ids": [7, i]} for i in range(4)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    result = measure(url, workload="trace", trace=trace, num_requests=3)
    assert sorted(len(body["prompt"]) for body in script.measured) == [600, 601, 602]
    assert len({tuple(body["prompt"][:512]) for body in script.measured}) == 1
    sent = [s.sent - result.origin for s in result.samples]
    assert all(s >= due - 0.005 for s, due in zip(sent, (0.0, 0.1, 0.2), strict=True))


def test_summary_has_server_figures_only_from_crossdocks_metrics(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    assert "server" not in measure(url, num_requests=1, output_tokens=4).summary
    script.metrics_text = "vllm:num_requests_running 1\n"
    assert "server" not in measure(url, num_requests=1, output_tokens=4).summary
    script.metrics_text = 'crossdock_steps_total{kind="mixed"} 1\ncrossdock_step_relative_error{quantile="0.9"} 0.125\n'
    assert measure(url, num_requests=1, output_tokens=4).summary["server"]["step_error_p90"] == 0.125


def test_interference_closes_its_streams_after_the_long_prompts(scripted: tuple[Scripted, str], tmp_path: Path) -> None:
    script, url = scripted
    script.gap, script.long_delay = 0.01, 0.3
    plan = Interference(long_prompts=2, long_prompt_tokens=1500, interval=0.05, quiet=0.2)
    result = measure(url, workload="interference", streams=3, interference=plan)
    figures = result.summary["interference"]
    assert (figures["streams"], figures["long_prompts"]) == (3, 2)
    assert figures["long_ttft_ms"]["p50"] >= 300
    assert figures["quiet_gap_ms"]["p50"] > 0, "a client that reads late sees the next token sooner than 10 ms"
    assert figures["interfered_gap_ms"]["count"] > 3
    assert result.summary["requests_failed"] == 0
    assert not result.notes
    for stream in (s for s in result.samples if s.role == "stream"):
        assert stream.stopped
        assert 4 < stream.output_tokens < 4096
    deadline = time.monotonic() + 240
    while script.closed_early < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert script.closed_early == 3  # the server sees its clients go
    assert [len(body["prompt"]) for body in script.measured if len(body["prompt"]) > 1000] == [1500, 1500]
    short = measure(url, workload="interference", streams=1, output_tokens=30, interference=plan)
    assert any("raise the output tokens" in note for note in short.notes)


def test_interference_without_established_stream_raises_the_servers_error(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.fail_every = 1
    with pytest.raises(BenchError, match="no stream was established: HTTP 500: scripted failure"):
        measure(url, workload="interference")


def test_short_requests_are_sent_while_long_prompts_prefill(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.long_delay = 0.4
    plan = Interference(
        long_prompts=2, long_prompt_tokens=1500, interval=0.05, quiet=0.2, short_interval=0.05, service_tier="batch"
    )
    result = measure(url, workload="short-vs-long", interference=plan, service_tier="standard", output_tokens=4)
    figures = result.summary["short_vs_long"]
    assert figures["long_prompts"] == 2
    assert figures["long_ttft_ms"]["p50"] >= 400
    assert figures["quiet_ttft_ms"]["count"] >= 1
    assert figures["short_ttft_ms"]["count"] >= 1
    assert result.summary["requests_failed"] == 0
    tiers = {len(body["prompt"]): body["service_tier"] for body in script.measured}
    assert tiers == {64: "standard", 1500: "batch"}
    assert report.as_json(result)["options"]["interference"]["short_interval"] == 0.05


def test_closed_loop_whose_server_goes_pauses_and_ends(
    scripted: tuple[Scripted, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop bounded by its duration alone would send as many requests as a core can fail."""
    script, url = scripted
    monkeypatch.setattr(run, "_GIVE_UP_S", 0.2)
    monkeypatch.setattr(run, "_RETRY_S", 0.1)
    connect = Endpoint.exchange

    async def exchange(self: Endpoint, *args: Any) -> Any:
        if len(script.measured) >= 4:
            raise ServerGone("no server")
        return await connect(self, *args)

    monkeypatch.setattr(Endpoint, "exchange", exchange)
    result = measure(url, duration=600.0, concurrency=2, warmup=0)
    assert result.ended_early
    assert 4 <= result.summary["requests_ok"] <= 5  # the other loop may have sent one when the fourth arrived
    assert 2 <= result.summary["requests_failed"] <= 12
    assert "the run ended early: no server" in str(report.as_json(result)["notes"])
