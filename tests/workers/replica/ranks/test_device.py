"""A rank's device is the spec's; a GPU that torch does not find is an error, never a silent CPU."""

import os
from pathlib import Path

import pytest
import torch

from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.replica.config import Device, EngineConfig, ReplicaSpec
from crossdock.workers.replica.ranks.device import device_of


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "device"),
    [(None, False, "cpu"), (None, True, "cuda"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_device_is_the_spec_s_or_the_one_that_torch_finds(
    wanted: Device | None, has_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own")
    assert device_of(ReplicaSpec(ModelSpec(None), EngineConfig(), 1, device=wanted)) == device
    assert os.environ["TRITON_CACHE_DIR"] == "/own"


def test_triton_keeps_kernels_in_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # restored afterwards
    monkeypatch.delenv("TRITON_CACHE_DIR")
    device_of(ReplicaSpec(ModelSpec(None), EngineConfig(), 1))
    assert triton.knobs.cache.dir == os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


def test_gpu_that_torch_does_not_find_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"num_gpus: torch .* finds no GPU"):
        device_of(ReplicaSpec(ModelSpec(None), EngineConfig(), 1, device="cuda"))
