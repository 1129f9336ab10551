"""Measure how fast a rank on CPUs computes products, before it has any weights."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from crossdock.workers.report.expert_division import ProductRates

_REPEATS = 5  # of each, of which the fastest counts
_COLD_BYTES = 64 << 20  # more than caches hold
_WIDTH = 1024  # of the products by which FLOPS are measured
_ROWS = 64
_TINY = 8  # features of an expert whose products take no time beside their calls


@torch.inference_mode()
def measure_rates(dtype: torch.dtype, num_threads: int) -> ProductRates:
    """Return the rates of products with weights of a dtype, on so many threads. This process then has these threads.

    They are measured in CPU seconds, which other work on the machine changes little.
    """
    torch.set_num_threads(num_threads)
    cold = torch.ones(_COLD_BYTES // dtype.itemsize // _WIDTH, _WIDTH, dtype=dtype)
    warm = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    rows = torch.ones(_ROWS, _WIDTH, dtype=dtype)
    bandwidth = _COLD_BYTES / _least_seconds(lambda: linear(rows[:1], cold))
    flops = 2 * _ROWS * _WIDTH**2 / _least_seconds(lambda: linear(rows, warm))
    hidden = torch.ones(1, _TINY, dtype=dtype)
    weights = torch.ones(2 * _TINY, _TINY, dtype=dtype)
    return ProductRates(bandwidth, flops, _least_seconds(lambda: _one_expert(hidden, weights)))


def _one_expert(hidden: Tensor, weights: Tensor) -> Tensor:
    """Compute the expert of a row [1, D] as transformers' code does: find its rows, multiply, and add the output."""
    rows, _ = torch.where(hidden[:, :1] > 0)
    gate, up = linear(hidden[rows], weights).chunk(2, dim=-1)
    out = linear(silu(gate) * up, weights[:_TINY]) * hidden[rows, :1]
    return torch.zeros_like(hidden).index_add_(0, rows, out)


def _least_seconds(run: Callable[[], Any]) -> float:
    """Return the CPU seconds of a thread in the fastest of some runs, after a first one."""
    run()
    seconds = []
    for _ in range(_REPEATS):
        begun = time.process_time()
        run()
        seconds.append(time.process_time() - begun)
    return min(seconds) / torch.get_num_threads()
