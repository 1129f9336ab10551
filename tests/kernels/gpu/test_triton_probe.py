"""A machine on which Triton cannot compile is refused at the start, with what to install."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.backend import TORCH, Attention, require_working
from crossdock.kernels.gpu import triton_probe

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without a GPU Triton interprets
CUDA = torch.device("cuda:0")
TRITON = Attention("triton", TORCH.store_kv, TORCH.paged_attention)


def test_device_that_runs_kernels_has_no_reason() -> None:
    assert triton_probe.why_no_triton(DEVICE) is None


class Broken:
    """In place of a kernel: fails as Triton does where it cannot build its launcher."""

    def __getitem__(self, grid: object) -> None:
        raise RuntimeError("command ['gcc', 'main.c'] returned exit status 1")


@pytest.mark.parametrize(
    ("missing", "named"),
    [("compiler", "install gcc"), ("headers", "install python3"), ("nothing", r"RuntimeError: command \['gcc'")],
)
def test_machine_without_a_package_is_refused_with_its_name(
    missing: str, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None if missing == "compiler" else f"/usr/bin/{name}")
    where = tmp_path / "none" if missing == "headers" else tmp_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(where))
    monkeypatch.setattr(triton_probe, "_one_kernel", Broken())
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: torch.empty(*shape, dtype=dtype))
    with pytest.raises(ValueError, match=rf"attention_backend triton .*{named}"):
        require_working(TRITON, CUDA)


def test_backends_without_triton_and_cpus_are_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_probe, "_one_kernel", Broken())
    require_working(TORCH, CUDA)
    require_working(TRITON, torch.device("cpu"))
