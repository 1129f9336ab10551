"""Command lines of `vllm bench serve`, turned into those of `crossdock bench`."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import typer

from crossdock.cluster.help_pages import HelpCommand, asks_for_help

Option: TypeAlias = tuple[str, list[str]]  # a name, and its values; of an argument the name is empty

_LENGTHS = {"--prompt-tokens": "1024", "--output-tokens": "128"}  # of vLLM's random prompts
_RENAMED = {
    "--num-prompts": "--num-requests",
    "--max-concurrency": "--concurrency",
    "--random-input-len": "--prompt-tokens",
    "--input-len": "--prompt-tokens",
    "--random-output-len": "--output-tokens",
    "--output-len": "--output-tokens",
    "--random-prefix-len": "--prefix-tokens",
    "--num-warmups": "--warmup",
    "--served-model-name": "--model",
    "--result-filename": "--json",
}
_SWITCHES = (
    *("--append-result", "--disable-shuffle", "--disable-tqdm", "--ignore-eos", "--insecure", "--no-oversample"),
    *("--no-stream", "--plot-dataset-stats", "--plot-timeline", "--profile", "--save-detailed", "--save-result"),
    *("--skip-chat-template", "--skip-tokenizer-init", "--trust-remote-code", "--use-beam-search"),
)
_SEVERAL = ("--goodput", "--header", "--lora-modules", "--metadata")
_ADDRESS = ("--base-url", "--host", "--port")
_APIS = {  # whether requests are chats, by vLLM's words for the API
    "--backend": {"vllm": False, "openai": False, "openai-chat": True},
    "--endpoint": {"/v1/completions": False, "/v1/chat/completions": True},
}
_APIS["--endpoint-type"] = _APIS["--backend"]
_FIGURES = "all figures are printed, and --json FILE has those of each request"
_OTHER_DATA = "that data set is not read: use --dataset-name random, --workload NAME, --mix NAME or --trace FILE"
_GREEDY = "requests have temperature 0, and answers the length that is asked for"
_LEFT_OUT = {  # patterns of flags without which the load is the same, and why
    **dict.fromkeys(("--percentile-metrics", "--metric-percentiles", "--save-*", "--append-result"), _FIGURES),
    **dict.fromkeys(("--result-dir", "--label", "--metadata", "--plot-*"), _FIGURES),
    "--ignore-eos": _GREEDY,
    "--disable-tqdm": "progress is shown on a terminal alone",
    "--trust-remote-code": "no code of a model runs here",
    "--tokenizer-mode": "prompts are made from the server's own tokens",
    "--request-id-prefix": "each request has an id of its own",
    "--ready-check-timeout-sec": "the server must be up",
    "--disable-shuffle": "random prompts have no order",
    "--no-oversample": "random prompts do not run out",
}
_REFUSED = {  # patterns of flags that would be another load, and what there is
    "--dataset-path": "use --trace FILE: Mooncake's JSONL or Azure's CSV",
    **dict.fromkeys(("--sharegpt-*", "--sonnet-*", "--custom-*", "--hf-*", "--blazedit-*", "--spec*"), _OTHER_DATA),
    **dict.fromkeys(("--prefix-repetition-*", "--asr-*", "--txt-slices-*", "--skip-*"), _OTHER_DATA),
    "--random-mm-*": "use --workload images, with --pictures and --picture-size",
    "--random-batch-size": "each request has one prompt",
    "--random-range-ratio": "the prompts of a run have one length; --mix and --trace have unlike ones",
    **dict.fromkeys(("--temperature", "--top-p", "--top-k", "--min-p", "--use-beam-search"), _GREEDY),
    **dict.fromkeys(("--*-penalty", "--extra-body", "--logprobs", "--no-stream"), _GREEDY),
    "--lora-*": "use --model NAME with the name of an adapter",
    "--ramp-up-*": "use --burstiness, or --trace FILE with arrivals of your own",
    "--profile*": "use crossdock tune, or the timelines of /v1/requests",
    "--insecure": "certificates are checked",
}
_HARMLESS = {"--random-range-ratio": ("0", "0.0"), "--temperature": ("0", "0.0"), "--random-batch-size": ("1",)}


@dataclass(slots=True)
class TranslatedLine:
    """A command line in our own words, and a line for each flag of vLLM's; with errors, the command ends."""

    words: list[str]
    notes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class BenchCommand(HelpCommand):
    """A command that understands the flags of `vllm bench serve`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the translated arguments. Ends with status 2 and a line for each flag that would be another load."""
        if asks_for_help(args):
            return super().parse_args(ctx, args)
        parameters = [each for each in self.get_params(ctx) if each.param_type_name == "option"]
        arity = {name: not getattr(each, "is_flag", False) for each in parameters for name in each.opts}
        line = translated(args, arity)
        for note in line.notes:
            typer.echo(f"{typer.style('warning:', fg='yellow')} {note}", err=True)
        for mistake in line.errors:
            typer.echo(f"{typer.style('error:', fg='red')} {mistake}", err=True)
        if line.errors:
            raise typer.Exit(2)
        return super().parse_args(ctx, line.words)


