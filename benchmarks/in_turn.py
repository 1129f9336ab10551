"""Settings that take turns, each on a server of its own, so that a slower machine slows all; and their report."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from servers import OtherLoad, RunningServer, log_of, serving
from tables import Row, hardware, medians, today, write

from crossdock.cluster.bench.http import BenchError

Passes = dict[str, dict[str, list[Row]]]  # by part and setting: the figures of each repeat


def in_turn(
    names: Sequence[str],
    args: argparse.Namespace,
    command: Callable[[str, Path], list[str]],
    measure: Callable[[str, RunningServer], Iterator[tuple[str, Row]]],
) -> Passes:
    """Measure all settings in turn, `args.repeats` times. A setting whose server fails is reported, and left out.

    Args:
        names: of the settings.
        args: with the options of `add_server_options`.
        command: returns the command that serves a setting; its folder is gone afterwards.
        measure: yields the name and the figures of each part of the benchmark.
    """
    passes: Passes = {}
    for repeat, name in itertools.product(range(args.repeats), names):
        print(f"[{repeat + 1}/{args.repeats}] {name}: starting", flush=True)
        try:
            with (
                TemporaryDirectory(prefix="crossdock-") as folder,
                serving(name, command(name, Path(folder)), args, log_of(args, name)) as server,
            ):
                others = OtherLoad(server.processes)
                for part, row in measure(name, server):
                    row["others CPU %"] = 100 * others.share()
                    passes.setdefault(part, {}).setdefault(name, []).append(row)
                    print(f"  {part}: {shown(row)}", flush=True)
                    others = OtherLoad(server.processes)
        except (RuntimeError, OSError, BenchError) as error:
            print(f"  {error or 'the run did not end'}", file=sys.stderr, flush=True)
    return passes


def shown(row: Row) -> str:
    """Return figures in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in row.items())


def report(
    args: argparse.Namespace, caption: str, passes: Passes, show: Callable[[str, Mapping[str, Row]], str]
) -> None:
    """Write and print the medians of all parts. `show` returns the table of a part.

    Raises:
        SystemExit: nothing was measured.
    """
    results = {part: {name: medians(rows) for name, rows in settings.items()} for part, settings in passes.items()}
    head = f"{args.model.name}; {hardware()}; {today()}; medians of {args.repeats}; {caption}."
    text = "\n".join(show(part, rows) for part, rows in results.items())
    data = {"date": today(), "hardware": hardware(), "medians": results, "passes": passes}
    write(args, f"{head}\n\n{text}", data)
    if not passes:
        sys.exit(1)
