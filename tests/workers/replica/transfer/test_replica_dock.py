"""Which transport a dock uses."""

import sys

import pytest

from crossdock.kvtransfer.layout import LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.transport import Memory, TransportUnavailable
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.transfer.replica_dock import choose_transport, open_dock


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


def test_checksums_of_gpu_memory_are_refused_and_an_emulated_pool_has_none() -> None:
    config = TransferConfig(transport="tcp", host="127.0.0.1", checksum=True)
    spec = PoolSpec.whole(PoolLayout((LayerShape(2, 8, 8),), 4, 2), "m", "float16", 16)
    with pytest.raises(ValueError, match=r"transfer.checksum: only pages in ordinary memory"):
        open_dock(Memory(0, spec.nbytes, cuda_device=1), spec, "mixed", config, print)
    emulated = Memory(0, spec.nbytes, bytes_per_second=1e9)  # to read it would end the process
    open_dock(emulated, spec, "mixed", config, print).close()
