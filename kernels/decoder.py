"""A stack of Llama-shaped decoder layers as one call, which saves Python and operator dispatch between layers.

Needs a CPU with AVX512-BF16. A row's result does not depend on the other rows of the batch.
"""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.build import cpu_flags, cpu_library

_PANEL = 16  # outputs that lie together in a packed weight
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer in transformers' layout, [out, in]; all bfloat16.

    h = x + out(attention(rotate(q_norm(q(norm(x)))), …)); y = h + down(silu(gate(norm(h))) * up(norm(h)))
    """

    input_norm: Tensor  # [E]
    q: Tensor  # [Hq * D, E]
    k: Tensor  # [Hkv * D, E]
    v: Tensor  # [Hkv * D, E]
    qkv_bias: Tensor | None  # [(Hq + 2 Hkv) * D]
    q_norm: Tensor | None  # [D], RMS norm of every head
    k_norm: Tensor | None  # [D]
    out: Tensor  # [E, Hq * D]
    post_norm: Tensor  # [E]
    gate: Tensor  # [I, E]
    up: Tensor  # [I, E]
    down: Tensor  # [E, I]
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes and constants that all layers of a stack share."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    qk_eps: float
    scale: float

    def why_not(self) -> str | None:
        """Return why the kernel cannot run these sizes on this machine; None if it can."""
        if "avx512_bf16" not in cpu_flags():
            return "this CPU has no AVX512-BF16"
        if self.head_dim % 32 or self.head_dim > 256:
            return f"head_dim {self.head_dim} is not a multiple of 32 up to 256"
        if self.hidden % 16 or self.intermediate % 16:
            return "hidden and intermediate sizes are not multiples of 16"
        if self.num_heads // self.num_kv_heads > 96:
            return "more than 96 query heads share a key"
        return None


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            *("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "post_norm", "gate_up", "down"),
            *("keys", "values"),
        )
    ] + [("window", ctypes.c_int64)]


class _Stack(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_layers", "E", "Hq", "Hkv", "D", "I")),
        *((name, ctypes.c_double) for name in ("eps", "qk_eps", "scale")),
        *((name, ctypes.c_int64) for name in ("page_size", "page_stride", "head_stride")),
        ("layers", ctypes.POINTER(_Layer)),
    ]


class _DecoderBatch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("T", "S", "P")),
        *((name, ctypes.c_void_p) for name in ("query_start", "kv_len", "page_table", "slots", "cos", "sin")),
    ]


def pack(weight: Tensor) -> Tensor:
    """Pack [N, K] into panels [N/16, K/2, 16, 2], so that each load feeds 16 outputs with two inputs."""
    N, K = weight.shape
    panels = weight.view(N // _PANEL, _PANEL, K // 2, 2).transpose(1, 2)
    return _on_huge_pages(panels.numel()).view(panels.shape).copy_(panels)


def _on_huge_pages(num_elements: int) -> Tensor:
    """Return uninitialised bfloat16 memory on 2 MiB pages, if Linux grants them.

    A step streams through all weights. With 4 KiB pages it would also wait for the translation of addresses.
    """
    size = -(-2 * num_elements // _HUGE_PAGE) * _HUGE_PAGE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.bfloat16, count=num_elements)


def _interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Return the packed panels of both, alternating."""
    both = _on_huge_pages(2 * gate.numel()).view(len(gate), 2, *gate.shape[1:])
    both[:, 0], both[:, 1] = gate, up
    return both


class DecoderStack:
    """Packed layers over the views of one KV pool."""

    def __init__(self, shape: DecoderShape, layers: Sequence[DecoderLayer]) -> None:
        self._shape = shape
        self._library = cpu_library("decoder")
        self._tensors = [self._pack(layer) for layer in layers]  # the structures point into these tensors
        self._layers = (_Layer * len(layers))()
        for structure, tensors, layer in zip(self._layers, self._tensors, layers, strict=True):
            for name, tensor in tensors.items():
                setattr(structure, name, tensor.data_ptr() if tensor is not None else None)
            structure.window = layer.window or 0
        self._pages: Sequence[tuple[Tensor, Tensor]] = ()
        self._stack = _Stack()

    @staticmethod
    def _pack(layer: DecoderLayer) -> dict[str, Tensor | None]:
        return {
            "input_norm": layer.input_norm.contiguous(),
            "qkv": pack(torch.cat([layer.q, layer.k, layer.v])),
            "qkv_bias": layer.qkv_bias,
            "q_norm": layer.q_norm,
            "k_norm": layer.k_norm,
            "out": pack(layer.out),
            "post_norm": layer.post_norm.contiguous(),
            "gate_up": _interleave(pack(layer.gate), pack(layer.up)),
            "down": pack(layer.down),
        }

    def _bind(self, pages: Sequence[tuple[Tensor, Tensor]]) -> None:
        shape = self._shape
        for structure, (keys, values) in zip(self._layers, pages, strict=True):
            assert keys.stride() == values.stride(), "keys and values of a layer have the same strides"
            structure.keys, structure.values = keys.data_ptr(), values.data_ptr()
        page_stride, head_stride, _, _ = pages[0][0].stride()
        self._stack = _Stack(
            *(len(self._layers), shape.hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim),
            *(shape.intermediate, shape.eps, shape.qk_eps, shape.scale),
            *(pages[0][0].shape[2], page_stride, head_stride, self._layers),
        )
        self._pages = pages

    def __call__(
        self,
        hidden: Tensor,  # [T, E]
        cos: Tensor,  # [T, D]
        sin: Tensor,  # [T, D]
        pages: Sequence[tuple[Tensor, Tensor]],
        batch: AttentionBatch,
    ) -> Tensor:
        """Compute all layers over a flat batch; return [T, E]. Keys and values are stored to `pages`."""
        if pages is not self._pages:
            self._bind(pages)
        shape, T = self._shape, len(hidden)
        hidden, cos, sin = hidden.clone(memory_format=torch.contiguous_format), cos.contiguous(), sin.contiguous()
        assert hidden.dtype == cos.dtype == sin.dtype == torch.bfloat16
        width = shape.hidden + shape.intermediate + (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        scratch = torch.empty(T * width, dtype=torch.bfloat16)
        table = batch.page_table.contiguous()
        arguments = _DecoderBatch(
            *(T, len(batch.kv_len), table.shape[1]),
            *(t.data_ptr() for t in (batch.query_start, batch.kv_len, table, batch.slots, cos, sin)),
        )
        self._library.crossdock_decode_stack(
            ctypes.byref(self._stack),
            ctypes.byref(arguments),
            ctypes.c_void_p(hidden.data_ptr()),
            ctypes.c_void_p(scratch.data_ptr()),
            torch.get_num_threads(),
        )
        return hidden


class PackedLinear:
    """A linear layer with a packed bfloat16 weight and no bias: x [T, K] to [T, N]."""

    def __init__(self, weight: Tensor) -> None:
        self._library = cpu_library("decoder")
        self.out_features, self.in_features = weight.shape
        self._packed = pack(weight)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(len(x), self.out_features, dtype=torch.bfloat16)
        self._library.crossdock_linear(
            ctypes.c_void_p(x.data_ptr()),
            *(ctypes.c_int64(len(x)), ctypes.c_int64(self.in_features), ctypes.c_void_p(self._packed.data_ptr())),
            *(ctypes.c_int64(self.out_features), ctypes.c_void_p(out.data_ptr()), torch.get_num_threads()),
        )
        return out
