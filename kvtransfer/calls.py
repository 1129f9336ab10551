"""The calls that a dock takes, and what must be true of their pages. Ranks of one replica send them to each other.

prefill                                          decode
ShipCall(decode blobs)                           ExpectCall(prefill blobs)
OfferCall       once there are pages             WaitCall       until there are pages, then
ChunkCall ...   after every step                 GrantCall
FinishCall(result)
  -> Released                                      -> Offered, Committed ..., Arrived
  -> or Failed, Released                           -> or Failed, WriterStopped

Where the decode side asks for a prefix that the other one has, it calls ExpectCall and AskCall. The source answers
`Asked` with ShipCall, OfferCall and FinishCall, without a chunk between them.
"""

from collections.abc import Sequence
from typing import TypeAlias

from crossdock.kvtransfer.layout import PoolSpec
from crossdock.kvtransfer.messages import MAX_BYTES
from crossdock.kvtransfer.records import Count, GroupPages, OfEpoch, Record, Seconds

MAX_RESULT_BYTES = MAX_BYTES - 4096


class ShipCall(OfEpoch, frozen=True):
    """Begin to send `request` to the replica whose ranks' blobs are `peers`. Ends with one `Released`.

    `deadline_s` is how long the target may be silent before it grants (its wait extends that), and how long one write
    may take. An older epoch still under way is stopped, and released when its writes end.

    Raises:
        IncompatiblePools: the pools cannot exchange pages; the message shows both.
        ValueError: a blob is of another transport, or of no dock.
    """

    peers: tuple[bytes, ...]
    deadline_s: Seconds


class ExpectCall(OfEpoch, frozen=True):
    """Expect `request` from the replica whose ranks' blobs are `peers`. Grant pages when there is room for it.

    Grant only after `Offered`. Otherwise one request could hold pages here and wait for pages at its source, while
    another does the opposite: a deadlock. After the grant, each source may be silent for `deadline_s`. This time
    must cover the computation of a chunk, unless the source sends a wait.

    Raises:
        IncompatiblePools: the pools cannot exchange pages, or a rank that must write here has no blob in `peers`.
        ValueError: a blob is of another transport, or of no dock.
    """

    peers: tuple[bytes, ...]
    deadline_s: Seconds


class AskCall(OfEpoch, frozen=True):
    """Ask the replica of the dock `peer` for the pages of a prefix, as `AskPrefix`. Call `ExpectCall` before.

    The answer is an offer, or the end of the transfer. Either may be lost, so the caller needs a deadline.

    Raises:
        IncompatiblePools: the pools cannot exchange pages; the message shows both.
        ValueError: the blob is of another transport, or of no dock.
    """

    peer: bytes
    peers: tuple[bytes, ...]  # of this replica's ranks
    hashes: tuple[bytes, ...]


class OfferCall(OfEpoch, frozen=True):
    """Notify the target that there are pages for the whole prompt here: it may grant pages now.

    `num_tokens`: of a prefix that the target has asked for, those that are here."""

    num_tokens: Count = 0


class ChunkCall(Record, frozen=True):
    """Send what is new of the first `num_tokens` tokens of `request`, which lie in the pages of `groups`.

    Pages that tokens after the prompt can see must stay untouched until `Released`. Without a shipment under way this
    does nothing."""

    request: str
    groups: tuple[GroupPages, ...]
    num_tokens: Count


class FinishCall(Record, frozen=True):
    """Send the rest, as a chunk, with the partial page, the recurrent state in `state_pages` and `result`. No more
    chunks will come.

    `Arrived` gives `result` (at most MAX_RESULT_BYTES) to the target; with several source ranks, the lowest one's.
    After another shipment of the same request, for example to a second target, make this call again."""

    request: str
    groups: tuple[GroupPages, ...]
    num_tokens: Count
    result: bytes = b""
    state_pages: tuple[Count, ...] = ()


