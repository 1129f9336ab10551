"""Ray's command line for machines that run other tests beside it.

`ray start` gives up a node that is not there after 30 s, and ends when its server for Ray Client, which no test uses,
gives it up: constants of Ray, where a busy machine needs a minute.
"""

import sys
import time
from typing import Any

import ray._private.services as services
from ray._private.node import Node
from ray.scripts.scripts import main

SECONDS = 240.0
_get_node = services.get_node


def get_node(*args: Any, **kwargs: Any) -> Any:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return _get_node(*args, **kwargs)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    services.get_node = get_node
    Node.start_ray_client_server = lambda self: None  # type: ignore[method-assign]
    sys.exit(main())
