"""Memory of the pictures of one ingress: counted over all requests, so that many together cannot fill the machine."""

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from crossdock.cluster.api.media.processes import PicturesBusy, ReadyPicture


class PictureMemory:
    """Counts the bytes of fetched files and of tensors, from where they are made until nothing holds them."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._num_bytes = 0
        self._freed: deque[int] = deque()  # any thread may drop the last reference to a tensor

    @property
    def num_bytes(self) -> int:
        """Return the bytes in use."""
        while self._freed:
            self._num_bytes -= self._freed.popleft()
        return self._num_bytes

    def lacks(self, num_bytes: int) -> bool:
        """Return whether so many bytes more are too many."""
        return self.num_bytes + num_bytes > self.most_bytes

    @contextmanager
    def file(self, data: bytes) -> Iterator[None]:
        """Count a file while it waits and is processed. Raises PicturesBusy where there is no memory for it."""
        if self.lacks(len(data)):
            raise PicturesBusy("the pictures of running requests take all memory for pictures")
        self._num_bytes += len(data)
        try:
            yield
        finally:
            self._num_bytes -= len(data)

    def add(self, ready: ReadyPicture) -> None:
        """Count a picture until its tensors are dropped. Raises PicturesBusy where there is no memory for it."""
        if self.lacks(ready.num_bytes):
            raise PicturesBusy("the pictures of running requests take all memory for pictures")
        for tensor in ready.tensors.values():
            self._num_bytes += tensor.nbytes
            weakref.finalize(tensor, self._freed.append, tensor.nbytes).atexit = False
