"""The messages of one replica, read from a TCP connection."""

import asyncio
from collections.abc import AsyncIterator
from typing import Self

from crossdock.router.actions import ReplicaLost
from crossdock.workers.report.advertise import Message
from crossdock.workers.report.frames import LENGTH, SIGN_OF_LIFE, StreamAddress, read_frame

_CONNECT_S = 5.0


class MessageStream:
    """An open connection to a replica's outlet."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

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
                yield read_frame(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            return

    def sign_of_life(self) -> None:
        """Notify the replica that this process lives. Does nothing on a closed connection."""
        if not self._writer.is_closing():
            self._writer.write(SIGN_OF_LIFE)

    def close(self) -> None:
        """Close the connection; the replica aborts the requests whose tokens it sent there."""
        self._writer.close()
