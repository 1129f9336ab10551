"""The `crossdock` command. Only what a command needs is imported, by the command: `--help` must not wait for torch."""

import contextlib
import inspect
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from crossdock.cluster.bench.command import bench
from crossdock.cluster.deploy.command import deploy
from crossdock.cluster.simulate.command import simulate
from crossdock.cluster.tune.command import tune
from crossdock.cluster.watch.chat import chat
from crossdock.cluster.watch.top import top

if TYPE_CHECKING:
    from crossdock.cluster.config import ClusterConfig

app = typer.Typer(
    name="crossdock",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="An LLM serving cluster on Ray in which a long prompt does not make anyone else wait.",
    epilog="Start with [bold]crossdock serve[/bold], then [bold]crossdock chat[/bold] in another terminal.",
)

_MODEL, _ENGINE, _HTTP, _FILES = "Model", "Engine (names as in vLLM)", "HTTP", "Cluster and file"
_CHUNKS = "Chunks and who goes first"
_SWITCHES = "Engine: on unless switched off"

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
prompts and tokens on replicas of their own; KV pages travel between unequal shards

[cyan]crossdock config --pools mixed=2 > cluster.yaml && crossdock serve --config cluster.yaml[/cyan]
a configuration to keep
"""


def effective_config(
    model: Annotated[
        str | None, typer.Argument(help="Directory, or hub name (org/name, org/name@revision).", show_default="SmolLM2")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name for clients; given again, further names.", rich_help_panel=_MODEL),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, bfloat16, float16 or float32.", rich_help_panel=_MODEL)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and output together, in tokens.", rich_help_panel=_MODEL)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens one step may compute, decodes and chunks.", rich_help_panel=_ENGINE)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Requests that may run at once, per replica.", rich_help_panel=_ENGINE)
    ] = None,
    chunk_policy: Annotated[
        str | None,
        typer.Option(
            metavar="adaptive|fixed",
            help="Chunks fit the tightest stream's slack, or a fixed token budget as in vLLM.",
            rich_help_panel=_CHUNKS,
        ),
    ] = None,
    min_chunk_tokens: Annotated[
        int | None,
        typer.Option(help="adaptive: prompt tokens a step carries at least; 0: one page.", rich_help_panel=_CHUNKS),
    ] = None,
    max_prefill_tokens: Annotated[
        int | None,
        typer.Option(help="Prompt tokens per step; 0: what the budget leaves.", rich_help_panel=_CHUNKS),
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None,
        typer.Option(
            help="Longest chunk of one prompt, and where 'long' begins; 0: no limit, 4 % of the context.",
            rich_help_panel=_CHUNKS,
        ),
    ] = None,
    chunked_prefill_size: Annotated[
        int | None,
        typer.Option(
            help="As in SGLang: N is --max-num-batched-tokens N; -1 is --no-enable-chunked-prefill, which needs a "
            "--max-num-batched-tokens of the whole context.",
            rich_help_panel=_CHUNKS,
        ),
    ] = None,
    max_num_partial_prefills: Annotated[
        int | None, typer.Option(help="Prompts that may be partly computed at once.", rich_help_panel=_CHUNKS)
    ] = None,
    max_long_partial_prefills: Annotated[
        int | None, typer.Option(help="Of these, how many may be long.", rich_help_panel=_CHUNKS)
    ] = None,
    prefill_order: Annotated[
        str | None,
        typer.Option(
            metavar="response_ratio|fcfs",
            help="By class, then by work waited for over tokens left; or in order of arrival.",
            rich_help_panel=_CHUNKS,
        ),
    ] = None,
    admission: Annotated[
        str | None,
        typer.Option(
            metavar="reject|queue",
            help="When a class's time to first token cannot be met: 429 with Retry-After, or wait.",
            rich_help_panel=_CHUNKS,
        ),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            metavar="",
            help="Cut prompts into chunks.",
            rich_help_panel=_SWITCHES,
        ),
    ] = None,
    mixed_chunks: Annotated[
        bool | None,
        typer.Option(
            "--mixed-chunks/--no-mixed-chunks",
            metavar="",
            help="Chunks and decodes share steps; off: they alternate, as in SGLang.",
            rich_help_panel=_SWITCHES,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            metavar="",
            help="Compute equal beginnings of prompts once.",
            rich_help_panel=_SWITCHES,
        ),
    ] = None,
    kv_cache_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-cache-memory",
            metavar="SIZE",
            help="Memory for KV pages, e.g. 2GiB, which is what CPUs have; on GPUs the default is what is left.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(help="Of KV pages: auto is the model's dtype, fp8 is half of bfloat16.", rich_help_panel=_ENGINE),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(help="Share of a GPU's memory that a rank may use in all.", rich_help_panel=_ENGINE),
    ] = None,
    enforce_eager: Annotated[
        bool | None,
        typer.Option("--enforce-eager", help="On GPUs: decode steps without CUDA graphs.", rich_help_panel=_ENGINE),
    ] = None,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(help="Begin a step before the last tokens are known. Default: on GPUs.", rich_help_panel=_ENGINE),
    ] = None,
    attention_backend: Annotated[
        str | None,
        typer.Option(help="What computes attention: auto, triton, flash_attn or torch.", rich_help_panel=_ENGINE),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option("--page-size", "--block-size", help="Tokens a KV page holds.", rich_help_panel=_ENGINE),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 is all of them.", rich_help_panel=_HTTP)
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", rich_help_panel=_HTTP)] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Clients must send it; given again, any of them.", envvar="CROSSDOCK_API_KEY", rich_help_panel=_HTTP
        ),
    ] = None,
    pools: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=REPLICAS[xtpN][xppN],…",
            help="Pools of replicas, by name, and their ranks: mixed=2, or prefill=2xtp1,decode=1xtp2.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size",
            "--tp",
            help="Ranks that divide every layer, of all pools.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel-size", "--pp", help="Stages of layers, of all pools.", rich_help_panel=_FILES
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file; flags win over it.", rich_help_panel=_FILES)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting by its dotted name, as in `crossdock config`.",
            rich_help_panel=_FILES,
        ),
    ] = None,
) -> "ClusterConfig":
    """The configuration that these flags mean."""
    from crossdock.cluster.config_file import load

    if chunked_prefill_size is not None:
        max_num_batched_tokens, enable_chunked_prefill = _from_sglang(
            chunked_prefill_size, max_num_batched_tokens, enable_chunked_prefill
        )
    names = served_model_name or []
    flags: dict[str, object] = {
        "model.path": model,
        "model.served_name": names[0] if names else None,
        "model.dtype": dtype,
        "model.max_model_len": max_model_len,
        "engine.max_num_batched_tokens": max_num_batched_tokens,
        "engine.max_num_seqs": max_num_seqs,
        "engine.chunk_policy": chunk_policy,
        "engine.min_chunk_tokens": min_chunk_tokens,
        "engine.max_prefill_tokens": max_prefill_tokens,
        "engine.long_prefill_token_threshold": long_prefill_token_threshold,
        "engine.max_num_partial_prefills": max_num_partial_prefills,
        "engine.max_long_partial_prefills": max_long_partial_prefills,
        "engine.prefill_order": prefill_order,
        "engine.admission": admission,
        "engine.enable_chunked_prefill": enable_chunked_prefill,
        "engine.mixed_chunks": mixed_chunks,
        "engine.enable_prefix_caching": enable_prefix_caching,
        "engine.kv_cache_memory": kv_cache_memory,
        "engine.kv_cache_dtype": kv_cache_dtype,
        "engine.gpu_memory_utilization": gpu_memory_utilization,
        "engine.enforce_eager": enforce_eager,
        "engine.async_scheduling": async_scheduling,
        "engine.attention_backend": attention_backend,
        "engine.page_size": page_size,
        "http.host": host,
        "http.port": port,
        "http.api_keys": api_key or None,
        "http.model_aliases": names[1:] or None,
        "pools": _parse_pools(pools) if pools is not None else None,
        "pools.*.tensor_parallel_size": tensor_parallel_size,
        "pools.*.pipeline_parallel_size": pipeline_parallel_size,
    }
    overrides = {key: value for key, value in flags.items() if value is not None}
    return load(config, overrides | dict(_parse_setting(setting) for setting in set_ or ()))


def _takes_flags_of(source: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command with **flags the parameters of `source`, as typer sees them."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.signature(source)  # type: ignore[attr-defined]
        command.__annotations__ = {name: kind for name, kind in source.__annotations__.items() if name != "return"}
        return command

    return decorate


@app.command(epilog=_SERVE_EXAMPLES)
@_takes_flags_of(effective_config)
def serve(**flags: Any) -> None:
    """Serve a model behind an OpenAI API, on this machine or on the cluster that RAY_ADDRESS names."""
    console = Console(soft_wrap=True, highlight=False)
    with _told_plainly():
        config = effective_config(**flags)
        if not os.environ.get("RAY_ADDRESS"):  # else model and port are those of other machines
            _require_free(config.http.host, config.http.port)
            _prepare_model(config, console)

    from crossdock.cluster.serve.app import STARTING, serve_forever

    console.print(f"[dim]Starting replicas: {_describe_pools(config)} …[/dim]")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)  # drawn on a terminal only
    task = bar.add_task("", total=len(STARTING))
    bar.start()

    def started() -> None:
        bar.stop()
        _announce(config, console)

    try:
        serve_forever(config, lambda what: bar.update(task, description=what, completed=STARTING.index(what)), started)
    finally:
        bar.stop()


@app.command("config", epilog="Its output is a file for [bold]crossdock serve --config[/bold].")
@_takes_flags_of(effective_config)
def show_config(**flags: Any) -> None:
    """Print the configuration that the same flags give to `serve`, every setting with its meaning."""
    with _told_plainly():
        from crossdock.cluster.config_file import to_yaml

        sys.stdout.write(to_yaml(effective_config(**flags)))


@app.command()
def version() -> None:
    """Print the versions of Crossdock and of what it stands on."""
    for package in ("crossdock", "ray", "torch", "transformers"):
        typer.echo(f"{package} {version_of(package)}")


app.command(epilog="In an answer Ctrl-C stops it. [cyan]crossdock chat 'Why is the sky blue?'[/cyan] asks once.")(chat)
app.command()(bench)
app.command()(simulate)
app.command()(top)
app.command()(tune)
app.add_typer(deploy, name="deploy")


def main() -> None:
    app()


@contextlib.contextmanager
def _told_plainly() -> Iterator[None]:
    """User errors end the command with their message, not with a traceback."""
    try:
        yield
    except ValueError as error:
        stderr = Console(stderr=True, soft_wrap=True, highlight=False)
        for line in str(error).splitlines():
            stderr.print(f"[red]error:[/red] {escape(line)}")
        raise typer.Exit(2) from None


def _from_sglang(size: int, budget: int | None, chunked: bool | None) -> tuple[int | None, bool | None]:
    """max_num_batched_tokens and enable_chunked_prefill, as `--chunked-prefill-size` and their own flags say."""
    flag = f"--chunked-prefill-size {size}"
    if size == -1:
        if chunked:
            raise ValueError(f"{flag} switches chunks off and --enable-chunked-prefill on; give one of them")
        return budget, False
    if size < 1:
        raise ValueError(f"{flag}: must be a number of tokens, or -1 for no chunks")
    if chunked is False:
        raise ValueError(
            f"{flag} is a size of chunks, which --no-enable-chunked-prefill switches off; give one of them"
        )
    if budget is not None and budget != size:
        raise ValueError(f"{flag} and --max-num-batched-tokens {budget} are the same setting; give one of them")
    return size, True


def _parse_pools(text: str) -> list[dict[str, object]]:
    pools: list[dict[str, object]] = []
    for part in text.split(","):
        found = re.fullmatch(r"([^=]+?)(?:=(\d+)((?:x(?:tp|pp)\d+)*))?", part.strip())
        if found is None:
            raise ValueError(f"--pools: {text!r} is not of the form big=1,small=2 or prefill=2xtp1,decode=1xtp2xpp2")
        name, replicas, ranks = found.groups()
        sizes = {_RANKS[size[:2]]: int(size[2:]) for size in (ranks or "").split("x") if size}
        pools.append({"name": name, "replicas": int(replicas or 1), **sizes})
    return pools


_RANKS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


def _parse_setting(text: str) -> tuple[str, object]:
    import yaml

    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set: {text!r} is not of the form KEY=VALUE, e.g. engine.max_num_seqs=64")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"--set: the value of {key} is not YAML: {value!r}") from None


def _require_free(host: str, port: int) -> None:
    """Before the seconds that Ray needs to start, not after."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; see --host and --port") from None


