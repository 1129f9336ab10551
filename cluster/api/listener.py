"""An ingress's own listener: uvicorn on a port, with bounds on the cost of its connections."""

import asyncio
import resource
import socket
from typing import Any

import uvicorn

from crossdock.cluster.api.connection import Connections

MOST_CONNECTIONS = 16384  # and at most half of the files that this process may open


async def listen(
    api: Any, host: str, port: int, *, keep_alive_s: int = 75, write_timeout_s: float = 60.0
) -> uvicorn.Server:
    """Serve `api` on a port that several ingresses of this node may share.

    A token costs a quarter of the CPU time that it costs through Serve's proxy; on few cores the engine needs that
    time. Connections without a request end after `keep_alive_s` seconds: longer than the pools of clients keep them. A
    client that reads nothing of its answer for `write_timeout_s` is disconnected.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = Connections(min(MOST_CONNECTIONS, most_files // 2), write_timeout_s)
    config = uvicorn.Config(
        api,
        http=connections.protocol,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=keep_alive_s,
    )
    server = uvicorn.Server(config)
    task = asyncio.get_running_loop().create_task(server.serve(sockets=[listener]))
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.01)
    return server
