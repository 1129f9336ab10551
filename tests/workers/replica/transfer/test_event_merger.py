"""The events of several docks about one transfer, as one: arrived when all have it, failed when one has failed."""

from hypothesis import given
from hypothesis import strategies as st

from crossdock.kvtransfer.calls import CancelExpectCall, CancelShipCall
from crossdock.kvtransfer.events import (
    Arrived,
    Committed,
    Event,
    Failed,
    Figures,
    Reason,
    Released,
    WriterStopped,
)
from crossdock.workers.replica.transfer.event_merger import EventMerger

RANKS = 3


def merged(merger: EventMerger, *reports: tuple[int, Event]) -> list[Event]:
    return [event for rank, report in reports for event in merger.merge(rank, report)[0]]


def committed(num_tokens: int) -> Committed:
    return Committed("r", 1, num_tokens)


def test_frontier_of_several_ranks_is_the_smallest() -> None:
    merger = EventMerger(range(RANKS))
    assert merged(merger, (0, committed(48)), (1, committed(16))) == []
    assert merged(merger, (2, committed(32))) == [committed(16)]
    assert merged(merger, (1, committed(48))) == [committed(32)]
    assert merged(merger, (2, committed(32))) == []


@given(st.permutations(range(RANKS)), st.lists(st.integers(1, 9), min_size=RANKS, max_size=RANKS))
def test_transfer_arrived_at_every_rank_has_arrived(order: list[int], pages: list[int]) -> None:
    merger = EventMerger(range(RANKS))
    events: list[Event] = []
    for place, rank in enumerate(order):
        report = Arrived("r", 1, 40, b"result", Figures(total_seconds=place, num_bytes=pages[rank], num_pages=3))
        events += merged(merger, (rank, committed(40)), (rank, report))
        assert any(isinstance(event, Arrived) for event in events) == (place == RANKS - 1)
    assert events == [committed(40), Arrived("r", 1, 40, b"result", Figures())]
    assert isinstance(events[1], Arrived)
    figures = events[1].figures
    assert (figures.num_bytes, figures.num_pages, figures.total_seconds) == (sum(pages), 3, RANKS - 1)


def test_failure_at_one_rank_cancels_all_and_stops_with_the_last() -> None:
    merger = EventMerger(range(RANKS))
    merger.merge(0, Arrived("r", 1, 40, b"", Figures()))
    failed = Failed("r", 1, False, Reason.PEER_LOST, "gone")
    assert merger.merge(1, failed) == ((failed,), CancelExpectCall("r", 1))
    assert merger.merge(2, failed) == ((), None)
    assert merged(merger, (2, committed(40)), (1, WriterStopped("r", 1)), (0, WriterStopped("r", 1))) == []
    assert merged(merger, (2, WriterStopped("r", 1))) == [WriterStopped("r", 1)]
    assert merged(merger, (2, WriterStopped("r", 1))) == [], "it may come once more"


def test_failure_of_a_single_rank_cancels_nothing() -> None:
    failed = Failed("r", 1, False, Reason.PEER_LOST, "gone")
    assert EventMerger(range(1)).merge(0, failed) == ((failed,), None)


def test_source_released_by_every_rank_is_released() -> None:
    merger = EventMerger(range(2))
    assert merged(merger, (0, Released("r", 1, True, Figures()))) == []
    assert merged(merger, (1, Released("r", 1, True, Figures()))) == [Released("r", 1, True, Figures())]
    failed = Failed("r", 2, True, Reason.DEADLINE, "slow")
    assert merger.merge(1, failed) == ((failed,), CancelShipCall("r", 2))
    assert merged(merger, (1, Released("r", 2, False, Figures()))) == []
    assert merged(merger, (0, Released("r", 2, True, Figures()))) == [Released("r", 2, False, Figures())]


def test_directions_and_epochs_are_merged_apart() -> None:
    merger = EventMerger(range(2))
    merged(merger, (0, WriterStopped("r", 1)), (0, Released("r", 1, True, Figures())), (0, WriterStopped("r", 2)))
    assert merged(merger, (1, WriterStopped("r", 2))) == [WriterStopped("r", 2)]
    assert merged(merger, (1, WriterStopped("r", 1))) == [WriterStopped("r", 1)]


def test_epoch_that_begins_again_is_reported_again() -> None:
    merger = EventMerger(range(1))
    assert merged(merger, (0, WriterStopped("r", 1))) == [WriterStopped("r", 1)]
    assert merged(merger, (0, WriterStopped("r", 1))) == []
    merger.begin(False, "r", 1)
    assert merged(merger, (0, WriterStopped("r", 1))) == [WriterStopped("r", 1)]


def test_figures_of_a_transfer_have_all_bytes_and_the_longest_writing() -> None:
    """The rank that was over last need not have written longest: a rate is all bytes by the longest writing."""
    merger = EventMerger(range(2))
    waited = Figures(total_seconds=5.0, num_bytes=100, num_pages=2, num_writes=1, write_seconds=0.1, hidden_seconds=0.1)
    wrote = Figures(total_seconds=2.0, num_bytes=300, num_pages=2, num_writes=2, write_seconds=1.5, hidden_seconds=0.5)
    merger.merge(0, Released("r", 1, True, waited))
    (event,) = merged(merger, (1, Released("r", 1, True, wrote)))
    assert isinstance(event, Released)
    found = event.figures
    assert (found.total_seconds, found.num_bytes, found.num_pages, found.num_writes) == (5.0, 400, 2, 3)
    assert (found.write_seconds, found.hidden_seconds) == (1.5, 0.5)
