"""The steps of a Llama-shaped layer between its matrix products, in Triton: one launch each.

Sums are float32, and results are rounded to the model's dtype where transformers' own code rounds them.
"""

import triton
import triton.language as tl
from torch import Tensor

from crossdock.kernels.gpu.triton_e4m3 import rows_in_e4m3, store_row
from crossdock.kernels.gpu.triton_store import quantised
from crossdock.kernels.packed import RoundedRows

_TOKENS = 8  # rows of one head that a program of `finish_heads` holds
_FEATURES = 1024  # of one row that a program of `silu_and_multiply` holds
_ROUNDED = 16384  # features of a row that one program can round without spilled registers


def add_and_norm(
    hidden: Tensor, addend: Tensor | None, weight: Tensor, eps: float, rounded: RoundedRows | None = None
) -> Tensor:
    """Add `addend` to hidden [T, E] in place; return the RMS norm of `hidden` times `weight` [E], [T, E].

    All tensors are contiguous and of one dtype. `rounded` receives the result in e4m3, too.
    """
    (T, E), out = hidden.shape, hidden.new_empty(hidden.shape)
    assert hidden.is_contiguous()
    assert addend is None or (addend.shape == hidden.shape and addend.is_contiguous())
    block = triton.next_power_of_2(E)
    _add_and_norm_kernel[(T,)](
        hidden,
        addend,
        weight,
        out,
        *(rounded or (None, None)),
        eps,
        SIZE=E,
        BLOCK=block,
        HAS_ADDEND=addend is not None,
        HAS_CODES=rounded is not None,
        num_warps=min(16, max(4, block // 512)),
    )
    return out


def finish_heads(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate the heads of qkv [T, (Hq + 2 Hkv) D]; store keys and values to their slots.

    Returns the queries [T, Hq, D], a view of `qkv`, whose queries are replaced. cos, sin: [T, D], the two halves of a
    row alike. `q_norm` and `k_norm` [D] are the weights of an RMS norm of every head, both or neither. Pages, slots and
    scales are those of `reference_store_kv`; a row whose slot is negative is stored nowhere.
    """
    (T, width) = qkv.shape
    (_, Hkv, page_size, D) = k_pages.shape
    Hq = width // D - 2 * Hkv
    assert width == (Hq + 2 * Hkv) * D
    assert D % 2 == 0
    assert v_pages.shape == k_pages.shape
    assert cos.shape == sin.shape == (T, D)
    assert all(x.is_contiguous() for x in (qkv, cos, sin, slots))
    assert (q_norm is None) == (k_norm is None)
    assert (k_scale is None) == (v_scale is None)
    for pages in (k_pages, v_pages):
        assert pages.stride(3) == 1
        assert pages.stride(2) == D or page_size == 1, "tokens of a page are adjacent"
    _finish_heads_kernel[triton.cdiv(T, _TOKENS), Hq + 2 * Hkv](
        qkv,
        cos,
        sin,
        k_pages,
        v_pages,
        slots,
        q_norm,
        k_norm,
        k_scale,
        v_scale,
        T,
        eps,
        k_pages.stride(0),
        k_pages.stride(1),
        v_pages.stride(0),
        v_pages.stride(1),
        Q_HEADS=Hq,
        KV_HEADS=Hkv,
        PAGE=page_size,
        HALF=D // 2,
        BLOCK_HALF=triton.next_power_of_2(D // 2),
        BLOCK_T=_TOKENS,
        HAS_NORMS=q_norm is not None,
        HAS_SCALES=k_scale is not None,
    )
    return qkv[:, : Hq * D].view(T, Hq, D)


def silu_and_multiply(gate_up: Tensor, rounded: RoundedRows | None = None) -> Tensor:
    """Return silu(gate) * up, [T, I], of gate_up [T, 2 I]: gates in the first half of a row, ups in the second.

    `rounded` receives the result in e4m3, too.
    """
    T, width = gate_up.shape
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(T, width // 2)
    if rounded is not None and width // 2 <= _ROUNDED:
        block = triton.next_power_of_2(width // 2)
        warps = min(16, max(4, block // 512))
        _silu_and_round_kernel[(T,)](gate_up, out, *rounded, SIZE=width // 2, BLOCK=block, num_warps=warps)
        return out
    _silu_and_multiply_kernel[T, triton.cdiv(width // 2, _FEATURES)](gate_up, out, SIZE=width // 2, BLOCK=_FEATURES)
    if rounded is not None:
        for whole, part in zip(rounded, rows_in_e4m3(out), strict=True):
            whole.copy_(part)
    return out


@triton.jit
def _add_and_norm_kernel(
    hidden, addend, weight, out, codes, scales, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDEND: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """Compute one row."""
    i = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    live = i < SIZE
    x = tl.load(hidden + at, mask=live, other=0.0)
    if HAS_ADDEND:
        y = tl.load(addend + at, mask=live, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(hidden + at, x, mask=live)
    exact = x.to(tl.float32)
    normed = (exact * tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)).to(x.dtype)
    w = tl.load(weight + i, mask=live, other=0.0)
    result = (normed.to(tl.float32) * w.to(tl.float32)).to(x.dtype)
    tl.store(out + at, result, mask=live)
    if HAS_CODES:
        store_row(result.to(tl.float32), codes, scales + tl.program_id(0), at, live)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["slots"])  # of groups of layers
def _finish_heads_kernel(
    qkv, cos, sin, k_pages, v_pages, slots, q_norm, k_norm, k_scale, v_scale, T, eps,
    k_page, k_page_head, v_page, v_page_head,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_T: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Finish one head, of queries, keys or values, for a block of rows."""
    DIM: tl.constexpr = 2 * HALF
    ROW: tl.constexpr = (Q_HEADS + 2 * KV_HEADS) * DIM
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    i = tl.arange(0, BLOCK_HALF)[None, :]
    live = (token < T)[:, None] & (i < HALF)
    at = qkv + token[:, None] * ROW + head * DIM + i
    low = tl.load(at, mask=live, other=0.0)
    high = tl.load(at + HALF, mask=live, other=0.0)
    if head < Q_HEADS + KV_HEADS:
        if HAS_NORMS:
            weights = k_norm
            if head < Q_HEADS:
                weights = q_norm
            low, high = _normed(low, high, weights, eps, i, HALF)
        turn = token[:, None] * DIM + i
        low_cos = tl.load(cos + turn, mask=live, other=0.0)
        high_cos = tl.load(cos + turn + HALF, mask=live, other=0.0)
        low_sin = tl.load(sin + turn, mask=live, other=0.0)
        high_sin = tl.load(sin + turn + HALF, mask=live, other=0.0)
        turned = _difference(_product(low, low_cos), _product(high, low_sin))
        high = _sum(_product(high, high_cos), _product(low, high_sin))
        low = turned
    if head < Q_HEADS:
        tl.store(at, low, mask=live)
        tl.store(at + HALF, high, mask=live)
    else:
        slot = tl.load(slots + token, mask=token < T, other=-1)
        if head < Q_HEADS + KV_HEADS:
            number = head - Q_HEADS
            to = k_pages + number * k_page_head + (slot // PAGE * k_page)[:, None]
            _store_head(to, low, high, k_scale, number, slot, i, PAGE, HALF, HAS_SCALES)
        else:
            number = head - Q_HEADS - KV_HEADS
            to = v_pages + number * v_page_head + (slot // PAGE * v_page)[:, None]
            _store_head(to, low, high, v_scale, number, slot, i, PAGE, HALF, HAS_SCALES)


@triton.jit
def _store_head(
    to, low, high, scales, number, slot, i, PAGE: tl.constexpr, HALF: tl.constexpr, HAS_SCALES: tl.constexpr
):
    """Store the two halves of every row's head to the row's slot. `to` is where each row's page begins."""
    at = to + (slot % PAGE * (2 * HALF))[:, None] + i
    live = (slot >= 0)[:, None] & (i < HALF)
    if HAS_SCALES:
        scale = tl.load(scales + number)
        low = quantised(low, scale, to)
        high = quantised(high, scale, to)
    tl.store(at, low, mask=live)
    tl.store(at + HALF, high, mask=live)


@triton.jit
def _normed(low, high, weights, eps, i, HALF: tl.constexpr):
    """Return the RMS norm of every row, times the weights."""
    x = low.to(tl.float32)
    y = high.to(tl.float32)
    scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
    low_weight = tl.load(weights + i, mask=i < HALF, other=0.0)
    high_weight = tl.load(weights + i + HALF, mask=i < HALF, other=0.0)
    return _product((x * scale).to(low.dtype), low_weight), _product((y * scale).to(high.dtype), high_weight)


@triton.jit
def _product(x, y):
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@triton.jit
def _sum(x, y):
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def _difference(x, y):
    return (x.to(tl.float32) - y.to(tl.float32)).to(x.dtype)


@triton.jit
def _silu_and_multiply_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < SIZE
    at = gate_up + row * (2 * SIZE) + i
    gate = tl.load(at, mask=live, other=0.0)
    up = tl.load(at + SIZE, mask=live, other=0.0)
    exact = gate.to(tl.float32)
    tl.store(out + row * SIZE + i, _product((exact / (1 + tl.exp(-exact))).to(gate.dtype), up), mask=live)


@triton.jit
def _silu_and_round_kernel(gate_up, out, codes, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row, and round it."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < SIZE
    at = gate_up + row * (2 * SIZE) + i
    gate = tl.load(at, mask=live, other=0.0)
    up = tl.load(at + SIZE, mask=live, other=0.0)
    exact = gate.to(tl.float32)
    result = _product((exact / (1 + tl.exp(-exact))).to(gate.dtype), up)
    tl.store(out + row * SIZE + i, result, mask=live)
    store_row(result.to(tl.float32), codes, scales + row, row * SIZE + i, live)
