"""Attempts that are given up over engines in this process: what stays behind at the replicas, and what clients get."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, cast

import pytest
from msgspec import structs
from pydantic import ByteSize

from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost, SuspectRequest, Timeouts
from crossdock.cluster.dispatch.suspect_turns import SuspectTurns
from crossdock.router.actions import ReplicaDead
from crossdock.router.fleet import RouterConfig
from crossdock.router.turn_queue import TurnQueue
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.serving import channel
from crossdock.workers.replica.serving.readers import AttemptKey
from crossdock.workers.report.advertise import Message
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import Leg, Overloaded, SamplingParams, Submission
from tests.cluster.dispatch.in_process import IN_TURN, InProcess, Refusing, ready, serving, tokens
from tests.waiting import until

PAIRS = RouterConfig(shipping="always", policy="round-robin")


async def is_clean(*clients: InProcess) -> None:
    """Wait until no client has a request or owns a page."""
    for client in clients:
        await until(client.owns_nothing)


class Failing(InProcess):
    """A replica that fails the next submission, before or after taking it."""

    error: Exception | None = None
    takes = False
    num_failed = 0

    async def submit(self, submission: Submission) -> int:
        if self.error is None:
            return await super().submit(submission)
        if self.takes:
            await super().submit(submission)
        error, self.error = self.error, None
        self.num_failed += 1
        raise error


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("leg", [Leg.SEND, Leg.RECEIVE])
@pytest.mark.parametrize(
    "error", [Overloaded("busy", 1.0), ConnectionError("broken"), ReplicaDead("ended")], ids=["busy", "lost", "dead"]
)
async def test_pair_of_which_one_leg_is_not_taken_leaves_nothing_and_the_tokens_are_the_same(
    takes: bool, leg: Leg, error: Exception
) -> None:
    """Also where the leg was taken and only the answer was lost."""
    if takes and isinstance(error, Overloaded):
        pytest.skip("a replica that refuses has not taken it")
    clients = {"p": Failing(role="prefill"), "q": InProcess(role="prefill"), "d": Failing(role="decode")}
    async with serving(Dispatcher("tiny", PAIRS), **clients) as dispatcher:
        wanted = await tokens(dispatcher, "before")
        failing = cast(Failing, clients["p" if leg is Leg.SEND else "d"])
        failing.error, failing.takes = error, takes
        for number in range(4):
            assert await tokens(dispatcher, f"{number}") == wanted
            if failing.num_failed:
                break
        assert failing.num_failed == 1
        await is_clean(*clients.values())
        assert all(not dispatcher.fleet.num_booked(name) for name in clients)


async def test_submission_that_takes_too_long_is_aborted_when_it_comes() -> None:
    class Slow(InProcess):
        num_asked = num_taken = 0

        async def submit(self, submission: Submission) -> int:
            self.num_asked += 1
            with suppress(asyncio.CancelledError):
                await arrives.wait()
            await arrives.wait()  # Serve's call goes on though its caller has gone
            self.num_taken += 1
            return await super().submit(submission)

    arrives = asyncio.Event()
    slow, quick = Slow(), InProcess()
    timeouts = Timeouts(taken_s=0.2, patience_s=0.2)
    async with serving(Dispatcher("tiny", IN_TURN, timeouts=timeouts), a=slow, b=quick) as dispatcher:
        for number in range(2):
            assert len(await tokens(dispatcher, f"{number}", 100)) == 100
        assert slow.num_asked > 0
        assert slow.num_taken == 0
        arrives.set()
        await until(lambda: slow.num_taken == slow.num_asked)
        await is_clean(slow, quick)
        assert not slow.engine_thread.timelines.find("", None, 0.0), "it must not even start"


async def test_submission_that_waits_for_the_engine_longer_than_any_answer_takes_is_not_lost() -> None:
    """A slow machine takes a minute for the thousands of inputs of one request. Its replica has all of them, and says
    so. Submissions that another client sends meanwhile wait, too."""

    class Asked(InProcess):
        num_asked = 0

        async def progress(self, attempts: Sequence[AttemptKey]) -> list[list[int | str] | None]:
            self.num_asked += 1
            return await self.engine_thread.progress(attempts)

    client, goes_on = Asked(), threading.Event()
    timeouts = Timeouts(taken_s=0.05, patience_s=0.05)
    async with serving(Dispatcher("tiny", timeouts=timeouts, most_placements=1), one=client) as dispatcher:
        step = asyncio.create_task(client.engine_thread.call(lambda: goes_on.wait(240)))  # the step that runs is long
        outputs = [asyncio.create_task(tokens(dispatcher, f"{number}", 2)) for number in range(40)]
        await until(lambda: client.num_asked >= 3 or any(output.done() for output in outputs))
        goes_on.set()
        await step
        found = await asyncio.gather(*outputs)
        assert all(output == found[0] for output in found)
        assert "crossdock_ingress_placed_again_total 0.0" in dispatcher.metrics.text()
        assert client.num_asked < 3 * len(outputs), "one question about all"
        await is_clean(client)


async def test_accepted_request_goes_on_though_every_other_replica_is_overloaded() -> None:
    """The others count it as late; only where it is new may that refuse it."""

    class Busy(Refusing):
        async def submit(self, submission: Submission) -> int:
            return await (super().submit(submission) if submission.may_refuse else InProcess.submit(self, submission))

    first, second = InProcess(), Busy(3.0)
    async with serving(Dispatcher("tiny", IN_TURN), a=first) as dispatcher:
        stream = dispatcher.generate(Submission("r", [5] * 40, SamplingParams(max_tokens=9, ignore_eos=True)))
        async with aclosing(cast(Any, stream)):
            accepted = await anext(stream)
            assert accepted == TokenDelta("r", [])
            dispatcher.join("b", second, second.profile)
            await ready(dispatcher, 2)
            first.is_killed = True
            assert sum([len(delta.token_ids) async for delta in stream]) == 9


class Unlike(InProcess):
    """A decode replica whose device rounds otherwise: its own first token of a prompt is another one."""

    own = 99

    async def messages(self) -> AsyncIterator[Message]:
        async for message in super().messages():
            for number, delta in enumerate(message.deltas):
                if delta.first == 0 and delta.token_ids:
                    message.deltas[number] = structs.replace(delta, token_ids=[self.own, *delta.token_ids[1:]])
            yield message


async def test_other_first_token_of_an_unlike_decode_replica_never_follows_the_clients() -> None:
    """The prefill replica's token reached the client, its pages did not arrive: decode computes the prompt itself."""

    class PagesLost(InProcess):
        """A prefill replica whose peer gives up every transfer when the first token is made."""

        decode: InProcess
        has_ended = False

        async def submit(self, submission: Submission) -> int:
            sequence = await super().submit(submission)
            if not self.has_ended:
                self.has_ended = True
                await self.decode.engine_thread.peer_dead(self.profile.peer)  # its pages will never be taken
            return sequence

    async with serving(Dispatcher("tiny"), alone=InProcess()) as dispatcher:
        wanted = await tokens(dispatcher, "wanted")
        prefill, decode = PagesLost(role="prefill"), Unlike(role="decode")
        prefill.decode = decode
        async with serving(Dispatcher("tiny", PAIRS), p=prefill, d=decode) as pairs:
            got = await tokens(pairs, "r")
            assert got in (wanted, [Unlike.own, *got[1:]])
            assert got == wanted or "placed_again_total 0.0" in pairs.metrics.text()


