"""Pages over NIXL and UCX: RDMA between hosts, CMA or TCP on one host. Measured: benchmarks/records/nixl.md.

Three facts shape this file. Nothing moves, on either side, unless both sides poll. NIXL notifies the target of a
finished write only when the initiator checks that write again. And a write that has begun cannot be called back.

A GPU's pages are registered in place. Where UCX can (cuda_ipc, RDMA), they move without passing through host memory.
UCX reads and writes them outside of every CUDA stream. So before `write`, the caller waits for the kernels that fill
the pages. Kernels that read arrived pages are launched after `poll` has reported the arrival. Two processes
of one H200 have run this; no two GPUs, and no two hosts.
"""

import ctypes
import importlib
import logging
import logging.config
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import msgpack
from numpy.typing import NDArray

from crossdock.kvtransfer.plan import ByteRange, GroupRanges, PageCopies
from crossdock.kvtransfer.transport import (
    Memory,
    Peer,
    PeerLost,
    Received,
    TransportEvent,
    TransportUnavailable,
    WriteDone,
    WriteFailed,
)

_MAX_ADDRESS = 1 << 63
_MAX_INDEX = (1 << 31) - 1  # of a descriptor
_WRITING_SECONDS = 0.0002
"""Pause between polls while a write is open. A page and its acknowledgement take 0.6 ms; at 0.5 ms, 1.2 ms
(benchmarks/records/nixl.md)."""


@dataclass(slots=True, eq=False)
class _NixlRoute:
    """The descriptor lists for writes to one peer, prepared once: index = range · pages + page, on either side.

    Groups of layers share descriptors where the same bytes of a page travel."""

    ranges: tuple[ByteRange, ...]
    numbers: list[list[int]]  # of the ranges of each group of layers
    num_pages: int
    num_peer_pages: int
    local: Any = None
    remote: Any = None


