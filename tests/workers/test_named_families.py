"""The table of newer families in docs/models.md: each file that a row links to tests the family of the row."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.workers import text_encoders
from tests.workers.architectures import RECURRENT, SERVED

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SWEPT: Mapping[str, Mapping[str, Any]] = {
    "SERVED": SERVED,
    "RECURRENT": RECURRENT,
    "FAMILIES": text_encoders.FAMILIES,
    "VECTORS": text_encoders.VECTORS,
}
"""Tables of tests, by the names under which tests sweep over them."""


def families(page: str) -> dict[str, tuple[list[str], list[str]]]:
    """Return, by family, its names in tests and the files that its row links to."""
    _, _, after = page.partition("\n| family | its name in tests | tests |\n")
    rows, _, _ = after.partition("\n\n")
    found = {}
    for row in rows.splitlines()[1:]:
        family, names, files = row.strip("| ").split(" | ")
        found[family] = re.findall(r"`([^`]+)`", names), re.findall(r"\]\(([^)]+)\)", files)
    return found


def untested(page: str) -> Iterator[str]:
    """Yield the mistakes of the table: rows without names, and linked files that do not test their family."""
    for family, (names, files) in families(page).items():
        if not names or not files:
            yield f"{family}: a row names the family and files"
        for file in files:
            text = (PAGE.parent / file).read_text()
            missing = [name for name in names if not _is_tested(name, text)]
            if len(missing) == len(names):
                yield f"{family}: {file} tests none of {', '.join(names)}"


def _is_tested(name: str, text: str) -> bool:
    """Return whether a test file names the family, or sweeps over a table that has it."""
    is_swept = any(re.search(rf"\b{table}\b", text) and name in entries for table, entries in SWEPT.items())
    return is_swept or re.search(rf"\b{re.escape(name)}\b", text) is not None


def test_each_family_is_tested_by_the_files_that_its_row_links_to() -> None:
    page = PAGE.read_text()
    named = ["DeepSeek-V3.2", "GLM-5", "Qwen3.5", "Qwen3-Next", "gpt-oss", "Nemotron-H", "MiniMax-M3", "EAGLE-3"]
    assert list(families(page)) == [*named, "text encoders"]
    assert list(untested(page)) == []


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("`gpt_oss`", "`gpt_oss_2`", r"gpt-oss: \.\./tests/workers/model/test_model\.py tests none of gpt_oss_2"),
        ("`nemotron_h`", "nothing", "Nemotron-H: a row names the family and files"),
        ("test_text_engine.py", "test_tiers.py", r"text encoders: .*test_tiers\.py tests none of bert"),
    ],
)
def test_planted_mistakes_of_the_table_are_reported(before: str, after: str, found: str) -> None:
    page = PAGE.read_text()
    assert before in page
    assert any(re.match(found, each) for each in untested(page.replace(before, after)))
