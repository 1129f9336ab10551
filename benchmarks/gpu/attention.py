"""Time attention alone: decodes and prompts beside their least time and torch's own kernels, and other tiles.

The pool has the layout of a served model: pages of one layer lie a page of all layers apart.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu.cases import Bench, Case, Section
from gpu.rows import Figures
from gpu.sizes import Lengths, Sizes
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crossdock.kernels.backend import choose_attention
from crossdock.kvtransfer.layout import LayerShape, PoolLayout
from crossdock.workers.model.graphs.mixed_graphs import padded_with_chunks
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission


class _Recorder:
    """Takes the place of a model, and keeps the arguments of its forward pass."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.adapters = None
        self.given: Any = None

    def forward(self, *given: Any) -> Tensor:
        self.given = given
        return torch.empty(0)


def batch_of(
    lengths: Lengths,
    pages: Sequence[Sequence[int]],
    page_size: int,
    device: str,
    recorded: tuple[int, int] | None = None,
) -> tuple[Any, Tensor]:
    """Return the `AttentionBatch` that an engine makes of these sequences, and the positions of its tokens [T].

    `recorded`: the decodes and the chunk tokens of the graph that it pads the step for; None: it runs as it is.
    """
    parts = [
        Scheduled(
            Request(Submission(f"{number}", [0] * kv, SamplingParams())), kv - query, query, list(held), samples=True
        )
        for number, ((query, kv), held) in enumerate(zip(lengths, pages, strict=True))
    ]
    num_decodes = next((at for at, (query, _) in enumerate(lengths) if query > 1), len(lengths))
    recorder: Any = _Recorder(device)
    inputs = StepInputs.of(Batch(parts, num_decodes), page_size)[0]
    if recorded is not None:
        inputs = padded_with_chunks(inputs, *recorded, page_size)
    inputs.run(recorder)
    _, positions, batch, *_ = recorder.given
    return batch, positions


