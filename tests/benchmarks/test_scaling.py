"""The benchmark of scaling: a server and a simulated fleet have the same settings and get the same arrivals."""

from pathlib import Path
from types import ModuleType

from typer.testing import CliRunner

from crossdock.cluster import cli
from crossdock.cluster.bench.run import BenchOptions
from crossdock.cluster.bench.workloads import read_trace
from crossdock.cluster.watch.scrape import Scrape
from crossdock.router.scaling import ScalingConfig
from tests.benchmarks.scripts import script
from tests.cluster.simulate.small_fleets import profile

scaling = script("routing/scaling")


def test_flags_of_every_setting_are_flags_of_serve(scaling: ModuleType) -> None:
    for setting in scaling.SETTINGS.values():
        result = CliRunner().invoke(cli.app, ["config", *scaling.server_flags(setting)])
        assert result.exit_code == 0, result.output
        assert ScalingConfig.model_validate(setting["scaling"]).up_delay_s == setting["scaling"]["up_delay_s"]


def test_trace_has_the_phases_one_after_the_other(scaling: ModuleType, tmp_path: Path) -> None:
    load = [scaling.Phase("a", 0, 10, 0.5, 100, 8), scaling.Phase("b", 10, 4, 1.0, 32, 64)]
    scaling.write_trace(tmp_path / "trace.jsonl", load)
    jobs = read_trace(tmp_path / "trace.jsonl")
    assert [job.due for job in jobs] == [0, 2, 4, 6, 8, 10, 11, 12, 13]
    assert [(job.prompt_tokens, job.output_tokens) for job in jobs] == [(100, 8)] * 5 + [(32, 64)] * 4


def test_simulated_settings_decide_and_break_no_stream(scaling: ModuleType, tmp_path: Path) -> None:
    """Prompts that need more than one replica, then streams that need more places than one has."""
    load = [scaling.Phase("prompts", 0, 12, 5, 256, 2), scaling.Phase("streams", 12, 20, 5, 16, 200)]
    load += [scaling.Phase("quiet", 32, 30, 0.5, 16, 2)]
    trace = tmp_path / "trace.jsonl"
    scaling.write_trace(trace, load)
    options = BenchOptions("", "trace", trace=trace, service_tier=scaling.CLASS)
    tables = {}
    for name in ("roles", "sizes"):  # not the day, which is for a fleet
        setting = scaling.SETTINGS[name]
        outcome = scaling.simulate(setting, profile(max_num_seqs=64), 0.0, 2.0, options)
        assert all(sample.ok for sample in outcome.samples)
        rows = [
            scaling.decision_figures(each.at, scaling.asdict(each.action), outcome.samples)
            for each in outcome.decisions
        ]
        assert rows
        assert not any(row["broken"] for row in rows)
        tables[name] = scaling.trace_table(rows)
        phases = scaling.figures(outcome.samples, load, 0.0, profile(max_num_seqs=64))
        assert [row["requests"] for row in phases.values()] == [60, 100, 15, 175]
    assert "decode to prefill" in tables["roles"]
    assert "mixed: 1 to 2 replicas" in tables["sizes"]


def test_spread_of_steps_of_several_replicas_is_their_mean(scaling: ModuleType) -> None:
    lines = [
        f'crossdock_step_relative_error{{replica="{replica}",quantile="{quantile}"}} {error}'
        for replica, error in (("a", 0.1645), ("b", 0.329))
        for quantile in ("0.5", "0.9")
    ]
    text = "# TYPE crossdock_step_relative_error gauge\n" + "\n".join(lines) + "\n"
    assert scaling.spread_of_steps(Scrape.parse(text, 0.0)) == 0.15
    assert scaling.spread_of_steps(Scrape.parse("", 0.0)) == 0.0
