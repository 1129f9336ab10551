"""Which pictures a step encodes, and whose embeddings stay in memory. Pure: the embeddings are on the device.

A picture is encoded in the step of the first chunk that reads it, and never before. Its embeddings stay as long as a
request is inside the picture. After that they go when the room is needed, the least recently used first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crossdock.workers.schedule.encoder_cost import EncoderCost
from crossdock.workers.schedule.items import Item, items_in
from crossdock.workers.schedule.request import InvalidField, Request, Status


class EncoderWork(NamedTuple):
    """Lists the work of a step before its forward pass: forget embeddings, then encode items in one batch."""

    evicted: Sequence[bytes] = ()  # content hashes
    items: Sequence[Item] = ()


NO_ENCODER_WORK = EncoderWork()


class ItemChunk(NamedTuple):
    """A chunk of a prompt with items, and the items to encode for it."""

    num_tokens: int
    items: Sequence[Item] = ()
    seconds: float = 0.0  # of these items
    limit: str = ""  # why the chunk is not longer, if an item is the reason


@dataclass(slots=True)
class EncoderTotals:
    """Counts since the start."""

    num_encoded: int = 0  # items
    num_rows: int = 0  # of these
    num_hits: int = 0  # items that a request read from the cache when it reached them
    num_evicted: int = 0


@dataclass(slots=True)
class Encoding:
    """Plans the encoder's work for the chunks of each step.

    `capacity`: rows of embeddings that the cache holds. One item may exceed it where its request would stand still
    otherwise: inside a picture, with the next one in the same page.
    """

    capacity: int
    cost: EncoderCost | None = None  # None: encoding is free, as far as the scheduler knows
    totals: EncoderTotals = field(default_factory=EncoderTotals)
    _rows: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # rows by content, least recently used first
    _num_rows: int = 0
    _readers: dict[bytes, dict[str, Request]] = field(default_factory=dict)  # requests inside the item, by content
    _evicted: list[bytes] = field(default_factory=list)  # for the next step, as `_planned`
    _planned: dict[bytes, Item] = field(default_factory=dict)

    # -- reading ---------------------------------------------------------------------------------------------------

    def has(self, content_hash: bytes) -> bool:
        """Return whether the embeddings are in memory, or will be before the next step computes."""
        return content_hash in self._rows

    @property
    def num_rows(self) -> int:
        """Return how many rows of embeddings are in memory."""
        return self._num_rows

    def seconds(self, items: Sequence[Item]) -> float:
        """Return the predicted seconds in which `items` are encoded in one batch; 0 without a cost."""
        return self.cost.seconds(items) if self.cost is not None else 0.0

    def seconds_left(self, request: Request) -> float:
        """Return the seconds of the encoder that the rest of a request's prompt needs."""
        end = request.num_tokens
        return self.seconds(self._missing(request, end - request.num_uncached_tokens, end)) if request.items else 0.0

    def check(self, request: Request, is_chunked: bool) -> None:
        """Check that the request's items can be encoded here.

        Raises:
            InvalidField: the embeddings of an item alone, or of all where chunks are off, exceed the cache.
        """
        rows = {item.content_hash: item.num_rows for item in request.items}
        most = max(rows.values(), default=0) if is_chunked else sum(rows.values())
        if most > self.capacity:
            what = "a picture" if is_chunked else "all pictures together, which one step must compute,"
            raise InvalidField(
                f"{what} of this prompt needs {most} rows of embeddings; the cache holds {self.capacity} "
                f"(--mm-encoder-cache)",
                "prompt",
            )

    # -- planning --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Let go of embeddings whose requests have passed the item, have ended or lost their pages."""
        for content_hash, readers in list(self._readers.items()):
            for name, request in list(readers.items()):
                if not _is_inside(request, content_hash):
                    del readers[name]
            if not readers:
                del self._readers[content_hash]

    def chunk(self, request: Request, start: int, size_of: Callable[[float], int], page_size: int) -> ItemChunk:
        """Return the chunk of a request that begins at `start`, with the items that must be encoded for it.

        `size_of(seconds)` returns how many tokens fit if encoding takes `seconds` of the step. An item is taken if a
        token of it then fits, and its rows: else the chunk ends on the page boundary before it.
        """
        chunk, seen = ItemChunk(size_of(0.0)), set[bytes]()
        room = self.capacity - self._num_held()
        may_exceed = not self._readers or any(request.id in readers for readers in self._readers.values())
        for item in items_in(request.items, start, request.num_tokens):
            if item.start >= start + chunk.num_tokens:
                break
            if item.content_hash in seen or item.content_hash in self._readers:
                continue
            seen.add(item.content_hash)
            before = item.start // page_size * page_size - start
            has_room = item.num_rows <= room or (may_exceed and before <= 0)
            room -= item.num_rows
            if has_room and item.content_hash in self._rows:  # it stays: items before it cannot have its rows
                continue
            items = [*chunk.items, item]
            seconds = self._added(items)
            num_tokens = size_of(seconds)
            if has_room and start + num_tokens > max(item.start, start):
                chunk = ItemChunk(num_tokens, items, seconds)
                continue
            reason = f"takes {seconds * 1e3:.0f} ms" if has_room else "finds no room in the cache"
            limit = f"encoder: an item of {item.num_rows} rows {reason}"
            return chunk._replace(num_tokens=min(chunk.num_tokens, max(before, 0)), limit=limit)
        return chunk

    def take(self, request: Request, start: int, num_tokens: int) -> float:
        """Plan the items of a chunk, and keep their embeddings. Return the seconds that this adds to the step."""
        missing = self._missing(request, start, start + num_tokens)
        seconds = self._added(missing)
        for item in items_in(request.items, start, start + num_tokens):
            readers = self._readers.setdefault(item.content_hash, {})
            if item.content_hash in self._rows:
                self.totals.num_hits += request.id not in readers
                self._rows.move_to_end(item.content_hash)
            readers[request.id] = request
        for item in missing:
            self._make_room(item.num_rows)
            self._rows[item.content_hash] = item.num_rows
            self._num_rows += item.num_rows
            self._planned[item.content_hash] = item
            self.totals.num_encoded += 1
            self.totals.num_rows += item.num_rows
        return seconds

    def take_work(self) -> EncoderWork:
        """Return what the next step must do before it computes. Every step in order must do its own."""
        if not self._evicted and not self._planned:
            return NO_ENCODER_WORK
        work = EncoderWork(tuple(self._evicted), tuple(self._planned.values()))
        self._evicted, self._planned = [], {}
        return work

    def clear(self) -> None:
        """Forget all embeddings: steps that were to encode some may not have ended."""
        self._rows.clear()
        self._readers.clear()
        self._num_rows, self._evicted, self._planned = 0, [], {}

    def _missing(self, request: Request, start: int, end: int) -> list[Item]:
        """Return the items in `[start, end)` whose embeddings are not in memory, each content once."""
        found: dict[bytes, Item] = {}
        for item in items_in(request.items, start, end):
            if item.content_hash not in self._rows:
                found.setdefault(item.content_hash, item)
        return list(found.values())

    def _added(self, items: Sequence[Item]) -> float:
        """Return the seconds that `items` add to the step, beside those that it encodes already."""
        planned = list(self._planned.values())
        return self.seconds([*planned, *items]) - self.seconds(planned)

    def _num_held(self) -> int:
        """Return the rows that must stay: of items that a request is inside."""
        return sum(rows for content_hash, rows in self._rows.items() if content_hash in self._readers)

    def _make_room(self, num_rows: int) -> None:
        for content_hash in [*self._rows]:
            if self._num_rows + num_rows <= self.capacity:
                return
            if content_hash not in self._readers:
                self._num_rows -= self._rows.pop(content_hash)
                self.totals.num_evicted += 1
                if self._planned.pop(content_hash, None) is None:
                    self._evicted.append(content_hash)


def _is_inside(request: Request, content_hash: bytes) -> bool:
    """Return whether the rest of a running prompt begins within an item of that content."""
    if request.status is not Status.RUNNING:
        return False
    computed = request.num_computed_tokens
    return any(
        item.content_hash == content_hash and item.start < request.num_scheduled_tokens and item.end > computed
        for item in request.items
    )
