"""The help of a subcommand: names are never cut, defaults are shown, and `--help=WORD` shows what has the word."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

_INDENT = 6  # of what a flag does, below its name
_WIDEST = 110  # columns; longer lines are hard to read
_KINDS = {"str": "TEXT", "float": "NUMBER", "int": "INTEGER", "path": "PATH"}  # of values
_SEARCH = ("--help=", "-h=")


def asks_for_help(args: Sequence[str]) -> bool:
    """Return whether arguments of a command ask for all of its help, or search the help for a word."""
    return any(arg in ("-h", "--help") or arg.startswith(_SEARCH) for arg in args)


class HelpCommand(TyperCommand):
    """A command whose help has each flag with its values on a line of its own, and below it what the flag does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. `--help=WORD` among them prints what has the word, and ends the command."""
        word = next((arg.partition("=")[2] for arg in args if arg.startswith(_SEARCH)), None)
        if word:
            self._print_found(ctx, word)
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, for the width of the terminal."""
        console = _console()
        summary, *more = inspect.cleandoc(self.help or "").split("\n\n")
        arguments = [each for each in self.get_params(ctx) if each.param_type_name == "argument"]
        words = [ctx.command_path, *(f"[{name}]" for each in arguments for name in _names(each)), "[OPTIONS]"]
        console.print(f"[bold]Usage:[/bold] {_escaped(' '.join(words))}")
        for text in (summary, *more):
            console.print()
            console.print(_escaped(" ".join(text.split())))
        for title, parameters in self._groups(ctx).items():
            console.print()
            console.print(f"[bold]{_escaped(title)}[/bold]")
            for each in parameters:
                _print_parameter(console, ctx, each)
        console.print()
        console.print(r"[bold]--help=WORD[/bold] shows the flags that have the word in their names or texts.")
        if self.epilog:
            console.print()
            console.print(inspect.cleandoc(self.epilog))

    def _groups(self, ctx: Any) -> dict[str, list[Any]]:
        """Return the arguments and options by the titles of their groups, in the order in which they were declared."""
        groups: dict[str, list[Any]] = {}
        for each in self.get_params(ctx):
            default = "Arguments" if each.param_type_name == "argument" else "Options"
            if not getattr(each, "hidden", False):
                groups.setdefault(getattr(each, "rich_help_panel", None) or default, []).append(each)
        return groups

    def _print_found(self, ctx: Any, word: str) -> None:
        console = _console()
        asked = word.casefold().replace("_", "-")
        found = [
            each
            for each in self.get_params(ctx)
            if asked in " ".join([*_names(each), str(_metavar(ctx, each)), getattr(each, "help", "") or ""]).casefold()
        ]
        for each in found:
            _print_parameter(console, ctx, each)
        if not found:
            console.print(_escaped(f"{ctx.command_path} has no flag with {word!r} in its name or text."))


def _console() -> Any:
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    return console


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _names(parameter: Any) -> Sequence[str]:
    if parameter.param_type_name == "argument":
        return [str(parameter.display_name_raw).upper()]
    longest_first = sorted(parameter.opts, key=len, reverse=True)
    return [*longest_first, *parameter.secondary_opts]


def _metavar(ctx: Any, parameter: Any) -> str:
    if parameter.param_type_name == "argument" or getattr(parameter, "is_flag", False):
        return ""
    shown = str(parameter.display_type_rich(ctx=ctx) or "")
    return _KINDS.get(shown.removeprefix("<list[").strip("<>[]"), shown)


def _print_parameter(console: Any, ctx: Any, parameter: Any) -> None:
    """Print the names of a flag and its values, which are never cut, and below them what it does."""
    from rich.padding import Padding

    names = ", ".join(_names(parameter))
    metavar = _metavar(ctx, parameter)
    line = f"  {names} {metavar}".rstrip()
    is_long = len(line) > console.width
    console.print(f"  [bold cyan]{_escaped(names)}[/bold cyan]" + ("" if is_long else _escaped(line[len(names) + 2 :])))
    values = [f"One of {metavar.replace('|', ', ')}."] if is_long and metavar else []
    text = " ".join([*values, *_texts(ctx, parameter)])
    if text:
        console.print(Padding(_escaped(text), (0, 0, 0, _INDENT)))


def _texts(ctx: Any, parameter: Any) -> Iterator[str]:
    """Yield the text about a flag, the variable that may give the flag, and its default."""
    if help_text := getattr(parameter, "help", None):
        yield " ".join(help_text.split())
    variables = getattr(parameter, "envvar", None)
    if variables:
        yield f"[env var: {variables if isinstance(variables, str) else ', '.join(variables)}]"
    shown = getattr(parameter, "show_default", None)
    default = parameter.get_default(ctx, call=False)
    if isinstance(shown, str):
        yield f"[default: {shown}]"
    elif shown and default is not None and default != () and parameter.name != "help":
        yield f"[default: {_default_text(parameter, default)}]"
    elif parameter.required:
        yield "[required]"


def _default_text(parameter: Any, default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, list | tuple):
        return " ".join(map(str, default))
    return str(getattr(default, "value", default))
