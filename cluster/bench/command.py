"""`crossdock bench URL`: offer a seeded load to any OpenAI endpoint and report what its users would see.

This file is the command line. workloads.py and mix.py decide what is sent, run.py when, and client.py how. metrics.py
computes the figures, serverside.py adds the server's own, and report.py shows them.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from crossdock.cluster.bench.agents import Agents
from crossdock.cluster.bench.flags import matching, takes
from crossdock.cluster.bench.load import Load, SharedFlags
from crossdock.cluster.bench.mix import Mix, named_mix
from crossdock.cluster.bench.other_flags import BenchCommand
from crossdock.cluster.bench.workloads import SHAPES, Interference

if TYPE_CHECKING:
    from crossdock.cluster.bench.metrics import Sample
    from crossdock.cluster.bench.run import BenchOptions, BenchResult

_MIX = "Workload mix"
_LONG = "Workloads interference and short-vs-long"
_PLAN = Interference()


@dataclass(frozen=True)
class BenchFlags(Load, SharedFlags):
    """The flags of `crossdock bench`. One that is named like a field of Interference or Mix sets it."""

    batch_share: Annotated[
        float | None,
        typer.Option(help="Share of long prompts in class batch; the others are standard.", rich_help_panel=_MIX),
    ] = None
    interactive_share: Annotated[
        float | None,
        typer.Option(
            help="Share of conversations in class interactive; the others are standard.", rich_help_panel=_MIX
        ),
    ] = None
    long_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO", help="Tokens of long prompts.", show_default="4096-16384", rich_help_panel=_MIX
        ),
    ] = None
    short_interval: Annotated[
        float,
        typer.Option(help="short-vs-long: seconds from one short request to the next.", rich_help_panel=_LONG),
    ] = _PLAN.short_interval
    long_prompts: Annotated[int, typer.Option(help="Number of long prompts.", rich_help_panel=_LONG)] = (
        _PLAN.long_prompts
    )
    long_prompt_tokens: Annotated[int, typer.Option(help="Tokens of a long prompt.", rich_help_panel=_LONG)] = (
        _PLAN.long_prompt_tokens
    )
    long_pictures: Annotated[int, typer.Option(help="Pictures of a long prompt.", rich_help_panel=_LONG)] = (
        _PLAN.long_pictures
    )
    long_service_tier: Annotated[
        str | None,
        typer.Option(help="SLO class of long prompts.", show_default="--service-tier", rich_help_panel=_LONG),
    ] = None
    interval: Annotated[
        float, typer.Option(help="Seconds from the end of a long prompt to the next.", rich_help_panel=_LONG)
    ] = _PLAN.interval
    quiet: Annotated[float, typer.Option(help="Seconds before the first long prompt.", rich_help_panel=_LONG)] = (
        _PLAN.quiet
    )
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limits in ms that make a request good, e.g. 'ttft:500 tpot:50' (also gap, e2e)."),
    ] = None
    header: Annotated[list[str] | None, typer.Option(help="'Name: value', sent with every request.")] = None

    def options(self) -> "BenchOptions":
        """Return the options of the measurement.

        Raises:
            ValueError: a flag's value is wrong; the message names the flag's field.
        """
        from crossdock.cluster.bench.metrics import parse_goodput, parse_targets
        from crossdock.cluster.bench.run import BenchOptions

        workload = self.workload
        if workload == "chat":
            workload = "trace" if self.trace is not None else "mix" if self.mix is not None else workload
        tier = self.long_service_tier or self.service_tier  # of the long prompts
        parsed = {
            "workload": workload,
            # In a mix the rate and the burstiness are the mix's own.
            "request_rate": None if workload == "mix" else self.request_rate,
            "mix": self._mix(),
            "agents": Agents(**matching(Agents, self)),
            "interference": Interference(**(matching(Interference, self) | {"service_tier": tier})),
            "goodput": parse_goodput(self.goodput or ()),
            "targets": parse_targets(self.slo or ()),
            "headers": _parse_headers(self.header or ()),
        }
        return BenchOptions(**(matching(BenchOptions, self) | parsed))

    def _mix(self) -> Mix:
        """Return the preset that --mix names, with the user's numbers in place of its own."""
        changes = matching(Mix, self)
        if self.request_rate is not None:
            changes["rate"] = self.request_rate
        if self.long_tokens is not None:
            changes["long_tokens"] = _parse_range(self.long_tokens)
        return named_mix(self.mix, changes)


@takes(BenchFlags)
def bench(flags: BenchFlags) -> None:
    """Measure any OpenAI endpoint: throughput, time to first token, gaps between tokens, goodput."""
    from crossdock.cluster.bench import report
    from crossdock.cluster.bench.http import BenchError
    from crossdock.cluster.bench.plot import check_plot_file

    try:
        check_plot_file(flags.plot_file)
        options = flags.options()
        result = _run_with_progress(options)
    except (BenchError, ValueError) as error:
        Console(stderr=True).print(f"[red]bench:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    Console().print(report.table(result))
    if flags.json_file is not None:
        flags.json_file.write_text(json.dumps(report.as_json(result), indent=1) + "\n")
    if flags.plot_file is not None:
        _write_plot(result, flags.plot_file)
    if result.ended_early or not result.summary["requests_ok"]:
        raise typer.Exit(1)


bench.command_class = BenchCommand  # type: ignore[attr-defined]  # read by cli.py


def _write_plot(result: "BenchResult", file: Path) -> None:
    """Draw the requests that had answers. Where none has a second token, say so and write no file."""
    from crossdock.cluster.bench.plot import plot, series_of_samples

    series = series_of_samples(result.samples, result.options.targets)
    try:
        file.write_text(plot(f"{result.options.workload} on {result.model}", f"crossdock bench, {result.date}", series))
    except ValueError as error:
        Console(stderr=True).print(f"[yellow]bench:[/yellow] {escape(str(error))}", highlight=False)


def _parse_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdecimal() or not high.isdecimal():
        raise ValueError(f"long_tokens: {text!r} is not FROM-TO, e.g. 4096-16384")
    return int(low), int(high)


def _parse_headers(lines: Sequence[str]) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"header: {line!r} is not 'Name: value'")
        headers[name.strip()] = value.strip()
    return headers


def _run_with_progress(options: "BenchOptions") -> "BenchResult":
    """Run the benchmark and show on stderr how many requests have ended."""
    from crossdock.cluster.bench.progress import progress
    from crossdock.cluster.bench.run import run_bench

    if options.workload == "interference":
        total: int | None = options.interference.long_prompts
    elif options.workload in SHAPES and options.workload != "short-vs-long" and options.duration is None:
        total = options.shape.num_requests
    else:
        total = options.num_requests
    num_ended = 0
    with progress(Console(stderr=True), options.workload, "requests") as report:

        def ended(_: "Sample") -> None:
            nonlocal num_ended
            num_ended += 1
            report(num_ended, total)

        return asyncio.run(run_bench(options, ended))
