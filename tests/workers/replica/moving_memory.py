"""A stand-in for a GPU in a process without one: memory that is taken again is elsewhere, and steps are recorded."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossdock.kernels.gpu import storage_memory
from crossdock.workers.model import kv_pool, new_weights
from crossdock.workers.model.graphs import recording
from crossdock.workers.model.weights.formats import PlainWeights
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.ranks.rank_socket import WorkerGroupAddress
from crossdock.workers.replica.serving.follower import follow


class MovingMemory:
    """Counts what is recorded and replayed. A step that was recorded before its memory moved does not run."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_recorded, self.num_replayed = 0, 0
        self._moves = Counter[int]()  # by storage
        for module in (kv_pool, new_weights):
            patch.setattr(module, "keeps_addresses", lambda device: False)
        patch.setattr(recording, "_has_graphs", lambda device: True)
        patch.setattr(recording, "_stream_capture", lambda: (lambda run: run(), self._capture))
        allocate = storage_memory._allocate
        read = PlainWeights.read

        def moved(storage: torch.UntypedStorage, size: int) -> None:
            self._moves[storage._cdata] += 1
            allocate(storage, size)

        def own(*given: Any, **options: Any) -> Any:
            module, part = read(*given, **options)
            for parameter in module.parameters():  # which map files here, and have memory of their own on a GPU
                parameter.data = parameter.data.clone()
            return module, part

        patch.setattr(storage_memory, "_allocate", moved)
        patch.setattr(PlainWeights, "read", own)

    def _moves_of(self, run: Any) -> int:
        """Return how often the memory moved that a step reads."""
        model = run.func.__self__._model
        tensors = [model.pool.tensor, *model.module.parameters()]
        return sum(self._moves[tensor.untyped_storage()._cdata] for tensor in tensors)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        moves = self._moves_of(run)

        def replay() -> None:
            assert moves == self._moves_of(run), "the step reads memory that is gone"
            self.num_replayed += 1
            run()

        return replay


def follow_moving(spec: ReplicaSpec, rank: int, address: WorkerGroupAddress) -> tuple[int, int]:
    """Be a follower on such a device. Returns how many steps it has recorded, and how many of them it has replayed."""
    with pytest.MonkeyPatch.context() as patch:
        device = MovingMemory(patch)
        follow(spec, rank, address)
        return device.num_recorded, device.num_replayed
