"""`crossdock bench` as a person meets it."""

import json
import re
import socket
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from crossdock.cluster.bench import progress, report
from crossdock.cluster.bench.command import BenchFlags, bench
from crossdock.cluster.bench.mix import MIXES, Mix
from crossdock.cluster.bench.run import BenchOptions, BenchResult
from crossdock.cluster.bench.workloads import Interference
from tests.cluster.bench.scripted import Scripted


def test_every_flag_but_five_is_named_like_the_option_that_it_sets() -> None:
    options = {field.name for kind in (BenchOptions, Interference, Mix) for field in fields(kind)}
    others = {field.name for field in fields(BenchFlags)} - options
    assert others == {"slo", "long_service_tier", "header", "json_file", "plot_file"}


def test_flags_reach_the_options_the_long_prompts_and_the_mix() -> None:
    plain = BenchFlags("http://h", num_requests=3, request_rate=2.0, burstiness=0.5, service_tier="batch").options()
    assert (plain.workload, plain.num_requests, plain.request_rate, plain.burstiness) == ("chat", 3, 2.0, 0.5)
    assert plain.interference == Interference(service_tier="batch")
    long = BenchFlags("http://h", "interference", long_prompts=7, quiet=0.5, long_service_tier="standard").options()
    assert long.interference == Interference(long_prompts=7, quiet=0.5, service_tier="standard")
    mixed = BenchFlags("http://h", mix="bursty", request_rate=3.0, long_tokens="10-20", long_share=0.5).options()
    assert (mixed.workload, mixed.request_rate) == ("mix", None)
    assert mixed.mix == replace(MIXES["bursty"], rate=3.0, long_tokens=(10, 20), long_share=0.5)
    assert BenchFlags("http://h", trace=Path("t.jsonl")).options().workload == "trace"


@pytest.fixture
def command() -> Any:
    app = typer.Typer()
    app.command()(bench)
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])


def test_command_prints_a_table_and_writes_its_files(
    scripted: tuple[Scripted, str], tmp_path: Path, command: Any
) -> None:
    script, url = scripted
    script.gap = 0.005
    file = tmp_path / "out.json"
    result = command(
        *(f"{url}/v1", "-n", 4, "-c", 2, "--output-tokens", 6, "--warmup", 0, "--api-key", "secret"),
        *("--goodput", "ttft:60000", "--goodput", "tpot:60000", "--header", "X-Team: dock"),
        *("--json", file, "--plot", tmp_path / "out.svg"),
    )
    assert result.exit_code == 0, result.output
    assert "request: 4 requests" in (tmp_path / "out.svg").read_text()
    assert "4 / 0" in result.output
    assert "100.0%" in result.output
    written = json.loads(file.read_text())
    assert written["summary"]["output_tokens"] == 24
    assert [row["output_tokens"] for row in written["requests"]] == [6] * 4
    assert "secret" not in file.read_text()


def test_command_with_mix_shows_classes_and_server_figures(scripted: tuple[Scripted, str], command: Any) -> None:
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
        "long prompts too",
    ):
        assert text in shown


def test_command_with_wrong_argument_names_it(command: Any, tmp_path: Path) -> None:
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


def test_command_with_only_failed_requests_exits_with_1(scripted: tuple[Scripted, str], command: Any) -> None:
    script, url = scripted
    script.fail_every = 1
    result = command(url, "-n", 2, "--warmup", 0)
    assert result.exit_code == 1
    assert "scripted failure" in result.output


def test_log_of_a_long_run_has_its_progress(
    scripted: tuple[Scripted, str], command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, url = scripted
    script.gap = 0.005
    monkeypatch.setattr(progress, "LINE_S", 0.001)
    result = command(url, "-n", 4, "-c", 2, "--output-tokens", 6, "--warmup", 0)
    assert re.search(r"^chat: [0-4] of 4 requests, \d s$", result.stderr, re.MULTILINE)


def test_table_keeps_its_labels_at_80_columns() -> None:
    spread = {"count": 3, "p50": 12345.6, "p99": 123456.7, "max": 123456.7}
    figures = {
        "quiet_ttft_ms": spread,
        "short_ttft_ms": spread,
        "long_ttft_ms": spread,
        "long_prompt_tokens_per_s": 1e3,
    }
    counts = {
        "requests_ok": 1,
        "requests_failed": 1,
        "requests_refused": 0,
        "short_outputs": 0,
        "first_error": "x " * 99,
    }
    summary = {**counts, "duration_s": 1.0, "output_tokens_per_s": 1.0, "short_vs_long": figures}
    options = BenchOptions("http://h", "short-vs-long")
    result = BenchResult(options, "", "m", ["a note of many words " * 9], [], 0.0, 0.5, summary)
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(report.table(result))
    assert "short TTFT, while prefilling  p50 / p99 / max" in capture.get()
    assert "…" not in capture.get()
