"""All ingresses are asked, also before Serve has told this one of any."""

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from crossdock.cluster.serve.every_ingress import EveryIngress


class Answering:
    """The call of one ingress."""

    def __init__(self, value: str | Exception) -> None:
        self._value = value

    async def get_async(self) -> str:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Told:
    """Stands for Serve's handle: it knows no ingress for some calls, then all of them."""

    def __init__(self, num_before: float) -> None:
        self.num_before = num_before

    def broadcast(self, method: str, *arguments: Any) -> "Told":
        assert (method, arguments) == ("name", ("asker",))
        return self

    async def _fetch_replica_results_async(self) -> list[Answering]:
        if self.num_before:
            self.num_before -= 1
            raise DeploymentUnavailableError(DeploymentID("ingress", "app"))
        return [Answering("own"), Answering("other"), Answering(RuntimeError("it has just died"))]


class Own:
    async def name(self, asker: str) -> str:
        return f"own, asked by {asker}"


@pytest.mark.parametrize("num_before", [0, 3])
async def test_ingress_that_is_told_late_of_others_waits_for_that(num_before: int) -> None:
    every = EveryIngress(Told(num_before), Own())  # type: ignore[arg-type]
    assert await every.ask("name", 60.0, "asker") == ["own", "other"]


async def test_ingress_that_is_told_of_no_other_answers_alone() -> None:
    every = EveryIngress(Told(float("inf")), Own())  # type: ignore[arg-type]
    assert await every.ask("name", 60.0, "asker", told_s=0.05) == ["own, asked by asker"]
