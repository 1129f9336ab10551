"""Requests for a model without replicas: all of them ask for one start, and each waits as long as it may."""

import asyncio

import pytest

from crossdock.cluster.api.http.http_guard import as_api_error
from crossdock.cluster.dispatch.cold_start import ColdStart, ModelStarting
from tests.waiting import until


class Model:
    def __init__(self, remaining: float) -> None:
        self.remaining, self.is_up, self.num_asked, self.fails = remaining, False, 0, False
        self.start = ColdStart("m", lambda: self.is_up, self.ask, asyncio.create_task)

    async def ask(self) -> float:
        self.num_asked += 1
        if self.fails:
            raise RuntimeError("the scaler was killed")
        return self.remaining


async def test_waiting_requests_ask_once_and_go_on_when_the_replica_is_up() -> None:
    model = Model(0.5)
    waiting = [asyncio.create_task(model.start.wait(600.0)) for _ in range(50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert model.num_asked == 1
    model.is_up = True
    assert all(seconds > 0 for seconds in await asyncio.gather(*waiting))
    assert model.num_asked == 1
    await model.start.wait(0.0)  # a replica is up: no class waits


async def test_request_that_cannot_wait_for_the_start_is_told_when_to_come_back() -> None:
    model = Model(12.3)
    with pytest.raises(ModelStarting, match="predicted to be up in 12 s") as refused:
        await model.start.wait(patience_s=10.0)
    error = as_api_error(refused.value)
    assert (error.status, error.code, error.headers["Retry-After"]) == (503, "model_starting", "13")
    assert model.num_asked == 1, "the start goes on nevertheless"


async def test_request_waits_on_while_the_scaler_is_lost() -> None:
    model = Model(0.0)
    model.fails = True
    waiting = asyncio.create_task(model.start.wait(600.0))
    await until(lambda: model.num_asked > 0)
    model.is_up = True
    assert await waiting > 0
