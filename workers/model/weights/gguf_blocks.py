"""The blocks of GGUF's quantised tensors as codes, scales and offsets: weight = scale * code + offset."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdock.kernels.options import CodeKind

Bytes: TypeAlias = NDArray[np.uint8]
Numbers: TypeAlias = NDArray[np.float32]


class Codes(NamedTuple):
    """A matrix [N, K] in groups of K / G columns."""

    codes: NDArray[np.uint8] | NDArray[np.int8]  # [N, K]; of int4 0 to 15, and without offsets their value less 8
    scales: Numbers  # [N, G]
    offsets: Numbers | None  # [N, G]


class BlockType(NamedTuple):
    """A type of tensors in GGUF."""

    kind: CodeKind
    group: int  # columns that share a scale
    block: int  # columns
    unpack: Callable[[Bytes], Codes]  # of blocks [N, K / block, bytes]


def _q4_0(blocks: Bytes) -> Codes:
    return _codes(_nibbles(blocks[..., 2:]), _half(blocks[..., :2]))


def _q4_1(blocks: Bytes) -> Codes:
    return _codes(_nibbles(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q5_0(blocks: Bytes) -> Codes:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _codes(codes.astype(np.int8) - np.int8(16), _half(blocks[..., :2]))


def _q5_1(blocks: Bytes) -> Codes:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _codes(codes.astype(np.int8), _half(blocks[..., :2]), _half(blocks[..., 2:4]))


def _q8_0(blocks: Bytes) -> Codes:
    return _codes(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks[..., :2]))


def _q4_k(blocks: Bytes) -> Codes:
    scales, offsets = _k_scales(blocks)
    return _codes(_halves(blocks[..., 16:]), scales, offsets)


def _q5_k(blocks: Bytes) -> Codes:
    scales, offsets = _k_scales(blocks)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [N, blocks, 8, 32]
    codes = _halves(blocks[..., 48:]) | fifth.reshape(*blocks.shape[:2], 256) << 4
    return _codes(codes.astype(np.int8), scales, offsets)


def _q6_k(blocks: Bytes) -> Codes:
    leading = blocks.shape[:2]
    shape = np.array([0, 2, 4, 6], np.uint8)[:, None]
    low = blocks[..., :128].reshape(*leading, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    high = blocks[..., 128:192].reshape(*leading, 2, 1, 32) >> shape & 3
    codes = low.reshape(*leading, 2, 4, 32) | high << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8) * _half(blocks[..., 208:])
    return _codes(codes.reshape(*leading, 256).astype(np.int8) - np.int8(32), scales)


def _k_scales(blocks: Bytes) -> tuple[Numbers, Numbers]:
    """Return the scales and offsets [N, blocks, 8] of K-quants, from 6 bits each in 12 bytes."""
    packed = blocks[..., 4:16]
    first = packed[..., :4]
    second = packed[..., 4:8]
    third = packed[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], -1)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], -1)
    return _half(blocks[..., :2]) * scales, -_half(blocks[..., 2:4]) * least


def _codes(codes: NDArray[np.uint8] | NDArray[np.int8], scales: Numbers, offsets: Numbers | None = None) -> Codes:
    rows = len(codes)
    return Codes(
        codes.reshape(rows, -1), scales.reshape(rows, -1), None if offsets is None else offsets.reshape(rows, -1)
    )


def _half(numbers: Bytes) -> Numbers:
    return np.ascontiguousarray(numbers).view(np.float16).astype(np.float32)


def _nibbles(numbers: Bytes) -> Bytes:
    """Return the codes of a block: all low halves, then all high halves."""
    return np.concatenate([numbers & 15, numbers >> 4], -1)


def _halves(numbers: Bytes) -> Bytes:
    """Return the codes of a block of 256, from runs of 32 bytes that hold 64 codes each."""
    runs = numbers.reshape(*numbers.shape[:2], 4, 1, 32)
    codes = runs >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    return codes.reshape(*numbers.shape[:2], 256)


def _bits(numbers: Bytes) -> Bytes:
    return np.unpackbits(np.ascontiguousarray(numbers), axis=-1, bitorder="little")


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": BlockType("int4", 32, 32, _q4_0),
    "Q4_1": BlockType("int4", 32, 32, _q4_1),
    "Q5_0": BlockType("int8", 32, 32, _q5_0),
    "Q5_1": BlockType("int8", 32, 32, _q5_1),
    "Q8_0": BlockType("int8", 32, 32, _q8_0),
    "Q4_K": BlockType("int4", 32, 256, _q4_k),
    "Q5_K": BlockType("int8", 32, 256, _q5_k),
    "Q6_K": BlockType("int8", 16, 256, _q6_k),
}
"""The types that are read, by GGUF's names."""
