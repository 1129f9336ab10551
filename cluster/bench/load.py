"""The load that a run offers, and the server that it is offered to: what flags and options have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from crossdock.cluster.bench.mix import MIXES
from crossdock.cluster.bench.workloads import WORKLOADS
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES

_LONG = "Workloads interference and short-vs-long"
_TRACE = "Workloads trace and agents"
_MIX = "Workload mix"
_SLO_DEFAULTS = ", ".join(f"{slo.name} {slo.ttft_s * 1e3:.0f}/{slo.tpot_s * 1e3:.0f}" for slo in DEFAULT_CLASSES)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much is offered, and of what size: flags of `crossdock bench` and of `crossdock simulate`.

    None: the workload's own default.
    """

    num_requests: Annotated[int | None, typer.Option("--num-requests", "-n", help="Number of requests.")] = None
    # The run waits for requests in flight at its end.
    duration: Annotated[float | None, typer.Option(help="Seconds in which requests are started.")] = None
    # Closed loop: slots; open loop: most requests in flight.
    concurrency: Annotated[int | None, typer.Option("--concurrency", "-c", help="Requests in flight at a time.")] = None
    request_rate: Annotated[float | None, typer.Option(help="Open loop: Poisson arrivals per second.")] = None
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt.")] = None
    output_tokens: Annotated[int | None, typer.Option(help="Tokens of an output; agents: their median.")] = None
    pictures: Annotated[int | None, typer.Option(help="images: pictures of a request.", show_default="1")] = None
    picture_size: Annotated[int | None, typer.Option(help="Pixels on a side of a picture.", show_default="512")] = None
    burstiness: Annotated[
        float | None, typer.Option(help="Open loop: 1 is Poisson, less comes in bursts (as in vLLM).")
    ] = None
    service_tier: Annotated[
        str | None, typer.Option(help="SLO class of the requests, e.g. interactive; a mix has its own.")
    ] = None
    tenants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SHARE,…",
            help="Open loop: tenants, each with so many times the rate: own=1,flood=10. NAME is sent as API key; "
            "simulated, gold=1x3 also has the weight 3.",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(help="Mooncake JSONL, or Azure LLM CSV.", rich_help_panel=_TRACE),
    ] = None
    trace_speed: Annotated[
        float,
        typer.Option(help="2 replays the trace in half the time; agents: 2 halves all pauses.", rich_help_panel=_TRACE),
    ] = 1.0
    length_scale: Annotated[float, typer.Option(help="Multiplies all lengths.", rich_help_panel=_TRACE)] = 1.0


@dataclass(frozen=True, kw_only=True)
class SharedFlags:
    """Further flags of both commands, which become parts of a load, its targets, and a file."""

    mix: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(MIXES)}.", show_default="chat-heavy", rich_help_panel=_MIX)
    ] = None
    long_share: Annotated[
        float | None, typer.Option(help="Share of long prompts among arrivals.", rich_help_panel=_MIX)
    ] = None
    turns: Annotated[
        float | None,
        typer.Option(help="agents: median turns of a session.", show_default="43", rich_help_panel=_TRACE),
    ] = None
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=LIMITS",
            help="Targets of a class in ms, e.g. interactive=ttft:500,tpot:50. Default: the class's promises; "
            f"ttft/tpot of the usual classes: {_SLO_DEFAULTS}.",
        ),
    ] = None
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Draw TTFT and TPOT of each request, or of what is compared."),
    ] = None


@dataclass(frozen=True)
class Load(Amount):
    """The workload, the server and the limits of a run. None: the workload's own default."""

    url: Annotated[str, typer.Argument(help="Address of an OpenAI endpoint, with or without /v1.")]
    workload: Annotated[str, typer.Option("--workload", "-w", help=f"One of: {', '.join(WORKLOADS)}.")] = "chat"
    prefix_tokens: Annotated[int | None, typer.Option(help="Tokens of a prefix that all prompts share.")] = None
    streams: Annotated[
        int | None,
        typer.Option(help="interference: established streams.", show_default="4", rich_help_panel=_LONG),
    ] = None
    seed: Annotated[int, typer.Option(help="Decides arrivals, lengths and texts.")] = 0
    repeat_prompts: Annotated[
        bool, typer.Option("--repeat-prompts", help="The same texts in every run, so that prefix caches can hit.")
    ] = False
    warmup: Annotated[int, typer.Option(help="Requests sent before the measurement, and not counted.")] = 2
    model: Annotated[str | None, typer.Option(help="Default: the first model that the server lists.")] = None
    api_key: Annotated[
        str | None, typer.Option(help="Sent as bearer token.", envvar=["CROSSDOCK_API_KEY", "OPENAI_API_KEY"])
    ] = None
    tokenizer: Annotated[Path | None, typer.Option(help="Directory with the model's tokenizer.json.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions.")] = False
    timeout: Annotated[float, typer.Option(help="Seconds after which a request has failed.")] = 600.0
