"""Streaming HTTP/1.1 for a load generator: one protocol object per request, one clock reading per network read.

Written by hand, since the load generator often takes CPU time from the server that it measures: 15 µs per token, where
httpx takes 127 µs (2 cores AMD EPYC Zen 4, 2026-11-22).
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from crossdock.cluster.bench.metrics import Sample


class BenchError(Exception):
    """The server cannot be measured; the message is for the user."""


class ServerGone(BenchError):
    """No connection to the server could be made."""


class HttpResponse:
    """The parser of one HTTP/1.1 response: takes bytes as they arrive, returns the bytes of the body. No IO."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self._buffer = b""
        self._left: int | None = None  # bytes left of the chunk or the body; None: unknown, or until the end
        self._chunked = False

    def feed(self, data: bytes) -> bytes:
        """Return the bytes of the body that `data` completes.

        Raises:
            BenchError: this is not HTTP.
            ValueError: the length of the body or of a chunk is not a number.
        """
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        if not self.status:
            head, separator, data = data.partition(b"\r\n\r\n")
            if not separator:
                self._buffer = head
                return b""
            self._read_head(head.decode("latin-1"))
        if self._chunked:
            return self._read_chunks(data)
        if self._left is not None:
            self._left -= len(data)
            self.complete = self._left <= 0
        return data

    def end_of_stream(self) -> None:
        """Note that the connection closed: the end of a body without a length, a truncation of any other."""
        self.complete = self.complete or (bool(self.status) and not self._chunked and self._left is None)

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        try:
            self.status = int(first.split(" ", 2)[1])
        except (IndexError, ValueError):
            raise BenchError(f"not an HTTP server: it answered {first[:60]!r}") from None
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        if not self._chunked and "content-length" in headers:
            self._left = int(headers["content-length"])

    def _read_chunks(self, data: bytes) -> bytes:
        body: list[bytes] = []
        while data:
            if not self._left:  # between chunks, perhaps with the line end of the last one in front
                line, separator, rest = data.removeprefix(b"\r\n").partition(b"\r\n")
                if not separator:
                    self._buffer = data
                    break
                self._left = int(line.partition(b";")[0], 16)
                data = rest
                if self._left == 0:
                    self.complete = True
                    break
            body.append(data[: self._left])
            self._left -= len(body[-1])
            data = data[len(body[-1]) :]
        return body[0] if len(body) == 1 else b"".join(body)


class Exchange(asyncio.Protocol):
    """One request on its own connection. `on_body(data, now)` gets the body of a 200 as it arrives.

    Without `on_body`, or with another status, the body is collected in `body`.
    """

    def __init__(self, request: bytes, on_body: Callable[[bytes, float], None] | None) -> None:
        self.response = HttpResponse()
        self.body = bytearray()
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_body = on_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        try:
            body = self.response.feed(data)
            if body and self._on_body is not None and self.response.status == 200:
                self._on_body(body, now)
            else:
                self.body += body
        except (BenchError, ValueError) as error:
            self._finish(error)
        if self.response.complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.response.end_of_stream()
        self._finish(exc or (None if self.response.complete else ConnectionError("connection closed early")))

    def _finish(self, error: Exception | None) -> None:
        if not self.finished.done():
            if error is None:
                self.finished.set_result(None)
            else:
                self.finished.set_exception(error)


class Endpoint:
    """The address of a server and the headers that every request to it has.

    Raises:
        BenchError: `url` is not an http or https address.
    """

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise BenchError(f"{url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{url!r} is not an http or https address")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._host, self._path = parts.hostname, parts.path.rstrip("/").removesuffix("/v1")
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        lines = {"Host": parts.netloc, "Connection": "close", "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def exchange(
        self, method: str, path: str, content: bytes = b"", on_body: Callable[[bytes, float], None] | None = None
    ) -> Exchange:
        """Send one request and wait for the end of its response.

        Raises:
            ServerGone: no server is there.
            BenchError: the server does not answer in HTTP.
            ConnectionError: the connection closed before the response was complete.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(content)}\r\n\r\n"
        loop = asyncio.get_running_loop()
        try:
            transport, exchange = await loop.create_connection(
                lambda: Exchange(head.encode("latin-1") + content, on_body), self._host, self._port, ssl=self._ssl
            )
        except OSError as error:
            raise ServerGone(f"no server at {self.url}: {error.strerror or error}") from None
        try:
            await exchange.finished
        finally:
            transport.abort()
        return exchange


class TokenStream:
    """The parser of a completion's server-sent events. Fills in a Sample."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.done = False  # [DONE] or a finish reason arrived
        self.texts: list[str] = []
        self._rest = b""
        self._usage_seen = 0

    def feed(self, data: bytes, now: float) -> None:
        """Add the tokens of `data`, which arrived at `now` (seconds). Raises BenchError for a foreign event."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                try:
                    self._event(payload, now)
                except (ValueError, LookupError, TypeError, AttributeError):
                    raise BenchError(f"not an event of a completion: {payload[:80]!r}") from None

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        event = json.loads(payload)
        if event.get("error"):
            self.sample.error = f"error event: {error_text(payload)}"
        choices = event.get("choices")
        usage = event.get("usage")
        tokens = 0
        if choices:
            choice = choices[0]
            self.done = self.done or choice.get("finish_reason") is not None
            delta = choice.get("delta") or choice
            self.texts.append(delta.get("text") or delta.get("content") or "")
            # A token may add no text (half a character), so the server's running count goes before the text.
            if usage and usage.get("completion_tokens") is not None:
                tokens = usage["completion_tokens"] - self._usage_seen
            elif delta.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                tokens = 1
        if usage and usage.get("completion_tokens") is not None:
            self._usage_seen = self.sample.usage_tokens = usage["completion_tokens"]
            self.sample.prompt_tokens = usage.get("prompt_tokens") or self.sample.prompt_tokens
            details = usage.get("prompt_tokens_details")
            if details and details.get("cached_tokens") is not None:
                self.sample.cached_tokens = details["cached_tokens"]
        if tokens > 0:
            if self.sample.times and self.sample.times[-1] == now:
                self.sample.counts[-1] += tokens
            else:
                self.sample.times.append(now)
                self.sample.counts.append(tokens)


def error_text(body: bytes | bytearray) -> str:
    """Return the message in an OpenAI-style error body, or the start of the body itself."""
    text = bytes(body).decode("utf-8", "replace")
    try:
        message = json.loads(text)
        for key in ("error", "message"):
            if isinstance(message, dict):
                message = message.get(key, message)
        text = message if isinstance(message, str) else json.dumps(message)
    except ValueError:
        pass
    return " ".join(text.split())[:300] or "(empty)"
