"""Loads the engine of a replica of one rank."""

from collections.abc import Callable

import torch

from crossdock.workers.model.load import load_model
from crossdock.workers.model.weights.checkpoint import resolve_tokenizer
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.ranks.device import device_of
from crossdock.workers.replica.ranks.step_deadline import StepDeadline


def load_engine(
    spec: ReplicaSpec,
    loaded: Callable[[], None] = lambda: None,
    step_deadline: Callable[[], StepDeadline] | None = None,
) -> Engine:
    """Load the model of a replica of one rank, and return its engine, not calibrated yet.

    `loaded` is called when the weights are in memory. `step_deadline`: of steps on a GPU; None: none is kept.

    Raises:
        ValueError: the model or its settings cannot be served; the message names the field.
    """
    if spec.emulated is not None:
        raise ValueError("pools: emulated: only crossdock serve has emulated devices; leave it out")
    torch.set_num_threads(spec.num_threads)  # Ray sets OMP_NUM_THREADS by its own accounting
    device = device_of(spec)
    kv_bytes = spec.engine.budget.known(device) or 0
    model = load_model(spec.model, device, kv_bytes=kv_bytes, loaded=loaded)
    tokenizer = resolve_tokenizer(spec.tokenizer, spec.model.path)
    weights = spec.name_of_kept_pages(model.checkpoint) if spec.engine.kv_cache_files else ""
    return new_engine(model, spec.engine, tokenizer, weights=weights, step_deadline=step_deadline)
