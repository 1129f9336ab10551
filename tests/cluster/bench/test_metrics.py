"""Figures of samples: spreads, goodput, classes, interference; and those of the server's own metrics."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.cluster.bench import metrics, serverside
from crossdock.cluster.bench.metrics import Sample, gaps_within, meets, parse_goodput, spread_ms, summarize
from crossdock.cluster.watch.scrape import Scrape


def sample(*times: float, counts: list[int] | None = None, sent: float = 0.0, **fields: Any) -> Sample:
    given = {"role": "request", "asked_tokens": len(times), "prompt_tokens": 10, "ended": times[-1] if times else 1.0}
    return Sample(**{**given, **fields}, sent=sent, times=list(times), counts=counts or [1] * len(times))


def test_sample_has_ttft_gaps_tpot_and_e2e() -> None:
    one = sample(3.0, 3.5, 4.5, counts=[1, 1, 3], sent=1.0, ended=4.75)
    assert one.ttft == 2.0
    assert one.gaps.tolist() == [0.5, 1.0]
    assert one.tpot == pytest.approx(1.5 / 4)
    assert one.e2e == 3.75
    assert one.output_tokens == 5
    assert sample(2.0).tpot is None
    assert sample(2.0, 3.0, counts=[1, 1], usage_tokens=11).tpot == pytest.approx(0.1)  # the server's count wins


def test_hit_rate_counts_requests_whose_cached_tokens_are_reported() -> None:
    samples = [
        sample(1.0, prompt_tokens=100, cached_tokens=80),
        sample(1.0, prompt_tokens=300, cached_tokens=0),
        sample(1.0, prompt_tokens=1000),
        sample(prompt_tokens=1000, cached_tokens=1000, error="HTTP 500: boom"),
    ]
    assert summarize(samples, duration=10.0)["prefix_hit_rate"] == 0.2
    assert summarize(samples[2:], duration=10.0)["prefix_hit_rate"] is None


def test_summary_of_failed_requests_counts_them_apart_with_the_first_error() -> None:
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


def test_summary_of_no_request_has_no_percentiles() -> None:
    summary = summarize([], duration=0.0)
    assert summary["ttft_ms"] == {"count": 0}
    assert summary["first_error"] is None


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_percentiles_of_any_series_are_ordered_and_bounded(values: list[float]) -> None:
    spread = spread_ms(values)
    assert spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"] == pytest.approx(max(values) * 1000)


def test_request_that_misses_one_limit_is_not_good() -> None:
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
def test_wrong_goodput_spec_raises(spec: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        parse_goodput([spec])


def test_gap_across_an_edge_belongs_to_the_window_of_its_middle() -> None:
    # A long prompt sent at 1.05, amid a quiet step, its first token leaving with the stream's token at 3.0.
    stream = sample(0.9, 1.0, 1.1, 2.1, 3.0, 3.1, 3.2)
    assert gaps_within(stream, [(1.06, 2.9999)]).tolist() == pytest.approx([1.0, 0.9])
    assert gaps_within(stream, [(0.0, 1.0), (3.1, 9.0)]).tolist() == pytest.approx([0.1, 0.1])
    assert gaps_within(sample(1.0), [(0.0, 9.0)]).size == 0


def test_interference_separates_quiet_and_disturbed_gaps() -> None:
    stream = sample(*[0.1 * i for i in range(11)], 1.5, 2.0, 2.1, role="stream", stopped=True)
    long = sample(2.0, sent=1.0, role="long", prompt_tokens=4000)
    failed = sample(role="long", sent=2.05, error="refused")
    figures = metrics.interference([stream, long, failed], quiet=(0.0, 1.0))
    assert figures["quiet_gap_ms"]["p99"] == pytest.approx(100)
    assert figures["interfered_gap_ms"]["p50"] == pytest.approx(500)
    assert figures["long_ttft_ms"]["p50"] == pytest.approx(1000)
    assert figures["long_prompt_tokens_per_s"] == pytest.approx(4000)
    assert (figures["streams"], figures["long_prompts"]) == (1, 1)


def test_goodput_of_each_class_uses_its_own_targets() -> None:
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
    interactive = slo["classes"]["interactive"]
    assert (interactive["requests_ok"], interactive["requests_refused"], interactive["requests_failed"]) == (2, 1, 1)
    assert interactive["first_error"] == "HTTP 500: boom"
    assert interactive["goodput"] == {"share": 0.25, "requests_per_s": 0.1, "limits_ms": {"ttft": 500, "tpot": 100}}
    assert slo["classes"]["bulk"]["goodput"]["share"] == 1
    assert "goodput" not in slo["classes"]["own"]
    assert slo["goodput"] == {"share": 0.5, "requests_per_s": 0.3}


def test_targets_without_specs_are_the_servers_defaults() -> None:
    assert metrics.parse_targets([]) == {
        "interactive": {"ttft": 1.0, "tpot": 0.05},
        "standard": {"ttft": 10.0, "tpot": 0.1},
        "batch": {"ttft": 600.0, "tpot": 2.0},
    }


@pytest.mark.parametrize("spec", ["interactive", "=ttft:5", "batch=speed:5", "batch=ttft:-1"])
def test_wrong_target_spec_raises(spec: str) -> None:
    with pytest.raises(ValueError, match=r"^slo: "):
        metrics.parse_targets([spec])


def test_short_request_counts_in_the_window_of_its_sending() -> None:
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


def test_serverside_figures_are_the_change_between_two_scrapes() -> None:
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
