"""The start of a replica on an emulated device: nothing is loaded or measured."""

from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.replica.config import EmulatedDevice, ReplicaSpec
from crossdock.workers.replica.engine.emulated import advertised, emulated_engine
from crossdock.workers.replica.serving.started import Started

_TEXTS = dict.fromkeys(("dtype", "kv_dtype", "attention", "kernels"), "nothing that is computed")


def start_emulated(spec: ReplicaSpec, device: EmulatedDevice) -> Started:
    """Return an engine that takes the seconds of a device, and what its replica advertises."""
    folder = resolve_model(spec.model.path, needs_weights=False)
    engine = emulated_engine(device.profile, spec.engine, folder, spec.model.max_model_len)
    machine = {
        "device": f"emulated {device.name}",
        "instructions": "",
        "threads": 1,
        **_TEXTS,
        "graphs": "",
        "weights": 0,
        "pool": 0,
    }
    return Started(engine, advertised(engine, device.profile), device.profile.weights or "emulated", machine)
