"""Embeddings that another replica sends: rows on their way, arrived rows, and the pages where rows land.

Pure: a dock moves the rows, and its owner reports every event here. The other replica sends the rows of all items of a
prompt, as `row_prompt` lays them out. A request waits for an item only while its transfer is under way and rows have a
place here. Every loss ends that wait, and the item is encoded here.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from crossdock.workers.schedule.pictures.items import Item, row_prompt
from crossdock.workers.schedule.request import Request, Status

LEAST_PATIENCE_S = 5.0
"""Seconds that an offer may take, however soon it is predicted: predictions err, and a device may be busy for once."""

LONGEST_PATIENCE_S = 60.0
"""Seconds that an offer may take where more are predicted: the other replica may hang."""


class LandedItem(NamedTuple):
    """Where the rows of an item lie that have all arrived."""

    content_hash: bytes
    pages: Sequence[int]  # that hold the rows, in order, from the first row of the first page on
    num_rows: int
    owner: str  # of the pages


class LandingGrant(NamedTuple):
    """Pages for the rows of a request, to be granted to the other replica."""

    request: Request
    first_page: int  # pages before this one are not needed
    pages: Sequence[int]


class LandingCalls(NamedTuple):
    """Lists the calls to make on the dock."""

    grants: Sequence[LandingGrant]
    cancels: Sequence[Request]  # stop to expect their rows


class ItemRows(NamedTuple):
    """The rows `[first, end)` of a transfer, which belong to one item."""

    item: Item
    first: int
    end: int


@dataclass(slots=True, eq=False)
class RowsTransfer:
    """The transfer of the rows of one attempt at a request."""

    request: Request
    began: float
    due: float  # when the other replica should have offered the rows
    parts: Sequence[ItemRows]
    num_tokens: int  # of the other replica's prompt: rows, and what lies between and after them
    is_offered: bool = False  # the other replica computes the rows
    is_under_way: bool = True
    is_over: bool = False  # no row of it is needed any more
    may_be_written: bool = False  # another process may still write to the pages
    first_page: int = 0  # of the transfer, that was granted
    pages: Sequence[int] | None = None  # here; None: none were granted
    num_rows: int = 0  # that have arrived
    num_readers: int = 0  # copies that are planned, or in steps that have not ended

    def needed(self, has: Callable[[bytes], bool]) -> list[ItemRows]:
        """Return the items that the rest of the prompt reads and whose embeddings are not in memory."""
        request = self.request
        position = max(request.num_computed_tokens, request.expected_cached_tokens)
        if request.status is not Status.WAITING:
            position = request.num_computed_tokens
        return [part for part in self.parts if part.item.end > position and not has(part.item.content_hash)]


@dataclass(slots=True)
class ArrivingRows:
    """The transfers of rows to one replica, and its landing pages."""

    num_pages: int = 0  # 0: no other replica sends embeddings here
    page_size: int = 1  # rows
    lost: Counter[str] = field(default_factory=Counter)  # items whose rows did not come, by reason
    _free: list[int] = field(init=False)
    _transfers: dict[str, RowsTransfer] = field(default_factory=dict)  # by owner
    _landed: dict[bytes, dict[str, LandedItem]] = field(default_factory=dict)  # by content hash and owner
    _cancels: list[Request] = field(default_factory=list)  # since the last `plan`

    def __post_init__(self) -> None:
        self._free = list(range(self.num_pages))

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Return how many landing pages no transfer has."""
        return len(self._free)

    @property
    def num_transfers(self) -> int:
        """Return how many transfers are under way, or own pages."""
        return len(self._transfers)

    def ungranted(self) -> list[RowsTransfer]:
        """Return the transfers under way that have no pages here."""
        return [each for each in self._transfers.values() if each.is_under_way and each.pages is None]

    def num_arrived(self, owner: str) -> int:
        """Return how many rows of a request have arrived, for a look at its progress."""
        transfer = self._transfers.get(owner)
        return transfer.num_rows if transfer is not None else 0

    def find(self, content_hash: bytes) -> LandedItem | None:
        """Return the rows of an item once all have arrived, for any request; None: rows are missing."""
        return next(iter(self._landed.get(content_hash, {}).values()), None)

    def awaits(self, request: Request, item: Item) -> bool:
        """Return whether a request should wait for the rows of an item that has not arrived.

        A request that has its turn and finds no landing pages does not wait: the requests that hold landing pages may
        wait for this request's KV pages.
        """
        transfer = self._transfers.get(request.owner)
        if transfer is None or not transfer.is_under_way or (transfer.is_offered and transfer.pages is None):
            return False
        first_row = transfer.first_page * self.page_size
        return any(part.item.start == item.start and part.first >= first_row for part in transfer.parts)

    # -- events ----------------------------------------------------------------------------------------------------

    def expect(self, request: Request, now: float, patience_s: float = LEAST_PATIENCE_S) -> float:
        """Begin the transfer of a new request's rows, and return when their offer is late.

        That is after twice the predicted time, because predictions err, and after `patience_s` at least. The other
        replica may never have got the request.
        """
        items, num_tokens = row_prompt(request.items, self.page_size)
        pairs = zip(request.items, items, strict=True)
        parts = [ItemRows(item, there.start, there.end) for item, there in pairs]
        due = now + max(patience_s, min(2 * request.rows_within_s, LONGEST_PATIENCE_S))
        self._transfers[request.owner] = RowsTransfer(request, now, due, parts, num_tokens)
        return due

    def offer(self, owner: str) -> None:
        """Note that the other replica will compute the rows as soon as there are pages for them here."""
        if (transfer := self._transfers.get(owner)) is not None:
            transfer.is_offered = True

    def commit(self, owner: str, num_rows: int) -> None:
        """Note that the first `num_rows` rows of a request are in its landing pages."""
        transfer = self._transfers.get(owner)
        if transfer is None or transfer.is_over or transfer.pages is None:
            return
        before, transfer.num_rows = transfer.num_rows, num_rows
        size, first_row = self.page_size, transfer.first_page * self.page_size
        for item, first, end in transfer.parts:
            if first >= first_row and before < end <= num_rows:
                low, high = first // size - transfer.first_page, -(-end // size) - transfer.first_page
                landed = LandedItem(item.content_hash, transfer.pages[low:high], item.num_rows, owner)
                self._landed.setdefault(item.content_hash, {})[owner] = landed

    def arrive(self, owner: str, num_rows: int) -> None:
        """Note the good end of a transfer: all rows are here, and no process writes any more."""
        transfer = self._transfers.get(owner)
        if transfer is None:
            return
        transfer.may_be_written = False
        if num_rows == transfer.num_tokens:
            self.commit(owner, num_rows)
            transfer.is_under_way = False
        else:  # rows of another prompt
            self._lose(transfer, "failed")
            self._end(transfer)
        self._release(transfer)

    def fail(self, owner: str) -> None:
        """Note that no more rows will come. Arrived rows stay valid."""
        if (transfer := self._transfers.get(owner)) is not None:
            self._lose(transfer, "failed")
            if transfer.pages is None:
                self._end(transfer)

    def stop(self, owner: str) -> None:
        """Note that no process writes to the landing pages of a request any more."""
        if (transfer := self._transfers.get(owner)) is not None:
            transfer.may_be_written = False
            self._release(transfer)

    # -- between two steps -----------------------------------------------------------------------------------------

    def plan(self, now: float, has: Callable[[bytes], bool]) -> LandingCalls:
        """End transfers that are no longer needed, and give landing pages to offered requests, the most urgent first.

        `has`: whether the embeddings of a content hash are in memory. Call this before every step.
        """
        for transfer in list(self._transfers.values()):
            if not transfer.is_over and self._has_ended(transfer, has):
                self._end(transfer)
            elif transfer.is_under_way and not transfer.is_offered and now >= transfer.due:
                self._give_up(transfer, "late")
        grants = list[LandingGrant]()
        offered = sorted((each for each in self.ungranted() if each.is_offered), key=_turn)
        while offered:
            needed = offered[0].needed(has)
            wanted = -(-offered[0].num_tokens // self.page_size) - needed[0].first // self.page_size
            if wanted > self.num_pages:
                self._give_up(offered.pop(0), "no room")
            elif wanted <= len(self._free):
                grants.append(self._grant(offered.pop(0), needed[0].first // self.page_size, wanted))
            else:
                break
        if offered and any(each.request.awaits_rows and not each.is_offered for each in self.ungranted()):
            self._give_up(offered[-1], "no room")  # the other replica may need what this one holds there
        cancels, self._cancels = self._cancels, []
        return LandingCalls(grants, cancels)

    def refuse(self, owner: str) -> None:
        """Note that a request encodes its items here, if rows were offered and found no landing pages."""
        transfer = self._transfers.get(owner)
        if transfer is not None and transfer.is_under_way and transfer.is_offered and transfer.pages is None:
            self._give_up(transfer, "no room")

    def begin_read(self, landed: LandedItem) -> None:
        """Keep landing pages until the step has ended that copies rows from them."""
        self._transfers[landed.owner].num_readers += 1

    def end_read(self, landed: LandedItem) -> None:
        """Note that such a step has ended, or will not begin."""
        if (transfer := self._transfers.get(landed.owner)) is not None and transfer.num_readers:
            transfer.num_readers -= 1
            self._release(transfer)

    def drop_reads(self) -> None:
        """Note that all steps in flight are over, and copies nothing that was planned."""
        for transfer in list(self._transfers.values()):
            transfer.num_readers = 0
            self._release(transfer)

    # -- changing --------------------------------------------------------------------------------------------------

    def _has_ended(self, transfer: RowsTransfer, has: Callable[[bytes], bool]) -> bool:
        """Return whether no row of a transfer is needed any more. A queued request may lose embeddings in memory."""
        request = transfer.request
        if request.status is Status.FINISHED:
            return True
        is_queued = request.status is Status.WAITING
        if is_queued and not (transfer.is_offered and transfer.pages is None):
            return False
        return not transfer.needed(has)

    def _grant(self, transfer: RowsTransfer, first_page: int, num_pages: int) -> LandingGrant:
        transfer.pages = tuple(self._free.pop() for _ in range(num_pages))
        transfer.first_page, transfer.may_be_written = first_page, True
        return LandingGrant(transfer.request, first_page, transfer.pages)

    def _give_up(self, transfer: RowsTransfer, reason: str) -> None:
        """End a transfer that has no pages here: its items are encoded here."""
        self._lose(transfer, reason)
        self._cancels.append(transfer.request)
        self._end(transfer)

    def _lose(self, transfer: RowsTransfer, reason: str) -> None:
        """Note that the missing rows of a transfer will not come."""
        if transfer.is_under_way:
            transfer.is_under_way = transfer.request.is_encoded_elsewhere = False
            self.lost[reason] += sum(part.end > transfer.num_rows for part in transfer.needed(lambda _: False))

    def _end(self, transfer: RowsTransfer) -> None:
        """Note that no row of a transfer is needed any more, and stop it."""
        transfer.is_over = True
        if transfer.is_under_way:
            transfer.is_under_way = transfer.request.is_encoded_elsewhere = False
            self._cancels.append(transfer.request)
        for part in transfer.parts:
            found = self._landed.get(part.item.content_hash, {})
            found.pop(transfer.request.owner, None)
            if not found:
                self._landed.pop(part.item.content_hash, None)
        self._release(transfer)

    def _release(self, transfer: RowsTransfer) -> None:
        """Free the pages of a transfer that is over, once no process writes to them and no step reads them."""
        is_used = not transfer.is_over or transfer.may_be_written or transfer.num_readers
        if not is_used and self._transfers.pop(transfer.request.owner, None) is not None:
            self._free.extend(transfer.pages or ())


def _turn(transfer: RowsTransfer) -> tuple[bool, tuple[int, int], float]:
    """Return the order in which offered requests get landing pages: those that hold KV pages first."""
    request = transfer.request
    return (request.status is Status.WAITING, request.urgency, transfer.began)
