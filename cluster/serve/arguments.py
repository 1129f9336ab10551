"""Command lines as users of vLLM and SGLang write them, turned into those of `crossdock serve`."""

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

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
    "--lora-modules",
)  # several values may follow one of these, as in vLLM
_FILE = ("--config", "-c")
_NONE: Mapping[str, str] = MappingProxyType({})
_SWITCHES = {"true": True, "false": False}

_Part: TypeAlias = tuple[str, list[str]]  # an option's name, "" for an argument, and the words of the command line


class FlagsCommand(TyperCommand):
    """A command that understands other servers' command lines, and answers flags that it does not have."""

    absent: ClassVar[Mapping[str, str]] = _NONE
    """Flags that `crossdock serve` has and this command does not, with the reason."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the translated arguments. Ends the command with status 2 and one line for each flag of others."""
        try:
            args = translated(args, self._arity(ctx), self.absent)
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


def translated(args: Sequence[str], arity: Mapping[str, bool], absent: Mapping[str, str] = _NONE) -> list[str]:
    """Return the arguments of a command line in our own forms.

    Understood are `--max_model_len`, `--model NAME`, several values after one flag where MODEL stands before it,
    `--flag=false`, `--flag.part VALUE` for a part of a JSON value, and a file of flags (`--config` of vLLM and SGLang),
    over which flags win.

    Args:
        args: the words after the subcommand.
        arity: the names of all options, and whether a value follows them.
        absent: flags that the command does not have, with the reason.

    Raises:
        ValueError: flags of vLLM or SGLang that do not exist here; the message has a line for each. Or a second MODEL.
    """
    parts = list(_parts(args, arity))
    for name, words in parts:
        if name in _FILE and (flags := _flags_in(Path(_value(words)).expanduser(), arity)) is not None:
            given = {other for other, _ in parts}
            others = [part for part in parts if part[0] not in _FILE]
            from_file = [
                part for part in _parts(flags, arity) if given.isdisjoint((part[0], part[0].partition(".")[0]))
            ]
            parts = [*from_file, *others]
            break
    unknown = [name for name, _ in parts if name and name.partition(".")[0] not in arity]
    lines = [f"{name}: {absent[name]}" if name in absent else answer(name) for name in unknown]
    missing = [line for line in lines if line is not None]
    if missing:
        raise ValueError("\n".join(dict.fromkeys(missing)))
    if not unknown:  # else a word may be the value of an unknown flag
        _require_one_model([words[0] for name, words in parts if not name])
    return [word for _, words in _with_parts_joined(parts) for word in words]


def _require_one_model(models: Sequence[str]) -> None:
    if len(models) > 1 and "--" not in models:
        raise ValueError(f"{models[1]!r}: MODEL is {models[0]!r} already")


def _parts(args: Sequence[str], arity: Mapping[str, bool]) -> Iterator[_Part]:
    """Divide the words of a command line into options with their values, and arguments."""
    words, has_model = deque(args), False
    list_name = ""  # option of which the word before was a value, and another may follow
    while words:
        word = words.popleft()
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
        takes_value = arity.get(name.partition(".")[0], name in _MODEL)
        rest = [value] if equals else [words.popleft()] if takes_value and words else []
        list_name = name if name in _LISTS and has_model else ""
        if name in _MODEL:
            if not rest:
                raise ValueError(f"{name}: a hub name or a directory must follow")
            has_model = True
            yield "", rest
        elif takes_value and rest:
            yield name, [f"{name}={rest[0]}"] if name.startswith("--") else [name, rest[0]]
        elif name in arity and not takes_value:
            if not rest and words and words[0].lower() in _SWITCHES:  # as older vLLM wrote it
                rest = [words.popleft()]
            yield name, _switched(name, rest, arity)
        else:
            yield name, [name]


def _switched(name: str, value: Sequence[str], arity: Collection[str]) -> list[str]:
    """Return the words for a flag without a value, of which some write one: `--flag=false`."""
    if not value:
        return [name]
    off = name.replace("--", "--no-", 1)
    is_on = _SWITCHES.get(value[0].lower())
    if is_on is None or (not is_on and off not in arity):
        return [f"{name}={value[0]}"]  # refused by the parser, which says that it takes no value
    return [name if is_on else off]


def _canonical(head: str, arity: Collection[str]) -> str:
    """Return an option's name with dashes for underscores. The path into a JSON value stays where the option exists:
    --a_b.c_d is --a-b.c_d, and --a-b of an option that does not exist here. -O3 is -O.
    """
    if not head.startswith("--"):
        return "-O" if head.startswith("-O") else head.partition(".")[0]
    name, dot, path = head[2:].partition(".")
    name = "--" + name.replace("_", "-")
    return name + dot + path if name in arity else name


def _with_parts_joined(parts: Sequence[_Part]) -> Iterator[_Part]:
    """Yield the options, and in place of those for parts of a JSON value (--a.b 1 --a.c.d x) one with the whole."""
    wholes: dict[str, Any] = {}
    for name, words in parts:
        option, dot, path = name.partition(".")
        if dot:
            *outer, last = path.split(".")
            inside: Any = wholes.setdefault(option, _object_in(option, parts))
            for key in outer:
                inside = inside.setdefault(key, {}) if isinstance(inside, dict) else None
            if not isinstance(inside, dict):
                raise ValueError(f"{name}: a part of a value that is given as a whole, too")
            inside[last] = _json_or_text(_value(words))
    yield from ((name, words) for name, words in parts if "." not in name and name not in wholes)
    yield from ((option, [f"{option}={json.dumps(whole)}"]) for option, whole in wholes.items())


def _object_in(option: str, parts: Sequence[_Part]) -> dict[str, Any]:
    """Return the JSON object that is given for an option as a whole; an empty one if there is none."""
    given: Any = next((_json_or_text(_value(words)) for name, words in parts if name == option), {})
    if not isinstance(given, dict):
        raise ValueError(f"{option}: {given!r} is not a JSON object, and a part of one is given, too")
    return given


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


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
