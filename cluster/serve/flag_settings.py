"""The configuration that given flags mean: the settings of each, and what flags say together."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.config_file import load
from crossdock.cluster.serve.flags import PANELS
from crossdock.cluster.yaml_text import read_yaml


def configuration(given: Mapping[str, Any]) -> ClusterConfig:
    """Return the configuration that the flags mean: the file's settings, flags over them, `--set` over flags.

    Raises:
        ValueError: flags or settings are wrong; the message has a line for each, which names it.
    """
    flags = [flag for panel in PANELS.values() for flag in panel]
    mistakes = _Mistakes()
    values: dict[str, Any] = {}
    for flag in flags:
        if given[flag.parameter] not in (None, [], ()):
            with mistakes.kept():
                values[flag.key] = flag.value(given[flag.parameter])
    file = values.pop("--config", None)
    settings: dict[str, object] = {}
    for text in values.pop("--set", ()):
        with mistakes.kept():
            key, value = _parse_setting(text)
            settings[key] = value
    names = {flag.key: flag.name for flag in flags if flag.key in values and flag.key not in settings}
    overrides = _overrides(values, mistakes)
    with mistakes.kept():
        config = load(file, overrides | settings, names)
    mistakes.end()
    return config


class _Mistakes:
    """The lines of what is wrong in a command line, so that all of them are seen together."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the message of a ValueError, and go on behind the block."""
        try:
            yield
        except ValueError as error:
            self._lines += str(error).splitlines()

    def end(self) -> None:
        """Raise a ValueError with all lines that were kept, if there are any."""
        if self._lines:
            raise ValueError("\n".join(dict.fromkeys(self._lines)))


def _overrides(values: dict[str, Any], mistakes: _Mistakes) -> dict[str, object]:
    """Return the settings that flags mean, by dotted name, without those of flags that are wrong.

    `values`: the given flags, by their key in the table.
    """
    for about_the_command in ("--verbose", "--strict"):
        values.pop(about_the_command, None)
    size = values.pop("--chunked-prefill-size", None)
    with mistakes.kept():
        if size is not None:
            values |= _chunked_prefill(size, values)
    if names := values.get("model.served_name"):
        values["model.served_name"] = names[0]
        values |= {"http.model_aliases": names[1:]} if names[1:] else {}
    for key in _FLAG_OF:
        listed = values.pop(key, None)
        with mistakes.kept():
            if listed is not None:
                values[key] = [member for each in listed for member in _listed(each, _FLAG_OF[key])]
    modules = values.pop("model.lora_modules", None)
    with mistakes.kept():
        if modules:
            values["model.lora_modules"] = dict(map(_lora_module, modules))
            values.setdefault("engine.enable_lora", True)  # as SGLang does
    revision = values.pop("--revision", None)
    with mistakes.kept():
        if revision is not None:
            values["model.path"] = _at_revision(values.get("model.path"), revision)
    pools = values.pop("pools", None)
    with mistakes.kept():
        if pools is not None:
            values["pools"] = _parse_pools(pools)
    device = values.pop("--device", None)
    with mistakes.kept():
        if device is not None:
            values |= _of_device(device)
    return values


def _of_device(device: str) -> dict[str, object]:
    """Return the settings that `--device` means."""
    emulated, _, profile = device.partition(":")
    return {"pools.*.emulated": profile} if emulated == "emulated" else {"pools.*.num_gpus": _gpus_of(device)}


def _chunked_prefill(size: int, values: Mapping[str, Any]) -> dict[str, object]:
    """Return the settings that `--chunked-prefill-size` means. ValueError: flags in `values` contradict it."""
    flag = f"--chunked-prefill-size {size}"
    budget = values.get("engine.max_num_batched_tokens")
    enabled = values.get("engine.enable_chunked_prefill")
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


def _gpus_of(device: str) -> int | None:
    """Return the GPUs of each rank that `--device` means; None: by the machine."""
    numbers = {"auto": None, "cpu": 0, "cuda": 1}
    if device not in numbers:
        raise ValueError(f"--device: {device!r} must be one of {', '.join(numbers)}, emulated:PROFILE")
    return numbers[device]


_FLAG_OF = {
    f"http.{name}": f"--{name.replace('_', '-')}"
    for name in ("allowed_origins", "allowed_hosts", "allowed_media_domains")
}


def _listed(text: str, flag: str) -> list[str]:
    """Return the members of a JSON list, or the text itself."""
    if not text.startswith("["):
        return [text]
    try:
        return [str(each) for each in json.loads(text)]
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not JSON") from None


def _lora_module(text: str) -> tuple[str, str]:
    """Return the name and the folder of an adapter, from NAME=PATH or vLLM's JSON."""
    if text.startswith("{"):
        try:
            given = json.loads(text)
            return str(given["name"]), str(given["path"])
        except (ValueError, KeyError):
            raise ValueError(f"--lora-modules: {text!r} is no JSON object with name and path") from None
    name, equals, path = text.partition("=")
    if not name or not equals or not path:
        raise ValueError(f"--lora-modules: {text!r} is not of the form NAME=PATH")
    return name, path


def _at_revision(model: str | None, revision: str) -> str:
    if model is None or "@" in model or Path(model).expanduser().is_dir():
        raise ValueError(f"--revision {revision} needs a MODEL from the hub, and no other revision in its name")
    return f"{model}@{revision}"


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


def _parse_setting(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set: {text!r} is not of the form KEY=VALUE, e.g. engine.max_num_seqs=64")
    try:
        return key.strip(), read_yaml(value)
    except ValueError:
        raise ValueError(f"--set: the value of {key} is not YAML: {value!r}") from None
