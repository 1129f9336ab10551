"""The script that runs the documented commands: which it runs, and as what."""

from types import ModuleType

import pytest

from tests.benchmarks import scripts

script = scripts.script("documented_commands")


def test_every_command_is_run_or_has_a_reason(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.os, "cpu_count", lambda: 2)
    found = {command.line: command.reason() for command in script.documented()}
    assert found["crossdock chat 'What is the capital of France?'"] is None
    assert found["crossdock serve"] is None
    assert found["crossdock serve ./big-model --tp 4"] == "needs 4 cores: one for each rank"
    assert found["make test"] is not None
    run = [line for line, reason in found.items() if reason is None]
    assert {line.split()[0] for line in run} == {"crossdock", "serve", "curl"}, "others need a program that is not here"
    assert {line.split()[1] for line in run} >= {"serve", "config", "chat", "bench", "simulate", "tune"}


def test_ranks_are_counted_over_pools_and_stages(script: ModuleType) -> None:
    for line, ranks in [
        ("crossdock serve --tp 4 --pp 2", 8),
        ("crossdock serve --pools prefill=2xtp1,decode=1xtp2", 4),
        ("crossdock serve --pools prefill=1,decode=1", 0),
    ]:
        assert script._ranks(line) == ranks


def test_command_runs_with_the_port_and_the_model_that_exist(script: ModuleType) -> None:
    def words(line: str) -> list[str]:
        return list(script.adapted(line, 9))[1:]

    assert words("crossdock serve Qwen/Qwen3-0.6B --max-model-len 8192") == [
        *("serve", "./model", "--max-model-len", "8192", "--port", "9"),
    ]
    assert words("crossdock bench http://127.0.0.1:8000 -w mix") == ["bench", "http://127.0.0.1:9", "-w", "mix"]
    assert words("crossdock chat") == ["chat", "--url", "http://127.0.0.1:9"]
