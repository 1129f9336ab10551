"""The engine of one replica of a pool, with all its ranks as processes of this machine."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossdock.workers.model.model import LoadedModel
    from crossdock.workers.replica.config import ReplicaSpec
    from crossdock.workers.replica.engine.engine import Engine
    from crossdock.workers.replica.ranks.rank_socket import WorkerGroupAddress
    from crossdock.workers.replica.ranks.worker_group import WorkerGroup

_END_S = 20.0  # for a rank to end after the driver has


@contextmanager
def local_engine(spec: "ReplicaSpec") -> Iterator["Engine"]:
    """Yield the engine of a replica. The other ranks end with the context, or with this process.

    Raises:
        ValueError: the model or its settings cannot be served, or this machine has fewer GPUs than ranks.
    """
    from crossdock.workers.replica.engine.engine_loader import load_engine

    if spec.num_ranks == 1:
        yield load_engine(spec)
        return
    with _worker_group_engine(spec) as engine:
        yield engine


@contextmanager
def _worker_group_engine(spec: "ReplicaSpec") -> Iterator["Engine"]:
    from crossdock.workers.model.weights.checkpoint import resolve_tokenizer
    from crossdock.workers.model.weights.weights import check_division
    from crossdock.workers.replica.engine.engine_loader import engine_of_ranks
    from crossdock.workers.replica.ranks.rank_loader import driver_of, position_of
    from crossdock.workers.replica.ranks.worker_group import WorkerGroup

    path = spec.model.folder()
    tokenizer = resolve_tokenizer(spec.tokenizer, path)
    gpus = _gpus(spec)
    driver = driver_of(spec)
    _see_only(gpus[driver])
    check_division(path, position_of(spec, 0))
    worker_group = WorkerGroup(
        spec, "127.0.0.1", lambda _why: None
    )  # a lost rank fails the driver's next step, with the reason
    spawn = multiprocessing.get_context("spawn")
    followers = [
        spawn.Process(target=_follow, args=(spec, rank, worker_group.address, gpus[rank]), daemon=True)
        for rank in range(spec.num_ranks)
        if rank != driver
    ]
    try:
        for process in followers:
            process.start()
        yield engine_of_ranks(_load(worker_group), worker_group, tokenizer)
    finally:
        worker_group.close()
        for process in followers:
            if process.pid is not None:
                process.join(_END_S)
                process.kill()


def _load(worker_group: "WorkerGroup") -> "LoadedModel":
    from crossdock.workers.replica.ranks.rank_loader import RankFailed

    try:
        return worker_group.load()
    except RankFailed as error:
        raise ValueError(str(error)) from None


def _follow(spec: "ReplicaSpec", rank: int, address: "WorkerGroupAddress", gpu: str | None) -> None:
    _see_only(gpu)
    from crossdock.workers.replica.serving.follower import follow

    follow(spec, rank, address)


def _gpus(spec: "ReplicaSpec") -> list[str | None]:
    """Return the name of a GPU for each rank; None for each where it uses none. ValueError: there are too few."""
    import torch

    num_ranks = spec.num_ranks
    num_gpus = torch.cuda.device_count()  # does not begin to use them: each rank still may choose
    if not num_gpus or spec.device == "cpu":
        return [None] * num_ranks
    if num_gpus < num_ranks:
        raise ValueError(
            f"tensor_parallel_size {spec.tensor_parallel_size} * pipeline_parallel_size {spec.pipeline_parallel_size}: "
            f"a replica of {num_ranks} ranks needs a GPU for each; this machine has {num_gpus}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(num_gpus)]
    return list(names[:num_ranks])


def _see_only(gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
