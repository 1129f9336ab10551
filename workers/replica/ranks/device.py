"""The device that a rank computes on, and where kernels compiled for this device are kept."""

import torch

from crossdock.kernels.cache import keep_triton_kernels
from crossdock.workers.replica.config import Device, ReplicaSpec


def device_of(spec: ReplicaSpec) -> Device:
    """Return the device of this rank: the spec's; where the spec leaves the device open, a GPU if torch finds one.

    On a GPU, kernels that Triton compiles from now on are kept in the cache directory.

    Raises:
        ValueError: the spec wants a GPU, and torch finds none.
    """
    if spec.device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        keep_triton_kernels()
        return "cuda"
    if spec.device == "cuda":
        raise ValueError(
            f"pools.NAME.num_gpus: torch {torch.__version__} finds no GPU in this process; its build must be one for "
            f"CUDA, and the driver must fit it. With num_gpus: 0 (--device cpu) a pool runs on CPUs"
        )
    return "cpu"
