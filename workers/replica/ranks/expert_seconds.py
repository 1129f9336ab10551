"""Measure the seconds of a layer's experts on CPUs, on all ranks at once, before any rank has weights."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossdock.kernels.options import CpuKernels
from crossdock.workers.model.layers.coded_products import compute_from_codes
from crossdock.workers.model.weights.packed_layers import packed_tensors
from crossdock.workers.report.expert_division import Chosen, ExpertSizes, routings_by_fullest, typical_routings

MEASURED_BYTES = 256 << 20
"""Weights of a rank that are measured, at least one layer. In a step the weights of other layers have been in the
caches since. So runs take the layers in turn: nothing that one reads is in a cache still from its run before."""

_MEASURED_S = 0.5  # of steps of one size in one division, and at least one routing
_MOST_RUNS = 32  # of one size, each with another routing: those of one stream read a few experts each
_REPEATS = 2  # of all runs in a row, of which the faster counts for each

_Compute: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class MeasuredExperts:
    """The experts of some layers as this rank would hold them, with weights of no meaning."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype, kernels: CpuKernels) -> None:
        """Give memory to modules on the meta device. None: this rank's stage has no experts."""
        self.dtype = dtype
        for experts in layers:
            experts.to_empty(device="cpu")
            for tensor in (*experts.parameters(), *experts.buffers(), *packed_tensors(experts)):
                tensor.fill_(2**-6 if tensor.is_floating_point() else 0)
        compute_from_codes(nn.ModuleList(layers), dtype, kernels)
        self._layers: Sequence[_Compute] = [each.forward for each in layers]  # without the sum over ranks, a hook

    def run(self, number: int, hidden: Tensor, chosen: Tensor, shares: Tensor) -> float:
        """Return the CPU seconds that a thread takes, on the rank that takes most of them. Collective.

        Runs in order of their `number` take the layers in turn.
        """
        dist.all_reduce(torch.zeros(1))  # all begin at once
        begun = time.process_time()
        if self._layers:
            self._layers[number % len(self._layers)](hidden, chosen, shares)
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

    def mean_seconds(routings: Sequence[Chosen]) -> list[float]:
        chosen = [torch.from_numpy(each) for each in routings]
        found = [
            [[way.run(number, hidden, each, shares) for way in ways] for number, each in enumerate(chosen)]
            for _ in range(_REPEATS)
        ]
        means: list[float] = np.min(found, axis=0).mean(axis=0).tolist()
        return means

    drawn = routings_by_fullest(sizes, num_ranks, rows)
    seconds = max(mean_seconds(typical_routings(drawn, 1)))  # the same on all ranks
    number = max(1, min(int(_MEASURED_S / _REPEATS / max(seconds, 1e-6)), _MOST_RUNS))
    return mean_seconds(typical_routings(drawn, number))
