"""vLLM's names: each is made from families that exist, by sums over their samples."""

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from crossdock.workers.report.vllm_names import Name, Source, exposition


def samples(registry: CollectorRegistry, names: Sequence[Name], model: str | None = "m") -> dict[str, float]:
    """Return the samples under vLLM's names, by name and labels but for the model and the engine."""
    found = {}
    for family in text_string_to_metric_families(exposition(registry, names, model)):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == ("m", "0")
                found[" ".join([sample.name, *sorted(f"{key}={value}" for key, value in labels.items())])] = (
                    sample.value
                )
    return found


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    pages = Gauge("pages", "", ["state"], registry=registry)
    for state, number in {"free": 10, "owned": 4, "cached": 5, "quarantined": 1}.items():
        pages.labels(state).set(number)
    tokens = Counter("tokens", "", ["kind", "slo_class"], registry=registry)
    tokens.labels("new", "a").inc(3)
    tokens.labels("new", "b").inc(4)
    tokens.labels("old", "a").inc(5)
    seconds = Histogram("seconds", "", ["slo_class"], buckets=(1, 2), registry=registry)
    for slo_class, value in (("a", 0.5), ("b", 1.5), ("b", 9)):
        seconds.labels(slo_class).observe(value)
    return registry


def test_gauge_is_a_share_of_all_samples(registry: CollectorRegistry) -> None:
    usage = Name("usage", "gauge", "", (Source("pages", ("state", ("owned", "quarantined"))),), share_of="pages")
    assert samples(registry, [usage]) == {"vllm:usage": 0.25}


def test_share_of_nothing_is_zero() -> None:
    registry = CollectorRegistry()
    Gauge("pages", "", ["state"], registry=registry).labels("owned").set(0)
    usage = Name("usage", "gauge", "", (Source("pages"),), share_of="pages")
    assert samples(registry, [usage]) == {"vllm:usage": 0.0}


def test_counter_sums_over_labels_it_does_not_keep(registry: CollectorRegistry) -> None:
    total = Name("total", "counter", "", (Source("tokens"),))
    assert samples(registry, [total]) == {"vllm:total_total": 12.0}
    kinds = Name("kinds", "counter", "", (Source("tokens", labels={"kind": "source"}),))
    assert samples(registry, [kinds]) == {"vllm:kinds_total source=new": 7.0, "vllm:kinds_total source=old": 5.0}


def test_sources_with_unlike_fixed_labels_are_separate_samples(registry: CollectorRegistry) -> None:
    by_reason = Name(
        "waiting",
        "gauge",
        "",
        (
            Source("pages", ("state", ("owned",)), fixed={"reason": "capacity"}),
            Source("pages", ("state", ("cached",)), fixed={"reason": "deferred"}),
        ),
    )
    assert samples(registry, [by_reason]) == {
        "vllm:waiting reason=capacity": 4.0,
        "vllm:waiting reason=deferred": 5.0,
    }


def test_histogram_keeps_its_buckets_and_sums_each(registry: CollectorRegistry) -> None:
    found = samples(registry, [Name("latency", "histogram", "", (Source("seconds"),))])
    assert found == {
        "vllm:latency_bucket le=1.0": 1.0,
        "vllm:latency_bucket le=2.0": 2.0,
        "vllm:latency_bucket le=+Inf": 3.0,
        "vllm:latency_count": 3.0,
        "vllm:latency_sum": 11.0,
    }


def test_text_without_a_model_has_no_name_of_vllm(registry: CollectorRegistry) -> None:
    text = exposition(registry, [Name("usage", "gauge", "", (Source("pages"),))], None)
    assert "vllm:" not in text
    assert 'pages{state="free"} 10.0' in text


def test_text_has_no_series_for_the_times_at_which_series_were_made(registry: CollectorRegistry) -> None:
    """They would be half of all names of a scrape."""
    made = [sample.name for family in registry.collect() for sample in family.samples]
    assert any(name.endswith("_created") for name in made)
    assert "_created" not in exposition(registry, [], None)
    kept = [name for name in made if not name.endswith("_created")]
    lines = [line for line in exposition(registry, [], None).splitlines() if not line.startswith("#")]
    assert len(lines) == len(kept)


def test_histograms_of_labels_without_an_observation_and_times_of_creation_are_left_out() -> None:
    """All others stay, and vLLM's names have their zeros."""
    registry = CollectorRegistry()
    seconds = Histogram("seconds", "", ["slo_class"], buckets=(1, 2), registry=registry)
    seconds.labels("busy").observe(0.5)
    seconds.labels("idle")
    Histogram("plain", "", buckets=(1,), registry=registry)
    Counter("tokens", "", ["kind"], registry=registry).labels("new")
    names = [Name("latency", "histogram", "", (Source("seconds", ("slo_class", ("idle",))),))]
    found = {
        (sample.name, sample.labels.get("slo_class", ""))
        for family in text_string_to_metric_families(exposition(registry, names, "m"))
        for sample in family.samples
    }
    ours = {(name, slo) for name, slo in found if not name.startswith("vllm:")}
    assert ours == {(f"seconds_{part}", "busy") for part in ("bucket", "count", "sum")} | {
        *((f"plain_{part}", "") for part in ("bucket", "count", "sum")),
        ("tokens_total", ""),
    }
    assert ("vllm:latency_count", "") in found
