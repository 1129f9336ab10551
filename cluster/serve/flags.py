"""The flags of `crossdock serve` and `crossdock config`: one table, from which options and overrides are made.

A flag names the setting that it overrides. The setting's field decides the flag's type, metavar and help.
"""

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic import ByteSize

from crossdock.cluster.config import ClusterConfig, field_at
from crossdock.cluster.config_file import load


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, or the argument if `names` is ("MODEL",).

    Its type, metavar and help are those of the field of the setting `key`, unless they are given here.
    """

    key: str  # dotted name of the setting, or the flag's own name where several settings or none follow from it
    names: tuple[str, ...] = ()
    help: str = ""
    kind: Any = None  # type that typer parses
    metavar: str | None = None
    envvar: str | None = None
    show_default: str | bool = True

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        return self._names()[0].split("/")[0].strip("-").lower().replace("-", "_")

    def signature(self, panel: str) -> inspect.Parameter:
        """Return the command's parameter as typer reads it."""
        field = field_at(self.key.split("."))
        kind, metavar = (self.kind, None) if field is None else _parsed_type(self.kind or field.annotation)
        text = self.help or (field.description if field is not None else None)
        info: Any
        if self.names == ("MODEL",):
            info = typer.Argument(help=text, show_default=self.show_default)
        else:
            info = typer.Option(
                *self._names(),
                help=text,
                metavar=metavar if self.metavar is None else self.metavar,
                envvar=self.envvar,
                rich_help_panel=panel,
            )
        annotation = Annotated[kind | None, info]  # type: ignore[valid-type]  # made here, for typer alone to read
        return inspect.Parameter(self.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    def _names(self) -> tuple[str, ...]:
        """Return the option's names; by default the last part of the key, and for booleans also its `--no-` form."""
        if self.names or self.key.startswith("--"):
            return self.names or (self.key,)
        name = self.key.rpartition(".")[2].replace("_", "-")
        field = field_at(self.key.split("."))
        assert field is not None, self.key
        return (f"--{name}/--no-{name}",) if _parsed_type(field.annotation)[0] is bool else (f"--{name}",)


PANELS: dict[str, tuple[Flag, ...]] = {
    "Model": (
        Flag("model.path", ("MODEL",), show_default="SmolLM2"),
        Flag(
            "model.served_name",
            ("--served-model-name",),
            kind=list[str],
            help="Name of the model for clients; given again: further names.",
        ),
        Flag("model.dtype"),
        Flag("model.max_model_len"),
        Flag("model.generation_config", metavar="auto|vllm|DIR"),
        Flag(
            "model.override_generation_config",
            kind=str,
            metavar="JSON",
            help="Sampling that wins over generation_config: '{\"temperature\": 0.5}'.",
        ),
    ),
    "Engine (names as in vLLM)": (
        Flag("engine.max_num_batched_tokens"),
        Flag("engine.max_num_seqs"),
        Flag("engine.kv_cache_memory"),
        Flag("engine.kv_cache_dtype"),
        Flag("engine.gpu_memory_utilization"),
        Flag("engine.enforce_eager"),
        Flag("engine.async_scheduling"),
        Flag("engine.attention_backend"),
        Flag("engine.page_size", ("--page-size", "--block-size")),
    ),
    "Chunks and who goes first": (
        Flag("engine.chunk_policy"),
        Flag("engine.min_chunk_tokens"),
        Flag("engine.max_prefill_tokens"),
        Flag("engine.long_prefill_token_threshold"),
        Flag(
            "--chunked-prefill-size",
            kind=int,
            help="As in SGLang: N is --max-num-batched-tokens N; -1 is --no-enable-chunked-prefill, which needs a "
            "--max-num-batched-tokens of the whole context.",
        ),
        Flag("engine.max_num_partial_prefills"),
        Flag("engine.max_long_partial_prefills"),
        Flag("engine.prefill_order"),
        Flag("engine.admission"),
    ),
    "Engine: on unless switched off": (
        Flag("engine.enable_chunked_prefill"),
        Flag("engine.mixed_chunks"),
        Flag("engine.enable_prefix_caching"),
    ),
    "HTTP": (
        Flag("http.host"),
        Flag("http.port"),
        Flag(
            "http.api_keys",
            ("--api-key",),
            kind=list[str],
            help="Key that clients must send; given again: any of them.",
            envvar="CROSSDOCK_API_KEY",
        ),
        Flag("http.max_queued_requests"),
    ),
    "Cluster and file": (
        Flag(
            "pools",
            kind=str,
            metavar="NAME=REPLICAS[xtpN][xppN],…",
            help="Pools of replicas, by name, and their ranks: mixed=2, or prefill=2xtp1,decode=1xtp2.",
        ),
        Flag(
            "pools.*.tensor_parallel_size",
            ("--tensor-parallel-size", "--tp"),
            help="Ranks that divide every layer of a replica, in all pools.",
        ),
        Flag(
            "pools.*.pipeline_parallel_size",
            ("--pipeline-parallel-size", "--pp"),
            help="Consecutive stages of layers of a replica, in all pools.",
        ),
        Flag(
            "--verbose",
            ("--verbose/--no-verbose",),
            kind=bool,
            metavar="",
            help="Show what Ray, Serve and libraries report about themselves.",
            envvar="CROSSDOCK_VERBOSE",
        ),
        Flag("--config", ("--config", "-c"), kind=Path, help="YAML file; flags win over it."),
        Flag(
            "--set",
            kind=list[str],
            metavar="KEY=VALUE",
            help="Any setting by its dotted name, as in `crossdock config`.",
        ),
    ),
}


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command with **flags the parameters of the table, as typer sees them."""
    parameters = [flag.signature(panel) for panel, flags in PANELS.items() for flag in flags]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def configuration(given: Mapping[str, Any]) -> ClusterConfig:
    """Return the configuration that the flags mean: the file's settings, flags over them, `--set` over flags.

    Raises:
        ValueError: a flag or a setting is wrong; the message names it.
    """
    flags = [flag for panel in PANELS.values() for flag in panel]
    values = {flag.key: given[flag.parameter] for flag in flags if given[flag.parameter] not in (None, [])}
    return load(values.pop("--config", None), _overrides(values))


def _overrides(values: dict[str, Any]) -> dict[str, object]:
    """Return the settings that flags mean, by dotted name. `values`: the given flags, by their key in the table."""
    values.pop("--verbose", None)  # about the output of the command alone
    size, settings = values.pop("--chunked-prefill-size", None), values.pop("--set", ())
    if size is not None:
        values |= _chunked_prefill(size, values)
    if text := values.get("model.override_generation_config"):
        values["model.override_generation_config"] = _parse_json(text, "--override-generation-config")
    if names := values.get("model.served_name"):
        values["model.served_name"] = names[0]
        values |= {"http.model_aliases": names[1:]} if names[1:] else {}
    if "pools" in values:
        values["pools"] = _parse_pools(values["pools"])
    return values | dict(_parse_setting(setting) for setting in settings)


def _chunked_prefill(size: int, values: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings that `--chunked-prefill-size` means. ValueError: flags in `values` contradict it."""
    flag = f"--chunked-prefill-size {size}"
    budget, enabled = values.get("engine.max_num_batched_tokens"), values.get("engine.enable_chunked_prefill")
    if size == -1:
        if enabled:
            raise ValueError(f"{flag} switches chunks off and --enable-chunked-prefill on; give one of them")
        return {"engine.enable_chunked_prefill": False}
    if size < 1:
        raise ValueError(f"{flag}: must be a number of tokens, or -1 for no chunks")
    if enabled is False:
        raise ValueError(
            f"{flag} is a size of chunks, which --no-enable-chunked-prefill switches off; give one of them"
        )
    if budget is not None and budget != size:
        raise ValueError(f"{flag} and --max-num-batched-tokens {budget} are the same setting; give one of them")
    return {"engine.max_num_batched_tokens": size, "engine.enable_chunked_prefill": True}


_RANKS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}


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


def _parse_json(text: str, flag: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {text!r} is not JSON: {error}") from None


def _parse_setting(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set: {text!r} is not of the form KEY=VALUE, e.g. engine.max_num_seqs=64")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"--set: the value of {key} is not YAML: {value!r}") from None


def _parsed_type(annotation: Any) -> tuple[Any, str | None]:
    """Return the type that typer parses for a field's annotation, and the metavar; None: typer's own metavar.

    A Literal and a ByteSize stay text here: the configuration checks them, and its errors name what is accepted.
    """
    if get_origin(annotation) in (typing.Union, types.UnionType):
        (annotation,) = (member for member in get_args(annotation) if member is not types.NoneType)
    if get_origin(annotation) is Literal:
        return str, "|".join(get_args(annotation))
    if annotation is ByteSize:
        return str, "SIZE"
    return annotation, "" if annotation is bool else None
