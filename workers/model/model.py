"""A Hugging Face causal LM over paged KV: flat token ids in, logits out. Every touch point with transformers is here,
in parallel.py and in weights.py.

The model's own code runs unchanged; its attention layers call us through `AttentionInterface`. What such a model needs
beyond its arguments (pages, who is who in the flat batch) travels in a thread-local forward context, since some
architectures drop keyword arguments on the way to attention.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from crossdock.kernels.attention import AttentionBatch
from crossdock.kernels.backend import CPP, Attention, choose_attention
from crossdock.kernels.options import KVCacheDtype
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, View
from crossdock.workers.model.checkpoint import resolve_model
from crossdock.workers.model.fp8_scales import example_text, in_float32, scale_for
from crossdock.workers.model.fused_projections import join_projections
from crossdock.workers.model.fusion import NotFusableError, fuse
from crossdock.workers.model.memory_fit import check_fits, used_by_all_but_torch
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.parallel import Links, Part, RankPosition
from crossdock.workers.model.weights import load_part

_IMPLEMENTATION = "crossdock"
_LAYER_TYPES = {"full_attention", "sliding_attention"}


class UnsupportedModelError(ValueError):
    """The model would produce wrong tokens here; the message says why."""


@dataclass(frozen=True, slots=True)
class _Hit:
    """What one layer called attention with in a probe."""

    layer: int
    shape: LayerShape
    window: int | None
    largest: tuple[Tensor, Tensor]  # magnitudes of each head's keys and values, [Hkv]


@dataclass(slots=True)
class _ForwardContext:
    """What attention layers find beside their arguments during one forward pass."""

    attention: Attention
    batch: AttentionBatch | None = None  # None: observe the shapes and attend within each sequence of `probe_lengths`
    pages: Sequence[tuple[Tensor, Tensor]] = ()  # of each layer: keys and values, [page, kv_head, token, head_dim]
    scales: Sequence[tuple[Tensor, Tensor]] = ()  # of each layer's e4m3 pages: keys and values, [Hkv]
    first_layer: int = 0  # whose pages are the first
    probe_lengths: Sequence[int] = ()
    probe_hits: list[_Hit] = field(default_factory=list)

    def bound(self) -> tuple[Sequence[tuple[Tensor, Tensor]], AttentionBatch]:
        assert self.batch is not None
        return self.pages, self.batch


_current = threading.local()
logger = logging.getLogger(__name__)


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
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in every layer. Returns [1, T, H, Dv]."""
    assert attention_mask is None, "our implementation is not in the mask interface: no mask is ever made for it"
    context: _ForwardContext = _current.context
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, heads, head_dim]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    scales: dict[str, Tensor] = {}
    if context.batch is None:
        shape = LayerShape(k.shape[1], k.shape[2], v.shape[2])
        largest = k.abs().amax((0, 2)), v.abs().amax((0, 2))
        context.probe_hits.append(_Hit(layer, shape, sliding_window, largest))
        batch = _one_page_each(context.probe_lengths, k.device, context.attention.page_multiple)
        page_size = _page_for(context.probe_lengths, context.attention.page_multiple)
        k_pages, v_pages = (x.new_zeros(len(batch.kv_len), x.shape[1], page_size, x.shape[2]) for x in (k, v))
    else:
        (k_pages, v_pages), batch = context.pages[layer - context.first_layer], context.batch
        if context.scales:
            scales = dict(zip(("k_scale", "v_scale"), context.scales[layer - context.first_layer], strict=True))
    context.attention.store_kv(k, v, k_pages, v_pages, batch.slots, **scales)
    out = context.attention.paged_attention(
        q, k_pages, v_pages, batch, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux, **scales
    )  # [T, H, Dv]
    return out[None], None


AttentionInterface.register(_IMPLEMENTATION, _attend)


