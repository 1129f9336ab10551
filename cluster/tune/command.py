"""The command line of `crossdock tune`. sweep.py measures, curves.py reads, advice.py concludes, report.py shows."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from crossdock.cluster.bench.flags import takes

if TYPE_CHECKING:
    from crossdock.cluster.config import ClusterConfig, PoolConfig
    from crossdock.cluster.tune.curves import Cell, Curves
    from crossdock.cluster.tune.report import Findings
    from crossdock.workers.replica.engine.engine import Engine
    from crossdock.workers.schedule.cost.cost import StepCost


_LEAST_SHARE = 0.25  # of the budget for the measurement, however long the model took to load


@dataclass(frozen=True)
class TuneFlags:
    """The flags of `crossdock tune`."""

    model: Annotated[
        str | None, typer.Argument(help="Directory, or hub name (org/name, org/name@revision).", show_default="SmolLM2")
    ] = None
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file: its model, and the pool to tune.")
    ] = None
    pool: Annotated[
        str | None,
        typer.Option(help="Pool of the file: its ranks, role, dtype and engine.", show_default="the only one"),
    ] = None
    tpot: Annotated[
        float | None,
        typer.Option(help="Seconds a running stream may wait for a token.", show_default="the tightest class's"),
    ] = None
    streams: Annotated[
        int | None,
        typer.Option(
            help="Number of streams in a step that must meet it, one of --decodes.",
            show_default="the most that can meet it",
        ),
    ] = None
    chunks: Annotated[str, typer.Option(help="Prompt tokens per step to measure.")] = "16,64,128,256,512,1024,2048"
    decodes: Annotated[str, typer.Option(help="Numbers of streams that decode in the same step.")] = "1,4,16,64"
    contexts: Annotated[str, typer.Option(help="Tokens before the chunk and in each stream.")] = "256,2048"
    repeats: Annotated[
        int, typer.Option(min=1, help="Most rounds; each figure is their median. Two do where they are alike.")
    ] = 3
    budget: Annotated[
        float,
        typer.Option(min=1, help="Seconds for all of it; a slow machine measures fewer sizes."),
    ] = 120.0
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the settings to this file, for `crossdock serve --config`."),
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="Write the profile of a replica here to this file, for `crossdock simulate`."),
    ] = None
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Draw TTFT against TPOT for each chunk and number of streams."),
    ] = None
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the tables of all that was measured, and what follows from each.")
    ] = False


@takes(TuneFlags)
def tune(flags: TuneFlags) -> None:
    """Measure what chunks cost on this machine, and recommend the settings for a target."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in replicas; torch reads it when imported
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # this command shows its own progress
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        _check_files(flags)  # before the minutes of measuring, not after
        found = _find(flags, _Grid.parse(flags), stderr)
    except ValueError as error:
        stderr.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    console = Console(highlight=False)
    _show(found, console, is_verbose=flags.verbose)
    _write(found, flags)
    if flags.output is not None:
        console.print(f"Serve with these settings: crossdock serve --config {escape(str(flags.output))}")
    if found.is_interrupted:
        stderr.print(f"interrupted: measured until then, beside at most {found.curves.decodes[-1]} streams")
        raise typer.Exit(130)


# -- flags -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Grid:
    """The sizes to measure in all combinations, in tokens, streams and tokens."""

    chunks: Sequence[int]
    decodes: Sequence[int]
    contexts: Sequence[int]

    @classmethod
    def parse(cls, flags: TuneFlags) -> "_Grid":
        """Return the grid that the flags name.

        Raises:
            ValueError: a flag's value is wrong; the message names the flag.
        """
        grid = cls(
            _parse_sizes("chunks", flags.chunks),
            _parse_sizes("decodes", flags.decodes),
            _parse_sizes("contexts", flags.contexts),
        )
        if flags.tpot is not None and not flags.tpot > 0:
            raise ValueError(f"tpot ({flags.tpot}) must be more than 0 seconds")
        if not any(grid.chunks) or not any(grid.decodes):
            raise ValueError("chunks and decodes must each name a number above 0")
        if flags.streams is not None and flags.streams not in grid.decodes:
            known = ", ".join(map(str, grid.decodes))
            raise ValueError(f"streams ({flags.streams}) must be one of --decodes: {known}")
        return grid


