"""The one directory for files that can be made again: compiled kernels, the converted default model. No torch."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $CROSSDOCK_CACHE, $XDG_CACHE_HOME/crossdock or ~/.cache/crossdock, the first that is set."""
    if own := os.environ.get("CROSSDOCK_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "crossdock"
    return Path.home() / ".cache" / "crossdock"
