"""The device that a rank computes on."""

import torch

from crossdock.workers.replica.config import Device, ReplicaSpec


def device_of(spec: ReplicaSpec) -> Device:
    """Return the device of this rank: the spec's, or where it leaves that open, a GPU if torch finds one.

    Raises:
        ValueError: the spec wants a GPU, and torch finds none.
    """
    if spec.device == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if spec.device == "cuda":
        raise ValueError(
            f"pools.NAME.num_gpus: torch {torch.__version__} finds no GPU in this process; its build must be one for "
            f"CUDA, and the driver must fit it. With num_gpus: 0 (--device cpu) a pool runs on CPUs"
        )
    return "cpu"
