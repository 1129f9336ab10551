"""Loads adapters in a thread of its own, on all ranks of a replica: no step waits for a file."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from crossdock.workers.model.lora.adapter_files import read_adapter
from crossdock.workers.model.lora.adapters import Adapters
from crossdock.workers.replica.ranks.rank_messages import DropAdapter, LoadAdapter
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.schedule.adapter_slots import AdapterSlots, SlotChange
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Adapter

logger = logging.getLogger(__name__)


class AdapterLoader:
    """The loads of one engine. Its methods belong to the engine's thread; `on_done` is called in the other one."""

    def __init__(self, adapters: Adapters, worker_group: WorkerGroup | None) -> None:
        self.on_done: list[Callable[[], None]] = []  # called when there is a result to take in
        self._adapters = adapters
        self._worker_group = worker_group
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._done: deque[tuple[Adapter, float, str]] = deque()  # with its seconds, and why it failed

    def check(self, folder: Path) -> None:
        """Check that this replica can serve the adapter in a folder. For any thread.

        Raises:
            ValueError: files are missing or malformed, or the adapter does not fit the model.
            OSError: the files cannot be read.
        """
        self._adapters.check(read_adapter(folder, self._adapters.max_rank))

    def begin(self, changes: Sequence[SlotChange]) -> None:
        """Begin loads. The adapters that make way are forgotten at once: no step to come has rows of theirs."""
        for change in changes:
            if change.drops is not None:
                self._adapters.drop(change.drops)
            if self._worker_group is not None:
                if change.drops is not None:
                    self._worker_group.broadcast(DropAdapter(change.drops))
                self._worker_group.broadcast(
                    LoadAdapter(change.loads.name, change.loads.path, change.loads.fingerprint)
                )
            self._thread.submit(self._load, change.loads)

    def take_in(self, slots: AdapterSlots) -> list[tuple[Request, str]]:
        """Note the loads that have ended. Returns the requests that cannot be served, each with the reason."""
        failed = []
        while self._done:
            adapter, seconds, failure = self._done.popleft()
            requests = slots.end(adapter.fingerprint, None if failure else seconds)
            failed += [(request, f"adapter {adapter.name!r} cannot be loaded: {failure}") for request in requests]
        return failed

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _load(self, adapter: Adapter) -> None:
        started = time.monotonic()
        failure = ""
        try:
            self._adapters.load(adapter)
        except Exception as error:  # files of strangers: a library may raise anything
            failure = f"{error}" or type(error).__name__
            logger.warning("adapter %r cannot be loaded", adapter.name, exc_info=error)
        if self._worker_group is not None:
            failure = self._worker_group.wait_for_adapter(adapter.fingerprint) or failure
        self._done.append((adapter, time.monotonic() - started, failure))
        for listener in self.on_done:
            listener()