class NixlTransport:
    """A NIXL agent with the UCX backend.

    `ucx_tls` and `ucx_net_devices` set UCX's own variables, for tests and unusual networks; None leaves them alone.
    NIXL's progress thread is off: it spins, and takes a whole core even when idle.
    No process may fork after `open`: a child that exits normally takes the parent's connections down with it.
    """

    kind = "nixl"
    lost_is_fence = False  # the peer may be alive, and RDMA writes may be on their way
    busy_seconds = 0.0005
    idle_seconds = 0.02  # without a transfer under way, no urgent message arrives

    def __init__(self, ucx_tls: str | None = None, ucx_net_devices: str | None = None) -> None:
        # The libraries read these when they are loaded, or when the first agent is made.
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # by default NIXL writes about every agent to stdout
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")  # else registrations pile up; vLLM does the same
        if ucx_tls is not None:
            os.environ["UCX_TLS"] = ucx_tls
        if ucx_net_devices is not None:
            os.environ["UCX_NET_DEVICES"] = ucx_net_devices
        # On import, nixl configures the logging of the whole process: it closes all handlers, after which Serve's write
        # nothing, and turns off the errors of handlers.
        raise_exceptions = logging.raiseExceptions
        configure = logging.config.dictConfig
        logging.config.dictConfig = lambda config: None
        try:
            self._nixl: Any = importlib.import_module("nixl")  # not nixl_cu12: two variants in one process clash
        except ImportError as error:
            raise TransportUnavailable(f"nixl cannot be imported ({error}): pip install nixl") from error
        finally:
            logging.raiseExceptions = raise_exceptions
            logging.config.dictConfig = configure
        bindings = self._nixl._bindings
        self._errors: tuple[type[Exception], ...] = tuple(
            getattr(bindings, name) for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")
        )  # they have no common base
        self._setup_errors: tuple[type[Exception], ...] = (*self._errors, RuntimeError, ValueError, TypeError)
        self._agent: Any = None
        self._registration: Any = None
        self._memory = Memory(0, 0)
        self._has_context = True  # whether the polling thread has the CUDA context it needs
        self._routes: dict[str, _NixlRoute] = {}
        self._open: dict[int, tuple[str, Any]] = {}  # peer, handle
        self._num_writes = 0
        self._events: list[TransportEvent] = []
        self._woken = threading.Event()

    # -- Transport -------------------------------------------------------------------------------------------------

    def open(self, name: str, memory: Memory) -> bytes:
        api = self._nixl._api
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            # The default is no synchronisation, which was seen to hang and to crash:
            # benchmarks/records/nixl.md, Threads.
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            if memory.cuda_device is not None:
                _enter_context(memory.cuda_device)
            self._agent = api.nixl_agent(name, config)
            rows = [(memory.address, memory.nbytes, _device(memory), "")]
            self._registration = self._agent.register_memory(rows, _kind(memory))
            metadata = self._agent.get_agent_metadata()
        except self._setup_errors as error:
            hint = "" if memory.cuda_device is None else "; for a GPU's memory it must have cuda_copy, cuda_ipc"
            raise TransportUnavailable(f"NIXL with UCX_TLS={os.environ.get('UCX_TLS', '')}: {error}{hint}") from error
        self._memory = memory
        self._has_context = memory.cuda_device is None
        return msgpack.encode([metadata, memory.address, _device(memory), _kind(memory)])

    def connect(self, peer: Peer, page_bytes: int, num_pages: int, ranges: GroupRanges) -> None:
        if peer.name in self._routes:
            return
        distinct = tuple(dict.fromkeys(part for parts in ranges for part in parts))
        numbers = [[distinct.index(part) for part in parts] for parts in ranges]
        route = _NixlRoute(distinct, numbers, num_pages, peer.spec.num_pages)
        try:
            self._prepare(route, peer, page_bytes)
        except Exception as error:  # of any kind: another process made the address
            self._forget(peer.name, route)
            self._events.append(PeerLost(peer.name, f"{peer.name}: {_text(error)}"))
        else:
            self._routes[peer.name] = route

    def _prepare(self, route: _NixlRoute, peer: Peer, page_bytes: int) -> None:
        metadata, address, device, kind = msgpack.decode(peer.address)
        if not 0 < address < _MAX_ADDRESS - peer.spec.nbytes or peer.spec.num_pages * len(route.ranges) > _MAX_INDEX:
            # NIXL ends the process with a segmentation fault on addresses beyond 64 bits.
            raise ValueError(f"a pool of {peer.spec.nbytes} bytes at {address}")
        name = self._agent.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer.name:
            if name not in self._routes:
                self._agent.remove_remote_agent(name)
            raise ValueError(f"its metadata is that of {name}")
        if route.ranges:
            here = [(self._memory.address + part.source, part.length) for part in route.ranges]
            there = [(address + part.target, part.length) for part in route.ranges]
            local = _strided(here, _device(self._memory), page_bytes, route.num_pages)
            remote = _strided(there, device, peer.spec.page_bytes, peer.spec.num_pages)
            route.local = self._agent.prep_xfer_dlist("", local, _kind(self._memory))
            route.remote = self._agent.prep_xfer_dlist(peer.name, remote, kind)

    def write(self, peer: str, copies: Sequence[PageCopies], message: bytes) -> int:
        self._num_writes += 1
        route = self._routes.get(peer)
        if route is None or route.remote is None:
            self._events.append(WriteFailed(self._num_writes, f"{peer} is not connected"))
            return self._num_writes
        here = [_indices(copy.source_pages, route.numbers[copy.group], route.num_pages) for copy in copies]
        there = [_indices(copy.target_pages, route.numbers[copy.group], route.num_peer_pages) for copy in copies]
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", route.local, np.concatenate(here), route.remote, np.concatenate(there), message
            )
            state = self._agent.transfer(handle)  # with CMA, this call copies everything
        except self._errors as error:
            self._fail(self._num_writes, peer, error)
            return self._num_writes
        self._open[self._num_writes] = peer, handle
        self._settle(self._num_writes, peer, handle, state)
        return self._num_writes

    def send(self, peer: str, message: bytes) -> None:
        if peer not in self._routes:
            return
        try:
            self._agent.send_notif(peer, message)
        except self._errors as error:
            self._events.append(PeerLost(peer, f"{peer}: {_text(error)}"))

    def poll(self, seconds: float) -> list[TransportEvent]:
        if not self._has_context:
            _enter_context(_device(self._memory))
            self._has_context = True
        if not self._events and seconds > 0:
            self._woken.wait(min(seconds, _WRITING_SECONDS) if self._open else seconds)
        self._woken.clear()
        for number, (peer, handle) in list(self._open.items()):
            try:
                self._settle(number, peer, handle, self._agent.check_xfer_state(handle))
            except self._errors as error:
                self._fail(number, peer, error)
        for peer, notifications in self._agent.get_new_notifs().items():
            self._events.extend(Received(peer, message) for message in notifications)
        events = self._events
        self._events = []
        return events

    def wake(self) -> None:
        self._woken.set()

    def disconnect(self, peer: str, *, is_idle: bool = False) -> None:
        for number, (other, handle) in list(self._open.items()):
            if other == peer:
                del self._open[number]
                self._release(handle)
                self._events.append(WriteFailed(number, "disconnected"))
        route = self._routes.pop(peer, None)
        if route is not None:
            self._forget(peer, route)

    def close(self) -> None:
        for peer in list(self._routes):
            self.disconnect(peer)
        if self._registration is not None:
            self._agent.deregister_memory(self._registration)
        self._agent = self._registration = None

    # -- steps -----------------------------------------------------------------------------------------------------

    def _settle(self, number: int, peer: str, handle: Any, state: str) -> None:
        if state == "DONE":
            del self._open[number]
            self._release(handle)
            self._events.append(WriteDone(number))
        elif state != "PROC":
            self._fail(number, peer, RuntimeError(state))

    def _fail(self, number: int, peer: str, error: Exception) -> None:
        """Report a failed write and a lost peer. NIXL raises an exception; in all cases seen, the peer was gone."""
        entry = self._open.pop(number, None)
        if entry:
            self._release(entry[1])
        self._events.append(WriteFailed(number, f"{peer}: {_text(error)}"))
        self._events.append(PeerLost(peer, f"{peer}: {_text(error)}"))

    def _forget(self, peer: str, route: _NixlRoute) -> None:
        for descriptors in (route.local, route.remote):
            if descriptors is not None:
                self._release(descriptors)
        try:
            self._agent.remove_remote_agent(peer)
        except self._errors as error:  # as a rule because NIXL has never accepted the metadata
            logging.getLogger(__name__).info("NIXL did not forget %s: %s", peer, _text(error))

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._errors as error:
            logging.getLogger(__name__).warning("NIXL did not release %r: %s", handle, _text(error))


