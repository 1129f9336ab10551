"""The pictures and videos of requests: fetched, processed once, kept for the next request, placed in the prompt."""

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from crossdock.cluster.api.body.pictures import Kind, Picture
from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.cluster.api.media.addresses import AllowedHosts
from crossdock.cluster.api.media.families import NoPictures, read_family
from crossdock.cluster.api.media.fetch import PictureFetcher
from crossdock.cluster.api.media.kept_pictures import KeptPictures
from crossdock.cluster.api.media.memory import PictureMemory
from crossdock.cluster.api.media.processes import PictureProcesses, PicturesBusy, ReadyPicture, UnusablePicture
from crossdock.cluster.api.media.request_sizes import KINDS, PART_OF_VIDEOS, RequestSizes
from crossdock.cluster.api.media.video_families import read_video_family
from crossdock.workers.schedule.request.items import Item, divide_frames
from crossdock.workers.schedule.shares import Shares

_MOST_WAITING = 256  # pictures of one ingress that are being processed or wait for that; so many videos, too
_RETRY_S = 2
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


@dataclass(frozen=True, slots=True)
class Place:
    """How the chat template writes a picture or a video, and the token that stands for one embedding token of it."""

    written: str
    token: str
    token_id: int


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds of what pictures may cost. `HttpConfig` describes each."""

    hosts: AllowedHosts
    folder: Path | None
    most_pictures: int
    most_videos: int
    most_bytes: int
    most_pixels: int
    timeout_s: float
    cache_bytes: int
    memory_bytes: int
    arguments: Mapping[str, Any]  # of the model's image processor
    sampling: Mapping[str, Any]  # of the frames of videos, by the names of `Sampling`

    def most(self, kind: Kind) -> int:
        """Return how many pictures, or videos, a request may have."""
        return self.most_videos if kind == "video" else self.most_pictures


class Media:
    """The pictures and videos of one ingress's requests, for a model that reads pictures."""

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
        self.places: dict[Kind, Place] = {"image": Place(family.written, family.placeholder, family.placeholder_id)}
        self._limits = limits
        self._fetcher = fetcher or PictureFetcher(
            hosts=limits.hosts, folder=limits.folder, most_bytes=limits.most_bytes, timeout_s=limits.timeout_s
        )
        settings = {
            "folder": str(model),
            "names": {str(token_id): name for token_id, name in names.items()},
            "arguments": dict(limits.arguments),
            "most_pixels": limits.most_pixels,
        }
        self._processes = {"image": PictureProcesses({**settings, "kind": "image"})}
        self.why_no_videos = "this server takes none (--limit-mm-per-prompt)"  # empty: requests may have some
        if limits.most_videos:
            self._open_videos(model, names, settings)
        self._memory = PictureMemory(limits.memory_bytes)
        self._waiting_videos = PictureMemory(limits.memory_bytes // PART_OF_VIDEOS)
        self._kept = KeptPictures(limits.cache_bytes, self._memory)
        self._running: dict[bytes, _Work] = {}
        self._places = {kind: Shares(_MOST_WAITING) for kind in KINDS}
        self._metrics = metrics or PictureMetrics(CollectorRegistry())

    def _open_videos(self, model: Path, names: Mapping[int, str], settings: Mapping[str, Any]) -> None:
        """Start processes of videos, if the model sees them: their own, so that videos never delay pictures."""
        try:
            family = read_video_family(model, names, self._limits.arguments).family
        except NoPictures as reason:
            self.why_no_videos = str(reason)
            return
        except (KeyError, TypeError, ValueError) as error:  # the process of pictures refuses such arguments, too
            self.why_no_videos = f"its settings of videos cannot be read: {type(error).__name__}: {error}"
            return
        self.places["video"] = Place(family.written, family.placeholder, family.placeholder_id)
        sampled = {**settings, "kind": "video", "sampling": dict(self._limits.sampling)}
        self._processes["video"] = PictureProcesses(sampled)
        self.why_no_videos = ""

    def check(self, pictures: Sequence[Picture]) -> None:
        """Raise ApiError, which names the part at fault, for too many pictures or videos of one request, or a kind that
        the model does not see.
        """
        for kind in KINDS:
            own = [picture for picture in pictures if picture.kind == kind]
            most = self._limits.most(kind)
            if own and kind not in self.places:
                raise wrong(own[0].param, f"videos cannot be used: {self.why_no_videos}")
            if len(own) > most:
                reason = f"the request has {len(own)} {KINDS[kind]}, more than the {most} that are accepted"
                raise wrong(own[most].param, reason)

    async def prepare(
        self, pictures: Sequence[Picture], most_embedding_tokens: int | None = None, *, salt: str, owner: str = ""
    ) -> list[ReadyPicture]:
        """Return the pictures as the model's encoder reads them. Raises ApiError, which names the part at fault.

        Args:
            pictures: those of one request, which `check` has accepted.
            most_embedding_tokens: of all pictures together: the tokens of the context. The first picture that is too
                much ends the work on all others. None: the prompt is only counted.
            salt: only requests with the same one share processed pictures. Otherwise the response time would show that
                another owner has sent a picture.
            owner: whose pictures these are. Owners take turns, and each has a share of the memory and of the places
                to wait. Empty where no keys are in use.
        """
        self._metrics.counts.observe(len(pictures))
        refused: ApiError | None = None
        sizes = RequestSizes(most_embedding_tokens, self._limits.memory_bytes)

        async def prepared(picture: Picture) -> ReadyPicture:
            data = await self._fetcher.fetch(picture, owner)
            sizes.add_file(data, picture)
            ready = await self._prepared(data, picture, salt, owner)
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
        """Wait until pictures can be prepared, and videos if any. Raises NoPictures or ValueError, with the reason."""
        self._processes["image"].wait_until_ready()
        if "video" not in self._processes:
            return
        try:
            self._processes["video"].wait_until_ready()
        except NoPictures as reason:
            self.why_no_videos = str(reason)
            self.places.pop("video")
            self._processes.pop("video").close()

    def close(self) -> None:
        """End the processes."""
        for processes in self._processes.values():
            processes.close()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes that run."""
        return [pid for processes in self._processes.values() for pid in processes.pids]

    @property
    def placeholders(self) -> dict[str, int]:
        """Return the token that stands for one row, by the kind of item that has it."""
        return {kind: place.token_id for kind, place in self.places.items()}

    async def _prepared(self, data: bytes, picture: Picture, salt: str, owner: str) -> ReadyPicture:
        try:
            self._kept.make_room(len(data), owner)
            with ExitStack() as counted:
                counted.enter_context(self._memory.file(data, owner))
                key = await asyncio.to_thread(_key, data, picture, salt)
                if (found := self._kept.get(key)) is not None:
                    self._metrics.hits.inc()
                    return found
                if picture.kind == "video":  # videos are slow: those that wait leave room for pictures
                    counted.enter_context(self._waiting_videos.file(data, owner))
                return await self._processed(key, data, picture, owner)
        except UnusablePicture as error:
            raise wrong(picture.param, str(error)) from None
        except PicturesBusy as error:
            raise _busy(picture, str(error)) from None

    async def _processed(self, key: bytes, data: bytes, picture: Picture, owner: str) -> ReadyPicture:
        """Process a picture, or wait for another request that does. The work ends when none waits for it any more."""
        work = self._running.get(key)
        if work is None:
            self._check_place(picture.kind, owner)
            self._places[picture.kind].take(owner, 1)
            work = _Work(asyncio.create_task(self._process(key, data, picture, owner)))
            self._running[key] = work
            work.task.add_done_callback(partial(self._end, key, work, picture.kind, owner))
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

    def _check_place(self, kind: Kind, owner: str) -> None:
        """Raise PicturesBusy where too many wait, of all owners or of this one."""
        if self._places[kind].room("") < 1:
            raise PicturesBusy(f"{_MOST_WAITING} {KINDS[kind]} wait already")
        if self._places[kind].room(owner) < 1:
            raise PicturesBusy(f"the {KINDS[kind]} of this API key that wait have its share of {_MOST_WAITING} places")

    async def _process(self, key: bytes, data: bytes, picture: Picture, owner: str) -> ReadyPicture:
        started = time.monotonic()
        asked: dict[str, Any] = {"data": data, "detail": picture.detail}
        if picture.reading is not None:
            asked["sampling"] = picture.reading.model_dump()
        ready = await self._processes[picture.kind].prepare(asked, owner)
        self._metrics.seconds.observe(time.monotonic() - started)
        self._kept.make_room(ready.num_bytes, owner)
        self._memory.add(ready, owner)
        self._kept.keep(key, ready, owner)
        return ready

    def _end(self, key: bytes, work: "_Work", kind: Kind, owner: str, task: "asyncio.Task[ReadyPicture]") -> None:
        """Remove work that has ended. Its error may have no reader left."""
        self._places[kind].release(owner, 1)
        if self._running.get(key) is work:
            del self._running[key]
        if not task.cancelled():
            task.exception()


@dataclass(slots=True, eq=False)
class _Work:
    """One picture that is being processed or waits for that."""

    task: "asyncio.Task[ReadyPicture]"
    num_waiting: int = 0  # pictures of requests


class PictureMetrics:
    """Metrics of the pictures of one ingress. An ingress whose model reads text has them too, all zero."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts = Histogram(
            "crossdock_ingress_pictures",
            "Pictures and videos of a request that has some.",
            buckets=_COUNTS,
            registry=registry,
        )
        self.seconds = Histogram(
            "crossdock_ingress_picture_seconds",
            "From the bytes of a picture or a video to the tensors of the encoder, waiting included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.hits = Counter(
            "crossdock_ingress_picture_cache_hits",
            "Pictures and videos that had been processed before.",
            registry=registry,
        )


