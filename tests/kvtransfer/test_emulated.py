"""An emulated link: messages arrive after the seconds of their pages, in order, and failures keep their numbers."""

from collections.abc import Iterator, Sequence

import pytest

from crossdock.kvtransfer.emulated import EmulatedTransport
from crossdock.kvtransfer.layout import LayerShape, PoolLayout, PoolSpec
from crossdock.kvtransfer.plan import PageCopies, plan_writes
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Memory, Peer, Received, TransportEvent, WriteDone, WriteFailed
from tests.waiting import eventually

SPEC = PoolSpec.whole(PoolLayout([LayerShape(1, 64, 0)], 16, 1), "m", "bytes", 64)  # pages of 1 KiB
RATE = 100 * 1024.0  # bytes per second


@pytest.fixture
def ends() -> Iterator[tuple[EmulatedTransport, TcpTransport, Peer]]:
    """Yield a link, and the transport that it leads to."""
    link, target = EmulatedTransport(TcpTransport(), RATE), TcpTransport()
    memory = Memory(0, SPEC.nbytes, bytes_per_second=RATE)
    link.open("source", memory)
    peer = Peer("target", "tcp", target.open("target", memory), SPEC)
    yield link, target, peer
    link.close()
    target.close()


def pages(count: int) -> Sequence[PageCopies]:
    return [PageCopies(0, tuple(range(count)), tuple(range(count)))]


def test_writes_arrive_one_after_the_other_at_rate_of_link(
    ends: tuple[EmulatedTransport, TcpTransport, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, target, peer = ends
    now = [10.0]
    monkeypatch.setattr("crossdock.kvtransfer.emulated.time.monotonic", lambda: now[0])
    link.connect(peer, SPEC.page_bytes, SPEC.num_pages, plan_writes(SPEC, SPEC))
    numbers = [link.write("target", pages(10), b"ten"), link.write("target", pages(5), b"five")]
    link.send("target", b"at once")
    found: list[bytes] = []
    done: list[TransportEvent] = []

    def arrived(count: int) -> bool:
        done.extend(link.poll(0.0))
        found.extend(event.message for event in target.poll(0.01) if isinstance(event, Received))
        return len(found) == count and len(done) == count - 1

    eventually(lambda: arrived(1), "the message has no pages")
    now[0] += 0.0999  # of a tenth of a second
    assert arrived(1)
    now[0] += 0.0002
    eventually(lambda: arrived(2), "ten pages take a tenth of a second")
    now[0] += 0.05
    eventually(lambda: arrived(3), "five more take half as long")
    assert found == [b"at once", b"ten", b"five"]
    assert done == [WriteDone(number) for number in numbers]


def test_write_on_its_way_to_a_peer_that_is_lost_fails_with_its_own_number(
    ends: tuple[EmulatedTransport, TcpTransport, Peer],
) -> None:
    link, _, peer = ends
    link.connect(peer, SPEC.page_bytes, SPEC.num_pages, plan_writes(SPEC, SPEC))
    link.write("target", pages(1), b"one")
    number = link.write("target", pages(1), b"two")
    link.disconnect("target")
    found: list[TransportEvent] = []

    def has_failed() -> bool:
        found.extend(link.poll(0.01))
        return any(isinstance(event, WriteFailed) and event.write == number for event in found)

    eventually(has_failed, "no failure is reported")
