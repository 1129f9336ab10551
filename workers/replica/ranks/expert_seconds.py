"""Measure the seconds of a layer's experts on CPUs, on all ranks at once, before any rank has weights."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from crossdock.kernels.options import CpuKernels
from crossdock.workers.model.layers.coded_products import compute_from_codes
from crossdock.workers.model.weights.packed_layers import packed_tensors
from crossdock.workers.report.expert_division import Chosen, ExpertSizes, routings_by_fullest, typical_routings

_MEASURED_S = 0.5  # of steps of one size in one division, and at least one routing
_MOST_ROUTINGS = 8
_REPEATS = 2  # of each routing, of which the faster counts
_COLD_BYTES = 64 << 20  # more than caches hold: in a step the weights of other layers have been there since


class MeasuredExperts:
    """A layer's experts as this rank would hold them, with weights of no meaning."""

    def __init__(self, experts: Any | None, dtype: torch.dtype, kernels: CpuKernels) -> None:
        """Give memory to a module on the meta device. None: this rank's stage has no experts."""
        self.dtype = dtype
        self._compute: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        if experts is not None:
            experts.to_empty(device="cpu")
            for tensor in (*experts.parameters(), *experts.buffers(), *packed_tensors(experts)):
                tensor.fill_(2**-6 if tensor.is_floating_point() else 0)
            compute_from_codes(experts, dtype, kernels)
            self._compute = experts.forward  # without the sum over ranks, which is a hook

    def run(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> float:
        """Return the CPU seconds that a thread takes, on the rank that takes most of them. Collective."""
        dist.all_reduce(torch.zeros(1))  # all begin at once
        begun = time.process_time()
        if self._compute is not None:
            self._compute(hidden, chosen, shares)
        found = torch.tensor((time.process_time() - begun) / torch.get_num_threads(), dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)


@torch.inference_mode()
def layer_seconds(ways: Sequence[MeasuredExperts], sizes: ExpertSizes, num_ranks: int, rows: int) -> list[float]:
    """Return the CPU seconds that a step of so many rows takes in a layer on its slowest rank, of `num_ranks`.

    All ways compute the same rows in turn, sent to experts as `typical_routings` says. CPU seconds change little with
    other work on the machine. Collective: all ranks must call it, in a torch.distributed world of theirs.
    """
    dtype = ways[0].dtype
    hidden = torch.ones(rows, sizes.row_bytes // dtype.itemsize, dtype=dtype)
    shares = torch.full((rows, sizes.chosen), 1 / sizes.chosen, dtype=dtype)
    cold = torch.ones(_COLD_BYTES // 4)

    def run(way: MeasuredExperts, chosen: Tensor) -> float:
        cold.sum()
        return way.run(hidden, chosen, shares)

    def in_turn(chosen: Chosen) -> list[float]:
        turns = [[run(way, torch.from_numpy(chosen)) for way in ways] for _ in range(_REPEATS)]
        return [min(seconds) for seconds in zip(*turns, strict=True)]

    drawn = routings_by_fullest(sizes, num_ranks, rows)
    seconds = max(in_turn(*typical_routings(drawn, 1)))  # the same on all ranks
    number = max(1, min(int(_MEASURED_S / _REPEATS / max(seconds, 1e-6)), _MOST_ROUTINGS))
    found = [in_turn(each) for each in typical_routings(drawn, number)]
    return [sum(way) / number for way in zip(*found, strict=True)]
