"""The progress of a long command: a bar on a terminal; elsewhere, as in a log, a plain line now and then."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LINE_S = 10.0  # seconds from one line of a log to the next

Report = Callable[[float, float | None], None]  # what is done, and the total; None: not known


@contextmanager
def progress(console: Console, what: str, unit: str = "") -> Iterator[Report]:
    """Yield a function that takes how much is done and of how much in all.

    `unit` names what is counted, e.g. requests; without it the progress is shown in percent.
    """
    latest: tuple[float, float | None] = (0.0, None)

    def text() -> str:
        done, total = latest
        if not unit:
            return f"{min(done / total, 1.0):.0%}" if total else ""
        return f"{done:.0f}{f' of {total:.0f}' if total is not None else ''} {unit}"

    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
        )
        # Twice a second: drawing takes CPU from what is measured.
        with Progress(*columns, console=console, refresh_per_second=2, transient=True) as bar:
            task = bar.add_task(escape(what), total=None, text="")

            def draw(done: float, total: float | None) -> None:
                nonlocal latest
                latest = done, total
                bar.update(task, completed=done, total=total, text=text())

            yield draw
        return

    def note(done: float, total: float | None) -> None:
        nonlocal latest
        latest = done, total

    started = time.monotonic()
    is_over = threading.Event()

    def write_lines() -> None:
        while not is_over.wait(LINE_S):
            shown = ", ".join(part for part in (text(), f"{time.monotonic() - started:.0f} s") if part)
            console.print(escape(f"{what}: {shown}"), soft_wrap=True, highlight=False)

    writer = threading.Thread(target=write_lines, name="progress", daemon=True)
    writer.start()
    try:
        yield note
    finally:
        is_over.set()
        writer.join()
