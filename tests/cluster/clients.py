"""Clients that ask a server again and again, while a test disturbs it."""

import threading
from collections.abc import Callable
from itertools import count
from typing import Self


class Clients:
    """Threads that call `ask` again and again until the context ends, each time with another number.

    What `ask` raises is a problem, and its thread goes on.
    """

    def __init__(self, num_clients: int, ask: Callable[[int], None]) -> None:
        self.num_ok, self.problems = 0, list[str]()
        self._ask, self._numbers, self._ended = ask, count(), threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_clients)]

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._ask(next(self._numbers))
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")
            else:
                self.num_ok += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive(), "a request hangs"
