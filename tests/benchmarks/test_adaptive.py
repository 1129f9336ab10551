"""The comparison of adaptive chunks with fixed budgets: its settings, its stretched model, its tables."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from crossdock.cluster import cli
from crossdock.cluster.bench import metrics
from crossdock.cluster.bench.metrics import Sample
from tests.benchmarks.scripts import script

adaptive = script("adaptive")


def test_flags_of_every_setting_are_flags_of_serve(adaptive: ModuleType) -> None:
    for flags in adaptive.POLICIES.values():
        result = CliRunner().invoke(cli.app, ["config", *flags])
        assert result.exit_code == 0, result.output
    assert list(adaptive.POLICIES) == ["adaptive", "fixed-512", "fixed-2048", "fixed-8192", "vllm-default"]


def test_stretched_model_differs_only_in_its_context(adaptive: ModuleType, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 8192, "hidden_size": 576}')
    (model / "model.safetensors").write_bytes(b"weights")
    made = adaptive.stretched(model, 17408, tmp_path / "model-17408")
    assert json.loads((made / "config.json").read_text()) == {"max_position_embeddings": 17408, "hidden_size": 576}
    assert (made / "model.safetensors").is_symlink()
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert "8192" in (model / "config.json").read_text()


def finished(ttft: float, gap: float, **fields: Any) -> Sample:
    times = [ttft, ttft + gap]
    return Sample("request", 2, 10, times=times, counts=[1, 1], ended=times[-1], **fields)


def test_mix_table_of_two_settings_has_goodput_by_class(adaptive: ModuleType) -> None:
    samples = [
        finished(0.5, 0.04, service_tier="interactive"),
        finished(2.0, 0.04, service_tier="interactive"),
        finished(30.0, 0.04, service_tier="batch"),
    ]
    summary = metrics.summarize(samples, 10.0) | {"slo": metrics.by_class(samples, 10.0, metrics.DEFAULT_TARGETS)}
    row = adaptive.mix_figures(summary)
    assert (row["interactive good"], row["batch good"]) == (50, 100)
    assert row["all rate"] == pytest.approx(0.2)
    assert row["interactive gap p99"] == pytest.approx(40)
    table = adaptive.mix_table({"adaptive": row, "fixed-512": {**row, "all rate": 0.1}}, metrics.DEFAULT_TARGETS)
    head, _, first, _ = table.splitlines()
    assert "interactive gap p99 (target 50)" in head
    assert "standard" not in head
    assert first.startswith("| adaptive | 66.7 % / 0.2 /s | 50 % / 0.1 /s | 100 % / 0.1 /s | 40 |")
    assert first.endswith("| 0 / 0 | - |")
    others = {"fixed-512": {**row, "all rate": 0.1}, "fixed-2048": row, "vllm-default": {**row, "all rate": 0.05}}
    assert adaptive.verdict({"adaptive": row, **others}) == (
        "Good requests per second: adaptive 0.2; best fixed 0.2 (fixed-2048), 1.00 times; "
        "vLLM's default scheduling 0.05 (vllm-default), 4.00 times."
    )
    assert adaptive.verdict({"adaptive": row}) == ""
