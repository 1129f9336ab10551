"""Processed pictures that later requests find again."""

from collections import Counter, OrderedDict

from crossdock.cluster.api.media.memory import PictureMemory
from crossdock.cluster.api.media.processes import ReadyPicture


class KeptPictures:
    """Keeps pictures within a bound, and makes room in the memory of all. The least recently used go first."""

    def __init__(self, most_bytes: int, memory: PictureMemory) -> None:
        self._most_bytes = most_bytes
        self._memory = memory
        self._pictures: OrderedDict[bytes, tuple[str, ReadyPicture]] = OrderedDict()  # with the owner of each
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()  # by owner

    def get(self, key: bytes) -> ReadyPicture | None:
        """Return a picture that is kept."""
        if key not in self._pictures:
            return None
        self._pictures.move_to_end(key)
        return self._pictures[key][1]

    def keep(self, key: bytes, ready: ReadyPicture, owner: str) -> None:
        """Keep a picture, unless it alone is too large."""
        if ready.num_bytes > self._most_bytes:
            return
        self._pictures[key] = owner, ready
        self._num_bytes += ready.num_bytes
        self._bytes_of[owner] += ready.num_bytes
        while self._num_bytes > self._most_bytes:
            self._drop(next(iter(self._pictures)))

    def make_room(self, num_bytes: int, owner: str) -> None:
        """Drop pictures until an owner may have so many bytes more: its own first, and none where that is no use."""
        if not self._memory.lacks(num_bytes, owner):
            return
        for key in sorted(self._pictures, key=lambda key: self._pictures[key][0] != owner):  # in their order
            kept = self._num_bytes
            own = self._bytes_of[owner]
            if self._memory.lacks(num_bytes, owner, kept=kept, kept_of_owner=own):
                return  # also where what was dropped is still in use: that frees nothing
            self._drop(key)
            if not self._memory.lacks(num_bytes, owner):
                return

    def _drop(self, key: bytes) -> None:
        owner, ready = self._pictures.pop(key)
        self._num_bytes -= ready.num_bytes
        self._bytes_of[owner] -= ready.num_bytes
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]
