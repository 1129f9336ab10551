"""How NIXL says that it cannot be used. No agent is made in this process: it may fork later."""

import importlib.util
import logging
import subprocess
import sys

import pytest

from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.transport import TransportUnavailable


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NIXL_LOG_LEVEL", "UCX_RCACHE_MAX_UNRELEASED", "UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.setenv(name, "")  # so that what the transport sets is undone
        monkeypatch.delenv(name)


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(TransportUnavailable, match=r"pip install 'crossdock\[nixl\]'"):
        NixlTransport()
    assert logging.raiseExceptions


_OPEN = """
import logging, logging.handlers, sys
sys.modules["torch"] = None
target = logging.StreamHandler(sys.stdout)
handler = logging.handlers.MemoryHandler(1, target=target)  # such as Serve logs through
from crossdock.kvtransfer.nixl import NixlTransport
from crossdock.kvtransfer.transport import Memory, TransportUnavailable
transport = NixlTransport(ucx_tls={tls!r}, ucx_net_devices="lo")
assert logging.raiseExceptions, "nixl turned off the errors of everyone's logging"
assert handler.target is target, "nixl closed everyone's handlers"
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
def test_transports_that_ucx_cannot_use_are_refused_with_their_name(tls: str, expected: str) -> None:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("the nixl extra is not installed")
    child = subprocess.run(
        [sys.executable, "-c", _OPEN.format(tls=tls)], capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.splitlines()[-1].startswith(expected)
