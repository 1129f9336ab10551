"""The pictures of requests: fetched, processed once, kept for the next request, and placed in the prompt."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from crossdock.cluster.api.body.pictures import Picture, wrong_picture
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.media.addresses import AllowedHosts
from crossdock.cluster.api.media.families import read_family
from crossdock.cluster.api.media.fetch import PictureFetcher
from crossdock.cluster.api.media.memory import PictureMemory
from crossdock.cluster.api.media.processes import PictureProcesses, PicturesBusy, ReadyPicture, UnusablePicture
from crossdock.workers.schedule.items import Item

_MOST_WAITING = 256  # pictures of one ingress that are being processed or wait for that
_PART_OF_ONE = 2  # one request's pictures may take the memory for pictures divided by this
_RETRY_S = 2
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds of what pictures may cost. `HttpConfig` describes each."""

    hosts: AllowedHosts
    folder: Path | None
    most_pictures: int
    most_bytes: int
    most_pixels: int
    timeout_s: float
    cache_bytes: int
    memory_bytes: int
    arguments: Mapping[str, Any]  # of the model's image processor


class Media:
    """The pictures of one ingress's requests, for a model that reads pictures."""

    def __init__(
        self,
        model: Path,
        names: Mapping[int, str],
        limits: MediaLimits,
        *,
        metrics: "PictureMetrics | None" = None,
        fetcher: PictureFetcher | None = None,
    ) -> None:
        """Start the processes of pictures.

        Args:
            model: directory of the model.
            names: the text of each token that was added to the vocabulary, by its id.
            limits: what pictures may cost.
            metrics: None: new ones, which no one reads.
            fetcher: None: one within the limits.

        Raises:
            NoPictures: the model reads text alone, or is of a family that is not known here.
        """
        family = read_family(model, names)
        self.written, self.placeholder_id = family.written, family.placeholder_id
        self.placeholder = family.placeholder
        self._limits = limits
        self._fetcher = fetcher or PictureFetcher(
            hosts=limits.hosts, folder=limits.folder, most_bytes=limits.most_bytes, timeout_s=limits.timeout_s
        )
        self._processes = PictureProcesses(
            {
                "folder": str(model),
                "names": {str(token_id): name for token_id, name in names.items()},
                "arguments": dict(limits.arguments),
                "most_pixels": limits.most_pixels,
            }
        )
        self._cache: OrderedDict[bytes, ReadyPicture] = OrderedDict()
        self._cached_bytes = 0
        self._memory = PictureMemory(limits.memory_bytes)
        self._running: dict[bytes, _Work] = {}
        self._metrics = metrics or PictureMetrics(CollectorRegistry())

    async def prepare(
        self, pictures: Sequence[Picture], most_rows: int | None = None, *, salt: str
    ) -> list[ReadyPicture]:
        """Return the pictures as the model's encoder reads them. Raises ApiError, which names the part at fault.

        Args:
            pictures: those of one request.
            most_rows: of all together, as many as the context has tokens. The first picture that is too much ends the
                work on all others. None: the prompt is only counted.
            salt: only requests with the same one share processed pictures. Otherwise the response time would show that
                another tenant has sent a picture.
        """
        most = self._limits.most_pictures
        if len(pictures) > most:
            reason = f"the request has {len(pictures)} pictures, more than the {most} that are accepted"
            raise wrong_picture(pictures[most].param, reason)
        self._metrics.counts.observe(len(pictures))
        refused: ApiError | None = None
        sizes = _Sizes(most_rows, self._limits.memory_bytes // _PART_OF_ONE)

        async def prepared(picture: Picture) -> ReadyPicture:
            ready = await self._prepared(picture, salt)
            sizes.add(ready, picture)
            return ready

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(prepared(picture)) for picture in pictures]
        except* ApiError as errors:
            refused = _first(errors)
        if refused is not None:
            raise refused
        return [task.result() for task in tasks]

    def wait_until_ready(self) -> None:
        """Wait until pictures can be prepared. Raises NoPictures or ValueError, with the reason."""
        self._processes.wait_until_ready()

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    async def _prepared(self, picture: Picture, salt: str) -> ReadyPicture:
        data = await self._fetcher.fetch(picture)
        key = await asyncio.to_thread(_key, data, picture.detail, salt)
        if (found := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self._metrics.hits.inc()
            return found
        try:
            self._make_room(len(data))
            with self._memory.file(data):
                return await self._processed(key, data, picture.detail)
        except UnusablePicture as error:
            raise wrong_picture(picture.param, str(error)) from None
        except PicturesBusy:
            raise _busy() from None

    async def _processed(self, key: bytes, data: bytes, detail: str) -> ReadyPicture:
        """Process a picture, or wait for another request that does. The work ends when none waits for it any more."""
        work = self._running.get(key)
        if work is None:
            if len(self._running) >= _MOST_WAITING:
                raise PicturesBusy("too many pictures wait")
            work = self._running[key] = _Work(asyncio.create_task(self._process(key, data, detail)))
            work.task.add_done_callback(partial(self._end, key, work))
        else:
            self._metrics.hits.inc()
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and not work.task.done():
                work.task.cancel()
                self._running.pop(key)

    async def _process(self, key: bytes, data: bytes, detail: str) -> ReadyPicture:
        started = time.monotonic()
        ready = await self._processes.prepare(data, detail)
        self._metrics.seconds.observe(time.monotonic() - started)
        self._make_room(ready.num_bytes)
        self._memory.add(ready)
        self._keep(key, ready)
        return ready

    def _end(self, key: bytes, work: "_Work", task: "asyncio.Task[ReadyPicture]") -> None:
        """Remove work that has ended. Its error may have no reader left."""
        if self._running.get(key) is work:
            del self._running[key]
        if not task.cancelled():
            task.exception()

    def _make_room(self, num_bytes: int) -> None:
        """Drop kept pictures, those that were not used for longest first, until so many bytes more fit."""
        while self._cache and self._memory.lacks(num_bytes):
            self._drop_oldest()

    def _keep(self, key: bytes, ready: ReadyPicture) -> None:
        """Keep a picture, instead of those that were not used for longest."""
        if ready.num_bytes > self._limits.cache_bytes:
            return
        self._cache[key] = ready
        self._cached_bytes += ready.num_bytes
        while self._cached_bytes > self._limits.cache_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes


@dataclass(slots=True, eq=False)
class _Work:
    """One picture that is being processed or waits for that."""

    task: "asyncio.Task[ReadyPicture]"
    num_waiting: int = 0  # pictures of requests


class _Sizes:
    """The sizes of a request's pictures so far, and their bounds."""

    def __init__(self, most_rows: int | None, most_bytes: int) -> None:
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self._rows = self._bytes = 0

    def add(self, ready: ReadyPicture, picture: Picture) -> None:
        """Count one picture more. Raises ApiError where all together are too large."""
        self._rows += ready.num_rows
        self._bytes += ready.num_bytes
        if self._most_rows is not None and self._rows > self._most_rows:
            reason = f"the pictures have at least {self._rows} tokens; this model's context has {self._most_rows}"
            text = f"Invalid value for '{picture.param}': {reason}. Use smaller pictures, or 'detail': 'low'."
            raise ApiError(text, param=picture.param, code="context_length_exceeded")
        if self._bytes > self._most_bytes:
            reason = f"the pictures of the request take more than {self._most_bytes >> 20} MiB once they are decoded"
            raise wrong_picture(picture.param, reason)


class PictureMetrics:
    """Metrics of the pictures of one ingress. An ingress whose model reads text has them too, all zero."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts = Histogram(
            "crossdock_ingress_pictures", "Pictures of a request that has some.", buckets=_COUNTS, registry=registry
        )
        self.seconds = Histogram(
            "crossdock_ingress_picture_seconds",
            "From the bytes of a picture to the tensors of the encoder, waiting included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.hits = Counter(
            "crossdock_ingress_picture_cache_hits", "Pictures that had been processed before.", registry=registry
        )


def place(
    token_ids: Sequence[int], placeholder_id: int, pictures: Sequence[ReadyPicture]
) -> tuple[list[int], list[Item]]:
    """Return the tokens with each run of placeholders in its length, and the pictures' places among them.

    `token_ids` has one placeholder for each run. Raises ValueError where it has more or fewer.
    """
    result: list[int] = []
    items: list[Item] = []
    if token_ids.count(placeholder_id) != sum(len(picture.runs) for picture in pictures):
        raise ValueError("the prompt has more placeholders than its pictures, or fewer")
    position = 0
    for picture in pictures:
        start = -1
        for run in picture.runs:
            at = token_ids.index(placeholder_id, position)
            result += token_ids[position:at]
            start = len(result) if start < 0 else start
            result += [placeholder_id] * run
            position = at + 1
        items.append(Item(start, len(result) - start, picture.num_rows, "image", picture.content_hash, picture.tensors))
    result += token_ids[position:]
    return result, items


def _key(data: bytes, detail: str, salt: str) -> bytes:
    kind = b"low" if detail == "low" else b"whole"
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    return hashlib.blake2b(data, digest_size=16, key=key, person=kind).digest()


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    """Return the first error of a group, however deep."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _busy() -> ApiError:
    reason = "Too many pictures are being processed. Try again later."
    headers = {"Retry-After": str(_RETRY_S)}
    return ApiError(reason, status=429, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
