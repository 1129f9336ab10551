"""Where clients reach the API of `crossdock serve`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from crossdock.cluster.api.http.http_config import OPEN_TO_OTHERS
from crossdock.cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class Address:
    """A URL, and from where clients reach it."""

    url: str  # without /v1
    node: str = ""  # the URL is for clients on this node alone; empty: for clients here
    warning: str = ""  # about clients of other machines, where no key keeps them out

    @classmethod
    def of(cls, config: ClusterConfig, nodes: Sequence[str] = (), own: str = "") -> Self:
        """Return the address that a configuration gives.

        `nodes`: those of a cluster that listen, and `own`, the one that this process is on; empty: this machine.
        """
        http = config.http
        is_here = own in nodes or not nodes
        host = http.host
        if host in ("0.0.0.0", "::"):
            host = "127.0.0.1" if is_here else nodes[0]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{http.port}{config.application.path}"
        warning = OPEN_TO_OTHERS % (http.host, http.port) if http.is_open_to_others else ""
        return cls(url, nodes[0] if http.is_local and not is_here else "", warning)
