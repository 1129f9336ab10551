"""Attention over the paged KV pool: one call for a ragged batch in which chunks of prompts and decodes are mixed.

The `reference_` functions in torch are the specification and run anywhere. On a CPU attention.cpp is faster.

Pages have the model's dtype or float8_e4m3fn, which attention.cpp does not take. Pages of e4m3 have a scale for each
head's keys and one for its values, `k_scale` and `v_scale`, [Hkv] float32. An element x is stored as x / scale, rounded
to the nearest e4m3 and clamped to `E4M3_MAX`; it is read as that number times scale.
"""

import ctypes
import logging
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from crossdock.kernels.cpu.build import cpu_flags, cpu_library

logger = logging.getLogger(__name__)

_MAX_HEAD_DIM = 1024  # of attention.cpp
E4M3_MAX = 448.0
"""The largest finite float8_e4m3fn."""
# Query rows per explicit score matrix: bounds the reference's memory to 256 x context x heads floats.
_REFERENCE_ROWS = 256
_Positions = TypeVar("_Positions", int, Tensor)


@dataclass(slots=True)
class AttentionBatch:
    """Where the rows of one step are, built once for each step and read by every layer. S sequences, T rows in all.

    Row i of sequence s is row `query_start[s] + i` of the flat batch; its position in the sequence is
    `kv_len[s] - query_len[s] + i`.
    """

    query_start: Tensor  # [S+1] int32; sequence s owns rows query_start[s]:query_start[s+1]
    kv_len: Tensor  # [S] int32; tokens of s in its pages, this step's rows included
    page_table: Tensor  # [S, P] int32; entries past kv_len are arbitrary
    slots: Tensor  # [T] int64; page * page_size + offset, where the row's key and value are stored; negative: nowhere
    max_query_len: int
    max_kv_len: int
    num_decodes: int  # sequences at the front that have one row each; a GPU computes them apart, faster than chunks
    derived: dict[Hashable, Tensor] = field(default_factory=dict)  # what the first layer computes for all
    key_end: Tensor | None = None
    """[T] int32, where rows see keys after their own, as within a picture: those at positions before this one.

    Of the rows of a sequence none sees fewer than the row before it, and none sees keys that this step does not store.
    None: every row sees the keys up to its own position.
    """
    on_host: tuple[Tensor, Tensor] | None = None
    """`query_start` and `kv_len` on the CPU; None: the step is a CUDA graph, recorded before these are known."""
    max_chunk_kv_len: int | None = None  # `max_kv_len` of the sequences after the decodes alone; None: unknown
    derived_of_chunks: dict[Hashable, Tensor] = field(default_factory=dict)  # `derived` of `chunks()`

    def decodes(self) -> "AttentionBatch":
        """Return the decodes at the front as a batch of their own."""
        D = self.num_decodes
        starts = self.query_start[: D + 1]
        lengths = self.kv_len[:D]
        on_host = None if self.on_host is None else (self.on_host[0][: D + 1], self.on_host[1][:D])
        table = self.page_table[:D]
        return AttentionBatch(
            starts, lengths, table, self.slots[:D], 1, self.max_kv_len, D, self.derived, on_host=on_host
        )

    def chunks(self) -> "AttentionBatch":
        """Return the chunks behind the decodes as a batch of their own. The host of a GPU waits for nothing."""
        D = self.num_decodes
        longest = self.max_kv_len if self.max_chunk_kv_len is None else self.max_chunk_kv_len
        if "starts" not in self.derived_of_chunks:
            self.derived_of_chunks["starts"] = self.query_start[D:] - D
        starts = self.derived_of_chunks["starts"]
        lengths = self.kv_len[D:]
        on_host = None if self.on_host is None else (self.on_host[0][D:] - D, self.on_host[1][D:])
        table, slots = self.page_table[D:], self.slots[D:]
        derived = self.derived_of_chunks
        return AttentionBatch(starts, lengths, table, slots, self.max_query_len, longest, 0, derived, on_host=on_host)


