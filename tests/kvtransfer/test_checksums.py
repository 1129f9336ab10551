"""A bit that flips on its way fails the transfer, between pools of any layouts, and what came before stays valid."""

import logging
import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.kvtransfer.calls import ChunkCall, DockCall, ExpectCall, FinishCall, GrantCall, ShipCall
from crossdock.kvtransfer.checksums import Checksums
from crossdock.kvtransfer.dock import Dock
from crossdock.kvtransfer.events import Arrived, Committed, Event, Failed, Reason, Released, WriterStopped
from crossdock.kvtransfer.layout import LayerShape, PageGroup, PoolSpec
from crossdock.kvtransfer.messages import Grant, Pages
from crossdock.kvtransfer.plan import PageCopies, plan_writes
from crossdock.kvtransfer.records import GroupPages
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import Memory
from tests.kvtransfer.damage import damage_pages

from .shards import shard_model

LAYERS = (LayerShape(4, 2, 2), LayerShape(2, 4, 4), LayerShape(4, 2, 1), LayerShape(1, 5, 0))
GROUPS = (PageGroup(None, (0, 1)), PageGroup(8, (2, 3)))
PAGE = 4  # tokens
DIVISIONS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]  # tensor ranks, stages


def spec_of(division: tuple[int, int], rank: int, num_pages: int = 16, state: str = "") -> PoolSpec:
    shards = shard_model(LAYERS, *division)
    return PoolSpec("m", "float16", 2, PAGE, LAYERS, shards, rank, num_pages, GROUPS, state)


