"""Command lines as users of vLLM and SGLang write them, turned into those of `crossdock serve`."""

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import typer

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import gone_setting
from crossdock.cluster.help_pages import HelpCommand, asks_for_help
from crossdock.cluster.serve.adopted import Adopted, Part, adopt, value_of, without_words_of_others
from crossdock.cluster.serve.other_flags import answer, takes_several, takes_value
from crossdock.cluster.yaml_text import read_yaml

_MODEL = ("--model", "--model-path", "--model-id")  # other ways to give MODEL
_LISTS = (
    "--served-model-name",
    "--api-key",
    "--allowed-media-domains",
    "--lora-modules",
)  # several values may follow one of these, as in vLLM
_FILE = ("--config", "-c")
_NONE: Mapping[str, str] = MappingProxyType({})
_SWITCHES = {"true": True, "false": False}

_STRICT = "--strict"
_USAGE_ERROR: Any = typer.BadParameter.__base__  # of all mistakes that the parser finds; typer does not export its name


class FlagsCommand(HelpCommand):
    """A command that understands other servers' command lines, and answers flags that it does not have."""

    absent: ClassVar[Mapping[str, str]] = _NONE
    """Flags that `crossdock serve` has and this command does not, with the reason."""
    configure: ClassVar[Callable[[Mapping[str, Any]], object] | None] = None
    """Reads the values of the flags; its ValueError has a line for each that is wrong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the translated arguments, and print a line for each flag that is not as it was written.

        Ends the command with status 2 and a line for each mistake of the line, all of them together.
        """
        if asks_for_help(args):
            return super().parse_args(ctx, args)
        try:
            line = translated(args, self._arity(ctx), self.absent)
        except ValueError as error:
            line = Adopted(errors=str(error).splitlines())
        words = [word for _, words in line.parts for word in words]
        try:
            rest = super().parse_args(ctx, words)
        except _USAGE_ERROR as error:
            if not line.errors:
                raise
            line.errors.append(error.format_message())
        else:
            if line.errors:
                line.errors += self._wrong_values(ctx.params)
        for note in line.notes:
            typer.echo(f"{typer.style('warning:', fg='yellow')} {note}", err=True)
        for mistake in dict.fromkeys(line.errors):
            typer.echo(f"{typer.style('error:', fg='red')} {mistake}", err=True)
        if line.errors:
            raise typer.Exit(2)
        return rest

    def _wrong_values(self, values: Mapping[str, Any]) -> list[str]:
        """Return a line for each wrong value among the flags that exist here."""
        configure = type(self).configure
        if configure is None:
            return []
        try:
            configure(values)
        except ValueError as error:
            return str(error).splitlines()
        return []

    def _arity(self, ctx: Any) -> dict[str, bool]:
        """Return the names of all options, and whether a value follows them."""
        return {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            for name in (*parameter.opts, *parameter.secondary_opts)
            if name.startswith("-")
        }


def translated(args: Sequence[str], arity: Mapping[str, bool], absent: Mapping[str, str] = _NONE) -> Adopted:
    """Return a command line in our own forms, and what is said about the flags of others in the line.

    Understood are `--max_model_len`, `--max-model` for a name that begins so, `--model NAME`, several values after one
    flag where MODEL stands before it, `--flag=false`, `--flag.part VALUE` for a part of a JSON value, and a file of
    flags (`--config` of vLLM and SGLang), over which flags win.

    Args:
        args: the words after the subcommand.
        arity: the names of all options, and whether a value follows them.
        absent: flags that the command does not have, with the reason.

    Raises:
        ValueError: a second MODEL, or parts of a JSON value that contradict each other.
    """
    parts = list(_parts(args, arity))
    for name, words in parts:
        if name in _FILE and (flags := _flags_in(Path(value_of(words) or "").expanduser(), arity)) is not None:
            given = {other for other, _ in parts}
            others = [part for part in parts if part[0] not in _FILE]
            from_file = [
                part for part in _parts(flags, arity) if given.isdisjoint((part[0], part[0].partition(".")[0]))
            ]
            parts = [*from_file, *others]
            break
    is_strict = any(name == _STRICT for name, _ in parts)
    line = adopt(parts, arity, absent, is_strict=is_strict)
    for full, written in _short_forms(args, arity).items():
        line.notes, line.errors = (
            [text.replace(f"{full}: ", f"{written} (short for {full}): ", 1) for text in texts]
            for texts in (line.notes, line.errors)
        )
    if all(option in arity or option in takes_value() for option in _options(parts)):
        _require_one_model([words[0] for name, words in line.parts if not name])
    line.parts = list(_with_parts_joined(line.parts))
    if not is_strict:
        kept = without_words_of_others(line.parts)
        line.parts = kept.parts
        line.notes += kept.notes
    return line


