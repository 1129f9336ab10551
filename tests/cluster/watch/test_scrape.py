"""Scrapes: sums, increases, and quantiles as Prometheus computes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from crossdock.cluster.watch.scrape import Scrape

TEXT = """
# HELP steps_total Steps.
# TYPE steps_total counter
steps_total{kind="mixed",replica="a"} 3
steps_total{kind="mixed",replica="b"} 4
steps_total{kind="decodes",replica="b"} 10
# HELP pages Pages.
# TYPE pages gauge
pages 7
"""


def test_total_sums_over_labels_that_are_not_given() -> None:
    scrape = Scrape.parse(TEXT, 0.0)
    assert scrape.total("steps_total") == 17
    assert scrape.total("steps_total", replica="b") == 14
    assert scrape.total("steps_total", replica="b", kind="mixed") == 4
    assert scrape.by("steps_total", "kind") == {"mixed": 7, "decodes": 10}
    assert scrape.by("steps_total", "kind", replica="a") == {"mixed": 3}
    assert scrape.by("pages", "replica") == {"": 7}


def test_absent_metric_is_none() -> None:
    scrape = Scrape.parse(TEXT, 0.0)
    assert scrape.total("absent") is None
    assert scrape.total("steps_total", replica="c") is None
    assert scrape.by("absent", "kind") == {}
    assert scrape.quantile("absent", 0.5) is None
    assert scrape.rate("absent") is None


def test_text_in_another_format_raises() -> None:
    with pytest.raises(ValueError, match="Bad Gateway"):
        Scrape.parse("<html>Bad Gateway</html>", 0.0)


def test_increase_of_a_counter_that_fell_is_its_value() -> None:
    before = Scrape.parse('n_total{replica="a"} 10\nn_total{replica="b"} 100\n', 5.0)
    after = Scrape.parse('n_total{replica="a"} 16\nn_total{replica="b"} 4\nn_total{replica="c"} 2\n', 7.0)
    change = after.since(before)
    assert change.seconds == 2
    assert change.by("n_total", "replica") == {"a": 6, "b": 4, "c": 2}
    assert change.rate("n_total", replica="a") == 3


def test_quantile_within_a_bucket_is_interpolated() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t_seconds", "T.", ["kind"], buckets=(1, 2, 4), registry=registry)
    assert Scrape.parse(generate_latest(registry).decode(), 0).quantile("t_seconds", 0.5) is None
    for value in (0.5, 1.5, 1.6, 3.0):
        histogram.labels("x").observe(value)
    scrape = Scrape.parse(generate_latest(registry).decode(), 0)
    assert scrape.quantile("t_seconds", 0.25) == 1
    assert scrape.quantile("t_seconds", 0.5) == 1.5
    assert scrape.quantile("t_seconds", 1.0) == 4
    assert scrape.quantile("t_seconds", 0.5, kind="y") is None
    for _ in range(100):
        histogram.labels("y").observe(50)
    later = Scrape.parse(generate_latest(registry).decode(), 1)
    assert later.quantile("t_seconds", 0.99) == 4  # beyond the last bucket: its limit
    assert later.since(scrape).quantile("t_seconds", 0.01) == 4  # only of the observations since then


BUCKETS = (0.1, 0.5, 1.0, 2.0, 5.0)


@given(st.lists(st.floats(0.001, 4.999), min_size=1, max_size=60), st.sampled_from((0.5, 0.9, 0.99)))
def test_quantile_is_in_the_bucket_of_the_true_one(values: list[float], quantile: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t_seconds", "T.", buckets=BUCKETS, registry=registry)
    for value in values:
        histogram.observe(value)
    estimate = Scrape.parse(generate_latest(registry).decode(), 0).quantile("t_seconds", quantile)
    assert estimate is not None
    true = float(np.quantile(values, quantile, method="inverted_cdf"))
    edges = (0.0, *BUCKETS)
    bucket = int(np.searchsorted(BUCKETS, true))
    assert edges[bucket] - 1e-9 <= estimate <= edges[bucket + 1] + 1e-9
