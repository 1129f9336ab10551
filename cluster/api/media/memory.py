"""Memory of the pictures of one ingress: counted over all requests, so that many together cannot fill the machine."""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from crossdock.cluster.api.media.processes import PicturesBusy, ReadyPicture
from crossdock.workers.schedule.shares import Shares


class PictureMemory:
    """Counts the bytes of fetched files and of tensors, from where they are made until nothing holds them."""

    def __init__(self, most_bytes: int) -> None:
        self._shares = Shares(most_bytes)
        self._freed: deque[tuple[str, int]] = deque()  # any thread may drop the last reference to a tensor

    @property
    def num_bytes(self) -> int:
        """Return the bytes in use."""
        return self._counted().num_used

    def lacks(self, num_bytes: int, owner: str = "", *, kept: int = 0, kept_of_owner: int = 0) -> bool:
        """Return whether `num_bytes` more are too many for an owner.

        `kept`: bytes of kept pictures that could be dropped first: of all owners, and of this one.
        """
        return num_bytes > self._counted().room(owner, freed=kept, freed_of_owner=kept_of_owner)

    @contextmanager
    def file(self, data: bytes, owner: str = "") -> Iterator[None]:
        """Count a file while it waits and is processed. Raises PicturesBusy where there is no memory for it."""
        self._check(len(data), owner)
        self._shares.take(owner, len(data))
        try:
            yield
        finally:
            self._shares.release(owner, len(data))

    def add(self, ready: ReadyPicture, owner: str = "") -> None:
        """Count a picture until its tensors are dropped. Raises PicturesBusy where there is no memory for it."""
        self._check(ready.num_bytes, owner)
        for tensor in ready.tensors.values():
            self._shares.take(owner, tensor.nbytes)
            weakref.finalize(tensor, self._freed.append, (owner, tensor.nbytes)).atexit = False

    def _check(self, num_bytes: int, owner: str) -> None:
        """Raise PicturesBusy, which says whether the whole memory lacks so many bytes or the owner's share does."""
        if self.lacks(num_bytes):
            raise PicturesBusy("the pictures and videos of running requests take all memory for these")
        if self.lacks(num_bytes, owner):
            raise PicturesBusy("the pictures and videos of this API key take its share of the memory for these")

    def _counted(self) -> Shares:
        while self._freed:
            self._shares.release(*self._freed.popleft())
        return self._shares
