"""A model that is loaded and proven, over the pages of its KV pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from crossdock.kernels.attention import AttentionBatch
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, group_layouts
from crossdock.workers.model.architecture import most_chosen, text_config
from crossdock.workers.model.cut.expert_balance import ExpertBalance
from crossdock.workers.model.forward.forward_context import ForwardContext
from crossdock.workers.model.forward.layer_tap import LayerTap
from crossdock.workers.model.forward.row_adapters import RowAdapters
from crossdock.workers.model.forward.state_pages import StateLayout, StepStates
from crossdock.workers.model.forward.step_pictures import PictureRows
from crossdock.workers.model.kv_pool import KVPool
from crossdock.workers.model.lora.adapters import Adapters
from crossdock.workers.model.network import Network
from crossdock.workers.model.pictures.vision import PictureEncoder
from crossdock.workers.schedule.cost.cost import NO_LIMIT
from crossdock.workers.schedule.memory.layer_groups import LayerGroup
from crossdock.workers.schedule.memory.prefix_index import Window


@dataclass(frozen=True, eq=False)
class LoadedModel(Network):
    """A network whose layers are known. Only the contents of `pool` and `adapters`, and what `encoder` and `layer_tap`
    keep, change later."""

    eos_token_ids: frozenset[int]
    layers: Sequence[LayerShape]  # of each layer with attention here: the KV heads that this rank holds
    windows: Sequence[Window]  # of the attention of each of `layers`
    places: Mapping[int, int]  # in `layers`, by layer number
    states: StateLayout | None = None  # of the recurrent layers here; None: the model has none
    least_state_pages: int = 1  # what the rank with the largest state needs for a request's
    states_name: str = ""  # names the states of all ranks of a worker group; empty: there is one rank
    groups: Sequence[LayerGroup] = ()  # of the whole model's layers, which share pages; empty: all do, for good
    scales: Sequence[tuple[Tensor, Tensor]] = ()
    """Of each layer here, if pages are e4m3: of keys and of values, [Hkv] float32, powers of two."""
    kernels: str = ""  # which compute the products of fused layers, as text; empty: transformers' own code does
    checkpoint: str = ""  # fingerprint of its files; empty: a part of a model, or of no files
    variant: str = ""  # sets it apart from others of the same weights whose keys and values differ
    encoder: PictureEncoder | None = None  # None: prompts are text alone, see `why_text_alone`
    why_text_alone: str = "the model takes text alone"
    adapters: Adapters | None = None  # None: it takes no adapters
    used_by_others: int = 0  # bytes of the GPU in use when loading began, without those of torch in this process
    pool: KVPool = field(default_factory=KVPool)
    balance: ExpertBalance | None = None  # of hot experts among the ranks of a stage; None: experts stay where they are
    layer_tap: LayerTap = field(default_factory=LayerTap)  # of the hidden states between layers

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of the pages."""
        return torch.float8_e4m3fn if self.scales else self.dtype

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
        first = self.part.first_place
        held = range(len(self.layers))
        groups = [[layer - first for layer in group.layers if layer - first in held] for group in self.groups]
        return groups or [list(held)]

    def state_pages(self, page_size: int) -> int:
        """Return how many pages the recurrent state of one request takes: the same number on all ranks."""
        if self.states is None:
            return 0
        return max(self.least_state_pages, self.states.num_pages(self.layouts(page_size)[0].page_bytes))

    @property
    def num_hidden_layers(self) -> int:
        """Return the number of decoder layers of the whole model."""
        number: int = text_config(self.config).num_hidden_layers
        return number

    @property
    def most_context(self) -> float:
        """Return the most tokens that a row attends to: as many as its indexers choose, if the model has some."""
        most = most_chosen(text_config(self.config))
        return NO_LIMIT if most is None else float(most)

    @property
    def has_whole_embedding(self) -> bool:
        """Return whether this rank holds the embeddings of all tokens."""
        position = self.part.position
        if not position.is_first_stage:
            return False
        return position.tensor_size == 1 or len(self.module.get_input_embeddings().weight) == self.vocab_size

    def tap_layers(self, layers: Sequence[int]) -> None:
        """Have forward passes keep the hidden states that enter `layers`, for `layer_tap.take`.

        Raises:
            ValueError: layers are on several ranks, or are no list in the model.
        """
        if self.part.stage is not None:
            raise ValueError("pipeline_parallel_size must be 1: a head reads layers of several stages")
        decoder = self.module.get_decoder()
        modules = getattr(decoder, "layers", None)
        if not isinstance(modules, nn.ModuleList):
            raise ValueError(f"{self.config.model_type}: its layers are in no list, and their states cannot be taken")
        self.layer_tap.open_at(layers, list(modules) if len(modules) == self.num_hidden_layers else ())

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
        order = [layer for layers in self.held_groups for layer in layers]
        self.pool.allocate(self.layouts(page_size), order, num_pages, self.kv_dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        rows: Tensor,
        pictures: PictureRows | None = None,
        states: tuple[Tensor, Tensor] | None = None,
        adapters: RowAdapters | None = None,
        entering: Tensor | None = None,
    ) -> Tensor:
        """Compute one flat batch. Keys and values go to the pages named by `batch`.

        Of a model with several groups of layers, `batch` has page tables [S, G, P] and slots [T, G]. token_ids,
        positions: [T] int64. rows: [N] int64, the rows of the T whose logits are wanted. Returns [N, vocab] in the
        model's dtype; [0, vocab] on a stage that others follow. `pictures`: rows that are no tokens' embeddings.
        `states`: the pages of the recurrent states that the step reads, and those that it writes, [S, n] int32 each.
        `adapters`: of its rows. `entering`: what the first layer gets in the place of embeddings, [T, E].
        """
        if pictures is not None:
            batch = replace(batch, key_end=pictures.key_end)
            positions = positions if pictures.positions is None else pictures.positions
        context = ForwardContext(
            self.attention,
            batch,
            self.pool.pages,
            self.scales,
            places=self.places,
            states=self._step_states(batch, states),
            layer_batches=self._layer_batches(batch),
            pictures=pictures,
            adapters=adapters,
            layer_tap=self.layer_tap,
        )
        return self.run(context, token_ids, positions, rows, entering=entering)

    def _step_states(self, batch: AttentionBatch, states: tuple[Tensor, Tensor] | None) -> StepStates | None:
        """Return where a step keeps its recurrent states; None: the model has no recurrent layers."""
        if self.states is None:
            return None
        assert states is not None, "the step does not say which pages hold its states"
        lengths: list[int] = batch.query_start.diff().tolist()  # on a GPU the host waits here
        return StepStates(self.states, self.pool.by_page, *states, lengths, batch.num_decodes)

    def _layer_batches(self, batch: AttentionBatch) -> Sequence[AttentionBatch]:
        """Return the batch with each layer's own pages; nothing where all layers share pages."""
        if len(self.groups) <= 1:
            return ()
        tables = zip(batch.page_table.unbind(1), batch.slots.T.contiguous(), self.held_groups, strict=True)
        batches: dict[int, AttentionBatch] = {}
        for table, slots, layers in tables:
            batches |= dict.fromkeys(layers, replace(batch, page_table=table, slots=slots, derived={}))
        return [batches[layer] for layer in range(len(self.layers))]
