"""A configuration as text: read from a file and overrides, explained where wrong, printed with descriptions."""

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from crossdock.cluster.config import ClusterConfig, field_at, model_at
from crossdock.cluster.yaml_text import read_yaml

_GONE = {
    "engine.prefix_eviction": "gone, leave it out: the least recently used page is evicted first",
    "router.evictions": "gone, leave it out: the pages that a request evicts are always priced",
    "deploy": "gone, leave it out: manifests/ has files for Kubernetes, ray up and Serve, to be edited there",
}


def load(
    path: Path | None = None, overrides: Mapping[str, object] | None = None, flags: Mapping[str, str] | None = None
) -> ClusterConfig:
    """Read `path` (YAML; None: all defaults), then apply `overrides`, by dotted name: {"engine.max_num_seqs": 8}.

    A member of a list is named by its position or its `name`, all of its members by `*`: "pools.mixed.replicas".
    `flags` says which flag gave an override; errors then name the flag: {"engine.max_num_seqs": "--max-num-seqs"}.

    Raises:
        ValueError: the file cannot be read, or a setting is unknown or out of bounds.
    """
    data = {} if path is None else _read(path)
    for key, value in (overrides or {}).items():
        _override(data, key, copy.deepcopy(value))
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        source = f"{path}: " if path else ""
        problems = [
            _by_flag(
                _explain(
                    _named(detail["loc"], data), tuple(detail["loc"]), detail["type"], detail["msg"], detail["input"]
                ),
                flags or {},
                source,
            )
            for detail in error.errors(include_url=False)
        ]
        raise ValueError("\n".join(problems)) from None


def to_yaml(config: ClusterConfig) -> str:
    """Return the whole tree as YAML that `load` reads, each setting with its description. Secrets are hidden."""
    return "\n".join(_lines(config, "")) + "\n"


# -- read --------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    try:
        data = read_yaml(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a mapping is expected ({', '.join(ClusterConfig.model_fields)}), not {data!r}")
    return data


def _override(data: dict[str, Any], key: str, value: object) -> None:
    """Set the setting with the dotted name `key`; create missing mappings on the way."""
    path = key.split(".")
    if path[0] == "pools" and isinstance(data.get("models"), list):
        for member in data["models"]:
            if isinstance(member, dict):
                _override(member, key, copy.deepcopy(value))
        return
    if path[0] == "pools" and len(path) > 1 and "pools" not in data:
        data["pools"] = [{"name": "mixed"}]
    _assign(data, path, value, key)


def _assign(node: Any, path: Sequence[str], value: object, key: str) -> None:
    """Assign `value` at `path` below `node`. `key` is the whole dotted name, for errors."""
    name, *rest = path
    if isinstance(node, list):
        if not rest:
            raise ValueError(f"{key}: names a whole member of a list; set its fields one by one")
        for member in node if name == "*" else [_member(node, name, key)]:
            _assign(member, rest, value, key)
    elif not isinstance(node, dict):
        done = ".".join(key.split(".")[: -len(path)])
        raise ValueError(f"{key}: {done} is {node!r}, which has no parts")
    elif not rest:
        node[name] = value
    else:
        if node.get(name) is None:
            node[name] = {}
        _assign(node[name], rest, value, key)


def _member(members: list[Any], name: str, key: str) -> Any:
    """Return the member of a list by its position or its `name`."""
    names = [member.get("name") for member in members if isinstance(member, dict)]
    if name.isdigit() and int(name) < len(members):
        return members[int(name)]
    if name in names:
        return members[names.index(name)]
    raise ValueError(f"{key}: no member {name!r} here; there are {', '.join(str(name) for name in names)}")


# -- explain -----------------------------------------------------------------------------------------------------------


_PLAIN = {  # by pydantic's kind of error, where its message speaks of parsing
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_type": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "byte_size": "must be a size, such as 2GiB",
    "dict_type": "must be a mapping of settings",
    "model_type": "must be a mapping of settings",
    "tuple_type": "must be a list",
}


def _named(loc: Sequence[int | str], data: Any) -> str:
    """Return the dotted name of a place in the data. A member of a list is named by its `name`, if it has one."""
    parts = []
    for part in loc:
        inside = data[part] if isinstance(data, list) and isinstance(part, int) and part < len(data) else None
        name = inside.get("name") if isinstance(inside, dict) else None
        parts.append(name if isinstance(name, str) and re.fullmatch(r"[\w-]+", name) else str(part))
        data = inside if inside is not None else data.get(part) if isinstance(data, dict) else None
    return ".".join(parts)


def _explain(where: str, loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    """Return one line about one of pydantic's errors, in the words of our own errors. `where`: the name of `loc`."""
    if kind == "extra_forbidden":
        if gone := gone_setting(where):
            return f"{where}: {gone}"
        return f"{where}: no such setting{_suggestion(loc)}"
    if kind == "value_error":  # raised by a validator of ours, whose message names its fields
        message = message.removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    message = _PLAIN.get(kind, message.replace("Input should", "must", 1).replace("String should", "must", 1))
    message = message[:1].lower() + message[1:]
    return f"{where}: {message}" if _is_secret(loc) else f"{where}: {message}, not {value!r}"


def _by_flag(problem: str, flags: Mapping[str, str], source: str) -> str:
    """Return a problem with the flag that gave its setting, or else with the file that did."""
    for key, flag in flags.items():
        found = re.match(rf"{re.escape(key)}[.:] ?".replace(r"\*", r"[^.:]+"), problem)
        if found is not None and key != "pools":  # a pool's flag gives no more than its name and its replicas
            return f"{flag}: {problem[found.end() :]}"
    return source + problem


def gone_setting(name: str) -> str | None:
    """Return the replacement of a setting that earlier versions had, by its name or flag; None: no version had it."""
    last = name.rpartition(".")[2].removeprefix("--").replace("-", "_")
    return next((line for gone, line in _GONE.items() if gone.rpartition(".")[2] == last), None)


def _suggestion(loc: tuple[int | str, ...]) -> str:
    """Return the end of an error about an unknown name: a similar name, the right section, or all names."""
    model = model_at(loc[:-1])
    fields = list(model.model_fields) if model is not None else []
    name = str(loc[-1]).replace("-", "_")
    if close := difflib.get_close_matches(name, fields, n=1):
        return f"; did you mean {close[0]}?"
    for section in ClusterConfig.model_fields:
        if field_at((section, name)) is not None:
            return f"; did you mean {section}{'.NAME' if section == 'pools' else ''}.{name}?"
    return f"; there are {', '.join(fields)}"


def _is_secret(loc: tuple[int | str, ...]) -> bool:
    """Report whether a value must not be repeated: a field on the way to it is hidden in reprs."""
    fields = (field_at(loc[: end + 1]) for end in range(len(loc)))
    return any(field is not None and not field.repr for field in fields)


# -- print -------------------------------------------------------------------------------------------------------------


def _lines(model: BaseModel, indent: str) -> list[str]:
    lines = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        comment = f"  # {field.description}" if field.description else ""
        if not field.repr and value:
            lines.append(f"{indent}{name}: [<hidden>]{comment}")
        elif isinstance(value, BaseModel):
            lines += [f"{indent}{name}:{comment}", *_lines(value, indent + "  ")]
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            lines.append(f"{indent}{name}:{comment}")
            for member in cast(tuple[BaseModel, ...], value):
                first, *rest = _lines(member, indent + "    ")
                lines += [f"{indent}  - {first.lstrip()}", *rest]
        else:
            plain = model.model_dump(mode="json", include={name})[name]
            text = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
            lines.append(f"{indent}{name}: {text}{comment}")
    return lines
