"""The Serve router knows the replicas that are up, and some that left: those drain, and still get calls."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from crossdock.cluster.dispatch.pinning import PinningRouter
from crossdock.router.actions import ReplicaLost


class Router(PinningRouter):
    """A router of which Serve's own part, which needs a cluster, is left out."""

    def __init__(self) -> None:
        self._deployment_id = DeploymentID("pinning-test", "app")
        self.initialize_state()

    def choose(self, name: str) -> Any:
        async def call() -> Any:
            request = PendingRequest([], {}, RequestMetadata("r", "internal", session_id=name))
            return await self._choose_replica_for_request(request)

        return asyncio.run(call())


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    monkeypatch.setattr("ray.serve.request_router.RequestRouter.update_replicas", lambda self, replicas: None)
    monkeypatch.setattr("ray.serve.request_router.RequestRouter.on_replica_actor_died", lambda self, name: None)
    return Router()


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("pinning-test", "app")), replica_metadata={})


def test_replica_that_drains_is_still_called_and_a_dead_one_is_not(router: Router) -> None:
    one, two = replica("one"), replica("two")
    router.update_replicas([one, two])
    router.update_replicas([two])
    assert router.choose("one") is one
    router.on_replica_actor_died(one.replica_id)
    with pytest.raises(ReplicaLost, match="one is gone"):
        router.choose("one")
    assert router.choose("two") is two


def test_departed_replicas_beyond_a_number_are_forgotten(router: Router) -> None:
    for number in range(1000):
        router.update_replicas([replica("stays"), replica(f"r{number}")])
    assert sum(len(known) for known in (router._by_name, router._departed)) <= 2 + router.most_departed
    assert router.choose("r998")
    with pytest.raises(ReplicaLost):
        router.choose("r1")
    router.update_replicas([replica("stays"), replica("r998")])
    assert "r998" not in router._departed
