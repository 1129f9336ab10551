"""The NIXL transport reports why it cannot be used. No agent is made in this process, which may fork later."""

import importlib.util
import logging
import subprocess
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from crossdock.kvtransfer import nixl
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.transport import Memory, TransportUnavailable


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NIXL_LOG_LEVEL", "UCX_RCACHE_MAX_UNRELEASED", "UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what the transport sets is undone
        monkeypatch.delenv(name)


def test_transport_without_the_extra_raises_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransportUnavailable, match=r"pip install nixl"):
        NixlTransport()
    assert logging.raiseExceptions


_OPEN = """
import logging, logging.handlers, sys
sys.modules["torch"] = None
target = logging.StreamHandler(sys.stdout)
handler = logging.handlers.MemoryHandler(1, target=target)  # of the kind that Serve logs through
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.transport import Memory, TransportUnavailable
transport = NixlTransport(ucx_tls={tls!r}, ucx_net_devices="lo")
assert logging.raiseExceptions, "nixl turned off the errors of all handlers"
assert handler.target is target, "nixl closed all handlers"
try:
    transport.open("a", Memory.of(bytearray(4096)))
except TransportUnavailable as error:
    print("unavailable:", error)
else:
    transport.close()
    print("opened")
"""


@pytest.mark.parametrize(
    ("tls", "expected"),
    [("tcp", "opened"), ("posix,cma", "unavailable: NIXL with UCX_TLS=posix,cma")],
    ids=["tcp", "without error handling"],
)
def test_ucx_transport_that_cannot_be_used_raises_with_its_name(tls: str, expected: str) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("needs NIXL: pip install nixl")
    child = subprocess.run(
        [sys.executable, "-c", _OPEN.format(tls=tls)], capture_output=True, text=True, timeout=240, check=True
    )
    assert child.stdout.splitlines()[-1].startswith(expected)


_FOREIGN = """
import sys
sys.modules["torch"] = None
import msgpack
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.plan import ByteRange, PageCopies
from crossdock.kvtransfer.transport import Memory, Peer, PeerLost, Received, WriteFailed
SPEC = PoolSpec.whole(PoolLayout((LayerShape(2, 8, 8),), 4, 2), "m", "float16", 16)
size = SPEC.page_bytes
pools = [bytearray(SPEC.nbytes) for _ in range(3)]
transports = [NixlTransport(ucx_tls="tcp", ucx_net_devices="lo") for _ in pools]
here, there, other = transports
own, good, others = [t.open(name, Memory.of(pool)) for name, t, pool in zip("hto", transports, pools)]
metadata, address, device, kind = msgpack.unpackb(good)


def events(name, data):
    here.connect(Peer(name, "nixl", data, SPEC), size, SPEC.num_pages, ((ByteRange(0, 0, size),),))
    here.send(name, b"hello")
    here.write(name, [PageCopies(0, (1,), (2,))], b"written")
    found = []
    for _ in range(50):
        found += here.poll(0.001) + there.poll(0.001)
    return found


for wrong in (
    b"",
    b"\\x93",
    msgpack.packb([b"noise", address, device, kind]),
    msgpack.packb([7, address, device, kind]),
    msgpack.packb([msgpack.unpackb(others)[0], address, device, kind]),
    msgpack.packb([msgpack.unpackb(own)[0], address, device, kind]),
    msgpack.packb([metadata, address + (1 << 40), device, kind]),
    msgpack.packb([metadata, (1 << 64) - 1, device, kind]),
    msgpack.packb([metadata, -5, device, kind]),
    msgpack.packb([metadata, "x", device, kind]),
    msgpack.packb([metadata, address, 7, kind]),
    msgpack.packb([metadata, address, -1, kind]),
    msgpack.packb([metadata, address, device, "nonsense"]),
    msgpack.packb([metadata, address, device, "VRAM"]),
):
    kinds = {type(event) for event in events("t", wrong)}
    assert kinds == {PeerLost, WriteFailed}, (wrong, kinds)
    here.disconnect("t")
    assert not here._routes
found = events("t", good)
assert [event.message for event in found if isinstance(event, Received)] == [b"hello", b"written"], found
broken = metadata[: len(metadata) // 2]
assert PeerLost in {type(event) for event in events("u", msgpack.packb([broken, address, device, kind]))}
for transport in transports:
    transport.close()
print("survived")
"""


def test_foreign_metadata_loses_that_peer_and_harms_no_other() -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("needs NIXL: pip install nixl")
    child = subprocess.run([sys.executable, "-c", _FOREIGN], capture_output=True, text=True, timeout=240, check=False)
    assert child.stdout.endswith("survived\n"), child.stdout + child.stderr


class _Agent:
    """An agent without NIXL and without a GPU."""

    registered: Any = None

    def __init__(self, *_: object) -> None: ...

    def register_memory(self, rows: Any, kind: str) -> str:
        if rows[0][2] == 7:
            raise RuntimeError("NIXL_ERR_BACKEND")
        _Agent.registered = rows, kind
        return "registration"

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}

    def deregister_memory(self, registration: str) -> None:
        assert registration == "registration"


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replace NIXL. Return (thread, GPU) of every context that is entered."""
    entered: list[tuple[str, int]] = []
    module: Any = ModuleType("nixl")
    module._bindings = SimpleNamespace()
    module._api = SimpleNamespace(
        nixl_agent=_Agent,
        nixl_agent_config=lambda **_: None,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT=0),
    )
    monkeypatch.setitem(sys.modules, "nixl", module)
    monkeypatch.setattr(
        nixl, "_enter_context", lambda device: entered.append((threading.current_thread().name, device))
    )
    return entered


def test_gpu_memory_is_used_within_its_context_on_the_opening_and_the_polling_thread(
    contexts: list[tuple[str, int]],
) -> None:
    transport = NixlTransport()
    transport.open("a", Memory(4096, 100, cuda_device=3))
    assert _Agent.registered == ([(4096, 100, 3, "")], "VRAM")
    polling = threading.Thread(target=lambda: [transport.poll(0) for _ in range(3)], name="dock")
    polling.start()
    polling.join()
    assert contexts == [("MainThread", 3), ("dock", 3)]
    transport.close()


def test_ordinary_memory_enters_no_context(contexts: list[tuple[str, int]]) -> None:
    transport = NixlTransport()
    transport.open("a", Memory(4096, 100))
    assert _Agent.registered == ([(4096, 100, 0, "")], "DRAM")
    transport.poll(0)
    assert not contexts
    transport.close()


@pytest.mark.usefixtures("contexts")
def test_gpu_memory_that_ucx_cannot_use_raises_with_what_ucx_needs() -> None:
    with pytest.raises(TransportUnavailable, match="NIXL_ERR_BACKEND; for a GPU's memory it must have cuda_copy"):
        NixlTransport().open("a", Memory(4096, 100, cuda_device=7))
