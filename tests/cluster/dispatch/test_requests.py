"""Requests over engines in this process, while all replicas live."""

import asyncio

import pytest

from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost
from crossdock.workers.schedule.request.submission import Overloaded, SamplingParams, Submission
from tests.cluster.dispatch.in_process import IN_TURN, InProcess, Refusing, serving, tokens
from tests.waiting import until


async def test_requests_at_once_have_equal_outputs_and_leave_no_pages() -> None:
    client, dispatcher = InProcess(), Dispatcher("tiny")
    with pytest.raises(ReplicaLost, match="no replica is up"):
        await tokens(dispatcher, "early")
    async with serving(dispatcher, one=client):
        assert dispatcher.model.max_model_len == 256
        outputs = await asyncio.gather(*(tokens(dispatcher, f"{i}") for i in range(10)))
        assert all(output == outputs[0] for output in outputs)
        assert len(outputs[0]) == 20
        assert await client.owned_pages() == 0
        text = await dispatcher.metrics_text()
        assert 'crossdock_requests_total{finish_reason="length",slo_class="standard",replica="one"}' in text
        assert "crossdock_time_to_first_token_seconds_count" in text


async def test_overloaded_replica_leaves_request_to_next_best() -> None:
    first, second = Refusing(5.0), InProcess()
    async with serving(Dispatcher("tiny", IN_TURN), a=first, b=second) as dispatcher:
        for name in ("one", "another"):
            assert len(await tokens(dispatcher, name)) == 20
        assert first.num_refused == 1
        assert not dispatcher.deadlines
        assert all(not dispatcher.fleet.num_booked(name) for name in ("a", "b"))


async def test_overload_of_all_replicas_raises_shortest_wait() -> None:
    clients = [Refusing(5.0), Refusing(2.0), Refusing(9.0)]
    async with serving(
        Dispatcher("tiny"), **{f"{number}": client for number, client in enumerate(clients)}
    ) as dispatcher:
        with pytest.raises(Overloaded) as refusal:
            await tokens(dispatcher, "r")
        assert refusal.value.retry_after == 2.0
        assert [client.num_refused for client in clients] == [1, 1, 1]


async def test_first_delta_is_empty_and_means_taken() -> None:
    async with serving(Dispatcher("tiny"), one=InProcess()) as dispatcher:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        deltas = [delta async for delta in dispatcher.generate(Submission("r", [5] * 40, params))]
        assert [len(delta.token_ids) for delta in deltas] == [0, 1, 1]
        assert deltas[0].finish_reason is None


async def test_invalid_request_raises_value_error_and_disturbs_no_other() -> None:
    async with serving(Dispatcher("tiny"), one=InProcess()) as dispatcher:
        good = asyncio.create_task(tokens(dispatcher, "good", 100))
        with pytest.raises(ValueError, match="prompt has 300 tokens"):
            await tokens(dispatcher, "bad", prompt=300)
        assert len(await good) == 100


async def test_client_that_leaves_at_any_stage_frees_pages() -> None:
    client = InProcess()

    async def is_free() -> bool:
        return await client.owned_pages() == 0

    async with serving(Dispatcher("tiny"), one=client) as dispatcher:
        for wait in (0.0, 0.001, 0.01, 0.05):
            task = asyncio.create_task(tokens(dispatcher, f"{wait}", 200))
            await asyncio.sleep(wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        stream = dispatcher.generate(Submission("closed", [5] * 40, SamplingParams(max_tokens=200, ignore_eos=True)))
        async for delta in stream:
            assert delta.finish_reason is None
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await until(is_free)


async def test_step_that_raises_ends_its_requests_and_not_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    client = InProcess()
    async with serving(Dispatcher("tiny"), one=client) as dispatcher:
        finish = type(client.engine_thread.engine.pipeline.runner).finish
        try:
            type(client.engine_thread.engine.pipeline.runner).finish = _fail  # type: ignore[method-assign, assignment]
            with pytest.raises(RuntimeError, match="broken on purpose"):
                await tokens(dispatcher, "bad")
        finally:
            type(client.engine_thread.engine.pipeline.runner).finish = finish  # type: ignore[method-assign]
        assert await client.owned_pages() == 0
        assert len(await tokens(dispatcher, "good")) == 20


def _fail(*_: object) -> None:
    raise RuntimeError("broken on purpose")


async def test_requests_that_end_together_are_aborted_by_one_call() -> None:
    calls: list[int] = []

    class Counting(InProcess):
        async def abort(self, attempts: list[tuple[str, int]]) -> None:
            calls.append(len(attempts))
            await self.engine_thread.abort(attempts)

    client = Counting()
    async with serving(Dispatcher("tiny"), one=client) as dispatcher:
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)
        streams = [dispatcher.generate(Submission(f"{i}", [1, 2, 3], sampling)) for i in range(8)]
        for stream in streams:
            await anext(stream)
        reading = [asyncio.ensure_future(anext(stream)) for stream in streams]
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await until(client.owns_nothing)
        assert sum(calls) == 8
        assert len(calls) < 4
