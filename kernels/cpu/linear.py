"""Linear layers on a CPU: one weight in the format of each kernel that a `KernelChoice` names."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.cpu.build import cpu_flags, cpu_library
from crossdock.kernels.cpu.choice import PREFERENCE, KernelChoice
from crossdock.kernels.cpu.huge_pages import HugePages
from crossdock.kernels.cpu.measure import Cells
from crossdock.kernels.cpu.packed_linear import (
    CodeForm,
    DequantisedProduct,
    MatrixStruct,
    PackedPanels,
    PackedProduct,
    in_int8,
    product,
)
from crossdock.kernels.cpu.remembered_seconds import measured_choice
from crossdock.kernels.options import CpuKernels, Kernel

_PANEL = 16  # outputs that lie together in a packed weight
_ROW_MULTIPLE = 8
ROWS = (1, 4, 8, 16, 32, 64, 256)  # numbers of rows that are measured; 1,024 chooses as 256 does
_MAX_BYTES = 64 << 20  # of weights measured per shape: more than stays in the caches, as a model's layers are
_WHERE_ROUNDED = "rows are rounded to int8 on CPUs with AVX512-VNNI, or AVX2 and no AVX-512"
_SLICE_BYTES = 8 << 20  # of a weight that is larger, so many are measured at a time


def padded(rows: int) -> int:
    """Return how many rows to compute for `rows` of a step: the next multiple of 8.

    oneDNN prepares a kernel for each number of rows that it meets, and keeps the last 1,024. Below 8 the number stays:
    there a row costs time.
    """
    return -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE if rows > _ROW_MULTIPLE else rows


def decoder_library(dtype: torch.dtype) -> ctypes.CDLL:
    """Return decoder.cpp for rows of a dtype, float32 or bfloat16. OSError: it cannot be compiled."""
    return cpu_library("decoder", "ROW_TYPE=bf16" if dtype is torch.bfloat16 else "ROW_TYPE=float")


def fits_bfloat16(weight: Tensor) -> bool:
    """Report whether bfloat16 holds every number of a weight, as that of a bfloat16 checkpoint in a float32 model."""
    if weight.dtype is not torch.float32:
        return weight.dtype is torch.bfloat16
    low = weight.contiguous().view(torch.int16).view(-1, 2)[:, int(sys.byteorder == "big")]
    return not torch.count_nonzero(low)  # without copies, which would take gigabytes of an output projection


def usable_kernels(dtype: torch.dtype, setting: CpuKernels = "auto", fits: bool = True) -> tuple[Kernel, ...]:
    """Return the kernels that compute plain linears of `dtype` on this machine and that `cpu_kernels` allows.

    `fits`: bfloat16 holds the numbers of all weights.

    Raises:
        ValueError: `cpu_kernels` names a kernel that cannot run; the message gives the reason.
    """
    reasons: dict[Kernel, str] = {"int8": "the weights are plain; quantization int8 rounds them too"}
    reasons["amx"] = "it computes attention"
    if dtype not in (torch.bfloat16, torch.float32):
        reasons["native"] = f"it computes bfloat16 and float32, and the model is {str(dtype).removeprefix('torch.')}"
    elif not fits:
        reasons["native"] = "it keeps weights in bfloat16, which does not hold those of this model"
    elif dtype is torch.bfloat16 and "avx512_bf16" not in cpu_flags():
        reasons["native"] = "this CPU has no AVX512-BF16"
    elif setting in ("auto", "native"):
        try:
            cpu_library("packed")
            decoder_library(dtype)
        except OSError as error:
            reasons["native"] = str(error)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        reasons["onednn"] = "this torch was built without oneDNN"
    elif dtype not in (torch.bfloat16, torch.float32):
        reasons["onednn"] = "it is used for bfloat16 and float32"
    elif dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        reasons["onednn"] = "oneDNN has no bfloat16 on this CPU"
    if setting == "auto":
        return tuple(kernel for kernel in PREFERENCE if kernel not in reasons)
    if setting in reasons:
        raise ValueError(f"cpu_kernels {setting}: {reasons[setting]}; auto chooses a kernel that runs")
    return (setting,)


def rounds_rows() -> bool:
    """Return whether products of rows rounded to int8 (rounded.h) are compiled for this CPU."""
    try:
        return bool(cpu_library("packed").crossdock_rounds_rows())
    except OSError:
        return False


def usable_packed_kernels(dtype: torch.dtype, setting: CpuKernels = "auto") -> tuple[Kernel, ...]:
    """Return the kernels that compute packed weights by rows of `dtype`, and that `cpu_kernels` allows.

    Raises:
        ValueError: `cpu_kernels` names a kernel that cannot run; the message gives the reason.
    """
    reasons: dict[Kernel, str] = {"onednn": "the weights are packed; native, int8 and torch read them"}
    if dtype not in (torch.bfloat16, torch.float32):
        reasons |= dict.fromkeys(("native", "int8", "torch"), "packed weights are computed in bfloat16 and float32")
    elif not rounds_rows():
        reasons["int8"] = _WHERE_ROUNDED
    try:
        cpu_library("packed")
    except OSError as error:
        reasons |= dict.fromkeys(("native", "int8", "torch"), str(error))
    if setting == "auto":  # never int8: it rounds
        return tuple(kernel for kernel in ("native", "torch") if kernel not in reasons)
    if setting in reasons:
        raise ValueError(f"cpu_kernels {setting}: {reasons[setting]}; auto chooses a kernel that runs")
    return (setting,)


def why_not_int8(dtype: torch.dtype, setting: CpuKernels = "auto") -> str | None:
    """Return why a model of `dtype` cannot have int8 weights on this CPU; None if it can."""
    if setting not in ("auto", "native"):
        return f"it is computed by native kernels, and cpu_kernels is {setting}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"activations must be bfloat16 or float32, and the model is {str(dtype).removeprefix('torch.')}"
    try:
        cpu_library("packed")
        if dtype is torch.float32 or "avx512_bf16" in cpu_flags():  # else layers are no one call
            decoder_library(dtype)
    except OSError as error:
        return str(error)
    return None if rounds_rows() else _WHERE_ROUNDED


class NativeLinear:
    """x [T, K] to [T, N] by packed.cpp. A row's result does not depend on the other rows.

    A weight of float32 is kept in bfloat16, and widened as it is multiplied: its numbers must fit.

    Raises:
        OSError: packed.cpp cannot be compiled.
    """

    def __init__(self, weight: Tensor, memory: HugePages | None = None) -> None:  # [N, K]
        self._dtype = weight.dtype
        self.packed = _pack(weight.bfloat16(), memory or HugePages())
        self.struct = MatrixStruct(0, *weight.shape, weight.shape[1], False, self.packed.data_ptr(), None, None)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The memory of the weight."""
        return (self.packed,)

    def rows(self, numbers: Tensor) -> Tensor:  # [...] int64, of outputs
        """Return these rows of the weight as it was, [..., K]."""
        return self.packed[numbers // _PANEL, :, numbers % _PANEL].flatten(-2).to(self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return product(self.struct, x)


class OneDnnLinear:
    """x [T, K] to [T, N] by oneDNN, over a weight in the blocks that oneDNN chooses for this CPU."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64)  # 64 rows: all numbers have one format
        self.tensors: Sequence[Tensor] = (self._weight,)

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return out


class TorchLinear:
    """x [T, K] to [T, N] by `F.linear`, over a copy of the weight: the file that was loaded can be closed."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self._weight = weight.clone()
        self.tensors: Sequence[Tensor] = (self._weight,)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


Linear: TypeAlias = NativeLinear | OneDnnLinear | TorchLinear | PackedProduct | DequantisedProduct
ONE_CALL: tuple[Kernel, ...] = ("native", "int8")  # kernels whose weights decoder.cpp reads
FORMATS: dict[Kernel, Callable[[Tensor, HugePages | None], Linear]] = {
    "native": NativeLinear,
    "int8": lambda weight, memory: PackedProduct(PackedPanels.of(in_int8(weight), memory=memory), is_rounded=True),
    "onednn": lambda weight, _: OneDnnLinear(weight),
    "torch": lambda weight, _: TorchLinear(weight),
}
PACKED_FORMATS: dict[Kernel, Callable[[PackedPanels], Linear]] = {
    "native": PackedProduct,
    "int8": partial(PackedProduct, is_rounded=True),
    "torch": DequantisedProduct,
}


def formats_of(
    weight: Tensor | PackedPanels, kernels: Sequence[Kernel], memory: HugePages | None = None
) -> dict[Kernel, Linear]:
    """Return products with a weight by each of `kernels`. Those with packed weights share the codes."""
    if isinstance(weight, PackedPanels):
        return {kernel: PACKED_FORMATS[kernel](weight) for kernel in kernels}
    return {kernel: FORMATS[kernel](weight, memory) for kernel in kernels}


@dataclass(frozen=True, slots=True)
class Weights:
    """The matrices of a model that have one shape."""

    out_features: int
    in_features: int
    count: int

    def num_bytes(self, dtype: torch.dtype, form: CodeForm | None = None) -> int:
        return int(self.out_features * self.in_features * self.count * _bytes_per_weight(dtype, form))


def linear_choice(
    name: str,
    weights: Weights,
    dtype: torch.dtype,
    kernels: Sequence[Kernel],
    form: CodeForm,
) -> KernelChoice:
    """Return the choice for products of one shape with packed weights. See `measured_choice`.

    Takes about a second, at the first start on a machine.
    """
    shape = [weights.out_features, weights.in_features, weights.count]
    key = {"weights": shape, "dtype": str(dtype), "form": list(form)}
    cells = partial(linear_cells, weights, dtype, kernels, form=form)
    return measured_choice(name, key, kernels, ROWS, cells)


def linear_cells(
    weights: Weights,
    dtype: torch.dtype,
    kernels: Sequence[Kernel],
    rows: Sequence[int],
    form: CodeForm | None = None,
) -> Cells:
    """Return calls for each kernel and each number of rows.

    A call is one matrix, or a slice of its outputs small enough for a short call. Several slices are called in turn: a
    weight that stays in the cache would make all kernels too fast.
    """
    cells: Cells = {}
    heights = {count: _slice_height(weights, count, _bytes_per_weight(dtype, form)) for count in rows}
    for height in set(heights.values()):
        one: Tensor | PackedPanels = torch.full((height, weights.in_features), 2**-7, dtype=dtype)
        if form is not None:
            one = PackedPanels.of(form.constant(height, weights.in_features))
        size = Weights(height, weights.in_features, 1).num_bytes(dtype, form)
        most = min(weights.count * weights.out_features // height, _MAX_BYTES // size)
        flops = 2 * height * weights.in_features  # of a row
        used = {
            count: min(max(1, most), max(1, int(5 * _call_flops() / (count * flops))))
            for count in rows
            if heights[count] == height
        }
        memory = HugePages()  # one for all: a small matrix alone on a page of 2 MiB would take eight times its bytes
        copies = [
            formats_of(one if isinstance(one, Tensor) else one.moved(memory), kernels, memory)
            for _ in range(max(used.values()))
        ]
        for kernel in kernels:
            linears = [formats[kernel] for formats in copies]
            for count, number in used.items():
                x = torch.full((count, weights.in_features), 0.01, dtype=dtype)
                cells[kernel, count] = [partial(linear, x) for linear in linears[:number]]
    return cells


def _bytes_per_weight(dtype: torch.dtype, form: CodeForm | None) -> float:
    return dtype.itemsize if form is None else form.bytes_per_weight


def _slice_height(weights: Weights, rows: int, width: float) -> int:
    """Return how many outputs of a matrix one call computes, a multiple of 48 unless it is all of them."""
    most = min(_SLICE_BYTES / width, _call_flops() / (2 * rows)) / weights.in_features
    return min(weights.out_features, max(int(most) // 48 * 48, 48))


def _call_flops() -> float:
    return 1e8 * torch.get_num_threads()


class ChosenLinear:
    """A linear layer without bias: x [T, K] to [T, N], by the kernel that `choice` has for T rows.

    Linears that share `memory` waste less of its pages.
    """

    def __init__(self, weight: Tensor | PackedPanels, choice: KernelChoice, memory: HugePages | None = None) -> None:
        self._choice = choice
        self.formats = formats_of(weight, choice.kernels, memory)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The memory of the weight in all formats."""
        return [each for linear in self.formats.values() for each in linear.tensors]

    def __call__(self, x: Tensor) -> Tensor:
        return self.formats[self._choice.at(len(x))](x)


def _pack(weight: Tensor, memory: HugePages) -> Tensor:
    """Pack [N, K] into panels [N/16, K/n, 16, n], so that each load feeds 16 outputs with the n inputs of 4 bytes."""
    (N, K) = weight.shape
    inputs = 4 // weight.itemsize
    taken = memory.take(weight.numel(), weight.dtype).view(N // _PANEL, K // inputs, _PANEL, inputs)
    # Copied as numbers of 4 bytes: half as many as there are weights in bfloat16.
    panels = weight.contiguous().view(torch.int32).view(N // _PANEL, _PANEL, K // inputs).transpose(1, 2)
    taken.view(torch.int32).squeeze(-1).copy_(panels)
    return taken


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Return both weights [I, E] as one [2 I, E] in which 16 outputs of one alternate with 16 of the other.

    So a thread that computes a gate also computes the number it multiplies.
    """
    both = torch.stack([gate.view(-1, _PANEL, gate.shape[1]), up.view(-1, _PANEL, up.shape[1])], dim=1)
    return both.view(2 * len(gate), -1)
