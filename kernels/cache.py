"""The one directory for files that can be made again: compiled kernels, the converted default model. No torch."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Return $CROSSDOCK_CACHE, $XDG_CACHE_HOME/crossdock or ~/.cache/crossdock, the first that is set."""
    if own := os.environ.get("CROSSDOCK_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "crossdock"
    return Path.home() / ".cache" / "crossdock"


def keep_triton_kernels() -> None:
    """Have Triton keep what it compiles in the cache directory, unless TRITON_CACHE_DIR names another.

    Call it before a kernel runs. Triton's own default is ~/.triton, which a container loses with its end.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_dir() / "triton"))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which other processes wait for. The lock ends with the process, too. Raises OSError."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_cached(path: Path, key: str) -> Any:
    """Return the JSON value that `write_cached` wrote under this key; None if there is none, or no whole file."""
    try:
        content = json.loads(path.read_text())
        return content["value"] if content["key"] == key else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_cached(path: Path, key: str, value: object) -> None:
    """Write a JSON value that `read_cached` finds under this key. Raises OSError."""
    with replacing(path) as new:
        new.write_text(json.dumps({"key": key, "value": value}))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file beside `path`, and rename it to `path` at the end: a reader finds a whole file or none.

    Raises:
        OSError: the file cannot be made or renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
