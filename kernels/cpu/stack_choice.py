"""Choose the kernel of packed decoder layers by the seconds of whole layers.

Products measured one by one say too little: all layers as one call of decoder.cpp save the dispatch between products,
and a product that is repeated finds its weight in the cache. So a few whole layers are measured, enough that their
weights come from memory as in a step.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from crossdock.kernels.attention import CHUNK_FROM, AttentionBatch, amx_takes, cpp_attention
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.cpu_attention import CpuAttention
from crossdock.kernels.cpu.decoder import DecoderLayer, DecoderShape, DecoderStack, Weight
from crossdock.kernels.cpu.huge_pages import HugePages
from crossdock.kernels.cpu.linear import ROWS
from crossdock.kernels.cpu.measure import Cells
from crossdock.kernels.cpu.packed_linear import CodeForm
from crossdock.kernels.cpu.remembered_seconds import measured_choice
from crossdock.kernels.options import Kernel

_SAMPLE_BYTES = 64 << 20  # of weights measured: more than the third-level cache that one process has to itself
CHUNK_ROWS = 64  # from which a measured step is one chunk of a prompt; fewer rows are decodes
CONTEXT = 64  # tokens of each decode
_PAGE_SIZE = 16


def sample_of(
    shape: DecoderShape, num_layers: int, dtype: torch.dtype, form: CodeForm | None = None
) -> tuple[DecoderShape, int]:
    """Return layers to measure in place of a model's, their shape and number: their weights take `_SAMPLE_BYTES`.

    A layer of a large model is narrowed to an equal share of its heads and of its intermediate size, as tensor
    parallelism would.
    """
    while (
        _layer_bytes(shape, dtype, form) > _SAMPLE_BYTES
        and shape.num_kv_heads % 2 == 0
        and shape.intermediate % 32 == 0
    ):
        heads = shape.num_heads // 2
        kv_heads = shape.num_kv_heads // 2
        shape = replace(shape, num_heads=heads, num_kv_heads=kv_heads, intermediate=shape.intermediate // 2)
    return shape, min(num_layers, -(-_SAMPLE_BYTES // _layer_bytes(shape, dtype, form)))


def stack_choice(
    shape: DecoderShape,
    num_layers: int,
    dtype: torch.dtype,
    kernels: Sequence[Kernel],
    form: CodeForm,
) -> KernelChoice:
    """Return the choice for a model's decoder layers with packed weights. See `measured_choice`.

    Takes about two seconds, at the first start on a machine.

    Raises:
        OSError: the steps between products cannot be compiled.
    """
    sample = sample_of(shape, num_layers, dtype, form)
    key = {"layers": num_layers, "shape": str(shape), "dtype": str(dtype), "form": list(form)}
    cells = partial(stack_cells, *sample, dtype, kernels, form=form)
    return measured_choice("decoder layers", key, kernels, ROWS, cells)


def stack_cells(
    shape: DecoderShape,
    num_layers: int,
    dtype: torch.dtype,
    kernels: Sequence[Kernel],
    rows: Sequence[int],
    form: CodeForm | None = None,
) -> Cells:
    """Return one call of whole layers for each kernel and each number of rows.

    A step of fewer than 64 rows is decodes, each after 64 tokens. A larger step is one chunk that begins a prompt.
    """
    layer = _layer(shape, dtype, form)
    stacks = {
        kernel: DecoderStack(shape, [layer] * num_layers, only(kernel), _attention, with_amx=True) for kernel in kernels
    }
    batches = {count: _batch(count) for count in rows}
    num_pages = max(int(batch.page_table.max()) + 1 for batch in batches.values())
    size = num_pages, shape.num_kv_heads, num_layers, 2, _PAGE_SIZE, shape.head_dim
    pool = HugePages().take(prod(size), dtype).view(size).fill_(0.1)  # as a server's
    # One list for all calls: a stack binds its layers again when it meets another.
    pages = [(pool[:, :, i, 0], pool[:, :, i, 1]) for i in range(num_layers)]
    cells: Cells = {}
    for count, batch in batches.items():
        hidden = torch.full((count, shape.hidden), 0.1, dtype=dtype)
        angles = torch.full((count, shape.head_dim), 0.7, dtype=dtype)
        for kernel, stack in stacks.items():
            cells[kernel, count] = [partial(stack, hidden, angles, angles, pages, batch)]
    return cells


def _layer_bytes(shape: DecoderShape, dtype: torch.dtype, form: CodeForm | None) -> int:
    return sum(each.num_bytes(dtype, form) for each in shape.matrices(1))


def _layer(shape: DecoderShape, dtype: torch.dtype, form: CodeForm | None) -> DecoderLayer:
    """Return a layer of arbitrary weights whose results stay finite: seconds do not depend on the numbers."""

    def matrix(out: int, inputs: int) -> Weight:
        if form is not None:
            return form.constant(out, inputs)
        return torch.full((out, inputs), 0.5 / inputs, dtype=torch.bfloat16).to(dtype)  # as most checkpoints

    E, D, I = shape.hidden, shape.head_dim, shape.intermediate  # noqa: E741
    norm = torch.ones(E, dtype=dtype)
    return DecoderLayer(
        input_norm=norm,
        q=matrix(shape.num_heads * D, E),
        k=matrix(shape.num_kv_heads * D, E),
        v=matrix(shape.num_kv_heads * D, E),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        out=matrix(E, shape.num_heads * D),
        post_norm=norm,
        gate=matrix(I, E),
        up=matrix(I, E),
        down=matrix(E, I),
        window=None,
    )


def _attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
    """Compute the attention between library products as one call of decoder.cpp does: only products are compared."""
    if batch.max_query_len < CHUNK_FROM or not amx_takes(q.dtype, k_pages, v_pages):
        return CpuAttention("native").paged_attention(q, k_pages, v_pages, batch, **options)
    out = q.new_empty(q.shape)
    cpp_attention(q, k_pages, v_pages, batch, slice(0, len(batch.kv_len)), out, **options, by_amx=True)
    return out


def _batch(rows: int) -> AttentionBatch:
    """Return a step of this many rows: decodes, or one chunk."""
    sequences, query_len = (rows, 1) if rows < CHUNK_ROWS else (1, rows)
    kv_len = CONTEXT if rows < CHUNK_ROWS else rows
    pages = torch.arange(sequences * -(-kv_len // _PAGE_SIZE), dtype=torch.int32).view(sequences, -1)
    positions = torch.arange(kv_len - query_len, kv_len)
    slots = pages[:, positions // _PAGE_SIZE].long() * _PAGE_SIZE + positions % _PAGE_SIZE
    return AttentionBatch(
        query_start=torch.arange(sequences + 1, dtype=torch.int32) * query_len,
        kv_len=torch.full((sequences,), kv_len, dtype=torch.int32),
        page_table=pages,
        slots=slots.flatten(),
        max_query_len=query_len,
        max_kv_len=kv_len,
        num_decodes=sequences if query_len == 1 else 0,
    )