def store_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write keys [T, Hkv, Dk] and values [T, Hkv, Dv] to their slots of [pages, Hkv, page, Dk] and [..., Dv].

    Rows whose slot is negative are left out.
    """
    library = library_for(k, v, k_pages, v_pages)
    if library is None:
        reference_store_kv(k, v, k_pages, v_pages, slots)
        return
    slots = slots.contiguous()
    for x, pages in ((k, k_pages), (v, v_pages)):
        size = x.itemsize
        (T, H, D) = x.shape
        library.crossdock_store(
            x.data_ptr(),
            x.stride(0) * size,
            x.stride(1) * size,
            pages.data_ptr(),
            pages.stride(0) * size,
            pages.stride(1) * size,
            pages.shape[2],
            slots.data_ptr(),
            T,
            H,
            D * size,
        )


def cpp_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    sequences: slice,
    out: Tensor,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    by_amx: bool = False,
) -> None:
    """`reference_paged_attention` of some sequences of the batch, into their rows of `out`, by attention.cpp.

    Only for tensors that `library_for` finds a library for; `by_amx` only for those that `amx_takes`.
    """
    library = cpp_library()
    assert library is not None
    (_, Hq, Dk) = q.shape
    (_, Hkv, page_size, Dv) = v_pages.shape
    # Variables keep these tensors alive during the call, which the pointers below do not.
    query_start = batch.query_start[sequences.start : sequences.stop + 1].contiguous()
    kv_len = batch.kv_len[sequences].contiguous()
    table = batch.page_table[sequences]
    sinks = sinks.float().contiguous() if sinks is not None else None
    key_end = batch.key_end.contiguous() if batch.key_end is not None else None
    assert key_end is None or key_end.dtype == torch.int32
    assert query_start.dtype == kv_len.dtype == table.dtype == torch.int32
    assert table.stride(1) == 1 or table.shape[1] == 1
    arguments = _AttentionArguments(
        len(kv_len),
        table.stride(0),
        Hq,
        Hkv,
        Dk,
        Dv,
        page_size,
        q.stride(0),
        q.stride(1),
        k_pages.stride(0),
        k_pages.stride(1),
        *v_pages.stride()[:3],
        window or 0,
        attention_chunk or 0,
        scale,
        softcap or 0.0,
        q.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        query_start.data_ptr(),
        kv_len.data_ptr(),
        table.data_ptr(),
        key_end.data_ptr() if key_end is not None else None,
        sinks.data_ptr() if sinks is not None else None,
        out.data_ptr(),
    )
    if by_amx:
        library.crossdock_amx_attention(ctypes.byref(arguments), torch.get_num_threads())
    else:
        library.crossdock_paged_attention(ctypes.byref(arguments), q.dtype == torch.bfloat16, torch.get_num_threads())


CHUNK_FROM = 16
"""Rows of a sequence from which AMX, or torch's flash attention, may be faster than attention.cpp without AMX."""


def amx_takes(dtype: torch.dtype, k_pages: Tensor, v_pages: Tensor) -> bool:
    """Return whether amx_attention.h computes attention in `dtype` over these pages, on this machine."""
    *_, page_size, head_dim = k_pages.shape
    fits = page_size % 16 == 0 and head_dim % 32 == 0 and head_dim == v_pages.shape[3]
    library = cpp_library()
    return dtype is torch.bfloat16 and fits and library is not None and bool(library.crossdock_has_amx())


