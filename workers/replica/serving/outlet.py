"""A replica's messages to its ingresses over plain TCP, and their submissions: a call of Ray costs both a millisecond.

Ray still carries the beginning and the end of each stream: a call of `messages` gives the ingress an address with a
ticket for one connection, and lasts as long as that connection. So Serve counts an open stream as running work, and an
ingress learns from Ray why a stream has ended.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from msgspec import DecodeError

from crossdock.workers.replica.serving.engine_thread import EngineThread
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.answer import Answer, Refusal
from crossdock.workers.report.frames import LENGTH, TICKET_BYTES, StreamAddress, frame, read_submission
from crossdock.workers.schedule.request.submission import Submission

logger = logging.getLogger("ray.serve")

Submit: TypeAlias = Callable[[str, Submission], Awaitable[int | Exception]]

_CONNECT_S = 10.0  # for an ingress to connect, and to show its ticket
_MOST_STRANGERS = 64  # connections without a ticket so far; the oldest makes way for another one


@dataclass(slots=True, eq=False)
class _Stream:
    """The stream of one ingress, from its ticket to its end."""

    ingress: str
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)


class Outlet:
    """Listens at `host`, on any free port, for ingresses with a ticket. Belongs to one event loop."""

    def __init__(self, thread: EngineThread, host: str, submit: Submit) -> None:
        """`submit`: takes a submission of an ingress; returns what `EngineThread.submit` does, or why it is refused."""
        self._thread = thread
        self._host = host
        self._submit = submit
        self._expected: dict[bytes, _Stream] = {}  # by ticket
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begin to listen. Raises OSError if `host` is no address of this machine."""
        self._server = await asyncio.start_server(self._serve, self._host, 0)

    async def close(self) -> None:
        """Listen no more. Streams that are open go on."""
        if self._server is not None:
            self._server.close()

    async def messages(self, ingress: str) -> AsyncIterator[StreamAddress]:
        """Yield the address of the messages of an ingress, and end with its connection there."""
        assert self._server is not None
        stream = _Stream(ingress)
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._expected[ticket] = stream
        try:
            yield StreamAddress(self._host, self._server.sockets[0].getsockname()[1], ticket)
            async with asyncio.timeout(_CONNECT_S):
                await stream.has_begun.wait()
            await stream.has_ended.wait()
        finally:
            self._expected.pop(ticket, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = await self._stream_of(reader, writer)
        try:
            if stream is not None:
                await self._stream(stream.ingress, reader, writer)
        finally:
            writer.close()
            if stream is not None:
                stream.has_ended.set()

    async def _stream_of(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Stream | None:
        """Return the stream whose ticket a connection shows; None if it shows none in time."""
        if len(self._strangers) == _MOST_STRANGERS:  # an ingress shows its ticket at once: the oldest is none
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            async with asyncio.timeout(_CONNECT_S):
                stream = self._expected.pop(await reader.readexactly(TICKET_BYTES), None)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            return None
        finally:
            self._strangers.pop(writer, None)
        if stream is not None:
            stream.has_begun.set()
        return stream

    async def _stream(self, ingress: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send the messages of an ingress until they end, or the ingress closes the connection."""
        sending = self._send(ingress, writer)
        hearing = self._hear(ingress, reader, writer)
        both = asyncio.create_task(sending), asyncio.create_task(hearing)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            for error in await asyncio.gather(*both, return_exceptions=True):
                if isinstance(error, Exception) and not isinstance(error, OSError):  # the ingress sees its stream end
                    logger.error("the stream to an ingress has failed", exc_info=error)

    async def _send(self, ingress: str, writer: asyncio.StreamWriter) -> None:
        async with aclosing(cast(AsyncGenerator[Message, None], self._thread.messages(ingress))) as messages:
            async for message in messages:
                writer.write(frame(message))
                await writer.drain()  # meanwhile the channel merges the messages of further steps

    async def _hear(self, ingress: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take the submissions of an ingress. Those that have no answer when the connection ends are given up."""
        answering = set[asyncio.Task[None]]()
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                content = await reader.readexactly(length)
                self._thread.heard(ingress)
                if content:
                    task = asyncio.create_task(self._answer(ingress, *read_submission(content), writer))
                    answering.add(task)
                    task.add_done_callback(answering.discard)
        except (OSError, asyncio.IncompleteReadError):
            return
        except DecodeError as error:
            logger.error("an ingress sent what is no submission: %s", error)
        finally:
            for task in answering:
                task.cancel()

    async def _answer(self, ingress: str, number: int, submission: Submission, writer: asyncio.StreamWriter) -> None:
        try:
            result = await self._submit(ingress, submission)
        except Exception as error:
            logger.exception("a submission failed")
            result = error
        answer = Answer(number, result) if isinstance(result, int) else Answer(number, refusal=Refusal.of(result))
        if not writer.is_closing():
            writer.write(frame(Message(answers=[answer])))
