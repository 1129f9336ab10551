"""Serve's own server in a process of a deployment listens on the node's address alone. No torch."""

from typing import Any

import ray
from ray.serve._private import replica as serve_replica


def bind_serve_to_own_node() -> None:
    """Have Serve's gRPC server of this process, which reads pickled objects, listen on the node's own address alone.

    Serve starts the server when the constructor of a deployment has returned, and has no setting for the address.
    """
    bind = serve_replica.add_port_to_grpc_server
    host = ray.util.get_node_ip_address()

    def bound(server: Any, address: str) -> int:
        return int(bind(server, address.replace("[::]", f"[{host}]" if ":" in host else host)))

    serve_replica.add_port_to_grpc_server = bound
