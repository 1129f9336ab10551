"""Linear layers on a CPU: one weight in the format of each kernel that a `KernelChoice` names."""

import ctypes
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
from crossdock.kernels.cpu.remembered_seconds import measured_choice
from crossdock.kernels.options import CpuKernels, Kernel

INT8_MAX = 127
_PANEL = 16  # outputs that lie together in a packed weight
_ROW_MULTIPLE = 8
ROWS = (1, 4, 8, 16, 32, 64, 256)  # numbers of rows that are measured; 1,024 chooses as 256 does
_MAX_BYTES = 64 << 20  # of weights measured per shape: more than stays in the caches, as a model's layers are
_SLICE_BYTES = 8 << 20  # of a weight that is larger, so many are measured at a time


def padded(rows: int) -> int:
    """Return how many rows to compute for `rows` of a step: the next multiple of 8.

    oneDNN prepares a kernel for each number of rows that it meets, and keeps the last 1,024. Below 8 the number stays:
    there a row costs time.
    """
    return -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE if rows > _ROW_MULTIPLE else rows


def usable_kernels(dtype: torch.dtype, setting: CpuKernels = "auto") -> tuple[Kernel, ...]:
    """Return the kernels that compute linears of `dtype` on this machine and that `cpu_kernels` allows.

    Raises:
        ValueError: `cpu_kernels` names a kernel that cannot run; the message gives the reason.
    """
    reasons: dict[Kernel, str] = {}
    if dtype is not torch.bfloat16:
        reasons["own"] = f"it computes bfloat16 and the model is {str(dtype).removeprefix('torch.')}"
    elif "avx512_bf16" not in cpu_flags():
        reasons["own"] = "this CPU has no AVX512-BF16"
    elif setting in ("auto", "own"):
        try:
            cpu_library("decoder")
        except OSError as error:
            reasons["own"] = str(error)
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


def why_not_int8(dtype: torch.dtype, setting: CpuKernels = "auto") -> str | None:
    """Return why a model of `dtype` cannot have int8 weights on this CPU; None if it can."""
    if setting not in ("auto", "own"):
        return f"it is computed by own kernels, and cpu_kernels is {setting}"
    if dtype is not torch.bfloat16:
        return f"activations must be bfloat16, and the model is {str(dtype).removeprefix('torch.')}"
    if missing := sorted({"avx512_bf16", "avx512_vnni"} - cpu_flags()):
        return f"this CPU has no {' and no '.join(missing)}"
    try:
        cpu_library("decoder")
    except OSError as error:
        return str(error)
    return None


class OwnLinear:
    """x [T, K] to [T, N] by decoder.cpp. A row's result does not depend on the other rows.

    Raises:
        OSError: decoder.cpp cannot be compiled.
    """

    scales: Tensor | None = None  # outputs have none

    def __init__(self, weight: Tensor, memory: HugePages | None = None) -> None:  # [N, K] bfloat16
        self._library = cpu_library("decoder")
        self.out_features, self.in_features = weight.shape
        self.packed = _pack(weight, memory or HugePages())

    def rows(self, numbers: Tensor) -> Tensor:  # [...] int64, of outputs
        """Return these rows of the weight as it was, [..., K]."""
        return self.packed[numbers // _PANEL, :, numbers % _PANEL].flatten(-2)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=torch.bfloat16)
        self._library.crossdock_linear(
            ctypes.c_void_p(x.data_ptr()),
            *(ctypes.c_int64(len(x)), ctypes.c_int64(self.in_features), ctypes.c_void_p(self.packed.data_ptr())),
            *(ctypes.c_int64(self.out_features), ctypes.c_void_p(out.data_ptr()), torch.get_num_threads()),
        )
        return out


class Int8Linear:
    """x [T, K] bfloat16 to [T, N] by decoder.cpp, over a weight of one byte. A row's result depends on no other row.

    The weight has one scale for each output. A row of x is rounded to int8 too, with a scale for each 64 of its
    numbers.

    Raises:
        OSError: decoder.cpp cannot be compiled.
    """

    def __init__(self, weight: Tensor, memory: HugePages | None = None) -> None:  # [N, K], both multiples of 16
        self._library = cpu_library("decoder")
        self.out_features, self.in_features = weight.shape
        largest = weight.abs().amax(1).float()
        self.scales = (largest / INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        numbers = (weight.float() / self.scales[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int16) + 128
        self.packed = _pack(numbers.to(torch.uint8), memory or HugePages())

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=torch.bfloat16)
        self._library.crossdock_linear_int8(
            *(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)), ctypes.c_int64(self.in_features)),
            *(ctypes.c_void_p(self.packed.data_ptr()), ctypes.c_void_p(self.scales.data_ptr())),
            *(ctypes.c_int64(self.out_features), ctypes.c_void_p(out.data_ptr()), torch.get_num_threads()),
        )
        return out


