"""Reads the files of a LoRA adapter of PEFT, all but its numbers, as files of a stranger. No torch, for ingresses."""

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from os import fstat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from crossdock.workers.model.lora.adapter_config import CONFIG, read_adapter_config
from crossdock.workers.model.weights.untrusted import open_own
from crossdock.workers.schedule.request.submission import Adapter

WEIGHTS = "adapter_model.safetensors"
_MOST_HEADER_BYTES = 16 << 20  # of safetensors: 100,000 tensors have about 12 MB
_MOST_NAME_CHARS = 512
_MOST_WIDTH = 1 << 18  # of a linear's inputs or outputs; models of 405 billion parameters have 53,248
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""The bits of a number that are all set in NaN and infinity."""

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


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
        """Return the adapter as requests name it. Reads all bytes of its files. ValueError: a number is not finite."""
        content = self.read_weights()
        self.check_numbers(content)
        factors = [factor for pair in self.factors.values() for factor in pair]
        num_weights = sum(factor.rows * factor.columns for factor in factors)
        return Adapter(name, str(self.folder), fingerprint(self.folder, content), num_weights)

    def read_weights(self) -> memoryview:
        """Return all bytes of the adapter's tensors. Other threads run meanwhile, also where memory is new.

        Raises:
            ValueError: the file has another size than its header says, as it had when the header was read.
        """
        size = max(factor.offset + factor.num_bytes for pair in self.factors.values() for factor in pair)
        with open_own(self.folder / WEIGHTS) as file:
            if fstat(file.fileno()).st_size != size:
                raise ValueError(f"{self.folder / WEIGHTS} has changed while it was read")
            content = np.empty(size, np.uint8).data  # not zeroed first
            at = 0
            while at < size and (count := file.readinto(content[at:])):
                at += count
        return content[:at]

    def check_numbers(self, content: memoryview) -> None:
        """Check the bytes of `read_weights`. ValueError: a number is NaN or infinite; names the module."""
        for module, pair in self.factors.items():
            for factor in pair:
                kind, exponent = _EXPONENTS[factor.dtype]
                own = content[factor.offset : factor.offset + factor.num_bytes]
                bits = np.frombuffer(own, np.uint8).view(kind)
                if ((bits & exponent) == exponent).any():
                    raise ValueError(f"{self.folder / WEIGHTS}: {module} has NaN or infinity among its numbers")


def fingerprint(folder: Path, weights: memoryview) -> str:
    """Return a hash of all bytes of an adapter's files. `weights`: the bytes of its tensors."""
    with open_own(folder / CONFIG) as file:
        digest = hashlib.sha256(file.read())
    digest.update(weights)
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
    config = read_adapter_config(folder / CONFIG)
    factors = _factors(folder / WEIGHTS)
    scales = {}
    for module, (a, b) in factors.items():
        config.check_target(module)
        rank, scales[module] = config.rank_and_scale(module)
        if rank > max_rank:
            raise ValueError(
                f"{folder / CONFIG}: r of {module} is {rank}; this server takes at most {max_rank} (--max-lora-rank)"
            )
        if a.rows != rank or b.columns != rank:
            shapes = f"[{a.rows}, {a.columns}] and [{b.rows}, {b.columns}]"
            raise ValueError(f"{folder / WEIGHTS}: {module} has {shapes}; its r is {rank}")
    return AdapterFiles(folder, factors, scales)


def _factors(file: Path) -> dict[str, tuple[Factor, Factor]]:
    """Return the two matrices of each module by the header of a file. ValueError: other tensors are in there."""
    found: dict[str, dict[str, Factor]] = {}
    for name, entry, start in _entries(file):
        if len(name) > _MOST_NAME_CHARS or (match := _TENSOR.fullmatch(name)) is None:
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
    with open_own(file) as opened:
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
        dtype = entry["dtype"]
        (rows, columns) = entry["shape"]
        (begin, end) = entry["data_offsets"]
        is_sound = {int} == {type(rows), type(columns), type(begin), type(end)} and begin >= 0 and dtype in _BYTES
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{file}: {name:.200} is no matrix") from None
    if is_sound and (size := max(rows, columns)) > _MOST_WIDTH:
        raise ValueError(f"{file}: {name:.200} has {size} rows or columns; at most {_MOST_WIDTH} are read")
    if not is_sound or rows < 1 or columns < 1 or end - begin != rows * columns * _BYTES[dtype]:
        raise ValueError(f"{file}: {name:.200} is no matrix of {', '.join(_BYTES)}")
    return Factor(dtype, rows, columns, start + begin, end - begin)