def _options(parts: Sequence[Part]) -> Iterator[str]:
    """Yield the names of the options, without the path into a JSON value."""
    yield from (name.partition(".")[0] for name, _ in parts if name)


def _require_one_model(models: Sequence[str]) -> None:
    if len(models) > 1 and "--" not in models:
        raise ValueError(f"{models[1]!r}: MODEL is {models[0]!r} already")


def _parts(args: Sequence[str], arity: Mapping[str, bool]) -> Iterator[Part]:
    """Divide the words of a command line into options with their values, and arguments."""
    words = deque(args)
    has_model = False
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
        option = name.partition(".")[0]
        has_value = arity.get(option, option in _MODEL or takes_value().get(option))
        is_unknown = has_value is None
        if is_unknown:  # after MODEL, a word without a dash is the value of the flag
            has_value = has_model and bool(words) and not words[0].startswith("-")
        if head.startswith("-O") and len(head) > len("-O"):
            equals = "="
            value = head.removeprefix("-O")  # -O3
        rest = [value] if equals else [words.popleft()] if has_value and words else []
        may_go_on = name in _LISTS or name in takes_several() or is_unknown
        list_name = name if may_go_on and has_model else ""
        if name in _MODEL:
            if not rest:
                raise ValueError(f"{name}: a hub name or a directory must follow")
            has_model = True
            yield "", rest
        elif has_value and rest:
            yield name, [f"{name}={rest[0]}"] if name.startswith("--") else [name, rest[0]]
        elif name in arity and not has_value:
            if not rest and words and words[0].lower() in _SWITCHES:  # as older vLLM wrote it
                rest = [words.popleft()]
            yield name, _switched(name, rest, arity)
        elif rest:
            yield name, [f"{name}={rest[0]}"]
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
    name = _full("--" + name.replace("_", "-"), arity)
    return name + dot + path if name in arity else name


def _full(name: str, arity: Collection[str]) -> str:
    """Return the one name that begins with this one; this name if it exists, or several or none begin with it."""
    names = {*arity, *takes_value(), *_MODEL}
    if name in names or gone_setting(name) is not None:
        return name
    longer = [each for each in names if each.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _short_forms(args: Sequence[str], arity: Collection[str]) -> dict[str, str]:
    """Return the flags of others that words are the beginnings of, and the words: they may be meant otherwise."""
    written = ("--" + word.partition("=")[0].lstrip("-").replace("_", "-") for word in args if word.startswith("--"))
    found = {_full(name, arity): name for name in written}
    return {full: name for full, name in found.items() if full != name and full not in arity and full not in _MODEL}


def _with_parts_joined(parts: Sequence[Part]) -> Iterator[Part]:
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
            inside[last] = _json_or_text(value_of(words) or "")
    yield from ((name, words) for name, words in parts if "." not in name and name not in wholes)
    yield from ((option, [f"{option}={json.dumps(whole)}"]) for option, whole in wholes.items())


def _object_in(option: str, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the JSON object that is given for an option as a whole; an empty one if there is none."""
    given: Any = next((_json_or_text(value_of(words) or "") for name, words in parts if name == option), {})
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


def _flags_in(path: Path, arity: Mapping[str, bool]) -> list[str] | None:
    """Return the flags in a file of flags: {max-model-len: 8192}. None: it is a configuration of ours, or no YAML."""
    try:
        data = read_yaml(path.read_text())
    except (OSError, ValueError):
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
