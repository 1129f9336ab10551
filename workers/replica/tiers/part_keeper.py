"""The files of a follower: a thread does what the driver asks, so that no step waits for a file.

Calls come beside the other messages of the driver, not behind them: else each page would wait for the end of a step.
A call names how many of these messages must be handled before it.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from itertools import islice

from crossdock.workers.replica.ranks.rank_messages import (
    ExpectParts,
    FileCall,
    FilesCalled,
    LoadPart,
    LookForParts,
    PageName,
    WritePart,
)
from crossdock.workers.replica.tiers.page_files import PageFiles
from crossdock.workers.replica.tiers.page_format import name_of, page_of
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

_MOST_TOLD = 1 << 20  # names in one answer: 20 MB


class PartKeeper:
    """Answers calls one after the other, from `open` on. An error of any kind is an answer, too."""

    def __init__(self, name: str, answer: Callable[[FilesCalled], None]) -> None:
        """`name`: the rank's, with which its errors begin. `answer`: sends what became of a call to the driver."""
        self._name = name
        self._answer = answer
        self._calls: queue.SimpleQueue[FileCall | None] = queue.SimpleQueue()
        self._num_handled = 0
        self._handled = threading.Condition()
        self._reached = 0  # messages that were handled when a call last waited for them
        self._untold: dict[PageKey, bool] = {}  # parts that came or went, and the driver has not heard

    def call(self, call: FileCall) -> None:
        """Make a call. Belongs to the thread that reads the driver's messages."""
        self._calls.put(call)

    def handled(self) -> None:
        """Note that one more message of the driver is handled, in the thread that handles them."""
        with self._handled:
            self._num_handled += 1
            self._handled.notify_all()

    def open(self, files: PageFiles, wait: Callable[[], None]) -> None:
        """Begin to answer. `wait` waits until the device has computed the steps so far."""
        threading.Thread(target=self._run, args=(files, wait), name="tiers", daemon=True).start()

    def close(self) -> None:
        """End, after the calls so far."""
        self._calls.put(None)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _run(self, files: PageFiles, wait: Callable[[], None]) -> None:
        while (call := self._calls.get()) is not None:
            try:
                answer = self._do(call, files, wait)
            except Exception as error:
                answer = FilesCalled(f"{self._name}: {type(error).__name__}: {error}", False, (), ())
            self._answer(answer)

    def _do(self, call: FileCall, files: PageFiles, wait: Callable[[], None]) -> FilesCalled:
        match call:
            case LookForParts():
                return self._look(files)
            case WritePart(page, slots, after):
                self._reach(after, wait)
                deleted = files.write(page_of(page), slots, after)
                return FilesCalled("", True, (), _names(deleted))
            case ExpectParts(pages):
                files.expect([page_of(page) for page in pages])
                return FilesCalled("", True, (), ())
            case LoadPart(page, slots, pages, after):
                self._reach(after, wait)
                is_done = files.load(page_of(page), slots, pages, after)
                return FilesCalled("", is_done, (), ())

    def _look(self, files: PageFiles) -> FilesCalled:
        """Return which parts have come and gone; the next look has what is too much for one message."""
        came, gone = files.changes()
        self._untold |= dict.fromkeys(came, True) | dict.fromkeys(gone, False)
        told = {page: self._untold.pop(page) for page in list(islice(self._untold, _MOST_TOLD))}
        return FilesCalled(
            "",
            True,
            _names(page for page, is_here in told.items() if is_here),
            _names(page for page, is_here in told.items() if not is_here),
        )

    def _reach(self, count: int, wait: Callable[[], None]) -> None:
        """Wait until so many messages are handled, and what they began has ended."""
        if count > self._reached:
            with self._handled:
                self._handled.wait_for(lambda: self._num_handled >= count)
            wait()
            self._reached = count


def _names(pages: Iterable[PageKey]) -> tuple[PageName, ...]:
    return tuple(map(name_of, pages))
