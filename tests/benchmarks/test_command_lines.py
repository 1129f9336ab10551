"""The table of published command lines: what is said of each."""

from types import ModuleType

import pytest

from tests.benchmarks.scripts import script

command_lines = script("command_lines")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("MODEL --tp 2", "starts"),
        ("MODEL --context-length 9", "starts. --context-length: read as --max-model-len 9"),
        (
            "MODEL --dllm-algorithm A --context-length 9",
            "ends with status 2. --context-length: read as --max-model-len 9. --dllm-algorithm: not supported: "
            "diffusion models",
        ),
        ("MODEL --absent 1", "ends with status 2. --absent: no such option"),
    ],
)
def test_cell_says_whether_a_line_starts_and_all_that_the_server_says(
    command_lines: ModuleType, line: str, told: str
) -> None:
    assert command_lines.told(command_lines.said(line)).startswith(told)


def test_words_of_an_error_in_a_box_are_found(command_lines: ModuleType) -> None:
    found = command_lines.SAID.match("│ No such option: --absent (Possible options: --a, --b)          │")
    assert found[1] == "No such option: --absent (Possible options: --a, --b)"
