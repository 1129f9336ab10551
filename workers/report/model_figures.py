"""Derive the work of a step from a model's configuration: bytes of weights and KV, numbers to multiply by, FLOPs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from crossdock.workers.schedule.memory.layer_groups import group_layers
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window, most_visible

PAGE_SIZE = 16
_BF16 = 2  # bytes of a number
_RECURRENT = ("mamba", "ssm", "linear_", "conv_", "lru_", "time_mix")  # fields of recurrent layers begin so
_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "falcon", "starcoder2", "nemotron", "bloom", "mpt")
"""Model types whose MLP has two matrices; others have a third, the gate."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_FIRST_SPARSE = ("first_k_dense_replace", "moe_layer_start_index")
_SPARSE_STEP = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")


@dataclass(frozen=True, slots=True)
class PictureModel:
    """An encoder of pictures in bf16."""

    parameters: float
    layers: int
    hidden: int
    patches: int  # for each row of its output
    row_bytes: int

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters


class Experts(NamedTuple):
    """The experts that a router chooses from, of all layers together."""

    in_layer: int
    chosen: int  # for a token
    num_bytes: float


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Holds the figures of a model from which presets.py computes seconds."""

    parameters: float  # by which a token is multiplied; of experts, those that are chosen for it
    weight_bytes: float  # that every step reads; without experts that are chosen
    layers: int
    hidden: int  # width between layers
    token_bytes: int  # of keys and values that a decode reads for each token before it
    pair_flops: float  # for each token and token before it
    max_model_len: int
    vocab_size: int
    page_bytes: int  # of each group
    kv_parts: int  # into which ranks divide keys and values: KV heads. Latents, with an indexer's keys, are one part
    pair_parts: int  # into which ranks divide `pair_flops`: query heads. Scores of an indexer for latents are one part
    encoder: PictureModel | None = None  # None: prompts are text alone
    experts: Experts | None = None
    fp8_parameters: float = 0  # of `parameters`, those whose products run in FP8 where the GPU has it
    windows: tuple[Window, ...] = (None,)  # of each group
    window_bytes: int = 0
    """Bytes that a decode reads at any context: keys and values in layers with windows, or of the tokens that indexers
    choose."""
    window_flops: float = 0  # of a prompt token in layers with windows, or over the tokens that indexers choose

    @property
    def held_bytes(self) -> float:
        """Return the bytes of all weights."""
        experts = 0.0 if self.experts is None else self.experts.num_bytes
        return self.weight_bytes + experts + (0 if self.encoder is None else self.encoder.weight_bytes)

    def kv_share(self, num_ranks: int) -> float:
        """Return the share of keys and values that each of the ranks of a layer keeps and reads."""
        return -(-self.kv_parts // num_ranks) / self.kv_parts


def plain_figures(
    parameters: float,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_model_len: int,
    vocab_size: int,
    encoder: PictureModel | None = None,
) -> ModelFigures:
    """Return the figures of a dense model in bf16 whose layers see all tokens."""
    token_bytes = 2 * _BF16 * layers * kv_heads * head_dim
    pair_flops = 4 * layers * heads * head_dim
    return ModelFigures(
        parameters=parameters,
        weight_bytes=_BF16 * parameters,
        layers=layers,
        hidden=heads * head_dim,
        token_bytes=token_bytes,
        pair_flops=pair_flops,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        page_bytes=token_bytes * PAGE_SIZE,
        kv_parts=kv_heads,
        pair_parts=heads,
        encoder=encoder,
    )


class StoredNumber(NamedTuple):
    """How a checkpoint stores the numbers of a matrix."""

    num_bytes: float  # of each, with its share of scales
    is_fp8: bool


BF16 = StoredNumber(_BF16, False)


def figures_of(fields: Mapping[str, Any], stored: Callable[[str], StoredNumber]) -> ModelFigures:
    """Return the figures of a decoder by its configuration. `stored`: how a matrix is stored, by its name in files.

    The embedding counts as read although a step reads a few rows of it. What a file's fields do not say is an error:
    a guess would be a wrong plan.

    Raises:
        ValueError: a field is missing, or the model has layers that no formula here covers.
    """
    config = _Fields(fields)
    if recurrent := next((name for name in fields if name.startswith(_RECURRENT) and fields[name]), None):
        raise ValueError(f"{recurrent}: recurrent layers have no estimate; measure them with crossdock tune --profile")
    layers = config.size("num_hidden_layers")
    hidden = config.size("hidden_size")
    attention = _Attention.of(config, hidden)
    windows = _windows(config, layers)
    max_model_len = config.size("max_position_embeddings")
    groups = group_layers(windows, [attention.token_bytes] * layers, max_model_len, PAGE_SIZE)
    full = sum(window is None for window in windows)
    seen = sum(min(most_visible(window), max_model_len) for window in windows if window is not None)
    index = _index(config, layers, hidden)
    dense = _dense_parts(config, layers, hidden, attention)
    if index is not None:  # a layer reads the tokens that are chosen, and an indexer the keys of all
        full -= index.layers
        seen += index.layers * min(index.top_k, max_model_len)
        dense = [*dense, (f"model.layers.{layers - 1}.self_attn.{index.name}", index.parameters)]
    experts, routed = _experts(config, hidden, stored)
    counted = [(number, stored(name)) for name, number in dense]
    return ModelFigures(
        parameters=sum(number for number, _ in counted) + routed[0],
        weight_bytes=sum(number * how.num_bytes for number, how in counted),
        layers=layers,
        hidden=hidden,
        token_bytes=full * attention.token_bytes + (index.token_bytes if index else 0),
        pair_flops=full * attention.pair_flops + (index.pair_flops if index else 0),
        max_model_len=max_model_len,
        vocab_size=config.size("vocab_size"),
        page_bytes=PAGE_SIZE
        * (max(len(group.layers) for group in groups) * attention.token_bytes + (index.token_bytes if index else 0)),
        kv_parts=attention.kv_parts,
        pair_parts=1 if index and not index.by_kv_heads else attention.heads,
        experts=experts,
        fp8_parameters=sum(number for number, how in counted if how.is_fp8) + (routed[0] if routed[1] else 0),
        windows=tuple(group.window for group in groups),
        window_bytes=seen * attention.token_bytes,
        window_flops=seen * attention.pair_flops,
    )


class _Fields:
    """The fields of a configuration, asked for by name."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is there and not null."""
        return next((self._fields[name] for name in names if self._fields.get(name) is not None), None)

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive number. ValueError: there is none."""
        found = self.get(*names)
        found = default if found is None else found
        if type(found) is not int or found < 1:
            raise ValueError(f"{names[0]} is {found!r}, and a step's cost follows from it; give a number")
        return found


class _Attention(NamedTuple):
    """The attention of a layer."""

    parameters: int
    token_bytes: int
    pair_flops: int
    heads: int
    kv_parts: int  # as in `ModelFigures`

    @classmethod
    def of(cls, config: _Fields, hidden: int) -> "_Attention":
        heads = config.size("num_attention_heads")
        if (latent := config.get("kv_lora_rank")) is not None:
            rope = config.size("qk_rope_head_dim")
            nope = config.size("qk_nope_head_dim")
            value = config.size("v_head_dim")
            rank = config.get("q_lora_rank")
            queries = heads * (nope + rope)
            parameters = (hidden + queries) * rank if rank else hidden * queries
            parameters += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
            return cls(parameters, _BF16 * (latent + rope), 2 * heads * (nope + rope + value), heads, 1)
        head_dim = config.size("head_dim", default=hidden // heads)
        kv_heads = config.size("num_key_value_heads", default=heads)
        parameters = 2 * hidden * head_dim * (heads + kv_heads)
        return cls(parameters, 2 * _BF16 * kv_heads * head_dim, 4 * heads * head_dim, heads, kv_heads)


class _Index(NamedTuple):
    """The indexers of all layers, each of which chooses the tokens that its layer reads, and perhaps later ones."""

    layers: int  # which read chosen tokens
    top_k: int  # tokens
    parameters: int
    token_bytes: int
    pair_flops: int
    name: str  # of a matrix, in files
    by_kv_heads: bool  # each KV head has its own scores, and a copy of the keys


def _index(config: _Fields, layers: int, hidden: int) -> _Index | None:
    """Return the indexers of a decoder; None: it has none. ValueError: a size is missing."""
    if config.get("index_topk") is not None:
        heads = config.size("index_n_heads")
        width = config.size("index_head_dim")
        count = _num_indexers(config, layers)
        parameters = count * (config.size("q_lora_rank") * heads * width + hidden * (width + heads))
        pair_flops = 2 * count * heads * width
        top_k = config.size("index_topk")
        return _Index(layers, top_k, parameters, count * _BF16 * width, pair_flops, "indexer.wq_b", by_kv_heads=False)
    older = _Fields(config.get("sparse_attention_config") or {})  # of published files; transformers writes flat fields
    kinds = config.get("layer_types") or older.get("sparse_attention_freq") or ()
    if (count := sum(kind in ("minimax_m3_sparse", 1) for kind in kinds[:layers])) == 0:
        return None
    size = older if older.get("sparse_attention_freq") else config
    heads = size.size("sparse_num_index_heads", "index_n_heads")
    width = size.size("sparse_index_dim", "index_head_dim")
    top_k = size.size("sparse_topk_blocks", "index_topk_blocks") * size.size("sparse_block_size", "index_block_size")
    parameters = count * hidden * width * (heads + 1)
    scores = 2 * count * heads * width
    return _Index(count, top_k, parameters, scores // 2 * _BF16, scores, "index_q_proj", by_kv_heads=True)


def _num_indexers(config: _Fields, layers: int) -> int:
    """Return how many layers have an indexer of their own: the pattern of GLM-5's configuration, else all."""
    kinds = config.get("indexer_types", "index_topk_pattern")
    if kinds is not None:
        return sum(kind in ("full", "F") for kind in kinds[:layers])
    every = max(config.get("index_topk_freq") or 1, 1)
    offset = config.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return sum(max(layer - offset + 1, 0) % every == 0 for layer in range(layers))


