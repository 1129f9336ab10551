"""The `crossdock` command: the list of its subcommands, what their help shows, and what it does not import."""

import subprocess
import sys

import pytest

from crossdock.cluster.cli import SUBCOMMANDS
from tests.cluster.watch.terminal import run

_PRINT = """
import sys

from crossdock.cluster.cli import app

def imported(*modules):
    return [module for module in modules if module in sys.modules]

for args, unneeded in {commands}:
    try:
        app(args)
    except SystemExit as exit:
        assert not exit.code, (args, exit.code)
    assert not imported(*unneeded), (args, imported(*unneeded))
"""
_HEAVY = ("torch", "transformers", "ray", "fastapi", "uvicorn", "opentelemetry")
_ANY = (*_HEAVY, "numpy", "yaml", "httpx", "asyncio", "crossdock.cluster.config")


def shown(*args: str) -> str:
    """Return the output of a command, in one line."""
    result = run(*args, COLUMNS="200")
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_help_config_and_version_import_only_what_they_print() -> None:
    """Nothing heavy is in `sys.modules` after all of them have run, one after the other, in one process."""
    commands: list[tuple[list[str], tuple[str, ...]]] = [(["--help"], _ANY), (["version"], _ANY)]
    commands += [([name, "--help"], _HEAVY) for name in SUBCOMMANDS]
    commands += [(["config"], _HEAVY)]
    source = _PRINT.format(commands=commands)
    done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_summary_in_the_list_is_the_first_line_of_the_subcommands_own_help(name: str) -> None:
    assert f"{name} {SUBCOMMANDS[name].summary} " in shown("--help")
    assert f" {SUBCOMMANDS[name].summary} " in shown(name, "--help")


def test_unknown_subcommand_is_refused_with_a_suggestion() -> None:
    result = run("serv")
    assert result.exit_code == 2
    assert "serve" in result.output


def test_serve_help_shows_examples_flags_and_accepted_values() -> None:
    text = shown("serve", "--help")
    assert "crossdock serve Qwen/Qwen3-0.6B --max-model-len 8192" in text
    assert "--long-prefill-token-threshold" in text
    assert "--page-size,--block-size" in text
    assert "--mixed-chunks --no-mixed-chunks" in text
    assert "--dtype auto|bfloat16|float16|float32" in text
    assert "--kv-cache-memory,--kv-cache-memory-bytes SIZE" in text
    assert "[env var: CROSSDOCK_API_KEY]" in text


@pytest.mark.parametrize("args", [["-h"], ["serve", "-h"]])
def test_short_flag_for_help_shows_it(args: list[str]) -> None:
    assert "Usage:" in shown(*args)


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_prints_each_package_of_a_bug_report(word: str) -> None:
    result = run(word)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["crossdock", "ray", "torch", "transformers"]
