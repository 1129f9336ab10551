"""Which pictures a step encodes, and whose embeddings stay in memory. Pure: the embeddings are on the device.

A picture is encoded in the step of the first chunk that reads it, and never before. Its embeddings stay as long as a
request is inside the picture. After that they are evicted when room is needed, the least recently used first. Only a
more urgent request takes the room of a picture that others are inside: their rest of the picture is encoded again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.whole_items import check_fit, least_tokens, most_tokens
from crossdock.workers.schedule.policies.chunking import Candidate, ChunkBudget
from crossdock.workers.schedule.request.batch import NO_ENCODER_WORK, EncoderWork
from crossdock.workers.schedule.request.items import Item, items_in
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import InvalidField


class ItemFailure(NamedTuple):
    """Why an item has no embeddings."""

    reason: str
    is_passing: bool  # such as memory that was short: the same item may be encoded another time


class ItemStop(NamedTuple):
    """An item before which a chunk may stop, and the earlier items that this chunk would encode."""

    start: int  # of the item
    before: int  # tokens of the chunk that ends before the item; 0 or less: there is none
    limit: str  # why the chunk ends before the item, if it does
    has_room: bool  # in the cache: the item may be encoded in this step, if a token of it then fits
    seconds: float  # seconds that the step then takes for items
    has_floor: bool  # it may also take time that streams do not leave: it could encode no less


@dataclass(slots=True)
class EncoderTotals:
    """Counts since the start."""

    num_encoded: int = 0  # items
    num_embedding_tokens: int = 0  # embedding tokens of the encoded items
    num_hits: int = 0  # items that a request read from the cache when it reached them
    num_evicted: int = 0


@dataclass(slots=True)
class Encoding:
    """Plans the encoder's work for the chunks of each step.

    `capacity`: embedding tokens that the cache holds. One item may exceed the capacity where its request would
    otherwise stand still: inside a picture, with the next picture in the same page.
    """

    capacity: int
    cost: EncoderCost | None = None  # None: encoding is free, as far as the scheduler knows
    keeps_items_whole: bool = False  # chunks may not end inside an item, see whole_items.py
    totals: EncoderTotals = field(default_factory=EncoderTotals)
    _rows: OrderedDict[bytes, int] = field(default_factory=OrderedDict)  # rows by content, least recently used first
    _num_rows: int = 0
    _readers: dict[bytes, dict[str, Request]] = field(default_factory=dict)  # requests inside the item, by content
    _in_step: set[str] = field(default_factory=set)  # ids of the requests with a chunk in this step
    _urgency: Callable[[Request], tuple[float, float]] = lambda request: request.urgency  # as given to `begin_step`
    _evicted: list[bytes] = field(default_factory=list)  # for the next step, as `_planned`
    _planned: dict[bytes, Item] = field(default_factory=dict)
    _first_without_room: str = ""  # request id: the first in this step that stands still, because others hold the rows

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def num_embedding_tokens(self) -> int:
        """Return how many embedding tokens are in memory."""
        return self._num_rows

    def seconds(self, items: Sequence[Item]) -> float:
        """Return the predicted seconds in which `items` are encoded in one batch; 0 without a cost."""
        return self.cost.seconds(items) if self.cost is not None else 0.0

    def seconds_left(self, request: Request) -> float:
        """Return the seconds of the encoder that the rest of a prompt needs."""
        if not request.items:
            return 0.0
        end = request.num_tokens
        return self.seconds(self._missing(request, end - request.num_uncached_tokens, end))

    def least_tokens(self, request: Request, start: int, page_size: int) -> int:
        """Return the tokens of the shortest chunk from `start` on; 0: every chunk may end on a page boundary."""
        if not self.keeps_items_whole:
            return 0
        return least_tokens(request.items, start, request.num_tokens, page_size)

    def outside_items(self, request: Request, start: int, num_tokens: int, page_size: int) -> int:
        """Return the tokens of the longest chunk of at most `num_tokens` that ends where it may."""
        stop = start + num_tokens
        if not self.keeps_items_whole or not request.items or stop == request.num_tokens:
            return num_tokens
        return most_tokens(request.items, start, stop, page_size)

    def check_states(self, has_states: bool) -> None:
        """Raise ValueError where recurrent states are kept inside items that one chunk must compute whole."""
        if self.keeps_items_whole and has_states:
            raise ValueError(
                "a model with recurrent layers takes no pictures that attend in both directions: its chunks end where "
                "a state is kept, which may be inside a picture"
            )

    def check(self, request: Request, config: SchedulerConfig, page_size: int) -> None:
        """Check that the request's items can be encoded here.

        Raises:
            InvalidField: the embeddings of an item alone, or of all where chunks are off, exceed the cache. Or an item
                that must be computed whole does not fit into a chunk.
        """
        if not self.capacity:
            raise InvalidField("prompt has pictures, and this replica encodes none", "prompt")
        is_chunked = config.enable_chunked_prefill
        rows = {item.content_hash: item.num_embedding_tokens for item in request.items}
        most = max(rows.values(), default=0) if is_chunked else sum(rows.values())
        if most > self.capacity:
            what = "a picture" if is_chunked else "all pictures together, which one step must compute,"
            raise InvalidField(
                f"{what} of this prompt needs {most} embedding tokens; the cache holds {self.capacity} "
                f"(--mm-encoder-cache)",
                "prompt",
            )
        if self.keeps_items_whole and is_chunked:
            check_fit(request, page_size, *config.most_chunk_tokens)

    # -- planning --------------------------------------------------------------------------------------------------

    def begin_step(self, urgency: Callable[[Request], tuple[float, float]] = lambda request: request.urgency) -> None:
        """Let go of embeddings whose requests have passed the item, have ended or lost their pages.

        `urgency`: of a request, see `RequestTable.urgency`.
        """
        self._first_without_room = ""
        self._urgency = urgency
        self._in_step.clear()
        for content_hash, readers in list(self._readers.items()):
            for name, request in list(readers.items()):
                if not _is_inside(request, content_hash):
                    del readers[name]
            if not readers:
                del self._readers[content_hash]

    def stops(self, request: Request, start: int, page_size: int) -> Iterator[ItemStop]:
        """Yield where a chunk from `start` on may have to stop: before each item that needs something, in order.

        Each stop assumes that the chunk passes all stops before it. Where an item lacks room, no further stop follows.

        Once a request stands still for lack of room, later requests of this step get none: small items would keep a
        large one out for ever. Only requests inside an item go on, so that they give their room back. No request waits
        for the room of a less urgent one, which streams may leave no time to go on.
        """
        passed = list[Item]()
        passed_seconds = 0.0
        seen = set[bytes]()
        kept = self._kept_from(request)
        is_inside = any(request.id in readers for readers in self._readers.values())
        may_exceed = is_inside or not kept
        has_turn = is_inside or self._first_without_room in ("", request.id)
        room = self.capacity - sum(self._rows.get(content_hash, 0) for content_hash in kept) if has_turn else 0
        for item in items_in(request.items, start, request.num_tokens):
            if item.content_hash in seen or (has_turn and item.content_hash in kept):
                continue
            seen.add(item.content_hash)
            before = self._before(request, start, item, page_size)
            has_room = item.num_embedding_tokens <= room or (may_exceed and before <= 0)
            room -= item.num_embedding_tokens
            if has_room and item.content_hash in self._rows:  # it stays: items before it cannot have its rows
                continue
            passed.append(item)
            seconds = self._added(passed)
            reason = f"takes {seconds * 1e3:.0f} ms" if has_room else "finds no room in the cache"
            limit = f"encoder: an item of {item.num_embedding_tokens} rows {reason}"
            is_least = not self._planned and (not passed_seconds or before <= 0)
            has_floor = is_least or seconds <= passed_seconds  # it adds none, or the step can encode no less
            yield ItemStop(item.start, before, limit, has_room, seconds, has_floor)
            passed_seconds = seconds

    def stand_still(self, request: Request) -> None:
        """Note that a request gets no chunk in this step, because others hold the rows of its next item."""
        self._first_without_room = self._first_without_room or request.id

    def _before(self, request: Request, start: int, item: Item, page_size: int) -> int:
        """Return the tokens of a chunk from `start` on that ends before an item; 0 or less: there is no such chunk."""
        if self.keeps_items_whole:
            return most_tokens(request.items, start, item.start, page_size)
        return item.start // page_size * page_size - start

    def take(self, request: Request, start: int, num_tokens: int) -> float:
        """Plan the items of a chunk, and keep their embeddings. Return the seconds that this adds to the step."""
        missing = self._missing(request, start, start + num_tokens)
        seconds = self._added(missing)
        self._in_step.add(request.id)
        for item in items_in(request.items, start, start + num_tokens):
            readers = self._readers.setdefault(item.content_hash, {})
            if item.content_hash in self._rows:
                self.totals.num_hits += request.id not in readers
                self._rows.move_to_end(item.content_hash)
            readers[request.id] = request
        for item in missing:
            self._make_room(item.num_embedding_tokens, request)
            self._rows[item.content_hash] = item.num_embedding_tokens
            self._num_rows += item.num_embedding_tokens
            self._planned[item.content_hash] = item
            self.totals.num_encoded += 1
            self.totals.num_embedding_tokens += item.num_embedding_tokens
        return seconds

    def take_work(self) -> EncoderWork:
        """Take the encoder's work that the next step does before its forward pass. Steps do their work in order."""
        if not self._evicted and not self._planned:
            return NO_ENCODER_WORK
        work = EncoderWork(tuple(self._evicted), tuple(self._planned.values()))
        self._evicted = []
        self._planned = {}
        return work

    def forget(self, content_hash: bytes) -> None:
        """Forget the embeddings of an item that could not be encoded: the next request that reads it tries again."""
        if content_hash in self._rows:
            self._evict(content_hash)

    def clear(self) -> None:
        """Forget all embeddings: steps that were to encode some may not have ended."""
        self._rows.clear()
        self._readers.clear()
        self._in_step.clear()
        self._num_rows = 0
        self._evicted = []
        self._planned = {}
        self._first_without_room = ""

    def _missing(self, request: Request, start: int, end: int) -> list[Item]:
        """Return the items in `[start, end)` whose embeddings are not in memory, each content once."""
        found: dict[bytes, Item] = {}
        for item in items_in(request.items, start, end):
            if item.content_hash not in self._rows:
                found.setdefault(item.content_hash, item)
        return list(found.values())

    def _added(self, items: Sequence[Item]) -> float:
        """Return the seconds that `items` add to the step, beside the items that it already encodes."""
        planned = list(self._planned.values())
        return self.seconds([*planned, *items]) - self.seconds(planned)

    def _kept_from(self, request: Request) -> set[bytes]:
        """Return the contents whose rows a request cannot take: this step or an equally urgent request reads them.

        A starving request goes before all classes. It has a chunk in each step that has time for one.
        """
        urgency = self._urgency(request)
        return {
            content_hash
            for content_hash, readers in self._readers.items()
            if any(each.id in self._in_step or self._urgency(each) <= urgency for each in readers.values())
        }

    def _most_urgent_reader(self, content_hash: bytes) -> tuple[float, float]:
        return min(map(self._urgency, self._readers.get(content_hash, {}).values()), default=(inf, 0))

    def _make_room(self, num_embedding_tokens: int, request: Request) -> None:
        """Evict embeddings for an item of a request: first of items that no request is inside, then by urgency."""
        if self._num_rows + num_embedding_tokens <= self.capacity:
            return
        kept = self._kept_from(request)
        found = [content_hash for content_hash in self._rows if content_hash not in kept]
        for content_hash in sorted(found, key=self._most_urgent_reader, reverse=True):  # stable: least recently used
            if self._num_rows + num_embedding_tokens <= self.capacity:
                return
            self._evict(content_hash)

    def _evict(self, content_hash: bytes) -> None:
        self._readers.pop(content_hash, None)
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


