"""Values in place of those of a model's config.json (`hf_overrides`), and the folder of such a model. No torch."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossdock.workers.model.architecture import DECODERS
from crossdock.workers.model.context_length import BASE, STAYS
from crossdock.workers.model.weights.scheme import KEYS
from crossdock.workers.model.weights.untrusted import read_config_file

_ROTATION = ("rope_parameters", "rope_scaling")  # newer and older name of one field
_REFUSED = {
    "model_type": "it names the code that computes the model",
    **dict.fromkeys(KEYS, "it says how the files of weights are stored"),
}


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Check the names of `hf_overrides`, before the model is read. Raises ValueError: one cannot be replaced."""
    for name, why in _REFUSED.items():
        if name in overrides:
            raise ValueError(f"{name} cannot be replaced: {why}. Serve a checkpoint whose files have another one")
    for name in _ROTATION:
        if not isinstance(overrides.get(name), dict | None):
            example = '{"rope_type": "linear", "factor": 2.0}'
            raise ValueError(f"{name} must be an object, such as {example}, or null, not {overrides[name]!r}")


def overridden(found: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with other values.

    A field is replaced wherever it stands: at the top, in the decoder's part, or in both. A new field stands at the
    top, a new rotation in the decoder's part. An object whose name ends with `_config` keeps its other fields, as in
    vLLM. A rotation (`rope_scaling`, `rope_parameters`) is replaced whole, but its base and its sections stay where
    they are not named: transformers would take a default for them.

    Raises:
        ValueError: kinds of layers rotate in their own ways, and the new rotation does not name the kinds.
    """
    values = dict(found)
    for name, value in overrides.items():
        if name.endswith("_config") and isinstance(value, dict) and isinstance(values.get(name), dict):
            values[name] = overridden(values[name], value)
            continue
        for home in _homes(values, name):
            if home is None:
                values = _replaced(values, name, value)
            else:
                values[home] = _replaced(values[home], name, value)
    return values


def link_with_config(source: Path, overrides: Mapping[str, Any], target: Path) -> None:
    """Make the folder `target`: links to the files of `source`, and its config.json with other values.

    Raises:
        ValueError: config.json cannot be read, or a value cannot be replaced so.
    """
    values = overridden(read_config_file(source), overrides)
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    (target / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def state_of(source: Path, overrides: Mapping[str, Any]) -> str:
    """Return a name for what `link_with_config` makes: it changes with the configuration and the names of files."""
    files = sorted(file.name for file in source.iterdir())
    content = (source / "config.json").read_bytes()
    said = json.dumps([str(source), files, overrides], sort_keys=True)
    return hashlib.sha256(said.encode() + content).hexdigest()[:16]


def _homes(values: Mapping[str, Any], name: str) -> list[str | None]:
    """Return the parts of config.json with a field: None for the top, and names of decoders' parts."""
    rotates = name in (*_ROTATION, BASE)
    names = (*_ROTATION, BASE) if rotates else (name,)
    decoders = [each for each in DECODERS if isinstance(values.get(each), dict)]
    homes = [home for home in (None, *decoders) if not set(names).isdisjoint(values if home is None else values[home])]
    return homes or [decoders[0] if rotates and decoders else None]


def _replaced(part: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a part of config.json with another value of a field."""
    there = next((each for each in _ROTATION if isinstance(part.get(each), dict)), None)
    before = part[there] if there else {}
    if name == BASE and there is not None and (BASE in before or _kinds(before)):
        return {**part, there: _turned(before, {**before, BASE: value})}
    if name not in _ROTATION:
        return {**part, name: value}
    after = {"rope_type": "default"} if value is None else value
    rest = {key: each for key, each in part.items() if key not in _ROTATION}
    return {**rest, there or name: _turned(before, after)}


def _turned(before: Mapping[str, Any], after: Any) -> Any:
    """Return a rotation in place of another one, with the base and the sections of that where it names none."""
    if not isinstance(after, dict):
        return after  # transformers names the mistake
    kinds = _kinds(before)
    if not kinds:
        return {**{name: before[name] for name in STAYS if name in before}, **after}
    if not set(after) <= set(kinds):
        raise ValueError(
            f"hf_overrides: layers of the kinds {', '.join(kinds)} rotate in their own ways; give rope_parameters with "
            f"an object for each kind that changes"
        )
    return {**before, **{kind: _turned(before[kind], each) for kind, each in after.items()}}


def _kinds(rotation: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers that rotate in their own ways; empty: all rotate alike."""
    return [kind for kind, value in rotation.items() if isinstance(value, dict)]
