"""Reads adapter_config.json of a LoRA adapter of PEFT: which modules it changes, and its ranks and scales. No torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from crossdock.workers.model.lora.adapter_fields import check_fields
from crossdock.workers.model.weights.patterns import NamePattern, Steps
from crossdock.workers.model.weights.untrusted import json_of, open_own

CONFIG = "adapter_config.json"
_MOST_PATTERNS = 256
_ANY_NAME = r"[^.]*"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of an adapter_config.json that are read."""

    file: Path
    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[NamePattern, float]
    alphas: Mapping[NamePattern, float]
    targets: NamePattern | Sequence[str] | None  # None: all linears
    excluded: NamePattern | Sequence[str]
    layers: Sequence[int] | None  # None: all
    layer_names: Sequence[str]  # names that stand before the number of a layer; empty: any name may

    def rank_and_scale(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's matrices, and the factor of their product."""
        rank = _by_pattern(self.ranks, module, self.rank)
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return int(rank), alpha / (sqrt(rank) if self.is_rank_stabilised else rank)

    def check_target(self, module: str) -> None:
        """Check that PEFT would adapt a linear of this name. ValueError: names the field by which PEFT would not."""
        if self.excluded and _is_named(self.excluded, module):
            raise self._not_adapted(module, "is one of exclude_modules")
        if self.targets is None:
            return
        if not _is_named(self.targets, module):
            raise self._not_adapted(module, "is none of target_modules")
        is_whole_name = isinstance(self.targets, NamePattern) or module in self.targets
        if self.layers is not None and not is_whole_name and self._layer_of(module) not in self.layers:
            raise self._not_adapted(module, "is in none of layers_to_transform")

    def _not_adapted(self, module: str, why: str) -> ValueError:
        return ValueError(f"{self.file}: the adapter's file has {module:.200}, which {why}")

    def _layer_of(self, module: str) -> int | None:
        """Return the number of a module's layer, as PEFT finds the number in the name."""
        begin = r"(?:^|.*?\.)" if self.layer_names else r".*?\."
        found = (re.match(rf"{begin}{name}\.(\d+)\.", module) for name in self.layer_names or [_ANY_NAME])
        match = next(filter(None, found), None)
        return None if match is None else int(match[1])


def read_adapter_config(file: Path) -> AdapterConfig:
    """Read an adapter_config.json. ValueError: a field asks for what is not served; the message names the field."""
    with open_own(file) as opened:
        config = json_of(opened, file)
    check_fields(config, file)
    if not isinstance(config.get("use_rslora", False), bool):
        raise ValueError(f"{file}: use_rslora is {config['use_rslora']!r:.100}; expected is true or false")
    layers = config.get("layers_to_transform")
    layer_names = config.get("layers_pattern") or []
    layers = [layers] if isinstance(layers, int) else layers or None
    layer_names = [layer_names] if isinstance(layer_names, str) else layer_names
    if layers is not None and not (isinstance(layers, list) and {*map(type, layers)} == {int}):
        raise ValueError(f"{file}: layers_to_transform is {layers!r:.100}; expected are numbers of layers")
    if not isinstance(layer_names, list) or not all(
        isinstance(each, str) and each.isidentifier() for each in layer_names
    ):
        raise ValueError(f"{file}: layers_pattern is {layer_names!r:.100}; expected are plain names, such as layers")
    if not (targets := config.get("target_modules")):
        raise ValueError(f"{file}: target_modules is {targets!r:.100}; expected are names of modules, or a pattern")
    steps = Steps()
    return AdapterConfig(
        file=file,
        rank=int(_number(config, "r", file)),
        alpha=_number(config, "lora_alpha", file),
        is_rank_stabilised=config.get("use_rslora", False),
        ranks=_numbers(config, "rank_pattern", file, steps),
        alphas=_numbers(config, "alpha_pattern", file, steps),
        targets=None if targets == "all-linear" else _names(config, "target_modules", file, steps),
        excluded=_names(config, "exclude_modules", file, steps),
        layers=layers,
        layer_names=layer_names,
    )


def _number(config: Mapping[str, Any], field: str, file: Path) -> float:
    value = config.get(field)
    kind = int if field == "r" else int | float
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < 1 << 20:
        raise ValueError(f"{file}: {field} is {value!r:.100}; expected is a number above 0")
    return value


def _numbers(config: Mapping[str, Any], field: str, file: Path, steps: Steps) -> Mapping[NamePattern, float]:
    """Return the numbers that a field has for patterns of the ends of names, as PEFT reads these."""
    found = config.get(field) or {}
    if not isinstance(found, dict) or len(found) > _MOST_PATTERNS:
        raise ValueError(f"{file}: {field} must be an object of at most {_MOST_PATTERNS} patterns")
    for value in found.values():
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1 << 20:
            raise ValueError(f"{file}: {field} has {value!r:.100}; expected are numbers above 0")
    return {NamePattern(rf"(.*\.)?({pattern})$", steps): value for pattern, value in found.items()}


def _names(config: Mapping[str, Any], field: str, file: Path, steps: Steps) -> NamePattern | Sequence[str]:
    """Return the pattern or the list of names that a field has; an empty list where it has none."""
    found = config.get(field) or []
    if isinstance(found, str):
        return NamePattern(found, steps)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{file}: {field} is {found!r:.100}; expected are names of modules, or a pattern")
    return found


def _is_named(names: NamePattern | Sequence[str], module: str) -> bool:
    """Return whether a pattern means a module, or one of a list of names does."""
    if isinstance(names, NamePattern):
        return names.fits(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[NamePattern, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches a module's name, as in PEFT."""
    return next((value for pattern, value in patterns.items() if pattern.begins(module)), default)
