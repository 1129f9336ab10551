"""`crossdock bench URL`: offers a seeded load to any OpenAI endpoint and reports what its users would feel.

This file is the command line. workloads.py and mix.py say what is sent, run.py when, client.py how; metrics.py turns
what came back into figures, serverside.py adds what the server says of itself, and report.py shows them.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from crossdock.cluster.bench import metrics, report
from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.mix import MIXES, Mix
from crossdock.cluster.bench.run import BenchOptions, BenchResult, run_bench
from crossdock.cluster.bench.workloads import SHAPES, WORKLOADS, Interference

_MIX, _LONG, _TRACE = "Workload mix", "Workloads interference and short-vs-long", "Workload trace"
_SLO_DEFAULTS = ", ".join(
    f"{name} {limits['ttft'] * 1e3:.0f}/{limits['tpot'] * 1e3:.0f}" for name, limits in metrics.DEFAULT_TARGETS.items()
)


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
    burstiness: Annotated[
        float | None, typer.Option(help="Of open loops: 1 is Poisson, less comes in bursts (as in vLLM).")
    ] = None,
    service_tier: Annotated[
        str | None, typer.Option(help="SLO class of the requests, e.g. interactive; mix has its own.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=LIMITS",
            help=f"A class's targets in ms, e.g. interactive=ttft:500,tpot:50. Default: {_SLO_DEFAULTS}.",
        ),
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(MIXES)}.", show_default="chat-heavy", rich_help_panel=_MIX)
    ] = None,
    long_share: Annotated[
        float | None, typer.Option(help="Share of long prompts among arrivals.", rich_help_panel=_MIX)
    ] = None,
    batch_share: Annotated[
        float | None,
        typer.Option(help="Share of long prompts that are batch; others: standard.", rich_help_panel=_MIX),
    ] = None,
    interactive_share: Annotated[
        float | None,
        typer.Option(help="Share of conversations that are interactive; others: standard.", rich_help_panel=_MIX),
    ] = None,
    long_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FROM-TO", help="Length of long prompts.", show_default="4096-16384", rich_help_panel=_MIX
        ),
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(help="interference: established streams.", show_default="4", rich_help_panel=_LONG),
    ] = None,
    short_interval: Annotated[
        float,
        typer.Option(help="short-vs-long: seconds from one short request to the next.", rich_help_panel=_LONG),
    ] = 0.5,
    long_prompts: Annotated[int, typer.Option(help="How many long prompts.", rich_help_panel=_LONG)] = 4,
    long_prompt_tokens: Annotated[int, typer.Option(help="Their length.", rich_help_panel=_LONG)] = 4096,
    long_service_tier: Annotated[
        str | None, typer.Option(help="Their SLO class.", show_default="--service-tier", rich_help_panel=_LONG)
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds from the end of one to the next.", rich_help_panel=_LONG)
    ] = 1.0,
    quiet: Annotated[float, typer.Option(help="Quiet seconds before the first.", rich_help_panel=_LONG)] = 4.0,
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake JSONL or Azure LLM CSV file.", rich_help_panel=_TRACE)
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="2 replays it in half the time.", rich_help_panel=_TRACE)] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Multiplies all lengths.", rich_help_panel=_TRACE)] = 1.0,
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
    if workload == "chat" and (trace is not None or mix is not None):
        workload = "mix" if trace is None else "trace"
    try:
        options = BenchOptions(
            url=url,
            workload=workload,
            num_requests=num_requests,
            duration=duration,
            concurrency=concurrency,
            request_rate=None if workload == "mix" else request_rate,
            burstiness=1.0 if burstiness is None else burstiness,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefix_tokens=prefix_tokens,
            streams=streams,
            interference=Interference(
                long_prompts=long_prompts,
                long_prompt_tokens=long_prompt_tokens,
                interval=interval,
                quiet=quiet,
                short_interval=short_interval,
                service_tier=long_service_tier or service_tier,
            ),
            mix=_mix(
                mix or "chat-heavy",
                rate=request_rate,
                burstiness=burstiness,
                long_share=long_share,
                batch_share=batch_share,
                interactive_share=interactive_share,
                long_tokens=None if long_tokens is None else _parse_range(long_tokens),
            ),
            service_tier=service_tier,
            trace=trace,
            trace_speed=trace_speed,
            length_scale=length_scale,
            seed=seed,
            repeat_prompts=repeat_prompts,
            warmup=warmup,
            goodput=metrics.parse_goodput(goodput or ()),
            targets=metrics.parse_targets(slo or ()),
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


def _mix(name: str, **given: Any) -> Mix:
    """A preset with the user's numbers in place of its own."""
    if name not in MIXES:
        raise ValueError(f"mix: there is no {name!r}; choose from {', '.join(MIXES)}")
    return replace(MIXES[name], **{field: value for field, value in given.items() if value is not None})


def _parse_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not low.isdecimal() or not high.isdecimal():
        raise ValueError(f"long_tokens: {text!r} is not FROM-TO, e.g. 4096-16384")
    return int(low), int(high)


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
    elif options.workload in SHAPES and options.workload != "short-vs-long" and options.duration is None:
        total = options.shape.num_requests
    else:
        total = options.num_requests
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Twice a second: drawing takes CPU from the server under test.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, transient=True) as progress:
        task = progress.add_task(options.workload, total=total)
        return asyncio.run(run_bench(options, lambda _: progress.advance(task)))
