"""Attention over the paged KV pool on GPUs, in Triton, straight on the pool's layout: the launches.

Decodes come first in a batch. They and the chunks after them are separate launches, with tiles of their own. No size
that varies from step to step is part of a kernel: each kernel is compiled once for a kind of layer.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.gpu.triton_chunks import block_kernel, chunk_join_kernel, chunk_kernel, num_listed
from crossdock.kernels.gpu.triton_decodes import decode_kernel, join_kernel, num_shares, share_kernel
from crossdock.kernels.gpu.triton_store import store_kernel

_LOG2_E = 1.4426950408889634
_SMALL_ROWS = 16  # the fewest rows that tl.dot multiplies
PART_TOKENS = 256  # the shortest part of a context: reading a part must outweigh storing its result
_WAVES = 4  # programs per multiprocessor that saturate memory bandwidth; 2 take 1.26 times as long for 32 x 8,192
_SPARE = 4  # a batch that fills the device has a spare part for every so many decodes, for contexts longer than most
CHUNK_PART_TOKENS = 1024  # the shortest part of a chunk's context: it stores a result for each of many rows
_CHUNK_WAVES = 4  # programs per multiprocessor among which the contexts of chunks are cut: contexts are of many lengths
_FEW_ROWS = (_SMALL_ROWS, 64)  # of the tiles of short chunks
_SEQUENCES = 256  # sequences that `share_kernel` and `block_kernel` read at a time
_LATENT_GROUP = 16  # heads that attend together to latents: with more, a program's registers do not hold their sums
_JOINED = 4096  # elements of partial results that `join_kernel` reads at a time: 32 registers a thread


class Tiles(NamedTuple):
    """The sizes of the tiles that one program holds at a time."""

    rows: int  # query tokens times the heads of a group
    tokens: int  # of context
    num_warps: int
    num_stages: int


LATENT_DECODE_TILES = Tiles(16, 32, 8, 5)
LATENT_CHUNK_TILES = Tiles(32, 32, 8, 2)
"""Of latents of 512 elements in 16 bits: the largest that do not spill on sm_90. Their speed was never measured."""


def tiles_for(key_dim: int, value_dim: int, itemsize: int, has_chunks: bool, is_hopper: bool = False) -> Tiles:
    """Return the tiles of a kernel: the fastest of `benchmarks/gpu/run.py others` on an H200, else as large as fit.

    The pipeline has an additional step for the page numbers, for which the loads of keys and values wait. So three and
    four stages have one tile in flight. Decodes with two in flight take twice the shared memory, and 1.2 times as long.
    """
    width = _power_of_2(max(key_dim, value_dim)) * itemsize  # bytes of a row
    tokens = min(64, max(16, 16384 // width))
    if not has_chunks:
        return Tiles(_SMALL_ROWS, tokens, 4, 4)
    if itemsize == 4:  # multiplied without tensor cores
        return Tiles(32, min(tokens, 32), 4, 2)
    if width > 256:
        return Tiles(64, tokens, 8, 2)
    return Tiles(256, tokens, 16, 3) if is_hopper else Tiles(128, tokens, 8, 3)


def num_parts(num_decodes: int, kv_heads: int, num_multiprocessors: int) -> int:
    """Return the most parts into which the contexts of `num_decodes` sequences are cut, all together.

    Each part is a program for each KV head. Few decodes are cut to fill the device. Many have a few spare parts, so
    that one long context does not keep a single program busy after all others have ended. The contexts' lengths play
    no role: a CUDA graph launches the same programs whatever they are.
    """
    to_fill = -(-_WAVES * num_multiprocessors // kv_heads)
    return max(to_fill, num_decodes + -(-num_decodes // _SPARE))


def num_joins(num_decodes: int, parts: int) -> int:
    """Return how many of the sequences can have several parts at most."""
    return min(num_decodes, parts - num_decodes)


def num_blocks(num_rows: int, num_chunks: int, queries: int) -> int:
    """Return how many blocks of `queries` tokens any `num_chunks` chunks of together `num_rows` tokens have at most."""
    return num_rows // queries + min(num_chunks, num_rows)


def num_chunk_parts(least_blocks: int, kv_heads: int, num_multiprocessors: int) -> int:
    """Return the parts, for each KV head, into which the contexts of all blocks together are cut, rounded up for each.

    1: there are blocks enough to fill the device, and each context is whole. As for decodes, the contexts' lengths play
    no role.
    """
    to_fill = -(-_CHUNK_WAVES * num_multiprocessors // kv_heads)
    return to_fill if to_fill > least_blocks else 1


def num_chunk_programs(most_blocks: int, all_parts: int) -> int:
    """Return the programs for each KV head: as many as all parts of any number of blocks, each number rounded up."""
    return most_blocks if all_parts == 1 else max(most_blocks, all_parts + min(most_blocks, all_parts))


def with_rows_for(tiles: Tiles, rows: int) -> Tiles:
    """Return the tiles of chunks whose longest has `rows` rows, tokens times the heads of a group: few rows in small
    tiles, so that a stream which verifies drafts does not compute 256 rows.
    """
    small = next((size for size in _FEW_ROWS if rows <= size < tiles.rows), None)
    return tiles if small is None else Tiles(small, tiles.tokens, 4, tiles.num_stages)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`reference_store_kv` of kernels/attention.py with every tensor on one GPU."""
    (T, H, Dk) = k.shape
    Dv = v.shape[2]
    _check(k_pages, v_pages, k_scale is not None, k, v)
    k = _adjacent(k)
    v = _adjacent(v)
    block = 16
    store_kernel[triton.cdiv(T, block), H](
        k,
        v,
        k_pages,
        v_pages,
        slots,
        k_scale,
        v_scale,
        T,
        *_strides(k),
        *_strides(v),
        k_pages.stride(0),
        k_pages.stride(1),
        v_pages.stride(0),
        v_pages.stride(1),
        PAGE=k_pages.shape[2],
        **block_widths(Dk, Dv),
        BLOCK_T=block,
        HAS_SCALES=k_scale is not None,
    )