def _strided(rows: Sequence[tuple[int, int]], device: int, stride: int, num_pages: int) -> NDArray[np.uint64]:
    """Return one row per (address, length). NIXL repeats each row per page, so no page needs descriptors of its own."""
    return np.array([(address, length, device, stride, num_pages) for address, length in rows], dtype=np.uint64)


def _indices(pages: Sequence[int], ranges: Sequence[int], num_pages: int) -> NDArray[np.int32]:
    """Return the index, in a prepared descriptor list, of each of `ranges` of each of `pages`."""
    starts = np.array(ranges, dtype=np.int32)[:, None] * num_pages
    return np.asarray((starts + np.asarray(pages, dtype=np.int32)).reshape(-1), dtype=np.int32)


def _enter_context(device: int) -> None:
    """Make PyTorch's context of the device current on this thread. UCX calls CUDA on the thread that polls, and crashes
    if that thread has no context (NIXL issue 2102).

    Raises:
        RuntimeError: CUDA refuses.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_int()
    context = ctypes.c_void_p()
    code = (
        cuda.cuDeviceGet(ctypes.byref(handle), device)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        or cuda.cuCtxSetCurrent(context)
    )
    if code:
        raise RuntimeError(f"CUDA error {code} on making device {device} current")


def _device(memory: Memory) -> int:
    return memory.cuda_device or 0


def _kind(memory: Memory) -> str:
    return "DRAM" if memory.cuda_device is None else "VRAM"


def _text(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
