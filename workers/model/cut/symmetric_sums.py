"""Sum tensors of the GPUs of one host through memory that all of them read: one kernel, not several hops.

Of few bytes each rank reads everything from all others (one shot). Of more, each sums a share and reads the sums of the
other shares (two shots).

Two ranks on one GPU have run this, several GPUs have not. So it is proven at every start: the ranks sum known numbers,
and use NCCL where a sum is wrong or anything fails.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

logger = logging.getLogger(__name__)

# Bytes up to which reading all ranks' tensors beats sharing the work, by number of ranks: vLLM's limits of its own
# all-reduce. With more ranks than these, each reads too much.
ONE_SHOT_BYTES = {2: 1 << 20, 3: 512 << 10, 4: 512 << 10, 5: 256 << 10, 6: 256 << 10, 7: 256 << 10, 8: 256 << 10}
TWO_SHOT_BYTES = 8 << 20  # up to which this should beat NCCL: 1,024 rows of an 8B model; each rank has such a buffer
_ALIGNMENT = 16  # bytes: the kernel reads so many at once
_DTYPES = (torch.bfloat16, torch.float32)

GatherTexts = Callable[[str], Sequence[str]]
"""Collective: takes a text of this rank, and returns those of all ranks."""


class SymmetricSums:
    """The sums of a tensor parallel group through one buffer on each of its GPUs."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Create the buffers. Collective: every rank of `group` must call it."""
        # Ray lets each rank see one GPU, which is therefore called cuda:0 in all of them.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        self._group_name = group.group_name
        self._size, self.one_shot_bytes, self.most_bytes = group.size(), ONE_SHOT_BYTES[group.size()], TWO_SHOT_BYTES
        self._buffer = symmetric_memory.empty(self.most_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._buffer, group)

    def takes(self, x: Tensor) -> bool:
        """Return whether `x` is summed here. The answer is the same on all ranks, whose `x` are alike."""
        share = 1 if x.nbytes <= self.one_shot_bytes else self._size
        return x.dtype in _DTYPES and 0 < x.nbytes <= self.most_bytes and x.nbytes % (_ALIGNMENT * share) == 0

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the contiguous `x` of all ranks. `x` stays as it is. CUDA graphs can record it."""
        buffer = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        if x.nbytes <= self.one_shot_bytes:
            total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", self._group_name)
            return total
        total = torch.empty_like(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer.copy_(x), "sum", self._group_name, total)
        return total


def symmetric_sums(
    group: dist.ProcessGroup, device: torch.device, is_on_one_host: bool, gather: GatherTexts
) -> SymmetricSums | None:
    """Return the sums of a group if all of its ranks can use them, else None. Collective: every rank must call it.

    If one rank cannot, no rank does: a log line gives the reason. The sums of two shots are proven apart, and left out
    alone.
    """
    why_not = _why_not(group, device, is_on_one_host)
    if not _are_all_well(why_not, gather, 0):
        return None
    sums = None
    try:
        sums = SymmetricSums(group, device)
        _check(sums, group, device, 128)
    except Exception as error:  # a driver, a container or a topology may refuse anything
        why_not = _in_one_line(error)
    if not _are_all_well(why_not, gather, 0) or sums is None:
        return None
    try:
        for num_bytes in (2 * sums.one_shot_bytes, sums.most_bytes):
            _check(sums, group, device, num_bytes)
    except Exception as error:
        why_not = _in_one_line(error)
    if not _are_all_well(why_not, gather, sums.one_shot_bytes):
        sums.most_bytes = sums.one_shot_bytes
    return sums


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _why_not(group: dist.ProcessGroup, device: torch.device, is_on_one_host: bool) -> str:
    if device.type != "cuda":
        return f"ranks compute on {device.type}"
    if group.size() not in ONE_SHOT_BYTES:
        return f"a stage has {group.size()} ranks; {min(ONE_SHOT_BYTES)} to {max(ONE_SHOT_BYTES)} can"
    return "" if is_on_one_host else "ranks are on several hosts"


def _are_all_well(why_not: str, gather: GatherTexts, least_bytes: int) -> bool:
    """Return whether no rank has a reason against its own sums of more than `least_bytes`; else log the first one."""
    reasons = [reason for reason in gather(why_not) if reason]
    if reasons:
        those = f"of more than {least_bytes} bytes" if least_bytes else "whatever their size"
        logger.info("all-reduces are NCCL's or gloo's, %s: %s", those, reasons[0])
    return not reasons


def _check(sums: SymmetricSums, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
    """Check two sums of `num_bytes` bytes: the second one meets what the first left in the buffers.

    RuntimeError: a sum is wrong.
    """
    size = group.size()
    rank = group.rank()
    for dtype in _DTYPES:
        for scale in (1, 3):
            numbers = torch.arange(num_bytes // dtype.itemsize, device=device) % 61  # small: bfloat16 holds them
            x = numbers.add(rank).mul(scale).to(dtype)
            expected = numbers.mul(size).add(size * (size - 1) // 2).mul(scale).to(dtype)
            if not torch.equal(sums.sum(x), expected):
                raise RuntimeError(f"{socket.gethostname()}: a sum of {dtype} over {size} ranks is wrong")