class Poisoned(InProcess):
    """A replica that dies of a prompt that begins with 66."""

    async def submit(self, submission: Submission) -> int:
        if submission.prompt_token_ids[0] == 66:
            self.is_killed = True
            for reader in self.engine_thread.channels.values():
                reader.put([TokenDelta("no request", [])])
            raise ReplicaDead("its process has ended")
        return await super().submit(submission)


async def test_poison_is_tried_twice_and_what_runs_or_waits_beside_it_is_served() -> None:
    clients = {name: Poisoned() for name in "abc"}
    async with serving(Dispatcher("tiny", IN_TURN), **clients) as dispatcher:
        wanted = await tokens(dispatcher, "wanted", 150)
        beside = [asyncio.create_task(tokens(dispatcher, f"{number}", 150)) for number in range(6)]
        await until(lambda: all(dispatcher.fleet.num_booked(name) for name in clients))
        poison = dispatcher.generate(Submission("poison", [66] * 20))
        late = [asyncio.create_task(tokens(dispatcher, f"late {number}", 150)) for number in range(6)]
        with pytest.raises(SuspectRequest, match="2 replicas"):
            await anext(poison)
        assert [client.is_killed for client in clients.values()].count(True) == 2
        assert await asyncio.gather(*beside, *late) == [wanted] * 12


