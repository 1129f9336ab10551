"""Seconds that starts of models took on this machine, kept between runs; and a guess before the first start."""

import time
from pathlib import Path

from crossdock.cluster.config import ClusterConfig
from crossdock.kernels.cache import cache_dir, read_cached, write_cached
from crossdock.workers.model.weights.checkpoint import resolve_model

_VERSION = "1"  # of the file's form
_PROCESS_S = 8.0  # a replica's process without its weights: Ray, imports, measured steps (2 Zen 4 cores, 2026-11-24)
_SAMPLE_BYTES = 64 << 20


def start_key(config: ClusterConfig) -> str:
    """Return the name under which the start of a model is kept: what its seconds depend on."""
    pools = (f"{pool.checkpoint or config.model.path} {pool.num_ranks} {pool.emulated}" for pool in config.pools)
    return ", ".join(pools)


def known_starts() -> dict[str, float]:
    """Return the seconds of earlier starts."""
    return dict(read_cached(_file(), _VERSION) or {})


def remember_start(key: str, seconds: float) -> None:
    """Keep the seconds of a start for later runs, where the disk takes them."""
    try:
        write_cached(_file(), _VERSION, known_starts() | {key: round(seconds, 2)})
    except OSError:
        return


def first_guess(config: ClusterConfig) -> float:
    """Return the seconds of a start that was never seen: a process, and its weights at the speed of this disk."""
    if config.is_emulated:
        return _PROCESS_S
    files = [*resolve_model(config.model.path, needs_weights=False).glob("*.safetensors")]
    if not files:  # they are fetched by the replica
        return _PROCESS_S
    with max(files, key=lambda file: file.stat().st_size).open("rb", buffering=0) as file:
        begun = time.perf_counter()
        num_read = len(file.read(_SAMPLE_BYTES))
        seconds = time.perf_counter() - begun
    return _PROCESS_S + sum(file.stat().st_size for file in files) * seconds / max(num_read, 1)


def _file() -> Path:
    return cache_dir() / "starts.json"
