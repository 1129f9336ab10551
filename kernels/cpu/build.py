"""Compile C++ kernels for this very CPU on first use, into the cache directory.

They are plain C functions, called through ctypes, which releases the GIL. Without torch's headers a file compiles in
seconds.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from crossdock.kernels.cache import cache_dir

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")


@lru_cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets of this CPU as Linux names them; empty if they are not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


@lru_cache
def cpu_library(name: str) -> ctypes.CDLL:
    """Return the compiled `kernels/cpu/<name>.cpp`.

    Raises:
        OSError: there is no compiler, or compilation fails; the message tells which.
    """
    source = Path(__file__).with_name(f"{name}.cpp")
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler was found (install g++, or name one in CXX)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    key = "\n".join([source.read_text(), " ".join(FLAGS), version, " ".join(sorted(cpu_flags())), torch.__version__])
    target = cache_dir() / "kernels" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        _compile(compiler, source, target)
    return ctypes.CDLL(str(target))


def _compile(compiler: str, source: Path, target: Path) -> None:
    """Build beside the target and rename: killed or concurrent builds leave no incomplete library."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        objects, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        # torch brings an OpenMP runtime under a name of its own; a second one would have a second pool of threads
        runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
        link = [str(runtimes[0])] if runtimes else ["-fopenmp"]
        _run([compiler, *FLAGS, "-c", str(source), "-o", str(objects)])
        _run([compiler, "-shared", str(objects), *link, "-o", str(library)])
        os.replace(library, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise OSError(f"{Path(command[0]).name} could not build {Path(command[-3]).name}: {first}")
