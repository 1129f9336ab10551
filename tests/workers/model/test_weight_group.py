"""A trainer's group on GPUs: vLLM's way to NCCL's unique id, and what the store may hold instead."""

import ctypes
import os
import pickle
import sys
import threading
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossdock.workers.model.weight_group import unique_id, vllm_group
from tests.cluster.ports import free_port

ID = bytes(range(128, 256))
MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"


class ncclUniqueId(ctypes.Structure):  # noqa: N801, vLLM's name
    """The structure that vLLM's trainer pickles."""

    _fields_ = [("internal", ctypes.c_byte * 128)]
    __module__ = MODULE


@pytest.fixture
def pickled(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes that vLLM's trainer puts into its store, made where vLLM is installed: it is not, here."""
    for at in range(MODULE.count(".") + 1):
        monkeypatch.setitem(sys.modules, ".".join(MODULE.split(".")[: at + 1]), ModuleType(MODULE))
    monkeypatch.setattr(sys.modules[MODULE], "ncclUniqueId", ncclUniqueId, raising=False)
    return pickle.dumps(ncclUniqueId.from_buffer_copy(ID))


class Nccl:
    """Stands for torch's group of NCCL, which needs a GPU: keeps what it was given, as far as it is read."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, _: Any) -> None:
        self.id, self.place, self.sums = store.get("0"), (rank, size), 0

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.sums += len(tensors)
        return SimpleNamespace(wait=lambda: None)


def test_rank_joins_with_the_id_that_a_vllm_trainer_stores(pickled: bytes) -> None:
    """The trainer's store waits until all ranks have come, as `StatelessProcessGroup.create` opens it."""
    port, wait, joined = free_port(), timedelta(seconds=240), []

    def join() -> None:
        store = dist.TCPStore("127.0.0.1", port, 2, False, wait)  # type: ignore[attr-defined]
        joined.append(vllm_group(store, 1, 2, torch.device("cpu"), Nccl))

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    store = dist.TCPStore("127.0.0.1", port, 2, True, wait, use_libuv=False)  # type: ignore[attr-defined]
    store.set("broadcast_from/0/0", pickled)
    thread.join(240)
    assert [(each.id, each.place, each.sums) for each in joined] == [(ID, (1, 2), 1)]


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (pickle.dumps(Hostile()), "posix.system in the place of NCCL's unique id"),
        (pickle.dumps(b"short"), "has 128 bytes"),
        (b"", "no pickle"),
        (pickle.dumps(ID)[:-9], "no pickle"),
    ],
)
def test_other_content_of_the_store_is_refused_and_not_run(stored: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unique_id(stored)


def test_id_is_read_from_the_pickle_of_a_structure(pickled: bytes) -> None:
    assert unique_id(pickled) == ID
