"""Asks all ingresses of the application, also right after a start, when Serve has told this one of none."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

_TOLD_S = 3.0  # until Serve has told an ingress of itself and of others; it takes a tenth of a second
_RETRY_S = 0.02


class EveryIngress:
    """The ingresses as one of them calls them. Belongs to its event loop."""

    def __init__(self, handle: DeploymentHandle, own: Any) -> None:
        """`handle`: of the deployment of ingresses. `own`: this ingress, which has the methods that are called."""
        self._handle = handle
        self._own = own

    async def ask(self, method: str, seconds: float, *arguments: Any, told_s: float = _TOLD_S) -> list[Any]:
        """Return the answers of all ingresses, this one too, without those that fail or do not answer in time.

        Before Serve has told this process of any ingress, no other can be asked. That is waited for, at most `told_s`.
        Then this ingress answers alone.
        """
        try:
            async with asyncio.timeout(seconds):
                asked = await self._broadcast(method, arguments, min(told_s, seconds))
        except TimeoutError:
            return []
        if asked is None:
            return [await getattr(self._own, method)(*arguments)]
        # `results_async` has one time limit for all: an ingress that hangs would cost the answers of the others.
        answering = (asyncio.wait_for(answer.get_async(), seconds) for answer in asked)
        answers = await asyncio.gather(*answering, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _broadcast(self, method: str, arguments: Sequence[Any], told_s: float) -> Sequence[Any] | None:
        """Begin to ask. None: Serve has told this process of no ingress in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + told_s
        while True:
            try:
                found: Sequence[Any] = await self._handle.broadcast(method, *arguments)._fetch_replica_results_async()
                return found
            except DeploymentUnavailableError:
                if loop.time() >= end:
                    logger.warning("Serve has told this ingress of no other: it answers %r alone", method)
                    return None
            await asyncio.sleep(_RETRY_S)
