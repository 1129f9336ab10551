"""The Serve router of engine deployments: a call goes to the replica it names. Which one is decided in router/."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class PinningRouter(RequestRouter):  # type: ignore[misc]
    """`handle.options(session_id=<replica id>)` pins a call. Overrides a semi-private method, like Serve's own
    capacity-queue router: the public `choose_replicas` hangs when one request makes several calls at once."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        wanted = pending_request.metadata.session_id
        for replica_id, replica in self._replicas.items():
            if replica_id.unique_id == wanted and not is_retry:
                return replica
        raise RuntimeError(f"replica {wanted} is gone")  # never another one: the caller re-plans

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        from crossdock.cluster import membership  # imported here: this module's globals are copies, see membership

        super().update_replicas(replicas)
        members: dict[str, dict[str, Any]] = {
            replica.replica_id.unique_id: dict(replica.replica_metadata or {}) for replica in replicas
        }
        membership.publish(self._deployment_id.name, members)
