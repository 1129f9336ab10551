"""How many GPUs each rank asks Ray for, and whether a machine has what all pools need: GPUs, cores, memory."""

from collections.abc import Callable, Iterator, Sequence

from crossdock.cluster.config import ClusterConfig, PoolConfig
from crossdock.workers.model.model_spec import ModelSpec


def gpus_here() -> float:
    """Return how many GPUs a Ray that starts on this machine would find. Ray itself is not started."""
    from ray._private.accelerators import get_all_accelerator_managers

    number = 0
    for manager in get_all_accelerator_managers():
        if manager.get_resource_name() == "GPU":
            visible = manager.get_current_process_visible_accelerator_ids()
            found = manager.get_current_node_num_accelerators()
            number += found if visible is None else min(found, len(visible))
    return float(number)


def with_num_gpus(config: ClusterConfig, has_gpus: bool) -> ClusterConfig:
    """Return the configuration with a number for every `num_gpus` that is null: 1 where `has_gpus`, else 0.

    Without a number Ray would reserve no GPU and hide none: all ranks of a machine would use its first one.
    """
    pools = tuple(
        pool.model_copy(update={"num_gpus": float(pool.emulated is None and has_gpus)})
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
    for pools in _grown_in_turn(models):
        needed = {_describe(pool, count): (pool.num_gpus or 0) * pool.num_ranks * count for _, pool, count in pools}
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
    for pools in _grown_in_turn(models):
        needed = {f"pools.{pool.name}.num_cpus": pool.num_cpus * pool.num_ranks * count for _, pool, count in pools}
        if (total := sum(needed.values())) > num_cores:
            wanted = ", ".join(f"{name}: {number} in all" for name, number in needed.items() if number)
            raise ValueError(
                f"models: {total} cores are needed, and this machine has {num_cores} ({wanted}); lower one of these, "
                f"or replicas or max_replicas; num_cpus 0 reserves none"
            )


def check_memory_suffices(
    models: Sequence[ClusterConfig],
    weights: Callable[[ModelSpec], int],
    free: int,
    keeps_pages: Callable[[ModelSpec], bool] = lambda _: True,
) -> None:
    """Check that `free` bytes of a host hold what several models need on CPUs, as `check_gpus_suffice` does for GPUs.

    `weights` returns the bytes of a model's files, and `keeps_pages` whether its replicas have KV pages. Every pool's
    `num_gpus` must be set.

    Raises:
        ValueError: they need more; the message names the settings.
    """
    for pools in _grown_in_turn(models):
        needed = {
            f"pools.{pool.name}": count * _bytes_on_cpu(each, pool, weights, keeps_pages) for each, pool, count in pools
        }
        if (total := sum(needed.values())) > free:
            wanted = ", ".join(f"{name}: {_gib(number)} in all" for name, number in needed.items() if number)
            raise ValueError(
                f"models: {_gib(total)} of memory are needed for weights and KV pages, and {_gib(free)} are free "
                f"({wanted}); lower engine.kv_cache_memory, replicas or max_replicas of one of these"
            )


def _grown_in_turn(models: Sequence[ClusterConfig]) -> Iterator[list[tuple[ClusterConfig, PoolConfig, int]]]:
    """Yield all pools with their numbers of replicas: those of one model at their most, the others' at their least."""
    for grown in models:
        yield [(each, pool, pool.most if each is grown else pool.replicas) for each in models for pool in each.pools]


def _bytes_on_cpu(
    config: ClusterConfig,
    pool: PoolConfig,
    weights: Callable[[ModelSpec], int],
    keeps_pages: Callable[[ModelSpec], bool],
) -> int:
    """Return the bytes that one replica takes of the host's memory: weights as in their files, and KV pages."""
    if pool.num_gpus or pool.emulated is not None:
        return 0
    engine = pool.engine or config.engine
    model = config.replica_spec(pool).model
    pages = engine.budget.known("cpu") or 0 if keeps_pages(model) else 0
    return weights(model) // (2 if engine.quantization == "int8" else 1) + pool.num_ranks * pages


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def _describe(pool: PoolConfig, num_replicas: int) -> str:
    name = f"pools.{pool.name}"
    factors = {
        "max_replicas" if num_replicas == pool.max_replicas else "replicas": num_replicas,
        "tensor_parallel_size": pool.tensor_parallel_size,
        "pipeline_parallel_size": pool.pipeline_parallel_size,
        "num_gpus": pool.num_gpus,
    }
    return " * ".join(f"{name}.{setting} {factor:g}" for setting, factor in factors.items() if factor is not None)