def paged_attention(
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
    in_fixed_order: bool = False,
) -> Tensor:
    """`reference_paged_attention` with every tensor on one GPU. Rows that belong to no sequence are undefined.

    `in_fixed_order`: a row's bits depend on its query and its own keys alone. So decodes are chunks of one row, and a
    program reads the whole context of its rows, which takes longer.
    """
    (T, Hq, Dk) = q.shape
    (_, Hkv, page_size, Dv) = v_pages.shape
    is_latent = v_pages.data_ptr() == k_pages.data_ptr() and Dv < Dk
    _check(k_pages, k_pages, k_scale is not None, q)  # values may have others between them
    assert v_pages.stride(3) == 1, "elements of a value are adjacent"
    assert v_pages.dtype == k_pages.dtype, "values have the dtype of keys"
    q = q.contiguous() if in_fixed_order else _adjacent(q)
    if is_latent:
        assert Hkv == 1, "all heads share a latent"
        Hkv = Hq // math.gcd(Hq, _LATENT_GROUP)  # groups of heads that are computed apart, and read the same latents
        k_pages = k_pages.expand(-1, Hkv, -1, -1)
        v_pages = v_pages.expand(-1, Hkv, -1, -1)
        if k_scale is not None and v_scale is not None:
            k_scale = k_scale.repeat(Hkv)
            v_scale = v_scale.repeat(Hkv)
    assert batch.page_table.stride(1) == 1 or batch.page_table.shape[1] == 1
    out = q.new_empty(T, Hq, Dv)
    S = len(batch.kv_len)
    D = 0 if in_fixed_order else batch.num_decodes
    tensors = (q, k_pages, v_pages, k_scale, v_scale, batch.page_table)
    numbers = (
        *(scale * _LOG2_E if softcap is None else scale * 2 * _LOG2_E / softcap, *_strides(q)),
        *(k_pages.stride(0), k_pages.stride(1), v_pages.stride(0), v_pages.stride(1), batch.page_table.stride(0)),
    )
    kind: dict[str, Any] = {
        "GROUP": Hq // Hkv,
        "PAGE": page_size,
        **block_widths(Dk, Dv, is_latent),
        "V_ROW": v_pages.stride(2) if page_size > 1 else Dv,  # the stride of a single token may be any number
        "LATENT": is_latent,
        "WINDOW": window or 0,
        "ATTENTION_CHUNK": attention_chunk or 0,
        "SOFTCAP": (softcap or 0.0) * _LOG2_E,
        "HAS_SINKS": sinks is not None,
        "HAS_SCALES": k_scale is not None,
    }
    if D > 0:
        _decode(out, batch, D, sinks, tensors, numbers, kind)
    if S > D:
        _chunks(out, batch, D, sinks, tensors, numbers, kind, in_fixed_order)
    return out


