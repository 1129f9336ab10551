"""Outputs of a sender or a receiver, for its dock: a message to send, a write to begin, an event to report."""

from dataclasses import dataclass
from typing import TypeAlias

from crossdock.kvtransfer.events import Event
from crossdock.kvtransfer.messages import Pages, TransferMessage
from crossdock.kvtransfer.plan import PageCopies


@dataclass(frozen=True, slots=True)
class Send:
    """Asks to send `message` to `peer`."""

    peer: str
    message: TransferMessage


@dataclass(frozen=True, slots=True)
class Write:
    """Asks to write pages, and then to deliver `message`.

    (request, epoch, peer) identifies the write: a delivery has one write open at most."""

    peer: str
    copies: tuple[PageCopies, ...]
    message: Pages


ProtocolOutput: TypeAlias = Send | Write | Event
