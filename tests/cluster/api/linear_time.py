"""CPU time as a function of a text's length: linear, whatever the text repeats. No other process can lengthen it."""

import time
from collections.abc import Callable

CHARACTERS = (" ", "\n", "a", "0", '"', "'", "\\", "[", "]", "{", "}", "(", "<", ",", ":", "=", "-", ".", "é", "🙂")
LONG = 3000  # characters of a run

_FEW = 1e-6  # seconds for a character, and as many for a thousand characters more: such a case needs no other look
_MANY = 1e-4  # … for which no other look is needed either
_LONGER, _SLOWER = 4, 8  # a text so many times as long may take so many times as long


def assert_linear(work: Callable[[int], None], name: str, length: int = LONG) -> None:
    """Assert that the CPU time of `work` grows with its length alone, up to a factor of 2.

    A case that takes little is done. Any other one is measured at several lengths, and often if it looks slow.
    """
    first = _seconds(work, length)
    if first <= _FEW * (length + 1000):
        return
    if first > _MANY * (length + 1000):  # a garbage collection of a large process may have taken a second of it
        first = min(_seconds(work, length) for _ in range(3))
    assert first <= _MANY * (length + 1000), f"{name}: {first:.2f} s for {length} characters"
    for num_times in (1, 3):
        short = min(first, *(_seconds(work, length) for _ in range(num_times)))
        long = min(_seconds(work, _LONGER * length) for _ in range(num_times))
        if long <= _SLOWER * short or long <= _FEW * _LONGER * length:
            return
    raise AssertionError(f"{name}: {long:.3f} s for {_LONGER * length} characters, {short:.3f} s for a quarter of them")


def _seconds(work: Callable[[int], None], length: int) -> float:
    started = time.thread_time()
    work(length)
    return time.thread_time() - started
