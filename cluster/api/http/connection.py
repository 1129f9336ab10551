"""One connection of an ingress's own listener: uvicorn's protocol, with bounds on time, bytes and number."""

import asyncio
import sys
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Self

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from crossdock.cluster.api.errors import ApiError
from crossdock.workers.schedule.shares import Shares

STRANGERS = "strangers"  # the owner of connections that have shown no valid key; owners have names of 32 digits
MAX_HEAD_BYTES = 64 << 10  # of request line and headers together, or of trailers; the parser has no limit
HEAD_TIMEOUT_S = 30.0  # in which they must have arrived
CLOSING_S = 2.0  # after the listener has closed: for the first request of a new connection, or for its client to end it
LINGER_S = 10.0  # an ended connection is read on for so long: a client that is still sending reads no answer
LINGER_BYTES = 64 << 20  # … and for at most so many bytes
# bytes that may wait for the client before the answer does; events of one step are sent together
_UNSENT_BYTES = 8 << 10
_PIECE = 16 << 10  # bytes parsed at a time; a head may be larger than its bound by one piece


class Connections:
    """The connections of one listener, each of one owner: of the key that it has shown, or strangers.

    Owners have shares of the places. Where an owner's are taken, its oldest connection that waits for a request makes
    way; of strangers the oldest makes way whatever it does, so that they never keep the holder of a key out.
    """

    def __init__(self, most: int, write_timeout_s: float, *, has_keys: bool = False) -> None:
        """`most`: connections at once. `write_timeout_s`: how long a client may read nothing of its answer.

        `has_keys`: clients show API keys. Else all are one owner, which may have all places.
        """
        self.write_timeout_s = write_timeout_s
        self.is_closing = False  # the listener accepts no further connection
        self._shares = Shares(most)
        self._first_owner = STRANGERS if has_keys else ""
        self._owners: dict[BoundedConnection, str] = {}  # of all open connections
        self._open: defaultdict[str, dict[BoundedConnection, None]] = defaultdict(dict)  # by owner; the oldest first
        self._waiting: defaultdict[str, dict[BoundedConnection, None]] = defaultdict(dict)  # … those without a request

    def protocol(self, **options: Any) -> "BoundedConnection":
        """Return the protocol of a new connection. `options`: uvicorn's."""
        return BoundedConnection(self, **options)

    def opened(self, connection: "BoundedConnection") -> bool:
        """Add a connection. Returns False if there are too many, and none makes way."""
        return self._move(connection, self._first_owner)

    def shows_key(self, connection: "BoundedConnection", owner: str) -> bool:
        """Count a connection for the owner of its newest request. Returns False if the owner has too many."""
        had = self._owners.get(connection)
        return had in (owner, None, "") or self._move(connection, owner)  # None: it has ended

    def _move(self, connection: "BoundedConnection", owner: str) -> bool:
        if self._shares.room(owner, freed=connection in self._owners) < 1:
            makes_way = self._open if owner == STRANGERS else self._waiting
            oldest = next(iter(makes_way[owner]), None)
            if oldest is None:
                return False
            oldest.drop()
        self.closed(connection)
        self._shares.take(owner, 1)
        self._owners[connection] = owner
        self._open[owner][connection] = None
        return True

    def closed(self, connection: "BoundedConnection") -> None:
        """Free the place of a connection, if it has one."""
        owner = self._owners.pop(connection, None)
        if owner is not None:
            self._shares.release(owner, 1)
            for each in (self._open, self._waiting):
                each[owner].pop(connection, None)
                if not each[owner]:
                    del each[owner]

    def waits(self, connection: "BoundedConnection", is_waiting: bool) -> None:
        """Say whether a connection waits for a request."""
        owner = self._owners.get(connection)
        if owner is not None:
            self._waiting[owner].pop(connection, None)
            if is_waiting:
                self._waiting[owner][connection] = None


