"""The results of a benchmark: medians over repeats, Markdown tables, and the machine they were measured on."""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"

Row = dict[str, float]  # figures by the name of their column


def medians(rows: Sequence[Row]) -> Row:
    """Return the median of each figure over the rows that have it."""
    names = {name: None for row in rows for name in row}  # a set with an order
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}


def quantiles(name: str, spread: Mapping[str, Any]) -> Row:
    """Return p50 and p99 of a spread of `crossdock bench` as figures; none where nothing was measured."""
    return {f"{name} {quantile}": spread[quantile] for quantile in ("p50", "p99") if quantile in spread}


def table(results: Mapping[str, Row], label: str) -> str:
    """Return a Markdown table with a row per result and a column per figure. `label`: head of the first column."""
    names = {name: None for row in results.values() for name in row}
    lines = [[label, *names]]
    lines += [[name, *(cell(row.get(key)) for key in names)] for name, row in results.items()]
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first line is its head."""
    head, *rows = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *rows]) + "\n"


def cell(value: float | None) -> str:
    """Return a figure with three digits, or all digits of a whole or large number; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def hardware() -> str:
    """Return the cores, processor and memory of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{os.cpu_count()} cores, {model}, {psutil.virtual_memory().total / 2**30:.0f} GiB"


def today() -> str:
    """Return the date in UTC, as in 2026-11-22."""
    return datetime.now(UTC).date().isoformat()


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, and whether files differ from it; the folder's name where git knows none."""
    asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=7", "--exclude", "*"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or checkout.name


def add_output_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of every benchmark that writes its results. `name`: the benchmark's, used in file names."""
    output = ROOT / ".cache" / name / "results"
    parser.add_argument("--output", type=Path, default=output, help="files for results and logs, without suffix")
    parser.add_argument(
        "--record",
        choices=sorted(page.stem for page in RECORDS.glob("*.md")),
        help="also add the tables, with the command, the commit and the machine, to this page of benchmarks/records",
    )


def write(args: argparse.Namespace, text: str, data: object) -> None:
    """Write `text` to output.md and `data` to output.json, print the text, and add it to the record if one is named.

    Args:
        args: with the options of `add_output_options`.
        text: Markdown, without headings.
        data: what JSON can hold.
    """
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.with_suffix(".md").write_text(text)
    args.output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    print("\n" + text)
    if args.record is not None:
        page = RECORDS / f"{args.record}.md"
        page.write_text(f"{page.read_text().rstrip()}\n\n{section(text)}")


def section(text: str) -> str:
    """Return a section of a record: the date, the commit, the machine and the command above the text."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    command = shlex.join(["python", str(shown), *sys.argv[1:]])
    return f"## {today()}, `{commit_of(ROOT)}`\n\n{hardware()}\n`{command}`\n\n{text.strip()}\n"
