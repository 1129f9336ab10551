"""The benchmark of scaling: a server and a simulated fleet have the same settings and get the same arrivals."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from crossdock.cluster import cli
from crossdock.cluster.bench.run import BenchOptions
from crossdock.cluster.bench.workloads import read_trace
from crossdock.cluster.watch.scrape import Scrape
from crossdock.router.scaling import ScalingConfig
from tests.benchmarks.scripts import script
from tests.cluster.simulate.small_fleets import profile

scaling = script("routing/scaling")


def test_setting_is_a_configuration_of_a_server(scaling: ModuleType, tmp_path: Path) -> None:
    scaling.write_config(tmp_path / "day.yaml")
    result = CliRunner().invoke(cli.app, ["config", "--config", str(tmp_path / "day.yaml")])
    assert result.exit_code == 0, result.output
    assert "max_replicas: 4" in result.output
    assert "up_delay_s: 5.0" in result.output
    assert ScalingConfig.model_validate(scaling.SETTING["scaling"]).up_delay_s == 5.0


def phases(scaling: ModuleType) -> list[Any]:
    """Return prompts that need more than one replica, streams that need more places than one has, and quiet."""
    load = [scaling.Phase("prompts", 0, 12, 5, 256, 2), scaling.Phase("streams", 12, 20, 5, 16, 200)]
    return [*load, scaling.Phase("quiet", 32, 30, 0.5, 16, 2)]


def test_trace_has_the_phases_one_after_the_other(scaling: ModuleType, tmp_path: Path) -> None:
    load = phases(scaling)
    scaling.write_trace(tmp_path / "trace.jsonl", load)
    jobs = read_trace(tmp_path / "trace.jsonl")
    assert [job.due for job in jobs] == sorted(job.due for job in jobs)
    for phase in load:
        own = [job for job in jobs if phase.begin <= job.due < phase.end]
        assert own[0].due == phase.begin or phase.begin > 0
        assert {(job.prompt_tokens, job.output_tokens) for job in own} == {(phase.prompt_tokens, phase.output_tokens)}
        assert len(own) == pytest.approx(phase.rate * phase.seconds, rel=0.4)


def test_simulated_pools_follow_the_load_and_break_no_stream(scaling: ModuleType, tmp_path: Path) -> None:
    load, trace = phases(scaling), tmp_path / "trace.jsonl"
    scaling.write_trace(trace, load)
    options = BenchOptions("", "trace", trace=trace, service_tier=scaling.CLASS)
    outcome = scaling.simulate(scaling.SETTING, profile(max_num_seqs=64), 0.0, 2.0, options)
    decided, samples = outcome.decisions, outcome.samples
    rows = [scaling.decision_figures(each.at, scaling.asdict(each.action), samples) for each in decided]
    assert all(sample.ok for sample in samples)
    assert not any(row["broken"] for row in rows)
    shown = scaling.trace_table(rows)
    assert "prefill: 1 to 3 replicas" in shown
    assert "decode: 2 to 3 replicas" in shown
    counts = [row["requests"] for row in scaling.figures(samples, load, 0.0, profile(max_num_seqs=64)).values()]
    assert sum(counts[:-1]) == counts[-1] == len(samples)


def test_spread_of_steps_of_several_replicas_is_their_mean(scaling: ModuleType) -> None:
    lines = [
        f'crossdock_step_relative_error{{replica="{replica}",quantile="{quantile}"}} {error}'
        for replica, error in (("a", 0.1645), ("b", 0.329))
        for quantile in ("0.5", "0.9")
    ]
    text = "# TYPE crossdock_step_relative_error gauge\n" + "\n".join(lines) + "\n"
    assert scaling.spread_of_steps(Scrape.parse(text, 0.0)) == 0.15
    assert scaling.spread_of_steps(Scrape.parse("", 0.0)) == 0.0