def _parse_sizes(name: str, text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not of the form 64,128,256") from None
    if sizes[0] < 0:
        raise ValueError(f"{name}: {sizes[0]} is less than 0")
    return sizes


def _check_files(flags: TuneFlags) -> None:
    """Raise ValueError if a file cannot be written later."""
    from crossdock.cluster.bench.plot import check_plot_file

    check_plot_file(flags.plot_file)
    files = {"output": flags.output, "json": flags.json_file, "profile": flags.profile_file}
    for name, file in files.items():
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{name}: there is no directory {file.absolute().parent}")


# -- the run ---------------------------------------------------------------------------------------------------------


def _find(flags: TuneFlags, sizes: _Grid, console: Console) -> "Findings":
    """Load the model, measure the sweep and conclude. Progress goes to `console`.

    Raises:
        ValueError: the configuration is wrong, or the KV pool holds no chunk beside streams.
    """
    from crossdock.cluster.bench.progress import progress
    from crossdock.cluster.config_file import load
    from crossdock.cluster.offline.local_engine import local_engine
    from crossdock.cluster.tune import report
    from crossdock.cluster.tune.advice import advise
    from crossdock.cluster.tune.curves import Curves
    from crossdock.cluster.tune.sweep import fitting, grid
    from crossdock.workers.model.text_files import text_answer
    from crossdock.workers.replica.engine.calibrate import warm_up

    cluster = load(flags.config, {"model.path": flags.model} if flags.model is not None else {})
    pool = _pool(cluster, flags)
    begun = time.monotonic()
    spec = cluster.replica_spec(pool)
    if text_answer(spec.model.folder(needs_weights=False)) is not None:
        raise ValueError("model: tune measures chunks beside streams, and a text encoder has no streams")
    computes_only = pool.role == "prefill"
    wanted = grid(sizes.chunks, () if computes_only else sizes.decodes, sizes.contexts)
    with ExitStack() as stack:
        with progress(console, f"Loading {cluster.model.name} and warming up"):
            engine = stack.enter_context(local_engine(spec))
            profile = warm_up(engine).model_copy(update={"role": pool.role})
        cells = fitting(engine, wanted)
        of_streams = [cell for cell in cells if computes_only or cell.decodes]
        if not any(cell.chunk and cell.decodes == (flags.streams or cell.decodes) for cell in of_streams):
            raise ValueError("no chunk fits beside the streams: lower --contexts, or raise engine.kv_cache_memory")
        left = max(flags.budget - (time.monotonic() - begun), _LEAST_SHARE * flags.budget)
        console.print(f"Measuring for {left:.0f} s of the {flags.budget:.0f} s that --budget allows")
        measured, is_interrupted = _sweep(engine, cells, flags.repeats, profile.cost, console, left)
        kind = engine.model.device.type
        dtype = str(engine.model.dtype).removeprefix("torch.")
    curves = Curves(measured, pool.pipeline_parallel_size, profile.interval_share)
    config = spec.engine
    target = flags.tpot if flags.tpot is not None else min(slo.tpot_s for slo in config.slo_classes)
    if is_interrupted and not _can_advise(curves, flags.streams, pool.role):
        Console(highlight=False).print(report.stalls(curves))
        console.print("interrupted: too little was measured to recommend settings; no file was written")
        raise typer.Exit(130)
    advice = advise(curves, target, flags.streams, config.page_size, profile.max_num_seqs, pool.role)
    ranks = f"{pool.num_ranks} ranks, each " if pool.num_ranks > 1 else ""
    device = f"{ranks}{_device_name(kind, spec.num_threads)}, {dtype}"
    dropped = [cell for cell in wanted if cell not in cells]
    return report.Findings(device, cluster, pool, target, curves, advice, profile, dropped, is_interrupted)


def _pool(cluster: "ClusterConfig", flags: TuneFlags) -> "PoolConfig":
    """Return the pool to tune. ValueError: there is no such pool, it must be named, or it runs no streams."""
    by_name = {pool.name: pool for pool in cluster.pools}
    if flags.pool is None and len(by_name) > 1:
        raise ValueError(f"pool: the file has {', '.join(by_name)}, which may differ; name one with --pool")
    pool = by_name.get(flags.pool or cluster.pools[0].name)
    if pool is None:
        raise ValueError(f"pool: there is no {flags.pool!r}; there are {', '.join(by_name)}")
    if pool.role == "prefill" and flags.streams is not None:
        raise ValueError(f"streams: none run in pool {pool.name!r}, whose role is prefill; leave it out")
    return pool


def _sweep(
    engine: "Engine", cells: "Sequence[Cell]", repeats: int, cost: "StepCost", console: Console, budget_s: float
) -> "tuple[list[Cell], bool]":
    """Return the measured cells, and whether the user has interrupted the measurement.

    Raises:
        KeyboardInterrupt: before anything was measured that could be shown.
    """
    from crossdock.cluster.bench.progress import progress
    from crossdock.cluster.tune.sweep import Sweep

    with progress(console, "Measuring") as progressed:
        sweep = Sweep(engine, cells, repeats, cost, progressed, budget_s)
        is_interrupted = False
        try:
            sweep.run()
        except KeyboardInterrupt:
            if not sweep.cells():
                raise
            is_interrupted = True
    return sweep.cells(), is_interrupted


def _can_advise(curves: "Curves", streams: int | None, role: str) -> bool:
    """Return whether an interrupted sweep has measured enough: chunks beside streams, and beside those asked for."""
    return role == "prefill" or (streams in curves.decodes if streams is not None else any(curves.decodes))


def _device_name(kind: str, num_threads: int) -> str:
    if kind == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    from crossdock.workers.replica.serving.machine import cpu_name

    return f"{num_threads} threads of {cpu_name()}"


# -- the report ------------------------------------------------------------------------------------------------------


def _show(found: "Findings", console: Console, *, is_verbose: bool) -> None:
    from crossdock.cluster.tune import report

    for line in report.advice(found):
        console.print(escape(line))
    if not is_verbose:
        console.print("[dim]--verbose shows the tables behind this.[/dim]")
        return
    console.print(report.stalls(found.curves))
    if found.advice.attainable:
        console.print(report.promises(found), report.trade_off(found))
    console.print(report.shipped_pages(found))
    for line in report.sentences(found):
        console.print(f"• {escape(line)}")


def _write(found: "Findings", flags: TuneFlags) -> None:
    from crossdock.cluster.tune import report

    if flags.json_file is not None:
        flags.json_file.write_text(json.dumps(report.as_json(found), indent=1) + "\n")
    if flags.profile_file is not None:
        flags.profile_file.write_text(report.profile(found))
    if flags.output is not None:
        flags.output.write_text(report.snippet(found))
    if flags.plot_file is not None:
        _write_plot(found, flags.plot_file)


def _write_plot(found: "Findings", file: Path) -> None:
    """Draw the trade-off. A replica that computes prompts alone has none: say so and write no file."""
    from crossdock.cluster.tune import report

    try:
        file.write_text(report.plotted(found))
    except ValueError as error:
        Console(stderr=True).print(f"[yellow]tune:[/yellow] {escape(str(error))}", highlight=False)
