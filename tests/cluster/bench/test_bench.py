"""The load generator: pure parts by example and property, the client against a real server with scripted delays."""

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from crossdock.cluster.bench import metrics, report, serverside
from crossdock.cluster.bench.client import Server
from crossdock.cluster.bench.command import bench
from crossdock.cluster.bench.http import BenchError, HttpResponse, TokenStream, error_text
from crossdock.cluster.bench.metrics import Sample, gaps_within, meets, parse_goodput, spread_ms, summarize
from crossdock.cluster.bench.mix import Mix
from crossdock.cluster.bench.run import BenchOptions, bench_jobs, open_loop, run_bench
from crossdock.cluster.bench.workloads import (
    SHAPES,
    WORDS,
    Interference,
    Job,
    Segment,
    Shape,
    arrival_times,
    at_rate,
    read_trace,
    shaped_jobs,
)
from crossdock.cluster.watch.scrape import Scrape

# ---- workloads


def test_arrival_times_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    times = np.fromiter(islice(arrival_times(5.0, random.Random(1)), 20_001), dtype=float)
    between = np.diff(times)
    assert times[0] == 0
    assert between.mean() == pytest.approx(1 / 5, rel=0.03)
    assert between.std() == pytest.approx(between.mean(), rel=0.03)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ValueError, match="request rate"):
        next(arrival_times(rate, random.Random(0)))


def test_arrivals_depend_on_the_seed_alone() -> None:
    shape = SHAPES["chat"]
    first, again, other = ([j.due for j in islice(at_rate(shaped_jobs(shape), 3.0, seed), 10)] for seed in (7, 7, 8))
    assert first == again != other


def test_prompts_share_the_shapes_prefix_and_nothing_else() -> None:
    shape = Shape(prompt_tokens=64, output_tokens=8, num_requests=3, concurrency=1, prefix_tokens=2048)
    jobs = list(islice(shaped_jobs(shape), 3))
    assert {job.prompt[0] for job in jobs} == {Segment("prefix", 2048)}
    assert len({job.prompt[1].key for job in jobs}) == 3
    assert [job.prompt_tokens for job in jobs] == [2112] * 3


def test_mooncake_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 9]}\n\n'
        '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 3]}\n'
        '{"timestamp": 5000, "input_length": 30, "output_length": 0}\n'
    )
    early, late, plain = read_trace(trace)
    assert [early.due, late.due, plain.due] == [0.0, 2.0, 4.0]
    assert early.prompt == (Segment("hash/1", 512), Segment("hash/3", 88))
    assert late.prompt == (Segment("hash/1", 512), Segment("hash/2", 512), Segment("hash/9", 76))
    assert plain.prompt_tokens == 30
    assert plain.output_tokens == 1
    faster = read_trace(trace, speed=4, length_scale=0.25)
    assert [job.due for job in faster] == [0.0, 0.5, 1.0]
    assert [job.prompt_tokens for job in faster] == [150, 275, 8]
    assert faster[0].prompt[0] == faster[1].prompt[0] == Segment("hash/1", 128)


