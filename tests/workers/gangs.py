"""Engines whose followers are processes of the test's: the driver is the test itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from crossdock.workers.model.memory_budget import MemoryBudget
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.docks import RankDock
from crossdock.workers.replica.engine import Engine
from crossdock.workers.replica.ranks import Gang, GangSpec, follow

from .ranks import Ranks

SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 80, "max_num_seqs": 8, "kv_cache_memory": ByteSize(8 << 20)}


def spec_of(path: Path, tensor_size: int, num_stages: int, **options: Any) -> GangSpec:
    defaults = {"dtype": "float32", "max_model_len": None, "page_size": 16, "budget": MemoryBudget(4 << 20)}
    return GangSpec(
        str(path),
        num_threads=1,
        tensor_size=tensor_size,
        num_stages=num_stages,
        **({"start_s": 60.0, "deadline_s": 20.0} | defaults | options),
    )


@contextmanager
def ganged(ranks: Ranks, path: Path, tensor_size: int, num_stages: int, **config: Any) -> Iterator[Engine]:
    """An engine on a gang of which this process is the driver."""
    settings = EngineConfig(**(SETTINGS | config))
    spec = spec_of(path, tensor_size, num_stages, budget=settings.budget)
    lost: list[str] = []
    gang = Gang(spec, "127.0.0.1", lost.append)
    followers = [rank for rank in range(spec.size) if rank != spec.driver]
    for number, rank in enumerate(followers):
        ranks.start(number, follow, spec, rank, gang.address, RankDock)
    try:
        yield Engine(gang.load(), settings, gang=gang)
    finally:
        gang.close()
        for number in range(len(followers)):
            ranks.answer(number)
    assert not lost
