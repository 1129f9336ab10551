"""How many bytes files, results and uploads take on the disk: a bound for all clients, of which keys have shares."""

import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from starlette.types import Message

from crossdock.cluster.api.batches.unended import ERRORS, INPUT, OUTPUT, Unended, ids
from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.shares import Shares

_MEASURE_S = 1.0  # between two measurements
_FREE_BYTES = 256 << 20  # of a disk that stay free: more important files may be there
_FREE_PART = 100  # … or this part of a small disk
_OFTEN = 1 << 20  # bytes of an upload between two looks at the disk
_NO_RETRY = {"x-should-retry": "false"}


class Space:
    """Measures a folder of batches, at most once a second. May be called from several threads."""

    def __init__(self, root: Path, most: int, unended: Unended) -> None:
        """`most`: bytes of all clients together."""
        self._root = root
        self._most = most
        self._unended = unended
        self._lock = threading.Lock()
        self._shares = Shares(most)
        self._measured_at = float("-inf")
        self._sizes: dict[Path, dict[str, tuple[int, int]]] = {}  # of files that stay as they are: inode, bytes

    def forget(self) -> None:
        """Measure again at the next question: something has been deleted."""
        self._measured_at = float("-inf")

    def add(self, owner: str, num_bytes: int) -> None:
        """Count bytes that are there since the last measurement."""
        with self._lock:
            self._shares.take(owner, num_bytes)

    def check(self, owner: str, num_bytes: int = 1) -> None:
        """Raise ApiError 409 if an owner would have more than its share, and 507 if all or the disk have no room."""
        if (fault := self.fault(owner, num_bytes)) is not None:
            raise fault

    def fault(self, owner: str, num_bytes: int = 1) -> ApiError | None:
        """Return why there is no room for bytes more of an owner; None: there is."""
        check = check_free(self._root, num_bytes)
        if check is not None:
            return check
        with self._lock:
            if time.monotonic() - self._measured_at >= _MEASURE_S:
                self._measure()
            room = self._shares.room(owner)
            free = self._most - self._shares.num_used
        if num_bytes <= room:
            return None
        if num_bytes > free:
            reason = f"The files and results of all clients fill the server's {self._most} bytes (http.batch_bytes)"
            return ApiError(f"{reason}. Try again later.", status=507, code="insufficient_storage", headers=_NO_RETRY)
        reason = f"{num_bytes} bytes more are over this API key's share of the server's {self._most} (http.batch_bytes)"
        advice = "Delete files and results of batches that you no longer need"
        return ApiError(f"{reason}. {advice}.", status=409, code="too_many_bytes", headers=_NO_RETRY)

    def _measure(self) -> None:
        shares = Shares(self._most)
        with suppress(FileNotFoundError):
            for name in os.listdir(self._root):
                if not name.startswith("."):
                    shares.take("" if name == "all" else name, self._bytes_of(self._root / name))
        self._shares = shares
        self._measured_at = time.monotonic()

    def _bytes_of(self, owner: Path) -> int:
        """Return the bytes of an owner. A batch shares the bytes of its input with the file that it is made of."""
        found = self._files(owner / "files")
        sizes = dict(found.values())
        for place in self._unended.places(owner / "batches"):
            for name in (INPUT, OUTPUT, ERRORS):
                with suppress(OSError):
                    stat = (place / name).stat()
                    sizes[stat.st_ino] = stat.st_size
        return sum(sizes.values())

    def _files(self, folder: Path) -> dict[str, tuple[int, int]]:
        """Return the inode and the size of each file. Only new files are looked at."""
        known = self._sizes.get(folder, {})
        found = dict[str, tuple[int, int]]()
        with suppress(OSError):
            for name in ids(folder):
                if name in known:
                    found[name] = known[name]
                    continue
                with suppress(OSError):
                    stat = (folder / name / "data").stat()
                    found[name] = stat.st_ino, stat.st_size
        self._sizes[folder] = found
        return found


class Uploads:
    """The uploads that are on their way to this ingress: they lie in the folder for temporary files."""

    def __init__(self, most: int) -> None:
        """`most`: bytes of all uploads together; one API key has half of them."""
        self._shares = Shares(most)

    def of(self, owner: str) -> "Upload":
        """Return the account of an upload that begins."""
        return Upload(self._shares, owner)


class Upload:
    """One upload, whose bytes count as they come, until `end`."""

    def __init__(self, shares: Shares, owner: str) -> None:
        self._shares = shares
        self._owner = owner
        self._num_bytes = 0
        self._look_at = 0  # bytes at which the disk is looked at

    def counted(self, receive: Callable[[], Awaitable[Message]]) -> Callable[[], Awaitable[Message]]:
        """Return a channel that counts what it passes on. It raises ApiError 429 or 507 if there is no room."""

        async def give() -> Message:
            message = await receive()
            self._take(len(message.get("body", b"")))
            return message

        return give

    def _take(self, num_bytes: int) -> None:
        if num_bytes > self._shares.room(self._owner):
            reason = "Other uploads are on their way, and fill the room that uploads have. Try again later."
            headers = {"Retry-After": "5", "Connection": "close"}
            raise ApiError(reason, status=429, code="too_many_uploads", headers=headers)
        self._shares.take(self._owner, num_bytes)
        self._num_bytes += num_bytes
        if self._num_bytes >= self._look_at:
            self._look_at = self._num_bytes + _OFTEN
            if (fault := check_free(Path(tempfile.gettempdir()), _OFTEN)) is not None:
                raise fault

    def end(self) -> None:
        """Count nothing any longer."""
        self._shares.release(self._owner, self._num_bytes)
        self._num_bytes = 0


def check_free(folder: Path, num_bytes: int) -> ApiError | None:
    """Return the error for a disk that would be nearly full with bytes more; None: it has room."""
    try:
        disk = os.statvfs(folder)
    except FileNotFoundError:  # it is made for the first file
        return None
    free = disk.f_bavail * disk.f_frsize
    least = min(_FREE_BYTES, disk.f_blocks * disk.f_frsize // _FREE_PART)
    if free - num_bytes >= least:
        return None
    reason = f"The server's disk is nearly full: {free} bytes are free, and {least} must stay free"
    return ApiError(f"{reason}. Try again later.", status=507, code="insufficient_storage", headers=_NO_RETRY)