async def test_suspects_have_their_turns_one_after_the_other_and_no_turn_lasts() -> None:
    turns, order = SuspectTurns(TurnQueue(0.05)), list[str]()

    async def enter(name: str) -> None:
        await turns.enter(name)
        order.append(name)

    await turns.enter("a")
    waiting = [asyncio.create_task(enter(name)) for name in "bcd"]
    await asyncio.sleep(0)
    turns.leave("c")  # not its turn
    assert not order
    waiting[1].cancel()
    turns.leave("a")
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == ["b", "d"], "b never left: its turn ended by itself"


async def test_ingress_that_stops_reading_under_load_ends_there_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channel, "_MOST_DELTAS", 300)
    client = InProcess()
    async with serving(Dispatcher("tiny"), one=client) as dispatcher:
        client.engine_thread.channel("stalled")
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        for number in range(8):
            await client.engine_thread.submit("stalled", Submission(f"stalled {number}", [5] * 30, params))
        outputs = await asyncio.gather(*(tokens(dispatcher, f"{number}", 200) for number in range(4)))
        assert [len(output) for output in outputs] == [200] * 4
        await is_clean(client)
        assert set(client.engine_thread.channels) == {"test"}


@pytest.mark.timeout(900)  # half a minute beside 16 busy processes; once more than five
async def test_thousand_outputs_at_once_all_come() -> None:
    """Chunks have one size: where steps are slow, small ones would be thousands of steps over a thousand requests."""
    client = InProcess(EngineConfig(kv_cache_memory=ByteSize(4 << 20), admission="queue", chunk_policy="fixed"))
    async with serving(
        Dispatcher("tiny", timeouts=Timeouts(silence_s=120.0, answer_s=120.0, patience_s=120.0)), one=client
    ) as dispatcher:
        outputs = await asyncio.gather(*(tokens(dispatcher, f"{number}", 2) for number in range(1024)))
        assert all(output == outputs[0] for output in outputs)
        assert len(outputs[0]) == 2
        await is_clean(client)


async def test_request_that_never_moves_is_lost_though_its_replica_is_busy() -> None:
    """The replica computes for others all the time. What counts is the request."""

    class Stuck(InProcess):
        async def submit(self, submission: Submission) -> int:
            return 0 if submission.id == "stuck" else await super().submit(submission)

        async def progress(self, attempts: Sequence[AttemptKey]) -> list[list[int | str] | None]:
            known = await self.engine_thread.progress(attempts)
            stuck: list[int | str] = ["held", 16]
            return [stuck if name == "stuck" else one for (name, _), one in zip(attempts, known, strict=True)]

    async with serving(
        Dispatcher("tiny", timeouts=Timeouts(patience_s=0.1, stuck_s=0.5), most_placements=1), one=Stuck()
    ) as dispatcher:
        stop = asyncio.Event()

        async def keep_busy() -> None:
            while not stop.is_set():
                await tokens(dispatcher, "busy", 50)

        busy = asyncio.create_task(keep_busy())
        with pytest.raises(ReplicaLost, match="has not moved"):
            await tokens(dispatcher, "stuck")
        stop.set()
        await busy
