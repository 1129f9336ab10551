"""A name for the weights in a directory: only replicas of the same weights exchange pages."""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crossdock.workers.model.loaders.objects import origin_of, sample

_CONFIGS = (
    "config.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
)
"""Files that change logits besides weights. The first includes rope, data type and most quantisations."""
_OTHER_WEIGHTS = ("*.gguf", "*.bin", "*.pt", "*.pth")
_BLOCK = 4096  # bytes of one sample
_STRIDE = 1 << 20  # bytes from one sample of a tensor to the next
_MAX_HEADER = 100 << 20  # bytes; safetensors allows no more
_NUM_THREADS = 8  # files read at once


def fingerprint(path: Path) -> str:
    """Return a name for the model in a directory, equal for copies on different machines.

    It is a hash of the configuration, of the names, shapes and places of all tensors, and of samples of every tensor:
    4 KiB at its beginning, its end and every MiB, which is 4 MiB of every GiB. Reading all would take minutes. So
    checkpoints with unlike tensors have unlike names, unless all changes fall between two samples.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in _CONFIGS:
        if (path / name).is_file():
            digest.update(f"{name}\n".encode() + (path / name).read_bytes())
    if origin_of(path) is not None:
        digest.update(sample(path).encode())
        return digest.hexdigest()
    files = sorted(path.glob("*.safetensors"))
    files = files or sorted(file for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for file, samples in zip(files, pool.map(_digest_of, files), strict=True):
            digest.update(f"{file.name} {file.stat().st_size} {samples}\n".encode())
    return digest.hexdigest()


def _digest_of(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb", buffering=0) as content:
        descriptor = content.fileno()
        size = os.fstat(content.fileno()).st_size
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # else the kernel reads far more than is asked for
        header, begin = _header(descriptor, size)
        digest.update(header)
        for start, stop in _tensors(header, begin, size):
            for offset in _offsets(start, stop):
                digest.update(os.pread(descriptor, min(_BLOCK, stop - offset), offset))
    return digest.hexdigest()


def _header(descriptor: int, size: int) -> tuple[bytes, int]:
    """Return the header of a safetensors file, which lists its tensors, and where their bytes begin. A file of
    another format gives nothing and 0."""
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0).ljust(8, b"\xff"))
    if length > min(_MAX_HEADER, size - 8):
        return b"", 0
    return os.pread(descriptor, length, 8), 8 + length


def _tensors(header: bytes, begin: int, size: int) -> list[tuple[int, int]]:
    """Return where the bytes of each tensor start and stop in the file; the whole file where they cannot be known."""
    try:
        entries = json.loads(header)
        places = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        spans = [(begin + start, begin + stop) for start, stop in places]
        if all(begin <= start <= stop <= size for start, stop in spans):
            return sorted(spans)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return [(0, size)]


def _offsets(start: int, stop: int) -> Iterator[int]:
    """Yield where to take samples of the bytes from `start` to `stop`."""
    last = max(start, stop - _BLOCK)
    yield from range(start, last, _STRIDE)
    yield last
