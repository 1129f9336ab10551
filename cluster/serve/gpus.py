"""How many GPUs each rank asks Ray for, where the configuration leaves that open, and whether there are so many."""

from collections.abc import Callable, Sequence

from crossdock.cluster.config import ClusterConfig, PoolConfig


def with_num_gpus(config: ClusterConfig, has_gpus: Callable[[PoolConfig], bool]) -> ClusterConfig:
    """Return the configuration with a number for every `num_gpus` that is null: 1 where `has_gpus`, else 0.

    Without a number Ray would reserve no GPU and hide none: all ranks of a machine would use its first one.
    """
    pools = tuple(
        pool.model_copy(update={"num_gpus": float(pool.emulated is None and has_gpus(pool))})
        if pool.num_gpus is None
        else pool
        for pool in config.pools
    )
    return config.model_copy(update={"pools": pools})


def check_gpus_suffice(models: Sequence[ClusterConfig], num_gpus: float) -> None:
    """Check that a machine with `num_gpus` GPUs has one for every rank. Every pool's own number must be set.

    Of several models, each must be able to grow while the others have their least replicas.

    Raises:
        ValueError: the pools need more; the message names their settings.
    """
    for grown in models:
        needed = {
            _describe(pool, each is grown): (pool.num_gpus or 0) * pool.num_ranks * _replicas(pool, each is grown)
            for each in models
            for pool in each.pools
        }
        if sum(needed.values()) > num_gpus:
            wanted = ", ".join(text for text, number in needed.items() if number)
            raise ValueError(
                f"pools: {sum(needed.values()):g} GPUs are needed, and this machine has {num_gpus:g} ({wanted}). Lower "
                f"one of these; --device cpu runs on CPUs, and replicas of one rank can share a GPU by "
                f"pools.NAME.num_gpus below 1 and engine.gpu_memory_utilization"
            )


def check_cores_suffice(models: Sequence[ClusterConfig], num_cores: int) -> None:
    """Check that a machine has the cores that several models reserve, as `check_gpus_suffice` does for GPUs.

    Raises:
        ValueError: the pools need more; the message names their settings.
    """
    for grown in models:
        needed = [
            (f"pools.{pool.name}.num_cpus", pool.num_cpus * pool.num_ranks * _replicas(pool, each is grown))
            for each in models
            for pool in each.pools
        ]
        if (total := sum(number for _, number in needed)) > num_cores:
            wanted = ", ".join(f"{name}: {number} in all" for name, number in needed if number)
            raise ValueError(
                f"models: {total} cores are needed, and this machine has {num_cores} ({wanted}); lower one of these, "
                f"or replicas or max_replicas; num_cpus 0 reserves none"
            )


def _replicas(pool: PoolConfig, is_grown: bool) -> int:
    return pool.most if is_grown else pool.replicas


def _describe(pool: PoolConfig, is_grown: bool) -> str:
    name = f"pools.{pool.name}"
    factors = {
        "max_replicas" if pool.max_replicas and is_grown else "replicas": _replicas(pool, is_grown),
        "tensor_parallel_size": pool.tensor_parallel_size,
        "pipeline_parallel_size": pool.pipeline_parallel_size,
        "num_gpus": pool.num_gpus,
    }
    return " * ".join(f"{name}.{setting} {factor:g}" for setting, factor in factors.items() if factor is not None)
