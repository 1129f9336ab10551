"""Which part of a replica's KV pool each rank holds, which layers share pages, and the pool as other replicas must know
it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from msgspec import msgpack
from torch import Tensor

from crossdock.kvtransfer.layout import LayerShape, PageGroup, PoolSpec, Shard
from crossdock.kvtransfer.transport import Memory
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.weights.fp8_scales import exponents, fingerprint_of
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.schedule.memory.layer_groups import LayerGroup, group_layers
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window, most_visible

logger = logging.getLogger(__name__)

HeldLayers: TypeAlias = tuple[tuple[int, ...], ...]
"""The layers with attention a rank holds, a row each: number among those of the model, first KV head, last (exclusive),
heads of all ranks, key dim, value dim, window and attention chunk (0: none); where pages are e4m3 also the exponents of
its heads' scales, all of keys, then all of values."""


def memory_of(pool: Tensor) -> Memory:
    """Return the memory of a pool, for its transports."""
    return Memory(pool.data_ptr(), pool.nbytes, pool.device.index if pool.is_cuda else None)


def held_layers(model: LoadedModel) -> HeldLayers:
    """Return which layers with attention and which heads this rank's part of the model has."""
    rows = []
    first = model.part.first_place
    for place, (number, shape, window) in enumerate(zip(model.places, model.layers, model.windows, strict=True)):
        start, stop, count = model.part.heads.get(number, (0, shape.num_kv_heads, shape.num_kv_heads))
        scales = model.scales[place] if model.scales else ()
        powers = [power for scale in scales for power in exponents(scale)]
        visible = tuple(size or 0 for size in _sizes(window))
        rows.append((first + place, start, stop, count, shape.key_dim, shape.value_dim, *visible, *powers))
    return tuple(rows)


def choose_groups(model: LoadedModel, config: EngineConfig) -> LoadedModel:
    """Return the model with groups of layers that have pages of their own; see `LoadedModel.groups`."""
    return _choose_groups(model, config.page_size, [held_layers(model)], _why_not_grouped(model, config))


def choose_groups_of_ranks(model: LoadedModel, config: EngineConfig, store: Any, size: int) -> LoadedModel:
    """Return the model with the same groups at all `size` ranks of a worker group, which meet at `store`. Collective.

    The layers of the whole model are divided, so that replicas of unlike ranks have equal groups."""
    own = [held_layers(model), _why_not_grouped(model, config)]
    store.set(f"layers of rank {model.part.position.rank}", msgpack.encode(own))
    ranks = [msgpack.decode(store.get(f"layers of rank {rank}"), type=tuple[HeldLayers, str]) for rank in range(size)]
    reason = next((reason for _, reason in ranks if reason), "")
    return _choose_groups(model, config.page_size, [held for held, _ in ranks], reason)


def agree_on_states(model: LoadedModel, config: EngineConfig, store: Any, size: int) -> LoadedModel:
    """Return the model with a request's recurrent state in as many pages at all `size` ranks, which meet at `store`.

    Collective. Each rank keeps the states of its own layers and heads in these pages. Call this after the groups of
    layers, and so the bytes of a page, are chosen."""
    if model.states is None:
        return model
    own = model.state_pages(config.page_size), model.states.name
    store.set(f"states of rank {model.part.position.rank}", msgpack.encode(own))
    ranks = [msgpack.decode(store.get(f"states of rank {rank}"), type=tuple[int, str]) for rank in range(size)]
    least = max(num_pages for num_pages, _ in ranks)
    name = " ".join(name for _, name in ranks)
    return replace(model, least_state_pages=least, states_name=name)


def _choose_groups(model: LoadedModel, page_size: int, by_rank: Sequence[HeldLayers], reason: str) -> LoadedModel:
    """Return the model with its groups of layers; `reason`: why there is only one group, which keeps its pages."""
    rows = {row[0]: row for held in by_rank for row in held}
    windows = [_window(*rows[number][6:8]) for number in sorted(rows)]
    if not any(window is not None and most_visible(window) < model.max_model_len for window in windows):
        return replace(model, groups=())
    token_bytes = [heads * (key + value) for _, _, _, heads, key, value, *_ in map(rows.__getitem__, sorted(rows))]
    groups = () if reason else group_layers(windows, token_bytes, model.max_model_len, page_size)
    kinds = ", ".join(f"{len(group.layers)} (window {group.window})" for group in groups)
    logger.info("layers by group of KV pages: %s", kinds or f"all in one, which keeps its pages: {reason}")
    return replace(model, groups=groups)


def _why_not_grouped(model: LoadedModel, config: EngineConfig) -> str:
    """Return why pages that windows have passed must stay; empty: such pages can be freed."""
    if config.disable_hybrid_kv_cache_manager:
        return "disable_hybrid_kv_cache_manager is on"
    if len(set(model.windows)) > 1 and model.kernels and not model.attention.is_beside_triton:
        return "layers fused for a CPU take one page table"
    return ""


def pool_spec(
    by_rank: Sequence[HeldLayers], rank: int, model: LoadedModel, name: str, page_size: int, num_pages: int
) -> PoolSpec:
    """Return the KV pool of `rank` as other replicas must know it.

    `by_rank`: the layers each rank holds. `name` names the weights: pages of different models never mix.
    """
    layers = {row[0]: LayerShape(*row[3:6]) for rows in by_rank for row in rows}
    dtype = str(model.kv_dtype).removeprefix("torch.")
    if model.scales:
        dtype += f", scales {_fingerprint_of_scales(by_rank)}"
    return PoolSpec(
        model=f"{name} {model.variant}".strip(),
        dtype=dtype,
        itemsize=model.kv_dtype.itemsize,
        page_size=page_size,
        layers=tuple(layers[number] for number in sorted(layers)),
        shards=tuple(Shard(rows[0][0], tuple((start, stop) for _, start, stop, *_ in rows)) for rows in by_rank),
        rank=rank,
        num_pages=num_pages,
        groups=tuple(_page_group(group) for group in model.groups),
        state="" if model.states is None else model.states_name or model.states.name,
    )


def _page_group(group: LayerGroup) -> PageGroup:
    window, attention_chunk = _sizes(group.window)
    return PageGroup(window, group.layers, attention_chunk)


def _sizes(window: Window) -> tuple[int | None, int | None]:
    """Return the tokens of a sliding window, and of an attention chunk; None: the layer has none."""
    return (None, window.tokens) if isinstance(window, AttentionChunk) else (window, None)


def _window(window: int, attention_chunk: int) -> Window:
    """Return the window of a row of `HeldLayers`."""
    return AttentionChunk(attention_chunk) if attention_chunk else window or None


def _fingerprint_of_scales(by_rank: Sequence[HeldLayers]) -> str:
    """Return a hash of all scales, independent of the division. Ranks that share a head must have equal scales."""
    heads: list[tuple[int, ...]] = []
    for number, start, stop, _, _, _, _, _, *powers in (row for rows in by_rank for row in rows):
        keys = powers[: stop - start]
        values = powers[stop - start :]
        heads += zip([number] * (stop - start), range(start, stop), keys, values, strict=True)
    return fingerprint_of(heads)
