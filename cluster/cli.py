"""The `crossdock` command: its subcommands, each imported only when it runs or prints its own help."""

import contextlib
import gc
import os
import signal
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from crossdock.cluster.help_pages import HelpCommand
from crossdock.cluster.serve.own_ray.forked_replicas import forked_replicas
from crossdock.cluster.serve.ray_environment import ENVIRONMENT, is_local

_SERVE_EXAMPLES = """
[bold]Examples[/bold]

[cyan]crossdock serve[/cyan]
the embedded SmolLM2-135M-Instruct on this machine

[cyan]crossdock serve Qwen/Qwen3-0.6B --max-model-len 8192 --port 9000[/cyan]
a model from the Hugging Face hub

[cyan]crossdock serve ./my-model --long-prefill-token-threshold 256 --max-num-batched-tokens 1024[/cyan]
chunks of at most 256 tokens, so that long prompts share every step

[cyan]crossdock serve --chunk-policy fixed --prefill-order fcfs --admission queue[/cyan]
vLLM's token budget and order, to compare with

[cyan]crossdock serve --pools mixed=2 --set pools.mixed.num_cpus=4[/cyan]
two replicas of four cores each

[cyan]crossdock serve ./big-model --tp 4[/cyan]
a replica of four ranks that divide every layer

[cyan]crossdock serve --pools prefill=2xtp1,decode=1xtp2[/cyan]
prompts and tokens on separate replicas; KV pages are transferred between unequal shards

[cyan]crossdock config --pools mixed=2 > cluster.yaml && crossdock serve --config cluster.yaml[/cyan]
a configuration in a file
"""


@dataclass(frozen=True, slots=True)
class Subcommand:
    """The module, name and summary of a subcommand. The first line of the command's docstring must be `summary`."""

    module: str
    name: str  # of the function, or of the typer.Typer
    summary: str
    epilog: str | None = None


SUBCOMMANDS = {
    "serve": Subcommand(
        "crossdock.cluster.serve.command",
        "serve",
        "Serve a model behind an OpenAI API, on this machine or on the cluster that RAY_ADDRESS names.",
        _SERVE_EXAMPLES,
    ),
    "config": Subcommand(
        "crossdock.cluster.serve.command",
        "show_config",
        "Print the configuration that the same flags give to `serve`, every setting with its description.",
        "Its output is a file for [bold]crossdock serve --config[/bold].",
    ),
    "chat": Subcommand(
        "crossdock.cluster.watch.chat",
        "chat",
        "Talk to a served model in the terminal. Text from a pipe is one message.",
        "In an answer Ctrl-C stops it. [cyan]crossdock chat 'Why is the sky blue?'[/cyan] asks once.",
    ),
    "run-batch": Subcommand(
        "crossdock.cluster.offline.run_batch",
        "run_batch",
        "Answer a file of requests, as OpenAI's batches have them, by a model in this process or by a server.",
        "[cyan]crossdock run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B[/cyan]",
    ),
    "bench": Subcommand(
        "crossdock.cluster.bench.command",
        "bench",
        "Measure any OpenAI endpoint: throughput, time to first token, gaps between tokens, goodput.",
    ),
    "simulate": Subcommand(
        "crossdock.cluster.simulate.command",
        "simulate",
        "Simulate a cluster: the real scheduler and router, on a clock driven by measured or estimated step costs.",
    ),
    "top": Subcommand(
        "crossdock.cluster.watch.top",
        "top",
        "Watch a server: steps, chunks, KV pages, SLO classes, and the requests in flight. q quits.",
    ),
    "tune": Subcommand(
        "crossdock.cluster.tune.command",
        "tune",
        "Measure what chunks cost on this machine, and recommend the settings for a target.",
    ),
}

_NEW_OBJECTS = 50_000
"""New objects after which Python looks for garbage. Its default, 700, takes a seventh of the time of imports."""


class _LazyGroup(TyperGroup):
    """A group whose commands are stubs with a summary, until one of them is needed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stub, rest = super().resolve_command(ctx, args)
        return name, _import(name) if name in SUBCOMMANDS else stub, rest


app = typer.Typer(
    name="crossdock",
    cls=_LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM serving cluster on Ray in which a long prompt does not make anyone else wait.",
    epilog="Start with [bold]crossdock serve[/bold], then [bold]crossdock chat[/bold] in another terminal.",
)


def _stub() -> None:
    raise AssertionError("a stub was run instead of the subcommand")


for _name, _subcommand in SUBCOMMANDS.items():
    app.command(_name, help=_subcommand.summary)(_stub)


@app.command()
def version() -> None:
    """Print the versions of Crossdock and of the libraries under it."""
    _print_versions(True)


def _print_versions(is_asked: bool) -> None:
    if not is_asked:
        return
    for package in ("crossdock", "ray", "torch", "transformers"):
        typer.echo(f"{package} {version_of(package)}")
    raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_versions, is_eager=True, help="As `crossdock version`.")
    ] = False,
) -> None: ...


@cache  # typer makes a reader for each flag's values once for a command: half the time of `crossdock config`
def _import(name: str) -> Any:
    """Return the click command of a subcommand."""
    subcommand = SUBCOMMANDS[name]
    found = getattr(import_module(subcommand.module), subcommand.name)
    if isinstance(found, typer.Typer):
        return get_command(found)
    single = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
    single.command(name, cls=getattr(found, "command_class", HelpCommand), epilog=subcommand.epilog)(found)
    return get_command(single)


def main() -> None:
    """Run the command. Ctrl-C and SIGINT stop the command however it was started."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background job: `crossdock serve &`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(_NEW_OBJECTS)
    _require_home()
    with forked_replicas(ENVIRONMENT) if _serves_here(sys.argv[1:]) else contextlib.nullcontext():
        app()


def _require_home() -> None:
    """Give a user without a home directory one, as container engines do: libraries end where there is none."""
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = "/"


def _serves_here(arguments: list[str]) -> bool:
    """Return whether this is a `serve` whose replicas run on this machine: they are forked, see forked_replicas.py."""
    asks = any(argument.partition("=")[0] in ("-h", "--help") for argument in arguments)
    return arguments[:1] == ["serve"] and not asks and is_local()
