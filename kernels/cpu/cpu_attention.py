"""Paged attention on a CPU: attention.cpp, or torch's flash attention over gathered keys, whichever was faster here.

Only a prompt's chunk has enough rows that gathering its keys can pay. Decodes always run in attention.cpp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch, cpp_attention, library_for, reference_paged_attention
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.measure import Cells
from crossdock.kernels.cpu.remembered_seconds import measured_choice
from crossdock.kernels.options import CpuKernels

ROWS = (16, 64, 256)  # tokens of a chunk that are measured
LONG_CONTEXT = 1024
"""Tokens before a chunk from which it counts as deep in its prompt: then gathering takes a larger share."""

Heads: TypeAlias = tuple[int, int, int, torch.dtype]
"""Query heads, KV heads, head dimension, dtype."""


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """`paged_attention` by the kernel that `cpu_kernels` names, own or torch.

    For auto, and for onednn, which has no attention: the faster of the two, measured when a shape is first seen.
    """

    setting: CpuKernels = "auto"
    _choices: dict[Heads, tuple[KernelChoice, KernelChoice]] = field(default_factory=dict)

    def choices(self, heads: Heads) -> tuple[KernelChoice, KernelChoice]:
        """Return the choices by rows for chunks that begin a prompt and for chunks deep in one."""
        if heads not in self._choices:
            if self.setting in ("own", "torch"):
                single = only("own") if self.setting == "own" else KernelChoice("own", "torch", ROWS[0])
                self._choices[heads] = single, single
            else:
                self._choices[heads] = _measured(0, heads), _measured(2 * LONG_CONTEXT, heads)
        return self._choices[heads]

    def chosen(self) -> list[tuple[Heads, tuple[KernelChoice, KernelChoice]]]:
        """Return the shapes of heads seen so far, and their choices."""
        return list(self._choices.items())

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, **options: Any
    ) -> Tensor:
        """See `crossdock.kernels.attention.paged_attention`."""
        if library_for(q, None, k_pages, v_pages) is None:
            return reference_paged_attention(q, k_pages, v_pages, batch, **options)
        out = q.new_empty(len(q), q.shape[1], v_pages.shape[3])
        chunks = self._flash_chunks(q, k_pages, v_pages, batch, options)
        start = 0
        for chunk in chunks:
            flash_chunk(q, k_pages, v_pages, batch, chunk, out, options["scale"])
            if start < chunk:
                cpp_attention(q, k_pages, v_pages, batch, slice(start, chunk), out, **options)
            start = chunk + 1
        if start < len(batch.kv_len):
            cpp_attention(q, k_pages, v_pages, batch, slice(start, len(batch.kv_len)), out, **options)
        return out

    def _flash_chunks(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, options: dict[str, Any]
    ) -> list[int]:
        """Return the sequences of the batch that run in torch's flash attention, ascending."""
        head_dim = k_pages.shape[3]
        if batch.max_query_len < ROWS[0] or head_dim != v_pages.shape[3]:
            return []
        if options.get("softcap") is not None or options.get("sinks") is not None or batch.key_end is not None:
            return []
        near, deep = self.choices((q.shape[1], k_pages.shape[1], head_dim, q.dtype))
        if near.kernels == deep.kernels == ("own",):
            return []
        reach = options.get("window") or options.get("attention_chunk") or math.inf
        starts, lengths = batch.query_start.tolist(), batch.kv_len.tolist()
        chunks = []
        for sequence, length in enumerate(lengths):
            rows = starts[sequence + 1] - starts[sequence]
            choice = deep if length - rows >= LONG_CONTEXT else near
            if length <= reach and choice.at(rows) != "own":
                chunks.append(sequence)
        return chunks


def flash_chunk(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, sequence: int, out: Tensor, scale: float
) -> None:
    """Compute one sequence of the batch without a window, into its rows of `out`, by torch's flash attention.

    Flash attention has no mask for a chunk that continues a prompt. So the keys before the chunk, which every row
    sees, and the keys of the chunk are attended apart. Their logarithms of the sum of exponentials join the results.
    """
    first, end = batch.query_start[sequence : sequence + 2].tolist()
    kv_len, page_size = int(batch.kv_len[sequence]), k_pages.shape[2]
    pages = batch.page_table[sequence, : -(-kv_len // page_size)].long()
    k, v = (x.transpose(0, 1)[:, pages].flatten(1, 2)[None] for x in (k_pages, v_pages))  # [1, Hkv, tokens, D]
    rows, past = q[first:end].transpose(0, 1)[None], kv_len - (end - first)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_lse = flash(rows, k[:, :, past:kv_len], v[:, :, past:kv_len], 0.0, True, scale=scale)
    if past:
        before, before_lse = flash(rows, k[:, :, :past], v[:, :, :past], 0.0, False, scale=scale)
        share = torch.sigmoid(own_lse - before_lse)[..., None]  # [1, Hq, rows, 1]
        own = torch.lerp(before.float(), own.float(), share)
    out[first:end] = own[0].transpose(0, 1)


def _measured(past: int, heads: Heads) -> KernelChoice:
    """Return the choice by rows for chunks after `past` tokens of context."""
    Hq, Hkv, D, dtype = heads
    key = {"past": past, "heads": [Hq, Hkv, D], "dtype": str(dtype)}
    name = f"attention of chunks after {past} tokens"
    return measured_choice(name, key, ("own", "torch"), ROWS, partial(_cells, past, heads))


def _cells(past: int, heads: Heads, chunk_lengths: Sequence[int]) -> Cells:
    """Return calls for one chunk after `past` tokens of context, in pages of 16 tokens."""
    Hq, Hkv, D, dtype = heads
    page_size = 16
    cells: Cells = {}
    for rows in chunk_lengths:
        num_pages = -(-(past + rows) // page_size)
        pool = torch.full((num_pages, Hkv, 2, page_size, D), 0.1, dtype=dtype)
        batch = AttentionBatch(
            query_start=torch.tensor([0, rows], dtype=torch.int32),
            kv_len=torch.tensor([past + rows], dtype=torch.int32),
            page_table=torch.arange(num_pages, dtype=torch.int32).flip(0)[None],
            slots=torch.empty(0, dtype=torch.int64),
            max_query_len=rows,
            max_kv_len=past + rows,
            num_decodes=int(rows == 1),
        )
        q = torch.full((rows, Hq, D), 0.1, dtype=dtype)
        arguments = q, pool[:, :, 0], pool[:, :, 1], batch

        def own(arguments: tuple[Tensor, Tensor, Tensor, AttentionBatch] = arguments) -> None:
            cpp_attention(*arguments, slice(0, 1), torch.empty_like(arguments[0]), scale=0.1)

        def flash(arguments: tuple[Tensor, Tensor, Tensor, AttentionBatch] = arguments) -> None:
            flash_chunk(*arguments, 0, torch.empty_like(arguments[0]), 0.1)

        cells["own", rows], cells["torch", rows] = [own], [flash]
    return cells