class GrantCall(OfEpoch, frozen=True):
    """Grant pages for the prompt of `request`, except for the first `first_page` pages, which are here, and for its
    recurrent state.

    They belong to the writer until `Arrived`, or until `WriterStopped` after a failure."""

    first_page: Count
    groups: tuple[GroupPages, ...]
    state_pages: tuple[Count, ...] = ()

    @property
    def pages(self) -> list[int]:
        """Return all pages that are granted."""
        return [page for group in self.groups for page in group.pages] + [*self.state_pages]


class CancelShipCall(OfEpoch, frozen=True):
    """Stop writing. `Released` follows in any case, as soon as no write is open, and may come twice."""


class CancelExpectCall(OfEpoch, frozen=True):
    """Stop expecting. `WriterStopped` follows in any case, when that is safe, and may come twice. Until then, give the
    granted pages to no other request."""


class WaitCall(OfEpoch, frozen=True):
    """Notify the other side that about `seconds` will pass before the grant, or before the next chunk."""

    seconds: Seconds


class PeerDeadCall(Record, frozen=True):
    """Note that the process behind `blob` is dead, and fail its transfers. Pages that were being written to the process
    are released. Pages that the process was writing are out of its reach after the grace period."""

    blob: bytes


CancelCall: TypeAlias = CancelShipCall | CancelExpectCall
DockCall: TypeAlias = (
    ShipCall
    | ExpectCall
    | AskCall
    | OfferCall
    | ChunkCall
    | FinishCall
    | GrantCall
    | CancelCall
    | WaitCall
    | PeerDeadCall
)


def check_pages(call: DockCall, spec: PoolSpec) -> None:
    """Check the pages of a call against the pool that `spec` describes.

    Raises:
        ValueError: pages are not of the pool, or not those that the call must name.
    """
    match call:
        case ChunkCall():
            _check_computed(call.groups, call.num_tokens, spec)
        case FinishCall():
            if len(call.result) > MAX_RESULT_BYTES:
                raise ValueError(f"result has {len(call.result)} bytes; at most {MAX_RESULT_BYTES} can be sent")
            _check_computed(call.groups, call.num_tokens, spec)
            _check_state(call.state_pages, spec)
        case GrantCall():
            _check_granted(call, spec)
            _check_state(call.state_pages, spec)
        case _:
            pass


def _check_computed(groups: Sequence[GroupPages], num_tokens: int, spec: PoolSpec) -> None:
    end = min((group.end for group in groups), default=0)
    if not 0 <= num_tokens <= end * spec.page_size:
        raise ValueError(f"num_tokens must be within {end} pages of {spec.page_size}, not {num_tokens}")
    if len(groups) != spec.num_groups:
        raise ValueError(f"pages of {spec.num_groups} groups of layers are needed, not of {len(groups)}")
    if not all(0 <= page < spec.num_pages for group in groups for page in group.pages):
        raise ValueError(f"pages must be within 0 and {spec.num_pages - 1}, not {groups}")


def _check_granted(call: GrantCall, spec: PoolSpec) -> None:
    pages = call.pages
    if len(set(pages)) != len(pages) or not all(0 <= page < spec.num_pages for page in pages):
        raise ValueError(f"pages must be different ones within 0 and {spec.num_pages - 1}, not {pages}")
    if len(call.groups) != spec.num_groups or not all(group.first >= call.first_page >= 0 for group in call.groups):
        raise ValueError(f"pages of {spec.num_groups} groups from {call.first_page} on are needed, not {call.groups}")


def _check_state(pages: Sequence[int], spec: PoolSpec) -> None:
    if bool(spec.state) != bool(pages):
        raise ValueError(f"the recurrent state is {spec.state or 'none'}; its pages are {[*pages]}")
    if not all(0 <= page < spec.num_pages for page in pages):
        raise ValueError(f"pages must be within 0 and {spec.num_pages - 1}, not {[*pages]}")
