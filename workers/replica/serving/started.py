"""An engine that is ready to serve, and what its replica says about it. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crossdock.workers.model.weights.checkpoint import resolve_tokenizer
from crossdock.workers.replica.config import EmulatedDevice, ReplicaSpec
from crossdock.workers.replica.engine.emulated import advertised, emulated_engine
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.report.profile import SchedulingProfile

_TEXTS = dict.fromkeys(("dtype", "kv_dtype", "attention", "kernels"), "nothing that is computed")


@dataclass(frozen=True, slots=True)
class Started:
    """An engine that has started, with the profile and the machine that its replica advertises."""

    engine: Engine
    profile: SchedulingProfile
    checkpoint: str  # names the weights' files
    machine: dict[str, Any]  # see `describe_machine`
    folder: Path | None = None  # the folder of the weights' files; None: the device is emulated
    followers: Sequence[Any] = ()  # the actors of the other ranks


def start_emulated(spec: ReplicaSpec, device: EmulatedDevice) -> Started:
    """Return an engine that takes the seconds of a device, and what its replica advertises."""
    folder = spec.model.folder(needs_weights=False)
    tokenizer = None if spec.tokenizer is None else resolve_tokenizer(spec.tokenizer, folder)
    model = spec.model
    engine = emulated_engine(
        device.profile,
        spec.engine,
        folder,
        model.max_model_len,
        tokenizer=tokenizer,
        fits_memory=model.fits_memory,
    )
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