def _prepare_model(config: "ClusterConfig", console: Console) -> None:
    """Fetched or converted here, where progress is seen and an error is told, before any replica asks for it."""
    from crossdock.workers.model.checkpoint import resolve_model

    with console.status(f"Preparing {escape(config.model.name)}: the first time it is fetched or converted …"):
        path = resolve_model(config.model.path)
        for pool in config.pools:
            if pool.num_ranks > 1:
                from crossdock.workers.model.weights import check_division

                check_division(path, pool.tensor_parallel_size, pool.pipeline_parallel_size)
    console.print(f"[dim]Model: {escape(str(path))}[/dim]")


def _describe_pools(config: "ClusterConfig") -> str:
    return ", ".join(
        f"{pool.replicas} {pool.name}" + (f" of {pool.num_ranks} ranks" if pool.num_ranks > 1 else "")
        for pool in config.pools
    )


def _announce(config: "ClusterConfig", console: Console) -> None:
    host = "127.0.0.1" if config.http.host in ("0.0.0.0", "::") else config.http.host
    url = f"http://[{host}]:{config.http.port}" if ":" in host else f"http://{host}:{config.http.port}"
    console.print(f"[bold green]Crossdock[/bold green] serves [bold]{escape(config.model.name)}[/bold] at {url}/v1")
    flag = "" if config.http.port == 8000 and host == "127.0.0.1" else f" --url {url}"
    console.print(f"[dim]Talk to it: crossdock chat{flag}   Dashboard: {url}/dashboard   Stop: Ctrl-C[/dim]")
