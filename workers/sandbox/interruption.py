"""A caller's way to end the work on a question that another thread waits for."""

import os


class Interruption:
    """Set once, by the thread that made it, which closes it too when no thread waits any more."""

    def __init__(self) -> None:
        self.is_set = False
        self._event: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """End the work. Nothing happens after `close`."""
        self.is_set = True
        if self._event is not None:
            os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        """Return the descriptor that is readable once this is set."""
        assert self._event is not None
        return self._event

    def close(self) -> None:
        """Give the descriptor back."""
        if self._event is not None:
            os.close(self._event)
            self._event = None
