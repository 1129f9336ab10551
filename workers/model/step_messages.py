"""Steps as messages from the driver to the other ranks. Of the page tables only the entries that changed travel.

A stream's table grows by one entry in as many steps as a page has tokens. Sent whole, the tables of 256 streams of 512
pages each are 512 KiB in every step, for every follower.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import msgpack
from numpy.typing import NDArray

from crossdock.workers.model.forward.step_pictures import StepPictures
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.page_lists import PageLists
from crossdock.workers.schedule.request.batch import NO_ENCODER_WORK

_LONG = ("token_ids", "positions", "slots", "wanted")  # int64
_SHORT = ("query_start", "kv_len")  # int32
_UNKNOWN = -1  # an entry that the receiver may have in any state


@dataclass(slots=True, eq=False)
class StepSender:
    """Packs steps. Every receiver must unpack all of them, in order."""

    page_size: int
    _tables: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # as receivers have them
    _places: OrderedDict[str, int] = field(default_factory=OrderedDict)  # row of each request, least recent first

    def pack(self, inputs: StepInputs, requests: Sequence[str]) -> bytes:
        """Return a step as a message. `requests`: the name of the request of each of its sequences.

        Of G groups of layers, each sequence has G rows of pages. A name only decides which rows are compared with
        which: after a request whose rows are taken by another, more entries differ and are sent.
        """
        lists = inputs.pages
        places = _rows(self._place(requests, lists.num_groups), lists.num_groups)
        self._tables = _grown(self._tables, 0, lists.width, _UNKNOWN)
        flat = self._tables.reshape(-1)
        at = lists.places(places.astype(np.int64), self._tables.shape[1])
        changed = np.flatnonzero(flat[at] != lists.entries).astype(np.int32)
        entries = lists.entries[changed]
        flat[at[changed]] = entries
        arrays = [getattr(inputs, name) for name in (*_LONG, *_SHORT)]
        arrays += [places, changed, entries, inputs.state_read, inputs.state_write]
        sizes = [self.page_size, lists.num_groups, inputs.state_write.shape[1], _packed(inputs.pictures)]
        sizes.append([*inputs.adapters])
        return msgpack.encode([sizes, *(array.tobytes() for array in arrays)])

    def _place(self, requests: Sequence[str], num_groups: int) -> NDArray[np.int32]:
        """Return a place for each request: its own place, else a new one, else the least recently used one.

        A place is `num_groups` rows, the same number in every step."""
        most = max(len(self._tables) // num_groups, 2 * len(requests))
        self._tables = _grown(self._tables, most * num_groups, 0, _UNKNOWN)
        for request in requests:
            if request in self._places:
                self._places.move_to_end(request)
        for request in requests:
            if request not in self._places:
                is_full = len(self._places) == most
                self._places[request] = self._places.popitem(last=False)[1] if is_full else len(self._places)
        return np.array([self._places[request] for request in requests], np.int32)


@dataclass(slots=True, eq=False)
class StepReceiver:
    """Unpacks the steps of one sender after the other."""

    _tables: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    def unpack(self, data: bytes) -> StepInputs:
        """Return the step."""
        (page_size, num_groups, num_state_pages, pictures, adapters), *packed = msgpack.decode(data)
        token_ids, positions, slots, wanted = (np.frombuffer(array, np.int64) for array in packed[: len(_LONG)])
        query_start, kv_len, places, changed, entries, *states = (
            np.frombuffer(array, np.int32) for array in packed[len(_LONG) :]
        )
        counts = -(-kv_len.astype(np.int64) // page_size).repeat(num_groups)
        self._tables = _grown(self._tables, int(places.max()) + 1, int(counts.max()), 0)
        lists = PageLists(np.empty(counts.sum(), np.int32), counts, num_groups)
        flat = self._tables.reshape(-1)
        at = lists.places(places.astype(np.int64), self._tables.shape[1])
        flat[at[changed]] = entries
        lists.entries[:] = flat[at]
        slots = slots if num_groups == 1 else slots.reshape(-1, num_groups)
        read, written = (pages.reshape(len(kv_len), num_state_pages) for pages in states)
        arrays = token_ids, positions, slots, wanted, query_start, kv_len, lists, read, written
        return StepInputs(*arrays, _unpacked(pictures), adapters)


def _packed(pictures: StepPictures | None) -> list[bytes] | None:
    """Return rows, positions and ends of keys of a step's pictures; None: no pictures. Embeddings travel apart."""
    if pictures is None or not pictures.is_read:
        return None
    arrays = (pictures.rows, pictures.positions, pictures.key_end)
    return [b"" if array is None else np.ascontiguousarray(array).tobytes() for array in arrays]


def _unpacked(packed: Sequence[bytes] | None) -> StepPictures | None:
    """Return pictures whose embeddings are still to be received."""
    if packed is None:
        return None
    rows, positions, key_end = map(bytearray, packed)  # torch wants them writable
    return StepPictures(
        NO_ENCODER_WORK,
        np.frombuffer(rows, np.int64),
        (),
        np.frombuffer(positions, np.int64).reshape(3, -1) if positions else None,
        np.frombuffer(key_end, np.int32) if key_end else None,
    )


def _rows(places: NDArray[np.int32], num_groups: int) -> NDArray[np.int32]:
    """Return the rows of `places`, in order: `num_groups` rows for each."""
    return (places[:, None] * num_groups + np.arange(num_groups, dtype=np.int32)).reshape(-1).astype(np.int32)


def _grown(tables: NDArray[np.int32], num_rows: int, width: int, fill: int) -> NDArray[np.int32]:
    """Return `tables` grown to at least `num_rows` rows of `width` entries; new entries are `fill`."""
    rows, columns = tables.shape
    if num_rows <= rows and width <= columns:
        return tables
    larger = np.full((max(num_rows, rows), max(width, columns)), fill, np.int32)
    larger[:rows, :columns] = tables
    return larger
