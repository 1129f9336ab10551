"""Command lines of other servers, as users publish them, run as they are; each other one names what is missing."""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.watch.terminal import run

DATA = Path(__file__).with_name("public_lines.yaml")
GOALS = {"recipes": (147, 139), "others": (37, 30)}  # lines, and how many of them run at least


@cache
def public_lines() -> dict[str, list[dict[str, Any]]]:
    return dict(yaml.load(DATA.read_text(), yaml.CSafeLoader))


@cache
def ran(line: str) -> Any:
    """Return the result of `crossdock config` with the arguments of a line."""
    return run("config", *shlex.split(line))


@pytest.mark.parametrize("source", GOALS)
def test_public_line_runs_or_names_what_is_missing(source: str) -> None:
    lines, least = GOALS[source]
    wrong, num_running = [], 0
    for each in public_lines()[source]:
        result = ran(each["line"])
        errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        missing = each.get("missing")
        if missing is None and result.exit_code == 0 and not errors:
            num_running += 1
        elif missing is None or result.exit_code != 2 or not any(missing in error for error in errors):
            wrong.append(f"{each['line']}\n{result.output}")
    assert not wrong, "\n".join(wrong)
    assert len(public_lines()[source]) == lines
    assert num_running >= least


@pytest.mark.parametrize("source", GOALS)
def test_each_line_that_runs_says_once_what_is_left_out_or_read_otherwise(source: str) -> None:
    """A line without flags of others says nothing."""
    for each in public_lines()[source]:
        notes = [line for line in ran(each["line"]).stderr.splitlines() if "warning" in line]
        assert len(set(notes)) == len(notes)
        if not any(word.startswith("-") for word in shlex.split(each["line"])):
            assert not notes
