"""How much a step computes, and for how many requests, where the configuration leaves these numbers to the device."""

import logging

import torch

from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig, StepSizes

logger = logging.getLogger("ray.serve")


def sized(config: EngineConfig, model: LoadedModel) -> EngineConfig:
    """Return the configuration, with the numbers that depend on the device of `model` filled in and logged."""
    return sized_for(config, model.device, model.max_model_len)


def sized_for(config: EngineConfig, device: torch.device, max_model_len: int) -> EngineConfig:
    """Return the configuration as `sized` does, for requests of `max_model_len` tokens on a device."""
    if config.max_num_batched_tokens and config.max_num_seqs:
        return config
    name = "CPU"
    memory = 0
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        memory = properties.total_memory
    result = config.sized(StepSizes.of_device(name, memory), max_model_len)
    logger.info(
        "for %s: max_num_batched_tokens %d, max_num_seqs %d", name, result.max_num_batched_tokens, result.max_num_seqs
    )
    return result
