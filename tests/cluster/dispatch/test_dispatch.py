"""A request's life over engines in this process: real engines, no Ray."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from pydantic import ByteSize

from crossdock.cluster.dispatch.dispatch import Dispatcher, ReplicaDead, ReplicaLost, merge_metrics
from crossdock.router.fleet import RouterConfig
from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig, TransferConfig
from crossdock.workers.replica.engine import Engine, warm_up
from crossdock.workers.replica.engine_thread import EngineThread
from crossdock.workers.replica.handover import connect
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.profile import Role
from crossdock.workers.schedule.request import Overloaded, SamplingParams, Submission, TokenDelta
from tests.workers.architectures import build

IN_TURN = RouterConfig(policy="round-robin")


class InProcess:
    """An `EngineClient` without a process between: `replica.py` does the same behind a Serve handle."""

    def __init__(self, config: EngineConfig | None = None, role: Role = "mixed") -> None:
        config = config or EngineConfig(kv_cache_memory=ByteSize(4 << 20))
        engine = Engine(wrap_module(build("llama", {})), config)
        self.profile = warm_up(engine)
        if role == "mixed":
            self.loop = EngineThread(engine)
        else:
            self.loop = EngineThread(engine, partial(connect, engine, "tiny", role, TransferConfig(transport="tcp")))
            assert self.loop.handover is not None
            self.profile = self.profile.model_copy(update={"role": role, "peer": self.loop.handover.dock.blob})
        self.is_killed = False

    async def messages(self) -> AsyncIterator[Message]:
        channel = self.loop.channel("test")
        try:
            yield Message()
            async for message in channel.messages(1.0):
                if self.is_killed:
                    raise ConnectionError("killed")
                yield message
        finally:
            await self.loop.close_channel("test", channel)

    async def submit(self, submission: Submission) -> int:
        return await self.loop.submit("test", submission)

    async def progress(self, request_id: str) -> int | None:
        return self.loop.progress(request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.loop.abort(request_ids)

    async def close(self) -> None:
        self.loop.channels["test"].close()

    async def peer_dead(self, peer: bytes) -> None:
        await self.loop.peer_dead(peer)

    async def timelines(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        return self.loop.timelines.find(request_id, tenant, self.loop.engine.clock())

    async def live_requests(self, tenant: str | None) -> list[dict[str, Any]]:
        return self.loop.timelines.live(tenant, self.loop.engine.clock())

    async def watched(self, seen: Mapping[str, int], tenant: str | None) -> dict[str, Any]:
        profile = self.profile.model_dump(exclude={"peer"}, mode="json")
        return {"pool": "mixed", "profile": profile, **self.loop.watched(seen, tenant)}

    async def metrics_text(self) -> str:
        return self.loop.metrics.text()

    async def owned_pages(self) -> int:
        counts = []
        await self.loop.call(lambda: counts.append(self.loop.engine.pages.counts().owned))
        return counts[0]


async def ready(dispatcher: Dispatcher) -> None:
    while not dispatcher.ready():
        await asyncio.sleep(0.001)


async def tokens(dispatcher: Dispatcher, name: str, max_tokens: int = 20, prompt: int = 30) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    output: list[int] = []
    async for delta in dispatcher.generate(Submission(name, [3 + i % 100 for i in range(prompt)], params)):
        output += delta.token_ids
    return output


def test_a_request_from_end_to_end() -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        with pytest.raises(ReplicaLost, match="no replica is up"):
            await tokens(dispatcher, "early")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        assert dispatcher.model.max_model_len == 256
        outputs = await asyncio.gather(*(tokens(dispatcher, f"{i}") for i in range(10)))
        assert all(output == outputs[0] for output in outputs)
        assert len(outputs[0]) == 20
        assert await client.owned_pages() == 0
        text = await dispatcher.metrics_text()
        assert 'crossdock_requests_total{finish_reason="length",slo_class="standard",replica="one"}' in text
        assert "crossdock_time_to_first_token_seconds_count" in text
        await dispatcher.close()
        await client.loop.close()

    asyncio.run(story())


def test_a_replica_that_has_just_been_heard_of_is_waited_for() -> None:
    """In an upgrade the last old one may leave before a new one has said its first word."""

    async def story() -> None:
        old, new, dispatcher = InProcess(), InProcess(), Dispatcher("tiny")
        dispatcher.join("old", old, old.profile)
        await ready(dispatcher)
        dispatcher.leave("old")
        dispatcher.join("new", new, new.profile)
        assert not dispatcher.ready()
        assert len(await tokens(dispatcher, "between the two")) == 20
        await dispatcher.close()
        await old.loop.close()
        await new.loop.close()

    asyncio.run(story())


class Refusing(InProcess):
    """An overloaded replica: it refuses all, and asks for a wait of `retry_after` seconds."""

    def __init__(self, retry_after: float) -> None:
        super().__init__()
        self.retry_after = retry_after
        self.num_refused = 0

    async def submit(self, submission: Submission) -> int:
        self.num_refused += 1
        raise Overloaded(f"retry in {self.retry_after} s", self.retry_after)


def test_an_overloaded_replica_leaves_the_request_to_the_next_best() -> None:
    async def story() -> None:
        first, second, dispatcher = Refusing(5.0), InProcess(), Dispatcher("tiny", IN_TURN)
        dispatcher.join("a", first, first.profile)
        dispatcher.join("b", second, second.profile)
        while not all(link.is_open for link in dispatcher._links.values()):
            await asyncio.sleep(0.001)
        for name in ("it", "another"):
            assert len(await tokens(dispatcher, name)) == 20
        assert first.num_refused == 1
        assert all(
            not link.arrivals and not dispatcher.fleet.num_booked(name) for name, link in dispatcher._links.items()
        )
        await first.loop.close()
        await second.loop.close()

    asyncio.run(story())


def test_when_all_are_overloaded_the_shortest_wait_is_told() -> None:
    async def story() -> None:
        clients, dispatcher = [Refusing(5.0), Refusing(2.0), Refusing(9.0)], Dispatcher("tiny")
        for number, client in enumerate(clients):
            dispatcher.join(f"{number}", client, client.profile)
        while not all(link.is_open for link in dispatcher._links.values()):
            await asyncio.sleep(0.001)
        with pytest.raises(Overloaded) as refusal:
            await tokens(dispatcher, "it")
        assert refusal.value.retry_after == 2.0
        assert [client.num_refused for client in clients] == [1, 1, 1]
        for client in clients:
            await client.loop.close()

    asyncio.run(story())


def test_the_first_delta_says_that_a_replica_has_taken_it() -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        deltas = [delta async for delta in dispatcher.generate(Submission("it", [5] * 40, params))]
        assert [len(delta.token_ids) for delta in deltas] == [0, 1, 1]
        assert deltas[0].finish_reason is None
        await client.loop.close()

    asyncio.run(story())


def test_a_refusal_is_a_value_error_and_disturbs_nobody() -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        good = asyncio.create_task(tokens(dispatcher, "good", 100))
        with pytest.raises(ValueError, match="prompt has 300 tokens"):
            await tokens(dispatcher, "bad", prompt=300)
        assert len(await good) == 100
        await client.loop.close()

    asyncio.run(story())


def test_leaving_early_frees_pages_at_every_stage() -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
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
        await asyncio.sleep(0.05)
        assert await client.owned_pages() == 0
        await client.loop.close()

    asyncio.run(story())


def test_a_replica_that_dies_is_replaced_in_mid_stream() -> None:
    """The other goes on after the tokens that were given out: none twice, none changed, sampled ones too."""

    async def story() -> None:
        first, second, dispatcher = InProcess(), InProcess(), Dispatcher("tiny")
        dispatcher.join("first", first, first.profile)
        await ready(dispatcher)
        params = SamplingParams(max_tokens=200, temperature=0.9, seed=5, ignore_eos=True, logprobs=0)
        wanted = [t async for d in dispatcher.generate(Submission("alone", [7] * 30, params)) for t in d.token_ids]
        dispatcher.join("second", second, second.profile)
        output: list[int] = []
        async for delta in dispatcher.generate(Submission("running", [7] * 30, params)):
            assert delta.first == len(output) or not delta.token_ids
            assert len(delta.logprobs or ()) == len(delta.token_ids)
            output += delta.token_ids
            if len(output) == 50:
                victim = first if "running" in dispatcher._links["first"].arrivals else second
                victim.is_killed = True
        assert output == wanted
        dispatcher.leave("first" if victim is first else "second")
        assert len(await tokens(dispatcher, "next")) == 20
        assert "crossdock_ingress_placed_again_total 1.0" in dispatcher.metrics.text()
        await first.loop.close()
        await second.loop.close()

    asyncio.run(story())


class Withholding(InProcess):
    """Its tokens do not come before `release`; when it is killed they never come."""

    def __init__(self) -> None:
        super().__init__(role="prefill")
        self.release = asyncio.Event()

    async def messages(self) -> AsyncIterator[Message]:
        async for message in super().messages():
            if any(delta.token_ids for delta in message.deltas):
                await self.release.wait()
                if self.is_killed:
                    raise ConnectionError("killed")
            yield message


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_first_token_comes_late_or_never(is_killed: bool) -> None:
    """Prefill has shipped all, decode streams, and the first token is still on its way to the ingress, or is lost."""

    async def story() -> None:
        prefill, decode = Withholding(), InProcess(role="decode")
        dispatcher = Dispatcher("tiny", RouterConfig(shipping="always"))
        dispatcher.join("d", decode, decode.profile)
        await ready(dispatcher)
        wanted = await tokens(dispatcher, "alone")
        dispatcher.join("p", prefill, prefill.profile)
        while not all(link.is_open for link in dispatcher._links.values()):
            await asyncio.sleep(0.001)
        asking = asyncio.create_task(tokens(dispatcher, "it"))
        while not any(one["num_output_tokens"] >= 10 for one in await decode.live_requests(None)):
            await asyncio.sleep(0.001)
        prefill.is_killed = is_killed
        prefill.release.set()
        assert await asking == wanted
        assert dispatcher.metrics.placed_again._value.get() == is_killed
        for client in (prefill, decode):
            await client.loop.close()

    asyncio.run(story())


def test_everyone_hears_of_a_death() -> None:
    """Also those that have no request with it: they may keep pages from it for one that was aborted. Also one that was
    out of reach at that moment; and a replica that was lost counts as dead once Serve has given it up."""

    class Mortal(InProcess):
        def __init__(self, peer: bytes) -> None:
            super().__init__()
            self.profile = self.profile.model_copy(update={"peer": peer})
            self.heard: list[bytes] = []
            self.error: Exception = ReplicaDead("its process has ended")

        async def peer_dead(self, peer: bytes) -> None:
            self.heard.append(peer)

        async def messages(self) -> AsyncIterator[Message]:
            async for message in super().messages():
                if self.is_killed:
                    raise self.error
                yield message

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.001)

    async def story() -> None:
        dispatcher, clients = Dispatcher("tiny"), [Mortal(b"%d" % number) for number in range(4)]
        for number, client in enumerate(clients[:3]):
            dispatcher.join(f"{number}", client, client.profile)
        await until(lambda: len(dispatcher._links) == 3 and all(link.is_open for link in dispatcher._links.values()))
        clients[0].is_killed = True
        clients[0].loop.channels["test"].put([TokenDelta("nobody", [])])
        await until(lambda: all(client.heard == [b"0"] for client in clients[1:3]))
        dispatcher.join("3", clients[3], clients[3].profile)
        await until(lambda: clients[3].heard == [b"0"])
        clients[1].error, clients[1].is_killed = ConnectionError("out of reach"), True
        clients[1].loop.channels["test"].put([TokenDelta("nobody", [])])
        await until(lambda: "1" not in dispatcher._links)
        assert clients[3].heard == [b"0"]
        dispatcher.leave("1")
        await until(lambda: clients[3].heard == [b"0", b"1"])
        for client in clients:
            await client.loop.close()

    asyncio.run(story())


def test_a_replica_that_does_not_take_a_request_leaves_it_to_another() -> None:
    class Broken(InProcess):
        async def submit(self, submission: Submission) -> int:
            raise ConnectionError("it has just died")

    async def story() -> None:
        first, second, dispatcher = Broken(), InProcess(), Dispatcher("tiny", IN_TURN)
        dispatcher.join("a", first, first.profile)
        dispatcher.join("b", second, second.profile)
        while not all(link.is_open for link in dispatcher._links.values()):
            await asyncio.sleep(0.001)
        for name in ("it", "another"):
            assert len(await tokens(dispatcher, name)) == 20
        dispatcher.leave("b")
        with pytest.raises(ReplicaLost, match="a did not take the request"):
            await tokens(dispatcher, "nobody else")
        await first.loop.close()
        await second.loop.close()

    asyncio.run(story())


class Forgetful(InProcess):
    """It takes requests and forgets every other one, as if a message had been lost."""

    num_taken = 0

    async def submit(self, submission: Submission) -> int:
        sequence = await super().submit(submission)
        self.num_taken += 1
        if self.num_taken % 2:
            await self.loop.abort([submission.id])
        return sequence


class Hung(InProcess):
    """Its engine is stuck, in whatever: it says that it has the request, and nothing ever comes."""

    async def submit(self, submission: Submission) -> int:
        return 0

    async def progress(self, request_id: str) -> int | None:
        return 7


@pytest.mark.parametrize("kind", [Forgetful, Hung])
def test_a_request_of_which_nothing_is_heard_is_looked_after(
    kind: type[InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.cluster.dispatch.dispatch._PATIENCE_S", 0.2)
    monkeypatch.setattr("crossdock.cluster.dispatch.dispatch._STUCK_S", 0.3)

    async def story() -> None:
        first, second, dispatcher = kind(), InProcess(), Dispatcher("tiny", IN_TURN)
        dispatcher.join("a", first, first.profile)
        dispatcher.join("b", second, second.profile)
        while not all(link.is_open for link in dispatcher._links.values()):
            await asyncio.sleep(0.001)
        outputs = [await asyncio.wait_for(tokens(dispatcher, f"{number}"), 10) for number in range(4)]
        assert all(output == outputs[0] for output in outputs)
        assert "crossdock_ingress_placed_again_total 0.0" not in dispatcher.metrics.text()
        assert not dispatcher.deadlines
        await first.loop.close()
        await second.loop.close()

    asyncio.run(story())


def test_every_request_has_a_deadline_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas come, die, are drained, hang and forget while requests keep coming: each request in flight is looked
    after at some time soon, every one ends, and with the tokens it ends with where nothing happens."""
    patience = 0.3
    monkeypatch.setattr("crossdock.cluster.dispatch.dispatch._PATIENCE_S", patience)
    monkeypatch.setattr("crossdock.cluster.dispatch.dispatch._STUCK_S", 3.0)
    monkeypatch.setattr("crossdock.cluster.dispatch.dispatch._REJOIN_S", 0.2)
    monkeypatch.setattr(
        "crossdock.cluster.dispatch.dispatch._MOST_PLACEMENTS", 99
    )  # chance may hit one of them every time
    rng = random.Random(5)

    async def story() -> None:
        dispatcher = Dispatcher("tiny")
        up: dict[str, InProcess] = {}
        gone: list[InProcess] = []
        for name in ("first", "second"):
            up[name] = InProcess()
            dispatcher.join(name, up[name], up[name].profile)
        while not all(link.is_open for link in dispatcher._links.values()):
            await asyncio.sleep(0.001)
        wanted = await tokens(dispatcher, "wanted", 40)
        in_flight: set[str] = set()

        num_ended = 0

        async def client(number: int) -> None:
            nonlocal num_ended
            for turn in range(12):
                name = f"{number} {turn}"
                in_flight.add(name)
                try:
                    assert await tokens(dispatcher, name, 40) == wanted, name
                finally:
                    in_flight.discard(name)
                num_ended += 1

        clients = [asyncio.create_task(client(number)) for number in range(6)]
        events = 0
        while not all(it.done() for it in clients):
            await asyncio.sleep(0.02)
            now = asyncio.get_running_loop().time()
            for name in in_flight:
                assert dispatcher.deadlines[name] - now < 10.5, name  # armed, and not for later than a silent replica's
                assert dispatcher.deadlines[name] > now - 10.0, name  # and not over without a consequence
            if num_ended > 3 * events:  # as often for each request on a slow machine as on a fast one
                events += 1
                await happen(dispatcher, up, gone, f"r{events}")
        await asyncio.gather(*clients)
        assert not dispatcher.deadlines
        assert events > 10
        for replica in [*up.values(), *gone]:
            await replica.loop.close()

    async def happen(dispatcher: Dispatcher, up: dict[str, InProcess], gone: list[InProcess], name: str) -> None:
        """Something; two replicas stay that can serve."""
        sound = [it for it, replica in up.items() if type(replica) is InProcess and not replica.is_killed]
        what = rng.choice(["die", "drain", "hang", "forget"])
        if what in ("hang", "forget"):
            up[name] = Hung() if what == "hang" else Forgetful()
            dispatcher.join(name, up[name], up[name].profile)
        elif len(sound) > 2:
            victim = rng.choice(sound)
            gone.append(up[victim])
            if what == "die":
                up[victim].is_killed = True
            dispatcher.leave(victim)
            del up[victim]
        else:
            up[name] = InProcess()
            dispatcher.join(name, up[name], up[name].profile)
        for bad in [it for it, replica in up.items() if type(replica) is not InProcess][:-1]:
            dispatcher.leave(bad)
            gone.append(up.pop(bad))

    asyncio.run(story())


