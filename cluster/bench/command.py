"""`crossdock bench URL`: offers a seeded load to any OpenAI endpoint and reports what its users would feel.

This file is the command line. workloads.py says what is sent, run.py when, client.py how; metrics.py
turns what came back into figures, and report.py shows them.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdock.cluster.bench import metrics, report
from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.run import BenchOptions, BenchResult, run_bench
from crossdock.cluster.bench.workloads import WORKLOADS, Interference


def bench(
    url: Annotated[str, typer.Argument(help="Address of an OpenAI endpoint, with or without /v1.")],
    workload: Annotated[str, typer.Option("--workload", "-w", help=f"One of: {', '.join(WORKLOADS)}.")] = "chat",
    num_requests: Annotated[int | None, typer.Option("--num-requests", "-n", help="How many requests.")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests are started.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", help="Requests under way at a time.")
    ] = None,
    request_rate: Annotated[float | None, typer.Option(help="Open loop: Poisson arrivals per second.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Length of a prompt.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Length of an output.")] = None,
    prefix_tokens: Annotated[int | None, typer.Option(help="Length of a prefix that all prompts share.")] = None,
    streams: Annotated[int | None, typer.Option(help="interference: established streams (4).")] = None,
    long_prompts: Annotated[int, typer.Option(help="interference: how many long prompts.")] = 4,
    long_prompt_tokens: Annotated[int, typer.Option(help="interference: their length.")] = 4096,
    interval: Annotated[float, typer.Option(help="interference: seconds between one and the next.")] = 1.0,
    quiet: Annotated[float, typer.Option(help="interference: quiet seconds before the first.")] = 4.0,
    trace: Annotated[Path | None, typer.Option(help="trace: Mooncake JSONL or Azure LLM CSV file.")] = None,
    trace_speed: Annotated[float, typer.Option(help="trace: 2 replays it in half the time.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="trace: multiplies all lengths.")] = 1.0,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Limits in ms that make a request good, e.g. 'ttft:500 tpot:50' (also gap, e2e)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides arrivals, lengths and texts.")] = 0,
    repeat_prompts: Annotated[
        bool, typer.Option("--repeat-prompts", help="The same texts in every run, so that prefix caches can hit.")
    ] = False,
    warmup: Annotated[int, typer.Option(help="Requests made before, and not counted.")] = 2,
    model: Annotated[str | None, typer.Option(help="Default: the first the server names.")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as bearer token.", envvar="OPENAI_API_KEY")] = None,
    header: Annotated[list[str] | None, typer.Option(help="'Name: value', sent with every request.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory with the model's tokenizer.json.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw gaps over time here (png, svg, pdf).")] = None,
) -> None:
    """Measure any OpenAI endpoint: throughput, time to first token, gaps between tokens, goodput."""
    try:
        options = BenchOptions(
            url=url,
            workload="trace" if trace is not None and workload == "chat" else workload,
            num_requests=num_requests,
            duration=duration,
            concurrency=concurrency,
            request_rate=request_rate,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_tokens=prefix_tokens,
            streams=streams,
            interference=Interference(
                long_prompts=long_prompts, long_prompt_tokens=long_prompt_tokens, interval=interval, quiet=quiet
            ),
            trace=trace,
            trace_speed=trace_speed,
            length_scale=length_scale,
            seed=seed,
            repeat_prompts=repeat_prompts,
            warmup=warmup,
            goodput=metrics.parse_goodput(goodput or ()),
            model=model,
            api_key=api_key,
            headers=_parse_headers(header or ()),
            tokenizer=tokenizer,
            chat=chat,
            timeout=timeout,
        )
        if plot_file is not None:
            report.require_plotting()  # before the minutes of measuring, not after
        result = _run_with_progress(options)
    except (BenchError, ValueError) as error:
        Console(stderr=True).print(f"[red]bench:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    Console().print(report.table(result))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(result), indent=1) + "\n")
    if plot_file is not None:
        report.plot(result, plot_file)
    if not result.summary["requests_ok"]:
        raise typer.Exit(1)


def _parse_headers(lines: list[str] | tuple[()]) -> dict[str, str]:
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"header: {line!r} is not 'Name: value'")
        headers[name.strip()] = value.strip()
    return headers


def _run_with_progress(options: BenchOptions) -> BenchResult:
    if not sys.stderr.isatty():
        return asyncio.run(run_bench(options))
    if options.workload == "interference":
        total: int | None = options.interference.long_prompts
    elif options.trace is None and options.duration is None:
        total = options.shape.num_requests
    else:
        total = options.num_requests
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Twice a second: drawing takes CPU from the server under test.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True) as progress:
        task = progress.add_task(options.workload, total=total)
        return asyncio.run(run_bench(options, lambda _: progress.advance(task)))
