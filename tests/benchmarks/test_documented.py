"""The script that runs the documented commands: which it runs, and as what. In the soak each command is a test."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks import scripts
from tests.cluster.ports import free_port

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
    assert script.adapted("curl http://127.0.0.1:8000/health", 9) == ["curl", "http://127.0.0.1:9/health"]
    assert words("crossdock chat") == ["chat", "--url", "http://127.0.0.1:9"]


def test_server_of_a_builder_is_asked_at_serves_own_port(script: ModuleType) -> None:
    options = argparse.Namespace(port=9)
    builder = script.Documented("serving.md", "serve run crossdock:build_app model.path=MODEL")
    assert script.listening(builder, options).port == 8000
    assert script.listening(script.Documented("serving.md", "crossdock serve"), options).port == 9
    assert options.port == 9


# -- In the soak -------------------------------------------------------------------------------------------------------

SCRIPT: Any = scripts.load("documented_commands")
LIMIT_S = 1200.0  # for a start, and for a command: a machine whose cores others use takes several times as long
RUN = [command for command in SCRIPT.documented() if command.reason() is None]
OF_TRAINERS = [command for command in RUN if SCRIPT.OF_TRAINERS.search(command.line)]


@pytest.fixture(scope="module")
def folder(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reader")
    SCRIPT.fill(made, int(SCRIPT.SERVER_PORT))
    return made


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> argparse.Namespace:
    output = tmp_path_factory.mktemp("output") / "results"
    limits = {"limit": LIMIT_S, "start_timeout": LIMIT_S}
    return argparse.Namespace(port=free_port(), crossdock_option=[], output=output, **limits)


@pytest.fixture(scope="module")
def served(folder: Path, options: argparse.Namespace) -> Iterator[None]:
    """A server of the default model, for commands that need one."""
    with SCRIPT.server(SCRIPT.adapted("crossdock serve", options.port), folder, options):
        yield


@pytest.mark.soak
@pytest.mark.timeout(2 * LIMIT_S + 60)  # the start of the server that a command asks, and the command
@pytest.mark.parametrize("command", [each for each in RUN if each not in OF_TRAINERS], ids=lambda command: command.line)
def test_documented_command_runs(
    command: Any, folder: Path, options: argparse.Namespace, request: pytest.FixtureRequest
) -> None:
    if command.is_server:
        own = SCRIPT.listening(command, argparse.Namespace(**vars(options) | {"port": free_port()}))
        SCRIPT.fill_manifest(folder, own.port)
        with SCRIPT.server(SCRIPT.adapted(command.line, own.port), folder, own):
            return
    if command.needs_server:
        request.getfixturevalue("served")
    log = options.output.with_name("log")
    *_, code = SCRIPT.run(SCRIPT.adapted(command.line, options.port), folder, options, log)
    assert code == "0", log.read_text()[-2000:]


@pytest.mark.soak
@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_documented_commands_of_trainers_run_in_their_order(folder: Path, options: argparse.Namespace) -> None:
    """The first one pauses generation, and others need a server that sleeps."""
    own = argparse.Namespace(**vars(options) | {"port": free_port()})
    log = options.output.with_name("log of trainers")
    assert len(OF_TRAINERS) > 4
    with SCRIPT.server(SCRIPT.adapted("crossdock serve --enable-rollouts", own.port), folder, own):
        for command in OF_TRAINERS:
            *_, code = SCRIPT.run(SCRIPT.adapted(command.line, own.port), folder, own, log)
            assert code == "0", log.read_text()[-2000:]
    assert "error" not in log.read_text(), log.read_text()
