"""Bodies of requests: read whole, within bounds on size and time, and on all of them together."""

import asyncio
from contextlib import suppress

from starlette.types import Message, Receive

from crossdock.cluster.api.errors import ApiError

SILENCE_S = 30.0  # longest wait for the next part of a body
LEAST_BYTES_PER_S = 4096  # of a body that takes longer than that
HELD_BODIES = 8  # of the largest size: the memory of all bodies that were begun and not yet taken by the application
_SMALL = 1 << 16  # bytes; bodies up to this size are read however many others there are
_DISCARD_S = 10.0  # longest wait for the rest of a body that is too large
_LENGTH_DIGITS = 20  # of a Content-Length that are read: a hundred thousand petabytes
_CLOSE = {"Connection": "close"}
_LATER = {"Retry-After": "1", **_CLOSE}


class RequestBody:
    """One body. It counts until the application has taken it, or `release`."""

    def __init__(self, bodies: "RequestBodies") -> None:
        self.size = 0
        self._bodies = bodies
        self._parts: list[bytes] = []

    def add(self, part: bytes) -> None:
        self._parts.append(part)
        self.size += len(part)
        self._bodies.num_held += len(part)

    def release(self) -> None:
        self._bodies.num_held -= self.size
        self.size = 0
        self._parts.clear()

    async def receive(self) -> Message:
        """Give the application the whole body, then nothing."""
        if not self._parts:
            await asyncio.get_running_loop().create_future()  # for ever
        content = b"".join(self._parts)
        self.release()
        return {"type": "http.request", "body": content, "more_body": False}


class RequestBodies:
    """The bodies of one ingress."""

    def __init__(self, max_bytes: int) -> None:
        self.num_held = 0  # bytes
        self._max_bytes = max_bytes

    async def read(self, headers: dict[bytes, bytes], receive: Receive) -> RequestBody | None:
        """Read a whole body. Returns None if the client has left.

        A body over the limit is refused as soon as that is known. What the client still sends is discarded first, up
        to twice the limit: most clients read no answer before they have sent everything, and would see a reset.

        Raises:
            ApiError: 413 it is too large; 408 it comes too slowly; 503 there are too many large bodies at once.
        """
        length = headers.get(b"content-length", b"")
        announced = int(length[:_LENGTH_DIGITS]) if length.isdigit() else 0
        began = asyncio.get_running_loop().time()
        body, is_whole = RequestBody(self), False
        try:
            while max(announced, body.size) <= self._max_bytes and not is_whole:
                message = await _next(receive, began + SILENCE_S + body.size / LEAST_BYTES_PER_S)
                if message["type"] == "http.disconnect":
                    body.release()
                    return None
                body.add(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if body.size > _SMALL and self.num_held > HELD_BODIES * self._max_bytes:
                    reason = "Too many large bodies arrive at once. Try again."
                    raise ApiError(reason, status=503, kind="server_error", code="too_many_bodies", headers=_LATER)
            if max(announced, body.size) > self._max_bytes:
                left = 2 * self._max_bytes - body.size
                body.release()
                if not is_whole and announced <= 2 * self._max_bytes and b"expect" not in headers:
                    await _discard(receive, left)
                reason = f"The body is larger than {self._max_bytes} bytes."
                raise ApiError(reason, status=413, code="request_too_large", headers=_CLOSE)
        except BaseException:
            body.release()
            raise
        return body


async def _next(receive: Receive, deadline: float) -> Message:
    """Return the next part of a body. Raises ApiError 408 if it comes too late, or the body as a whole does."""
    now = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(min(SILENCE_S, deadline - now)):
            return await receive()
    except TimeoutError:
        bounds = f"no part for {SILENCE_S:.0f} s, or fewer than {LEAST_BYTES_PER_S} bytes a second"
        reason = f"The body arrives too slowly: {bounds}."
        raise ApiError(reason, status=408, code="request_timeout", headers=_CLOSE) from None


async def _discard(receive: Receive, most: int) -> None:
    """Read the rest of a body, up to `most` bytes and for a limited time, without keeping it."""
    left = most
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):  # the end, or the client has left
                    return
