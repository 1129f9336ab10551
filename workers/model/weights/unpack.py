"""The layouts of packed matrices in files: which tensors one has, and how they become a `PackedMatrix`.

To read a further layout: a line in `LAYOUTS`, and forms in scheme.py that name it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from crossdock.kernels.packed import IN_NIBBLES, PackedMatrix
from crossdock.workers.model.loaders.file_slice import FLOATS
from crossdock.workers.model.weights.scheme import PackedForm

Pieces: TypeAlias = Mapping[str, Tensor]  # by role: codes, scales and so on

MOST_STATE_BYTES = 1 << 14  # of what bitsandbytes says of a matrix in JSON
_LEAST_SCALE = 1e-12  # of rows that are rounded here; those of smaller numbers are zeros
_BAND = 1 << 20  # elements
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of eight is nibble _AWQ_ORDER[j] of their 32 bits


class Layout(NamedTuple):
    """The names of the tensors of a matrix in files, and what they mean."""

    codes: str  # suffix of the codes; those of the others follow the same name
    dtypes: frozenset[str]  # of codes, as safetensors names them
    shape: Callable[[PackedForm, Sequence[int]], list[int]]  # of the weight, by the shape of its codes
    unpack: Callable[[PackedForm, Pieces], PackedMatrix]
    others: Mapping[str, tuple[str, ...]]  # role: suffixes, of which files have one
    needed: tuple[str, ...] = ("scales",)  # roles
    unused: tuple[str, ...] = ()  # of activations, which are computed as they are
    weight: str = ".weight"  # suffix of the name in the model


def _unpack_scaled(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a matrix whose codes lie as they are used, with scales for the tensor, for rows, groups or blocks."""
    codes = pieces["codes"]
    scales = _floats(pieces["scales"])
    rows, columns = codes.shape
    group = form.group or columns
    block_rows = form.block_rows or rows
    if scales.numel() == 1:
        scales = scales.reshape(1, 1)
        group = columns
        block_rows = rows
    elif scales.numel() == rows and scales.dim() < 2:
        scales = scales.reshape(rows, 1)
        group = columns
        block_rows = 1
    offsets = None
    if (zeros := pieces.get("zeros")) is not None and zeros.any():
        offsets = -scales * zeros.float().reshape(scales.shape)
    return _ordered(PackedMatrix(form.kind, codes, scales, offsets, group, block_rows), pieces.get("order"))


