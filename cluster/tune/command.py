"""The command line of `crossdock tune`. sweep.py measures, curves.py reads, advice.py concludes, report.py shows."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from crossdock.cluster.tune.report import Findings


def tune(
    model: Annotated[
        str | None, typer.Argument(help="Directory, or hub name (org/name, org/name@revision).", show_default="SmolLM2")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file: its model and the engine of its first pool.")
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(help="Seconds a running stream may wait for a token.", show_default="the tightest class's"),
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(help="How many streams must be kept to it, one of --decodes.", show_default="the most that can"),
    ] = None,
    chunks: Annotated[str, typer.Option(help="Prompt tokens per step to measure.")] = "16,64,128,256,512,1024,2048",
    decodes: Annotated[str, typer.Option(help="Numbers of streams beside them.")] = "1,4,16,64",
    contexts: Annotated[str, typer.Option(help="Tokens before the chunk and in each stream.")] = "256,2048",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each figure is their median.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the settings here, for `crossdock serve --config`.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    profile_file: Annotated[
        Path | None, typer.Option("--profile", help="Write what a replica can do here, for `crossdock simulate`.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Draw efficiency against stall here (png, svg, pdf).")
    ] = None,
) -> None:
    """Measure what chunks cost on this machine, and recommend the settings for a target."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as replicas have it; torch reads it when imported
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the progress shown is ours

    from crossdock.cluster.bench.report import require_plotting
    from crossdock.cluster.tune import report

    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    try:  # what can go wrong goes wrong before the minutes of measuring
        if plot_file is not None:
            require_plotting()
        for name, file in (
            ("output", output),
            ("json", json_file),
            ("profile", profile_file),
            ("plot", plot_file),
        ):
            if file is not None and not file.absolute().parent.is_dir():
                raise ValueError(f"{name}: there is no directory {file.absolute().parent}")
        sizes = [
            _sizes(name, text) for name, text in (("chunks", chunks), ("decodes", decodes), ("contexts", contexts))
        ]
        found = _measure(model, config, tpot, streams, sizes, repeats, stderr)
    except ValueError as error:
        stderr.print(f"[red]error:[/red] {escape(str(error))}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    console = Console(highlight=False)
    console.print(report.stalls(found), report.promises(found))
    for line in report.sentences(found):
        console.print(f"• {escape(line)}")
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(found), indent=1) + "\n")
    if profile_file is not None:
        profile_file.write_text(report.profile(found))
    if plot_file is not None:
        report.plot(found, plot_file)
    if output is not None:
        output.write_text(report.snippet(found))
        console.print(f"Serve with them: crossdock serve --config {escape(str(output))}")


def _measure(
    model: str | None,
    path: Path | None,
    tpot: float | None,
    streams: int | None,
    sizes: list[list[int]],
    repeats: int,
    console: Console,
) -> "Findings":
    chunks, decodes, contexts = sizes
    if tpot is not None and not tpot > 0:
        raise ValueError(f"tpot ({tpot}) must be more than 0 seconds")
    if not any(chunks) or not any(decodes):
        raise ValueError("chunks and decodes must each name a number above 0")
    if streams is not None and streams not in decodes:
        raise ValueError(f"streams ({streams}) must be one of --decodes: {', '.join(map(str, decodes))}")

    from crossdock.cluster.config_file import load
    from crossdock.cluster.tune.advice import advise
    from crossdock.cluster.tune.curves import Curves
    from crossdock.cluster.tune.report import Findings
    from crossdock.cluster.tune.sweep import grid, held, sweep
    from crossdock.workers.replica.calibrate import warm_up
    from crossdock.workers.replica.config import ReplicaSpec
    from crossdock.workers.replica.engine import load_engine

    cluster = load(path, {"model.path": model} if model is not None else {})
    pool, what = cluster.pools[0], cluster.model
    config = pool.engine or cluster.engine
    num_threads = pool.num_cpus or os.cpu_count() or 1
    with console.status(f"Loading {escape(what.name)} and warming up …"):
        spec = config.model_spec(what.path, what.dtype, what.max_model_len)
        engine = load_engine(ReplicaSpec(spec, config, num_threads))
        profile = warm_up(engine)
    wanted = grid(chunks, decodes, contexts)
    cells = held(engine, wanted)
    if not any(cell.chunk and cell.decodes == (streams or cell.decodes) for cell in cells if cell.decodes):
        raise ValueError("no chunk fits beside the streams: lower --contexts, or raise engine.kv_cache_memory")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as progress:  # on a terminal only
        seconds = {cell: profile.cost.seconds(cell.work) for cell in cells}
        task = progress.add_task("Measuring", total=repeats * sum(seconds.values()))
        measured = sweep(engine, cells, repeats, lambda cell: progress.advance(task, seconds[cell]))
    target = tpot if tpot is not None else min(slo.tpot_s for slo in config.slo_classes)
    curves = Curves(measured)
    advice = advise(curves, target, streams, config.page_size, config.max_num_seqs)
    device = f"{_device_name(engine.model.device.type, num_threads)}, {str(engine.model.dtype).removeprefix('torch.')}"
    return Findings(device, cluster, target, curves, advice, profile, [cell for cell in wanted if cell not in cells])


def _sizes(name: str, text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not of the form 64,128,256") from None
    if sizes[0] < 0:
        raise ValueError(f"{name}: {sizes[0]} is less than 0")
    return sizes


def _device_name(kind: str, num_threads: int) -> str:
    if kind == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    names = [line.partition(":")[2].strip() for line in _cpu_info() if line.startswith("model name")]
    return f"{num_threads} threads of {names[0] if names else 'a CPU'}"


def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return []