# -- one write ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from(DIVISIONS),
    target=st.sampled_from(DIVISIONS),
    ranks=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    has_state=st.booleans(),
    pages=st.permutations(range(16)),
    seen=st.integers(0, 3),
    data=st.data(),
)
def test_checksum_changes_with_every_byte_that_travels_and_no_other(
    source: tuple[int, int],
    target: tuple[int, int],
    ranks: tuple[int, int],
    has_state: bool,
    pages: list[int],
    seen: int,
    data: st.DataObject,
) -> None:
    """Pages 1 to 3 of a request are written, of the second group those from `seen` on. The oracle is the plan: it says
    which bytes of the target's pool come from this source."""
    state = "s" if has_state and source == target else ""
    here, there = (
        spec_of(division, rank % (division[0] * division[1]), state=state)
        for division, rank in zip((source, target), (ranks[0], ranks[0] if state else ranks[1]), strict=True)
    )
    memory = bytearray((7 * at + at // 251) % 256 for at in range(here.nbytes))
    received = bytearray(there.nbytes)
    groups = (GroupPages(0, tuple(pages[:4])), GroupPages(seen, tuple(pages[4 + seen : 8])))
    states = tuple(pages[8:10]) if state else ()
    grant = Grant("r", 1, 0, groups, states)
    copies = [PageCopies(0, (5, 6, 7), groups[0].pages[1:]), PageCopies(1, (9, 10, 11)[max(seen - 1, 0) :], ())]
    copies[1] = PageCopies(1, copies[1].source_pages, groups[1].pages[max(1 - seen, 0) :])
    copies += [PageCopies(2, (12, 13), states)] if states else []
    travelled = set[int]()
    for copy in copies:
        for begin, page in zip(copy.source_pages, copy.target_pages, strict=True):
            for part in plan_writes(here, there)[copy.group]:
                at, end = begin * here.page_bytes + part.source, page * there.page_bytes + part.target
                received[end : end + part.length] = memory[at : at + part.length]
                travelled.update(range(end, end + part.length))

    checksum = Checksums(memoryview(memory), here).of_write(copies, there)
    message = Pages("r", 1, 0, 1, 3, 16, here.rank, 1, checksum=checksum)
    target_checksums = Checksums(memoryview(received), there)
    assert target_checksums.agrees(message, grant, here)
    at = data.draw(st.sampled_from(sorted(travelled) or [0]) | st.integers(0, there.nbytes - 1))
    received[at] ^= data.draw(st.integers(1, 255))
    assert target_checksums.agrees(message, grant, here) == (at not in travelled)


# -- docks -------------------------------------------------------------------------------------------------------------


class Rank:
    """A dock in this process, with its pool and its events."""

    def __init__(self, spec: PoolSpec, role: str, **options: Any) -> None:
        self.pool = bytearray(spec.nbytes)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        options = {"has_checksums": True} | options
        self.dock = Dock(TcpTransport(), Memory.of(self.pool), spec, role, self.events.put, **options)

    def next(self, *kinds: type) -> Event:
        while not isinstance(event := self.events.get(timeout=240), kinds):
            pass
        return event


@pytest.fixture
def open_ranks() -> Iterator[Callable[..., list[Rank]]]:
    """Return a function that opens the docks of all ranks of a replica."""
    opened = list[Rank]()

    def opening(division: tuple[int, int], role: str, state: str = "", **options: Any) -> list[Rank]:
        count = division[0] * division[1]
        ranks = [Rank(spec_of(division, rank, state=state), role, **options) for rank in range(count)]
        opened.extend(ranks)
        return ranks

    yield opening
    for rank in opened:
        rank.dock.close()


def call(ranks: list[Rank], call: DockCall) -> None:
    for rank in ranks:
        rank.dock.call(call)


def fill(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.pool[:] = bytes((5 * at + at // 253) % 256 for at in range(len(rank.pool)))


def begin(sources: list[Rank], targets: list[Rank], epoch: int = 1, state: tuple[int, ...] = ()) -> None:
    """Begin a transfer of four pages of each group: 1 to 4 and 5 to 8."""
    call(targets, ExpectCall("r", epoch, tuple(rank.dock.blob for rank in sources), 60))
    call(sources, ShipCall("r", epoch, tuple(rank.dock.blob for rank in targets), 60))
    call(targets, GrantCall("r", epoch, 0, (GroupPages(0, (1, 2, 3, 4)), GroupPages(0, (5, 6, 7, 8))), state))


HELD = (GroupPages(0, (8, 7, 6, 5)), GroupPages(0, (4, 3, 2, 1)))  # at the source


@pytest.mark.parametrize(("source", "target"), [((1, 1), (1, 1)), ((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (1, 2))])
def test_pages_with_a_flipped_bit_fail_the_transfer_and_those_before_them_stay_valid(
    open_ranks: Callable[..., list[Rank]], source: tuple[int, int], target: tuple[int, int]
) -> None:
    """The same pages arrive at the second attempt, where no bit flips."""
    sources, targets = open_ranks(source, "prefill"), open_ranks(target, "decode")
    fill(sources)
    damaged = damage_pages(targets[0].dock, lambda message: message.epoch == 1 and message.first_page >= 2)
    begin(sources, targets)
    call(sources, ChunkCall("r", HELD, 2 * PAGE))
    assert all(rank.next(Committed) == Committed("r", 1, 2 * PAGE) for rank in targets)
    call(sources, FinishCall("r", HELD, 4 * PAGE, b"token"))
    assert targets[0].next(Failed, Arrived) == Failed("r", 1, False, Reason.CHECKSUM, "")
    targets[0].next(WriterStopped)
    for rank in sources:
        rank.next(Released)
    assert {message.first_page for message in damaged} == {2}
    begin(sources, targets, epoch=2)
    call(sources, FinishCall("r", HELD, 4 * PAGE, b"token"))
    for rank in targets:
        assert isinstance(rank.next(Arrived, Failed), Arrived)


@pytest.mark.parametrize("flipped", [0, 1, 2])
def test_each_part_of_a_recurrent_state_is_checked(open_ranks: Callable[..., list[Rank]], flipped: int) -> None:
    """The state of three pages travels in as many writes, the last of them with the last tokens."""
    page_bytes = spec_of((1, 1), 0).page_bytes
    options = {"state": "s", "max_write_bytes": page_bytes}
    sources, targets = (open_ranks((1, 1), role, **options) for role in ("prefill", "decode"))
    fill(sources)
    state = (9, 10, 11)
    wanted = (state[flipped],)
    damaged = damage_pages(
        targets[0].dock,
        lambda message: message.epoch == 1 and message.checksum is not None and message.checksum.state_pages == wanted,
    )
    for epoch, kind in ((1, Failed), (2, Arrived)):
        begin(sources, targets, epoch, state)
        call(sources, FinishCall("r", HELD, 4 * PAGE, b"token", (12, 13, 14)))
        assert isinstance(targets[0].next(Failed, Arrived), kind)
        sources[0].next(Released)
    assert len(damaged) == 1


def test_docks_without_checksums_compute_none(
    open_ranks: Callable[..., list[Rank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a bit that flips goes unnoticed. With checksums, each side sums each byte once."""
    num_bytes = [0]

    def counting(data: memoryview, value: int) -> int:
        num_bytes[0] += data.nbytes
        return crc32(data, value)

    monkeypatch.setattr("crossdock.kvtransfer.checksums.zlib", SimpleNamespace(crc32=counting))
    for has_checksums in (False, True):
        sources, targets = (open_ranks((1, 1), role, has_checksums=has_checksums) for role in ("prefill", "decode"))
        damaged = damage_pages(targets[0].dock, lambda _: not has_checksums)  # noqa: B023
        begin(sources, targets)
        call(sources, FinishCall("r", HELD, 4 * PAGE))
        arrived = targets[0].next(Arrived, Failed)
        assert isinstance(arrived, Arrived)
        assert len(damaged) == (not has_checksums)
        assert num_bytes[0] == (2 * arrived.figures.num_bytes if has_checksums else 0)


def test_log_names_a_peer_whose_pages_are_damaged_once(
    open_ranks: Callable[..., list[Rank]], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, targets = (open_ranks((1, 1), role) for role in ("one", "two", "decode"))
    damage_pages(targets[0].dock, lambda _: True)
    epoch = 0
    with caplog.at_level(logging.ERROR, "crossdock"):
        for sources in (first, second, first):
            epoch += 1
            begin(sources, targets, epoch)
            call(sources, FinishCall("r", HELD, 4 * PAGE))
            assert isinstance(targets[0].next(Failed, Arrived), Failed)
            targets[0].next(WriterStopped)
            sources[0].next(Released)
    named = [record.args[1] for record in caplog.records if record.args]  # type: ignore[index]
    assert named == [first[0].dock.name, second[0].dock.name]


def test_dock_of_a_gpus_pool_with_checksums_is_refused() -> None:
    spec, transport = spec_of((1, 1), 0), TcpTransport()
    transport.open = lambda name, memory: b""  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="only ordinary memory"):
        Dock(transport, Memory(1, spec.nbytes, cuda_device=0), spec, "test", print, has_checksums=True)
    transport.close()
