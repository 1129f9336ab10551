"""Push weights to a running application from Python, and tell trainers how it is configured."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from crossdock.cluster.config import ClusterConfig
from crossdock.cluster.dispatch.gate import PauseMode
from crossdock.cluster.serve.app import APP_NAME
from crossdock.router.fleet import Fleet

if TYPE_CHECKING:
    from torch import Tensor

    from crossdock.workers.model.new_weights import Arrays


def push_weights(
    tensors: "Iterable[tuple[str, Tensor]]", name: str = "", mode: PauseMode = "wait", app_name: str = APP_NAME
) -> str:
    """Have all replicas of a running application compute with new weights, through Ray's object store.

    Args:
        tensors: whole ones with their names in a checkpoint, such as `model.named_parameters()`.
        name: of the weights in answers; empty: the number of the update.
        mode: what becomes of requests that run: `wait` for their ends, `abort`, or `keep` them over the change.

    Returns the name. Raises ValueError where the weights cannot be replaced, with the reason.
    """
    ingress = serve.get_deployment_handle("ingress", app_name)
    pushed: str = ingress.push_weights.remote([ray.put(arrays_of(tensors))], name, mode).result()
    return pushed


def arrays_of(tensors: "Iterable[tuple[str, Tensor]]") -> "Arrays":
    """Return whole tensors as `push_weights` puts them into Ray's object store."""
    import torch

    from crossdock.workers.model.checksums import checksum

    arrays = {}
    for key, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        bytes_of = plain.reshape(-1).view(torch.uint8).numpy()
        arrays[key] = str(plain.dtype).removeprefix("torch."), tuple(plain.shape), bytes_of, checksum(plain)
    return arrays


def server_info(config: ClusterConfig, fleet: Fleet) -> dict[str, Any]:
    """Return the fields of vLLM's configuration that trainers read, with one replica per data-parallel rank."""
    engine = config.engine
    model = config.model
    profiles = [each.profile for each in fleet.table.by_name.values()]
    first = profiles[0] if profiles else None
    lora = {"max_loras": engine.max_loras, "max_lora_rank": engine.max_lora_rank} if config.enables_lora else None
    return {
        "model_config": {
            "model": model.path or model.name,
            "dtype": f"torch.{first.dtype}" if first is not None and first.dtype else model.dtype,
            "max_model_len": min((each.max_model_len for each in profiles), default=None),
            "logprobs_mode": config.http.logprobs_mode,
        },
        "parallel_config": {
            "tensor_parallel_size": 1 if first is None else first.tensor_parallel_size,
            "pipeline_parallel_size": 1 if first is None else first.pipeline_parallel_size,
            "data_parallel_size": len(profiles),
        },
        "lora_config": lora,
        # How a trainer sends tensors: as vLLM's by NCCL, and on CPUs by a group of torch.
        "weight_transfer_config": {"backend": "nccl" if first is not None and first.device == "cuda" else "gloo"},
    }
