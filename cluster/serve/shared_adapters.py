"""The names of adapters, as the ingresses of an application tell them each other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from crossdock.cluster.api.routes.adapters import AdapterNames, Naming
from crossdock.cluster.dispatch.loops import raise_if_ended

logger = logging.getLogger("ray.serve")

Known: TypeAlias = list[tuple[str, str, Naming]]  # model, name of an adapter, what the name means

_ASKED_S = 2.0  # so long others may take to answer
_EVERY_S = 5.0  # between two looks at what others know


class SharedAdapters:
    """Keep the meaning of names the same at this ingress and at the others.

    Each change is told to all ingresses that Serve lists. Serve lists one some time after this one has begun to answer
    requests, and an ingress that hangs hears nothing. So each ingress asks the others again and again; and before a
    load or an unload, which must know of the one before.
    """

    def __init__(self, of_all: Callable[..., Awaitable[list[Any]]], ingress: str) -> None:
        """`of_all`: asks all ingresses, see `EveryIngress.ask`. `ingress`: the name of this one."""
        self._of_all = of_all
        self._ingress = ingress
        self._models: Mapping[str, AdapterNames] = {}
        self._looking: asyncio.Task[None] | None = None
        self._told = ""  # the failure that was logged last

    def start(self, models: Mapping[str, AdapterNames]) -> None:
        """Begin to ask the others, on the running loop. `models`: the names by model."""
        self._models = models
        self._looking = asyncio.create_task(self._look())

    def check(self) -> None:
        """Raise the error that has ended the looks at what others know."""
        raise_if_ended([self._looking])

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with suppress(asyncio.CancelledError):
                await self._looking

    async def learn(self, **more: float) -> None:
        """Take over what the others know; `more`: of `EveryIngress.ask`. Log a failure once: a later try may do."""
        try:
            for known in await self._of_all("adapters", _ASKED_S, **more):
                for model, name, naming in known:
                    if model in self._models:  # an ingress of an older configuration may have others
                        self._models[model].take(name, naming)
            self._told = ""
        except Exception as error:
            if self._told != repr(error):
                self._told = repr(error)
                logger.warning("adapters that other ingresses have loaded are not known here: %s", error)

    async def tell(self, model: str, name: str, naming: Naming) -> None:
        """Tell the others what a name means from now on."""
        await self._of_all("put_adapter", _ASKED_S, self._ingress, model, name, naming)

    def hear(self, asker: str, model: str, name: str, naming: Naming) -> None:
        """Take over what a name means at another ingress, `asker`."""
        if asker != self._ingress:
            self._models[model].take(name, naming)

    def known(self) -> Known:
        """Return the meaning of each name here."""
        return [(model, name, each) for model, names in self._models.items() for name, each in names.namings.items()]

    async def _look(self) -> None:
        """Ask the others, for ever."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.learn()