def test_when_the_last_replica_dies_its_requests_are_told() -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        running = asyncio.create_task(tokens(dispatcher, "running", 200))
        await asyncio.sleep(0.02)
        client.is_killed = True
        with pytest.raises(ReplicaLost, match="no replica is up"):
            await running
        dispatcher.leave("one")
        await client.loop.close()

    asyncio.run(story())


def test_a_replica_that_was_out_of_reach_is_tried_again() -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        client.is_killed = True
        with pytest.raises(ReplicaLost):
            await tokens(dispatcher, "lost")
        client.is_killed = False
        assert not dispatcher.ready()
        await ready(dispatcher)
        assert len(await tokens(dispatcher, "again")) == 20
        await client.loop.close()

    asyncio.run(story())


def test_a_replica_that_leaves_finishes_its_streams_and_is_let_go() -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        running = asyncio.create_task(tokens(dispatcher, "running", 100))
        await asyncio.sleep(0.02)
        dispatcher.leave("one")
        with pytest.raises(ReplicaLost):
            await tokens(dispatcher, "new")
        assert len(await running) == 100
        await asyncio.sleep(0.05)
        assert not client.loop.channels  # its stream is closed: nothing holds up its drain
        await client.loop.close()

    asyncio.run(story())


def test_a_step_that_raises_ends_its_requests_and_not_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        client, dispatcher = InProcess(), Dispatcher("tiny")
        dispatcher.join("one", client, client.profile)
        await ready(dispatcher)
        finish = type(client.loop.engine._runner).finish
        try:
            type(client.loop.engine._runner).finish = _fail  # type: ignore[method-assign, assignment]
            with pytest.raises(RuntimeError, match="broken on purpose"):
                await tokens(dispatcher, "bad")
        finally:
            type(client.loop.engine._runner).finish = finish  # type: ignore[method-assign]
        assert await client.owned_pages() == 0
        assert len(await tokens(dispatcher, "good")) == 20
        await client.loop.close()

    asyncio.run(story())


def _fail(*_: object) -> None:
    raise RuntimeError("broken on purpose")


def test_merged_metrics_describe_each_family_once() -> None:
    text = '# HELP a A.\n# TYPE a gauge\na 1.0\n# HELP b B.\n# TYPE b counter\nb{x="y"} 2.0\n'
    assert merge_metrics({"r1": text, "r2": text}, "replica") == (
        '# HELP a A.\n# TYPE a gauge\na{replica="r1"} 1.0\na{replica="r2"} 1.0\n'
        '# HELP b B.\n# TYPE b counter\nb{x="y",replica="r1"} 2.0\nb{x="y",replica="r2"} 2.0\n'
    )
