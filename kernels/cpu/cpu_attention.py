"""Paged attention on a CPU: attention.cpp, with AMX or without, or torch's flash attention, whichever was faster here.

Torch gathers the keys of a chunk first, and AMX transposes its values, for which only a chunk of a prompt has enough
rows. Decodes always run in attention.cpp without AMX.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from crossdock.kernels.attention import (
    CHUNK_FROM,
    AttentionBatch,
    amx_takes,
    cpp_attention,
    library_for,
    reference_paged_attention,
)
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.measure import Cells
from crossdock.kernels.cpu.remembered_seconds import measured_choice
from crossdock.kernels.options import CpuKernels, Kernel

ROWS = (CHUNK_FROM, 64, 256)  # tokens of a chunk that are measured
LONG_CONTEXT = 1024
"""Tokens before a chunk from which it counts as deep in its prompt: then gathering takes a larger share."""

Heads: TypeAlias = tuple[int, int, int, torch.dtype]
"""Query heads, KV heads, head dimension, dtype."""
Kernels: TypeAlias = tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """Paged attention by the kernel that `cpu_kernels` names, native or torch.

    For auto, and for onednn, which has no attention: the fastest of native, amx and torch, measured when a shape is
    first seen. Rows of amx and torch depend on the chunks of a prompt in their last bits; rows of native do not.
    """

    setting: CpuKernels = "auto"
    _choices: dict[tuple[Heads, Kernels], tuple[KernelChoice, KernelChoice]] = field(default_factory=dict)

    def choices(self, heads: Heads, kernels: Kernels) -> tuple[KernelChoice, KernelChoice]:
        """Return the choices between `kernels` by rows, for chunks that begin a prompt and for chunks deep in one."""
        if (heads, kernels) not in self._choices:
            if self.setting in ("native", "torch") or len(kernels) == 1:
                single = only("native") if kernels == ("native",) else KernelChoice("native", "torch", CHUNK_FROM)
                self._choices[heads, kernels] = single, single
            else:
                near, deep = (_measured(past, heads, kernels) for past in (0, 2 * LONG_CONTEXT))
                self._choices[heads, kernels] = near, deep
        return self._choices[heads, kernels]

    def chosen(self) -> list[tuple[tuple[Heads, Kernels], tuple[KernelChoice, KernelChoice]]]:
        """Return the shapes of heads seen so far with the kernels that compute them, and their choices."""
        return list(self._choices.items())

    def paged_attention(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, **options: Any
    ) -> Tensor:
        """See `reference_paged_attention`."""
        if library_for(q, None, k_pages, v_pages) is None:
            return reference_paged_attention(q, k_pages, v_pages, batch, **options)
        out = q.new_empty(len(q), q.shape[1], v_pages.shape[3])
        start = 0
        for chunk, kernel in self._faster_chunks(q, k_pages, v_pages, batch, options):
            if kernel == "amx":
                cpp_attention(q, k_pages, v_pages, batch, slice(chunk, chunk + 1), out, **options, by_amx=True)
            else:
                flash_chunk(q, k_pages, v_pages, batch, chunk, out, options["scale"])
            if start < chunk:
                cpp_attention(q, k_pages, v_pages, batch, slice(start, chunk), out, **options)
            start = chunk + 1
        if start < len(batch.kv_len):
            cpp_attention(q, k_pages, v_pages, batch, slice(start, len(batch.kv_len)), out, **options)
        return out

    def _faster_chunks(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, options: dict[str, Any]
    ) -> list[tuple[int, Kernel]]:
        """Return the sequences of the batch for which another kernel than native is chosen, ascending, each with it."""
        if batch.max_query_len < CHUNK_FROM or self.setting == "native":
            return []
        heads = (q.shape[1], k_pages.shape[1], k_pages.shape[3], q.dtype)
        is_plain = options.get("softcap") is None and options.get("sinks") is None and batch.key_end is None
        reach = options.get("window") or options.get("attention_chunk") or math.inf
        # longest context that torch computes
        longest = reach if is_plain and k_pages.shape[3] == v_pages.shape[3] else 0
        native: Kernels = ("native",)
        if self.setting != "torch" and amx_takes(q.dtype, k_pages, v_pages):
            native = ("native", "amx")
        starts = batch.query_start.tolist()
        lengths = batch.kv_len.tolist()
        chunks: list[tuple[int, Kernel]] = []
        for sequence, length in enumerate(lengths):
            rows = starts[sequence + 1] - starts[sequence]
            if rows >= CHUNK_FROM:
                near, deep = self.choices(heads, native if length > longest else (*native, "torch"))
                kernel = (deep if length - rows >= LONG_CONTEXT else near).at(rows)
                if kernel != "native":
                    chunks.append((sequence, kernel))
        return chunks


def flash_chunk(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: AttentionBatch, sequence: int, out: Tensor, scale: float
) -> None:
    """Compute one sequence of the batch without a window, into its rows of `out`, by torch's flash attention.

    Flash attention has no mask for a chunk that continues a prompt. So the keys before the chunk, which every row
    sees, and the keys of the chunk are attended apart. Their logarithms of the sum of exponentials join the results.
    """
    first, end = batch.query_start[sequence : sequence + 2].tolist()
    kv_len = int(batch.kv_len[sequence])
    page_size = k_pages.shape[2]
    pages = batch.page_table[sequence, : -(-kv_len // page_size)].long()
    k, v = (x.transpose(0, 1)[:, pages].flatten(1, 2)[None] for x in (k_pages, v_pages))  # [1, Hkv, tokens, D]
    rows = q[first:end].transpose(0, 1)[None]
    past = kv_len - (end - first)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    own, own_lse = flash(rows, k[:, :, past:kv_len], v[:, :, past:kv_len], 0.0, True, scale=scale)
    if past:
        before, before_lse = flash(rows, k[:, :, :past], v[:, :, :past], 0.0, False, scale=scale)
        share = torch.sigmoid(own_lse - before_lse)[..., None]  # [1, Hq, rows, 1]
        own = torch.lerp(before.float(), own.float(), share)
    out[first:end] = own[0].transpose(0, 1)


def _measured(past: int, heads: Heads, kernels: Kernels) -> KernelChoice:
    """Return the choice between `kernels` by rows for chunks after `past` tokens of context."""
    Hq, Hkv, D, dtype = heads
    key = {"past": past, "heads": [Hq, Hkv, D], "dtype": str(dtype)}
    name = f"attention of chunks after {past} tokens"
    return measured_choice(name, key, kernels, ROWS, partial(_cells, past, heads, kernels))


def _cells(past: int, heads: Heads, kernels: Kernels, chunk_lengths: Sequence[int]) -> Cells:
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

        def cpp(by_amx: bool, arguments: tuple[Tensor, Tensor, Tensor, AttentionBatch] = arguments) -> None:
            cpp_attention(*arguments, slice(0, 1), torch.empty_like(arguments[0]), scale=0.1, by_amx=by_amx)

        def flash(arguments: tuple[Tensor, Tensor, Tensor, AttentionBatch] = arguments) -> None:
            flash_chunk(*arguments, 0, torch.empty_like(arguments[0]), 0.1)

        for kernel in kernels:
            cells[kernel, rows] = [flash if kernel == "torch" else partial(cpp, kernel == "amx")]
    return cells
