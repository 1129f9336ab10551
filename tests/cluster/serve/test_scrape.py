"""Metrics of all ingresses in one scrape: one that hangs or fails costs its own figures only, and a bounded time."""

import asyncio
from typing import Any

import pytest
from ray.serve.handle import DeploymentBroadcastResponse

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.serve import ingress
from crossdock.cluster.serve.every_ingress import EveryIngress


class Answer:
    """One ingress's answer, as Serve's broadcast holds it. None: it does not come."""

    def __init__(self, value: Any) -> None:
        self.value = value

    async def get_async(self) -> Any:
        if self.value is None:
            await asyncio.Event().wait()
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Broadcasts:
    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def broadcast(self, method: str, *arguments: Any) -> DeploymentBroadcastResponse:
        return DeploymentBroadcastResponse(self.answers(), None)


class Scraped(ingress.Ingress):
    """An ingress without replicas and without a port."""

    def __init__(self, answers: Any) -> None:
        self.fleets = Dispatcher("tiny")
        self._name = "own"
        self._of_all = EveryIngress(Broadcasts(answers), self).ask  # type: ignore[arg-type]

    def __del__(self) -> None:  # type: ignore[override]
        """Stop nothing: nothing was started."""


async def scraped(answers: Any) -> set[str]:
    """Return the names of the ingresses in a scrape that "own" answers."""
    return set(await Scraped(answers)._all_ingress_metrics())


async def test_scrape_omits_ingress_that_fails() -> None:
    async def answers() -> list[Answer]:
        return [Answer(("other", "up 1")), Answer(RuntimeError("gone"))]

    assert await scraped(answers) == {"own", "other"}


async def test_scrape_does_not_wait_for_ingress_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers() -> list[Answer]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(ingress, "_SCRAPE_S", 0.01)
    assert await asyncio.wait_for(scraped(answers), 240) == {"own"}


async def test_ingress_that_hangs_costs_its_own_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answers() -> list[Answer]:
        return [Answer(("other", "up 1")), Answer(None)]

    monkeypatch.setattr(ingress, "_SCRAPE_S", 1.0)
    assert await asyncio.wait_for(scraped(answers), 240) == {"own", "other"}
