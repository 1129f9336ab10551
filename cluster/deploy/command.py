"""`crossdock deploy`: print manifests on standard output."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

deploy = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Manifests for clusters, from a configuration file."
)


class Target(StrEnum):
    """The program that reads the manifests."""

    KUBERAY = "kuberay"
    RAY_UP = "ray-up"
    SERVE = "serve"


@deploy.callback()
def _make_group() -> None:
    """Make `render` a command of a group: a Typer with one command and no callback would be that command itself."""


@deploy.command(epilog="[cyan]crossdock deploy render cluster.yaml --target kuberay | kubectl apply -f -[/cyan]")
def render(
    config: Annotated[Path, typer.Argument(help="The configuration, as of `crossdock serve --config`.")],
    target: Annotated[Target, typer.Option(help="The program that reads the manifests.")] = Target.KUBERAY,
) -> None:
    """Print manifests of the application, and of the nodes that the section `deploy` describes."""
    try:
        text = rendered(config, target)
    except ValueError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2) from None
    if target is Target.KUBERAY and "api_keys_file:" not in text:
        typer.echo("warning: no http.api_keys_file: every pod of the Kubernetes cluster may use the API", err=True)
    sys.stdout.write(text)


def rendered(path: Path, target: Target) -> str:
    """Return the text that `render` prints for the configuration file `path`.

    Raises:
        ValueError: the configuration cannot be used, or not for this target.
    """
    from crossdock.cluster.config_file import load
    from crossdock.cluster.deploy.kuberay import kuberay
    from crossdock.cluster.deploy.rayup import ray_up
    from crossdock.cluster.deploy.serve import serve_config
    from crossdock.cluster.deploy.yaml import to_yaml

    config = load(path)
    head = f"# Made by: crossdock deploy render {path.name} --target {target.value}\n"
    match target:
        case Target.KUBERAY:
            return head + to_yaml(kuberay(config))
        case Target.RAY_UP:
            return head + to_yaml([ray_up(config)])
        case Target.SERVE:
            return head + to_yaml([serve_config(config)])
