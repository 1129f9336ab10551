"""A stack of Llama-shaped decoder layers, without the dispatch of operators between them.

Runs in one of two ways, whichever was faster here for as many rows: all layers as one call of decoder.cpp, whose rows
do not depend on the batch; or a library's products, with layer_steps.cpp and paged attention between them.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from crossdock.kernels.attention import CHUNK_FROM, AttentionBatch, amx_takes
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.kernels.cpu.choice import KernelChoice
from crossdock.kernels.cpu.huge_pages import HugePages
from crossdock.kernels.cpu.layer_steps import (
    Adapted,
    HeadSteps,
    add_and_norm,
    finish_heads,
    silu_and_multiply,
    steps_library,
)
from crossdock.kernels.cpu.linear import (
    ONE_CALL,
    ChosenLinear,
    NativeLinear,
    Weights,
    decoder_library,
    interleave,
    padded,
)
from crossdock.kernels.cpu.packed_linear import MatrixStruct, PackedPanels, PackedProduct
from crossdock.kernels.cpu.row_deltas import RowDeltas, adapted
from crossdock.kernels.options import Kernel
from crossdock.kernels.packed import PackedMatrix

Weight: TypeAlias = Tensor | PackedMatrix
_NO_ADAPTERS = RowDeltas(())
_NO_CHUNK = 2**63 - 1  # rows, the most that C++ knows: it then plans no chunk
_MLP_ROWS = 512
"""Rows whose gates and ups are in memory at a time: the second-level cache holds more of them, and Linux clears fewer
new pages. (2,048 rows of SmolLM2-135M on two cores of a Xeon with AMX: 421 ms a step against 540; 2026-11-27.)
"""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The weights of one layer in transformers' layout, [out, in]; all bfloat16, or all float32, or matrices packed.

    h = x + out(attention(rotate(q_norm(q(norm(x)))), …)); y = h + down(silu(gate(norm(h))) * up(norm(h)))
    """

    input_norm: Tensor  # [E]
    q: Weight  # [Hq * D, E]
    k: Weight  # [Hkv * D, E]
    v: Weight  # [Hkv * D, E]
    qkv_bias: Tensor | None  # [(Hq + 2 Hkv) * D]
    q_norm: Tensor | None  # [D], RMS norm of every head
    k_norm: Tensor | None  # [D]
    out: Weight  # [E, Hq * D]
    post_norm: Tensor  # [E]
    gate: Weight  # [I, E]
    up: Weight  # [I, E]
    down: Weight  # [E, I]
    window: int | None

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Return the weights of all products."""
        return self.q, self.k, self.v, self.out, self.gate, self.up, self.down


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
        """Return why the kernels cannot run these sizes; None if they can."""
        if self.head_dim % 32 or self.head_dim > 256:
            return f"head_dim {self.head_dim} is not a multiple of 32 up to 256"
        if self.hidden % 16 or self.intermediate % 16:
            return "hidden and intermediate sizes are not multiples of 16"
        if self.num_heads // self.num_kv_heads > 96:
            return "more than 96 query heads share a key"
        return None

    def matrices(self, num_layers: int) -> list[Weights]:
        """Return the matrices of the layers: q, k and v; out; gate and up; down."""
        heads = self.num_heads + 2 * self.num_kv_heads
        E = self.hidden
        return [
            Weights(heads * self.head_dim, E, num_layers),
            Weights(E, self.num_heads * self.head_dim, num_layers),
            Weights(2 * self.intermediate, E, num_layers),
            Weights(E, self.intermediate, num_layers),
        ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("input_norm", "qkv_bias", "q_norm", "k_norm", "post_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("window", ctypes.c_int64),
        *((name, MatrixStruct) for name in ("qkv", "out", "gate_up", "down")),
    ]


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
        ("adapters", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "chunk_from")),
    ]


@dataclass(frozen=True, slots=True)
class _HeldLayer:
    """Copies of the weights of one layer: its products, and vectors as in `DecoderLayer`."""

    qkv: ChosenLinear
    out: ChosenLinear
    gate_up: ChosenLinear
    down: ChosenLinear
    input_norm: Tensor
    post_norm: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None

    @classmethod
    def of(cls, layer: DecoderLayer, choice: KernelChoice, memory: HugePages, frees_codes: bool) -> "_HeldLayer":
        def linear(*weights: Weight, every_panel: bool = False) -> ChosenLinear:
            return ChosenLinear(_joined(weights, every_panel, memory, frees_codes), choice, memory)

        def copy(vector: Tensor | None) -> Tensor | None:
            return None if vector is None else vector.clone()

        return cls(
            linear(layer.q, layer.k, layer.v),
            linear(layer.out),
            linear(layer.gate, layer.up, every_panel=True),
            linear(layer.down),
            layer.input_norm.clone(),
            layer.post_norm.clone(),
            copy(layer.qkv_bias),
            copy(layer.q_norm),
            copy(layer.k_norm),
            layer.window,
        )

    @property
    def tensors(self) -> Iterator[Tensor]:
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            yield from linear.tensors
        vectors = self.input_norm, self.post_norm, self.qkv_bias, self.q_norm, self.k_norm
        yield from (vector for vector in vectors if vector is not None)


def _joined(
    weights: Sequence[Weight], every_panel: bool, memory: HugePages, frees_codes: bool
) -> Tensor | PackedPanels:
    """Return weights of one input as one: one after the other, or 16 outputs of each in turn."""
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    packed = [weight for weight in weights if isinstance(weight, PackedMatrix)]
    if plain and packed:
        raise ValueError("of the weights of one input, some are packed and others plain")
    if packed:
        return PackedPanels.of(*packed, every_panel=every_panel, memory=memory, frees=frees_codes)
    return interleave(*plain) if every_panel else torch.cat(plain)


class DecoderStack:
    """Layers over the views of one KV pool. `attention` is `paged_attention` of some backend, for library products.

    `with_amx`: in one call, a chunk's attention runs by AMX where the CPU and the pages allow (`amx_takes`).

    Weights are copied, a layer at a time: nothing here refers to the tensors of `layers`. `frees_codes`: the memory of
    packed matrices goes back to the machine as they are copied, so nothing may read them afterwards.

    Raises:
        OSError: a kernel cannot be compiled.
        ValueError: packed.h cannot compute a packed matrix, or those of one input are of unlike forms.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Iterable[DecoderLayer],
        choice: KernelChoice,
        attention: Callable[..., Tensor],
        frees_codes: bool = False,
        with_amx: bool = False,
    ) -> None:
        self._shape = shape
        self._choice = choice
        self._attention = attention
        self._with_amx = with_amx
        steps_library()
        memory = HugePages()
        self._layers: list[_HeldLayer] = []
        is_one_call = True
        for layer in layers:
            self._layers.append(_HeldLayer.of(layer, choice, memory, frees_codes))
            is_one_call = is_one_call and _is_one_call(layer)
            del layer  # its matrices may be freed before the next layer is asked for
        self.windows = [layer.window for layer in self._layers]
        self.num_layers = len(self.windows)
        self._one_call = {kernel for kernel in choice.kernels if kernel in ONE_CALL and is_one_call}
        stacks = [_NativeStack(shape, self._layers, kernel, with_amx) for kernel in self._one_call]
        self._own = stacks[0] if stacks else None
        self._steps: list[HeadSteps] = []
        self._pages: Sequence[tuple[Tensor, Tensor]] = ()

    @property
    def kernels(self) -> Sequence[Kernel]:
        """Return the kernels that compute products."""
        return self._choice.kernels

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Return the memory of all weights."""
        return [each for layer in self._layers for each in layer.tensors]

    def with_weights(self, layers: Sequence[DecoderLayer]) -> "DecoderStack":
        """Return a stack of the same shape and kernels with the weights of other layers."""
        return DecoderStack(self._shape, layers, self._choice, self._attention, with_amx=self._with_amx)

    def drop(self) -> None:
        """Give up the weights. Only `with_weights` may be called then."""
        self._layers = []
        self._own = None

    def __call__(
        self,
        hidden: Tensor,  # [T, E]
        cos: Tensor,  # [T, D]
        sin: Tensor,  # [T, D]
        pages: Sequence[tuple[Tensor, Tensor]],
        batch: AttentionBatch,
        adapters: RowDeltas = _NO_ADAPTERS,
        kept: Sequence[int] = (),
        keep: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Compute all layers over a flat batch; return [T, E]. Keys and values are stored to `pages`.

        `keep` is called with each layer of `kept` and its input [T, E].
        """
        if pages is not self._pages:
            self._bind(pages)
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        cos = cos.contiguous()
        sin = sin.contiguous()
        assert hidden.dtype == cos.dtype == sin.dtype == pages[0][0].dtype
        is_causal = batch.key_end is None  # the attention of decoder.cpp is
        for first, end in pairwise(sorted({0, *kept, self.num_layers})):
            if keep is not None and first in kept:
                keep(first, hidden.clone())
            if self._own is not None and is_causal and self._choice.at(len(hidden)) in self._one_call:
                self._own.run(hidden, cos, sin, batch, adapters, range(first, end))
            else:
                self._run_steps(hidden, cos, sin, batch, adapters, range(first, end))
        return hidden

    def _bind(self, pages: Sequence[tuple[Tensor, Tensor]]) -> None:
        shape = self._shape
        self._steps = []
        for (keys, values), layer in zip(pages, self._layers, strict=True):
            assert keys.stride() == values.stride(), "keys and values of a layer have the same strides"
            page_stride, head_stride, _, _ = keys.stride()
            pointers = map(_pointer, (layer.qkv_bias, layer.q_norm, layer.k_norm))
            self._steps.append(
                HeadSteps(
                    shape.num_heads,
                    shape.num_kv_heads,
                    shape.head_dim,
                    keys.shape[2],
                    page_stride,
                    head_stride,
                    shape.qk_eps,
                    *pointers,
                    keys.data_ptr(),
                    values.data_ptr(),
                )
            )
        if self._own is not None:
            self._own.bind(pages)
        self._pages = pages

    def _run_steps(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        adapters: RowDeltas,
        layers: range,
    ) -> None:
        """Compute some layers over hidden [T, E], in place, a product or a step at a time.

        Inputs of products have a padded number of rows; the rows past T are zeros, and their results are not read.
        """
        shape = self._shape
        T = len(hidden)
        rows = padded(T)
        query_width = shape.num_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        normed = hidden.new_zeros(rows, shape.hidden)
        attended = hidden.new_zeros(rows, query_width)
        activated = hidden.new_zeros(rows, shape.intermediate)
        addend: Tensor | None = None
        change: Adapted | None = None  # of `addend`, by adapters
        pointers = adapters.pointers(T) if adapters.groups else None
        for number in layers:
            layer = self._layers[number]
            steps = self._steps[number]
            (keys, values) = self._pages[number]
            add_and_norm(hidden, addend, layer.input_norm, shape.eps, normed, change)
            qkv = layer.qkv(normed)
            change = adapted(pointers, number, normed, q=query_width, k=kv_width, v=kv_width)
            finish_heads(steps, qkv, cos, sin, batch, change)
            q = qkv[:T, :query_width].view(T, shape.num_heads, shape.head_dim)
            seen = self._attention(q, keys, values, batch, scale=shape.scale, window=layer.window)  # [T, Hq, D]
            attended[:T] = seen.view(T, query_width)
            addend = layer.out(attended)
            change = adapted(pointers, number, attended, out=shape.hidden)
            add_and_norm(hidden, addend, layer.post_norm, shape.eps, normed, change)
            count = _MLP_ROWS if pointers is None else rows  # pointers are those of all rows
            for first in range(0, rows, count):
                block = slice(first, first + count)
                gate_up = layer.gate_up(normed[block])
                change = adapted(pointers, number, normed, gate=shape.intermediate, up=shape.intermediate)
                silu_and_multiply(gate_up, min(count, T - first), activated[block], change)
            addend = layer.down(activated)
            change = adapted(pointers, number, activated, down=shape.hidden)
        if addend is not None:
            add_and_norm(hidden, addend, self._layers[-1].post_norm, shape.eps, None, change)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _is_one_call(layer: DecoderLayer) -> bool:
    """Return whether decoder.cpp computes a layer: with columns in order, and bfloat16 only with AVX512-BF16."""
    in_order = all(isinstance(each, Tensor) or each.columns is None for each in layer.matrices)
    return in_order and (layer.input_norm.dtype is torch.float32 or "avx512_bf16" in cpu_flags())