def place(
    token_ids: Sequence[int], placeholders: Mapping[str, int], pictures: Sequence[ReadyPicture]
) -> tuple[list[int], list[Item]]:
    """Return the tokens with each run of placeholders in its length, and the pictures' places among them.

    `token_ids` has one placeholder for each run. Raises ValueError where it has more or fewer. `placeholders`: by kind.
    """
    result: list[int] = []
    items: list[Item] = []
    for token_id in set(placeholders.values()):
        own = [picture for picture in pictures if placeholders[picture.kind] == token_id]
        if token_ids.count(token_id) != sum(len(picture.runs) for picture in own):
            raise ValueError("the prompt has more placeholders than its pictures, or fewer")
    position = 0
    for picture in pictures:
        token_id = placeholders[picture.kind]
        runs = list[tuple[int, int]]()
        for run in picture.runs:
            at = token_ids.index(token_id, position)
            result += token_ids[position:at]
            runs.append((len(result), run))
            result += [token_id] * run
            position = at + 1
        start = runs[0][0]
        tensors = picture.tensors
        item = Item(
            start, len(result) - start, picture.num_embedding_tokens, picture.kind, picture.content_hash, tensors
        )
        items += divide_frames(item, runs)
    result += token_ids[position:]
    return result, items


def _key(data: bytes, picture: Picture, salt: str) -> bytes:
    kind = b"video" if picture.kind == "video" else b"low" if picture.detail == "low" else b"whole"
    reading = "" if picture.reading is None else picture.reading.model_dump_json()
    key = hashlib.blake2b(f"{reading}|{salt}".encode(), digest_size=32).digest()
    return hashlib.blake2b(data, digest_size=16, key=key, person=kind).digest()


def _first(errors: BaseExceptionGroup[ApiError]) -> ApiError:
    """Return the first error of a group, however deep."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _busy(picture: Picture, reason: str) -> ApiError:
    text = f"'{picture.param}' cannot be processed now: {reason}. Try again later."
    headers = {"Retry-After": str(_RETRY_S)}
    return ApiError(text, status=429, param=picture.param, code="rate_limit_exceeded", headers=headers)
