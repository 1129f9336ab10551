"""Fetch the bytes of a picture or a video: from a data URL, from a named host, or from a file below the named folder.

A request decides what this server connects to, so every step is checked. Only named hosts are looked up. All their
addresses must be public. The connection goes to an address that was checked: no second lookup could give another one.
"""

import asyncio
import base64
import binascii
import errno
import os
import re
import socket
import stat
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, unquote_to_bytes

import httpx

from crossdock.cluster.api.body.pictures import Picture
from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.cluster.api.media.addresses import AllowedHosts, is_public
from crossdock.cluster.api.media.sent_frames import MOST_JOINED, join_frames
from crossdock.cluster.api.media.turns import Turns

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host. Raises OSError where there are none."""

_MOST_REDIRECTS = 2
_MOST_URL_CHARS = 8192
_MOST_FETCHES = 32  # of one ingress from hosts; each holds the bytes of one picture. A key alone has 16, 8 of a host.
_MOST_READS = 16  # of files
_LONG_DATA = 1 << 16  # characters of base64; 50 µs. Longer data leave the event loop for a thread.
_DATA_URL = re.compile(r"data:(?P<type>[^;,]{0,127})(?P<parameters>(?:;[^;,]{0,127}){0,8}),", re.ASCII)
_EXAMPLES = {"image": "data:image/png;base64,…", "video": "data:video/mp4;base64,…"}
_LOCAL_HOSTS = ("", "localhost")


class PictureFetcher:
    """Fetches pictures. Errors tell a client nothing about this server's network or files."""

    def __init__(
        self,
        *,
        hosts: AllowedHosts,
        folder: Path | None,
        most_bytes: int,
        timeout_s: float,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] = is_public,
    ) -> None:
        """`folder`: the only one whose files may be read; None: none. `resolve`, `is_allowed`: DNS, and which of its
        addresses may be connected to.
        """
        self._hosts = hosts
        self._folder = folder
        self._most_bytes = most_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve or self._look_up
        self._is_allowed = is_allowed
        self._turns = Turns(_MOST_FETCHES, leaves_some=True)
        self._file_turns = Turns(_MOST_READS)  # their own: a slow host delays no file
        # Threads of their own, which start when they are needed: texts are tokenised in the event loop's.
        self._name_threads = ThreadPoolExecutor(_MOST_FETCHES, "picture-names")
        self._file_threads = ThreadPoolExecutor(_MOST_READS, "picture-files")
        self._tls = httpx.create_ssl_context(trust_env=False) if hosts else None  # 50 ms each, so one for all

    async def fetch(self, picture: Picture, owner: str = "") -> bytes:
        """Return the bytes of a picture's file. Raises ApiError, which names the part.

        `owner`: whose picture this is. Owners take turns; no owner and no host gets all fetches.
        """
        scheme = picture.url[:16].partition(":")[0].lower()
        if scheme == "data":
            return await self._data(picture)
        if len(picture.url) > _MOST_URL_CHARS:
            raise wrong(picture.param, f"its URL has more than {_MOST_URL_CHARS} characters")
        if scheme in ("http", "https"):
            return await self._from_host(picture, owner)
        if scheme == "file":
            await self._file_turns.acquire(owner)
            try:
                reading = asyncio.get_running_loop().run_in_executor(self._file_threads, self._from_file, picture)
            except RuntimeError:  # no thread could be started
                self._file_turns.release(owner)
                raise
            self._file_turns.release_after(reading, owner)
            return await asyncio.shield(reading)
        raise wrong(picture.param, "its URL must begin with data:, https: or http:")

    async def _data(self, picture: Picture) -> bytes:
        """Return the bytes in a data URL, which has them in base64 or percent-encoded."""
        found = _DATA_URL.match(picture.url[:2048])
        if found is None:
            raise wrong(picture.param, f"its data URL is malformed; it must be {_EXAMPLES[picture.kind]}")
        if picture.kind == "video" and not found["type"].lower().startswith("video/"):
            raise wrong(picture.param, f"its data URL is not that of a video; it must be {_EXAMPLES['video']}")
        payload = picture.url[found.end() :]
        if len(payload) * 3 // 4 > self._most_bytes + 3:
            raise self._too_large(picture)
        is_base64 = found["parameters"].lower().endswith(";base64")
        decode = _from_base64 if is_base64 else unquote_to_bytes
        if picture.kind == "video" and found["type"].lower() == "video/jpeg":
            if payload.count(",") >= MOST_JOINED:
                raise wrong(picture.param, f"it has more than the {MOST_JOINED} frames that are accepted one by one")
            decode = _from_frames
        try:
            data = decode(payload) if len(payload) <= _LONG_DATA else await asyncio.to_thread(decode, payload)
        except (binascii.Error, ValueError):
            raise wrong(picture.param, "its data URL is not base64") from None
        return self._checked(data, picture)

    async def _from_host(self, picture: Picture, owner: str) -> bytes:
        if not self._hosts:
            reason = f"this server fetches nothing from URLs; send it as a data URL ({_EXAMPLES[picture.kind]})"
            raise wrong(picture.param, reason)
        url = self._checked_url(picture.url, picture)
        host = _host(url)
        await self._turns.acquire(owner, host)
        lookups = list[asyncio.Future[Sequence[str]]]()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._follow(url, picture, lookups)
        except TimeoutError:
            reason = f"it was not fetched within {self._timeout_s:g} s"
            raise wrong(picture.param, reason) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            _check_files(error)
            raise wrong(picture.param, "it cannot be fetched: its host does not answer as expected") from None
        finally:
            # A lookup that has begun cannot be stopped: its thread counts as a fetch to its end.
            self._turns.release_after(asyncio.gather(*lookups, return_exceptions=True), owner, host)

    async def _follow(self, url: httpx.URL, picture: Picture, lookups: "list[asyncio.Future[Sequence[str]]]") -> bytes:
        """Fetch a URL, and what it redirects to. Every URL on the way is checked like the first.

        `lookups`: the list to which those of names are added.
        """
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=0)
        options: dict[str, Any] = {"trust_env": False, "timeout": self._timeout_s, "limits": limits}
        async with httpx.AsyncClient(verify=self._tls or True, **options) as client:
            for _ in range(_MOST_REDIRECTS + 1):
                address = await self._address(url, picture, lookups)
                request = client.build_request(
                    "GET",
                    url.copy_with(host=address),
                    headers={
                        "Host": url.netloc.decode("ascii"),
                        "Accept": f"{picture.kind}/*",
                        "Accept-Encoding": "identity",
                        "User-Agent": "crossdock",
                    },
                    extensions={"sni_hostname": _host(url)},
                )
                answer = await client.send(request, stream=True, follow_redirects=False)
                try:
                    if not answer.has_redirect_location:
                        return await self._body(answer, picture)
                    url = self._checked_url(str(url.join(answer.headers["location"])), picture)
                finally:
                    await answer.aclose()
        raise wrong(picture.param, f"its URL redirects more than {_MOST_REDIRECTS} times")

    def _checked_url(self, text: str, picture: Picture) -> httpx.URL:
        """Return a URL of a named host. Raises ApiError for any other, and for one with credentials."""
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError):
            raise wrong(picture.param, "its URL is malformed") from None
        if url.scheme not in ("http", "https"):
            raise wrong(picture.param, "its URL redirects to a scheme that is not accepted")
        if url.userinfo:
            raise wrong(picture.param, "its URL must not have a user or a password")
        if not self._hosts.allows(_host(url)):
            raise wrong(picture.param, "its URL names a host that this server does not fetch pictures from")
        return url

    async def _address(self, url: httpx.URL, picture: Picture, lookups: "list[asyncio.Future[Sequence[str]]]") -> str:
        """Look a host up, once. Returns an address to connect to, after all its addresses have been checked."""
        port = url.port or (443 if url.scheme == "https" else 80)
        lookups.append(asyncio.ensure_future(self._resolve(_host(url), port)))
        addresses = await asyncio.shield(lookups[-1])
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise wrong(picture.param, "its URL names a host that this server does not fetch pictures from")
        return min(addresses, key=lambda address: ":" in address)  # IPv4 first: not every machine has a way for IPv6

    async def _body(self, answer: httpx.Response, picture: Picture) -> bytes:
        if answer.status_code != 200:
            reason = f"it cannot be fetched: its host answers with the status {answer.status_code}"
            raise wrong(picture.param, reason)
        if answer.headers.get("content-encoding", "identity").lower() != "identity":
            raise wrong(picture.param, "its host answers with compressed content, which was not asked for")
        length = answer.headers.get("content-length", "")
        if length.isdigit() and int(length) > self._most_bytes:
            raise self._too_large(picture)
        parts = []
        num_bytes = 0
        async for part in answer.aiter_raw():
            num_bytes += len(part)
            if num_bytes > self._most_bytes:
                raise self._too_large(picture)
            parts.append(part)
        return self._checked(b"".join(parts), picture)

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        # As bytes: as text, a label that is empty or too long would be no OSError.
        look_up = partial(socket.getaddrinfo, host.encode("ascii"), port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._name_threads, look_up)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    def _from_file(self, picture: Picture) -> bytes:
        """Read a file below the named folder. The opened file is checked after symbolic links have been followed."""
        refusal = wrong(picture.param, "its URL is not that of a picture that this server may read")
        if self._folder is None:
            raise refusal
        host, slash, path = picture.url[5:].removeprefix("//").partition("/")
        if host.lower() not in _LOCAL_HOSTS or not slash or not picture.url[5:].startswith("//"):
            raise refusal
        file_path = Path("/" + unquote(path))
        try:
            if not file_path.resolve().is_relative_to(self._folder.resolve()):  # to open a device may start something
                raise refusal
            descriptor = os.open(file_path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a link to itself
            _check_files(error)
            raise refusal from None
        try:
            status = os.fstat(descriptor)
            opened = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not opened.is_relative_to(self._folder.resolve()) or not stat.S_ISREG(status.st_mode):
                raise refusal
            if status.st_size > self._most_bytes:
                raise self._too_large(picture)
            with open(descriptor, "rb", closefd=False) as file:
                return self._checked(file.read(self._most_bytes + 1), picture)
        except OSError as error:
            _check_files(error)
            raise refusal from None
        finally:
            os.close(descriptor)

    def _checked(self, data: bytes, picture: Picture) -> bytes:
        if not data:
            raise wrong(picture.param, "it is empty")
        if len(data) > self._most_bytes:
            raise self._too_large(picture)
        return data

    def _too_large(self, picture: Picture) -> ApiError:
        return wrong(picture.param, f"its file has more than the {self._most_bytes} bytes that are accepted")


def _check_files(error: BaseException | None) -> None:
    """Raise ApiError 503 where an error comes from this server's lack of files, and not from what it was asked."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            reason = "This server has too many open files. Try again later."
            raise ApiError(reason, status=503, code="too_many_files") from None
        error = error.__cause__ or error.__context__


def _host(url: httpx.URL) -> str:
    """Return the host in ASCII. Other encoders of Unicode names would look up another host than was checked."""
    return url.raw_host.decode("ascii", "replace")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _from_frames(text: str) -> bytes:
    """Return the frames of a video, which a `video/jpeg` URL has as base64 with commas between."""
    return join_frames([base64.b64decode(frame, validate=True) for frame in text.split(",")])
