"""Reads the files of a LoRA adapter of PEFT, all but its numbers, as files of a stranger. No torch, for ingresses."""

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from os import fstat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crossdock.workers.model.weights.untrusted import check_pattern, read_json
from crossdock.workers.schedule.submission import Adapter

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_MOST_HEADER_BYTES = 16 << 20  # of safetensors: 100,000 tensors have about 12 MB
_MOST_PATTERNS = 256
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_KNOWN = {  # fields that are read here, or change no logits of a saved adapter
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version"),
    *("qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type", "use_rslora"),
}


class Factor(NamedTuple):
    """One matrix of an adapter in its file."""

    dtype: str
    rows: int
    columns: int
    offset: int  # of its first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as its files say: for each module of the model two matrices and a scale.

    An output y of a module becomes y + scale * B A x, where A is [rank, K] and B is [N, rank].
    """

    folder: Path
    factors: Mapping[str, tuple[Factor, Factor]]  # A and B, by the module's name
    scales: Mapping[str, float]  # by the module's name

    @property
    def rank(self) -> int:
        """Return the largest rank of a module."""
        return max(a.rows for a, _ in self.factors.values())

    def adapter(self, name: str) -> Adapter:
        """Return the adapter as requests name it. Reads all bytes of its files."""
        factors = [factor for pair in self.factors.values() for factor in pair]
        num_weights = sum(factor.rows * factor.columns for factor in factors)
        return Adapter(name, str(self.folder), fingerprint(self.folder), num_weights)


def read_weights(folder: Path) -> memoryview:
    """Return all bytes of an adapter's tensors. Other threads run meanwhile, also where memory is new."""
    with (folder / WEIGHTS).open("rb", buffering=0) as file:
        content = np.empty(fstat(file.fileno()).st_size, np.uint8).data  # not zeroed first
        at = 0
        while count := file.readinto(content[at:]):
            at += count
    return content[:at]


def fingerprint(folder: Path, weights: memoryview | None = None) -> str:
    """Return a hash of all bytes of an adapter's files. `weights`: those of its tensors, where they have been read."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    digest.update(read_weights(folder) if weights is None else weights)
    return digest.hexdigest()[:32]


def read_adapter(folder: Path, max_rank: int) -> AdapterFiles:
    """Read what the files of an adapter say, all but its numbers.

    Raises:
        ValueError: files are missing or malformed, a rank is above `max_rank`, or the adapter changes more than the
            weights of linear modules. The message names the field or the tensor.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} has no file {name}; expected is an adapter as PEFT saves it, in safetensors")
    config = read_json(folder / CONFIG)
    _check_config(config, folder / CONFIG)
    factors = _factors(folder / WEIGHTS)
    scales = {}
    for module, (a, b) in factors.items():
        rank, scales[module] = _rank_and_scale(config, module)
        if not _is_target(config["target_modules"], module):
            raise ValueError(f"{folder / WEIGHTS} has {module}, which is none of target_modules in {CONFIG}")
        if rank > max_rank:
            raise ValueError(f"{folder / CONFIG}: r of {module} is {rank}; this server takes at most {max_rank}")
        if a.rows != rank or b.columns != rank:
            shapes = f"[{a.rows}, {a.columns}] and [{b.rows}, {b.columns}]"
            raise ValueError(f"{folder / WEIGHTS}: {module} has {shapes}; its r is {rank}")
    return AdapterFiles(folder, factors, scales)


def _check_config(config: Mapping[str, Any], file: Path) -> None:
    """Check the fields of adapter_config.json. ValueError: one asks for what is not served; the message names it."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type is {config.get('peft_type')!r:.100}; served is LORA")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{file}: bias is {config['bias']!r:.100}; served is none")
    for name, value in config.items():
        if name not in _KNOWN and value not in (None, False, [], {}):
            raise ValueError(f"{file}: {name} is {value!r:.100}; served are plain LoRA weights, without this field")
    for name, kind in (("r", int), ("lora_alpha", int | float)):
        if not isinstance(value := config.get(name), kind) or isinstance(value, bool) or not 0 < value < 1 << 20:
            raise ValueError(f"{file}: {name} is {value!r:.100}; expected is a number above 0")
    if not isinstance(config.get("use_rslora", False), bool):
        raise ValueError(f"{file}: use_rslora is {config['use_rslora']!r:.100}; expected is true or false")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
            raise ValueError(f"{file}: {name} must be an object of at most {_MOST_PATTERNS} patterns")
        for pattern, value in patterns.items():
            check_pattern(pattern)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1 << 20:
                raise ValueError(f"{file}: {name} has {value!r:.100}; expected are numbers above 0")
    targets = config.get("target_modules")
    if isinstance(targets, str):
        check_pattern(targets)
    elif not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
        raise ValueError(f"{file}: target_modules is {targets!r:.100}; expected are names of modules, or a pattern")


def _is_target(targets: str | list[str], module: str) -> bool:
    """Return whether PEFT would adapt the module, where that is a linear."""
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


def _rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    rank = _by_pattern(config.get("rank_pattern") or {}, module, config["r"])
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    return int(rank), alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name, as in PEFT."""
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def _factors(file: Path) -> dict[str, tuple[Factor, Factor]]:
    """Return the two matrices of each module by the header of a file. ValueError: other tensors are in there."""
    found: dict[str, dict[str, Factor]] = {}
    for name, entry, start in _entries(file):
        if (match := _TENSOR.fullmatch(name)) is None:
            raise ValueError(
                f"{file} has the tensor {name:.200}; served are adapters of linear modules alone, with tensors "
                f"base_model.model.MODULE.lora_A.weight and lora_B.weight"
            )
        found.setdefault(match[1], {})[match[2]] = _factor(file, name, entry, start)
    for module, pair in found.items():
        if len(pair) < 2:
            raise ValueError(f"{file} has one of the two tensors of {module}")
    ends = [factor.offset + factor.num_bytes for pair in found.values() for factor in pair.values()]
    if max(ends, default=0) != file.stat().st_size:
        raise ValueError(f"{file} has no tensor, or its tensors do not end where the file does")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _entries(file: Path) -> list[tuple[str, Any, int]]:
    """Return the names and the entries of a safetensors file, and where its tensors begin."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{file} is not safetensors, or its header has more than {_MOST_HEADER_BYTES} bytes")
        try:
            header = json.loads(opened.read(length))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file} is not safetensors: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not safetensors: its header is no object")
    return [(name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]


def _factor(file: Path, name: str, entry: Any, start: int) -> Factor:
    try:
        dtype, (rows, columns), (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_sound = {int} == {type(rows), type(columns), type(begin), type(end)} and begin >= 0 and dtype in _BYTES
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{file}: {name:.200} is no matrix") from None
    if not is_sound or rows < 1 or columns < 1 or end - begin != rows * columns * _BYTES[dtype]:
        raise ValueError(f"{file}: {name:.200} is no matrix of {', '.join(_BYTES)}")
    return Factor(dtype, rows, columns, start + begin, end - begin)
