"""How many GPUs each rank asks Ray for, where the configuration leaves that open, and whether there are so many."""

from collections.abc import Callable

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


def check_gpus_suffice(config: ClusterConfig, num_gpus: float) -> None:
    """Check that a machine with `num_gpus` GPUs has one for every rank. Every pool's own number must be set.

    Raises:
        ValueError: the pools need more; the message names their settings.
    """
    needed = [(pool.num_gpus or 0) * pool.num_ranks * pool.most for pool in config.pools]
    if sum(needed) <= num_gpus:
        return
    wanted = ", ".join(_describe(pool) for pool in config.pools if pool.num_gpus)
    raise ValueError(
        f"pools: {sum(needed):g} GPUs are needed, and this machine has {num_gpus:g} ({wanted}). Lower one of "
        f"these; --device cpu runs on CPUs, and replicas of one rank can share a GPU by pools.NAME.num_gpus below 1 "
        f"and engine.gpu_memory_utilization"
    )


def _describe(pool: PoolConfig) -> str:
    name = f"pools.{pool.name}"
    factors = {
        "max_replicas" if pool.max_replicas else "replicas": pool.most,
        "tensor_parallel_size": pool.tensor_parallel_size,
        "pipeline_parallel_size": pool.pipeline_parallel_size,
        "num_gpus": pool.num_gpus,
    }
    return " * ".join(f"{name}.{setting} {factor:g}" for setting, factor in factors.items() if factor is not None)
