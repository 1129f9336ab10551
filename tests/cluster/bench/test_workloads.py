"""Jobs drawn from a seed or read from a trace."""

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from crossdock.cluster.bench.workloads import SHAPES, Segment, Shape, arrival_times, at_rate, read_trace, shaped_jobs


def test_arrival_times_without_bursts_are_a_poisson_process() -> None:
    times = np.fromiter(islice(arrival_times(5.0, random.Random(1)), 20_001), dtype=float)
    between = np.diff(times)
    assert times[0] == 0
    assert between.mean() == pytest.approx(1 / 5, rel=0.03)
    assert between.std() == pytest.approx(between.mean(), rel=0.03)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_arrival_times_with_rate_not_above_0_raise(rate: float) -> None:
    with pytest.raises(ValueError, match="request rate"):
        next(arrival_times(rate, random.Random(0)))


def test_arrivals_with_same_seed_are_equal() -> None:
    shape = SHAPES["chat"]
    first, again, other = ([j.due for j in islice(at_rate(shaped_jobs(shape), 3.0, seed), 10)] for seed in (7, 7, 8))
    assert first == again != other


def test_shaped_jobs_share_only_the_prefix() -> None:
    shape = Shape(prompt_tokens=64, output_tokens=8, num_requests=3, concurrency=1, prefix_tokens=2048)
    jobs = list(islice(shaped_jobs(shape), 3))
    assert {job.prompt[0] for job in jobs} == {Segment("prefix", 2048)}
    assert len({job.prompt[1].key for job in jobs}) == 3
    assert [job.prompt_tokens for job in jobs] == [2112] * 3


def test_mooncake_trace_gives_jobs_in_order_of_arrival(tmp_path: Path) -> None:
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


def test_azure_trace_gives_jobs_without_shared_prefix(tmp_path: Path) -> None:
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
def test_wrong_trace_is_reported_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    trace = tmp_path / "bad"
    trace.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        read_trace(trace)


def test_missing_trace_and_wrong_scale_raise() -> None:
    with pytest.raises(ValueError, match="cannot read"):
        read_trace(Path("/nonexistent/trace"))
    with pytest.raises(ValueError, match="trace speed"):
        read_trace(Path("/nonexistent/trace"), speed=0)
