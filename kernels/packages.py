"""The packages that backends of attention need, looked for without importing them. No torch."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "triton": ("triton",),
    "flash_attn": ("flash_attn",),
    "flash_attn_3": ("flash_attn_interface",),
    "flash_attn_4": ("flash_attn.cute",),  # of long chunks, see long_chunks.py
    # Triton: for stores, and for steps that are CUDA graphs.
    "flashinfer": ("flashinfer", "triton"),
}
"""Packages by backend of `AttentionBackend`. A backend without an entry runs everywhere."""


def require_backend(backend: str, *, is_on_cpu: bool) -> None:
    """Check that a backend of attention can run: its packages are installed, and there is a GPU if it needs one.

    Raises:
        ValueError: it cannot; the message names what is missing.
    """
    for package in PACKAGES.get(backend, ()):
        if not has_package(package):
            raise ValueError(
                f"attention_backend {backend}: the package {package} is not installed; auto chooses an installed one"
            )
    if backend in PACKAGES and is_on_cpu and not triton_is_interpreted():
        raise ValueError(
            f"attention_backend {backend} needs a GPU, and the model is on a CPU; auto and torch run there"
        )


def has_package(package: str) -> bool:
    """Return whether a package is installed. `a.b` is a folder b of a package a, which is not imported for that.

    A folder that only holds packages, as flash-attn-4 leaves the one of flash-attn, is none itself.
    """
    package, _, part = package.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not part:
        return spec is not None and spec.origin is not None
    return any((Path(folder) / part).is_dir() for folder in spec.submodule_search_locations or ())


def triton_is_interpreted() -> bool:
    """Return whether Triton interprets kernels on numpy, for tests."""
    if not has_package("triton"):
        return False
    import triton

    interprets: bool = triton.knobs.runtime.interpret
    return interprets