def _one_page_each(lengths: Sequence[int], device: torch.device, page_multiple: int = 1) -> AttentionBatch:
    """A flat probe from the start of its sequences, each in a page of its own that holds the longest."""
    longest, page_size = max(lengths), _page_for(lengths, page_multiple)
    slots = torch.cat([torch.arange(n) + i * page_size for i, n in enumerate(lengths)]).to(device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts = nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    table = torch.arange(len(lengths), dtype=torch.int32, device=device)[:, None]
    return AttentionBatch(starts, lens, table, slots, longest, longest)


def _page_for(lengths: Sequence[int], page_multiple: int) -> int:
    return -(-max(lengths) // page_multiple) * page_multiple


@dataclass(slots=True, eq=False)
class PagedModel:
    """A loaded model, or one rank's part of it, and the KV pool it writes to."""

    module: nn.Module
    config: PretrainedConfig
    layers: Sequence[LayerShape]  # what is here of each layer from the part's first on
    max_model_len: int  # tokens
    eos_token_ids: frozenset[int]
    part: Part = field(default_factory=lambda: Part(RankPosition()))
    attention: Attention = CPP
    pages: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pool: Tensor | None = None
    scales: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of each layer here, where pages are e4m3: of keys and of values, [Hkv] float32, powers of two."""
    used_by_others: int = 0  # bytes of the GPU when loading began, by whomever but torch here

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pages."""
        return torch.float8_e4m3fn if self.scales else self.dtype

    @property
    def vocab_size(self) -> int:
        """Width of the logits; may exceed the tokenizer's vocabulary."""
        size: int = _text_config(self.config).vocab_size
        return size

    def layout(self, page_size: int) -> PoolLayout:
        return PoolLayout(self.layers, page_size, self.kv_dtype.itemsize)

    def allocate_pool(self, num_pages: int, page_size: int) -> None:
        """Allocates the one KV tensor of this process.

        Raises:
            ValueError: attention cannot read pages of this size.
        """
        if page_size % self.attention.page_multiple:
            raise ValueError(
                f"page_size ({page_size}) must be a multiple of {self.attention.page_multiple} tokens for "
                f"attention_backend {self.attention.name}, whose tiles may not cross pages; triton reads any"
            )
        layout = self.layout(page_size)
        pool = torch.zeros(num_pages * layout.page_elements, dtype=self.kv_dtype, device=self.device)

        def tensor(view: View) -> Tensor:
            return pool.as_strided(view.shape, view.strides, view.offset)

        views = [layout.views(layer, num_pages) for layer in range(len(self.layers))]
        self.pages = [(tensor(keys), tensor(values)) for keys, values in views]
        self.pool = pool

    def free_pool(self) -> None:
        """Before anything else knows of it."""
        self.pages, self.pool = [], None

    def wait(self) -> None:
        """Returns when all that was asked for has been computed: on a GPU, calls return before that."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor) -> Tensor:
        """One pass over a flat batch. token_ids, positions: [T] int64; rows: [N] int64, which of the T rows' logits
        are wanted. Returns [N, vocab] in the model's dtype; keys and values go to the pages named by `batch`. On a
        stage that others follow there are no logits: [0, vocab]."""
        context = _ForwardContext(self.attention, batch, self.pages, self.scales, self.part.first_layer)
        return self._run(context, token_ids, positions, rows)

    def _run(
        self,
        context: _ForwardContext,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        _current.context = context
        try:
            return self._logits(token_ids, dtype, position_ids=positions[None], logits_to_keep=rows)
        finally:
            del _current.context

    def _logits(self, token_ids: Tensor, dtype: torch.dtype | None = None, **inputs: Tensor) -> Tensor:
        """[N, vocab] of transformers' own forward, from this rank's stage to the next. `dtype`: what it computes in,
        where that is not the parameters'."""

        def forward(entering: Tensor | None) -> Tensor:
            is_ids = entering is None or stage is None or stage.needs_token_ids
            given = {"input_ids": token_ids[None]} if is_ids else {"inputs_embeds": entering}
            logits: Tensor = self.module(**given, **inputs, use_cache=False).logits[0]
            return logits

        stage = self.part.stage
        if stage is None:
            return forward(None)
        like = torch.empty(0, self.vocab_size, dtype=dtype or self.dtype, device=self.device)
        logits = stage.run(forward, len(token_ids), like)
        return logits if logits is not None else like


def load_model(
    spec: ModelSpec,
    device: str = "cpu",
    links: Links | None = None,
    kv_bytes: int | None = None,
    loaded: Callable[[], None] = lambda: None,
) -> PagedModel:
    """Load a Hugging Face directory. `links`: to the other ranks of a gang, of which this one loads its part; all must
    load at once. `kv_bytes`: what else must fit into memory; None checks nothing. `loaded` is called when the weights
    are there, before the logits are checked.

    Raises:
        UnsupportedModelError: the architecture would not be computed right through our attention.
        CannotCut: the model cannot be divided among so many ranks.
        DoesNotFit: there is not enough memory.
        ValueError: `max_model_len` is more than the model was made for, or `attention_backend` cannot run on `device`
            with pages of `kv_cache_dtype`.
    """
    path = resolve_model(spec.path)
    attention = choose_attention(spec.attention_backend, torch.device(device), spec.kv_cache_dtype)
    used_by_others = used_by_all_but_torch() if device != "cpu" else 0
    config = AutoConfig.from_pretrained(path)
    _refuse_by_config(config)
    dtype = _default_dtype(config, device) if spec.dtype == "auto" else getattr(torch, spec.dtype)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": _IMPLEMENTATION}
    part = None
    if kv_bytes is not None:
        place, num_sharing = (links.place, links.ranks_on_this_host()) if links is not None else (RankPosition(), 1)
        check_fits(config, place, dtype, kv_bytes, device, num_sharing)
    try:
        if links is not None and links.place.size > 1:
            module, part = load_part(config, path, links.place, links, **options)
        else:
            module = AutoModelForCausalLM.from_pretrained(path, config=config, low_cpu_mem_usage=True, **options)
    except ValueError as error:
        if _IMPLEMENTATION not in str(error) and "attn_implementation" not in str(error):
            raise
        raise UnsupportedModelError(f"{config.model_type}: transformers gives it no pluggable attention") from error
    try:
        generation: GenerationConfig | None = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    module = module.to(device)
    loaded()
    model = wrap_module(module, spec.max_model_len, generation, part, attention, spec.kv_cache_dtype)
    model.used_by_others = used_by_others
    return model


def wrap_module(
    module: Any,
    max_model_len: int | None = None,
    generation: GenerationConfig | None = None,
    part: Part | None = None,
    attention: Attention | None = None,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> PagedModel:
    """Puts a transformers causal LM, or what `cut` left of it, behind our attention, or refuses it. `kv_cache_dtype`
    auto is the model's own."""
    config: PretrainedConfig = module.config
    _refuse_by_config(config)
    module.eval().requires_grad_(False)
    module.set_attn_implementation(_IMPLEMENTATION)
    text_config = _text_config(config)
    longest = getattr(text_config, "max_position_embeddings", None)
    if max_model_len and longest and max_model_len > longest:
        raise ValueError(f"max_model_len ({max_model_len}) is more than the model's own {longest} positions")
    max_model_len = max_model_len or longest or 2048
    _fix_rope_to(module, max_model_len)
    eos = [getattr(source, "eos_token_id", None) for source in (config, text_config, generation) if source]
    eos_token_ids = {
        token for value in eos if value is not None for token in (value if type(value) is list else [value])
    }
    part = part or Part(RankPosition(), num_layers=text_config.num_hidden_layers)
    attention = attention or choose_attention("auto", next(module.parameters()).device, kv_cache_dtype)
    model = PagedModel(module, config, (), max_model_len, frozenset(eos_token_ids), part, attention)
    _probe(model, kv_cache_dtype)
    return model


def _text_config(config: PretrainedConfig) -> PretrainedConfig:
    text: PretrainedConfig = config.get_text_config(decoder=True)
    return text


def _default_dtype(config: PretrainedConfig, device: str) -> torch.dtype:
    stored = getattr(config, "dtype", None) or torch.float32
    if device != "cpu":
        return torch.bfloat16 if stored is torch.float32 else stored
    has_bf16: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float32


def _refuse_by_config(config: PretrainedConfig) -> None:
    kinds = set(getattr(_text_config(config), "layer_types", None) or ())
    if unknown := kinds - _LAYER_TYPES:
        raise UnsupportedModelError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}; served are "
            f"{', '.join(sorted(_LAYER_TYPES))}: others keep state that does not lie in KV pages"
        )
    if getattr(_text_config(config), "attention_chunk_size", None) and not kinds:
        raise UnsupportedModelError(f"{config.model_type} attends within fixed chunks, which paged attention does not")


def _fix_rope_to(module: nn.Module, max_model_len: int) -> None:
    """Rotary embeddings that change with the longest position *of the batch* would let one request change another's
    tokens. They are fixed to what `max_model_len` needs."""
    rotary: Any
    for rotary in module.modules():
        kind = getattr(rotary, "rope_type", None)
        if not isinstance(kind, str):  # none, or one per layer type, which no model combines with the two below
            continue
        if kind == "dynamic":  # differs from its start only past max_position_embeddings, which we do not serve
            rotary.rope_type = "default"
        elif kind == "longrope":
            parameters = rotary.config.rope_parameters
            if max_model_len > parameters["original_max_position_embeddings"]:
                long_frequencies, _ = rotary.rope_init_fn(rotary.config, None, seq_len=max_model_len)
                rotary.register_buffer("inv_freq", long_frequencies, persistent=False)
            rotary.rope_type = "default"


@torch.inference_mode()
def _probe(model: PagedModel, kv_cache_dtype: KVCacheDtype) -> None:
    """Two sequences in one flat batch must give what each gives alone to the model's own eager attention, with every
    layer reaching our function once. Models that keep state elsewhere, or never call the interface, would otherwise
    produce fluent nonsense in silence. Sets `model.layers` and scales, and fuses layers where that gives the same
    again."""
    module: Any = model.module
    config, part = model.config, model.part
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 24]
    ids = torch.randint(0, min(model.vocab_size, 1000), (sum(lengths),), generator=generator).to(model.device)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(model.device)
    rows = torch.arange(sum(lengths), device=model.device)
    context = _ForwardContext(model.attention, probe_lengths=lengths)
    ours = model._run(context, ids, positions, rows)
    hits = sorted(context.probe_hits, key=lambda hit: hit.layer)
    layers = [hit.layer for hit in hits]
    wanted = range(part.first_layer, part.first_layer + part.num_layers)
    if layers != list(wanted):
        missing = sorted(set(wanted) - set(layers))
        raise UnsupportedModelError(
            f"{config.model_type}: layers {missing or layers} of {len(wanted)} did not reach the attention interface "
            f"exactly once; they keep state elsewhere or bring attention code of their own"
        )
    module.set_attn_implementation("eager")
    try:
        theirs = torch.cat([model._logits(sequence) for sequence in torch.split(ids, lengths)])
    finally:
        module.set_attn_implementation(_IMPLEMENTATION)
    tolerance = 2e-3 if model.dtype is torch.float32 else 0.1
    if not (error := _relative_error(ours, theirs)) <= tolerance:
        raise UnsupportedModelError(
            f"{config.model_type}: logits through paged attention differ from the model's own by {error:.1%} in norm"
        )
    model.layers = [hit.shape for hit in hits]
    if kv_cache_dtype == "fp8":
        model.scales = _find_scales(model)  # by transformers' own layers, whatever takes their place on this device
    if model.device.type == "cuda" and part.place.size == 1:
        undo = join_projections(module)
        joined = model._run(_ForwardContext(model.attention, probe_lengths=lengths), ids, positions, rows)
        if not (error := _relative_error(joined, theirs)) <= tolerance:
            logger.info("projections are computed one by one: together they differ by %.1f %%", 100 * error)
            undo()
    if model.attention is not CPP or model.device.type != "cpu" or model.dtype is not torch.bfloat16:
        return  # on GPUs graphs remove dispatch; float32 is for exactness
    try:
        if part.place.size > 1:
            raise NotFusableError("each rank has a part of them")
        undo = fuse(module, [hit.window for hit in hits], lambda: _current.context.bound())
    except NotFusableError as reason:
        logger.info("decoder layers run as transformers wrote them: %s", reason)
        return
    model.allocate_pool(2, max(lengths))
    fused = model.forward(ids, positions, _one_page_each(lengths, model.device), rows)
    if not (error := _relative_error(fused, theirs)) <= tolerance:
        logger.info("decoder layers run as transformers wrote them: fused ones differ by %.1f %%", 100 * error)
        undo()


@torch.inference_mode(False)  # parameters change their dtype for a while
@torch.no_grad()
def _find_scales(model: PagedModel) -> list[tuple[Tensor, Tensor]]:
    """Of each layer here; every rank of a gang comes here at once."""
    token_ids = example_text(model.max_model_len, model.vocab_size).to(model.device)
    positions = torch.arange(len(token_ids), device=model.device)
    context = _ForwardContext(model.attention, probe_lengths=[len(token_ids)])
    with in_float32(model.module):
        model._run(context, token_ids, positions, positions[:1], torch.float32)
    hits = sorted(context.probe_hits, key=lambda hit: hit.layer)
    return [(scale_for(keys), scale_for(values)) for keys, values in (hit.largest for hit in hits)]


def _relative_error(ours: Tensor, theirs: Tensor) -> float:
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-6)
    return float(error)