def _dense_parts(config: _Fields, layers: int, hidden: int, attention: _Attention) -> Sequence[tuple[str, int]]:
    """Return the matrices that every token is multiplied by: their names in files, and how many numbers they have."""
    matrices = 2 if config.get("model_type") in _UNGATED else 3
    sparse = _sparse_layers(config, layers)
    is_llama4 = config.get("intermediate_size_mlp") is not None
    tied = config.get("tie_word_embeddings")
    is_tied = str(config.get("model_type")).startswith("gemma") if tied is None else bool(tied)  # transformers' default
    width = config.size("dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", default=4 * hidden)
    shared = config.get(*_SHARED_WIDTH)
    if shared is None:
        shared = (config.get(*_SHARED) or int(is_llama4 and bool(sparse))) * _expert_width(config) if sparse else 0
    vocabulary = hidden * config.size("vocab_size")
    last = layers - 1  # its matrices are packed as most are; first layers may be dense
    return [
        ("model.embed_tokens", 0 if is_tied else vocabulary),
        ("lm_head", vocabulary),
        (f"model.layers.{last}.self_attn.q_proj", layers * attention.parameters),
        (f"model.layers.{layers // 2}.mlp.up_proj", (layers - len(sparse)) * matrices * hidden * width),
        (f"model.layers.{last}.mlp.shared_experts.up_proj", len(sparse) * matrices * hidden * shared),
        ("router", len(sparse) * hidden * config.size(*_EXPERTS) if sparse else 0),
    ]


