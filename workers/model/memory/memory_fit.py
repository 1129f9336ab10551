"""Check before loading whether a rank's weights and KV pages fit, and advise what would fit if they do not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crossdock.workers.model.cut.position import CannotCut, RankPosition
from crossdock.workers.model.memory.host_memory import bytes_of, free_on_host
from crossdock.workers.model.weights.formats import PlainWeights

_PLAIN = PlainWeights()
_SMALLER_POOL = "Lower kv_cache_memory"


def check_fits(
    config: Any,
    position: RankPosition,
    dtype: torch.dtype,
    kv_bytes: int,
    device: str,
    num_sharing: int = 1,
    free_bytes: int | None = None,
    weight_format: PlainWeights = _PLAIN,
) -> None:
    """Check that the part at `position` of a transformers configuration fits, with `kv_bytes` of pages.

    `num_sharing` ranks share this host's memory. `free_bytes` None asks the device. Weights in
    the dtype of their file take no memory while they are loaded, for the file is mapped.

    Raises:
        ValueError: with the missing bytes, and a tensor_parallel_size that would fit.
    """
    free = free_bytes if free_bytes is not None else free_memory(device)
    available = free // num_sharing if device == "cpu" else free
    is_mapped = getattr(config, "dtype", None) is dtype  # before it is measured: transformers writes to it
    counted = weight_format.count_bytes(config, position, dtype)
    weights = counted.on(device)
    loading = counted.loading
    if max(available, weights) < loading and not is_mapped:
        raise ValueError(
            f"quantization {weight_format.name} of a checkpoint that is not in {dtype} needs {size_of(loading)} while "
            f"the model is loaded, and {size_of(available)} are free on {device}: {size_of(loading - available)} "
            f"are missing"
        )
    if weights + kv_bytes <= available:
        return
    shared = f" (this host's {size_of(free)} for {num_sharing} ranks)" if available < free else ""
    raise ValueError(
        f"{position} needs {size_of(weights)} for weights and {size_of(kv_bytes)} for KV pages, and "
        f"{size_of(available)} are free on {device}{shared}: {size_of(weights + kv_bytes - available)} are missing. "
        f"{_advice(config, position, dtype, kv_bytes, device, available, weight_format)}"
    )


def _advice(
    config: Any,
    position: RankPosition,
    dtype: torch.dtype,
    kv_bytes: int,
    device: str,
    available: int,
    weight_format: PlainWeights,
) -> str:
    if not weight_format.is_cut:
        return _SMALLER_POOL
    for tensor_size in (2, 4, 8, 16, 32, 64):
        if tensor_size <= position.tensor_size:
            continue
        wider = replace(position, rank=0, tensor_size=tensor_size)
        try:
            needed = max(
                weight_format.count_bytes(config, replace(wider, rank=stage * tensor_size), dtype).on(device)
                for stage in range(position.num_stages)
            )
        except CannotCut:
            break
        if needed + kv_bytes <= available:
            return (
                f"tensor_parallel_size {wider.tensor_size} would fit with as much for every rank: {size_of(needed)} "
                f"and {size_of(kv_bytes)} each"
            )
    return "No tensor_parallel_size would fit: lower kv_cache_memory, choose a smaller dtype, or more pipeline stages"


def used() -> str:
    """Return how much memory this process uses, as text for logs."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return f"{size_of(torch.cuda.memory_allocated())} of GPU memory in use"
    return f"{size_of(bytes_of(Path('/proc/self/status'), 'VmRSS'))} of memory in use"


def used_by_all_but_torch() -> int:
    """Return the bytes of the GPU in use by other processes, and by libraries of this one outside torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def size_of(num_bytes: int) -> str:
    """Return a number of bytes as text for logs and errors."""
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 28 else f"{num_bytes / (1 << 20):.1f} MiB"


def free_memory(device: str = "cpu") -> int:
    """Return the bytes that are free on a device."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[0])
    return free_on_host()
