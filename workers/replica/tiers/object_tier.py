"""KV pages in an object store: one object for each page, with the names and the content of files of pages.

obstore does the requests: of S3 and what speaks its protocol, Google's and Azure's stores. Each ends after some
seconds. A store has no folders that tell of a change: looks list it bit by bit, over and over. It notes no reads
either, so the objects that were written longest ago go first.
"""

import logging
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

from crossdock.workers.model.loaders.objects import has_scheme
from crossdock.workers.replica.tiers.page_format import HEADER_BYTES, header_of, is_header_of, page_in, path_of
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

logger = logging.getLogger(__name__)

NEEDS_OBSTORE = (
    "kv_cache_files: an object store needs obstore, which is not installed: pip install 'crossdock[objects]', or give "
    "a folder"
)
OBJECT_RATE = 1e8  # bytes per second, until the first pages are measured
_SCHEMES = ("s3", "gs", "az")
_ANSWER_S = 10.0  # within which one try has an answer; after it no other try begins
_LISTED_AT_ONCE = 1000  # names; S3's most
_LISTS = 10  # of a look: 10,000 names, a second or so, in which no page is loaded
_FETCHES = 8  # pages on their way at once
_OURS = re.compile("[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{34}")
_ROOM_LEFT = 0.05  # share of the bytes that is freed at once


class _Object(NamedTuple):
    written: float  # seconds, Unix
    size: int  # bytes


def is_store(place: str) -> bool:
    """Return whether `place` of kv_cache_files is the URL of an object store; else it is a folder."""
    return has_scheme(place, _SCHEMES)


