"""Requests for a model without replicas: the scaler is asked for one, and each request waits as long as it may."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from crossdock.cluster.dispatch.shared_answer import SharedAnswer
from crossdock.router.actions import ReplicaLost

logger = logging.getLogger("ray.serve")

MOST_WAIT_S = 600.0  # of a request that asked for no class: a model of many GPUs starts in minutes
_ASK_S = 1.0  # between two questions to the scaler, however many requests wait
_LOOK_S = 0.05  # between two looks at the replicas


class ModelStarting(ReplicaLost):
    """No replica of the model is up, and its start takes longer than the request may wait."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"The model {name!r} has no replica now; one is predicted to be up in {seconds:.0f} s.")
        self.retry_after = seconds


class ColdStart:
    """The start of one model, at one ingress."""

    def __init__(
        self,
        name: str,
        is_up: Callable[[], bool],
        ask: Callable[[], Awaitable[float]],
        spawn: Callable[..., "asyncio.Task[Any]"],
    ) -> None:
        """`ask` tells the scaler that a request waits. It returns the predicted seconds until a replica is up."""
        self._name = name
        self._is_up = is_up
        self._remaining = SharedAnswer(ask, spawn, _ASK_S)

    async def wait(self, patience_s: float) -> float:
        """Wait until a replica is up. Returns the seconds that this took.

        Raises:
            ModelStarting: a replica is not up in `patience_s`, or is not predicted to be.
        """
        clock = asyncio.get_running_loop().time
        begun = clock()
        remaining = 0.0
        while not self._is_up():
            try:
                remaining = await self._remaining.get()
            except Exception as error:  # the scaler is lost, and Serve starts another
                logger.warning("the scaler could not be asked to start %s: %s", self._name, error)
            if clock() - begun + remaining > patience_s:
                raise ModelStarting(self._name, remaining)
            await asyncio.sleep(_LOOK_S)
        return clock() - begun
