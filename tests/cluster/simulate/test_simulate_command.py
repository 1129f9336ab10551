"""`crossdock simulate`: the files that it writes, its comparisons and its errors."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from crossdock.cluster.bench import progress
from crossdock.cluster.simulate.report import comparison
from crossdock.cluster.simulate.study import Score
from tests.cluster.watch.terminal import run


def test_command_shows_and_writes_the_same_each_time(tmp_path: Path) -> None:
    written = []
    for name in ("one.json", "two.json"):
        arguments = ("--pools", "mixed=2xh100-8b,decode=1xl4-8b", "--request-rate", "20", "--duration", "5", "--json")
        result = run("simulate", *arguments, str(tmp_path / name), "--kill", "mixed/1@3")
        assert result.exit_code == 0, result.output
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1]
    found = json.loads(written[0])
    assert found["requests"] == sum(found["placements"].values()) > 50
    assert set(found["pools"]["mixed"]["replicas"]) == {"mixed/0", "mixed/1"}
    assert found["cost"] is None
    assert "interactive: ok / refused / failed" in result.output


def test_command_plays_a_trace_and_computes_the_cost(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:{n:02}.0000000,{100 + n},10" for n in range(10)]
    (tmp_path / "azure.csv").write_text("\n".join(lines) + "\n")
    pools = [{"name": "mixed", "profile": "h100-8b", "price": 36.0}]
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"pools": pools}))
    files = ("--trace", str(tmp_path / "azure.csv"), "--json", str(tmp_path / "out.json"))
    result = run("simulate", str(tmp_path / "fleet.yaml"), *files, "-w", "trace", "--service-tier", "interactive")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["requests"] == 10
    assert found["cost"]["total"] == pytest.approx(found["duration_s"] * 0.01)
    assert found["cost"]["per_million_output_tokens"] == pytest.approx(found["duration_s"] * 0.01 * 1e4)
    assert list(found["classes"]) == ["interactive"]


def test_command_compares_policies_shipping_and_ratios(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    load = ("--request-rate", "10", "--duration", "3", "--json", str(path))
    result = run("simulate", "--pools", "mixed=2xh100-8b", "--policy", "seconds,round-robin", "--seeds", "2", *load)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["seeds"] == [0, 1]
    assert {name: len(runs) for name, runs in found["scores"].items()} == {"seconds": 2, "round-robin": 2}
    assert "±" in result.output
    result = run("simulate", "--pools", "prefill=1xh100-8b,decode=1xh100-8b", "--shipping", "always,never", *load)
    assert result.exit_code == 0, result.output
    assert set(json.loads(path.read_text())["scores"]) == {"always", "never"}
    result = run("simulate", "--pools", "mixed=3xh100-8b", "--sweep", *load)
    assert result.exit_code == 0, result.output
    assert set(json.loads(path.read_text())["scores"]) == {"mixed 3", "prefill 1 : decode 2", "prefill 2 : decode 1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a YAML file or give --pools"),
        (("--pools", "mixed=h100-8b", "--request-rate", "1"), "is not of the form NAME=COUNTxPROFILE"),
        (("--pools", "mixed=2xh100-8b"), "request_rate"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "-w", "interference"), "cannot be simulated"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "--kill", "mixed/0"), "REPLICA@SECONDS"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "--policy", "luck"), "luck"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "--mix", "none"), "there is no 'none'"),
        (("none.yaml",), "cannot be read"),
    ],
)
def test_command_with_invalid_options_exits_with_the_reason(arguments: tuple[str, ...], message: str) -> None:
    result = run("simulate", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_comparison_keeps_the_names_at_80_columns() -> None:
    scores = {
        f"prefix-affinity auto prefill {n} : decode {4 - n}": [Score(0.987, 0.912, 0.1, 1234.5, 98.7, 0.5)] * 3
        for n in (1, 2)
    }
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(comparison(scores, 3))
    for name in scores:
        assert name in capture.get()


def test_log_of_a_long_simulation_has_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.001)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 5.0))  # however long it takes here
    load = ("--pools", "mixed=2xh100-8b", "--request-rate", "20", "--duration", "5")
    assert re.search(r"^Simulating: \d+ requests, 0 s$", run("simulate", *load).stderr, re.MULTILINE)
    compared = run("simulate", *load, "--policy", "seconds,round-robin", "--seeds", "3")
    assert re.search(r"^Comparing: \d of 6 simulations, \d s$", compared.stderr, re.MULTILINE)
