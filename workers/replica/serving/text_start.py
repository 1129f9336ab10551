"""The start of a replica whose steps read texts through a text encoder."""

from collections.abc import Callable
from typing import Any

from crossdock.workers.model.text_encoder import TextEncoder
from crossdock.workers.model.weights.fingerprint import fingerprint
from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.engine.engine_loader import load_text_engine
from crossdock.workers.replica.engine.text_engine import calibrate_texts
from crossdock.workers.replica.serving.machine import describe_device, held_bytes
from crossdock.workers.replica.serving.started import Started


def start_text_encoder(spec: ReplicaSpec, reached: Callable[[str], None]) -> Started:
    """Load a text encoder and measure its steps. `reached` is told the end of each phase.

    Raises:
        ValueError: the encoder or a setting cannot be served; the message names the field.
    """
    engine, encoder = load_text_engine(spec)
    reached("weights")
    profile = calibrate_texts(engine, encoder)
    reached("steps")
    folder = spec.model.folder()
    return Started(engine, profile, fingerprint(folder), _describe(encoder), folder)


def _describe(encoder: TextEncoder) -> dict[str, Any]:
    """Describe the machine as `describe_machine` does."""
    return {
        **describe_device(encoder.device),
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "kv_dtype": "",
        "attention": "torch",
        "kernels": "",
        "graphs": "",
        "weights": held_bytes(encoder.module),
        "pool": 0,
    }
