"""Seconds that starts of models took on this machine, kept between runs; and a guess before the first start."""

import time
from pathlib import Path

from crossdock.kernels.cache import cache_dir, read_cached, write_cached

_VERSION = "1"  # of the file's form
_PROCESS_S = 8.0  # a replica's process without its weights: Ray, imports, measured steps (2 Zen 4 cores, 2026-11-24)
_SAMPLE_BYTES = 64 << 20


def known_starts() -> dict[str, float]:
    """Return the seconds of earlier starts."""
    return dict(read_cached(_file(), _VERSION) or {})


def remember_start(key: str, seconds: float) -> None:
    """Keep the seconds of a start for later runs, where the disk takes them."""
    try:
        write_cached(_file(), _VERSION, known_starts() | {key: round(seconds, 2)})
    except OSError:
        return


def first_guess(folder: Path | None) -> float:
    """Return the seconds of a start that was never seen: a process, and the weights in `folder` at the disk's speed.

    None: there are no weights to read.
    """
    files = [] if folder is None else [*folder.glob("*.safetensors")]
    if not files:
        return _PROCESS_S
    with max(files, key=lambda file: file.stat().st_size).open("rb", buffering=0) as file:
        begun = time.perf_counter()
        num_read = len(file.read(_SAMPLE_BYTES))
        seconds = time.perf_counter() - begun
    return _PROCESS_S + sum(file.stat().st_size for file in files) * seconds / max(num_read, 1)


def _file() -> Path:
    return cache_dir() / "starts.json"