class _NativeStack:
    """All layers as one call of decoder.cpp."""

    def __init__(self, shape: DecoderShape, layers: Sequence[_HeldLayer], kernel: Kernel, with_amx: bool) -> None:
        self._shape = shape
        self._with_amx = with_amx
        norm = layers[0].input_norm
        self._chunk_from, self._scratch = _NO_CHUNK, norm.new_empty(0)
        self._library = decoder_library(norm.dtype)
        self._layers = (_Layer * len(layers))()  # points into tensors that `DecoderStack` keeps
        for structure, layer in zip(self._layers, layers, strict=True):
            for name in ("qkv", "out", "gate_up", "down"):
                own = getattr(layer, name).formats[kernel]
                assert isinstance(own, NativeLinear | PackedProduct)
                setattr(structure, name, own.struct)
            for name in ("input_norm", "qkv_bias", "q_norm", "k_norm", "post_norm"):
                setattr(structure, name, _pointer(getattr(layer, name)))
            structure.window = layer.window or 0
        self._stack = _Stack()

    def bind(self, pages: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Point the layers to the views of a pool."""
        shape = self._shape
        (keys, values) = pages[0]
        self._chunk_from = CHUNK_FROM if self._with_amx and amx_takes(keys.dtype, keys, values) else _NO_CHUNK
        for structure, (keys, values) in zip(self._layers, pages, strict=True):
            structure.keys, structure.values = keys.data_ptr(), values.data_ptr()
        page_stride, head_stride, _, _ = pages[0][0].stride()
        self._stack = _Stack(
            len(self._layers),
            shape.hidden,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate,
            shape.eps,
            shape.qk_eps,
            shape.scale,
            pages[0][0].shape[2],
            page_stride,
            head_stride,
            self._layers,
        )

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        adapters: RowDeltas,
        layers: range,
    ) -> None:
        """Compute some layers over hidden [T, E], in place."""
        shape = self._shape
        T = len(hidden)
        width = shape.hidden + shape.intermediate + (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        if self._scratch.numel() < T * width:  # kept: Linux would clear new pages for each step
            self._scratch = hidden.new_empty(T * width)
        table = batch.page_table.contiguous()
        pointers = adapters.pointers(T, layers.start) if adapters.groups else None
        arguments = _DecoderBatch(
            T,
            len(batch.kv_len),
            table.shape[1],
            *(t.data_ptr() for t in (batch.query_start, batch.kv_len, table, batch.slots, cos, sin)),
            *((None, 0) if pointers is None else (pointers.ctypes.data, adapters.rank)),
            self._chunk_from,
        )
        self._library.crossdock_decode_stack(
            ctypes.byref(self._part(layers)),
            ctypes.byref(arguments),
            ctypes.c_void_p(hidden.data_ptr()),
            ctypes.c_void_p(self._scratch.data_ptr()),
            torch.get_num_threads(),
        )

    def _part(self, layers: range) -> _Stack:
        """Return the stack of some layers."""
        if len(layers) == len(self._layers):
            return self._stack
        part = _Stack.from_buffer_copy(self._stack)
        part.num_layers = len(layers)
        part.layers = ctypes.pointer(self._layers[layers.start])
        return part
