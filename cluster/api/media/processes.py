"""The ingress's side of the processes of pictures: starts them, asks them, replaces one that ends."""

import asyncio
import logging
import os
import queue
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from crossdock.cluster.api.media.families import NoPictures
from crossdock.cluster.api.media.frames import WALL_SECONDS, read_frame, write_frame

logger = logging.getLogger("ray.serve")

_MODULE = "crossdock.cluster.api.media.picture_process"
_PROCESSES = 2  # about 70 MiB each; one slow picture does not stop all others
_START_PATIENCE_S = 60.0  # a start takes three seconds on an idle machine
_PATIENCE_S = WALL_SECONDS + 5.0  # for an answer
_ENVIRONMENT = {  # transformers would advise to install torch
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


class PicturesBusy(RuntimeError):
    """There is no answer: the machine was too slow, or the process ended. Another attempt may succeed."""


class UnusablePicture(ValueError):
    """A picture that the model cannot read. The message gives the reason, for the client."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadyPicture:
    """A picture as the model's encoder reads it."""

    text: str  # what replaces it in the prompt, each run of placeholders as one
    runs: tuple[int, ...]  # the length of each run
    content_hash: bytes
    tensors: Mapping[str, NDArray[Any]]

    @property
    def num_rows(self) -> int:
        """Return how many rows of the encoder's output stand for it."""
        return sum(self.runs)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that it takes, about."""
        return len(self.text) + 8 * len(self.runs) + sum(tensor.nbytes for tensor in self.tensors.values())


class PictureProcesses:
    """Prepares pictures in processes of their own. For one event loop."""

    def __init__(self, settings: Mapping[str, Any], num_processes: int = _PROCESSES) -> None:
        """`settings`: `folder` of the model, `names` of its added tokens by id, `arguments` of its image processor,
        and `most_pixels` of a picture.
        """
        self._idle: queue.SimpleQueue[PictureProcess] = queue.SimpleQueue()
        self._all = [PictureProcess(settings) for _ in range(num_processes)]
        for process in self._all:
            process.start()
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(num_processes, "pictures")
        self._slots = asyncio.Semaphore(
            num_processes
        )  # so that no picture of a client that has left waits for a thread

    def wait_until_ready(self) -> None:
        """Wait until a process can prepare pictures, for seconds. Raises as `PictureProcess` does."""
        self._all[0].wait_until_ready()

    @property
    def pids(self) -> list[int]:
        """Return the ids of the processes that run."""
        return [process.pid for process in self._all if process.pid is not None]

    async def prepare(self, data: bytes, detail: str) -> ReadyPicture:
        """Return a picture as the encoder reads it.

        Raises:
            UnusablePicture: it is none, or beyond the limits.
            PicturesBusy: there is no answer.
        """
        await self._slots.acquire()
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._prepare, data, detail)
        except RuntimeError:
            self._slots.release()
            raise PicturesBusy("the processes of pictures have ended") from None
        future.add_done_callback(self._release)
        return await asyncio.shield(future)  # a caller that leaves frees no thread

    def close(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.end()

    def _release(self, future: "asyncio.Future[ReadyPicture]") -> None:
        """Let the next picture have the thread. The error of a caller that has left has no reader."""
        self._slots.release()
        if not future.cancelled():
            future.exception()

    def _prepare(self, data: bytes, detail: str) -> ReadyPicture:
        process = self._idle.get()
        try:
            return process.prepare(data, detail)
        finally:
            self._idle.put(process)


class PictureProcess:
    """One process of pictures. Calls must not overlap.

    The process ends when its stdin does: with `close`, with this object, or with this process however that ends.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """The process starts with `start` or the first picture."""
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._has_ended = False
        self._closing: weakref.finalize[Any, Any] | None = None

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, unless it runs. PicturesBusy: `end` has been called."""
        if self._process is not None:
            return
        if self._has_ended:
            raise PicturesBusy("the processes of pictures have ended")
        # A new interpreter, never a fork: this process has threads.
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._closing = weakref.finalize(self, _end, self._process)
        with suppress(BrokenPipeError):  # then there will be no answer
            write_frame(_stdin(self._process), self._settings)

    def wait_until_ready(self) -> None:
        """Wait until the process has prepared a first picture, a small one.

        Raises:
            NoPictures: transformers cannot prepare pictures for this model.
            ValueError: it cannot with these arguments of the image processor.
            TimeoutError: it takes too long.
        """
        if self._is_ready:
            return
        assert self._process is not None
        answer = _answer(self._process, _START_PATIENCE_S)
        if answer is None or "unsupported" in answer:
            raise NoPictures((answer or {}).get("unsupported", "its image processor cannot be started"))
        if reason := answer.get("wrong_arguments"):
            raise ValueError(f"http.mm_processor_kwargs: the image processor refuses them: {reason}")
        self._is_ready = True

    def prepare(self, data: bytes, detail: str) -> ReadyPicture:
        """Return a picture as the encoder reads it. Raises as `PictureProcesses.prepare` does."""
        asked = {"data": data, "detail": detail}
        answer = self._ask(asked) or self._ask(asked)  # it may have ended since the last picture
        if answer is None or answer.get("is_busy"):
            raise PicturesBusy("pictures cannot be processed in time now")
        if error := answer.get("error"):
            raise UnusablePicture(error)
        tensors = {
            name: np.frombuffer(body, np.dtype(kind)).reshape(shape)
            for name, (kind, shape, body) in answer["tensors"].items()
        }
        return ReadyPicture(answer["text"], tuple(answer["runs"]), answer["hash"], tensors)

    def close(self) -> None:
        """End the process. Another picture starts the next one."""
        if self._closing is not None:
            self._closing()
        self._process, self._closing, self._is_ready = None, None, False

    def end(self) -> None:
        """End the process, for good. Any thread may call."""
        self._has_ended = True
        self.close()

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the answer; None where the process ended. PicturesBusy: it hung."""
        answer: dict[str, Any] | None = None
        self.start()
        assert self._process is not None
        try:
            self.wait_until_ready()
            write_frame(_stdin(self._process), asked)
            answer = _answer(self._process, _PATIENCE_S)
        except TimeoutError as error:
            self.close()
            raise PicturesBusy("the process of pictures hung") from error
        except (OSError, NoPictures):
            pass  # it has ended
        if answer is None:
            logger.warning("the process of pictures ended; another starts")
            self.close()
        return answer


def _stdin(process: "subprocess.Popen[bytes]") -> BinaryIO:
    assert process.stdin is not None
    return process.stdin  # type: ignore[return-value]


def _answer(process: "subprocess.Popen[bytes]", patience_s: float) -> dict[str, Any] | None:
    """Return the process's next answer; None where it ended. TimeoutError: none came in time."""
    stdout = process.stdout
    assert stdout is not None
    if not select.select([stdout], [], [], patience_s)[0]:
        raise TimeoutError
    answer: dict[str, Any] | None = read_frame(stdout)  # type: ignore[arg-type]
    return answer


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(OSError):
        _stdin(process).close()
    if process.stdout is not None:
        process.stdout.close()
    process.kill()
    process.wait()
