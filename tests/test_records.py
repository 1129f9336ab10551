"""benchmarks/RESULTS.md is one page of claims, and every figure of a claim stands in the record that it links to."""

import re
from pathlib import Path

import pytest

from tests.test_documented_commands import ROOT, anchors

RESULTS = ROOT / "benchmarks" / "RESULTS.md"
RECORDS = ROOT / "benchmarks" / "records"
COLUMNS = ["claim", "figure", "CPU", "date", "record"]
LINK = re.compile(r"\[[^\]]+\]\(records/([\w-]+\.md)(?:#([\w-]+))?\)")
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def rows() -> list[list[str]]:
    lines = [line for line in RESULTS.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


CLAIMS = [row for row in rows()[2:] if row[1]]


def faults(claim: list[str]) -> list[str]:
    """Return the faults of one row of claims."""
    _, figure, cpu, date, link = claim
    found = LINK.fullmatch(link)
    if found is None or not (RECORDS / found[1]).is_file():
        return [f"{link} links to no record"]
    text = (RECORDS / found[1]).read_text()
    absent = [number for number in NUMBER.findall(figure) if number not in NUMBER.findall(text)]
    problems = [f"{found[1]} lacks the figures {', '.join(absent)}"] if absent else []
    if found[2] and found[2] not in anchors(text):
        problems.append(f"{found[1]} has no heading {found[2]}")
    if not cpu or not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        problems.append("a claim has a CPU and a date")
    return problems


def test_results_are_one_page_of_claims() -> None:
    assert rows()[0] == COLUMNS
    assert len(RESULTS.read_text().splitlines()) <= 80
    assert all(len(row) == len(COLUMNS) for row in rows())


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim[0])
def test_figures_of_a_claim_stand_in_its_record(claim: list[str]) -> None:
    assert faults(claim) == []


def test_record_without_a_figure_of_its_claim_is_reported() -> None:
    claim = ["chat", "112 and 66.5", "2 cores", "2026-11-26", "[peers](records/peers.md)"]
    assert faults(claim) == ["peers.md lacks the figures 66.5"]
    assert faults([*claim[:4], "[peers](records/absent.md)"]) == ["[peers](records/absent.md) links to no record"]


@pytest.mark.parametrize("page", sorted(RECORDS.glob("*.md")), ids=lambda page: page.stem)
def test_record_says_what_it_is_about_and_when_it_was_measured(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    assert re.search(r"\b20\d\d-\d\d-\d\d\b|\b(January|November) 20\d\d\b", text), "a record has dates"
