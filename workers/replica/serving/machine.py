"""Describe the machine under a replica, and how the replica uses it, for operators."""

import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crossdock.kernels.attention import why_no_library
from crossdock.kernels.cpu.build import cpu_flags
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.weights.packed_layers import packed_tensors

_NOTABLE = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")  # instruction sets, the fastest first


def describe_machine(model: LoadedModel, graphs: str = "") -> dict[str, Any]:
    """Describe the hardware and software under the rank of `model`, as JSON; sizes in bytes.

    `kernels`: of the products of fused layers; empty: transformers' own code computes the layers. `graphs`: which steps
    are CUDA graphs, and why others are not; empty on a CPU. `weights`: bytes that are held, in the layouts of kernels.
    `pool`: bytes of the KV pages. `attention` is "torch" where the C++ that should run could not be compiled or loaded;
    `slower` says why, and is empty else.
    """
    slower = why_no_library() if model.attention.name == "cpp" else ""
    return {
        **describe_device(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(model.kv_dtype).removeprefix("torch."),
        "attention": "torch" if slower else model.attention.name,
        "slower": slower,
        "kernels": model.kernels,
        "graphs": graphs,
        "weights": held_bytes(model.module),
        "pool": model.pool.tensor.nbytes,
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describe the hardware of a rank, and how many threads it uses."""
    is_cpu = device.type == "cpu"
    return {
        "device": cpu_name() if is_cpu else torch.cuda.get_device_name(device),
        "instructions": next((name for name in _NOTABLE if name in cpu_flags()), "") if is_cpu else "",
        "threads": torch.get_num_threads(),
    }


def cpu_name() -> str:
    """Return the CPU's name as Linux knows it, or its architecture where Linux gives no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.machine()


def held_bytes(module: nn.Module) -> int:
    """Return the bytes of all weights of a module, those that several parts share once."""
    tensors = [*module.parameters(), *packed_tensors(module)]
    for part in module.modules():
        tensors += getattr(part, "kernel_tensors", ())  # of weights in layouts of kernels, which are no parameters
    return sum({id(each) if each.is_mkldnn else each.data_ptr(): each.nbytes for each in tensors}.values())
