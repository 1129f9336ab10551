"""A follower in a process of its own, under Ray. The process imports torch when it begins to run, not before."""

from concurrent.futures import Future
from typing import TYPE_CHECKING

import ray

from crossdock.workers.replica.config import ReplicaSpec
from crossdock.workers.replica.ranks.rank_socket import WorkerGroupAddress
from crossdock.workers.replica.serving.interpreter import wait_quietly

if TYPE_CHECKING:
    from crossdock.workers.model.new_weights import Arrays, NewWeights


class Rank:
    """A follower in a process of its own. Both end together. `hold` may be called while `run` goes on."""

    def __init__(self) -> None:
        self._weights: Future[NewWeights] = Future()

    def run(self, spec: ReplicaSpec, rank: int, address: WorkerGroupAddress) -> None:
        """Follow, on the addresses of the node that this process is on."""
        wait_quietly(spec.num_threads)
        from crossdock.workers.replica.ranks.rank_network import LOOPBACK
        from crossdock.workers.replica.serving.follower import follow

        node = ray.util.get_node_ip_address()
        host = LOOPBACK if address.host == LOOPBACK else node
        follow(spec, rank, address, host, (spec.transfer and spec.transfer.host) or node, self._weights.set_result)

    def hold(self, arrays: "Arrays") -> None:
        """Take whole tensors of Ray's object store, which the driver will have all ranks read."""
        self._weights.result().hold(arrays)
