"""Which part of a replica's KV pool each rank holds, and the pool as other replicas must know it."""

from collections.abc import Sequence
from typing import TypeAlias

from crossdock.kvtransfer.layout import LayerShape, PoolSpec, Shard
from crossdock.workers.model.fp8_scales import exponents, fingerprint_of
from crossdock.workers.model.model import PagedModel

HeldLayers: TypeAlias = tuple[tuple[int, ...], ...]
"""The layers a rank holds, a row each: layer number, first KV head, last (exclusive), heads of all ranks, key dim and
value dim; where pages are e4m3 also the exponents of its heads' scales, all of keys, then all of values."""


def held_layers(model: PagedModel) -> HeldLayers:
    """Return which layers and heads this rank's part of the model has."""
    rows = []
    for number, shape in enumerate(model.layers, model.part.first_layer):
        start, stop, count = model.part.heads.get(number, (0, shape.num_kv_heads, shape.num_kv_heads))
        scales = model.scales[number - model.part.first_layer] if model.scales else ()
        powers = [power for scale in scales for power in exponents(scale)]
        rows.append((number, start, stop, count, shape.key_dim, shape.value_dim, *powers))
    return tuple(rows)


def pool_spec(
    by_rank: Sequence[HeldLayers], rank: int, model: PagedModel, name: str, page_size: int, num_pages: int
) -> PoolSpec:
    """Return the KV pool of `rank` as other replicas must know it.

    `by_rank`: the layers each rank holds. `name` names the weights: pages of different models never mix.
    """
    layers = {number: LayerShape(*shape) for rows in by_rank for number, _, _, *shape in (row[:6] for row in rows)}
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
    )


def _fingerprint_of_scales(by_rank: Sequence[HeldLayers]) -> str:
    """Return the same for any division of a model among ranks, if ranks that share a head have the same scales."""
    heads: list[tuple[int, ...]] = []
    for number, start, stop, _, _, _, *powers in (row for rows in by_rank for row in rows):
        keys, values = powers[: stop - start], powers[stop - start :]
        heads += zip([number] * (stop - start), range(start, stop), keys, values, strict=True)
    return fingerprint_of(heads)
