"""The table of benchmarks that compare two checkouts."""

from types import ModuleType

from tests.benchmarks.scripts import script

paired = script("paired")


def test_ratio_of_two_checkouts_is_the_median_over_rounds(paired: ModuleType) -> None:
    found = {"decodes": [[10.0, 11.0], [20.0, 24.0], [10.0, 10.0]], "chunks": [[100.0, 100.0]] * 3}
    lines = paired.report(found, ["this", "before"], "ms").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["", "this, ms", "before, ms", "before / this"]
    assert rows[2] == ["decodes", "10", "11", "1.100"]
    assert rows[3] == ["chunks", "100", "100", "1.000"]
    assert rows[4][-1] == f"{(1.1 * 1.2) ** (1 / 6):.3f}"