def _unpack_words(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a matrix of compressed-tensors whose codes lie in words of 32 bits along its columns."""
    codes = _from_words(form, pieces["codes"])
    rows = codes.shape[0]
    columns = codes.shape[1] * _per_byte(form)
    if pieces["shape"].tolist() != [rows, columns]:
        raise ValueError(f"a weight {pieces['shape'].tolist()} whose rows do not end at a word is not read")
    scales = _floats(pieces["scales"]).reshape(rows, -1)
    zeros = None
    if (words := pieces.get("zeros")) is not None:
        zeros = _nibbles(words.T.contiguous(), form)[:, :rows].T
    matrix = _with_zeros(form, codes, scales, zeros, form.group or columns)
    return _ordered(matrix, pieces.get("order"))


def _unpack_gptq(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a matrix of GPTQ: words along K, [K / 8, N] of 4 bits, and zero points along N, [groups, N / 8].

    In version 1 zero points are stored less 1.
    """
    codes = _from_words(form, pieces["codes"].T.contiguous())
    rows = codes.shape[0]
    columns = codes.shape[1] * _per_byte(form)
    zeros = _nibbles(pieces["zeros"], form)[:, :rows].T + (form.layout == "gptq")
    matrix = _with_zeros(form, codes, _floats(pieces["scales"]).T.contiguous(), zeros, form.group or columns)
    return _ordered(matrix, pieces.get("order"))


def _unpack_awq(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a matrix of AWQ: words along N in an order of their own, [K, N / 8], and zero points [groups, N / 8]."""
    packed = torch.cat([_in_bytes(_awq_nibbles(each).T) for each in _bands(pieces["codes"], 1)])
    zeros = _awq_nibbles(pieces["zeros"]).T if "zeros" in pieces else None
    scales = _floats(pieces["scales"]).T.contiguous()
    return _with_zeros(form, packed, scales, zeros, form.group or 2 * packed.shape[1])


def _unpack_fp4(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a matrix of e2m1 in bytes, with scales in e4m3 (times or through one of the tensor) or powers of two."""
    codes = pieces["codes"]
    codes = codes.flatten(1) if codes.dim() == 3 else codes  # blocks of 16 bytes
    scales = _floats(pieces["scales"])
    if (factor := pieces.get("factor")) is not None:
        scales = scales * factor.float()
    if (divisor := pieces.get("divisor")) is not None:
        scales = scales / divisor.float()
    scales = scales.bfloat16() if form.scale_bytes == 2 else scales
    return PackedMatrix("e2m1", codes, scales, None, form.group or 2 * codes.shape[1])


def nf4_state(state: Tensor, codes: Sequence[int]) -> dict[str, Any]:
    """Read the description of a matrix by bitsandbytes: JSON in a tensor of bytes. `codes`: the shape of its codes.

    Raises:
        ValueError: it says something else.
    """
    try:
        found = json.loads(bytes(state.tolist()))
        rows, columns = (int(each) for each in found["shape"])
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its state is not bitsandbytes' ({type(error).__name__})") from error
    if rows < 1 or columns < 1 or rows * columns != 2 * prod(codes):
        raise ValueError(f"its state says a shape of [{rows}, {columns}], and there are {prod(codes)} bytes of codes")
    return dict(found)


def _unpack_nf4(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a matrix of bitsandbytes: codes in one line, the even column in the high half of a byte.

    `nested`: the scales are codes too, of a table `nested_table`, in blocks that have a scale in `nested` each.
    """
    state = nf4_state(pieces["state"], pieces["codes"].shape)
    (rows, columns) = state["shape"]
    block = state["blocksize"]
    if block != form.group or columns % block:
        raise ValueError(
            f"blocks of {block} in rows of {columns} columns are not read, only of {form.group}, in whole rows"
        )
    scales = pieces["scales"]
    if (nested := pieces.get("nested")) is not None:
        each = nested.float().repeat_interleave(state["nested_blocksize"])[: scales.numel()]
        scales = pieces["nested_table"].float()[scales.int()] * each + state["nested_offset"]
    codes = pieces["codes"].reshape(rows, columns // 2)
    return PackedMatrix("nf4", codes >> 4 | codes << 4, scales.float().view(rows, -1), None, block)


def _unpack_canonical(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a matrix that `pack_gguf` has written as it is held."""
    return PackedMatrix(form.kind, pieces["codes"], pieces["scales"], pieces.get("offsets"), form.group or 0)


def _round_rows(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a plain weight [N, K] in e4m3: the largest number of a row becomes the largest of e4m3."""
    rows = pieces["codes"].float()
    largest = torch.finfo(torch.float8_e4m3fn).max
    scales = (rows.abs().amax(1, keepdim=True) / largest).clamp(min=_LEAST_SCALE)
    return PackedMatrix(form.kind, (rows / scales).to(torch.float8_e4m3fn), scales, None, rows.shape[1])


def _round_columns(form: PackedForm, pieces: Pieces) -> PackedMatrix:
    """Return a plain weight that lies [K, N], as `_round_rows` does."""
    return _round_rows(form, {"codes": pieces["codes"].T.contiguous()})


def _with_zeros(form: PackedForm, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> PackedMatrix:
    """Return a matrix whose codes count from 0 in files. zeros: [N, groups], of the same codes; None: in the middle."""
    middle = 8 if form.kind == "int4" else 128
    offsets = None
    if zeros is not None and not (zeros == middle).all():
        offsets = -scales * (zeros.float() if form.kind == "int4" else zeros.float() - middle)
    return PackedMatrix(form.kind, codes, scales, offsets, group)


def _ordered(matrix: PackedMatrix, groups: Tensor | None) -> PackedMatrix:
    """Return a matrix whose columns are sorted by `groups`, [K], the number of each column's group; None: they are.

    Raises:
        ValueError: groups are of unlike sizes.
    """
    columns = matrix.shape[1]
    if groups is None or bool((groups < 0).all()):
        return matrix
    order = groups.long().argsort(stable=True)
    expected = torch.arange(columns) // matrix.group
    if not torch.equal(groups.long()[order], expected):
        raise ValueError(f"the columns of a group are not {matrix.group} each")
    if torch.equal(order, torch.arange(columns)):
        return matrix
    if matrix.kind == "int4":
        bands = _bands(matrix.codes, 0)
        codes = torch.cat([_in_bytes(torch.stack([each & 15, each >> 4], -1).flatten(1)[:, order]) for each in bands])
    else:
        codes = matrix.codes[:, order]
    return PackedMatrix(matrix.kind, codes, matrix.scales, matrix.offsets, matrix.group, columns=order)


def _from_words(form: PackedForm, words: Tensor) -> Tensor:
    """Return codes as `PackedMatrix` has them, of words of 32 bits along the last dimension."""
    codes = words.view(torch.uint8)
    return codes if form.kind == "int4" else (codes ^ 128).view(torch.int8)


def _nibbles(words: Tensor, form: PackedForm) -> Tensor:
    """Return the numbers in words of 32 bits along the last dimension, int32."""
    found = words.view(torch.uint8)
    return (torch.stack([found & 15, found >> 4], -1).flatten(1) if form.kind == "int4" else found).int()


def _bands(codes: Tensor, dim: int) -> Sequence[Tensor]:
    """Return parts of codes along `dim`, so small that copies of one take little memory."""
    return torch.split(codes, max(_BAND // max(codes.shape[1 - dim], 1), 1), dim)


def _in_bytes(codes: Tensor) -> Tensor:
    """Return codes of 4 bits, [N, K] uint8, two in a byte."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _awq_nibbles(words: Tensor) -> Tensor:
    found = words.contiguous().view(torch.uint8)
    numbers = torch.stack([found & 15, found >> 4], -1).view(*words.shape, 8)
    return numbers[..., _AWQ_ORDER].flatten(1)


def _floats(scales: Tensor) -> Tensor:
    """Return scales in float32; bytes are exponents of two."""
    return torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()


def _per_byte(form: PackedForm) -> int:
    return 2 if form.kind in IN_NIBBLES else 1


def _of_codes(_form: PackedForm, codes: Sequence[int]) -> list[int]:
    return list(codes)


def _of_line(_form: PackedForm, codes: Sequence[int]) -> list[int]:
    """Return the number of elements: the rows are known by the model alone."""
    return [2 * codes[0]]


def _of_bytes(form: PackedForm, codes: Sequence[int]) -> list[int]:
    return [codes[0], _per_byte(form) * codes[1]]


def _of_words(form: PackedForm, codes: Sequence[int]) -> list[int]:
    return [codes[0], 4 * _per_byte(form) * codes[1]]


def _of_gptq(form: PackedForm, codes: Sequence[int]) -> list[int]:
    return [codes[1], 4 * _per_byte(form) * codes[0]]


def _of_awq(_form: PackedForm, codes: Sequence[int]) -> list[int]:
    return [8 * codes[1], codes[0]]


def _of_experts(_form: PackedForm, codes: Sequence[int]) -> list[int]:
    """Return the shape [experts, K, N] of codes [experts, N, K / 32, 16]."""
    experts, outputs, blocks, _ = codes
    return [experts, 32 * blocks, outputs]


_I8, _F8, _I32, _U8 = (frozenset({name}) for name in ("I8", "F8_E4M3", "I32", "U8"))
_UNUSED = (".input_scale", ".activation_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub")
_SCALES: Mapping[str, tuple[str, ...]] = {"scales": (".weight_scale", ".weight_scale_inv")}
_ZEROS = {"zeros": (".weight_zero_point",), "order": (".weight_g_idx",)}
_OF_GPTQ = {"scales": (".scales",), "zeros": (".qzeros",), "order": (".g_idx",)}
LAYOUTS: Mapping[str, Layout] = {
    "scale of a weight": Layout(
        ".weight", _F8, _of_codes, _unpack_scaled, _SCALES, unused=(*_UNUSED, ".weight_zero_point")
    ),
    "int-quantized": Layout(".weight", _I8, _of_codes, _unpack_scaled, {**_SCALES, **_ZEROS}, unused=_UNUSED),
    "pack-quantized": Layout(
        ".weight_packed",
        _I32,
        _of_words,
        _unpack_words,
        {**_SCALES, **_ZEROS, "shape": (".weight_shape",)},
        needed=("scales", "shape"),
        unused=_UNUSED,
    ),
    "nvfp4-pack-quantized": Layout(
        ".weight_packed",
        _U8,
        _of_bytes,
        _unpack_fp4,
        {**_SCALES, "divisor": (".weight_global_scale",)},
        needed=("scales", "divisor"),
        unused=_UNUSED,
    ),
    "mxfp4-pack-quantized": Layout(".weight_packed", _U8, _of_bytes, _unpack_fp4, _SCALES, unused=_UNUSED),
    "two scales of a weight": Layout(
        ".weight",
        _U8,
        _of_bytes,
        _unpack_fp4,
        {**_SCALES, "factor": (".weight_scale_2",)},
        needed=("scales", "factor"),
        unused=_UNUSED,
    ),
    "gptq": Layout(".qweight", _I32, _of_gptq, _unpack_gptq, _OF_GPTQ, needed=("scales", "zeros")),
    "gptq_v2": Layout(".qweight", _I32, _of_gptq, _unpack_gptq, _OF_GPTQ, needed=("scales", "zeros")),
    "awq": Layout(".qweight", _I32, _of_awq, _unpack_awq, {"scales": (".scales",), "zeros": (".qzeros",)}),
    "gguf": Layout(
        ".codes",
        frozenset({"I8", "U8"}),
        _of_bytes,
        _unpack_canonical,
        {"scales": (".scales",), "offsets": (".offsets",)},
    ),
    "nf4": Layout(
        ".weight",
        _U8,
        _of_line,
        _unpack_nf4,
        {
            "scales": (".weight.absmax",),
            "state": (".weight.quant_state.bitsandbytes__nf4",),
            "nested": (".weight.nested_absmax",),
            "nested_table": (".weight.nested_quant_map",),
        },
        needed=("scales", "state"),
        unused=(".weight.quant_map",),
    ),
    "rows to round": Layout(".weight", frozenset(FLOATS), _of_codes, _round_rows, {}, needed=()),
    "columns to round": Layout(".weight", frozenset(FLOATS), _of_codes, _round_columns, {}, needed=()),
    "blocks of experts": Layout("_blocks", _U8, _of_experts, _unpack_fp4, {"scales": ("_scales",)}, weight=""),
}
"""The layouts by the name that forms give."""
