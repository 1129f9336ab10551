"""The table of the benchmark of paired steps."""

from types import ModuleType

from tests.benchmarks.scripts import script

paired_steps = script("paired_steps")


def test_ratio_of_paired_steps_is_the_median_over_rounds(paired_steps: ModuleType) -> None:
    found = {"decodes": [[0.010, 0.011], [0.020, 0.024], [0.010, 0.010]], "chunks": [[0.1, 0.1]] * 3}
    lines = paired_steps.report(found, ["this", "before"]).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["step", "this, ms", "before, ms", "before / this"]
    assert rows[2] == ["decodes", "10", "11", "1.100"]
    assert rows[3] == ["chunks", "100", "100", "1.000"]
    assert rows[4][-1] == f"{(1.1 * 1.2) ** (1 / 6):.3f}"
