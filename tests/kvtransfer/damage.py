"""Bits that flip on their way to a dock of TCP, as a cable or a memory may flip them."""

from collections.abc import Callable

from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.messages import Pages, decode
from crossdock.kvtransfer.plan import plan_writes
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Received, TransportEvent


def damage_pages(dock: Dock, is_wanted: Callable[[Pages], bool]) -> list[Pages]:
    """Flip one bit of the last page that comes with a message, if it is wanted. Call this before a transfer begins.

    Returns the messages of damaged pages, a list that grows.
    """
    transport = dock._transport
    assert isinstance(transport, TcpTransport)
    poll, damaged = transport.poll, list[Pages]()

    def polled(seconds: float) -> list[TransportEvent]:
        events = poll(seconds)
        for event in events:
            message = decode(event.message) if isinstance(event, Received) else None
            if isinstance(event, Received) and isinstance(message, Pages) and is_wanted(message):
                at = _last_byte_of(dock, event.peer, message)
                if at is not None:
                    transport._memory[at] ^= 0x10
                    damaged.append(message)
        return events

    transport.poll = polled  # type: ignore[method-assign]
    transport.wake()
    return damaged


def _last_byte_of(dock: Dock, peer: str, message: Pages) -> int | None:
    """Return where the last byte of a write lies in the dock's pool; None: there was none, or nothing awaits it."""
    grant, source = dock._core._receiver.grant_of(peer, message), dock._core._peers.spec_of(peer)
    if grant is None or source is None:
        return None
    end = message.first_page + message.num_pages
    written = [
        (group, group.pages[max(message.first_page - group.first, 0) : end - group.first]) for group in grant.groups
    ]
    pages = [pages if group.first < end else () for group, pages in written]
    pages.append(message.checksum.state_pages if message.checksum else ())
    for ranges, numbers in reversed(list(zip(plan_writes(source, dock.spec), pages, strict=False))):
        if ranges and numbers:
            return numbers[-1] * dock.spec.page_bytes + ranges[-1].target + ranges[-1].length - 1
    return None
