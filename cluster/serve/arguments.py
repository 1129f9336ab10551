"""Command lines as users of vLLM and SGLang write them, turned into those of `crossdock serve`."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import typer
import yaml
from typer.core import TyperCommand

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.serve.other_flags import answer

_MODEL = ("--model", "--model-path")  # other ways to give MODEL
_LISTS = (
    "--served-model-name",
    "--api-key",
    "--allowed-media-domains",
)  # several values may follow one of these, as in vLLM
_FILE = ("--config", "-c")

_Part: TypeAlias = tuple[str, list[str]]  # an option's name, "" for an argument, and the words of the command line


class FlagsCommand(TyperCommand):
    """A command that understands other servers' command lines, and answers flags that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the translated arguments. Ends the command with status 2 and one line for each flag of others."""
        try:
            args = translated(args, self._arity(ctx))
        except ValueError as error:
            for line in str(error).splitlines():
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(2) from None
        return super().parse_args(ctx, args)

    def _arity(self, ctx: Any) -> dict[str, bool]:
        """Return the names of all options, and whether a value follows them."""
        return {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }


def translated(args: Sequence[str], arity: Mapping[str, bool]) -> list[str]:
    """Return the arguments of a command line in our own forms.

    Understood are `--max_model_len`, `--model NAME`, several values after one flag where MODEL stands before it, and a
    file of flags (`--config` of vLLM and SGLang), over which flags win.

    Args:
        args: the words after the subcommand.
        arity: the names of all options, and whether a value follows them.

    Raises:
        ValueError: flags of vLLM or SGLang that do not exist here; the message has a line for each.
    """
    parts = list(_parts(args, arity))
    for name, words in parts:
        if name in _FILE and (flags := _flags_in(Path(_value(words)).expanduser(), arity)) is not None:
            given = {other for other, _ in parts}
            others = [part for part in parts if part[0] not in _FILE]
            parts = [*(part for part in _parts(flags, arity) if part[0] not in given), *others]
            break
    missing = [line for name, _ in parts if name and name not in arity and (line := _instead(name, arity)) is not None]
    if missing:
        raise ValueError("\n".join(dict.fromkeys(missing)))
    return [word for _, words in parts for word in words]


def _instead(name: str, arity: Collection[str]) -> str | None:
    """Return what to do instead of a flag that is missing here; None: it is not known."""
    whole = _canonical(name.partition(".")[0], arity)
    if "." in name and whole in arity:
        return f"{name}: use {whole} with one JSON value"
    return answer(name)


def _parts(args: Sequence[str], arity: Mapping[str, bool]) -> Iterator[_Part]:
    """Divide the words of a command line into options with their values, and arguments."""
    words, has_model = iter(args), False
    list_name = ""  # option of which the word before was a value, and another may follow
    for word in words:
        if word == "--":
            yield "", [word, *words]
            return
        if not word.startswith("-") or word == "-" or _is_number(word):
            if list_name:
                yield list_name, [list_name, word]
            else:
                has_model = True
                yield "", [word]
            continue
        head, equals, value = word.partition("=")
        name = _canonical(head, arity)
        rest = [value] if equals else [next(words, "")] if arity.get(name, name in _MODEL) else []
        list_name = name if name in _LISTS and has_model else ""
        if name in _MODEL:
            has_model = True
            yield "", rest
        elif name in arity and rest:
            yield name, [f"{name}={rest[0]}"] if name.startswith("--") else [name, rest[0]]
        else:
            yield name, [name]


def _canonical(head: str, arity: Collection[str]) -> str:
    """Return an option's name with dashes for underscores, and without the path into a JSON value: --a_b.c is --a-b."""
    if not head.startswith("--"):
        return head
    name = "--" + head[2:].partition(".")[0].replace("_", "-")
    return name if "." not in head or name not in arity else head


def _is_number(word: str) -> bool:
    return word[1:].replace(".", "", 1).isdigit()


def _value(words: Sequence[str]) -> str:
    return words[-1].partition("=")[2] if len(words) == 1 else words[-1]


def _flags_in(path: Path, arity: Mapping[str, bool]) -> list[str] | None:
    """Return the flags in a file of flags: {max-model-len: 8192}. None: it is a configuration of ours, or no YAML."""
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None  # `configuration` says what is wrong
    if not isinstance(data, dict) or any(_is_section(name, value) for name, value in data.items()):
        return None
    flags = {_canonical(f"--{name}", arity): value for name, value in data.items()}
    if not any(name in arity or name in _MODEL or answer(name) is not None for name in flags):
        return None
    return [word for name, value in flags.items() for word in _as_words(name, value, arity)]


def _is_section(name: object, value: object) -> bool:
    return name in ClusterConfig.model_fields and not isinstance(value, str)


def _as_words(name: str, value: object, arity: Collection[str]) -> list[str]:
    """Return the words of the command line that a flag of a file means."""
    match value:
        case None:
            return []
        case True:
            return [name]
        case False:
            off = name.replace("--", "--no-", 1)
            return [off] if off in arity else []
        case list():
            return [f"{name}={each}" for each in value]
        case dict():
            return [f"{name}={json.dumps(value)}"]
        case _:
            return [f"{name}={value}"]
