"""The `crossdock` command: the list of its subcommands, what their help shows, and what it does not import."""

import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.cluster.cli import SUBCOMMANDS, _import, _require_home
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


def test_serve_help_shows_examples_flags_accepted_values_and_defaults() -> None:
    text = shown("serve", "--help")
    assert "crossdock serve Qwen/Qwen3-0.6B --max-model-len 8192" in text
    assert "--long-prefill-token-threshold INTEGER" in text
    assert "--page-size, --block-size INTEGER" in text or "--block-size, --page-size INTEGER" in text
    assert "--mixed-chunks, --no-mixed-chunks" in text
    assert "--dtype auto|bfloat16|float16|float32" in text
    assert "SIZE" in text
    assert "[env var: CROSSDOCK_API_KEY]" in text
    assert "Port to listen on. [default: 8000]" in text
    assert "[default: on]" in text
    assert "null" not in text, "a flag is left out"


@pytest.mark.parametrize("name", SUBCOMMANDS)
@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_cuts_no_name_of_a_flag_at_any_width(name: str, columns: str) -> None:
    text = run(name, "--help", COLUMNS=columns).stdout
    assert "…" not in text.replace(",…", ""), "pools are NAME=REPLICAS,…"
    lines = text.splitlines()
    for parameter in _import(name).params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            if flag.startswith("--"):
                found = [line for line in lines if re.search(rf"(?<![\w-]){flag}(?![\w-])", line)]
                assert any(line.startswith("  -") or line.lstrip().startswith("--") for line in found), flag


@pytest.mark.parametrize(
    ("word", "found", "others"),
    [
        ("gpu-memory", ["--gpu-memory-utilization"], ["--port", "--kv-cache-files"]),
        ("GPU_MEMORY", ["--gpu-memory-utilization"], ["--port"]),
        ("pictures", ["--mm-encoder-cache", "--allowed-media-domains"], ["--port"]),
    ],
)
def test_help_with_a_word_shows_the_flags_that_have_it(word: str, found: list[str], others: list[str]) -> None:
    text = shown("serve", f"--help={word}")
    assert all(f" {flag} " in f" {text} " for flag in found)
    assert not any(f" {flag} " in f" {text} " for flag in others)
    assert "Usage:" not in text


def test_help_with_a_word_that_no_flag_has_says_so() -> None:
    assert shown("chat", "--help=bananas") == "crossdock chat has no flag with 'bananas' in its name or text."


def test_everyday_flags_come_first_in_the_help() -> None:
    text = shown("serve", "--help")
    first = text[text.index("Everyday") : text.index("Engine (names as in vLLM)")]
    for flag in ("--max-model-len", "--tensor-parallel-size", "--port", "--api-key", "--config"):
        assert flag in first


def test_key_of_a_server_is_the_same_flag_in_every_command() -> None:
    for name in ("chat", "top", "bench", "run-batch", "serve"):
        flags = {flag for parameter in _import(name).params for flag in parameter.opts}
        assert "--api-key" in flags, name


@pytest.mark.parametrize("args", [["-h"], ["serve", "-h"]])
def test_short_flag_for_help_shows_it(args: list[str]) -> None:
    assert "Usage:" in shown(*args)


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_prints_each_package_of_a_bug_report(word: str) -> None:
    result = run(word)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["crossdock", "ray", "torch", "transformers"]


def test_user_of_any_number_without_a_home_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_entry(number: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", has_no_entry)
    monkeypatch.delenv("HOME")  # undone at the end, with what is set then
    _require_home()
    assert Path.home() == Path("/")