def translated(args: Sequence[str], arity: Mapping[str, bool]) -> TranslatedLine:
    """Return a command line in our own words. `arity`: our options, and whether a value follows each."""
    options = list(_options(args, arity))
    line = TranslatedLine([])
    is_serve = options[:1] == [("", ["serve"])]  # of `vllm bench serve`
    if is_serve:
        options = options[1:]
    names = {name for name, _ in options}
    ours = {_RENAMED.get(name, name) for name in names}
    for name, values in options:
        if name in _ADDRESS or (name == "--request-rate" and values == ["inf"]):
            continue
        if name in _APIS:
            _take_api(name, values, line)
        elif name == "--dataset-name":
            _take_data(values, ours, line)
        elif name == "--model" and "--served-model-name" in names:
            line.notes.append("--model: left out: --served-model-name is the name that requests give")
        elif name in _RENAMED and _RENAMED[name] in names and name != "--served-model-name":
            line.notes.append(f"{name}: left out: {_RENAMED[name]} is given, and wins")
        elif name in _RENAMED:
            line.words += [_RENAMED[name], *values]
            line.notes.append(f"{name}: read as {_RENAMED[name]} {' '.join(values)}")
        elif name in arity:
            line.words += [word for value in values for word in (name, _ours(name, value))] or [name]
        elif not name:
            line.words += values
        else:
            _take_other(name, values, "random" in _values(options, "--dataset-name"), line)
    _send_at_once(options, ours, line)
    if (is_serve or not names <= {"", *arity}) and not any(not name for name, _ in options):
        line.words.append(_address(options))
    return line


def _options(args: Sequence[str], arity: Mapping[str, bool]) -> Iterator[Option]:
    """Divide the words of a command line into options with their values, and arguments."""
    words = deque(args)
    while words:
        word = words.popleft()
        if not word.startswith("-") or word == "-":
            yield "", [word]
            continue
        head, equals, value = word.partition("=")
        name = head.replace("_", "-") if head.startswith("--") else head
        values = [value] if equals else []
        has_value = arity.get(name, name not in _SWITCHES)
        if has_value and not equals and words:
            values.append(words.popleft())
            while name in _SEVERAL and words and not words[0].startswith("-") and "://" not in words[0]:
                values.append(words.popleft())
        yield name, values


def _values(options: Sequence[Option], name: str) -> list[str]:
    return [value for each, values in options if each == name for value in values]


def _ours(name: str, value: str) -> str:
    """Return a value of an option that both have in our form: vLLM writes a header as NAME=VALUE."""
    key, equals, rest = value.partition("=")
    return f"{key}: {rest}" if name == "--header" and equals and ":" not in key else value


def _take_api(name: str, values: Sequence[str], line: TranslatedLine) -> None:
    value = "".join(values)
    known = _APIS[name]
    if value not in known:
        line.errors.append(f"{name}: must be one of {', '.join(known)}, not {value!r}")
    elif known[value] and "--chat" not in line.words:
        line.words.append("--chat")
        line.notes.append(f"{name}: read as --chat")


def _take_data(values: Sequence[str], ours: Collection[str], line: TranslatedLine) -> None:
    name = "".join(values)
    if name != "random":
        line.errors.append(f"--dataset-name {name}: not supported: {_OTHER_DATA}")
        return
    lengths = [word for pair in _LENGTHS.items() if pair[0] not in ours for word in pair]
    line.words += lengths
    line.notes.append(f"--dataset-name random: read as {' '.join(lengths) or 'the lengths that are given'}")


def _take_other(name: str, values: Sequence[str], is_random: bool, line: TranslatedLine) -> None:
    """Leave out or refuse a flag that only vLLM has; one that no server has goes to the parser."""
    shown = " ".join([name, *values])
    if "".join(values) in _HARMLESS.get(name, ()):
        line.notes.append(f"{shown}: not needed: so it is here")
    elif name == "--dataset-path" and is_random:
        line.notes.append(f"{name}: not needed: random prompts come from no file")
    elif why := next((why for pattern, why in _LEFT_OUT.items() if fnmatchcase(name, pattern)), None):
        line.notes.append(f"{name}: left out: {why}")
    elif what := next((what for pattern, what in _REFUSED.items() if fnmatchcase(name, pattern)), None):
        line.errors.append(f"{name}: not supported: {what}")
    else:
        line.words += [name, *values]


def _send_at_once(options: Sequence[Option], ours: Collection[str], line: TranslatedLine) -> None:
    """Send all requests at once where vLLM would: its rate is infinite unless one is given."""
    rates = _values(options, "--request-rate")
    counts = _values(options, "--num-prompts")
    has_rate = any(rate != "inf" for rate in rates)
    if has_rate or not counts or not {"--concurrency", "-c"}.isdisjoint(ours):
        return
    line.words += ["--concurrency", counts[-1]]
    line.notes.append(f"--num-prompts {counts[-1]}: without a rate all are sent at once: --concurrency {counts[-1]}")


def _address(options: Sequence[Option]) -> str:
    """Return the server's address as vLLM's flags give it."""
    if bases := _values(options, "--base-url"):
        return bases[-1]
    host = (_values(options, "--host") or ["127.0.0.1"])[-1]
    port = (_values(options, "--port") or ["8000"])[-1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
