"""Bodies of requests: read whole, within bounds on size, time and memory."""

import asyncio
from contextlib import suppress

from starlette.types import Message, Receive

from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.request_memory import RequestMemory

SILENCE_S = 30.0  # longest wait for the next part of a body
LEAST_BYTES_PER_S = 4096  # of a body that takes longer than that
LONGEST_S = 300.0  # from the first byte of a body to its last, however large it is: 20 MiB at 560 kbit/s
_DISCARD_S = 10.0  # longest wait for the rest of a body that is too large
_LENGTH_DIGITS = 20  # of a Content-Length that are read: a hundred thousand petabytes
_CLOSE = {"Connection": "close"}


def check_no_body(headers: dict[bytes, bytes]) -> None:
    """Raise ApiError 413 for a request with a body, which is not read: the path is open and its client unknown."""
    if headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers:
        reason = "This path answers without an API key, so it takes no body. Send none."
        raise ApiError(reason, status=413, code="request_too_large", headers=_CLOSE)


def check_coding(headers: dict[bytes, bytes]) -> None:
    """Raise ApiError 415 for a compressed body: its size would say nothing about that of its content."""
    coding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    if coding not in ("", "identity"):
        reason = f"Unsupported content encoding {coding[:100]!r}: send the body without compression."
        raise ApiError(
            reason, status=415, code="unsupported_media_type", headers={**_CLOSE, "Accept-Encoding": "identity"}
        )


async def read_body(
    headers: dict[bytes, bytes], receive: Receive, max_bytes: int, memory: RequestMemory, *, has_come: bool = False
) -> Receive | None:
    """Read a whole body, and return a channel that gives it once; None if the client has left.

    `has_come`: all of the body is here, so that no clock is needed.

    A body over the limit is refused as soon as that is known. What the client still sends is discarded first, up
    to twice the limit: most clients read no answer before they have sent everything, and would see a reset.

    Raises:
        ApiError: 413 it is too large; 408 it comes too slowly; 429 there are too many large bodies.
    """
    length = headers.get(b"content-length", b"")
    announced = int(length[:_LENGTH_DIGITS]) if length.isdigit() else 0
    began = asyncio.get_running_loop().time()
    parts: list[bytes] = []
    size = 0
    is_whole = False
    if announced <= max_bytes:
        memory.announce(announced)
    while max(announced, size) <= max_bytes and not is_whole:
        deadline = began + min(LONGEST_S, SILENCE_S + size / LEAST_BYTES_PER_S)
        message = await (receive() if has_come else _next(receive, deadline))
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        memory.hold(len(parts[-1]))
        is_whole = not message.get("more_body", False)
    if max(announced, size) > max_bytes:
        memory.release()
        parts.clear()
        if not is_whole and announced <= 2 * max_bytes and b"expect" not in headers:
            await _discard(receive, 2 * max_bytes - size)
        reason = f"The body is larger than {max_bytes} bytes."
        raise ApiError(reason, status=413, code="request_too_large", headers=_CLOSE)

    async def give() -> Message:
        """Give the application the whole body, then nothing."""
        if not parts:
            await asyncio.get_running_loop().create_future()  # for ever
        content = b"".join(parts)
        parts.clear()
        return {"type": "http.request", "body": content, "more_body": False}

    return give


def streamed_body(headers: dict[bytes, bytes], receive: Receive, max_bytes: int) -> Receive:
    """Return a channel that gives a body in parts as they come: of a file, which goes to disk. Errors as `read_body`'s.

    Raises:
        ApiError: 413 the announced length is over the limit; so does the channel, once as much has come.
    """
    length = headers.get(b"content-length", b"")
    size = 0

    def check(num_bytes: int) -> None:
        if num_bytes > max_bytes:
            reason = f"The file and its form are larger than {max_bytes} bytes (http.batch_file_bytes)."
            raise ApiError(reason, status=413, code="request_too_large", headers=_CLOSE)

    check(int(length[:_LENGTH_DIGITS]) if length.isdigit() else 0)
    began = asyncio.get_running_loop().time()

    async def give() -> Message:
        nonlocal size
        message = await _next(receive, began + min(LONGEST_S, SILENCE_S + size / LEAST_BYTES_PER_S))
        size += len(message.get("body", b""))
        check(size)
        return message

    return give


async def _next(receive: Receive, deadline: float) -> Message:
    """Return the next part of a body. Raises ApiError 408 if it comes too late, or the body as a whole does."""
    now = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(min(SILENCE_S, deadline - now)):
            return await receive()
    except TimeoutError:
        bounds = f"no part for {SILENCE_S:.0f} s, fewer than {LEAST_BYTES_PER_S} bytes a second, or {LONGEST_S:.0f} s"
        reason = f"The body arrives too slowly: {bounds} in all."
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
