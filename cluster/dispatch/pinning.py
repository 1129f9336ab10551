"""The Serve router of engine deployments: a call goes to the replica that it names. router/ chooses that replica."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinningRouter(RequestRouter):  # type: ignore[misc]
    """`handle.options(session_id=<replica id>)` pins a call. Overrides a semi-private method, like Serve's own
    capacity-queue router: the public `choose_replicas` hangs when one request makes several calls at once."""

    most_departed = 256  # remembered; far more than drain at once

    def initialize_state(self, **kwargs: Any) -> None:
        self._by_name: dict[str, RunningReplica] = {}
        # Those that left, the last one last: a draining one still receives the aborts of its requests, and our `close`.
        self._departed: dict[str, RunningReplica] = {}

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._by_name.pop(replica_id.unique_id, None)
        self._departed.pop(replica_id.unique_id, None)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        from crossdock.router.actions import ReplicaLost  # imported here: this module's globals are copies

        wanted = pending_request.metadata.session_id
        replica = self._by_name.get(wanted) or self._departed.get(wanted)
        if replica is None or is_retry:
            raise ReplicaLost(f"replica {wanted} is gone")  # never another: the caller places again
        return replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from crossdock.cluster.dispatch import (
            membership,  # imported here: this module's globals are copies, see membership
        )

        super().update_replicas(replicas)
        present = {replica.replica_id.unique_id: replica for replica in replicas}
        self._departed |= {name: replica for name, replica in self._by_name.items() if name not in present}
        for name in [name for name in self._departed if name in present]:
            del self._departed[name]
        for name in list(self._departed)[: -self.most_departed]:
            del self._departed[name]
        self._by_name = present
        members: dict[str, dict[str, Any]] = {
            replica.replica_id.unique_id: dict(replica.replica_metadata or {}) for replica in replicas
        }
        membership.publish(self._deployment_id.name, members)
