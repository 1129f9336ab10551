"""The connections that torch makes between the ranks of a worker group, each on the address that a rank is given.

By default torch's store listens on every address of the machine, and gloo on the one that the host's name stands for.
Neither authenticates who connects.
"""

import contextlib
import fcntl
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LOOPBACK = "127.0.0.1"  # for ranks of one node
_SIOCGIFADDR = 0x8915


class WorkerGroupStore:
    """The store by which the ranks of a worker group find each other. It listens on one address, until it is sealed."""

    def __init__(self, host: str) -> None:
        """OSError: `host` is no address of this machine."""
        listener = listen_on(host)
        self.port: int = listener.getsockname()[1]
        self._listening = listener.detach()  # torch closes it with the store
        self.store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=self._listening
        )

    def seal(self) -> None:
        """Accept no further connection. Connections of the ranks stay open."""
        with socket.socket() as silent:
            os.dup2(silent.fileno(), self._listening)  # torch cannot be asked to stop; a closed socket would be polled


def listen_on(host: str) -> socket.socket:
    """Return a socket that listens on any free port of one address."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def gloo_on(host: str) -> str:
    """Return the name of a torch.distributed backend: gloo, listening on the address `host` alone."""
    name = f"gloo_{host.replace(':', '_')}"
    if name not in dist.Backend.backend_list:

        def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout, options._devices = timeout, [gloo.create_device(hostname=host)]
            return gloo(store, rank, size, options)

        dist.Backend.register_backend(name, create, devices=["cpu"])
    return name


def use_interface_of(host: str) -> None:
    """Have NCCL use the network interface of the address `host`, unless the environment names another."""
    if "NCCL_SOCKET_IFNAME" in os.environ:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == host:
                    os.environ["NCCL_SOCKET_IFNAME"] = f"={name}"  # "=": not every interface that begins like it
                    return
