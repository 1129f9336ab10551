"""File calls of one thread that fail once, with an errno that a test chooses."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("open", "read", "readv", "write", "close", "utime", "unlink", "rename", "mkdir", "lstat", "stat", "scandir")
DONE_ALL_THE_SAME = ("close",)  # as Linux does: the descriptor is gone, whatever the call says


class FailingCalls:
    """Notes the file calls of a thread, and fails one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_ours: Callable[[], bool] = lambda: True) -> None:
        """`is_ours`: whether the thread that calls is the one whose calls are noted."""
        self.seen: list[str] = []
        self._is_ours = is_ours
        self._due: tuple[str, int, int] | None = None  # name, calls before it, errno
        for name in NAMES:
            monkeypatch.setattr(os, name, self._patched(name, getattr(os, name)))

    def fail(self, name: str, errno: int, after: int = 0) -> None:
        """Fail the call of that name after so many of them; "": of any name."""
        self._due = name, after, errno

    @property
    def is_due(self) -> bool:
        """Return whether the call has not been made yet."""
        return self._due is not None

    def forget(self) -> None:
        """Fail no call that has not been made yet."""
        self._due = None

    def check(self, name: str) -> None:
        """Raise OSError where a call is to fail."""
        if not self._is_ours():
            return
        self.seen.append(name)
        if self._due is not None and self._due[0] in ("", name):
            wanted, after, errno = self._due
            self._due = (wanted, after - 1, errno) if after else None
            if not after:
                raise OSError(errno, os.strerror(errno))

    def _patched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name in DONE_ALL_THE_SAME:
                real(*arguments, **options)
                return self.check(name)
            self.check(name)
            return real(*arguments, **options)

        @contextmanager
        def scan(path: Any) -> Iterator[Iterator[_Entry]]:
            self.check(name)
            with real(path) as entries:
                yield (_Entry(each, self) for each in entries)

        return scan if name == "scandir" else call


class _Entry:
    """An entry of a folder whose own calls may fail, too."""

    def __init__(self, entry: "os.DirEntry[str]", calls: FailingCalls) -> None:
        self.name, self.path = entry.name, entry.path
        self._entry, self._calls = entry, calls

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        self._calls.check("DirEntry.stat")
        return self._entry.stat(follow_symlinks=follow_symlinks)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        self._calls.check("DirEntry.is_dir")
        return self._entry.is_dir(follow_symlinks=follow_symlinks)
