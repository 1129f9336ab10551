"""File calls below a folder that fail once: calls of `os`, of locks and of file objects."""

import fcntl
import io
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_OF_PATHS = ("open", "stat", "lstat", "scandir", "listdir", "unlink", "rmdir", "mkdir", "rename", "link", "utime")
_OF_FILES = ("fsync", "pread")
_OF_OBJECTS = ("write", "flush", "read", "truncate", "seek")
_IDS = re.compile(r"[0-9a-f]{32}")


class FailingFiles:
    """Names each file call below `root` by its function and its path, without the ids in the path."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self._root = os.path.realpath(root)
        self._exempt = threading.local()
        self.seen: Counter[str] = Counter()  # calls by name
        self.has_failed = False
        self._name = ""
        self._number = 0
        self._errno = 0
        for name in (*_OF_PATHS, *_OF_FILES):
            call = getattr(os, name)
            patch.setattr(os, name, self._wrapped(name, call if name != "fsync" else lambda fd: None))
        patch.setattr(fcntl, "flock", self._wrapped("flock", fcntl.flock))
        opened = io.open
        patch.setattr(io, "open", lambda file, *args, **named: self._opened(file, opened, *args, **named))

    def fail(self, name: str, number: int, errno: int) -> None:
        """Let the call of a name fail that is the `number`-th from now on, from 0."""
        self.seen.clear()
        self.has_failed = False
        self._name = name
        self._number = number
        self._errno = errno

    @contextmanager
    def never(self) -> Iterator[None]:
        """Let the calls of this thread neither fail nor count."""
        self._exempt.now = True
        try:
            yield
        finally:
            self._exempt.now = False

    def note(self, function: str, path: Any, dir_fd: int | None = None) -> None:
        """Count a call, and raise OSError where it is the one that fails."""
        if getattr(self._exempt, "now", False):
            return
        with self.never():
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            base = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            whole = os.path.normpath(os.path.join(base or os.getcwd(), os.fsdecode(path)))
        if not f"{whole}/".startswith(f"{self._root}/"):
            return
        name = f"{function} {_IDS.sub('*', whole.removeprefix(self._root))}"
        self.seen[name] += 1
        if name == self._name and self.seen[name] == self._number + 1:
            self.has_failed = True
            raise OSError(self._errno, os.strerror(self._errno), whole)

    def _wrapped(self, function: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any = ".", *args: Any, **named: Any) -> Any:
            at = path.fileno() if hasattr(path, "fileno") else path
            self.note(function, at, named.get("dir_fd") if named.get("dir_fd") is not None else named.get("src_dir_fd"))
            return call(path, *args, **named)

        if call in os.supports_dir_fd:
            os.supports_dir_fd.add(wrapped)
        return wrapped

    def _opened(self, file: Any, opened: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if isinstance(file, int):
            return opened(file, *args, **named)
        self.note("open", file)
        found = opened(file, *args, **named)
        if not f"{os.path.realpath(os.fsdecode(file))}/".startswith(f"{self._root}/"):
            return found
        return _Object(found, file, self)


class _Object:
    """A file object whose calls may fail."""

    def __init__(self, file: Any, path: Any, files: FailingFiles) -> None:
        self._file = file
        self._path = path
        self._files = files

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        if name not in _OF_OBJECTS:
            return found

        def call(*args: Any) -> Any:
            self._files.note(name, self._path)
            return found(*args)

        return call

    def __enter__(self) -> "_Object":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        self._files.note("read", self._path)
        return iter(self._file)
