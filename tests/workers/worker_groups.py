"""Engines whose followers are processes of the test: the driver is the test itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from crossdock.workers.replica.config import EngineConfig, EplbConfig, ReplicaSpec
from crossdock.workers.replica.engine import engine_loader
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.ranks.rank_loader import driver_of
from crossdock.workers.replica.ranks.rank_socket import WorkerGroupAddress
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving.follower import follow

from .ranks import Ranks

SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 80,
    "max_num_seqs": 8,
    "kv_cache_memory": ByteSize(8 << 20),
    "admission": "queue",  # an engine that measures steps refuses requests on a slow machine
}


def spec_of(
    path: Path,
    tensor_size: int,
    num_stages: int,
    *,
    max_model_len: int | None = None,
    start_timeout_s: float = 240.0,
    rank_timeout_s: float = 60.0,
    enable_expert_parallel: bool | None = False,
    eplb: EplbConfig | None = None,
    **config: Any,
) -> ReplicaSpec:
    """Return the spec of a replica in fp32; `config`: engine settings beside SETTINGS."""
    engine = EngineConfig(**(SETTINGS | config))
    return ReplicaSpec(
        engine.model_spec(str(path), "float32", max_model_len),
        engine,
        num_threads=1,
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=num_stages,
        enable_expert_parallel=enable_expert_parallel,
        eplb=eplb,
        rank_timeout_s=rank_timeout_s,
        start_timeout_s=start_timeout_s,
    )


@contextmanager
def engine_of_ranks(
    ranks: Ranks,
    path: Path,
    tensor_size: int,
    num_stages: int,
    follower: Callable[[ReplicaSpec, int, WorkerGroupAddress], Any] = follow,
    answers: list[Any] | None = None,
    **config: Any,
) -> Iterator[Engine]:
    """Yield an engine on a worker group whose driver is this process. What `follower` returns is added to `answers`."""
    spec = spec_of(path, tensor_size, num_stages, **config)
    lost: list[str] = []
    worker_group = WorkerGroup(spec, "127.0.0.1", lost.append)
    followers = [rank for rank in range(spec.num_ranks) if rank != driver_of(spec)]
    for number, rank in enumerate(followers):
        ranks.start(number, follower, spec, rank, worker_group.address)
    try:
        yield engine_loader.engine_of_ranks(worker_group.load(), worker_group, None)
    finally:
        worker_group.close()
        for number in range(len(followers)):
            answer = ranks.answer(number)
            if answers is not None:
                answers.append(answer)
    assert not lost