def test_azure_trace(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(trace)
    assert (first.due, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.due == pytest.approx(4.31458, abs=1e-5)
    assert first.prompt[0].key != second.prompt[0].key


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no requests"),
        ('{"timestamp": 1, "input_length": 3}\n', "line 1: KeyError: 'output_length'"),
        ('{"timestamp": 1, "input_length": "many", "output_length": 1}\n', "line 1: ValueError"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}\n', "whole number"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: ValueError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", "line 2: ValueError"),
        ("when,how\n1,2\n", "line 2: KeyError"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    trace = tmp_path / "bad"
    trace.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_trace(trace)


def test_a_missing_trace_and_bad_scales() -> None:
    with pytest.raises(ValueError, match="cannot read"):
        read_trace(Path("/nonexistent/trace"))
    with pytest.raises(ValueError, match="trace speed"):
        read_trace(Path("/nonexistent/trace"), speed=0)


# ---- figures


def sample(*times: float, counts: list[int] | None = None, sent: float = 0.0, **fields: Any) -> Sample:
    given = {"role": "request", "asked_tokens": len(times), "prompt_tokens": 10, "ended": times[-1] if times else 1.0}
    return Sample(**{**given, **fields}, sent=sent, times=list(times), counts=counts or [1] * len(times))


def test_figures_of_one_request() -> None:
    one = sample(3.0, 3.5, 4.5, counts=[1, 1, 3], sent=1.0, ended=4.75)
    assert one.ttft == 2.0
    assert one.gaps.tolist() == [0.5, 1.0]
    assert one.tpot == pytest.approx(1.5 / 4)
    assert one.e2e == 3.75
    assert one.output_tokens == 5
    assert sample(2.0).tpot is None
    assert sample(2.0, 3.0, counts=[1, 1], usage_tokens=11).tpot == pytest.approx(0.1)  # the server's count wins


def test_summary_counts_failures_apart_and_keeps_the_first_error() -> None:
    samples = [
        sample(1.0, 1.1, 1.2, asked_tokens=4),
        sample(error="HTTP 500: boom"),
        sample(),
        sample(2.0, 2.5, stopped=True, asked_tokens=100),
    ]
    summary = summarize(samples, duration=10.0)
    assert (summary["requests_ok"], summary["requests_failed"], summary["first_error"]) == (2, 2, "HTTP 500: boom")
    assert summary["output_tokens"] == 5
    assert summary["output_tokens_per_s"] == 0.5
    assert summary["prompt_tokens_per_s"] == 2.0
    assert summary["requests_per_s"] == 0.2
    assert summary["short_outputs"] == 1  # the one closed on purpose is not short
    assert summary["gap_ms"]["count"] == 3
    assert summary["gap_ms"]["max"] == pytest.approx(500)
    assert summary["e2e_ms"]["count"] == 1
    assert "goodput" not in summary


def test_an_empty_run_has_no_percentiles() -> None:
    summary = summarize([], duration=0.0)
    assert summary["ttft_ms"] == {"count": 0}
    assert summary["first_error"] is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_bounded(values: list[float]) -> None:
    spread = spread_ms(values)
    assert spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"] == pytest.approx(max(values) * 1000)


def test_goodput_needs_every_limit_met() -> None:
    limits = parse_goodput(["ttft:1000 tpot:100,gap:250"])
    assert limits == {"ttft": 1.0, "tpot": 0.1, "gap": 0.25}
    good = sample(0.5, 0.6, 0.7)
    late = sample(1.5, 1.6, 1.7)
    slow = sample(0.5, 0.65, 0.8)
    stuttering = sample(*[0.5 + 0.01 * i for i in range(9)], 0.9)
    samples = [good, late, slow, stuttering, sample(error="x")]
    assert [meets(s, limits) for s in samples] == [True, False, False, False, False]
    assert meets(sample(0.5), limits)  # a single token has no gap
    goodput = summarize(samples, 2.0, limits)["goodput"]
    assert (goodput["share"], goodput["requests_per_s"]) == (0.2, 0.5)
    assert goodput["limits_ms"]["ttft"] == 1000


@pytest.mark.parametrize("spec", ["ttft", "ttft:", "ttft:fast", "latency:5", "tpot:-1", "tpot:nan", ":5"])
def test_bad_goodput_specs(spec: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        parse_goodput([spec])


def test_a_gap_belongs_to_the_window_its_middle_lies_in() -> None:
    # A long prompt sent at 1.05, amid a quiet step, its first token leaving with the stream's token at 3.0.
    stream = sample(0.9, 1.0, 1.1, 2.1, 3.0, 3.1, 3.2)
    assert gaps_within(stream, [(1.06, 2.9999)]).tolist() == pytest.approx([1.0, 0.9])
    assert gaps_within(stream, [(0.0, 1.0), (3.1, 9.0)]).tolist() == pytest.approx([0.1, 0.1])
    assert gaps_within(sample(1.0), [(0.0, 9.0)]).size == 0


def test_interference_figures() -> None:
    stream = sample(*[0.1 * i for i in range(11)], 1.5, 2.0, 2.1, role="stream", stopped=True)
    long = sample(2.0, sent=1.0, role="long", prompt_tokens=4000)
    failed = sample(role="long", sent=2.05, error="refused")
    figures = metrics.interference([stream, long, failed], quiet=(0.0, 1.0))
    assert figures["quiet_gap_ms"]["p99"] == pytest.approx(100)
    assert figures["interfered_gap_ms"]["p50"] == pytest.approx(500)
    assert figures["long_ttft_ms"]["p50"] == pytest.approx(1000)
    assert figures["long_prompt_tokens_per_s"] == pytest.approx(4000)
    assert (figures["streams"], figures["long_prompts"]) == (1, 1)


def test_classes_are_held_to_their_own_targets() -> None:
    targets = metrics.parse_targets(["interactive=ttft:500,tpot:100", "bulk=ttft:9000"])
    assert targets["interactive"] == {"ttft": 0.5, "tpot": 0.1}
    assert targets["batch"] == metrics.DEFAULT_TARGETS["batch"]
    samples = [
        sample(0.4, 0.45, service_tier="interactive"),
        sample(0.6, 0.65, service_tier="interactive"),
        sample(service_tier="interactive", error="HTTP 429: busy", refused=True),
        sample(service_tier="interactive", error="HTTP 500: boom"),
        sample(8.0, 9.0, service_tier="bulk"),
        sample(1.0, 1.5, service_tier="own"),  # a class without targets promises nothing
        sample(0.1),  # no class
    ]
    slo = metrics.by_class(samples, 10.0, targets)
    assert list(slo["classes"]) == ["interactive", "bulk", "own"]
    its = slo["classes"]["interactive"]
    assert (its["requests_ok"], its["requests_refused"], its["requests_failed"]) == (2, 1, 1)
    assert its["first_error"] == "HTTP 500: boom"
    assert its["goodput"] == {"share": 0.25, "requests_per_s": 0.1, "limits_ms": {"ttft": 500, "tpot": 100}}
    assert slo["classes"]["bulk"]["goodput"]["share"] == 1
    assert "goodput" not in slo["classes"]["own"]
    assert slo["goodput"] == {"share": 0.5, "requests_per_s": 0.3}


def test_default_targets_are_the_servers() -> None:
    assert metrics.parse_targets([]) == {
        "interactive": {"ttft": 1.0, "tpot": 0.05},
        "standard": {"ttft": 10.0, "tpot": 0.1},
        "batch": {"ttft": 600.0, "tpot": 2.0},
    }


@pytest.mark.parametrize("spec", ["interactive", "=ttft:5", "batch=speed:5", "batch=ttft:-1"])
def test_bad_targets(spec: str) -> None:
    with pytest.raises(ValueError, match=r"^slo: "):
        metrics.parse_targets([spec])


def test_short_requests_count_where_they_were_sent() -> None:
    samples = [
        sample(0.1, sent=0.0, role="short"),
        sample(10.0, sent=5.0, role="long", prompt_tokens=4000),
        sample(5.8, sent=5.5, role="short"),
        sample(10.1, sent=9.9, role="short"),
        sample(11.0, sent=10.5, role="short"),  # between two long prompts: in neither
        sample(sent=6.0, role="short", error="HTTP 429: busy", refused=True),
    ]
    figures = metrics.short_vs_long(samples, quiet=(0.0, 5.0))
    assert figures["quiet_ttft_ms"]["p50"] == pytest.approx(100)
    assert figures["short_ttft_ms"]["count"] == 2
    assert figures["short_ttft_ms"]["p50"] == pytest.approx(250)
    assert figures["long_prompt_tokens_per_s"] == pytest.approx(800)


def test_the_server_is_asked_what_it_did() -> None:
    before = Scrape.parse('crossdock_steps_total{kind="mixed",replica="a"} 10\ncrossdock_prompt_tokens_total 50\n', 2.0)
    text = """
crossdock_steps_total{kind="mixed",replica="a"} 14
crossdock_steps_total{kind="chunks",replica="a"} 3
crossdock_prompt_tokens_total 1050
crossdock_step_relative_error{quantile="0.5",replica="a"} 0.05
crossdock_step_relative_error{quantile="0.5",replica="b"} 0.07
crossdock_step_relative_error{quantile="0.9",replica="a"} 0.2
"""
    assert serverside.figures(before, Scrape.parse(text, 12.0)) == {
        "steps": {"mixed": 4, "chunks": 3},
        "prefill_tokens_per_s": 100.0,
        "step_error_p50": 0.07,
        "step_error_p90": 0.2,
    }


# ---- HTTP and events, byte by byte

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;ext=1\r\n \r\n6\r\nworld\n\r\n0\r\n\r\n"
)


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=12))
def test_chunked_bodies_survive_any_split(cuts: list[int]) -> None:
    response = HttpResponse()
    edges = [0, *sorted(cuts), len(CHUNKED)]
    body = b"".join(response.feed(CHUNKED[a:b]) for a, b in pairwise(edges))
    assert body == b"hello world\n"
    assert response.status == 200
    assert response.complete


@pytest.mark.parametrize(
    ("head", "complete_before", "complete_after_close"),
    [(b"Content-Length: 3\r\n", True, True), (b"Content-Length: 9\r\n", False, False), (b"", False, True)],
)
def test_bodies_by_length_or_to_the_end(head: bytes, complete_before: bool, complete_after_close: bool) -> None:
    response = HttpResponse()
    assert response.feed(b"HTTP/1.1 404 Not Found\r\n" + head + b"\r\nabc") == b"abc"
    assert (response.status, response.complete) == (404, complete_before)
    response.end_of_stream()
    assert response.complete == complete_after_close


def test_other_protocols_are_recognised() -> None:
    with pytest.raises(BenchError, match="not an HTTP server"):
        HttpResponse().feed(b"SSH-2.0-OpenSSH\r\n\r\n")


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str, **fields: Any) -> bytes:
    return event(choices=[{"text": value, "finish_reason": None}], **fields)