class BoundedConnection(HttpToolsProtocol):
    """Ends a connection whose head is too large or no HTTP, whose next request does not come, or that reads nothing.

    Every refusal is an answer in OpenAI's shape.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._connections = connections
        self._has_request = False  # one has come
        self._is_in_head = False
        self._is_in_body = False
        self._is_over = False  # what still arrives is discarded
        self._is_ended = False  # the last answer has been sent
        self._head_bytes = 0
        self._has_body_come = False  # since a piece was parsed before
        self._bytes_beside_body = 0  # in pieces without any part of a body: trailers
        self._discarded = 0
        self._unsent = 0  # bytes that waited for the client when that was last looked at
        self._unanswered: deque[RequestResponseCycle] = deque()  # the requests in progress, in order
        self._refusal: ApiError | None = None  # sent after their answers
        self._asks_for_upgrade = False  # the head that was parsed last
        self._late: asyncio.TimerHandle | None = None  # the request does not come
        self._stuck: asyncio.TimerHandle | None = None  # the client does not read

    # -- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(_UNSENT_BYTES, 0)
        if self._connections.opened(self):
            self._wait_for_head()
        else:
            reason = "The server has too many connections. Try again later."
            self._refuse(ApiError(reason, status=503, code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        self._end_head()
        self._end_stuck()
        for cycle in self._unanswered:  # uvicorn knows the newest alone
            cycle.transport.gone()  # type: ignore[attr-defined]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            if self._is_over:
                self._discard(len(data) - start)
                return
            self._parse(data[start : start + _PIECE])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._end_stuck()
        super().resume_writing()

    # -- the parser's callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._wait_for_head()
        self._head_bytes = 0
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if (version := self.parser.get_http_version()) not in ("1.0", "1.1"):
            raise _wrong_version()
        self._asks_for_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._asks_for_upgrade:
            return
        self._end_head()
        self._has_request = self._is_in_body = True
        self._bytes_beside_body = 0
        self.scope["state"]["show_key"] = partial(self._connections.shows_key, self)
        super().on_headers_complete()
        if self._connections.is_closing:
            self.cycle.keep_alive = False
        self._unanswered.append(self.cycle)
        self.scope["state"]["event_writer"] = transport = AnswerTransport(self, self.cycle, self._linger)
        self.cycle.transport = transport  # type: ignore[assignment]
        if version == "1.0":
            self.cycle.send = partial(_send_until_close, self.cycle, self.cycle.send)  # type: ignore[method-assign]
        if self.parser.should_upgrade():
            # A CONNECT: what follows its head is no HTTP.
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._has_body_come = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft().transport.flush()  # type: ignore[attr-defined]
        if self._is_ended:  # with this answer: requests behind it get none
            self._unanswered.clear()
            self.pipeline.clear()
            return
        super().on_response_complete()
        if not self._unanswered:
            self._connections.waits(self, True)
            if self._refusal is not None and not self.transport.is_closing():
                self._refuse_now(self._refusal)

    # -- incoming ----------------------------------------------------------------------------------------------------

    def _parse(self, piece: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self._feed(piece)
        except httptools.HttpParserError:
            self._refuse(_refusal(sys.exception()))
        if self._is_over:
            return
        if self._is_in_head:
            self._head_bytes += len(piece)
        elif self._is_in_body:
            self._bytes_beside_body = 0 if self._has_body_come else self._bytes_beside_body + len(piece)
            self._has_body_come = False
        if max(self._head_bytes, self._bytes_beside_body) > MAX_HEAD_BYTES:
            reason = f"The request line and headers, or the trailers, have more than {MAX_HEAD_BYTES} bytes."
            self._refuse(ApiError(reason, status=431, code="headers_too_large"))
        elif self._late is None and (self.cycle is None or self.cycle.response_complete):
            self._wait_for_head()  # an empty line, or the rest of an answered body, has ended uvicorn's own wait

    def _feed(self, piece: bytes) -> None:
        """Parse bytes. A head that asks for an upgrade is parsed again without that wish (RFC 9110, 7.8).

        The parser skips the body of such a request, and takes what follows for another protocol.
        """
        while piece:
            try:
                self.parser.feed_data(piece)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._asks_for_upgrade:
                    return
                piece = piece[upgrade.args[0] :]
            method = self.parser.get_method()
            version = self.parser.get_http_version().encode()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(_head_without_upgrade(method, self.url, version, self.headers))

    def _discard(self, num_bytes: int) -> None:
        self._discarded += num_bytes
        if self._discarded > LINGER_BYTES:
            self.transport.abort()

    def _wait_for_head(self) -> None:
        self._end_head()
        self._connections.waits(self, True)
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._close)

    def _end_head(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        self._connections.waits(self, False)
        self._end_late()

    def _end_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # -- the end -----------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Refuse bytes that are no request, after the answers to earlier requests, and end the connection."""
        self._is_over = True
        newest = self._unanswered[-1] if self._unanswered else None
        if newest is not None and newest.more_body:  # its body is broken
            newest.keep_alive = False
            if not newest.response_started:
                self._unanswered.pop()
                newest.transport.gone()  # type: ignore[attr-defined]
                if self._unanswered:
                    self.pipeline.popleft()
        if self._unanswered:
            self._refusal = error
        else:
            self._refuse_now(error)

    def _refuse_now(self, error: ApiError) -> None:
        self.transport.write(_written(error))
        self._linger()

    def shutdown(self) -> None:
        """End the connection after its running request: the listener closes. A new connection may send one request."""
        if not (self._has_request or self._is_over):
            self._end_late()
            self._late = self.loop.call_later(CLOSING_S, self._close)
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Close the connection once the client has read all written bytes, or has not read them in time."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self._connections.write_timeout_s, self.transport.abort)

    def _linger(self) -> None:
        """End the sending side after the last answer, and discard for a while what the client still sends.

        To close at once would reset the connection if it sends more, and its kernel might drop the answer.
        """
        self._is_over = self._is_ended = True
        self._end_head()
        self._connections.waits(self, True)
        self.flow.resume_reading()
        self.transport.write_eof()
        seconds = CLOSING_S if self._connections.is_closing else LINGER_S
        self._late = self.loop.call_later(seconds, self.transport.abort)

    def drop(self) -> None:
        """End the connection without an answer: it waits for a request, and another client needs its place."""
        self._connections.closed(self)
        self.transport.abort()

    def _wait_for_reader(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(self._connections.write_timeout_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        """End the connection of a client that has read nothing since the last look; its request is aborted."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _end_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None


class AnswerTransport:
    """The transport as uvicorn's cycle of one answer uses it. `end` is called instead of closing it.

    The writes of one turn of the event loop go to the socket together: the head and the first event, the last ones.
    All events of a streamed answer leave here, past uvicorn's `send`. Implements `EventWriter`.
    """

    __slots__ = ("_cycle", "_end", "_flow", "_left", "_loop", "_num_bytes", "_parts", "_transport", "is_closing")

    def __init__(self, connection: BoundedConnection, cycle: RequestResponseCycle, end: Callable[[], None]) -> None:
        self._transport = connection.transport
        self._loop = connection.loop
        self._flow = connection.flow
        self._cycle = cycle
        self._end = end
        self._left: Callable[[], None] | None = None  # to call when the client leaves
        self._parts: list[bytes] = []  # not written yet
        self._num_bytes = 0  # in these
        self.is_closing = self._transport.is_closing

    def write(self, part: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(part)
        self._num_bytes += len(part)
        if self._num_bytes > _UNSENT_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the parts of this turn."""
        if self._parts and not self.is_closing():
            self._transport.write(b"".join(self._parts))
        self._parts.clear()
        self._num_bytes = 0

    def close(self) -> None:
        self.flush()
        self._end()

    @property
    def has_body(self) -> bool:
        """Whether the whole body of the request has come."""
        return not self._cycle.more_body

    def when_gone(self, left: Callable[[], None]) -> Self:
        """Read on behind the request, and call `left` when the client leaves, until `cancel`."""
        self._left = left
        self._flow.resume_reading()
        if self._cycle.disconnected:
            self._loop.call_soon(self.gone)
        return self

    def cancel(self) -> None:
        self._left = None

    def gone(self) -> None:
        """Have the application see that the client has left."""
        self._cycle.disconnected = True
        self._cycle.message_event.set()
        if self._left is not None:
            self._left()

    def is_ready(self) -> bool:
        has_begun = self._cycle.chunked_encoding  # set with the head, which waits for the first event
        return bool(has_begun) and not (self._flow.write_paused or self.is_closing())

    def write_event(self, event: bytes) -> None:
        """Write an event of a stream that has begun, at once: no other bytes of the answer follow in this turn."""
        self.flush()
        self._transport.write(_chunk(event))

    async def send_event(self, event: bytes) -> None:
        """Write an event once the client reads, together with what else this turn writes.

        It is a chunk of the body, or bytes as they are to a client of HTTP/1.0: as uvicorn's `send` writes a part.
        """
        if self._flow.write_paused and not self._cycle.disconnected:
            await self._flow.drain()
        if not self._cycle.disconnected:
            self.write(_chunk(event) if self._cycle.chunked_encoding else event)


async def _send_until_close(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: dict[str, Any]
) -> None:
    """Send a part of an answer to a client of HTTP/1.0, which knows no chunks (RFC 9112, 6.1).

    Where the answer has no length, it ends with the connection. uvicorn always closes these connections.
    """
    if message["type"] == "http.response.start":
        has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
        cycle.chunked_encoding = None if has_length else False
    elif not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


def _head_without_upgrade(method: bytes, url: bytes, version: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request without its wish to go on in another protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version)]
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in (b"upgrade", b"http2-settings"))
        if name != b"upgrade":
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


def _refusal(error: BaseException | None) -> ApiError:
    """Return the client's error for one of the parser's."""
    if isinstance(error, httptools.HttpParserCallbackError) and isinstance(error.__context__, ApiError):
        return error.__context__
    if str(error) in ("Invalid HTTP version", "Pause on PRI/Upgrade"):
        return _wrong_version()
    match error:
        case httptools.HttpParserInvalidMethodError():
            detail = "the request line begins with no known method"
        case httptools.HttpParserInvalidURLError() | httptools.HttpParserCallbackError():
            detail = "the request line has no valid target"
        case _:
            detail = str(error)[:1].lower() + str(error)[1:]
    return ApiError(f"This is no valid HTTP/1.1 request: {detail}.", code="invalid_http")


def _wrong_version() -> ApiError:
    return ApiError("Only HTTP/1.1 and 1.0 are spoken here.", status=505, code="http_version_not_supported")


def _written(error: ApiError) -> bytes:
    """Return an error as an HTTP answer that ends the connection."""
    body = error.body()
    status = HTTPStatus(error.status)
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
