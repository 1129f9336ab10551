"""Make what a clean checkout lacks: C++ kernels, Triton's kernels for GPUs, the default model. Once, before any test.

Usage: python -m tests.first_files
Otherwise the first test that needs one would wait, and its seconds would tell nothing. What does not compile is
left to its tests, which say why.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from crossdock.kernels.cpu.build import cpu_flags, cpu_library
from crossdock.workers.model.weights.checkpoint import default_model_dir
from tests.own_folders import SHARED, make_own_folders, share_kernels

LIBRARIES = (
    ("attention",),
    ("layer_steps",),
    ("packed",),
    ("decoder", "ROW_TYPE=float"),
    *([("decoder", "ROW_TYPE=bf16")] if "avx512_bf16" in cpu_flags() else []),  # other CPUs cannot run it
)
CAPABILITIES = ("80", "89", "90", "100", "120")


def compile_for_gpus(folder: Path | str) -> "subprocess.CompletedProcess[str]":
    """Compile Triton's kernels that the checkout's cache lacks. Other files are written into the folder."""
    script = Path(__file__).with_name("kernels") / "gpu" / "compile_for_gpus.py"
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(SHARED / "triton")}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, str(script), *CAPABILITIES]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def main() -> None:
    make_own_folders()
    with tempfile.TemporaryDirectory(prefix="crossdock-compiles-") as folder:
        beside = threading.Thread(target=compile_for_gpus, args=(folder,))
        beside.start()
        for library in LIBRARIES:
            with contextlib.suppress(OSError):
                cpu_library(*library)
        share_kernels()
        default_model_dir()
        beside.join()


if __name__ == "__main__":
    main()