def test_tokens_are_counted_by_text_until_the_server_counts() -> None:
    stream = TokenStream(Sample("request", 4, 10))
    stream.feed(text("a") + text("b"), 1.0)
    stream.feed(b": comment\r\n" + text("")[:9], 2.0)
    stream.feed(text("")[9:], 2.5)
    stream.feed(text("c"), 3.0)
    stream.feed(event(choices=[], usage={"prompt_tokens": 12, "completion_tokens": 4}) + b"data: [DONE]\n\n", 4.0)
    assert stream.sample.times == [1.0, 3.0]
    assert stream.sample.counts == [2, 1]
    assert stream.sample.output_tokens == 4
    assert stream.sample.prompt_tokens == 12
    assert stream.done


def test_running_usage_sees_tokens_that_add_no_text() -> None:
    stream = TokenStream(Sample("request", 9, 10))
    for number, (value, count) in enumerate([("", 0), ("", 1), ("é", 2), ("ab", 5)]):
        stream.feed(text(value, usage={"prompt_tokens": 10, "completion_tokens": count}), float(number))
    assert stream.sample.times == [1.0, 2.0, 3.0]
    assert stream.sample.counts == [1, 1, 3]
    assert not stream.done


def test_chat_deltas_and_errors() -> None:
    stream = TokenStream(Sample("request", 9, 10))
    stream.feed(event(choices=[{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]), 1.0)
    assert not stream.sample.times
    stream.feed(
        event(choices=[{"delta": {"content": "x"}}]) + event(choices=[{"delta": {"reasoning_content": "y"}}]), 2.0
    )
    stream.feed(event(choices=[{"delta": {}, "finish_reason": "length"}]), 3.0)
    assert (stream.sample.counts, stream.done) == ([2], True)
    stream.feed(event(error={"message": "replica lost", "code": 503}), 4.0)
    assert stream.sample.error == "error event: replica lost"
    with pytest.raises(BenchError, match="not an event"):
        stream.feed(b"data: nonsense\n", 5.0)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "no such model", "type": "x"}}', "no such model"),
        (b'{"message": "too  long\\n"}', "too long"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"", "(empty)"),
    ],
)
def test_error_texts(body: bytes, shown: str) -> None:
    assert error_text(body) == shown