def _chunks(
    out: Tensor,
    batch: AttentionBatch,
    D: int,
    sinks: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    kind: dict[str, Any],
    in_fixed_order: bool,
) -> None:
    """Launch the attention of the sequences after the first D, into their rows of `out`."""
    (_, Hq, Dv), group = out.shape, kind["GROUP"]
    Hkv = Hq // group
    tiles = _tiles(kind, out, has_chunks=True)
    if not (in_fixed_order or kind["LATENT"]):
        longest = min(len(out) - D, batch.max_query_len)
        tiles = with_rows_for(tiles, max(longest, 1) * group)
    queries = tiles.rows // group
    rows = len(out) - D
    blocks = num_blocks(rows, len(batch.kv_len) - D, queries)
    multiprocessors = _num_multiprocessors(out.device)
    parts = 1 if in_fixed_order else num_chunk_parts(-(-rows // queries), Hkv, multiprocessors)
    P = num_chunk_programs(blocks, parts)
    part_out = out.new_empty(min(P, 2 * parts) if parts > 1 else 0, Hkv, tiles.rows, Dv, dtype=torch.float32)
    part_lse = part_out.new_empty(part_out.shape[:3])  # log2 of the sum of exp2
    listed = _listed(batch, D, P, queries)
    cut = {"HAS_ENDS": batch.key_end is not None, "ROWS": tiles.rows, "BLOCK_N": tiles.tokens}
    cut["MIN_TILES"] = max(1, CHUNK_PART_TOKENS // tiles.tokens)
    of_steps = out, part_out, part_lse, listed, batch.query_start, batch.kv_len, batch.key_end, sinks
    chunk_kernel[P, Hkv](
        *of_steps,
        *tensors,
        parts,
        *numbers,
        **kind,
        **cut,
        ONE_LOOP=in_fixed_order,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if parts > 1:
        names = "GROUP", "V_DIM", "BLOCK_V", "WINDOW", "ATTENTION_CHUNK", "HAS_SINKS"
        of_kind = {name: kind[name] for name in names}
        some = min(tiles.rows, max(1, _JOINED // kind["BLOCK_V"]))
        chunk_join_kernel[blocks, Hkv, tiles.rows // some](*of_steps, parts, P, **of_kind, **cut, SOME=some)


def _listed(batch: AttentionBatch, D: int, P: int, queries: int) -> Tensor:
    """Return the blocks of the sequences after the first D, as `block_kernel` lists them. The first layer does it."""
    key = "blocks", D, P, queries
    if key not in batch.derived:
        listed = batch.query_start.new_empty(num_listed(P))
        numbers = len(batch.kv_len), D, P
        block_kernel[1,](listed, batch.query_start, *numbers, QUERIES=queries, BLOCK_S=_SEQUENCES)
        batch.derived[key] = listed
    return batch.derived[key]


def _decode(
    out: Tensor,
    batch: AttentionBatch,
    D: int,
    sinks: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    kind: dict[str, Any],
) -> None:
    """Launch the attention of the first D sequences, which have one row each, into their rows of `out`."""
    (_, Hq, Dv) = out.shape
    group = kind["GROUP"]
    Hkv = Hq // group
    tiles = _tiles(kind, out, has_chunks=False)
    P = num_parts(D, Hkv, _num_multiprocessors(out.device))
    shares = _shares(batch, D, P, tiles.tokens, kind["WINDOW"], kind["ATTENTION_CHUNK"])
    part_out = out.new_empty(P, Hkv, group, Dv, dtype=torch.float32)
    part_lse = part_out.new_empty(P, Hkv, group)  # log2 of the sum of exp2
    decode_kernel[P, Hkv](
        out,
        part_out,
        part_lse,
        shares,
        batch.query_start,
        batch.kv_len,
        sinks,
        *tensors,
        D,
        *numbers,
        **kind,
        ROWS=tiles.rows,
        BLOCK_N=tiles.tokens,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    members = int(triton.next_power_of_2(group))
    join_kernel[num_joins(D, P), Hkv](
        out,
        part_out,
        part_lse,
        shares,
        batch.query_start,
        sinks,
        D,
        P,
        GROUP=group,
        V_DIM=Dv,
        BLOCK_V=kind["BLOCK_V"],
        BLOCK_P=max(1, _JOINED // (members * kind["BLOCK_V"])),
        BLOCK_G=members,
        HAS_SINKS=sinks is not None,
    )


def _shares(batch: AttentionBatch, D: int, P: int, tile_tokens: int, window: int, attention_chunk: int) -> Tensor:
    """Return how the contexts of the first D sequences are cut into parts: see triton_decodes.py.

    Layers that see the same tokens cut them alike, so the first of these does it for all.
    """
    key = "shares", D, P, tile_tokens, window, attention_chunk
    if key not in batch.derived:
        shares = batch.kv_len.new_empty(num_shares(P))
        share_kernel[1,](
            shares,
            batch.kv_len,
            D,
            P,
            MIN_TILES=max(1, PART_TOKENS // tile_tokens),
            BLOCK_N=tile_tokens,
            WINDOW=window,
            ATTENTION_CHUNK=attention_chunk,
            BLOCK_S=_SEQUENCES,
        )
        batch.derived[key] = shares
    return batch.derived[key]


def _tiles(kind: dict[str, Any], out: Tensor, has_chunks: bool) -> Tiles:
    """Return `tiles_for` with rows enough for the query heads that share a KV head."""
    if kind["LATENT"] and out.element_size() == 2:
        tiles = LATENT_CHUNK_TILES if has_chunks else LATENT_DECODE_TILES
    else:
        tiles = tiles_for(kind["BLOCK_K"], kind["BLOCK_V"], out.element_size(), has_chunks, _is_hopper(out.device))
    rows = tiles.rows if has_chunks else _SMALL_ROWS
    return tiles._replace(rows=max(rows, int(triton.next_power_of_2(kind["GROUP"]))))


def _check(k_pages: Tensor, v_pages: Tensor, has_scales: bool, *rows: Tensor) -> None:
    for x in rows:
        dtype = torch.float8_e4m3fn if has_scales else x.dtype
        assert (x.device, dtype) == (k_pages.device, k_pages.dtype), "pages have the rows' device, and dtype or e4m3"
    for pages in (k_pages, v_pages):
        adjacent = pages.stride(3) == 1 and (pages.stride(2) == pages.shape[3] or pages.shape[2] == 1)
        assert adjacent or pages.numel() == 0, "tokens of a page are adjacent"


def _adjacent(x: Tensor) -> Tensor:
    """Return `x` with adjacent elements of a head, as nearly all models have them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of the tokens and of the heads of x [T, H, D].

    The stride of a single token or head may be any number, and Triton compiles a kernel again for one of other factors.
    """
    _, H, D = x.shape
    return x.stride(0) if len(x) > 1 else H * D, x.stride(1) if H > 1 else D


def block_widths(key_dim: int, value_dim: int, is_latent: bool = False) -> dict[str, int]:
    """Return head dimensions, and tile widths as powers of two. BLOCK_K holds keys; of latents, their rotated keys."""
    read = key_dim - value_dim if is_latent else key_dim
    return {"K_DIM": key_dim, "V_DIM": value_dim, "BLOCK_K": _power_of_2(read), "BLOCK_V": _power_of_2(value_dim)}


def _power_of_2(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


@lru_cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 4
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
