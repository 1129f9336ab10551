"""How does each published command line of vLLM and SGLang start here, and how did it with another checkout?

    git worktree add ../before 5290ee67
    python benchmarks/command_lines.py --other-checkout ../before                      # the 37 of various sources: 10 s
    python benchmarks/command_lines.py --other-checkout ../before --source recipes     # the 147 of vLLM's recipes

Each line is given to `crossdock config`, which takes the flags of `crossdock serve` and needs no model. The lines are
those of tests/cluster/serve/flags/public_lines.yaml. A row per line: what was said of it there, and what is said here.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import yaml
from paired import Checkout, answering
from tables import ROOT, add_output_options, commit_of, markdown, write
from typer.testing import CliRunner

from crossdock.cluster import cli

LINES = ROOT / "tests" / "cluster" / "serve" / "flags" / "public_lines.yaml"
SAID = re.compile(r"(?:warning: |error: |│ )(.*[^│ ])")  # the last: a box of the command line's library


def said(line: str) -> tuple[int, list[str]]:
    """Return the exit status of a command line, and the warnings and errors that it prints."""
    result = CliRunner().invoke(cli.app, ["config", *shlex.split(line)], env={"COLUMNS": "1000"})
    found = (SAID.match(each) for each in result.stderr.splitlines())
    return result.exit_code, [each[1].strip() for each in found if each]


def told(answer: tuple[int, list[str]]) -> str:
    """Return the cell of a table for an answer of `said`."""
    code, messages = answer
    outcome = "starts" if code == 0 else f"ends with status {code}"
    return ". ".join([outcome, *messages])


def rows(lines: Sequence[str], sides: Sequence[Checkout]) -> list[list[tuple[int, list[str]]]]:
    """Return the answers of `said`, by line and by checkout."""
    return [[tuple(side.ask([line])) for side in sides] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other-checkout", type=Path, help="a folder with another commit")
    parser.add_argument("--source", default="others", choices=("recipes", "others"), help="which lines")
    add_output_options(parser, "command-lines")
    args = parser.parse_args()
    checkouts = [*([args.other_checkout] if args.other_checkout else []), ROOT]
    lines = [each["line"] for each in yaml.safe_load(LINES.read_text())[args.source]]
    with ExitStack() as stack:
        found = rows(lines, [stack.enter_context(answering(each, Path(__file__), "said")) for each in checkouts])
    names = [commit_of(each) for each in checkouts]
    counts = [sum(answers[side][0] == 0 for answers in found) for side in range(len(checkouts))]
    summary = ", ".join(f"{count} with `{name}`" for count, name in zip(counts, names, strict=True))
    table = [["line", *names]]
    table += [
        [cell(f"`{line}`"), *(cell(told(answer)) for answer in answers)]
        for line, answers in zip(lines, found, strict=True)
    ]
    data = {"names": names, "lines": lines, "said": found}
    write(args, f"Of {len(lines)} lines start: {summary}.\n\n{markdown(table)}", data)


def cell(text: str) -> str:
    """Return the text for a cell of Markdown."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
