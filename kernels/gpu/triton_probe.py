"""Find at start whether Triton can compile and launch on this machine, and name what it lacks.

Triton compiles a launcher in C for each process that finds none in its cache: so it needs a C compiler and the headers
of this Python, beside the driver.
"""

import shutil
import sysconfig
from pathlib import Path

import torch
import triton
import triton.language as tl


@triton.jit
def _one_kernel(out):
    tl.store(out, 1)


def why_no_triton(device: torch.device) -> str | None:
    """Run a trivial kernel on `device`. Return why the kernel did not run; None: it ran."""
    try:
        out = torch.zeros(1, dtype=torch.int32, device=device)
        _one_kernel[1,](out)
        if int(out) == 1:
            return None
        reason = "a kernel that writes 1 wrote another number; the driver may not fit this torch"
    except Exception as error:  # any error of Triton, the C compiler or the driver
        reason = f"{type(error).__name__}: {error}"
    return missing_package() or f"a trivial kernel failed: {reason[:300]}"


def missing_package() -> str | None:
    """Return which of the packages that Triton needs to compile is missing; None: none of them is."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "Triton needs a C compiler: install gcc (apt install gcc, dnf install gcc)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        version = sysconfig.get_python_version()
        return f"Triton needs {header}: install python{version}-dev (apt) or python{version}-devel (dnf)"
    return None
