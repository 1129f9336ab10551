"""Tasks that run as long as their process: a health check asks whether one of them has ended."""

import asyncio
from collections.abc import Iterable
from typing import Any


def raise_if_ended(tasks: Iterable["asyncio.Task[Any] | None"]) -> None:
    """Raise the error that has ended one of these tasks, or RuntimeError where it has ended without one.

    A task that was cancelled has ended with its process. None: it was not started.
    """
    for task in tasks:
        if task is not None and task.done() and not task.cancelled():
            task.result()
            raise RuntimeError(f"{task.get_coro()} has ended")
