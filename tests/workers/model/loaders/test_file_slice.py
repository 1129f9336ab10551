"""Parts of tensors in safetensors files, beside safetensors' own slices."""

import json
import os
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from crossdock.workers.model.loaders import file_slice
from crossdock.workers.model.loaders.file_slice import OpenFile

SHAPES = {"none": [], "one": [7], "two": [6, 10], "three": [3, 4, 8], "empty": [0, 4]}
KEYS: list[Any] = [
    ...,
    (slice(1, 3),),
    slice(0, 2),
    (slice(None), slice(1, 4)),
    (slice(None), slice(2, None)),
    (slice(None), slice(None), slice(3, 7)),
    (slice(4, 4),),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slices") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name} {dtype}": torch.randint(0, 2, shape, generator=generator).to(dtype)
        if dtype is torch.bool
        else torch.randint(-9, 9, shape, generator=generator).to(dtype)
        for name, shape in SHAPES.items()
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool)
    }
    save_file(tensors, path)
    return path


def test_every_part_equals_that_of_the_library(file: Path) -> None:
    count = 0
    with safe_open(file, framework="pt") as reader, closing(OpenFile(file)) as ours:
        for name in reader.keys():  # noqa: SIM118  # the reader is no mapping
            theirs, found = reader.get_slice(name), ours.slice_of(name)
            assert (found.get_shape(), found.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
            whole = reader.get_tensor(name)
            for key in KEYS:
                if isinstance(key, tuple | slice) and whole.dim() < (len(key) if isinstance(key, tuple) else 1):
                    continue
                part = found[key]
                assert part.dtype is whole.dtype
                assert torch.equal(part.float(), whole[key].float()), (name, key)
                assert part.is_contiguous()
                count += 1
    assert count > 100


@pytest.mark.parametrize("key", [(slice(2, 4),), (slice(None), slice(3, 8))])
def test_no_byte_beside_the_part_is_read(file: Path, key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, read = [], os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(sum(map(len, buffers)))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(file_slice.os, "preadv", preadv)
    with closing(OpenFile(file)) as ours:
        part = ours.slice_of("two torch.float32")[key]
    assert sum(counts) == 4 * prod(part.shape) > 0


def test_file_that_ends_too_early_is_an_error(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.safetensors"
    short.write_bytes(file.read_bytes()[:-3])
    with safe_open(file, framework="pt") as reader:
        last = max(reader.keys(), key=lambda name: json.loads(header(file))[name]["data_offsets"][1])
    with closing(OpenFile(short)) as ours, pytest.raises(OSError, match="ends in the middle of a tensor"):
        ours.slice_of(last)[...]


def header(file: Path) -> bytes:
    content = file.read_bytes()
    return content[8 : 8 + int.from_bytes(content[:8], "little")]
