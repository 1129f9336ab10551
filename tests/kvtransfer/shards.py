"""The shards of a model that many ranks hold, as replicas of several ranks announce them."""

from collections.abc import Sequence

from crossdock.kvtransfer.layout import LayerShape, Shard, head_range, layer_range


def shard_model(layers: Sequence[LayerShape], num_tensor_ranks: int, num_pipeline_ranks: int = 1) -> tuple[Shard, ...]:
    """Return the shards of a model, split as evenly as whole heads and layers allow. Rank = stage · T + tensor rank."""
    stages = [layer_range(len(layers), num_pipeline_ranks, stage) for stage in range(num_pipeline_ranks)]
    return tuple(
        Shard(first, tuple(head_range(layer.num_kv_heads, num_tensor_ranks, rank) for layer in layers[first:last]))
        for first, last in stages
        for rank in range(num_tensor_ranks)
    )