def _sparse_layers(config: _Fields, layers: int) -> Sequence[int]:
    """Return the numbers of the layers with experts."""
    if (config.get(*_EXPERTS) or 0) < 2:
        return []
    if isinstance(kinds := config.get("mlp_layer_types", "moe_layer_freq"), list):
        return [layer for layer, kind in enumerate(kinds[:layers]) if kind in ("sparse", 1)]
    dense = set(config.get("mlp_only_layers") or ())
    first = config.get(*_FIRST_SPARSE) or 0
    step = config.get(*_SPARSE_STEP) or 1
    return [layer for layer in range(first, layers) if layer not in dense and (layer + 1) % step == 0]


def _expert_width(config: _Fields) -> int:
    """Return the inner width of an expert. ERNIE gives one for each modality: the first is of text."""
    width = config.get("moe_intermediate_size")
    return width[0] if isinstance(width, list) and width else config.size("moe_intermediate_size", "intermediate_size")


def _experts(
    config: _Fields, hidden: int, stored: Callable[[str], StoredNumber]
) -> tuple[Experts | None, tuple[int, bool]]:
    """Return the experts that are chosen from, the numbers of those of one token, and whether they are FP8."""
    layers = config.size("num_hidden_layers")
    sparse = _sparse_layers(config, layers)
    if not sparse:
        return None, (0, False)
    count = config.size(*_EXPERTS)
    chosen = config.size(*CHOSEN_EXPERTS)
    each = len(sparse) * 3 * hidden * _expert_width(config)
    how = stored(f"model.layers.{layers - 1}.mlp.experts.0.up_proj")
    return Experts(count, chosen, count * each * how.num_bytes), (chosen * each, how.is_fp8)


def _windows(config: _Fields, layers: int) -> Sequence[Window]:
    """Return the window of each layer."""
    size = config.get("sliding_window")
    chunk = config.get("attention_chunk_size")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        seen: Mapping[str, Window] = {
            "sliding_attention": size,
            "chunked_attention": None if chunk is None else AttentionChunk(chunk),
        }
        return [seen.get(kind) for kind in kinds[:layers]]
    if size is None or config.get("use_sliding_window") is False:
        return [None] * layers
    pattern = config.get("sliding_window_pattern", "_sliding_window_pattern")
    pattern = 2 if pattern is None and config.get("model_type") == "gemma2" else pattern
    return [None if pattern and (layer + 1) % pattern == 0 else size for layer in range(layers)]
