"""The two ends of a replica's connection, between an engine and this process: the outlet and the stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import cast

import pytest

from crossdock.cluster.dispatch.message_stream import MessageStream
from crossdock.router.actions import ReplicaBroken, ReplicaLost
from crossdock.workers.replica.serving import outlet
from crossdock.workers.replica.serving.outlet import Outlet, Submit
from crossdock.workers.report.frames import LENGTH, TICKET_BYTES, StreamAddress
from crossdock.workers.schedule.request.submission import InvalidField, Overloaded, SamplingParams, Submission
from tests.waiting import until
from tests.workers.replica.driven import Driven, driving

HOST = "127.0.0.1"


def work(max_tokens: int) -> Submission:
    return Submission("r", [5] * 40, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


@asynccontextmanager
async def opening(
    driven: Driven, submit: Submit | None = None
) -> AsyncGenerator[tuple[StreamAddress, "asyncio.Task[None]"], None]:
    """Open an outlet for the ingress `other`. Yields the address, and the call that lasts as long as the stream."""
    own = Outlet(driven.thread, HOST, submit or driven.thread.submit)
    await own.open()
    async with aclosing(cast(AsyncGenerator[StreamAddress, None], own.messages("other"))) as call:
        address = await anext(call)
        lasting = asyncio.create_task(_rest(call))
        yield address, lasting
        lasting.cancel()
        await asyncio.gather(lasting, return_exceptions=True)
    await own.close()


async def _rest(call: AsyncGenerator[StreamAddress, None]) -> None:
    async for _ in call:
        raise AssertionError("one address alone")


async def test_ingress_reads_all_tokens_of_its_requests() -> None:
    async with driving() as driven, opening(driven) as (address, lasting):
        stream = await MessageStream.open(address)
        messages = stream.messages()
        assert not (await anext(messages)).deltas
        submitting = asyncio.create_task(stream.submit(work(20)))
        tokens = list[int]()
        async with asyncio.timeout(240):
            async for message in messages:
                tokens += [token for delta in message.deltas for token in delta.token_ids]
                if any(delta.finish_reason for delta in message.deltas):
                    break
        assert len(tokens) == 20
        assert await submitting >= 0
        assert not lasting.done()
        stream.close()
        async with asyncio.timeout(240):
            await lasting


async def test_requests_of_an_ingress_that_is_gone_are_aborted_at_once() -> None:
    async with driving() as driven, opening(driven) as (address, lasting):
        stream = await MessageStream.open(address)
        await anext(stream.messages())
        await driven.thread.submit("other", work(2_000))
        stream.close()  # as the kernel does for a process that was killed
        async with asyncio.timeout(240):
            await lasting
        assert "other" not in driven.thread.channels

        async def is_gone() -> bool:
            return await driven.thread.progress([("r", 0)]) == [None]

        await until(is_gone)


@asynccontextmanager
async def reading(stream: MessageStream) -> AsyncGenerator[None, None]:
    """Read the messages of a stream beside the body."""

    async def read() -> None:
        async for _ in stream.messages():
            pass

    task = asyncio.create_task(read())
    yield
    stream.close()
    async with asyncio.timeout(240):
        await task


async def test_each_submission_gets_its_own_answer_whatever_the_order() -> None:
    refusals = {
        "full": Overloaded("full", retry_after=2.0),
        "field": InvalidField("too long", "prompt"),
        "value": UnicodeError("not so"),
        "ended": RuntimeError("ended"),
    }
    may_answer = {name: asyncio.Event() for name in (*refusals, "taken")}

    async def submit(ingress: str, submission: Submission) -> int | Exception:
        await may_answer[submission.id].wait()
        return refusals.get(submission.id, 7)

    async with driving() as driven, opening(driven, submit) as (address, _):
        stream = await MessageStream.open(address)
        async with reading(stream):
            asked = {name: asyncio.create_task(stream.submit(Submission(name, [5]))) for name in may_answer}
            left = asyncio.create_task(stream.submit(Submission("taken", [5])))
            await asyncio.sleep(0)
            left.cancel()  # an answer without a reader disturbs no other
            found = dict[str, object]()
            for name in reversed(may_answer):
                may_answer[name].set()
                async with asyncio.timeout(240):
                    (found[name],) = await asyncio.gather(asked[name], return_exceptions=True)
    assert found["taken"] == 7
    for name, refusal in refusals.items():
        assert str(found[name]) == str(refusal)
    assert isinstance(found["full"], Overloaded)
    assert found["full"].retry_after == 2.0
    assert isinstance(found["field"], InvalidField)
    assert found["field"].field == "prompt"
    assert type(found["value"]) is ValueError
    assert type(found["ended"]) is RuntimeError


async def test_submission_without_an_answer_ends_with_the_connection() -> None:
    given_up = asyncio.Event()

    async def submit(ingress: str, submission: Submission) -> int | Exception:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            given_up.set()

    async with driving() as driven, opening(driven, submit) as (address, lasting):
        stream = await MessageStream.open(address)
        async with reading(stream):
            submitting = asyncio.create_task(stream.submit(work(1)))
            await asyncio.sleep(0)
        with pytest.raises(ReplicaBroken):
            await submitting
        async with asyncio.timeout(240):
            await given_up.wait()
            await lasting
        with pytest.raises(ReplicaBroken):
            await stream.submit(work(1))


async def test_bytes_that_are_no_submission_end_the_connection() -> None:
    async with driving() as driven, opening(driven) as (address, lasting):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(address.ticket + LENGTH.pack(3) + b"abc")
        async with asyncio.timeout(240):
            await lasting
        writer.close()
        del reader


async def test_sign_of_life_is_heard() -> None:
    async with driving() as driven, opening(driven) as (address, _):
        stream = await MessageStream.open(address)
        await anext(stream.messages())
        channel = driven.thread.channels["other"]
        channel.heard_at = heard_at = channel.heard_at - 20
        stream.sign_of_life()
        await until(lambda: channel.heard_at > heard_at)
        stream.close()


@pytest.mark.parametrize("ticket", [b"", b"\0" * TICKET_BYTES, b"GET / HTTP/1.1\r\nHost: somebody's\r\n\r\n"])
async def test_stranger_gets_no_messages(ticket: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "_CONNECT_S", 0.2)
    async with driving() as driven, opening(driven) as (address, _):
        stream = await MessageStream.open(address._replace(ticket=ticket))
        async with asyncio.timeout(240):
            assert [message async for message in stream.messages()] == []
        assert "other" not in driven.thread.channels


async def test_strangers_that_say_nothing_leave_place_for_an_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "_MOST_STRANGERS", 3)
    monkeypatch.setattr(outlet, "_CONNECT_S", 3600.0)
    async with driving() as driven, opening(driven) as (address, _):
        strangers = [await MessageStream.open(address._replace(ticket=b"")) for _ in range(5)]
        stream = await MessageStream.open(address)
        async with asyncio.timeout(240):  # a stranger has an hour
            await anext(stream.messages())
        for each in (*strangers, stream):
            each.close()


async def test_ticket_is_for_one_connection() -> None:
    async with driving() as driven, opening(driven) as (address, _):
        first = await MessageStream.open(address)
        await anext(first.messages())
        again = await MessageStream.open(address)
        async with asyncio.timeout(240):
            assert [message async for message in again.messages()] == []
        assert "other" in driven.thread.channels
        first.close()


async def test_call_of_an_ingress_that_does_not_connect_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "_CONNECT_S", 0.05)
    async with driving() as driven, opening(driven) as (_, lasting):
        with pytest.raises(TimeoutError):
            await lasting


async def test_port_that_nobody_listens_at_is_a_lost_replica() -> None:
    async with driving() as driven:
        async with opening(driven) as (address, _):
            pass
        with pytest.raises(ReplicaLost, match="cannot be reached"):
            await MessageStream.open(address)
