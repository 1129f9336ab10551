"""Describe the machine under a replica, and how the replica uses it, for operators."""

import ctypes
import mmap
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossdock.kernels.build import cpu_flags
from crossdock.workers.model.fusion import FusedLayers
from crossdock.workers.model.model import PagedModel
from crossdock.workers.model.weights import measure_part

_NOTABLE = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")  # instruction sets, the fastest first


def describe_machine(model: PagedModel) -> dict[str, Any]:
    """Return what the rank of `model` runs on and with, as JSON; sizes in bytes.

    `weights`: as loaded. `pool`: the KV pages; `pool_in_use`: the part of them that has memory behind it by now, since
    a CPU's pages get memory when they are first written.
    """
    is_cpu, pool = model.device.type == "cpu", model.pool
    assert pool is not None
    return {
        "device": cpu_name() if is_cpu else torch.cuda.get_device_name(model.device),
        "instructions": next((name for name in _NOTABLE if name in cpu_flags()), "") if is_cpu else "",
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(model.kv_dtype).removeprefix("torch."),
        "attention": model.attention.name,
        "layers": "fused" if any(isinstance(part, FusedLayers) for part in model.module.modules()) else "transformers",
        "weights": measure_part(model.config, model.part.position, model.dtype),
        "pool": pool.nbytes,
        "pool_in_use": _resident(pool) if is_cpu else pool.nbytes,
    }


def cpu_name() -> str:
    """Return the CPU's name as Linux knows it, or its architecture where Linux gives no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def _resident(tensor: Tensor) -> int:
    """Return how many bytes of a tensor have memory behind them: mincore(2)."""
    page = mmap.PAGESIZE
    begin = tensor.data_ptr() // page * page
    size = tensor.data_ptr() + tensor.nbytes - begin
    present = (ctypes.c_ubyte * -(-size // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), present):
        return tensor.nbytes
    return min(page * sum(entry & 1 for entry in bytes(present)), tensor.nbytes)
