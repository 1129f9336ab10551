"""`crossdock serve` and `crossdock config`: from flags to a running application, or to the configuration they mean."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from crossdock.cluster.api.http.http_config import OPEN_TO_OTHERS
from crossdock.cluster.config import ClusterConfig, ModelConfig
from crossdock.cluster.config_file import to_yaml
from crossdock.cluster.serve.address import Address
from crossdock.cluster.serve.flag_settings import configuration
from crossdock.cluster.serve.flags import takes_flags
from crossdock.cluster.serve.gpus import gpus_here
from crossdock.cluster.serve.machine_paths import require_absolute_paths
from crossdock.cluster.serve.other_flags import require_no_unread_key, unread_variables
from crossdock.cluster.serve.own_ray.forked_replicas import fork_none
from crossdock.cluster.serve.preparation import prepare, require_devices
from crossdock.cluster.serve.ray_environment import is_local
from crossdock.cluster.serve.stop_signals import ending_at_once
from crossdock.cluster.serve.summary import summary
from crossdock.workers.model.architecture import is_classifier
from crossdock.workers.model.memory.host_memory import free_on_host, used_by_family
from crossdock.workers.model.text_files import TextAnswer, text_answer
from crossdock.workers.model.weights.untrusted import read_config_file

_CHAT = ("/v1/chat/completions", '"messages": [{"role": "user", "content": "What is the capital of France?"}]')
_PROMPT = ("/v1/completions", '"prompt": "The capital of France is"')
_TEXTS = '"input": ["a text", "another"]'
_EXAMPLES: Mapping[TextAnswer, tuple[str, str]] = {
    "vectors": ("/v1/embeddings", _TEXTS),
    "labels": ("/v1/rerank", '"query": "a dog", "documents": ["the hound", "a house"]'),
}
"""Path and fields of the request that a start shows, by the answers of a text encoder."""


@takes_flags(configuration)
def serve(**flags: Any) -> None:
    """Serve a model behind an OpenAI API, on this machine or on the cluster that RAY_ADDRESS names."""
    with ending_at_once():
        console = Console(soft_wrap=True, highlight=False)
        for line in unread_variables(os.environ):
            _warn(line)
        with _errors_without_traceback():
            config = configuration(flags)
            if not config.http.needs_key:
                require_no_unread_key(os.environ)
            if is_local():
                _require_free(config.http.host, config.http.port)
            else:
                require_absolute_paths(config)
        if config.http.is_open_to_others:
            _warn(OPEN_TO_OTHERS % (config.http.host, config.http.port))
        if all(each.is_emulated for each in config.each_model):
            fork_none()  # emulated replicas need nothing of what is imported there
        if is_local():
            with _errors_without_traceback():
                num_gpus = gpus_here()
                for each in config.each_model:
                    _prepare_model(each, console, has_gpus=num_gpus > 0)
                require_devices(config, num_gpus)
        console.print(f"[dim]Starting: {_describe_pools(config)} …[/dim]")
        _serve_until_stopped(config, console, is_verbose=bool(flags["verbose"]))


def _serve_until_stopped(config: ClusterConfig, console: Console, *, is_verbose: bool) -> None:
    from crossdock.cluster.serve import lifetime

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("", total=len(lifetime.STARTING))
    bar.start()

    def starting(part: str) -> None:
        bar.update(task, description=part, completed=lifetime.STARTING.index(part))

    def started(replicas: list[dict[str, Any]], address: Address) -> None:
        bar.stop()
        memory = (used_by_family(os.getpid()), free_on_host()) if is_local() else (None, None)
        for line in summary(replicas, *memory):
            console.print(escape(line))
        if address.warning and not config.http.is_open_to_others:  # else it stands above
            _warn(address.warning)
        _announce(config, address, console)

    def stopping() -> None:
        bar.stop()
        console.print("[dim]Stopping …[/dim]")

    def tell(line: str) -> None:
        console.print(f"[dim]{escape(line)}[/dim]")

    def show(text: str) -> None:
        bar.update(task, description=escape(text or lifetime.STARTING[-1]))

    if not is_verbose:
        lifetime.quieten()
    try:
        lifetime.serve_forever(config, starting, started, stopping, tell, show)
    except lifetime.StartFailed as error:
        bar.stop()
        _print_error(error)
        raise typer.Exit(1) from None
    finally:
        bar.stop()


@takes_flags(configuration)
def show_config(**flags: Any) -> None:
    """Print the configuration that the same flags give to `serve`, every setting with its description."""
    with _errors_without_traceback():
        sys.stdout.write(to_yaml(configuration(flags)))


@contextlib.contextmanager
def _errors_without_traceback() -> Iterator[None]:
    """End the command with the message of a user error, without a traceback."""
    try:
        yield
    except ValueError as error:
        _print_error(error)
        raise typer.Exit(2) from None


def _warn(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[yellow]warning:[/yellow] {escape(text)}")


def _print_error(error: Exception) -> None:
    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    for line in str(error).splitlines():
        stderr.print(f"[red]error:[/red] {escape(line)}")


def _require_free(host: str, port: int) -> None:
    """Raise ValueError if another process listens there: before the seconds that Ray needs to start, not after."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; see --host and --port") from None


def _prepare_model(config: ClusterConfig, console: Console, *, has_gpus: bool) -> None:
    """Fetch or convert the model here, where progress and errors are seen, before any replica needs it."""
    with console.status(f"Preparing {escape(config.model.name)}: the first time it is fetched or converted …"):
        lines = prepare(config, has_gpus=has_gpus)
    for line in lines:
        console.print(f"[dim]{escape(line)}[/dim]")


def _describe_pools(config: ClusterConfig) -> str:
    return ", ".join(
        f"{pool.replicas} {pool.name}" + (f" of {pool.num_ranks} ranks" if pool.num_ranks > 1 else "")
        for each in config.each_model
        for pool in each.pools
    )


def example(config: ModelConfig) -> tuple[str, str]:
    """Return the path of a request that a model answers, and the fields of its body as JSON without braces."""
    from crossdock.cluster.serve.tokenizer import has_chat_template

    folder = config.folder(needs_weights=False)
    if (answer := text_answer(folder)) is not None:
        return _EXAMPLES[answer]
    if is_classifier(read_config_file(folder).get("architectures")):
        return "/classify", _TEXTS
    return _CHAT if has_chat_template(folder, config) else _PROMPT


def _announce(config: ClusterConfig, address: Address, console: Console) -> None:
    names = [each.model.name for each in config.each_model]
    served = escape(", ".join(names))
    url = address.url
    on_node = f" of node {address.node}" if address.node else ""
    console.print(f"[bold green]Crossdock[/bold green] serves [bold]{served}[/bold] at {url}/v1{on_node}")
    model = f'"model": "{names[0]}", ' if config.models else ""
    path, fields = example(config.each_model[0].model)
    body = f"{{{model}{fields}}}"
    key = " -H 'Authorization: Bearer KEY'" if config.http.needs_key else ""
    ask = f"curl {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'"
    console.print(f"[dim]Ask: {escape(ask)}[/dim]")
    flag = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    talk = f"Talk to it: crossdock chat{flag}   " if "messages" in fields else ""
    console.print(f"[dim]{talk}Watch it: crossdock top{flag}   Stop: Ctrl-C[/dim]")
    console.print(f"[dim]Dashboard: {url}/dashboard[/dim]")
