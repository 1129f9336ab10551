"""The two ends of a replica's messages, between an engine and this process: the outlet and the stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import cast

import pytest

from crossdock.cluster.dispatch.message_stream import MessageStream
from crossdock.router.actions import ReplicaLost
from crossdock.workers.replica.serving import outlet
from crossdock.workers.replica.serving.outlet import Outlet
from crossdock.workers.report.frames import TICKET_BYTES, StreamAddress
from crossdock.workers.schedule.submission import SamplingParams, Submission
from tests.waiting import until
from tests.workers.replica.driven import Driven, driving

HOST = "127.0.0.1"


def work(max_tokens: int) -> Submission:
    return Submission("r", [5] * 40, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


@asynccontextmanager
async def opening(driven: Driven) -> AsyncGenerator[tuple[StreamAddress, "asyncio.Task[None]"], None]:
    """Open an outlet for the ingress `other`. Yields the address, and the call that lasts as long as the stream."""
    own = Outlet(driven.thread, HOST)
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
        await driven.thread.submit("other", work(20))
        tokens = list[int]()
        async with asyncio.timeout(30):
            async for message in messages:
                tokens += [token for delta in message.deltas for token in delta.token_ids]
                if any(delta.finish_reason for delta in message.deltas):
                    break
        assert len(tokens) == 20
        assert not lasting.done()
        stream.close()
        async with asyncio.timeout(30):
            await lasting


async def test_requests_of_an_ingress_that_is_gone_are_aborted_at_once() -> None:
    async with driving() as driven, opening(driven) as (address, lasting):
        stream = await MessageStream.open(address)
        await anext(stream.messages())
        await driven.thread.submit("other", work(2_000))
        stream.close()  # as the kernel does for a process that was killed
        async with asyncio.timeout(30):
            await lasting
        assert "other" not in driven.thread.channels

        async def is_gone() -> bool:
            return await driven.thread.progress("r", 0) is None

        await until(is_gone)


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
        async with asyncio.timeout(30):
            assert [message async for message in stream.messages()] == []
        assert "other" not in driven.thread.channels


async def test_strangers_that_say_nothing_leave_place_for_an_ingress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet, "_MOST_STRANGERS", 3)
    async with driving() as driven, opening(driven) as (address, _):
        strangers = [await MessageStream.open(address._replace(ticket=b"")) for _ in range(5)]
        stream = await MessageStream.open(address)
        async with asyncio.timeout(5):  # a stranger has 10 s
            await anext(stream.messages())
        for each in (*strangers, stream):
            each.close()


async def test_ticket_is_for_one_connection() -> None:
    async with driving() as driven, opening(driven) as (address, _):
        first = await MessageStream.open(address)
        await anext(first.messages())
        again = await MessageStream.open(address)
        async with asyncio.timeout(30):
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
