"""Loading one rank's part: slice by slice, never more than the rank keeps."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig

from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.cut_model import cut_model
from crossdock.workers.model.cut.position import RankPosition
from crossdock.workers.model.memory.host_memory import bytes_of
from crossdock.workers.model.weights import weights
from crossdock.workers.model.weights.formats import PlainWeights
from crossdock.workers.model.weights.weights import load_weights
from tests.workers.architectures import build
from tests.workers.ranks import UNHURRIED_S, Ranks, saved

STATUS = Path("/proc/self/status")
M_MMAP_THRESHOLD = -3  # of mallopt


def peak_of_loading(_: int, path: Path, device: str) -> tuple[int, int]:
    """On one of two ranks: return (bytes its memory grew by at most while loading, bytes it holds in the end)."""
    # As `ENVIRONMENT` sets it for replicas. Otherwise the C library keeps the memory of freed tensors.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 4 << 20)
    config, links = (
        AutoConfig.from_pretrained(path),
        Collectives(RankPosition(torch.distributed.get_rank(), 2), UNHURRIED_S),
    )
    with patch.object(weights, "check_products"):  # which are not to be had on `meta`
        PlainWeights().read(config, path, torch.float32, links, device)  # libraries take memory once
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = bytes_of(STATUS, "VmRSS")
        module, _part = PlainWeights().read(config, path, torch.float32, links, device)
    return bytes_of(STATUS, "VmHWM") - before, sum(parameter.nbytes for parameter in module.parameters())


def test_rank_while_loading_never_holds_more_than_its_share(ranks: Ranks, tmp_path: Path) -> None:
    """Weights are read slice by slice: the peak stays near what the rank holds in the end, half of 170 MiB.

    On a device with memory of its own, the host has few tensors at a time: `meta` stands for that device."""
    options = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "vocab_size": 16384}
    module = build("llama", options | {"num_hidden_layers": 6})
    whole = sum(parameter.nbytes for parameter in module.parameters())
    path = saved(module, tmp_path)
    for device, most in (("cpu", 1.2), ("meta", 0.8)):
        for peak, share in ranks.run(2, peak_of_loading, path, device):
            assert share < 0.51 * whole
            assert peak < most * share, "more was read at once than the rank keeps, or than few tensors"


@pytest.mark.parametrize("cut", [None, partial(cut_model, position=RankPosition(), collectives=None)])
def test_tensors_are_read_to_the_device_that_is_named(
    cut: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is needed to see it: `meta` is a device, too, on which no product can be checked."""
    monkeypatch.setattr(weights, "check_products", lambda *_: None)
    path = saved(build("llama", {}), tmp_path)
    config = AutoConfig.from_pretrained(path)
    for device in ("meta", "cpu"):
        module, _part = load_weights(config, path, torch.float32, cut, device=device)
        assert {parameter.device.type for parameter in module.parameters()} == {device}


def test_two_threads_load_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads at once would leave functions of transformers' classes replaced."""
    path = saved(build("llama", {}), tmp_path)
    config = AutoConfig.from_pretrained(path)
    together, load_whole = threading.Barrier(2), weights._load_whole

    def loaded(*given: Any, **options: Any) -> Any:
        with pytest.raises(threading.BrokenBarrierError):
            together.wait(timeout=0.2)  # for the other thread to be here
        together.reset()
        return load_whole(*given, **options)

    monkeypatch.setattr(weights, "_load_whole", loaded)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(load_weights, config, path, torch.float32) for _ in range(2)]
        assert all(load.result()[1] is None for load in loads)