class PromptChunk(NamedTuple):
    """The next chunk of a prompt."""

    num_tokens: int
    limit: str = ""  # why the chunk is not longer, if an item is the reason


def chunk_with_items(
    encoding: Encoding, request: Request, prompt: Candidate, budget: ChunkBudget, threshold: int, page_size: int
) -> PromptChunk:
    """Return the chunk of a prompt with items, with the items that must be encoded for it.

    An item is taken if its rows fit, and then a token of it. Else the chunk ends on the page boundary before the item.
    Where items are kept whole, no chunk ends inside one.
    """
    start = prompt.start
    limit = ""
    threshold = max(threshold, prompt.least) if threshold else 0
    size = 1 if prompt.least else page_size  # `outside_items` then knows where a chunk may end
    num_tokens = encoding.outside_items(request, start, budget.chunk(prompt, threshold, size), page_size)
    for stop in encoding.stops(request, start, page_size):
        if stop.start >= start + num_tokens:
            break
        if stop.has_room:
            passing = prompt._replace(encoder_seconds=stop.seconds, has_floor=stop.has_floor)
            longer = encoding.outside_items(request, start, budget.chunk(passing, threshold, size), page_size)
            if start + longer > max(stop.start, start):
                num_tokens = longer
                continue
        if not stop.has_room and stop.before <= 0:
            encoding.stand_still(request)
        num_tokens = min(num_tokens, max(stop.before, 0))
        limit = stop.limit
        break
    if not budget.is_chunked and start + num_tokens < request.num_tokens:
        num_tokens = 0
    return PromptChunk(num_tokens, limit)