class OneDnnLinear:
    """x [T, K] to [T, N] by oneDNN, over a weight in the blocks that oneDNN chooses for this CPU."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 64)  # 64 rows: all numbers have one format

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return out


class TorchLinear:
    """x [T, K] to [T, N] by `F.linear`, over a copy of the weight: the file that was loaded can be closed."""

    def __init__(self, weight: Tensor) -> None:  # [N, K]
        self._weight = weight.clone()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight)


Linear: TypeAlias = OwnLinear | Int8Linear | OneDnnLinear | TorchLinear
PackedLinear: TypeAlias = OwnLinear | Int8Linear  # which decoder.cpp reads
PACKED: dict[Kernel, type[PackedLinear]] = {"own": OwnLinear, "int8": Int8Linear}
FORMATS: dict[Kernel, Callable[[Tensor], Linear]] = {
    "own": OwnLinear,
    "int8": Int8Linear,
    "onednn": OneDnnLinear,
    "torch": TorchLinear,
}


@dataclass(frozen=True, slots=True)
class Weights:
    """The matrices of a model that have one shape."""

    out_features: int
    in_features: int
    count: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.out_features * self.in_features * self.count * dtype.itemsize


def linear_choice(
    name: str, weights: Weights, dtype: torch.dtype, kernels: Sequence[Kernel], max_kernels: int = 2
) -> KernelChoice:
    """Return the choice for products of one shape. See `measured_choice`.

    Takes about a second, at the first start on a machine.
    """
    key = {"weights": [weights.out_features, weights.in_features, weights.count], "dtype": str(dtype)}
    cells = partial(linear_cells, weights, dtype, kernels)
    return measured_choice(name, key, kernels, ROWS, cells, max_kernels)


def linear_cells(weights: Weights, dtype: torch.dtype, kernels: Sequence[Kernel], rows: Sequence[int]) -> Cells:
    """Return calls for each kernel and each number of rows.

    A call is one matrix, or a slice of its outputs small enough for a short call. Several slices are called in turn: a
    weight that stays in the cache would make all kernels too fast.
    """
    cells: Cells = {}
    heights = {count: _slice_height(weights, count, dtype) for count in rows}
    for height in set(heights.values()):
        one = torch.full((height, weights.in_features), 0.01, dtype=dtype)
        most = min(weights.count * weights.out_features // height, _MAX_BYTES // (one.numel() * dtype.itemsize))
        used = {
            count: min(max(1, most), max(1, int(5 * _call_flops() / (2 * count * one.numel()))))
            for count in rows
            if heights[count] == height
        }
        for kernel in kernels:
            linears = [FORMATS[kernel](one.clone()) for _ in range(max(used.values()))]
            for count, copies in used.items():
                x = torch.full((count, weights.in_features), 0.01, dtype=dtype)
                cells[kernel, count] = [partial(linear, x) for linear in linears[:copies]]
    return cells


def _slice_height(weights: Weights, rows: int, dtype: torch.dtype) -> int:
    """Return how many outputs of a matrix one call computes, a multiple of 48 unless it is all of them."""
    most = min(_SLICE_BYTES / dtype.itemsize, _call_flops() / (2 * rows)) / weights.in_features
    return min(weights.out_features, max(int(most) // 48 * 48, 48))


def _call_flops() -> float:
    return 1e8 * torch.get_num_threads()


class ChosenLinear:
    """A linear layer without bias: x [T, K] to [T, N], by the kernel that `choice` has for T rows.

    Linears that share `memory` waste less of its pages.
    """

    def __init__(self, weight: Tensor, choice: KernelChoice, memory: HugePages | None = None) -> None:
        self._choice = choice
        self.formats: dict[Kernel, Linear] = {
            kernel: PACKED[kernel](weight, memory) if kernel in PACKED else FORMATS[kernel](weight)
            for kernel in choice.kernels
        }

    def __call__(self, x: Tensor) -> Tensor:
        return self.formats[self._choice.at(len(x))](x)


def _pack(weight: Tensor, memory: HugePages) -> Tensor:
    """Pack [N, K] into panels [N/16, K/n, 16, n], so that each load feeds 16 outputs with the n inputs of 4 bytes."""
    (N, K), inputs = weight.shape, 4 // weight.itemsize
    panels = weight.view(N // _PANEL, _PANEL, K // inputs, inputs).transpose(1, 2)
    return memory.take(panels.numel(), weight.dtype).view(panels.shape).copy_(panels)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Return both weights [I, E] as one [2 I, E] in which 16 outputs of one alternate with 16 of the other.

    So a thread that computes a gate also computes the number it multiplies.
    """
    both = torch.stack([gate.view(-1, _PANEL, gate.shape[1]), up.view(-1, _PANEL, up.shape[1])], dim=1)
    return both.view(2 * len(gate), -1)
