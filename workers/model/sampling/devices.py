"""The differences between devices: how many rows are worked on together, and copies to a GPU without waiting."""

from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_CPU_BLOCK = 1 << 19  # elements worked on at once, 2 MiB of float32: stays in cache, twice as fast as 32 rows at once

_GPU_BLOCK = 256  # rows: noise of 128k tokens takes 2.5 MB a row, which is memory that pages of a cache do not get


def blocks_of(scores: Tensor) -> Iterator[slice]:
    """Yield the rows of `scores` [N, V] to work on together: a few on a CPU, many on other devices."""
    num_rows, vocab_size = scores.shape
    size = max(1, _CPU_BLOCK // vocab_size) if scores.device.type == "cpu" else _GPU_BLOCK
    for start in range(0, num_rows, size):
        yield slice(start, start + size)


def copy_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return a tensor on `device`, without waiting for work that the device still does."""
    is_there = device.type != "cuda" or tensor.device.type == "cuda"
    return tensor if is_there else tensor.pin_memory().to(device, non_blocking=True)


@lru_cache
def has_kernels(device: torch.device) -> bool:
    """Return whether sampling has kernels of its own on a device: those in Triton."""
    return device.type == "cuda" and find_spec("triton") is not None


def log_softmax(scores: Tensor) -> Tensor:
    """Return the log-softmax [N, V] of each row. A row has the same bits whatever rows are beside it.

    torch adds a row on a GPU in an order that follows where in memory the row begins.
    """
    if not has_kernels(scores.device):
        return scores.log_softmax(-1)
    from crossdock.kernels.gpu import triton_fixed_order  # Triton is not on every machine

    return triton_fixed_order.log_softmax(scores)


class HostCopy:
    """Tensors of a device on their way to the host, which does other work meanwhile."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._event = None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._tensors = tuple(torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors)
            for mine, theirs in zip(self._tensors, tensors, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[Any]:
        """Wait for the device; return each tensor as a list."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.tolist() for tensor in self._tensors]
