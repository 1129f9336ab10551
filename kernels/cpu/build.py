"""Compile C++ kernels for this very CPU on first use, into the cache directory.

They are plain C functions, called through ctypes, which releases the GIL. Without torch's headers a file compiles in
seconds.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import torch

from crossdock.kernels.cache import cache_dir, locked

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
_LONGEST_BUILD_S = 3600.0  # a build takes seconds, on a busy machine minutes
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@lru_cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this CPU as Linux names them; empty if they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


@lru_cache
def cpu_library(name: str, *defined: str) -> ctypes.CDLL:
    """Return the compiled `kernels/cpu/<name>.cpp`, with macros such as `ROW_TYPE=float`.

    A library that another user may have written is compiled again: to load it is to run it. One process
    compiles a library, and others of the same user wait for it.

    Raises:
        OSError: there is no compiler, compilation fails, or others may write to the folder; the message tells which.
    """
    source = Path(__file__).with_name(f"{name}.cpp")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler was found (install g++, or name one in CXX)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [each.read_text() for each in (source, *sorted(source.parent.glob("*.h")))]
    flags = (*FLAGS, *(f"-D{each}" for each in defined))
    key = "\n".join([*texts, " ".join(flags), version, " ".join(sorted(cpu_flags())), torch.__version__])
    folder = _own_folder(cache_dir() / "kernels")
    target = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    library = _loaded(target)
    if library is None:
        with locked(folder / f"{target.stem}.lock"):
            if (library := _loaded(target)) is None:
                _compile(compiler, flags, source, target)
                library = _loaded(target)
    if library is None:
        raise OSError(f"{target} may be written by others although it was just compiled; see CROSSDOCK_CACHE")
    return library


def _own_folder(folder: Path) -> Path:
    """Make a folder to which this user alone may write. OSError: it is another user's, or a link."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"the folder {folder} cannot be made ({error.strerror}); name another one in CROSSDOCK_CACHE"
        raise OSError(reason) from error
    found = folder.lstat()
    if found.st_uid == os.geteuid() and stat.S_ISDIR(found.st_mode) and found.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
        found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found):
        raise OSError(
            f"compiled kernels are not loaded from {folder}: user {found.st_uid} owns it, its mode is "
            f"{stat.S_IMODE(found.st_mode):o}, and this is user {os.geteuid()}; name an own folder in CROSSDOCK_CACHE"
        )
    return folder


def _loaded(file: Path) -> ctypes.CDLL | None:
    """Return a library that no other user can have written; None: there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or not _is_own(found):
        os.close(descriptor)
        return None
    # The file that was looked at, whatever stands at its path by now. The descriptor stays open: the
    # loader knows a library by this name, and would mistake the next library of that name for this one.
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _OTHERS_WRITE


def _compile(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    """Build beside the target and rename: killed or concurrent builds leave no incomplete library.

    Call it with the lock of the target. Folders that killed builds left are removed.
    """
    _remove_left(target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"build-{target.stem}-") as folder:
        objects = Path(folder) / "kernel.o"
        library = Path(folder) / "kernel.so"
        # torch brings an OpenMP runtime under a name of its own; a second one would have a second pool of threads
        runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        link = [str(runtimes[0])] if runtimes else ["-fopenmp"]
        _run([compiler, *flags, "-c", str(source), "-o", str(objects)])
        _run([compiler, "-shared", str(objects), *link, "-o", str(library)])
        library.chmod(0o755)  # for any umask
        os.replace(library, target)


def _remove_left(target: Path) -> None:
    """Remove the folders that killed builds of this target left, and old ones of other targets."""
    oldest = time.time() - _LONGEST_BUILD_S
    for folder in target.parent.glob("build-*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if folder.name.startswith(f"build-{target.stem}-") or folder.stat().st_mtime < oldest:
                shutil.rmtree(folder)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise OSError(f"{Path(command[0]).name} could not build {Path(command[-3]).name}: {first}")