def random_pages(lengths: Lengths, page_size: int, num_pages: int) -> list[list[int]]:
    """Return pages for each sequence, chosen at random."""
    spare = iter(torch.randperm(num_pages).tolist())
    return [[next(spare) for _ in range(-(-kv // page_size))] for _, kv in lengths]


class PagedLayers:
    """Random keys and values of several layers in the pool's layout, and a batch that reads them.

    There are as many layers as a model has, or as fit into `pool_bytes`.
    """

    def __init__(self, bench: Bench, lengths: Lengths, recorded: tuple[int, int] | None = None) -> None:
        sizes, device = bench.sizes, bench.device.name
        dtype: torch.dtype = getattr(torch, sizes.dtype)
        num_pages = sum(-(-kv // sizes.page_size) for _, kv in lengths)
        shape = LayerShape(sizes.kv_heads, sizes.head_dim, sizes.head_dim)
        one = PoolLayout((shape,), sizes.page_size, dtype.itemsize)
        self.num_layers = max(1, min(sizes.num_layers, sizes.pool_bytes // (num_pages * one.page_bytes)))
        layout = PoolLayout((shape,) * self.num_layers, sizes.page_size, dtype.itemsize)
        pool = torch.randn(num_pages * layout.page_elements, dtype=dtype, device=device)
        views = [layout.views(layer, num_pages) for layer in range(self.num_layers)]
        self.pages = [tuple(pool.as_strided(view.shape, view.strides, view.offset) for view in each) for each in views]
        pages = random_pages(lengths, sizes.page_size, num_pages)
        self.batch, _ = batch_of(lengths, pages, sizes.page_size, device, recorded)
        num_rows = int(self.batch.query_start[-1])
        self.q = torch.randn(num_rows, sizes.heads, sizes.head_dim, dtype=dtype, device=device)

    def attention(self, kernel: Callable[..., Tensor]) -> list[Callable[[], Tensor]]:
        """Return the attention of each layer as a function."""
        scale = self.q.shape[-1] ** -0.5
        return [partial(kernel, self.q, *pages, self.batch, scale=scale) for pages in self.pages]


def kernels_of(bench: Bench):
    """Return the attention that a replica on this device would choose; in a dry run Triton's, interpreted."""
    return choose_attention("triton" if bench.sizes.is_dry else "auto", torch.device(bench.device.name))


def token_bytes(sizes: Sizes) -> int:
    """Return the bytes of keys and values of one token in one layer."""
    return 2 * sizes.kv_heads * sizes.head_dim * getattr(torch, sizes.dtype).itemsize


def ceilings(bench: Bench) -> Iterator[Case]:
    """Measure the limits of the device: bytes per second, FLOP per second, launches per second."""
    device, sizes = bench.device, bench.sizes

    def copy() -> Figures:
        x = torch.randn(sizes.ceiling[0], dtype=torch.bfloat16, device=device.name)
        y = torch.empty_like(x)
        return {"tb_per_s": 2 * x.nbytes / device.timed(lambda: y.copy_(x)) / 1e12}

    def product() -> Figures:
        rows = sizes.ceiling[1]
        a, b = (torch.randn(rows, rows, dtype=torch.bfloat16, device=device.name) for _ in range(2))
        return {"tflop_per_s": 2 * rows**3 / device.timed(lambda: a @ b) / 1e12}

    def launch() -> Figures:
        x = torch.zeros(1, device=device.name)

        def hundred() -> None:
            for _ in range(100):
                x.add_(1)

        return {"launched_us": device.timed(hundred) * 1e4, "replayed_us": device.replayed(hundred) * 1e4}

    yield Case("copy", copy)
    yield Case("product", product)
    yield Case("launch", launch)


def decodes(bench: Bench) -> Iterator[Case]:
    """Yield the attention of decode steps, beside torch's SDPA on contiguous keys and values."""
    for streams, context in bench.sizes.decodes:
        yield Case(f"{streams} x {context}", partial(_decode, bench, streams, context))


def _decode(bench: Bench, streams: int, context: int) -> Figures:
    layers = PagedLayers(bench, [(1, context)] * streams)
    ours = bench.device.replayed(*layers.attention(kernels_of(bench).paged_attention))
    num_layers = layers.num_layers
    del layers
    least = streams * context * token_bytes(bench.sizes) / bench.bandwidth
    sdpa = _sdpa_decode(bench, streams, context)
    return {"us": ours * 1e6, "of_bandwidth": least / ours, "sdpa_us": sdpa * 1e6, "layers": num_layers}


def _sdpa_decode(bench: Bench, streams: int, context: int) -> float:
    sizes, dtype = bench.sizes, getattr(torch, bench.sizes.dtype)
    q = torch.randn(streams, sizes.heads, 1, sizes.head_dim, dtype=dtype, device=bench.device.name)
    copies = max(2, min(32, 8 * sizes.cache_bytes // (streams * context * token_bytes(sizes))))
    shape = (2, streams, sizes.kv_heads, context, sizes.head_dim)
    kv = [torch.randn(shape, dtype=dtype, device=bench.device.name) for _ in range(copies)]
    return bench.device.replayed(
        *(partial(F.scaled_dot_product_attention, q, keys, values, enable_gqa=True) for keys, values in kv)
    )


def prefills(bench: Bench) -> Iterator[Case]:
    """Yield the attention of prompts and chunks, and the store of keys and values; whole prompts beside torch's own."""
    for name, lengths in bench.sizes.prefills.items():
        yield Case(name, partial(_prefill, bench, lengths))
    for start, tokens in bench.sizes.deep:
        name = f"chunk {tokens} at {start} + {bench.sizes.streams} decodes, as recorded"
        yield Case(name, partial(_recorded, bench, start, tokens))
    yield Case(f"store_kv of {bench.sizes.stored} tokens", partial(_store, bench))
    for package in packages(bench):
        for name, lengths in bench.sizes.prefills.items():
            yield Case(f"{name}, {package.name} over our pages", partial(_packaged, bench, lengths, package))
    for name, lengths in bench.sizes.prefills.items():
        if len(lengths) == 1 and lengths[0][0] == lengths[0][1]:
            yield Case(f"{name}, torch's SDPA", partial(_sdpa_prefill, bench, lengths[0][0]))
            yield Case(f"{name}, torch's SDPA in cuDNN", partial(_sdpa_prefill, bench, lengths[0][0], is_cudnn=True))


def _prefill(bench: Bench, lengths: Lengths) -> Figures:
    layers = PagedLayers(bench, lengths)
    ours = bench.device.replayed(*layers.attention(kernels_of(bench).paged_attention)[:4])
    return {"us": ours * 1e6, "of_peak": _flop(bench.sizes, lengths) / ours / bench.peak}


def packages(bench: Bench) -> list[Any]:
    """Return the packages of attention that `auto` may take for long chunks; in a dry run, and without a GPU, none."""
    if bench.sizes.is_dry or not torch.cuda.is_available():
        return []
    from crossdock.kernels.gpu.long_chunks import installed

    return installed(torch.cuda.get_device_capability())


def _packaged(bench: Bench, lengths: Lengths, package: Any) -> Figures:
    """Time a package, kernel by kernel as a step with long chunks runs it, and compare it with Triton's kernels."""
    layers = PagedLayers(bench, lengths)
    ours, theirs = (layers.attention(attend) for attend in (kernels_of(bench).paged_attention, package.paged_attention))
    expected = ours[0]()
    error = float((theirs[0]() - expected).norm() / expected.norm())
    seconds, own = (bench.device.timed(each[0]) for each in (theirs, ours))
    peak = _flop(bench.sizes, lengths) / seconds / bench.peak
    return {"us": seconds * 1e6, "of_peak": peak, "triton_over_it": own / seconds, "relative_error": error}


def _recorded(bench: Bench, start: int, tokens: int) -> Figures:
    """Time a chunk deep in a prompt beside streams, with the empty sequences that its graph has."""
    streams = bench.sizes.streams
    lengths = [*[(1, bench.sizes.stream_context)] * streams, (tokens, start + tokens)]
    layers = PagedLayers(bench, lengths, (streams, tokens))
    return {"us": bench.device.replayed(*layers.attention(kernels_of(bench).paged_attention)[:4]) * 1e6}


def _flop(sizes: Sizes, lengths: Sequence[tuple[int, int]]) -> float:
    return sum(4 * sizes.heads * sizes.head_dim * query * (kv - (query - 1) / 2) for query, kv in lengths)


def _store(bench: Bench) -> Figures:
    sizes = bench.sizes
    layers = PagedLayers(bench, [(sizes.stored, sizes.stored)])
    k, v = (torch.randn_like(layers.q[:, : sizes.kv_heads]) for _ in range(2))
    store_kv = kernels_of(bench).store_kv
    seconds = bench.device.replayed(*(partial(store_kv, k, v, *pages, layers.batch.slots) for pages in layers.pages))
    return {"us": seconds * 1e6, "of_bandwidth": 4 * k.nbytes / seconds / bench.bandwidth}


def _contiguous(bench: Bench, tokens: int) -> list[Tensor]:
    sizes, dtype = bench.sizes, getattr(torch, bench.sizes.dtype)
    return [
        torch.randn(1, heads, tokens, sizes.head_dim, dtype=dtype, device=bench.device.name)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    ]


def _sdpa_prefill(bench: Bench, tokens: int, *, is_cudnn: bool = False) -> Figures:
    q, k, v = _contiguous(bench, tokens)
    run = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if is_cudnn and not bench.sizes.is_dry else nullcontext():
        seconds = bench.device.replayed(run)
    return {"us": seconds * 1e6, "of_peak": _flop(bench.sizes, [(tokens, tokens)]) / seconds / bench.peak}


def tiles(bench: Bench) -> Iterator[Case]:
    """Yield attention with tiles of other sizes. The first are those that `tiles_for` chooses on Hopper."""
    for name, lengths in bench.sizes.tiled.items():
        has_chunks = lengths[-1][0] > 1
        for each in bench.sizes.chunk_tiles if has_chunks else bench.sizes.decode_tiles:
            yield Case(f"{name}, {each}", partial(_tiled, bench, lengths, each))


def _tiled(bench: Bench, lengths: Lengths, sizes: tuple[int, int, int, int]) -> Figures:
    from crossdock.kernels.gpu import triton_attention

    chosen, triton_attention.tiles_for = triton_attention.tiles_for, lambda *_: triton_attention.Tiles(*sizes)
    try:
        layers = PagedLayers(bench, lengths)
        return {"us": bench.device.replayed(*layers.attention(kernels_of(bench).paged_attention)[:8]) * 1e6}
    finally:
        triton_attention.tiles_for = chosen


CEILINGS = Section("ceilings", 30.0, ceilings)
SECTIONS = [Section("decode", 60.0, decodes), Section("prefill", 80.0, prefills)]
TILES = [Section("tiles", 120.0, tiles)]
