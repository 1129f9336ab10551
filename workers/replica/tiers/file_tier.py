"""A folder of KV pages: one file for each page, which replicas of one host or volume share without a server.

A file is written under a temporary name and renamed, so that others see it whole or not at all. One that is not the
page of its name is a miss. Any replica may delete any file at any time. The files that were used longest ago go first,
by their modification time.
"""

import logging
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from crossdock.workers.replica.tiers.page_format import HEADER_BYTES, header_of, is_header_of, page_in, path_of
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

logger = logging.getLogger(__name__)

_CLOCK_S = 2.0  # within which a folder's time of change may not tell two changes apart
_LEFTOVER_S = 3600.0  # after which a temporary file has no writer any more
_OURS = tuple(map(re.compile, ("[0-9a-f]{32}", "[0-9a-f]{2}", r"[0-9a-f]{34}|\.\d+\.\d+")))  # names, level by level
_ROOM_LEFT = 0.05  # share of the bytes that is freed at once, so that not every page needs a scan


class _File(NamedTuple):
    used: float  # seconds, Unix
    size: int  # bytes
    path: str


class FileTier:
    """The pages of one model and layout in a folder. All calls belong to one thread."""

    def __init__(self, folder: Path, most_bytes: int, fingerprint: bytes, num_parts: int = 1) -> None:
        """`most_bytes`: of all files in the folder, also those of other models. `fingerprint`: 16 bytes, of everything
        that the meaning of a page's bytes depends on. `num_parts`: ranks that write their parts of each page together,
        perhaps to the same folder: the bytes of all parts count until the next scan.

        Raises:
            ValueError: the folder cannot be written to, or another user may have.
        """
        self._root = folder
        self._most_bytes = most_bytes
        self._fingerprint = fingerprint
        self._num_parts = num_parts
        self._own = folder / fingerprint.hex()
        self._count = 0  # temporary files so far
        self._seen: dict[str, tuple[int, set[PageKey]]] = {}  # by folder: when it last changed, and its pages then
        self._not_listed = ""  # the reason that was logged last
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._make_own()
            (self._own / ".writable").touch()
            self.num_bytes = sum(file.size for file in self._files())  # by the last scan, and changed here since
        except OSError as error:
            raise ValueError(f"kv_cache_files: {folder} must be a folder that can be written to: {error}") from None

    def _make_own(self) -> None:
        """Make the folder of this model, if it is missing.

        Raises:
            ValueError: another user may write to it. OSError: it cannot be made.
        """
        self._own.mkdir(mode=0o700, exist_ok=True)
        found = self._own.lstat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH or not stat.S_ISDIR(found.st_mode):
            reason = f"user {found.st_uid} owns it, its mode is {stat.S_IMODE(found.st_mode):o}"
            raise ValueError(f"kv_cache_files: {self._own} must be a folder that this user alone writes: {reason}")

    def changes(self) -> tuple[set[PageKey], set[PageKey]]:
        """Return the pages that have come since the last call, and those that have gone, by whatever replica.

        Pages in a folder that cannot be listed have gone. They come again when the folder can be listed.
        """
        came = set[PageKey]()
        gone = set[PageKey]()
        seen = self._seen
        now = time.time()
        failures: list[OSError] = []
        self._seen = {}
        for folder in _listed(self._own, failures):
            changed, before = seen.pop(folder.name, (0, set[PageKey]()))
            try:
                status = folder.stat()
            except OSError as error:
                failures.append(error)
                gone |= before
                continue
            if changed != status.st_mtime_ns:
                num_failures = len(failures)
                names = [entry.name for entry in _listed(folder.path, failures)]
                found = {key for name in names if (key := page_in(name)) is not None}
                came = came | (found - before)
                gone = gone | (before - found)
                before = found
                is_old = now - status.st_mtime > _CLOCK_S  # else a further change may bear the same time
                changed = status.st_mtime_ns if is_old and len(failures) == num_failures else 0
            self._seen[folder.name] = changed, before
        for _, before in seen.values():  # of folders that have gone
            gone |= before
        self._log_once([each for each in failures if not isinstance(each, FileNotFoundError)])
        return came, gone

    def _log_once(self, failures: Sequence[OSError]) -> None:
        """Log why a folder could not be listed, unless the last look found the same."""
        reason = str(failures[0]) if failures else ""
        if reason and reason != self._not_listed:
            logger.error("kv_cache_files: pages in %s are not found: %s", self._own, reason)
        self._not_listed = reason

    def write(self, key: PageKey, parts: Sequence[memoryview]) -> set[PageKey]:
        """Store a page, and return the pages that were deleted to make room. OSError: the page is not stored."""
        size = (HEADER_BYTES + sum(part.nbytes for part in parts)) * self._num_parts
        deleted = self._make_room(size) if self.num_bytes + size > self._most_bytes else set[PageKey]()
        header = header_of(self._fingerprint, key, parts)
        path = self._own / path_of(key)
        self._count += 1
        temporary = path.with_name(f".{os.getpid()}.{self._count}")
        try:
            self._make_parent(path)
            _write_whole(temporary, [memoryview(header), *parts])
            temporary.rename(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self.num_bytes += size
        return deleted

    def _make_parent(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:  # somebody has emptied the folder
            self._make_own()
            path.parent.mkdir(mode=0o700, exist_ok=True)

    def expect(self, keys: Sequence[PageKey]) -> None:
        """Do nothing: a file is read when it is wanted."""

    def read(self, key: PageKey, into: memoryview) -> bool:
        """Fill `into` with a page; False: there is no file, or it is not the page that was stored.

        A file that is wrong is deleted. The content of `into` is undefined then.
        """
        path = self._own / path_of(key)
        header = bytearray(HEADER_BYTES)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            is_whole = _read_whole(descriptor, [memoryview(header), into]) and not os.read(descriptor, 1)
        except OSError:
            return False
        finally:
            with suppress(OSError):  # nothing was written
                os.close(descriptor)
        with suppress(OSError):
            if not is_whole or not is_header_of(header, self._fingerprint, key, into):
                logger.warning("kv_cache_files: %s is not the page that its name says, and is deleted", path)
                path.unlink()
                return False
            os.utime(path)
        return True

    def _make_room(self, size: int) -> set[PageKey]:
        """Delete the files that were used longest ago. Returns the pages among them.

        Raises:
            OSError: the file is larger than the folder may be, or too few files can be deleted.
        """
        if size > self._most_bytes:
            raise OSError(f"a page of {size} bytes is larger than all files may be, {self._most_bytes} bytes")
        files = sorted(self._files())
        deleted = set[PageKey]()
        failure = None
        self.num_bytes = sum(file.size for file in files)
        for file in files:
            if self.num_bytes + size <= self._most_bytes * (1 - _ROOM_LEFT):
                break
            try:
                os.unlink(file.path)
            except FileNotFoundError:  # another replica was faster
                pass
            except OSError as error:
                failure = error
                continue
            self.num_bytes -= file.size
            if file.path.startswith(str(self._own)) and (key := page_in(os.path.basename(file.path))) is not None:
                deleted.add(key)
        if failure is not None and self.num_bytes + size > self._most_bytes:
            raise failure
        return deleted

    def _files(self) -> list[_File]:
        """Return the pages' files of all models in the folder. A file that has no name of ours is another program's.

        Folders that another user keeps closed are left out: their files cannot be deleted either.

        Raises:
            OSError: a folder cannot be listed now. Without its files the others would grow beyond the bound.
        """
        files = list[_File]()
        now = time.time()
        paths = [str(self._root)]
        failures = list[OSError]()
        for names in _OURS:
            entries = [each for path in paths for each in _listed(path, failures) if names.fullmatch(each.name)]
            paths = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
        for failure in failures:
            is_closed = isinstance(failure, PermissionError) and self._is_of_others(failure.filename)
            if not is_closed and not isinstance(failure, FileNotFoundError):
                raise failure
        for entry in entries:
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith("."):
                    files.append(_File(status.st_mtime, status.st_size, entry.path))
                elif now - status.st_mtime > _LEFTOVER_S:
                    with suppress(OSError):
                        os.unlink(entry.path)
        return files

    def _is_of_others(self, path: str | None) -> bool:
        """Return whether a folder is of another model."""
        return path is not None and self._root in Path(path).parents and not Path(path).is_relative_to(self._own)


def _listed(path: str | Path, failures: list[OSError]) -> list["os.DirEntry[str]"]:
    """Return the entries of a folder; none of a file. Where it cannot be listed, add the reason to `failures`."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except NotADirectoryError:
        return []
    except OSError as error:
        failures.append(error)
        return []


def _write_whole(path: Path, parts: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            while part:
                part = part[os.write(descriptor, part) :]
    finally:
        os.close(descriptor)


def _read_whole(descriptor: int, parts: Sequence[memoryview]) -> bool:
    """Fill the parts from a file; False: the file is shorter."""
    left = [part for part in parts if part.nbytes]
    while left:
        count = os.readv(descriptor, left)
        if not count:
            return False
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left:
            left[0] = left[0][count:]
    return True
