"""The ingress's side of the processes of pictures: shares them between requests, and reads their answers."""

import asyncio
import hashlib
import logging
import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdock.cluster.api.media.families import NoPictures
from crossdock.cluster.api.media.turns import Turns
from crossdock.workers.sandbox.interruption import Interruption
from crossdock.workers.sandbox.limited_child import Limits
from crossdock.workers.sandbox.sandbox import Sandbox, SandboxBusy, SandboxInterrupted

logger = logging.getLogger(__name__)

LIMITS = {  # of one picture or video: 32 million pixels take 2 s, a frame of 1080 lines about 7 ms
    "image": Limits(cpu_seconds=8.0, wall_seconds=60.0, memory_bytes=2 << 30),
    "video": Limits(cpu_seconds=30.0, wall_seconds=200.0, memory_bytes=2 << 30),
}

_MODULE = "crossdock.cluster.api.media.picture_process"
_PROCESSES = 2  # of each kind, about 70 MiB each; one slow picture does not stop all others
_ENVIRONMENT = {  # transformers would advise to install torch
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


class PicturesBusy(RuntimeError):
    """There is no answer, but another attempt may succeed. The message gives the reason, for the client."""


class UnusablePicture(ValueError):
    """A picture that the model cannot read. The message gives the reason, for the client."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyPicture:
    """A picture or a video as the model's encoder reads it."""

    text: str  # what replaces it in the prompt, each run of placeholders as one
    runs: tuple[int, ...]  # the length of each run
    content_hash: bytes
    tensors: Mapping[str, NDArray[Any]]
    kind: str = "image"  # of the item: which of the encoder's methods takes it

    @property
    def num_embedding_tokens(self) -> int:
        """Return how many embedding tokens stand for the picture."""
        return sum(self.runs)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the picture takes, about."""
        return len(self.text) + 8 * len(self.runs) + sum(tensor.nbytes for tensor in self.tensors.values())


class PictureProcesses:
    """Prepares pictures, or videos, in processes of their own. For one event loop."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: `kind`, image or video; `folder` of the model, `names` of its added tokens by id, `arguments` of
        its image processor, `most_pixels` of a picture or of a frame; of videos also `sampling`, by `Sampling`'s names.
        """
        self._idle: queue.SimpleQueue[Sandbox] = queue.SimpleQueue()
        self._all: list[Sandbox] = []
        for _ in range(_PROCESSES):
            process = Sandbox(
                _MODULE,
                settings,
                title="the process of pictures",
                limits=LIMITS[settings["kind"]],
                environment=_ENVIRONMENT,
            )
            process.start()
            self._all.append(process)
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(_PROCESSES, "pictures")
        # Videos are slow: an owner's never take both processes.
        self._turns = Turns(_PROCESSES, leaves_some=settings["kind"] == "video")

    def wait_until_ready(self) -> None:
        """Wait until each process has prepared a first picture or video, a small one. That takes seconds.

        Raises:
            NoPictures: pictures or videos cannot be prepared for this model.
            ValueError: the image processor refuses these arguments.
            TimeoutError: a process is not ready in time.
        """
        answer, *_ = [process.first_answer() for process in self._all]
        if answer is None or "unsupported" in answer:
            raise NoPictures((answer or {}).get("unsupported", "its image processor cannot be started"))
        if reason := answer.get("wrong_arguments"):
            raise ValueError(f"http.mm_processor_kwargs: the image processor refuses them: {reason}")
        for reason in answer.get("passed_over", ()):
            logger.warning("%s", reason)

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes that run."""
        return [process.pid for process in self._all if process.pid is not None]

    async def prepare(self, asked: Mapping[str, Any], owner: str = "") -> ReadyPicture:
        """Return a picture as the encoder reads it. Where the caller is cancelled, the work on the picture ends.

        `asked`: `data`, the file; `detail` of a picture; `sampling` of a video, where it is not the server's. `owner`:
        whose picture this is.

        Raises:
            UnusablePicture: the file is no picture, or beyond the limits.
            PicturesBusy: there is no answer.
        """
        await self._turns.acquire(owner)
        try:
            interruption, future = self._begin(asked)
        except OSError as error:
            self._turns.release(owner)
            raise PicturesBusy("this server has too many open files") from error
        except RuntimeError as error:
            self._turns.release(owner)
            raise PicturesBusy("this server ends") from error
        self._turns.release_after(future, owner)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            interruption.set()  # the thread and the process are free in a moment
            raise

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.end()

    def _begin(self, asked: Mapping[str, Any]) -> "tuple[Interruption, asyncio.Future[ReadyPicture]]":
        """Start the work on a picture. Raises OSError without a free descriptor, RuntimeError without a thread."""
        interruption = Interruption()
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._prepare, asked, interruption)
        except RuntimeError:
            interruption.set()  # a thread may still find the work in its queue
            interruption.close()
            raise
        future.add_done_callback(lambda _: interruption.close())
        return interruption, future

    def _prepare(self, asked: Mapping[str, Any], interruption: Interruption) -> ReadyPicture:
        process = self._idle.get()
        try:
            answer = process.ask(asked, interruption)
        except (SandboxBusy, SandboxInterrupted) as busy:
            raise PicturesBusy("this server has too little time for it now") from busy
        finally:
            self._idle.put(process)
        if error := answer.get("error"):
            raise UnusablePicture(error)
        return as_ready(answer)


def as_ready(answer: Mapping[str, Any]) -> ReadyPicture:
    """Return a picture as its process has answered.

    The hash is computed here: a process that was taken over could name another owner's picture.
    """
    tensors = {
        name: np.frombuffer(body, np.dtype(kind)).reshape(shape)
        for name, (kind, shape, body) in answer["tensors"].items()
    }
    return ReadyPicture(answer["text"], tuple(answer["runs"]), _content_hash(tensors), tensors, answer["kind"])


def _content_hash(tensors: Mapping[str, NDArray[Any]]) -> bytes:
    """Return 16 bytes that tensors of other names, types, shapes or values do not share."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tensor.dtype.str, tensor.shape)).encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.digest()
