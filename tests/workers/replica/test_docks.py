"""What several docks report of one transfer is told as by one: arrived when all have it, failed when one has."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.kvtransfer.events import (
    Arrived,
    Committed,
    Event,
    Failed,
    Figures,
    Granted,
    Reason,
    Released,
    WriterStopped,
)
from crossdock.kvtransfer.transport import Memory, TransportUnavailable
from crossdock.workers.replica.config import TransferConfig
from crossdock.workers.replica.docks import Together, _transport, pack_event, unpack_event

RANKS = 3


def told(together: Together, *reports: tuple[int, Event]) -> list[Event]:
    return [event for rank, report in reports for event in together.take(rank, report)[0]]


def committed(num_tokens: int) -> Committed:
    return Committed("r", 1, num_tokens)


def test_the_frontier_is_what_every_rank_has() -> None:
    together = Together(range(RANKS))
    assert told(together, (0, committed(48)), (1, committed(16))) == []
    assert told(together, (2, committed(32))) == [committed(16)]
    assert told(together, (1, committed(48))) == [committed(32)]
    assert told(together, (2, committed(32))) == []


@given(st.permutations(range(RANKS)), st.lists(st.integers(1, 9), min_size=RANKS, max_size=RANKS))
def test_it_has_arrived_when_it_has_everywhere(order: list[int], pages: list[int]) -> None:
    together = Together(range(RANKS))
    events: list[Event] = []
    for place, rank in enumerate(order):
        report = Arrived("r", 1, 40, b"state", Figures(total_seconds=place, num_bytes=pages[rank], num_pages=3))
        events += told(together, (rank, committed(40)), (rank, report))
        assert any(isinstance(event, Arrived) for event in events) == (place == RANKS - 1)
    assert events == [committed(40), Arrived("r", 1, 40, b"state", Figures())]
    assert isinstance(events[1], Arrived)
    figures = events[1].figures
    assert (figures.num_bytes, figures.num_pages, figures.total_seconds) == (sum(pages), 3, RANKS - 1)


def test_one_failure_ends_it_everywhere_and_pages_are_free_after_the_last() -> None:
    together = Together(range(RANKS))
    together.take(0, Arrived("r", 1, 40, b"", Figures()))
    failed = Failed("r", 1, False, Reason.PEER_LOST, "gone")
    assert together.take(1, failed) == ((failed,), "cancel_expect")
    assert together.take(2, failed) == ((), None)
    assert told(together, (2, committed(40)), (1, WriterStopped("r", 1)), (0, WriterStopped("r", 1))) == []
    assert told(together, (2, WriterStopped("r", 1))) == [WriterStopped("r", 1)]
    assert told(together, (2, WriterStopped("r", 1))) == [], "it may come once more"


def test_a_source_is_released_when_no_rank_is_read() -> None:
    together = Together(range(2))
    assert told(together, (0, Granted("r", 1, 0)), (1, Granted("r", 1, 0))) == []
    assert told(together, (0, Released("r", 1, True, Figures()))) == []
    assert told(together, (1, Released("r", 1, True, Figures()))) == [Released("r", 1, True, Figures())]
    failed = Failed("r", 2, True, Reason.DEADLINE, "slow")
    assert together.take(1, failed) == ((failed,), "cancel_ship")
    assert told(together, (1, Released("r", 2, False, Figures()))) == []
    assert told(together, (0, Released("r", 2, True, Figures()))) == [Released("r", 2, False, Figures())]


def test_directions_and_epochs_are_kept_apart() -> None:
    together = Together(range(2))
    told(together, (0, WriterStopped("r", 1)), (0, Released("r", 1, True, Figures())), (0, WriterStopped("r", 2)))
    assert told(together, (1, WriterStopped("r", 2))) == [WriterStopped("r", 2)]
    assert told(together, (1, WriterStopped("r", 1))) == [WriterStopped("r", 1)]


def test_an_epoch_that_begins_again_is_told_again() -> None:
    together = Together(range(1))
    assert told(together, (0, WriterStopped("r", 1))) == [WriterStopped("r", 1)]
    assert told(together, (0, WriterStopped("r", 1))) == []
    together.begin(False, "r", 1)
    assert told(together, (0, WriterStopped("r", 1))) == [WriterStopped("r", 1)]


def test_events_travel() -> None:
    events: list[Event] = [
        Granted("r", 1, 2),
        Committed("r", 1, 32),
        Arrived("r", 1, 40, b"\0state", Figures(0.1, None, 2.0, 1 << 40)),
        WriterStopped("r", 1),
        Failed("r", 1, True, Reason.PROTOCOL, "why"),
        Released("r", 1, False, Figures(num_pages=4)),
    ]
    for event in events:
        there = unpack_event(pack_event(event))
        assert there == event
        assert getattr(there, "figures", None) == getattr(event, "figures", None)
        assert getattr(there, "detail", None) == getattr(event, "detail", None)


def test_a_gpus_pages_need_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for; ordinary memory goes by TCP where NIXL is not installed."""
    monkeypatch.setitem(sys.modules, "nixl", None)
    here, gpus = Memory(0, 100), Memory(0, 100, cuda_device=1)
    _transport(TransferConfig(transport="auto"), here).close()
    with pytest.raises(TransportUnavailable, match=r"pip install 'crossdock\[nixl\]'"):
        _transport(TransferConfig(transport="auto"), gpus)
    _transport(TransferConfig(transport="tcp"), here).close()
    with pytest.raises(TransportUnavailable, match=r"transfer.transport tcp moves ordinary memory only.* nixl moves"):
        _transport(TransferConfig(transport="tcp"), gpus)
