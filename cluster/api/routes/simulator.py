"""GET /v1/simulator: the steps of the real scheduler in a scenario, computed in a process that has limits."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import Query, Response

from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.cluster.api.http.http_json import long_json_answer
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.dispatchers import Dispatchers
from crossdock.cluster.simulate.scenario import HERE, Scenario
from crossdock.workers.sandbox.limited_child import Limits
from crossdock.workers.sandbox.sandbox import Sandbox, SandboxBusy

_LIMITS = Limits(cpu_seconds=10.0, wall_seconds=60.0, memory_bytes=512 << 20)  # of one scenario
_MODULE = "crossdock.cluster.simulate.scenario_run"
_KEEP_S = 60.0  # the process ends so long after its last answer
_MOST_WAITING = 16
_LEARNT = ("cost", "overrun", "interval_share")  # fields of a replica that are newer than those of its profile


class Simulator:
    """One scenario at a time, so that real requests keep the cores."""

    def __init__(self, dispatcher: Dispatcher | Dispatchers) -> None:
        self._sandbox = Sandbox(_MODULE, {}, title="the simulator's process", limits=_LIMITS)
        self._thread = ThreadPoolExecutor(1, "simulator")  # answers in order of arrival, one after the other
        self._dispatcher = dispatcher
        self._num_waiting = 0
        self._end: asyncio.TimerHandle | None = None

    async def run(self, scenario: Annotated[Scenario, Query()]) -> Response:
        """Simulate one scenario."""
        profile = await self._profile() if scenario.profile == HERE else None
        if self._num_waiting >= _MOST_WAITING:
            raise _busy(f"{_MOST_WAITING} scenarios wait already")
        self._num_waiting += 1
        loop = asyncio.get_running_loop()
        asked = {"scenario": scenario.model_dump(), "profile": profile}
        try:
            answer = await loop.run_in_executor(self._thread, self._sandbox.ask, asked)
        except SandboxBusy:
            raise _busy("there was too little time for this scenario") from None
        finally:
            self._num_waiting -= 1
            if self._end is not None:
                self._end.cancel()
            self._end = loop.call_later(_KEEP_S, self._thread.submit, self._sandbox.close)
        if "error" in answer:
            raise ApiError(answer["error"], code="scenario_too_large")
        return await long_json_answer({"object": "simulator.run", **answer["run"]})

    async def _profile(self) -> dict[str, Any]:
        for first in await self._dispatcher.replicas({}, ""):  # an owner without steps: the profile alone is needed
            return {**first["profile"], **{name: first[name] for name in _LEARNT if first.get(name)}}
        raise wrong("profile", f"'{HERE}' needs a replica that is up; name a preset, such as h100-8b")


def _busy(reason: str) -> ApiError:
    return ApiError(f"The simulator is busy: {reason}. Try again.", status=503, headers={"Retry-After": "2"})
