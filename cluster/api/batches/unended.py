"""Which batches of a folder have not ended. A look reads what has changed since the look before it."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger("ray.serve")

STATE = "batch.json"
INPUT = "input.jsonl"
OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_SETTLED_NS = 2 * 10**9  # a folder whose time of change is as new may change again at the same time
_EACH_NS = 60 * 10**9  # between two readings of a folder that does not seem to change: clocks of others may be wrong


@dataclass(slots=True)
class _Folder:
    stamp: int = 0  # time of its newest change, ns
    read_at: int = 0  # ns
    open: dict[str, int] = field(
        default_factory=dict
    )  # time of change of each batch that has not ended, as it was read
    ended: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)  # batches whose object is none
    fault: str = ""  # why the folder could not be read


class Unended:
    """Remembers the batches that have ended: these are not looked at again."""

    def __init__(self, read: Callable[[Path], Any], has_ended: Callable[[Path, Any], bool]) -> None:
        """`read`: returns the object of a batch; OSError or ValueError: there is none. `has_ended`: whether the batch
        has ended, and nothing of it is left to delete."""
        self._read = read
        self._has_ended = has_ended
        self._folders: dict[Path, _Folder] = {}
        self._lock = threading.Lock()

    def places(self, folder: Path) -> list[Path]:
        """Return the batches in a folder that have not ended, the oldest first; none where it cannot be read."""
        with self._lock:
            known = self._folders.setdefault(folder, _Folder())
            try:
                self._read_names(folder, known)
            except OSError as error:
                if known.fault != str(error):
                    logger.error("batches cannot be looked for: %s", error)
                known.fault = str(error)
                return []
            known.fault = ""
            for name in list(known.open):
                self._look(folder / name, known)
            return [folder / name for name in sorted(known.open.keys() - known.unreadable, key=age_key)]

    def _read_names(self, folder: Path, known: _Folder) -> None:
        """Read the names of batches, if they may have changed."""
        try:
            stamp = folder.stat().st_mtime_ns
            now = time.time_ns()
            if stamp == known.stamp and stamp < now - _SETTLED_NS and 0 <= now - known.read_at < _EACH_NS:
                return
            names = set(ids(folder))
        except FileNotFoundError:
            names = set()
            stamp = 0
            now = 0
        known.stamp = stamp
        known.read_at = now
        known.ended &= names
        known.unreadable &= names
        known.open = {name: known.open.get(name, 0) for name in names - known.ended}

    def _look(self, place: Path, known: _Folder) -> None:
        """Look at a batch that had not ended, if its object has changed."""
        name = place.name
        try:
            stamp = (place / STATE).stat().st_mtime_ns
            if stamp == known.open[name]:
                return
            known.open[name] = stamp
            if self._has_ended(place, self._read(place)):
                del known.open[name]
                known.ended.add(name)
            known.unreadable.discard(name)
        except FileNotFoundError:  # deleted meanwhile; where a shared disk only said so, the next look reads it
            known.open[name] = 0
            known.unreadable.add(name)
        except ValueError as error:
            known.unreadable.add(name)
            logger.error("batch %s cannot be run: %s", place, error)
        except OSError:
            known.open[name] = 0  # so the next look reads it


def ids(folder: Path) -> list[str]:
    """Return the ids of the objects in a folder. FileNotFoundError: there is no such folder."""
    return [name for name in os.listdir(folder) if _ID.fullmatch(name)]


def age_key(name: str) -> tuple[int, str]:
    """Return a key that sorts names of objects, the oldest first: ids begin with the time, as those of UUIDv7."""
    digits = name[-32:]
    milliseconds = int(digits[:12], 16)
    return (milliseconds if milliseconds < (time.time() + 86400) * 1000 else 0), name
