"""docs/glossary.md: one row for each term, in order, and classes that exist."""

import re

import pytest

from tests.test_documented_commands import ROOT

TERMS, WEIGHTS = (ROOT / "docs" / "glossary.md").read_text().split("## Nouns of weights")


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_glossary_has_each_term_once_and_in_order() -> None:
    terms = [term for term, *_ in rows(TERMS)]
    assert len(terms) == len(set(terms))
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize(("noun", "path"), [(noun, path) for noun, _, path in rows(WEIGHTS)])
def test_noun_of_weights_is_a_class_of_its_file(noun: str, path: str) -> None:
    name = noun.strip("`")
    assert re.search(rf"^class {name}\b", (ROOT / path.strip("`")).read_text(), re.MULTILINE)
