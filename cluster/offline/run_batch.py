"""The command `crossdock run-batch`: a file of requests in, a file of answers out."""

import inspect
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from crossdock.cluster.offline.settings import OF_A_SERVER
from crossdock.cluster.serve.arguments import FlagsCommand
from crossdock.cluster.serve.flags import PANELS

_OPTIONS: dict[str, tuple[Any, Any]] = {  # by parameter: the type with its option, and the default
    "input_file": (Annotated[Path, typer.Option("--input-file", "-i", help="Requests, one a line.")], ...),
    "output_file": (Annotated[Path, typer.Option("--output-file", "-o", help="Where the answers go.")], ...),
    "url": (Annotated[str | None, typer.Option(help="A server that answers, in place of a model here.")], None),
    "max_concurrent": (Annotated[int, typer.Option(min=1, help="With --url: requests at once.")], 64),
    "api_key": (
        Annotated[
            str | None,
            typer.Option(
                "--api-key",
                "--server-key",
                envvar=["CROSSDOCK_API_KEY", "OPENAI_API_KEY"],
                help="With --url: the key that is sent to the server.",
            ),
        ],
        None,
    ),
}


class _Command(FlagsCommand):
    absent: ClassVar[dict[str, str]] = {
        **{
            flag.name: OF_A_SERVER[flag.key]
            for flags in PANELS.values()
            for flag in flags
            if flag.key in OF_A_SERVER and flag.key != "http.api_keys"
        },
        "--enable-metrics": "there is no /metrics: the command ends with its file",
        "--output-tmp-dir": "not needed: the output is written beside its place, and moved there when it is complete",
    }


def run_batch(**flags: Any) -> None:
    """Answer a file of requests, as OpenAI's batches have them, by a model in this process or by a server."""
    import httpx

    from crossdock.cluster.offline.batch_files import run_file

    own = {name: flags.pop(name) for name in _OPTIONS}
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    try:
        if own["url"] is not None and given:
            raise ValueError(f"--url: the server has its own settings, so {', '.join(given)} cannot be given")
        for flag in ("input_file", "output_file"):
            if str(own[flag]).startswith(("http:/", "https:/")):
                raise ValueError(
                    f"--{flag.replace('_', '-')}: must be a file, not {own[flag]}; use curl beside this command"
                )
        count, failed = run_file(**own, settings=given)
    except (ValueError, OSError, httpx.HTTPError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    typer.echo(f"{count} requests, {failed} of them refused: {own['output_file']}")


def _signature() -> inspect.Signature:
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [
        inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is ... else default, annotation=form)
        for name, (form, default) in _OPTIONS.items()
    ]
    flags = ((panel, flag) for panel, flags in PANELS.items() for flag in flags if flag.key not in OF_A_SERVER)
    return inspect.Signature([*own, *(flag.signature(panel) for panel, flag in flags)])


run_batch.__signature__ = _signature()  # type: ignore[attr-defined]  # as typer reads it
run_batch.__annotations__ = {each.name: each.annotation for each in _signature().parameters.values()}
run_batch.command_class = _Command  # type: ignore[attr-defined]
