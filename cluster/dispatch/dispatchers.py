"""The dispatchers of several models at one ingress: their answers to operators, as if there were one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.ingress_metrics import merge_metrics
from crossdock.cluster.dispatch.shared_answer import SharedAnswer


class Dispatchers:
    """One dispatcher for each model. Entries and samples name the model."""

    def __init__(
        self,
        by_model: Mapping[str, Dispatcher],
        ingress_texts: Callable[[], Awaitable[Mapping[str, str]]],
        metrics_hold_s: float = 1.0,
    ) -> None:
        """`ingress_texts` fetches the metrics of all ingresses, by name; `metrics_hold_s` as of a `Dispatcher`."""
        self._by_model = by_model
        self._ingress_texts = ingress_texts
        spawn = next(iter(by_model.values())).spawn
        self._metrics_text: SharedAnswer[str] = SharedAnswer(self._scrape, spawn, metrics_hold_s)

    @property
    def num_replicas(self) -> int:
        return sum(each.num_replicas for each in self._by_model.values())

    def ready(self) -> bool:
        """Return whether a model can be served: others may fail, or have no replica, meanwhile."""
        return any(each.ready() for each in self._by_model.values())

    async def timelines(self, request_id: str, owner: str | None) -> list[dict[str, Any]]:
        found = await self._of_all(lambda each: each.timelines(request_id, owner))
        return sorted(found, key=lambda entry: entry["arrived"])

    async def live_requests(self, owner: str | None) -> list[dict[str, Any]]:
        found = await self._of_all(lambda each: each.live_requests(owner))
        return sorted(found, key=lambda entry: entry["arrived"])

    async def replicas(self, seen: Mapping[str, int], owner: str | None) -> list[dict[str, Any]]:
        return await self._of_all(lambda each: each.replicas(seen, owner))

    async def metrics_text(self) -> str:
        return await self._metrics_text.get()

    def ingress_text(self) -> str:
        """Return the metrics of this ingress, each sample labelled `model`."""
        return merge_metrics({name: each.metrics.text() for name, each in self._by_model.items()}, "model")

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._by_model.values()))

    async def _of_all(self, ask: Callable[[Dispatcher], Awaitable[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*map(ask, self._by_model.values()))
        return [
            {**entry, "model": name} for name, found in zip(self._by_model, answers, strict=True) for entry in found
        ]

    async def _scrape(self) -> str:
        texts = await asyncio.gather(*(each.replica_metrics() for each in self._by_model.values()))
        replicas = merge_metrics(dict(zip(self._by_model, texts, strict=True)), "model")
        return replicas + merge_metrics(await self._ingress_texts(), "ingress")
