"""The results of a benchmark, as files and in a record."""

import argparse
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.scripts import ROOT, script

tables = script("tables")


@pytest.fixture
def records(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one record, in the place of benchmarks/records."""
    (tmp_path / "peers.md").write_text("# Peers\n\nBefore.\n")
    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    return tmp_path


def parsed(tables: ModuleType, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    tables.add_output_options(parser, "example")
    return parser.parse_args(words)


def test_results_go_into_files_and_no_record_by_default(tables: ModuleType, records: Path, tmp_path: Path) -> None:
    tables.write(parsed(tables, "--output", str(tmp_path / "here" / "results")), "| a |\n", {"a": 1})
    assert (tmp_path / "here" / "results.md").read_text() == "| a |\n"
    assert (tmp_path / "here" / "results.json").read_text() == '{\n "a": 1\n}\n'
    assert (records / "peers.md").read_text() == "# Peers\n\nBefore.\n"


def test_results_with_record_end_its_page_with_command_machine_and_commit(
    tables: ModuleType, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--output", str(tmp_path / "results"), "--record", "peers"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "adaptive.py"), *words, "a b"])
    tables.write(parsed(tables, *words), "| a |\n|---|\n| 1 |\n", {})
    page = (records / "peers.md").read_text()
    assert page.startswith("# Peers\n\nBefore.\n\n## ")
    assert f"`{tables.commit_of(ROOT)}`" in page
    assert tables.hardware() in page
    assert "\n`python benchmarks/adaptive.py --output" in page
    assert page.endswith("--record peers 'a b'`\n\n| a |\n|---|\n| 1 |\n")


def test_record_that_does_not_exist_is_refused_by_name(tables: ModuleType, records: Path) -> None:
    with pytest.raises(argparse.ArgumentError, match="'pears'"):
        parsed(tables, "--record", "pears")
