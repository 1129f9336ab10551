"""Publishes the events of a replica's cached pages over ZMQ, and sends earlier ones again to those who ask.

No step waits for a reader: a batch goes into a queue with a bound, from which a thread of its own takes it.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.report.kv_events import NEEDS_PYZMQ, KVEventsConfig, encode, offset_port
from crossdock.workers.schedule.memory.page_events import PageEvent

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

_MOST_OFFSETS = 256  # ports that a replica tries, one after the other
_PAUSE_S = 0.5  # after an error of a socket
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES = 8


def open_publisher(config: EngineConfig) -> "KVEventPublisher | None":
    """Return the publisher that an engine's settings ask for; None: they ask for none. Raises as `KVEventPublisher`."""
    return None if config.kv_events is None else KVEventPublisher(config.kv_events, config.page_size)


class KVEventPublisher:
    """Two sockets and the thread that owns them. `publish` and `close` belong to one other thread."""

    def __init__(self, config: KVEventsConfig, page_size: int) -> None:
        """Open the sockets. The replica's rank is the offset of its port: the first one that is free.

        Raises:
            ValueError: pyzmq is not installed, or no port is free.
        """
        try:
            import zmq
        except ImportError:
            raise ValueError(NEEDS_PYZMQ) from None
        self._zmq = zmq
        self._config = config
        self._page_size = page_size
        self._topic = config.topic.encode()
        self._context = zmq.Context()
        self._events, self._replay, self.rank = self._open()
        self.endpoint = _address(self._events)
        self.replay_endpoint = None if self._replay is None else _address(self._replay)
        self.num_batches = 0  # published, or lost
        self.num_lost = 0
        self._queue = deque[tuple[int, float, Sequence[PageEvent]]]()
        self._past = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps if self._replay is not None else 0)
        self._waker, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._waker, False)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        logger.info("KV events at %s, replay at %s", self.endpoint, self.replay_endpoint)

    @property
    def addresses(self) -> dict[str, str | int | None]:
        """Where readers find this replica, and the rank in its messages."""
        return {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint, "data_parallel_rank": self.rank}

    def publish(self, events: Sequence[PageEvent]) -> None:
        """Have the events of a step published, under the next number. Readers see the gap where a batch was lost."""
        if not events:
            return
        number = self.num_batches
        self.num_batches += 1
        if len(self._queue) >= self._config.max_queue_size:
            self.num_lost += 1
            return
        self._queue.append((number, time.time(), events))
        self._rouse()

    def close(self) -> None:
        """Publish what waits, and close the sockets."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._rouse()
        self._thread.join()
        for each in (self._waker, self._wake):
            os.close(each)

    def _open(self) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes] | None", int]:
        """Return the two sockets, the second if there is one, and the offset of their ports."""
        config = self._config
        for offset in range(_MOST_OFFSETS if config.fits_replicas else 1):
            events = self._socket(self._zmq.PUB, config.hwm)
            replay = None
            try:
                address = offset_port(config.endpoint, offset)
                if config.listens:
                    events.bind(address)
                else:
                    events.connect(address)
                if config.replay_endpoint is not None:
                    replay = self._socket(self._zmq.ROUTER, 2 * (config.buffer_steps + 1))  # a replay and its end fit
                    replay.bind(offset_port(config.replay_endpoint, offset))
                return events, replay, offset
            except self._zmq.ZMQError as error:
                events.close()
                if replay is not None:
                    replay.close()
                if error.errno != self._zmq.EADDRINUSE:
                    self._context.term()
                    raise ValueError(f"kv_events_config: endpoint {config.endpoint} cannot be used: {error}") from None
        self._context.term()
        raise ValueError(
            f"kv_events_config: the addresses of endpoint {config.endpoint} and replay_endpoint "
            f"{config.replay_endpoint} are taken, also with larger ports; give others"
        )

    def _socket(self, kind: int, hwm: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.SNDHWM, hwm)
        return socket

    def _rouse(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: the thread wakes up anyway
            os.write(self._wake, b"x")

    # -- the thread of the sockets -----------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._waker, self._zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, self._zmq.POLLIN)
        while not self._is_closed.is_set():
            try:
                ready = dict(poller.poll())
                if self._waker in ready:
                    os.read(self._waker, 4096)
                self._send_all()
                if self._replay in ready:
                    self._send_again()
            except Exception:
                logger.exception("KV events: an error of a socket; readers may miss a batch")
                self._is_closed.wait(_PAUSE_S)
        self._send_all()
        self._events.close(linger=200)
        if self._replay is not None:
            self._replay.close()
        self._context.term()

    def _send_all(self) -> None:
        while self._queue:
            number, unix_time, events = self._queue.popleft()
            message = encode(events, self._page_size, unix_time, self.rank)
            numbered = number.to_bytes(_NUMBER_BYTES, "big")
            self._past.append((numbered, message))
            self._events.send_multipart((self._topic, numbered, message))  # a PUB socket never blocks

    def _send_again(self) -> None:
        """Answer one question for all batches from a number on: each batch, and then an empty one."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3:
            logger.warning("KV events: a replay was asked for with %d frames in place of 3", len(frames))
            return
        reader, _, wanted = frames
        first = int.from_bytes(wanted, "big")
        for numbered, message in self._past:
            if int.from_bytes(numbered, "big") >= first:
                self._replay.send_multipart((reader, b"", numbered, message))
        self._replay.send_multipart((reader, b"", _END_OF_REPLAY, b""))


def _address(socket: Any) -> str:
    """Return the address of a socket, also where any free port was asked for."""
    import zmq

    return str(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
