"""Generation that is paused, over engines in this process: running requests, and those that come meanwhile."""

import asyncio
from contextlib import suppress

import pytest

from crossdock.cluster.dispatch import rollouts as rollouts_module
from crossdock.cluster.dispatch.dispatcher import Dispatcher
from crossdock.cluster.dispatch.gate import Gate, PauseMode
from crossdock.cluster.dispatch.rollouts import Rollouts
from crossdock.cluster.watch.scrape import Scrape
from crossdock.router.fleet import RouterConfig
from crossdock.workers.schedule.request.request import FinishReason, TokenDelta
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.cluster.dispatch.in_process import InProcess, serving, tokens
from tests.waiting import until

PROMPT = [3 + i % 100 for i in range(30)]
LONG = 200  # tokens of a stream that is stopped on the way


class Stream:
    """A greedy request that is read by a task."""

    def __init__(self, dispatcher: Dispatcher, name: str, max_tokens: int = LONG) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, min_tokens=max_tokens)
        self.deltas: list[TokenDelta] = []
        self.task = asyncio.create_task(self._read(dispatcher, Submission(name, PROMPT, params)))

    async def _read(self, dispatcher: Dispatcher, submission: Submission) -> None:
        async for delta in dispatcher.generate(submission):
            self.deltas.append(delta)

    @property
    def output(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def end(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None


async def computed(replicas: list[InProcess]) -> int:
    """Return the tokens that replicas have computed, between two of their steps."""
    for replica in replicas:
        await replica.engine_thread.call(lambda: None)
    return sum(replica.engine_thread.num_computed for replica in replicas)


@pytest.mark.parametrize("roles", [("mixed", "mixed"), ("prefill", "decode")])
async def test_paused_streams_keep_their_pages_and_go_on_with_the_same_tokens(roles: tuple[str, str]) -> None:
    """Also those of pairs, whose pages may be on the way; and requests that come meanwhile wait for their turn."""
    replicas = [InProcess(role=role) for role in roles]  # type: ignore[arg-type]
    dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
    async with serving(dispatcher, first=replicas[0], second=replicas[1]):
        await (alone := Stream(dispatcher, "alone")).task
        rollouts = Rollouts(dispatcher)
        streams = [Stream(dispatcher, f"{number}") for number in range(4)]
        await until(lambda: all(len(stream.output) > 5 for stream in streams[:2]))
        streams += [Stream(dispatcher, f"late {number}") for number in range(2)]  # may be on their way
        await rollouts.pause("keep")
        before = await computed(replicas)
        waiting = Stream(dispatcher, "waiting")
        await until(lambda: dispatcher.num_queued >= 1)
        assert await computed(replicas) == before
        assert not waiting.deltas
        assert not any(stream.task.done() for stream in streams)
        assert await replicas[1].owned_pages() > 0
        assert rollouts.is_paused
        await rollouts.resume()
        await asyncio.gather(*(stream.task for stream in (*streams, waiting)))
        assert [stream.output for stream in (*streams, waiting)] == [alone.output] * 7
        await until(lambda: all(not each.engine_thread.engine.scheduler.table.requests() for each in replicas))


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_running_requests_end_before_generation_is_paused(mode: PauseMode) -> None:
    replica = InProcess()
    async with serving(Dispatcher("tiny"), only=replica) as dispatcher:
        rollouts = Rollouts(dispatcher)
        running = [Stream(dispatcher, f"{number}", 40 if mode == "wait" else LONG) for number in range(3)]
        await until(lambda: all(stream.output for stream in running))
        pausing = asyncio.create_task(rollouts.pause(mode))
        await until(lambda: rollouts.is_paused)
        late = Stream(dispatcher, "late", 5)
        await pausing
        assert {stream.end for stream in running} == {FinishReason.LENGTH if mode == "wait" else FinishReason.ABORT}
        assert [len(stream.output) == 40 for stream in running] == [mode == "wait"] * 3
        assert await replica.owned_pages() == 0
        assert not late.deltas
        await rollouts.resume()
        await late.task
        assert len(late.output) == 5


async def test_pause_whose_caller_leaves_is_undone() -> None:
    async with serving(Dispatcher("tiny"), only=InProcess()) as dispatcher:
        rollouts = Rollouts(dispatcher)
        running = Stream(dispatcher, "r")
        await until(lambda: bool(running.output))
        pausing = asyncio.create_task(rollouts.pause("wait"))
        await until(lambda: rollouts.is_paused)
        pausing.cancel()
        with suppress(asyncio.CancelledError):
            await pausing
        assert not rollouts.is_paused
        await running.task
        assert len(await tokens(dispatcher, "next", 5)) == 5


async def test_request_on_a_paused_replica_counts_as_moving() -> None:
    """Else its life would take it for stuck, and place it elsewhere."""
    replica = InProcess()
    async with serving(Dispatcher("tiny"), only=replica) as dispatcher:
        rollouts, stream = Rollouts(dispatcher), Stream(dispatcher, "r")
        await until(lambda: bool(stream.output))
        await rollouts.pause("keep")
        first, clock = await replica.call("progress", [("r", 0)]), replica.engine_thread.engine.clock
        later = clock() + 0.002
        await until(lambda: clock() > later)
        assert await replica.call("progress", [("r", 0)]) != first
        await rollouts.resume()
        await stream.task


async def test_paused_replica_gets_no_request_while_another_is_not() -> None:
    first, second = InProcess(), InProcess()
    async with serving(Dispatcher("tiny"), first=first, second=second) as dispatcher:
        await first.pause()
        await until(lambda: dispatcher.fleet.table.paused == {"first"})
        for number in range(3):
            await tokens(dispatcher, f"{number}", 3)
        assert await computed([first]) == 0
        await second.pause()
        await until(lambda: len(dispatcher.fleet.table.paused) == 2)
        stream = Stream(dispatcher, "waits", 3)
        await until(lambda: dispatcher.fleet.num_booked("first") + dispatcher.fleet.num_booked("second") == 1)
        for replica in (first, second):
            await replica.resume()
        await stream.task
        assert len(stream.output) == 3


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_request_that_comes_while_replicas_sleep_has_the_tokens_of_an_awake_one(mode: PauseMode) -> None:
    replicas = [InProcess(role="prefill"), InProcess(role="decode")]
    dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"), vllm_metrics=True)
    async with serving(dispatcher, first=replicas[0], second=replicas[1]):
        wanted = await tokens(dispatcher, "alone", 20)
        rollouts = Rollouts(dispatcher)
        assert not await rollouts.is_sleeping()
        for level, refused, reason in (
            (2, mode, "level must be 1"),
            (7, mode, "level is 7"),
            (1, "keep", "mode must be abort or wait"),
        ):
            with pytest.raises(ValueError, match=reason):
                await rollouts.sleep(level, refused)
        assert not rollouts.is_paused
        await rollouts.sleep(1, mode)
        assert await rollouts.is_sleeping()
        shown = Scrape.parse(await dispatcher.metrics_text(), 0.0).by("vllm:engine_sleep_state", "sleep_state")
        assert shown == {"awake": 0, "weights_offloaded": 2, "discard_all": 0}
        with pytest.raises(ValueError, match="/wake_up"):
            await rollouts.resume()
        waiting = Stream(dispatcher, "waiting", 20)
        await until(lambda: dispatcher.num_queued >= 1)
        await rollouts.wake_up(["weights"])
        assert await rollouts.is_sleeping()
        assert not waiting.deltas
        await rollouts.wake_up([])
        await waiting.task
        assert waiting.output == wanted
        assert not await rollouts.is_sleeping()


async def test_ingress_that_starts_learns_of_a_pause_and_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ingress that was asked to pause has ended; another one, which this one does not hear of, lets go on."""
    monkeypatch.setattr(rollouts_module, "_CATCH_UP_S", 0.02)
    replica, first = InProcess(), Dispatcher("tiny")
    async with serving(Dispatcher("tiny"), only=replica) as dispatcher:
        await replica.pause()
        dispatcher.leave("only")
        first.join("only", replica, replica.profile)
        learning = Rollouts(first)
        await learning.start()
        assert learning.is_paused
        assert not first.ready()
        waiting = Stream(first, "waiting", 5)
        await replica.resume()
        await waiting.task
        assert len(waiting.output) == 5
        assert not learning.is_paused
        assert first.ready()
        await replica.pause()
        await until(lambda: learning.is_paused)
        await learning.resume()
        assert not learning.is_paused
        await until(first.ready)
        learning.check()
        learning.stop()
        await first.close()


async def test_pause_that_an_operator_asked_for_does_not_end_with_a_report() -> None:
    gate = Gate()
    gate.close("wait")
    gate.learn(is_paused=False)
    assert not gate.is_open
    gate.open()
    gate.learn(is_paused=True)
    assert not gate.is_open
    gate.learn(is_paused=False)
    assert gate.is_open
