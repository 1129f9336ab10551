"""The attention function that transformers calls in every layer, and the context it needs beside its arguments.

The context (pages, rows of the flat batch) is thread-local: some architectures drop keyword arguments on the way to
attention.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import Attention
from crossdock.kernels.indexed_attention import Indexer, indexed_attention
from crossdock.kernels.indexed_blocks import BlockIndexer, block_attention
from crossdock.kernels.latent_attention import latent_attention
from crossdock.kvtransfer.layout import LayerShape
from crossdock.workers.model.architecture import ATTENTION_NAME, INDEXED_TYPE
from crossdock.workers.model.forward.latent import unexpanded
from crossdock.workers.model.forward.layer_tap import LayerTap
from crossdock.workers.model.forward.row_adapters import RowAdapters
from crossdock.workers.model.forward.state_pages import StepStates
from crossdock.workers.model.forward.step_pictures import PictureRows
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments with which one layer called attention during a probe."""

    layer: int
    shape: LayerShape
    window: Window
    largest: tuple[Tensor, Tensor]  # magnitudes of each head's keys and values, [Hkv]
    is_plain: bool  # scores have no softcap and no sinks


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The data that attention layers need beside their arguments during one forward pass."""

    attention: Attention
    batch: AttentionBatch | None = None  # None: probe, that is attend within each sequence of `probe_lengths`
    pages: Sequence[tuple[Tensor, Tensor]] = ()  # of each layer: keys and values, [page, kv_head, token, head_dim]
    scales: Sequence[tuple[Tensor, Tensor]] = ()  # of each layer's e4m3 pages: keys and values, [Hkv]
    places: Mapping[int, int] = field(default_factory=dict)  # in `pages`, by layer
    states: StepStates | None = None  # of models with recurrent layers
    layer_batches: Sequence[AttentionBatch] = ()  # `batch` with each layer's own pages, where groups of layers differ
    probe_lengths: Sequence[int] = ()
    probe_calls: list[AttentionCall] = field(default_factory=list)
    pictures: PictureRows | None = None  # rows of the batch that are embeddings of pictures
    attention_chunks: Mapping[int, int] = field(default_factory=dict)  # their tokens, by layer that has them
    adapters: RowAdapters | None = None  # None: no row of the batch has an adapter
    positions: Tensor | None = None  # [T] of the rows of the flat batch; [3, T] of models with three axes
    layer_tap: LayerTap | None = None  # None: a probe, whose states are not read

    def of_layer(self, place: int) -> tuple[Tensor, Tensor, AttentionBatch, dict[str, Any]]:
        """Return a layer's pages of keys and of values, the batch with its pages, and the scales of these, if any."""
        assert self.batch is not None
        batch = self.layer_batches[place] if self.layer_batches else self.batch
        scales = dict(zip(("k_scale", "v_scale"), self.scales[place], strict=True)) if self.scales else {}
        return *self.pages[place], batch, scales


_current = threading.local()

NO_MASK = {INDEXED_TYPE: torch.empty(1, 1, 0, 0)}
"""The masks of a model with indexers, whose layers take a part of their mask, which is not read in a pass of ours."""


@contextmanager
def entered(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one that attention layers of this thread find."""
    _current.context = context
    try:
        yield
    finally:
        del _current.context


def current_context() -> ForwardContext:
    """Return the context of this thread's forward pass."""
    context: ForwardContext = _current.context
    return context


def context_or_none() -> ForwardContext | None:
    """Return the context of this thread's forward pass; None: the pass is not ours."""
    return getattr(_current, "context", None)


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, H, T, Dk]
    key: Tensor,  # [1, Hkv, T, Dk]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Indexer | None = None,
    block_indices: BlockIndexer | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Store a layer's keys and values to pages, and attend over the pages. Returns [1, T, H, Dv]."""
    is_masked = attention_mask is not None and attention_mask is not NO_MASK[INDEXED_TYPE]
    assert not is_masked, (
        "transformers makes masks for the implementations in its mask interface alone; ours is none of them"
    )
    context = current_context()
    # [T, heads, head_dim].
    q = query[0].transpose(0, 1)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    if indices is not None and indices.layer == layer:
        v = indices.keys[:, None]
    if block_indices is not None:
        v = block_indices.behind(v)
    scales: dict[str, Tensor] = {}
    window: Window = sliding_window
    visible: dict[str, int | None] = {"window": sliding_window}
    if (attention_chunk := context.attention_chunks.get(layer)) is not None:
        window = AttentionChunk(attention_chunk)
        visible = {"attention_chunk": attention_chunk}
    if context.batch is None:
        shape = LayerShape(k.shape[1], k.shape[2], v.shape[2])
        largest = k.abs().amax((0, 2)), (v if v.shape[2] else k).abs().amax((0, 2))  # values may lie within the keys
        is_plain = softcap is None and s_aux is None
        context.probe_calls.append(AttentionCall(layer, shape, window, largest, is_plain))
        batch = batch_of_one_page_each(context.probe_lengths, k.device, context.attention.page_multiple)
        page_size = page_size_for(context.probe_lengths, context.attention.page_multiple)
        k_pages, v_pages = (x.new_zeros(len(batch.kv_len), x.shape[1], page_size, x.shape[2]) for x in (k, v))
    else:
        k_pages, v_pages, batch, scales = context.of_layer(context.places[layer])
    context.attention.store_kv(k, v, k_pages, v_pages, batch.slots, **scales)
    attention = context.attention.paged_attention
    if (latents := unexpanded(module)) is not None and indices is not None:
        up = latents.projections
        out = indexed_attention(attention, q, k_pages, v_pages, batch, up, indices, scale=scale)
    elif block_indices is not None:
        out = block_attention(attention, q, k_pages, v_pages, batch, block_indices, scale=scale)
    elif latents is not None:
        out = latent_attention(attention, q, k_pages, batch, latents.projections, scale=scale, **scales)
    else:
        out = attention(
            q, k_pages, v_pages, batch, scale=scale, softcap=softcap, sinks=s_aux, **visible, **scales
        )  # [T, H, Dv]
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _attend)


def batch_of_one_page_each(lengths: Sequence[int], device: torch.device, page_multiple: int = 1) -> AttentionBatch:
    """Return a batch of whole sequences from position 0, each in one page that is as long as the longest sequence."""
    longest = max(lengths)
    page_size = page_size_for(lengths, page_multiple)
    slots = torch.cat([torch.arange(n) + i * page_size for i, n in enumerate(lengths)]).to(device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    table = torch.arange(len(lengths), dtype=torch.int32, device=device)[:, None]
    num_decodes = next((s for s, n in enumerate(lengths) if n > 1), len(lengths))
    on_host = starts.cpu(), lens.cpu()
    return AttentionBatch(starts, lens, table, slots, longest, longest, num_decodes, on_host=on_host)


def page_size_for(lengths: Sequence[int], page_multiple: int) -> int:
    """Return the page size of `batch_of_one_page_each`, in tokens."""
    return -(-max(lengths) // page_multiple) * page_multiple
