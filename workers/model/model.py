"""A Hugging Face causal LM over paged KV: flat token ids in, logits out. The model's own code runs unchanged."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import CPP, Attention
from crossdock.kernels.cpu.huge_pages import HugePages, MemoryTaker
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, View, group_layouts
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.forward_context import ForwardContext, entered
from crossdock.workers.model.pictures.vision import PictureEncoder, PictureRows
from crossdock.workers.model.pooling import HiddenTap
from crossdock.workers.model.recurrent.state_pages import StateLayout, StepStates
from crossdock.workers.schedule.memory.layer_groups import LayerGroup
from crossdock.workers.schedule.memory.prefix_index import Window


@dataclass(slots=True, eq=False)
class PagedModel:
    """A loaded model, or one rank's part of it, and the KV pool that it writes to."""

    module: nn.Module
    config: PretrainedConfig
    layers: Sequence[LayerShape]  # of each layer with attention here: the KV heads that this rank holds
    max_model_len: int  # tokens
    eos_token_ids: frozenset[int]
    part: ModelPart = field(default_factory=lambda: ModelPart(RankPosition()))
    attention: Attention = CPP
    windows: Sequence[Window] = ()  # of the attention of each layer here
    attention_chunks: Mapping[int, int] = field(default_factory=dict)  # see `ForwardContext`
    places: dict[int, int] = field(default_factory=dict)  # in `layers`, by layer number; empty: all have attention
    states: StateLayout | None = None  # of the recurrent layers here; None: the model has none
    least_state_pages: int = 1  # what the rank with the largest state needs for a request's
    states_name: str = ""  # names the states of all ranks of a gang; empty: there is one rank
    groups: Sequence[LayerGroup] = ()  # of the whole model's layers, which share pages; empty: all do, for good
    pages: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pool: Tensor | None = None
    pool_bytes: Tensor | None = None  # the pool as [page, page_bytes] uint8, where recurrent states are
    scales: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each layer here, if pages are e4m3: of keys and of values, [Hkv] float32, powers of two."""
    kernels: str = ""  # which compute the products of fused layers, as text; empty: transformers' own code does
    graphs: str = ""  # which steps run as CUDA graphs, as text, and why others do not; empty: none, and none could
    variant: str = ""  # sets it apart from others of the same weights whose keys and values differ
    encoder: PictureEncoder | None = None  # None: prompts are text alone, see `why_text_alone`
    why_text_alone: str = "the model takes text alone"
    used_by_others: int = 0  # bytes of the GPU in use when loading began, without those of torch in this process
    tap: HiddenTap = field(init=False)  # of the hidden states, for vectors of prompts
    _taker: MemoryTaker | None = None  # of the pool on a CPU

    def __post_init__(self) -> None:
        self.tap = HiddenTap(self.module)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the pages."""
        return torch.float8_e4m3fn if self.scales else self.dtype

    @property
    def vocab_size(self) -> int:
        """The width of the logits. It may exceed the tokenizer's vocabulary."""
        size: int = text_config(self.config).vocab_size
        return size

    def layout(self, page_size: int) -> PoolLayout:
        """Return the layout of a page that all layers share."""
        return PoolLayout(self.layers, page_size, self.kv_dtype.itemsize)

    def layouts(self, page_size: int) -> list[PoolLayout]:
        """Return the layout of a page for each group of layers: all have the same number of bytes."""
        shapes = [[self.layers[layer] for layer in layers] for layers in self.held_groups]
        return list(group_layouts(shapes, page_size, self.kv_dtype.itemsize))

    @property
    def held_groups(self) -> list[list[int]]:
        """Return the layers here of each group, numbered from 0. A stage of a pipeline may have none of a group."""
        first, held = self.part.first_place, range(len(self.layers))
        groups = [[layer - first for layer in group.layers if layer - first in held] for group in self.groups]
        return groups or [list(held)]

    def state_pages(self, page_size: int) -> int:
        """Return how many pages the recurrent state of one request takes, which is the same on all ranks of a gang."""
        if self.states is None:
            return 0
        return max(self.least_state_pages, self.states.num_pages(self.layouts(page_size)[0].page_bytes))

    def allocate_pool(self, num_pages: int, page_size: int) -> None:
        """Allocate the one KV tensor of this process.

        Raises:
            ValueError: attention cannot read pages of this size.
        """
        if page_size % self.attention.page_multiple:
            raise ValueError(
                f"page_size ({page_size}) must be a multiple of {self.attention.page_multiple} tokens for "
                f"attention_backend {self.attention.name}, whose tiles may not cross pages; triton reads any"
            )
        self.free_pool()
        layouts = self.layouts(page_size)
        num_elements = num_pages * layouts[0].page_elements
        if self.device.type == "cpu":
            pool = HugePages().take(num_elements, self.kv_dtype)
            self._taker = MemoryTaker(pool)
        else:
            pool = torch.zeros(num_elements, dtype=self.kv_dtype, device=self.device)

        def tensor(view: View) -> Tensor:
            return pool.as_strided(view.shape, view.strides, view.offset)

        views = [layout.views(layer, num_pages) for layout in layouts for layer in range(len(layout.layers))]
        pages = [(tensor(keys), tensor(values)) for keys, values in views]
        order = [layer for layers in self.held_groups for layer in layers]
        self.pages = [pages for _, pages in sorted(zip(order, pages, strict=True), key=lambda pair: pair[0])]
        self.pool = pool
        if self.states is not None:
            self.pool_bytes = pool.view(torch.uint8).view(num_pages, -1)

    def free_pool(self) -> None:
        """Free the pool. Call it only before another component has a reference to the pool."""
        self.pages, self.pool, self.pool_bytes = [], None, None
        if self._taker is not None:
            self._taker.end()
            self._taker = None

    def wait_for_memory(self) -> None:
        """Wait until this process has the memory of its pool. Until then a step that reaches new pages takes longer."""
        if self._taker is not None:
            self._taker.wait()

    def memory_paused(self) -> AbstractContextManager[None]:
        """Return a context for measurements, in which no memory of the pool is taken unless `wait_for_memory` asks."""
        return nullcontext() if self._taker is None else self._taker.paused()

    def wait(self) -> None:
        """Wait until the device has finished all work queued so far: on a GPU, calls return before that."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        pictures: PictureRows | None = None,
        states: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Compute one flat batch. Keys and values go to the pages named by `batch`.

        Of a model with several groups of layers, `batch` has page tables [S, G, P] and slots [T, G]. token_ids,
        positions: [T] int64. rows: [N] int64, the rows of the T whose logits are wanted. Returns [N, vocab] in the
        model's dtype; [0, vocab] on a stage that others follow. `pictures`: rows that are no tokens' embeddings.
        `states`: the pages of the recurrent states that the step reads, and those that it writes, [S, n] int32 each.
        """
        if pictures is not None:
            batch = replace(batch, key_end=pictures.key_end)
        context = ForwardContext(self.attention, batch, self.pages, self.scales, self.part.first_layer)
        if self.states is not None:
            assert states is not None, "the step does not say which pages hold its states"
            assert self.pool_bytes is not None
            lengths: list[int] = batch.query_start.diff().tolist()  # on a GPU the host waits here
            context.places = self.places
            context.states = StepStates(self.states, self.pool_bytes, *states, lengths, batch.num_decodes)
        if len(self.groups) > 1:
            batches = {
                layer: replace(batch, page_table=batch.page_table[:, group], slots=slots, derived={})
                for (group, slots), layers in zip(enumerate(batch.slots.T.contiguous()), self.held_groups, strict=True)
                for layer in layers
            }
            context.layer_batches = [batches[layer] for layer in range(len(self.layers))]
        if pictures is not None:
            context.pictures = pictures
            positions = positions if pictures.positions is None else pictures.positions
        return self.run(context, token_ids, positions, rows)

    def run(
        self,
        context: ForwardContext,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Compute one flat batch with `context` for its attention; see `forward` and `logits`.

        positions: [T], or [3, T] of a model with positions in time, height and width.
        """
        context.attention_chunks, context.positions = self.attention_chunks, positions
        with entered(context):
            inputs = {"position_ids": positions[..., None, :], "logits_to_keep": rows}
            pictures = context.pictures if self.part.position.is_first_stage else None
            if pictures is not None and len(pictures.rows):
                inputs["inputs_embeds"] = self._embedded(token_ids, pictures)
            return self.logits(token_ids, dtype, **inputs)

    def _embedded(self, token_ids: Tensor, pictures: PictureRows) -> Tensor:
        """Return the inputs [1, T, E] of the first layer: embeddings of tokens, and of pictures in their rows."""
        embeddings: Tensor = self.module.get_input_embeddings()(token_ids[None]).clone()  # type: ignore[operator]
        embeddings[0, pictures.rows] = pictures.embeddings[0]
        return embeddings

    def logits(self, token_ids: Tensor, dtype: torch.dtype | None = None, **inputs: Any) -> Tensor:
        """Return the logits [N, vocab] of transformers' own forward, or [0, vocab] on a stage that others follow.

        `dtype` is the one that the model computes in, if that is not the parameters'. `inputs`: the forward's further
        arguments.
        """

        def forward(entering: Tensor | None) -> Tensor:
            is_ids = entering is None or stage is None or stage.needs_token_ids
            given = {"input_ids": token_ids[None]} if is_ids else {"inputs_embeds": entering}
            given = {} if "inputs_embeds" in inputs else given
            logits: Tensor = self.module(**given, **({"use_cache": False} | inputs)).logits[0]
            return logits

        stage = self.part.stage
        if stage is None:
            return forward(None)
        like = torch.empty(0, self.vocab_size, dtype=dtype or self.dtype, device=self.device)
        logits = stage.run(forward, len(token_ids), like)
        return logits if logits is not None else like


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the decoder, which is a part of some models' configuration."""
    decoder: PretrainedConfig = config.get_text_config(decoder=True)
    return decoder