# ---- against a server


class Scripted:
    """An OpenAI server whose every behaviour a test sets. Keeps the bodies it was sent."""

    def __init__(self) -> None:
        self.first_delay = 0.0
        self.gap = 0.0
        self.long_delay = 0.0  # before the first token of a prompt of 1000 tokens or more
        self.refused_fields: tuple[str, ...] = ()
        self.tokenizes = True
        self.completions = True
        self.fail_every = 0
        self.break_off = False
        self.usage = True
        self.template_tokens = 0
        self.refused_tier: str | None = None  # its requests are answered 429
        self.metrics_text: str | None = None
        self.max_model_len: int | None = None
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = self.closed_early = 0
        self.api = FastAPI()
        self.api.get("/v1/models")(lambda: {"data": [{"id": "scripted", "max_model_len": self.max_model_len}]})
        self.api.get("/metrics")(lambda: Response(self.metrics_text, 404 if self.metrics_text is None else 200))
        self.api.post("/tokenize")(self.tokenize)
        self.api.post("/v1/completions")(self.complete)
        self.api.post("/v1/chat/completions")(self.complete)

    async def tokenize(self, request: Request) -> Response:
        if not self.tokenizes:
            return JSONResponse({"detail": "Not Found"}, 404)
        words = (await request.json())["prompt"].split()
        return JSONResponse({"tokens": [1000 + WORDS.index(word) for word in words]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if not self.completions and "prompt" in body:
            return JSONResponse({"detail": "Not Found"}, 404)
        for name in self.refused_fields:
            if name in json.dumps(body):
                return JSONResponse({"error": {"message": f"unknown field {name}"}}, 422)
        self.bodies.append(body)
        if body["max_tokens"] > 2 and body.get("service_tier", "") == self.refused_tier:
            return JSONResponse({"error": {"message": "overloaded"}}, 429, {"Retry-After": "3"})
        if self.fail_every and len(self.measured) and len(self.measured) % self.fail_every == 0:
            return JSONResponse({"error": {"message": "scripted failure"}}, 500)
        if not body.get("stream"):
            return JSONResponse({})
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    @property
    def measured(self) -> list[dict[str, Any]]:
        return [body for body in self.bodies if body["max_tokens"] > 2]

    def prompt_tokens(self, body: dict[str, Any]) -> int:
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        return self.template_tokens + len(prompt.split() if isinstance(prompt, str) else prompt)

    async def events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        finished = False
        try:
            options = body.get("stream_options", {})
            prompt_tokens = self.prompt_tokens(body)
            await asyncio.sleep(self.long_delay if prompt_tokens >= 1000 else self.first_delay)
            count = body["max_tokens"]
            for number in range(1, count + 1):
                usage = {"prompt_tokens": prompt_tokens, "completion_tokens": number}
                running = {"usage": usage} if options.get("continuous_usage_stats") else {}
                end = "length" if number == count else None
                if "messages" in body:
                    yield event(choices=[{"delta": {"content": "w "}, "finish_reason": end}], **running)
                else:
                    yield event(choices=[{"text": "w ", "finish_reason": end}], **running)
                if self.break_off and count > 2 and number == 2:
                    return
                await asyncio.sleep(self.gap)
            if options.get("include_usage") and self.usage:
                yield event(choices=[], usage=usage)
            yield b"data: [DONE]\n\n"
            finished = True
        finally:
            self.under_way -= 1
            self.closed_early += not finished


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    script = Scripted()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(script.api, log_level="warning", ws="none", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield script, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def measure(url: str, **options: Any) -> Any:
    return asyncio.run(run_bench(BenchOptions(url=url, **{"warmup": 0, **options})))


def test_closed_loop_measures_what_the_server_did(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.first_delay, script.gap = 0.2, 0.03
    result = measure(url, num_requests=6, concurrency=3, prompt_tokens=40, output_tokens=5, goodput={"ttft": 0.1})
    summary = result.summary
    assert (summary["requests_ok"], summary["requests_failed"]) == (6, 0)
    assert summary["output_tokens"] == 30
    assert summary["prompt_tokens"] == 240
    assert summary["short_outputs"] == 0
    assert 200 <= summary["ttft_ms"]["p50"] < 2000
    assert summary["gap_ms"]["count"] == 24
    assert 29 <= summary["gap_ms"]["p50"] < 500
    assert 29 <= summary["tpot_ms"]["p50"] < 500
    assert summary["e2e_ms"]["p50"] >= 320
    assert summary["duration_s"] >= 2 * 0.32
    assert summary["goodput"]["share"] == 0
    assert script.most_under_way == 3
    assert result.model == "scripted"
    assert 0 < result.client_cpu_share < 1
    body = script.measured[0]
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"]) == (0, True, 5)
    assert all(1000 <= token < 1000 + len(WORDS) for token in body["prompt"])


def test_open_loop_sends_without_waiting_for_answers(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.first_delay = 1.0
    result = measure(url, num_requests=8, request_rate=100.0, output_tokens=3)
    assert script.most_under_way == 8
    assert result.summary["requests_ok"] == 8
    capped = measure(url, num_requests=4, request_rate=100.0, concurrency=1, output_tokens=3, duration=60.0)
    assert capped.summary["duration_s"] >= 4.0


def test_the_duration_ends_both_loops(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.first_delay = 0.1
    result = measure(url, duration=0.45, concurrency=1, output_tokens=3)
    assert 1 <= result.summary["requests_ok"] <= 5
    result = measure(url, duration=0.3, request_rate=10.0, output_tokens=3)
    assert result.summary["requests_ok"] == sum(
        due < 0.3 for due in islice(arrival_times(10.0, random.Random("arrivals/0")), 50)
    )


def test_warmup_is_made_and_not_counted(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    result = measure(url, num_requests=2, output_tokens=12, warmup=3)
    assert Counter(body["max_tokens"] for body in script.measured) == {8: 3, 12: 2}
    assert result.summary["requests_ok"] == 2


def test_failures_are_counted_and_the_first_is_shown(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.fail_every = 3
    result = measure(url, num_requests=9, concurrency=1, output_tokens=4)
    assert (result.summary["requests_ok"], result.summary["requests_failed"]) == (6, 3)
    assert result.summary["first_error"] == "HTTP 500: scripted failure"
    script.fail_every, script.break_off = 0, True
    result = measure(url, num_requests=2, concurrency=1, output_tokens=4)
    assert result.summary["requests_failed"] == 2
    assert "without a finish reason" in result.summary["first_error"]


def test_a_request_that_takes_too_long_has_failed(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted

    async def slow() -> Sample:
        server = Server(url, timeout=5)
        await server.connect()
        script.first_delay, server.timeout = 30, 0.1
        return await server.run(Job((Segment("x", 4),), 3), Sample("request", 3, 4))

    assert asyncio.run(slow()).error == "no end after 0 s"


def test_interference(scripted: tuple[Scripted, str], tmp_path: Path) -> None:
    script, url = scripted
    script.gap, script.long_delay = 0.01, 0.3
    plan = Interference(long_prompts=2, long_prompt_tokens=1500, interval=0.05, quiet=0.2)
    result = measure(url, workload="interference", streams=3, interference=plan)
    figures = result.summary["interference"]
    assert (figures["streams"], figures["long_prompts"]) == (3, 2)
    assert figures["long_ttft_ms"]["p50"] >= 300
    assert figures["quiet_gap_ms"]["p50"] >= 9
    assert figures["interfered_gap_ms"]["count"] > 3
    assert result.summary["requests_failed"] == 0
    assert not result.notes
    for stream in (s for s in result.samples if s.role == "stream"):
        assert stream.stopped
        assert 4 < stream.output_tokens < 4096
    deadline = time.monotonic() + 10
    while script.closed_early < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert script.closed_early == 3  # the server sees its clients go
    assert [len(body["prompt"]) for body in script.measured if len(body["prompt"]) > 1000] == [1500, 1500]

    report.plot(result, tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
    short = measure(url, workload="interference", streams=1, output_tokens=30, interference=plan)
    assert any("raise the output tokens" in note for note in short.notes)


def test_classes_reach_the_server_and_refusals_are_no_failures(scripted: tuple[Scripted, str]) -> None:
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


def test_a_server_that_knows_no_classes_is_measured_by_class_nevertheless(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.refused_fields = ("service_tier",)
    result = measure(url, num_requests=2, output_tokens=4, service_tier="interactive")
    assert "service_tier" not in script.measured[-1]
    assert isinstance(script.measured[-1]["prompt"], list)  # nothing else was given up
    assert any("asking without service_tier" in note for note in result.notes)
    assert result.summary["slo"]["classes"]["interactive"]["requests_ok"] == 2


def test_a_mix_is_cut_to_the_servers_context(scripted: tuple[Scripted, str]) -> None:
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


def test_short_requests_keep_coming_while_long_prompts_prefill(scripted: tuple[Scripted, str]) -> None:
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


def test_figures_of_the_server_are_reported_where_it_has_them(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    assert "server" not in measure(url, num_requests=1, output_tokens=4).summary
    script.metrics_text = "vllm:num_requests_running 1\n"
    assert "server" not in measure(url, num_requests=1, output_tokens=4).summary
    script.metrics_text = 'crossdock_steps_total{kind="mixed"} 1\ncrossdock_step_relative_error{quantile="0.9"} 0.125\n'
    assert measure(url, num_requests=1, output_tokens=4).summary["server"]["step_error_p90"] == 0.125


def test_interference_without_a_living_stream_says_why(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.fail_every = 1
    with pytest.raises(BenchError, match="no stream was established: HTTP 500: scripted failure"):
        measure(url, workload="interference")


def test_shared_prefixes_are_shared_and_runs_share_nothing(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    given = {
        "workload": "shared-prefix",
        "num_requests": 2,
        "prefix_tokens": 50,
        "prompt_tokens": 20,
        "output_tokens": 3,
    }
    measure(url, **given)
    measure(url, **given)
    first, second, later, _ = sorted((b["prompt"] for b in script.measured), key=script_order(script))
    assert first[:50] == second[:50]
    assert first[50:] != second[50:]
    assert first[:50] != later[:50]
    script.bodies.clear()
    measure(url, **given, repeat_prompts=True)
    measure(url, **given, repeat_prompts=True)
    prompts = [tuple(body["prompt"]) for body in script.measured]
    assert len(prompts) == 4
    assert len(set(prompts)) == 2


def script_order(script: Scripted) -> Any:
    order = [body["prompt"] for body in script.measured]
    return lambda prompt: order.index(prompt)


def test_a_trace_is_replayed(scripted: tuple[Scripted, str], tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("setting", "check"),
    [
        ({"refused_fields": ("continuous_usage_stats",)}, lambda b: b["stream_options"] == {"include_usage": True}),
        ({"refused_fields": ("ignore_eos",)}, lambda b: "ignore_eos" not in b and isinstance(b["prompt"], list)),
        (
            {"refused_fields": ("ignore_eos", "stream_options")},
            lambda b: b.keys().isdisjoint({"ignore_eos", "stream_options"}),
        ),
        ({"tokenizes": False}, lambda b: isinstance(b["prompt"], str)),
        ({"completions": False}, lambda b: b["messages"][0]["role"] == "user"),
    ],
)
def test_what_a_server_refuses_is_left_out(scripted: tuple[Scripted, str], setting: dict[str, Any], check: Any) -> None:
    script, url = scripted
    for name, value in setting.items():
        setattr(script, name, value)
    result = measure(url, num_requests=3, output_tokens=6, prompt_tokens=30)
    assert check(script.measured[-1])
    assert (result.summary["requests_ok"], result.summary["output_tokens"]) == (3, 18)
    assert len(result.notes) == len(setting.get("refused_fields", ())) + (not setting.get("completions", True))


def test_texts_are_cut_to_length_with_the_template_counted(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.template_tokens = 11
    result = measure(url, num_requests=2, output_tokens=4, prompt_tokens=90, chat=True)
    assert result.summary["prompt_tokens"] == 180
    assert {script.prompt_tokens(body) for body in script.measured} == {90}


def test_a_server_that_counts_nothing(scripted: tuple[Scripted, str]) -> None:
    script, url = scripted
    script.usage, script.refused_fields = False, ("continuous_usage_stats",)
    result = measure(url, num_requests=2, output_tokens=4, prompt_tokens=25, chat=True)
    assert result.summary["output_tokens"] == 8
    assert any("one token per word" in note for note in result.notes)


def test_a_local_tokenizer_gives_the_ids(scripted: tuple[Scripted, str], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    script, url = scripted
    script.tokenizes = False
    tokenizer = Tokenizer(models.WordLevel({word: 5000 + i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    measure(url, num_requests=1, output_tokens=3, tokenizer=tmp_path)
    assert all(token >= 5000 for token in script.measured[0]["prompt"])
    with pytest.raises(BenchError, match="there is no"):
        measure(url, tokenizer=tmp_path / "elsewhere")


# ---- errors and the command line


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://h:port"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(BenchError):
        Server(url)


@pytest.mark.parametrize("url", ["h:81", "http://h:81/", "http://h:81/v1", "http://h:81/v1/"])
def test_addresses_that_are_the_same(url: str) -> None:
    assert Server(url).url == "http://h:81"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"workload": "nap"}, "there is no 'nap'; choose from chat"),
        ({"workload": "trace"}, "need each other"),
        ({"trace": Path("t")}, "need each other"),
        ({"workload": "interference", "request_rate": 1.0}, "arrivals of its own"),
        ({"workload": "mix", "request_rate": 1.0}, "arrivals of its own"),
        ({"workload": "mix", "service_tier": "batch"}, "classes of its own"),
        ({"burstiness": 0.0}, "burstiness: must be above 0"),
        ({"num_requests": 0}, "num_requests: must be above 0"),
        ({"duration": -1.0}, "duration"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        BenchOptions(url="http://h", **options)


def test_a_number_of_requests_or_a_duration_bounds_every_run() -> None:
    assert len(list(bench_jobs(BenchOptions("http://h")))) == SHAPES["chat"].num_requests
    assert len(list(bench_jobs(BenchOptions("http://h", duration=1.0, num_requests=5)))) == 5
    assert len(list(islice(bench_jobs(BenchOptions("http://h", duration=1.0)), 500))) == 500


def test_open_loop_keeps_to_the_due_times() -> None:
    sent: list[float] = []

    async def send(job: Job) -> Sample:
        sent.append(time.perf_counter())
        return sample(1.0)

    jobs = [Job((), 1, due=due) for due in (0.0, 0.05, 0.05, 0.2)]
    start = time.perf_counter()
    asyncio.run(open_loop(iter(jobs), send))
    assert [at - start >= job.due - 0.001 for at, job in zip(sent, jobs, strict=True)] == [True] * 4  # type: ignore[operator]


@pytest.fixture
def command() -> Any:
    app = typer.Typer()
    app.command()(bench)
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


def test_command_reports_and_writes(scripted: tuple[Scripted, str], tmp_path: Path, command: Any) -> None:
    script, url = scripted
    script.gap = 0.005
    files = tmp_path / "out.json", tmp_path / "out.png"
    result = command(
        *(f"{url}/v1", "-n", 4, "-c", 2, "--output-tokens", 6, "--warmup", 0, "--api-key", "secret"),
        *("--goodput", "ttft:60000", "--goodput", "tpot:60000", "--header", "X-Team: dock"),
        *("--json", files[0], "--plot", files[1]),
    )
    assert result.exit_code == 0, result.output
    assert "4 / 0" in result.output
    assert "100.0%" in result.output
    written = json.loads(files[0].read_text())
    assert written["summary"]["output_tokens"] == 24
    assert [row["output_tokens"] for row in written["requests"]] == [6] * 4
    assert "secret" not in files[0].read_text()
    assert files[1].stat().st_size > 1000


def test_command_shows_classes_and_the_servers_figures(scripted: tuple[Scripted, str], command: Any) -> None:
    script, url = scripted
    script.refused_tier = "batch"
    script.metrics_text = """
crossdock_steps_total{kind="mixed"} 1
crossdock_step_relative_error{quantile="0.5"} 0.041
crossdock_step_relative_error{quantile="0.9"} 0.125
"""
    result = command(
        *(url, "--mix", "bursty", "-n", 30, "--request-rate", 100, "--long-tokens", "1000-1200"),
        *("--long-share", 0.4, "--batch-share", 0.5, "--slo", "interactive=ttft:20000,tpot:5000", "--warmup", 0),
    )
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for text in (
        "refused (429)",
        "interactive: ok / refused / failed",
        "good (ttft:20000 tpot:5000)",
        "batch: ok / refused / failed",
        "all classes: good",
        "step prediction error p50 / p90",
        "4.1% / 12.5%",
        "plain TTFT",
    ):
        assert text in shown


def test_command_says_what_is_wrong(command: Any, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        result = command(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert result.exit_code == 1
    assert "no server at" in " ".join(result.output.split())
    for args, complaint in [
        (("-w", "nap"), "there is no 'nap'"),
        (("--goodput", "speed:9"), "not KEY:MS"),
        (("--header", "nonsense"), "not 'Name: value'"),
        (("--slo", "fast"), "not CLASS=KEY:MS"),
        (("-w", "mix", "--mix", "wild"), "there is no 'wild'; choose from chat-heavy, long-heavy, bursty"),
        (("-w", "mix", "--long-tokens", "many"), "not FROM-TO"),
        (("-w", "mix", "--long-share", "2"), "share between 0 and 1"),
        (("--trace", tmp_path / "none"), "cannot read"),
    ]:
        result = command("http://127.0.0.1:9", *args)
        assert result.exit_code == 2
        assert complaint in " ".join(result.output.split())


def test_command_fails_when_every_request_did(scripted: tuple[Scripted, str], command: Any) -> None:
    script, url = scripted
    script.fail_every = 1
    result = command(url, "-n", 2, "--warmup", 0)
    assert result.exit_code == 1
    assert "scripted failure" in result.output