class _AttentionArguments(ctypes.Structure):
    """`struct AttentionArguments` of attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("S", "table_stride", "Hq", "Hkv", "Dk", "Dv", "page_size")),
        *((name, ctypes.c_int64) for name in ("q_token", "q_head", "k_page", "k_head", "v_page", "v_head", "v_token")),
        *((name, ctypes.c_int64) for name in ("window", "attention_chunk")),
        *((name, ctypes.c_double) for name in ("scale", "softcap")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "query_start", "kv_len", "page_table", "key_end")),
        *((name, ctypes.c_void_p) for name in ("sinks", "out")),
    ]


@lru_cache
def why_no_library() -> str:
    """Return why this machine cannot compile or run attention.cpp; empty if it can."""
    flags = cpu_flags()
    if "sse2" in flags and "avx2" not in flags:
        return "this CPU has no AVX2"
    try:
        cpu_library("attention")
    except OSError as error:
        return str(error)
    return ""


@lru_cache
def cpp_library() -> ctypes.CDLL | None:
    """Return the compiled attention.cpp; None, with one warning, if this machine cannot compile or run it."""
    if reason := why_no_library():
        logger.warning("paged attention runs in plain torch, several times slower: %s", reason)
        return None
    library = cpu_library("attention")
    pointer = ctypes.c_void_p
    integer = ctypes.c_int64
    library.crossdock_paged_attention.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.crossdock_paged_attention.restype = None
    library.crossdock_amx_attention.argtypes = [pointer, ctypes.c_int]
    library.crossdock_amx_attention.restype = None
    library.crossdock_store.argtypes = [pointer, integer, integer, pointer, *[integer] * 3, pointer, *[integer] * 3]
    library.crossdock_store.restype = None
    return library


def library_for(x: Tensor, y: Tensor | None, k_pages: Tensor, v_pages: Tensor) -> ctypes.CDLL | None:
    """Return the library if it takes these tensors; None sends the call to torch.

    `x` is a query if `y` is None: only then may the values lie within the keys.
    """
    if not x.device.type == k_pages.device.type == "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    if not x.dtype == k_pages.dtype == v_pages.dtype or (y is not None and y.dtype != x.dtype):
        return None
    if x.stride(-1) != 1 or (y is not None and y.stride(-1) != 1):
        return None
    for pages in (k_pages, v_pages):
        D = pages.shape[3]
        is_adjacent = pages.stride(2) == D or pages.shape[2] == 1 or (y is None and pages is v_pages)
        if D > _MAX_HEAD_DIM or pages.stride(3) != 1 or not is_adjacent:
            return None
    return cpp_library()


def reference_store_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`store_kv` in torch; pages are e4m3 if there are scales."""
    page_size = k_pages.shape[2]
    stored = slots >= 0
    at = slots[stored] // page_size
    offsets = slots[stored] % page_size
    for x, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if scale is None:
            pages[at, :, offsets] = x[stored]
        else:
            codes = (x[stored].float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(pages.dtype)
            pages.view(torch.uint8)[at, :, offsets] = codes.view(torch.uint8)  # torch does not index float8 everywhere


def reference_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Compute causal attention of q [T, Hq, Dk] over each row's sequence; return [T, Hq, Dv], contiguous.

    `k_pages` [pages, Hkv, page, Dk] and `v_pages` [pages, Hkv, page, Dv] are views of one layer of the pool: tokens
    and elements adjacent, pages and heads at any stride. Or `v_pages` are the first Dv elements of `k_pages`, or of
    wider rows of their own. The row at position p sees keys j <= p, or those before its `key_end`; with a window only
    p - j < window, and with an attention chunk in its place only j >= p - p % attention_chunk. `softcap` c replaces a
    score s by c * tanh(s / c). `sinks` [Hq] is one more logit per head that has a share of the softmax and no value.
    Head h reads kv head h // (Hq // Hkv). The scales are those of `reference_store_kv`.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_pages.shape[3])
    page_size = k_pages.shape[2]
    starts: list[int] = batch.query_start.tolist()
    for s, kv_len in enumerate(batch.kv_len.tolist()):
        rows = slice(starts[s], starts[s + 1])
        first_position = kv_len - (rows.stop - rows.start)
        first_page = max(0, _first_key(first_position, window, attention_chunk)) // page_size
        pages = batch.page_table[s, first_page : -(-kv_len // page_size)].long()
        start = first_page * page_size
        length = kv_len - first_page * page_size
        k = _read(k_pages, pages, length, k_scale, q.dtype)  # [Hkv, length, Dk]
        v = _read(v_pages, pages, length, v_scale, q.dtype)  # [Hkv, length, Dv]
        for row in range(rows.start, rows.stop, _REFERENCE_ROWS):
            end = min(row + _REFERENCE_ROWS, rows.stop)
            position = torch.arange(row, end, device=q.device) - rows.start + first_position
            key = torch.arange(start, start + length, device=q.device)
            visible = key < (position + 1 if batch.key_end is None else batch.key_end[row:end])[:, None]
            visible &= key >= _first_key(position, window, attention_chunk)[:, None]  # [rows, length]
            out[row:end] = _attend(q[row:end].transpose(0, 1), k, v, visible, scale, softcap, sinks).transpose(0, 1)
    return out


def _first_key(position: _Positions, window: int | None, attention_chunk: int | None) -> _Positions:
    """Return the first key that rows at these positions see; with a window, a number below 0 where they see all."""
    if attention_chunk is not None:
        return position - position % attention_chunk
    return position * 0 if window is None else position - window + 1


def _read(pages: Tensor, numbers: Tensor, length: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the first `length` tokens [Hkv, length, D] of the pages with these numbers."""
    if scale is None:
        return pages[numbers].transpose(0, 1).flatten(1, 2)[:, :length]
    codes = pages.view(torch.uint8)[numbers].transpose(0, 1).flatten(1, 2)[:, :length]
    return (codes.view(pages.dtype).float() * scale[:, None, None]).to(dtype)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Compute attention of q [Hq, R, Dk] over k [Hkv, L, Dk] and v [Hkv, L, Dv], masked by `visible` [R, L].

    Returns [Hq, R, Dv].
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )[0]
    # SDPA has neither softcap nor sinks: the same in fp32, written out.
    group = q.shape[0] // k.shape[0]
    scores = q.float() @ k.float().repeat_interleave(group, 0).transpose(1, 2) * scale  # [Hq, R, L]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sink_column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v.float().repeat_interleave(group, 0)).to(q.dtype)
