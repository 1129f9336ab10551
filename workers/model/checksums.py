"""Checksums of tensors, with which a trainer compares what replicas received and hold with what it sent."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


def checksum(tensor: Tensor) -> str:
    """Return SHA-256 of a tensor's numbers, row after row, in the bytes of their dtype. As hexadecimal digits."""
    plain = tensor.detach().cpu()
    plain = plain.to_dense() if plain.is_mkldnn else plain
    numbers: Any = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(numbers).hexdigest()


def checksums_in(folder: Path) -> dict[str, str]:
    """Return the checksum of each tensor in the safetensors files of a directory, by its name there."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: checksum(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  # no mapping
    return found
