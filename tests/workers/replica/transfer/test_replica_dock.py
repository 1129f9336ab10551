"""Which transport a dock uses."""

import sys

import pytest

from crossdock.kvtransfer.transport import Memory, TransportUnavailable
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.transfer.replica_dock import choose_transport


def test_transport_of_gpu_memory_without_nixl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary memory goes by TCP where NIXL is not installed."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    cpu, gpu = Memory(0, 100), Memory(0, 100, cuda_device=1)
    choose_transport(TransferConfig(transport="auto"), cpu).close()
    with pytest.raises(TransportUnavailable, match=r"pip install nixl"):
        choose_transport(TransferConfig(transport="auto"), gpu)
    choose_transport(TransferConfig(transport="tcp"), cpu).close()
    with pytest.raises(TransportUnavailable, match=r"transfer.transport tcp moves ordinary memory only.* nixl moves"):
        choose_transport(TransferConfig(transport="tcp"), gpu)
