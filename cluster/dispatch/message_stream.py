"""The TCP connection to one replica: its messages, and submissions in the other direction."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from typing import Self

from crossdock.router.actions import ReplicaBroken, ReplicaLost
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.answer import Answer
from crossdock.workers.report.frames import LENGTH, SIGN_OF_LIFE, StreamAddress, read_frame, submission_frame
from crossdock.workers.schedule.request.submission import Submission

_CONNECT_S = 5.0


class MessageStream:
    """An open connection to a replica's outlet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[int]] = {}  # awaited answers, by the submission's number

    @classmethod
    async def open(cls, address: StreamAddress) -> Self:
        """Connect. Raises ReplicaLost if the address cannot be reached."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError as error:
            raise ReplicaLost(f"the replica's port {address.port} at {address.host} cannot be reached") from error
        writer.write(address.ticket)
        return cls(reader, writer)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the messages until the connection ends, for whatever reason."""
        try:
            while True:
                (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
                message = read_frame(await self._reader.readexactly(length))
                for answer in message.answers:
                    self._settle(answer)
                yield message
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            for awaited in self._answers.values():
                if not awaited.done():
                    awaited.set_exception(ReplicaBroken("the connection to its process broke"))

    async def submit(self, submission: Submission) -> int:
        """Send a submission, and return what `EngineThread.submit` returns.

        Raises what the replica refuses it with, and ReplicaBroken where the connection ends before the answer.
        """
        if self._writer.is_closing():
            raise ReplicaBroken("the connection to its process broke")
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._writer.write(submission_frame(number, submission))
            return await answer
        finally:
            del self._answers[number]

    def _settle(self, answer: Answer) -> None:
        awaited = self._answers.get(answer.number)
        if awaited is None or awaited.done():  # its request has left
            return
        if answer.refusal is not None:
            awaited.set_exception(answer.refusal.error())
        else:
            awaited.set_result(answer.sequence)

    def sign_of_life(self) -> None:
        """Notify the replica that this process lives. Does nothing on a closed connection."""
        if not self._writer.is_closing():
            self._writer.write(SIGN_OF_LIFE)

    def close(self) -> None:
        """Close the connection; the replica aborts the requests whose tokens it sent there."""
        self._writer.close()
