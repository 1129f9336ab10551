"""The steps of a Llama-shaped layer between its matrix products, in C++ for any CPU; float32 and bfloat16."""

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.cpu.build import cpu_library


class HeadSteps(ctypes.Structure):
    """`struct HeadSteps` of layer_steps.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("Hq", "Hkv", "D", "page_size", "page_stride", "head_stride")),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("bias", "q_norm", "k_norm", "keys", "values")),
    ]


class Adapted(ctypes.Structure):
    """`struct Adapted` of layer_steps.cpp: what adapters change in the outputs of the products before a step."""

    _fields_ = [
        ("adapters", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer", "first", "count")),
        ("widths", ctypes.c_int64 * 3),
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("K", "is_in_turn")),
    ]


@lru_cache
def steps_library() -> ctypes.CDLL:
    """Return the compiled layer_steps.cpp.

    Raises:
        OSError: the file cannot be compiled; the message gives the reason.
    """
    library = cpu_library("layer_steps")
    pointer = ctypes.c_void_p
    integer = ctypes.c_int64
    flag = ctypes.c_int
    double = ctypes.c_double
    library.crossdock_add_and_norm.argtypes = [*[pointer] * 3, double, integer, integer, *[pointer] * 2, flag, flag]
    library.crossdock_finish_heads.argtypes = [*[pointer] * 5, integer, pointer, flag, flag]
    library.crossdock_silu_and_multiply.argtypes = [pointer, integer, integer, *[pointer] * 2, flag, flag]
    for name in ("add_and_norm", "finish_heads", "silu_and_multiply"):
        getattr(library, f"crossdock_{name}").restype = None
    return library


def add_and_norm(
    x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, out: Tensor | None, adapted: Adapted | None = None
) -> None:
    """Add `addend` to x [T, E] in place, and write the RMS norm of x times `weight` to the first T rows of `out`.

    `adapted`: is added to the first T rows of `addend` before. Without `out` there is no norm.
    """
    steps_library().crossdock_add_and_norm(
        x.data_ptr(),
        addend.data_ptr() if addend is not None else None,
        weight.data_ptr(),
        eps,
        *x.shape,
        out.data_ptr() if out is not None else None,
        _address(adapted),
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def finish_heads(
    steps: HeadSteps, qkv: Tensor, cos: Tensor, sin: Tensor, batch: AttentionBatch, adapted: Adapted | None = None
) -> None:
    """Finish the first T rows of qkv [.., (Hq + 2 Hkv) D] in place, and store their keys and values.

    Adds what is `adapted` and the bias, normalises heads, rotates queries and keys. cos, sin: [T, D].
    """
    steps_library().crossdock_finish_heads(
        ctypes.byref(steps),
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        batch.slots.data_ptr(),
        len(cos),
        _address(adapted),
        qkv.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def silu_and_multiply(x: Tensor, rows: int, out: Tensor, adapted: Adapted | None = None) -> None:
    """Write silu(gate) * up of the first `rows` rows of x [.., 2 I] to `out` [.., I].

    In x, 16 gates alternate with 16 ups; see `crossdock.kernels.cpu.linear.interleave`. What is `adapted` is
    added to x before.
    """
    steps_library().crossdock_silu_and_multiply(
        x.data_ptr(),
        rows,
        out.shape[1],
        out.data_ptr(),
        _address(adapted),
        x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def _address(adapted: Adapted | None) -> int | None:
    return None if adapted is None else ctypes.addressof(adapted)