class ObjectTier:
    """The pages of one model and layout below a URL. All calls belong to one thread."""

    def __init__(self, url: str, most_bytes: int, fingerprint: bytes, num_parts: int = 1) -> None:
        """Arguments as of `FileTier`. Credentials are those of the environment, as of each store's own tools.

        Raises:
            ValueError: obstore is not installed, or the store cannot be written to or listed.
        """
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ValueError(NEEDS_OBSTORE) from None
        self._obstore: Any = obstore
        self._url = url
        self._most_bytes = most_bytes
        self._fingerprint = fingerprint
        self._num_parts = num_parts
        self._own = fingerprint.hex()
        self._objects: dict[str, _Object] = {}  # of all models, as listed so far
        self._listing: Iterator[Sequence[dict[str, Any]]] | None = None  # under way
        self._listed: dict[str, _Object] = {}  # by it, and written since it began
        self.num_bytes = 0  # of `_objects`, and of the parts that other ranks write with those of this one
        self._expected = deque[PageKey]()  # to be read, in this order, and not asked for
        self._coming: dict[PageKey, Future[Any]] = {}
        self._fetchers = ThreadPoolExecutor(_FETCHES, thread_name_prefix="tier-objects")
        self._not_listed = ""  # the reason that was logged last
        answers_in = timedelta(seconds=_ANSWER_S)
        # http is for stores inside the cluster, and only where the environment names such an endpoint.
        client = {"timeout": answers_in, "connect_timeout": answers_in / 2, "allow_http": True}
        retries = {"max_retries": 2, "retry_timeout": answers_in}
        try:
            self._store: Any = from_url(url, client_options=client, retry_config=retries)
            obstore.put(self._store, f"{self._own}/.writable", b"")
            next(iter(obstore.list(self._store, self._own, chunk_size=1)), None)
        except Exception as error:
            raise ValueError(f"kv_cache_files: {url} must be a store that can be written to: {_line(error)}") from None

    def changes(self) -> tuple[set[PageKey], set[PageKey]]:
        """Return pages that have come since they were last listed, and those that have gone, as far as this look lists.

        A store that cannot be listed now keeps its pages; the log has the reason once.
        """
        came = set[PageKey]()
        gone = set[PageKey]()
        reason = ""
        try:
            for _ in range(_LISTS):
                if self._listing is None:
                    self._listing, self._listed = iter(self._list()), {}
                batch = next(self._listing, None)
                if batch is None:
                    gone = self._end_listing()
                    break
                came |= self._take_in(batch)
        except Exception as error:
            self._listing = None
            reason = _line(error)
            if reason != self._not_listed:
                logger.error("kv_cache_files: pages in %s are not found: %s", self._url, reason)
        self._not_listed = reason
        return came, gone

    def _list(self) -> Any:
        return self._obstore.list(self._store, chunk_size=_LISTED_AT_ONCE)

    def _take_in(self, batch: Sequence[dict[str, Any]]) -> set[PageKey]:
        """Note listed objects. Returns the pages that were not known."""
        came = set[PageKey]()
        for each in batch:
            path = each["path"]
            if _OURS.fullmatch(path):
                found = self._listed[path] = _Object(each["last_modified"].timestamp(), each["size"])
                if path not in self._objects:
                    self._objects[path] = found
                    self.num_bytes += found.size
                    if (key := self._page_of(path)) is not None:
                        came.add(key)
        return came

    def _end_listing(self) -> set[PageKey]:
        """Keep what the listing has found. Returns the pages that are no more."""
        gone = {key for path in self._objects.keys() - self._listed if (key := self._page_of(path)) is not None}
        self._objects, self._listing = self._listed, None
        self.num_bytes = sum(each.size for each in self._objects.values())
        return gone

    def write(self, key: PageKey, parts: Sequence[memoryview]) -> set[PageKey]:
        """Store a page, and return the pages that were deleted to make room. OSError: the page is not stored."""
        content = b"".join((header_of(self._fingerprint, key, parts), *parts))
        size = len(content) * self._num_parts
        deleted = self._make_room(size) if self.num_bytes + size > self._most_bytes else set[PageKey]()
        path = self._path(key)
        try:
            self._obstore.put(self._store, path, content, use_multipart=False)
        except Exception as error:
            raise OSError(_line(error)) from None
        self._objects[path] = self._listed[path] = _Object(time.time(), len(content))
        self.num_bytes += size
        return deleted

    def expect(self, keys: Sequence[PageKey]) -> None:
        """Tell which pages will be read next, in this order: several are fetched at once. Forget those told before."""
        for each in self._coming.values():
            each.cancel()
        self._coming = {}
        self._expected = deque(keys)

    def read(self, key: PageKey, into: memoryview) -> bool:
        """Fill `into` with a page; False: there is no object, or it is not the page that was stored.

        An object that is wrong is deleted. OSError: the store does not give the page now.
        """
        while self._expected and len(self._coming) < _FETCHES:
            ahead = self._expected.popleft()
            self._coming[ahead] = self._fetchers.submit(self._fetch, ahead)
        coming = self._coming.pop(key, None)
        path = self._path(key)
        try:
            content = memoryview(self._fetch(key) if coming is None else coming.result())
        except FileNotFoundError:
            self._forget(path)
            return False
        except Exception as error:
            self._forget(path)  # so that it comes again when it is listed
            raise OSError(_line(error)) from None
        header, page = content[:HEADER_BYTES], content[HEADER_BYTES:]
        if page.nbytes != into.nbytes or not is_header_of(header, self._fingerprint, key, page):
            logger.warning("kv_cache_files: %s/%s is not the page that its name says, and is deleted", self._url, path)
            self._delete([path])
            return False
        into[:] = page
        return True

    def _fetch(self, key: PageKey) -> Any:
        return self._obstore.get(self._store, self._path(key)).bytes()

    def _make_room(self, size: int) -> set[PageKey]:
        """Delete the objects that were written longest ago. Returns the pages among them.

        Raises:
            OSError: the object is larger than all may be, or they cannot be deleted.
        """
        if size > self._most_bytes:
            raise OSError(f"a page of {size} bytes is larger than all objects may be, {self._most_bytes} bytes")
        left = self.num_bytes + size - self._most_bytes * (1 - _ROOM_LEFT)
        paths = list[str]()
        for path, each in sorted(self._objects.items(), key=lambda item: item[1]):
            if left <= 0:
                break
            paths.append(path)
            left -= each.size
        self._delete(paths)
        return {key for path in paths if (key := self._page_of(path)) is not None}

    def _delete(self, paths: Sequence[str]) -> None:
        """Delete objects. Those that another replica has deleted count too. OSError: they may all be there still."""
        try:
            self._obstore.delete(self._store, list(paths))
        except Exception as error:
            raise OSError(_line(error)) from None
        for path in paths:
            self._forget(path)

    def _forget(self, path: str) -> None:
        if (known := self._objects.pop(path, None)) is not None:
            self.num_bytes -= known.size
        self._listed.pop(path, None)

    def _path(self, key: PageKey) -> str:
        return f"{self._own}/{path_of(key)}"

    def _page_of(self, path: str) -> PageKey | None:
        """Return the page of an object; None: it is of another model."""
        own, _, name = path.partition("/")
        return page_in(name[3:]) if own == self._own else None


def _line(error: Exception) -> str:
    """Return the first line of an error of obstore, without the pages of its sources."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
