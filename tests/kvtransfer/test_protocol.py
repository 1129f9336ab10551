"""The outputs of each side in the cases that matter, one by one; test_session.py combines them in any order."""

from itertools import pairwise

import pytest

from crossdock.kvtransfer.events import (
    Arrived,
    Committed,
    Failed,
    Figures,
    Offered,
    Reason,
    Released,
    WriterStopped,
)
from crossdock.kvtransfer.fence import Fence
from crossdock.kvtransfer.messages import Abort, Grant, Hello, Offer, Pages, Stopped, Wait
from crossdock.kvtransfer.next_write import TargetRank
from crossdock.kvtransfer.plan import PageCopies
from crossdock.kvtransfer.protocol_outputs import ProtocolOutput, Send, Write
from crossdock.kvtransfer.receiver import Receiver
from crossdock.kvtransfer.records import GroupPages
from crossdock.kvtransfer.sender import Sender

from .one_group import copies, whole

PAGE = 4  # tokens
KEY = "r", 1


def failure(outputs: list[ProtocolOutput]) -> Reason | None:
    found = [output.reason for output in outputs if isinstance(output, Failed)]
    assert len(found) <= 1
    return found[0] if found else None


def kinds(outputs: list[ProtocolOutput]) -> list[type]:
    return [type(output.message) if isinstance(output, Send) else type(output) for output in outputs]


# -- the source ------------------------------------------------------------------------------------------------------


def shipping(num_targets: int = 1, max_write_bytes: int = 1000, granted: bool = True) -> Sender:
    """Return a sender that has begun to ship: page size 4, 10 bytes per page, a deadline of 5 s, at time 0."""
    sender = Sender(0, PAGE, max_write_bytes)
    targets = {f"t{number}": TargetRank(100, (10,), 1) for number in range(num_targets)}
    outputs = sender.ship(*KEY, targets, 5.0, 0.0)
    assert outputs == [Send(peer, Hello(*KEY)) for peer in targets]
    if granted:
        for peer in targets:
            sender.receive(peer, Grant(*KEY, 0, whole(tuple(range(50, 70)))), 1.0)
    return sender


def pages(sequence: int, first: int, count: int, tokens: int, result: bytes | None = None) -> Pages:
    return Pages(*KEY, sequence, first, count, tokens, 0, 1, result)


def test_sender_writes_pages_as_they_become_full() -> None:
    sender = shipping()
    assert sender.chunk("r", whole([7]), 3, 1.0) == []
    assert sender.chunk("r", whole([7, 8, 9]), 9, 1.0) == [Write("t0", copies((7, 8), (50, 51)), pages(0, 0, 2, 8))]
    assert sender.write_done(*KEY, "t0", 2.0) == []
    assert sender.chunk("r", whole([7, 8, 9]), 11, 3.0) == []
    assert sender.finish("r", whole([7, 8, 9]), 11, b"s", 3.0) == [
        Write("t0", copies((9,), (52,)), pages(1, 2, 1, 11, b"s"))
    ]
    (released,) = sender.write_done(*KEY, "t0", 4.0)
    assert released == Released(*KEY, True, Figures())
    assert len(sender) == 0


def test_sender_with_an_open_write_puts_all_new_pages_into_the_next() -> None:
    sender = shipping()
    sender.chunk("r", whole([1]), 4, 1.0)
    for end in (2, 3, 4, 5):
        assert sender.chunk("r", whole(range(1, end + 1)), end * PAGE, 1.0) == []
    assert sender.write_done(*KEY, "t0", 2.0) == [
        Write("t0", copies((2, 3, 4, 5), (51, 52, 53, 54)), pages(1, 1, 4, 20))
    ]


def test_write_is_bounded_in_bytes_and_has_at_least_one_page() -> None:
    for limit, count in ((35, 3), (10, 1), (1, 1)):
        (write,) = shipping(max_write_bytes=limit).chunk("r", whole(range(9)), 36, 1.0)
        assert isinstance(write, Write)
        assert len(write.copies[0].source_pages) == count


# Two groups of layers: the first without a window, the second with one that has passed the first three pages.
GROUPS = (GroupPages(0, (50, 51, 52, 53, 54)), GroupPages(3, (60, 61)))


def shipping_groups(max_write_bytes: int = 1000) -> Sender:
    """Return a sender with a target that takes 10 bytes of a page of the first group and 6 of the second."""
    sender = Sender(0, PAGE, max_write_bytes)
    sender.ship(*KEY, {"t0": TargetRank(100, (10, 6), 1)}, 5.0, 0.0)
    sender.receive("t0", Grant(*KEY, 0, GROUPS), 1.0)
    return sender


def test_of_a_window_only_pages_that_the_target_will_read_are_written() -> None:
    sender = shipping_groups()
    outputs = sender.chunk("r", (GroupPages(0, (1, 2)), GroupPages(1, (12,))), 8, 1.0)
    assert outputs == [Write("t0", copies((1, 2), (50, 51)), pages(0, 0, 2, 8))]
    sender.write_done(*KEY, "t0", 2.0)
    outputs = sender.finish("r", (GroupPages(0, (1, 2, 3, 4, 5)), GroupPages(3, (14, 15))), 18, b"s", 3.0)
    written = (*copies((3, 4, 5), (52, 53, 54)), PageCopies(1, (14, 15), (60, 61)))
    assert outputs == [Write("t0", written, pages(1, 2, 3, 18, b"s"))]
    (released,) = sender.write_done(*KEY, "t0", 4.0)
    assert isinstance(released, Released)
    assert (released.figures.num_bytes, released.figures.num_pages) == (5 * 10 + 2 * 6, 7)


def test_write_is_bounded_in_the_bytes_of_all_groups() -> None:
    sender = shipping_groups(max_write_bytes=32)
    sender.finish("r", (GroupPages(0, (1, 2, 3, 4, 5)), GroupPages(3, (14, 15))), 18, b"s", 1.0)
    counts = []
    while len(sender):
        outputs = sender.write_done(*KEY, "t0", 2.0)
        counts += [(each.message.first_page, each.message.num_pages) for each in outputs if isinstance(each, Write)]
    assert counts == [(3, 2)], "the first write had three pages of 10 bytes"


def test_chunk_that_a_window_has_passed_is_announced_without_data() -> None:
    """Where every layer has a window. The frontier grows, and the other side knows that this one works."""
    sender = Sender(0, PAGE, 1000)
    sender.ship(*KEY, {"t0": TargetRank(100, (10,), 1)}, 5.0, 0.0)
    sender.receive("t0", Grant(*KEY, 0, whole((60, 61), 3)), 1.0)
    assert sender.chunk("r", whole((12,), 1), 8, 1.0) == [Send("t0", pages(0, 0, 2, 8))]
    outputs = sender.finish("r", whole((14, 15), 3), 18, b"s", 2.0)
    assert outputs == [Write("t0", copies((14, 15), (60, 61)), pages(1, 2, 3, 18, b"s"))]


def shipping_states(state_pages: tuple[int, ...] = (80, 81), max_write_bytes: int = 1000) -> Sender:
    """Return a sender with a target that takes 10 bytes of a page and 7 of each page of the recurrent state."""
    sender = Sender(0, PAGE, max_write_bytes)
    sender.ship(*KEY, {"t0": TargetRank(100, (10, 7), 1, has_state=True)}, 5.0, 0.0)
    sender.receive("t0", Grant(*KEY, 0, whole((50, 51)), state_pages), 1.0)
    return sender


def test_state_is_written_once_with_the_result() -> None:
    sender = shipping_states()
    assert sender.chunk("r", whole([1]), 4, 1.0) == [Write("t0", copies([1], [50]), pages(0, 0, 1, 4))]
    sender.write_done(*KEY, "t0", 1.0)
    outputs = sender.finish("r", whole([1, 2]), 7, b"s", 2.0, (30, 31))
    written = (*copies([2], [51]), PageCopies(1, (30, 31), (80, 81)))
    assert outputs == [Write("t0", written, pages(1, 1, 1, 7, b"s"))]
    (released,) = sender.write_done(*KEY, "t0", 3.0)
    assert isinstance(released, Released)
    assert (released.figures.num_bytes, released.figures.num_pages) == (2 * 10 + 2 * 7, 4)


@pytest.mark.parametrize(
    ("limit", "parts"),
    [(24, [(30, 31)]), (23, [(30, 31), ()]), (17, [(30, 31), ()]), (13, [(30,), (31,), ()]), (1, [(30,), (31,), ()])],
)
def test_state_beyond_the_bytes_of_a_write_goes_before_the_last_tokens(
    limit: int, parts: list[tuple[int, ...]]
) -> None:
    sender, there = shipping_states(max_write_bytes=limit), {30: 80, 31: 81}
    receiver = Receiver(PAGE, b"us", 1.0)
    receiver.expect(*KEY, {"s0": (0, (10, 7))}, 5.0, 0.0)
    receiver.grant(*KEY, 0, whole((50, 51)), 0.0, (80, 81))
    sender.chunk("r", whole([1]), 4, 1.0)
    assert receiver.receive("s0", pages(0, 0, 1, 4), 1.0) == [Committed(*KEY, 4)]
    sender.write_done(*KEY, "t0", 1.0)
    outputs = sender.finish("r", whole([1, 2]), 7, b"s", 2.0, (30, 31))
    for number, part in enumerate(parts, 1):
        is_last = number == len(parts)
        written = copies([2], [51]) if is_last else ()
        state = (PageCopies(1, part, tuple(there[page] for page in part)),) if part else ()
        message = pages(number, 1, 1, 7, b"s") if is_last else pages(number, 1, 0, 4)
        assert outputs == [Write("t0", (*written, *state), message)]
        arrived = receiver.receive("s0", message, 2.0)
        assert bool(arrived) is is_last, "all tokens are there, but not all of the state"
        outputs = sender.write_done(*KEY, "t0", 3.0)
    (released,) = outputs
    assert isinstance(released, Released)
    assert isinstance(arrived[-1], Arrived)
    for figures in (released.figures, arrived[-1].figures):
        assert (figures.num_bytes, figures.num_pages, figures.num_writes) == (34, 4, 1 + len(parts))


@pytest.mark.parametrize("granted", [(80,), (80, 80), (50, 80), (80, 100), ()], ids=str)
def test_grant_of_other_state_pages_fails_the_transfer(granted: tuple[int, ...]) -> None:
    sender = shipping_states(granted)
    outputs = sender.finish("r", whole([1, 2]), 8, b"s", 2.0, (30, 31))
    is_known_at_once = len(granted) != 1
    assert (failure(outputs) is Reason.PROTOCOL) is not is_known_at_once
    assert len(sender) == 0


def test_granted_page_that_a_window_has_passed_here_fails_the_transfer() -> None:
    """The two sides do not agree where the prompt ends: another page must not go in the place of the right one."""
    sender = shipping_groups()
    outputs = sender.finish("r", (GroupPages(0, (1, 2, 3, 4, 5)), GroupPages(4, (15,))), 18, b"s", 1.0)
    assert failure(outputs) is Reason.PROTOCOL


@pytest.mark.parametrize(
    "groups",
    [
        whole(range(50, 55)),  # of one group
        (GROUPS[0], GroupPages(3, (60, 54))),  # one page twice
        (GROUPS[0], GroupPages(3, (60, 100))),
        (GROUPS[0], GroupPages(3, (60,))),  # too few
    ],
    ids=str,
)
def test_impossible_grant_of_groups_fails_the_transfer(groups: tuple[GroupPages, ...]) -> None:
    sender = Sender(0, PAGE, 1000)
    sender.ship(*KEY, {"t0": TargetRank(100, (10, 6), 1)}, 5.0, 0.0)
    sender.finish("r", (GroupPages(0, (1, 2, 3, 4, 5)), GroupPages(3, (14, 15))), 18, b"s", 0.0)
    assert failure(sender.receive("t0", Grant(*KEY, 0, groups), 1.0)) is Reason.PROTOCOL


@pytest.mark.parametrize(
    ("has_state", "groups", "state_pages"),
    [
        (False, GROUPS[:1], (60, 61)),  # a state in the place of a group
        (True, GROUPS, ()),  # a group in the place of the state
    ],
)
def test_grant_for_another_number_of_groups_fails_the_transfer(
    has_state: bool, groups: tuple[GroupPages, ...], state_pages: tuple[int, ...]
) -> None:
    """Its number of pages a token is right. Chunks and the end of the prompt must find nothing to write to."""
    sender = Sender(0, PAGE, 1000)
    sender.ship(*KEY, {"t0": TargetRank(100, (10, 6), 1, has_state)}, 5.0, 0.0)
    outputs = sender.receive("t0", Grant(*KEY, 0, groups, state_pages), 1.0)
    assert failure(outputs) is Reason.PROTOCOL
    here = (GroupPages(0, (1,)),) if has_state else (GroupPages(0, (1,)), GroupPages(0, (11,)))
    assert sender.chunk("r", here, 4, 2.0) == []


def test_target_ranks_are_written_to_independently() -> None:
    sender = shipping(num_targets=2, granted=False)
    sender.receive("t0", Grant(*KEY, 0, whole((50, 51))), 1.0)
    assert kinds(sender.finish("r", whole([1, 2]), 8, b"s", 2.0)) == [Write]
    assert sender.write_done(*KEY, "t0", 3.0) == []
    assert kinds(sender.receive("t1", Grant(*KEY, 1, whole((50,), 1)), 4.0)) == [Write]
    assert kinds(sender.write_done(*KEY, "t1", 5.0)) == [Released]


@pytest.mark.parametrize("granted", [(50,), (50, 50, 51), (50, 51, 100)])
def test_impossible_grant_fails_the_transfer(granted: tuple[int, ...]) -> None:
    sender = shipping(granted=False)
    sender.chunk("r", whole([1, 2, 3]), 12, 0.0)
    outputs = sender.receive("t0", Grant(*KEY, 0, whole(granted)), 1.0)
    assert failure(outputs) is Reason.PROTOCOL
    assert kinds(outputs)[-2:] == [Stopped, Released]


def test_silence_before_the_grant_fails_at_the_deadline_which_a_wait_extends() -> None:
    sender = shipping(granted=False)
    assert sender.next_deadline == 5.0
    assert sender.tick(4.9) == []
    sender.receive("t0", Wait(*KEY, 10.0, False), 4.9)
    assert sender.next_deadline == 19.9
    assert sender.tick(19.8) == []
    assert failure(sender.tick(19.9)) is Reason.DEADLINE
    assert sender.next_deadline == float("inf")


def test_after_the_grant_only_an_open_write_has_a_deadline() -> None:
    sender = shipping()
    assert sender.next_deadline == float("inf"), "computing the prompt has no deadline here"
    sender.chunk("r", whole([1]), 4, 100.0)
    assert sender.next_deadline == 105.0
    outputs = sender.tick(105.0)
    assert kinds(outputs) == [Failed], "the open write reads the page: neither Released nor Stopped"
    assert kinds(sender.write_done(*KEY, "t0", 300.0)) == [Stopped, Released]


def test_failed_write_makes_the_stop_unclean() -> None:
    sender = shipping()
    sender.chunk("r", whole([1]), 4, 1.0)
    outputs = sender.write_failed(*KEY, "t0", "reset", 2.0)
    assert failure(outputs) is Reason.PEER_LOST
    assert outputs[1:] == [Send("t0", Stopped(*KEY, False)), Released(*KEY, False, Figures())]
    assert sender.receive("t0", Abort(*KEY, b""), 3.0) == [Send("t0", Stopped(*KEY, False))], "repeated"


def test_dead_peer_is_sent_nothing() -> None:
    outputs = shipping().peer_lost("t0", True, "dead", 2.0)
    assert kinds(outputs) == [Failed, Released]
    assert shipping().peer_lost("t1", True, "dead", 2.0) == []


def test_ship_of_a_new_epoch_stops_the_older_which_cannot_begin_again() -> None:
    sender = shipping()
    assert kinds(sender.ship("r", 3, {"t1": TargetRank(100, (10,), 1)}, 5.0, 1.0)) == [Stopped, Released, Hello]
    assert kinds(sender.ship("r", 1, {"t0": TargetRank(100, (10,), 1)}, 5.0, 1.0)) == [Stopped, Failed, Released]
    assert sender.ship("r", 3, {"t1": TargetRank(100, (10,), 1)}, 5.0, 1.0) == [], "repeated"


def test_shipment_that_is_still_stopping_fails_when_it_is_begun_again() -> None:
    sender = shipping()
    sender.chunk("r", whole([1]), 4, 1.0)  # a write is open from now on
    sender.cancel(*KEY, 1.0)
    assert failure(sender.ship(*KEY, {"t1": TargetRank(100, (10,), 1)}, 5.0, 2.0)) is Reason.SUPERSEDED
    assert kinds(sender.write_done(*KEY, "t0", 3.0)) == [Stopped, Released]


def test_shipment_to_other_targets_fails_and_to_the_same_goes_on() -> None:
    sender, target = shipping(granted=False), TargetRank(100, (10,), 1)
    assert sender.ship(*KEY, {"t0": target}, 5.0, 0.1) == []
    assert failure(sender.ship(*KEY, {"t1": target}, 5.0, 0.2)) is Reason.SUPERSEDED


def test_abort_before_ship_is_answered_and_keeps_the_epoch_from_beginning() -> None:
    sender = Sender(0, PAGE, 1000)
    assert sender.receive("t0", Abort(*KEY, b""), 0.0) == [Send("t0", Stopped(*KEY, True))]
    assert failure(sender.ship(*KEY, {"t0": TargetRank(100, (10,), 1)}, 5.0, 1.0)) is Reason.SUPERSEDED
    assert kinds(sender.ship("r", 2, {"t0": TargetRank(100, (10,), 1)}, 5.0, 1.0)) == [Hello]


def test_repeated_abort_is_answered_while_a_write_to_another_target_is_open() -> None:
    sender = shipping(num_targets=2)
    sender.chunk("r", whole([1]), 4, 1.0)
    assert kinds(sender.cancel(*KEY, 1.0)) == []
    assert kinds(sender.write_done(*KEY, "t0", 2.0)) == [Stopped]
    assert sender.receive("t0", Abort(*KEY, b""), 3.0) == [Send("t0", Stopped(*KEY, True))]
    assert sender.receive("t1", Abort(*KEY, b""), 3.0) == [], "its write is open"


def test_figures_of_a_half_hidden_transfer_add_up() -> None:
    sender = shipping()  # heard and granted after 1 s
    sender.chunk("r", whole([1, 2]), 8, 2.0)
    sender.write_done(*KEY, "t0", 5.0)
    sender.chunk("r", whole([1, 2, 3]), 12, 6.0)
    sender.finish("r", whole([1, 2, 3, 4]), 16, b"s", 7.0)
    sender.write_done(*KEY, "t0", 8.0)
    (released,) = sender.write_done(*KEY, "t0", 10.0)
    assert isinstance(released, Released)
    figures = released.figures
    assert (figures.handshake_seconds, figures.grant_wait_seconds, figures.total_seconds) == (1.0, 1.0, 10.0)
    assert (figures.num_bytes, figures.num_pages, figures.num_writes, figures.hidden_bytes) == (40, 4, 3, 20)
    assert (figures.write_seconds, figures.hidden_seconds) == (7.0, 4.0)
    assert figures.overlap == 4 / 7
    assert Figures().overlap == 1.0


# -- the target ------------------------------------------------------------------------------------------------------


def expecting(num_sources: int = 1, granted: bool = True, first_page: int = 0) -> Receiver:
    """Return a receiver that expects ranks s0, s1, ...: deadline 5 s, grace 1 s, ten pages granted at time 0."""
    receiver = Receiver(PAGE, b"us", 1.0)
    sources = {f"s{rank}": (rank, (10,)) for rank in range(num_sources)}
    assert receiver.expect(*KEY, sources, 5.0, 0.0) == [Send(name, Wait(*KEY, 5.0, False)) for name in sources]
    if granted:
        granted_pages = whole(range(20, 30), first_page)
        outputs = receiver.grant(*KEY, first_page, granted_pages, 0.0)
        assert outputs == [Send(peer, Grant(*KEY, first_page, granted_pages)) for peer in sources]
    return receiver


def wrote(
    sequence: int, first: int, count: int, tokens: int, rank: int = 0, of: int = 1, result: bytes | None = None
) -> Pages:
    return Pages(*KEY, sequence, first, count, tokens, rank, of, result)


@pytest.mark.parametrize("source", ["s0", "s1"])
def test_expectation_that_is_still_stopping_fails_when_it_is_begun_again(source: str) -> None:
    receiver = expecting()
    receiver.cancel(*KEY, 0.2)
    assert failure(receiver.expect(*KEY, {source: (0, (10,))}, 5.0, 0.3)) is Reason.SUPERSEDED
    assert receiver.receive("s0", Stopped(*KEY, True), 0.4) == [WriterStopped(*KEY)]


def test_expectation_from_other_sources_fails_and_from_the_same_goes_on() -> None:
    receiver = expecting(granted=False)
    assert receiver.expect(*KEY, {"s0": (0, (10,))}, 5.0, 0.1) == []
    assert failure(receiver.expect(*KEY, {"s1": (0, (10,))}, 5.0, 0.2)) is Reason.SUPERSEDED


def test_frontier_stops_at_a_gap() -> None:
    receiver = expecting()
    assert receiver.receive("s0", wrote(2, 2, 1, 9, result=b"s"), 1.0) == []
    assert receiver.receive("s0", wrote(1, 1, 1, 8), 1.0) == []
    outputs = receiver.receive("s0", wrote(0, 0, 1, 4), 1.0)
    assert outputs == [Committed(*KEY, 9), Arrived(*KEY, 9, b"s", Figures())]
    assert len(receiver) == 0


def test_frontier_is_that_of_the_slowest_rank() -> None:
    receiver = expecting(num_sources=2)
    assert receiver.receive("s0", wrote(0, 0, 3, 12, of=2), 1.0) == []
    assert receiver.receive("s1", wrote(0, 0, 1, 4, 1, 2), 1.0) == [Committed(*KEY, 4)]
    assert receiver.receive("s1", wrote(1, 1, 3, 14, 1, 2, b"from rank 1"), 1.0) == [Committed(*KEY, 12)]
    outputs = receiver.receive("s0", wrote(1, 3, 1, 14, 0, 2, b"from rank 0"), 1.0)
    assert outputs == [Committed(*KEY, 14), Arrived(*KEY, 14, b"from rank 0", Figures())]


@pytest.mark.parametrize(
    "message",
    [
        wrote(0, 1, 1, 8),  # leaves a page out
        wrote(0, 0, 11, 44),  # more than was granted
        wrote(0, 0, 1, 5),  # more tokens than fit
        wrote(0, 0, 1, 4, rank=1),
        wrote(0, 0, 1, 4, of=2),
    ],
)
def test_source_that_breaks_the_protocol_fails_the_transfer(message: Pages) -> None:
    receiver = expecting()
    outputs = receiver.receive("s0", message, 1.0)
    assert failure(outputs) is Reason.PROTOCOL
    assert outputs[1:] == [Send("s0", Abort(*KEY, b"us"))], "and its pages stay until it stops"
    assert receiver.receive("s0", Stopped(*KEY, True), 2.0) == [WriterStopped(*KEY)]


def test_pages_before_the_grant_fail_the_transfer() -> None:
    outputs = expecting(granted=False).receive("s0", wrote(0, 0, 1, 4), 1.0)
    assert failure(outputs) is Reason.PROTOCOL


def test_source_that_begins_late_is_sent_what_it_missed() -> None:
    receiver = expecting(granted=False)
    assert receiver.receive("s0", Hello(*KEY), 1.0) == [Send("s0", Wait(*KEY, 4.0, False))]
    assert receiver.wait(*KEY, 3.0, 1.0) == [Send("s0", Wait(*KEY, 3.0, False))]
    assert receiver.receive("s0", Hello(*KEY), 2.0) == [Send("s0", Wait(*KEY, 2.0, False))]
    receiver.grant(*KEY, 0, whole([5]), 2.0)
    assert receiver.receive("s0", Hello(*KEY), 3.0) == [Send("s0", Grant(*KEY, 0, whole((5,))))]
    receiver.cancel(*KEY, 3.0)
    assert receiver.receive("s0", Hello(*KEY), 4.0) == [Send("s0", Abort(*KEY, b"us"))]
    receiver.receive("s0", Stopped(*KEY, True), 5.0)
    assert receiver.receive("s0", Hello(*KEY), 6.0) == [Send("s0", Abort(*KEY, b"us"))], "also when all is over"
    assert receiver.num_unknown == 0


def test_offer_of_every_source_is_reported_also_before_it_is_expected() -> None:
    early = Receiver(PAGE, b"us", 1.0)
    assert early.receive("s0", Offer(*KEY, 2), 0.0) == []
    assert early.receive("s1", Offer(*KEY, 2), 0.0) == [Offered(*KEY)]
    assert early.expect(*KEY, {"s0": (0, (10,)), "s1": (1, (10,))}, 5.0, 0.0) == []
    late = expecting(2, granted=False)
    assert late.receive("s1", Offer(*KEY, 2), 0.0) == []
    assert late.receive("s2", Offer(*KEY, 2), 0.0) == [], "no source of this transfer"
    assert late.receive("s0", Offer(*KEY, 2), 0.0) == [Offered(*KEY)]
    late.cancel(*KEY, 1.0)
    assert late.receive("s0", Offer(*KEY, 2), 2.0) == [Send("s0", Abort(*KEY, b"us"))]


def test_lost_offer_is_repeated_after_the_next_wait() -> None:
    sender = shipping(granted=False)
    (offer,) = sender.offer(*KEY)
    assert offer == Send("t0", Offer(*KEY, 1))
    assert sender.receive("t0", Wait(*KEY, 1.0, False), 1.0) == [offer]
    sender.receive("t0", Grant(*KEY, 0, whole((5, 6))), 2.0)
    assert sender.receive("t0", Wait(*KEY, 1.0, False), 3.0) == []


def test_deadline_begins_with_the_grant_and_every_message_renews_it() -> None:
    receiver = expecting(granted=False)
    assert receiver.next_deadline == float("inf"), "until the grant, sources wait for this target"
    receiver.grant(*KEY, 0, whole(range(10)), 10.0)
    assert receiver.next_deadline == 15.0
    receiver.receive("s0", wrote(0, 0, 1, 4), 14.0)
    assert receiver.tick(18.9) == []
    receiver.receive("s0", Wait(*KEY, 20.0, True), 18.0)
    assert receiver.tick(42.9) == []
    assert failure(receiver.tick(43.0)) is Reason.DEADLINE


def test_unanswered_abort_is_repeated_in_growing_intervals_until_the_source_answers() -> None:
    receiver = expecting(num_sources=2)
    receiver.cancel(*KEY, 1.0)
    receiver.receive("s0", Stopped(*KEY, True), 1.1)
    times = []
    while len(times) < 10:
        times.append(receiver.next_deadline)
        assert receiver.tick(times[-1] - 0.01) == []
        assert receiver.tick(times[-1]) == [Send("s1", Abort(*KEY, b"us"))], "and nothing to the one that has answered"
    pauses = [after - before for before, after in pairwise([1.0, *times])]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]
    assert receiver.receive("s1", Stopped(*KEY, True), times[-1] + 1) == [WriterStopped(*KEY)]
    assert receiver.next_deadline == float("inf")


def test_stop_of_a_source_that_has_delivered_everything_changes_nothing() -> None:
    """It answers a Grant that was repeated, while another source still writes."""
    receiver = expecting(num_sources=2)
    receiver.receive("s0", wrote(0, 0, 1, 3, 0, 2, b"s"), 1.0)
    assert receiver.receive("s0", Stopped(*KEY, False), 1.1) == []
    assert kinds(receiver.receive("s1", wrote(0, 0, 1, 3, 1, 2, b""), 2.0)) == [Committed, Arrived]


def test_second_answer_does_not_end_a_grace_period_early() -> None:
    receiver = expecting()
    receiver.receive("s0", Stopped(*KEY, False), 2.0)
    assert receiver.receive("s0", Stopped(*KEY, True), 2.1) == []
    assert receiver.tick(2.9) == []
    assert receiver.tick(3.0) == [WriterStopped(*KEY)]


def test_cancel_without_a_grant_frees_pages_at_once() -> None:
    assert kinds(expecting(granted=False).cancel(*KEY, 1.0)) == [Abort, WriterStopped]


@pytest.mark.parametrize("how", ["dead", "stopped uncleanly"])
def test_writer_that_may_have_a_write_on_its_way_has_a_grace_period(how: str) -> None:
    receiver = expecting()
    if how == "dead":
        assert kinds(receiver.peer_lost("s0", True, "dead", 2.0)) == [Failed]
    else:
        assert kinds(receiver.receive("s0", Stopped(*KEY, False), 2.0)) == [Failed]
    assert receiver.next_deadline == 3.0
    assert receiver.tick(2.9) == []
    assert receiver.tick(3.0) == [WriterStopped(*KEY)]


def test_lost_connection_does_not_free_pages_until_death_is_known() -> None:
    receiver = expecting()
    assert kinds(receiver.peer_lost("s0", False, "reset", 2.0)) == [Failed, Abort]
    assert kinds(receiver.tick(1000.0)) == [Abort]
    assert receiver.peer_lost("s0", True, "dead", 2000.0) == []
    assert receiver.tick(2001.0) == [WriterStopped(*KEY)]


def test_death_of_a_rank_that_has_delivered_everything_changes_nothing() -> None:
    receiver = expecting(num_sources=2)
    receiver.receive("s0", wrote(0, 0, 1, 3, 0, 2, b"s"), 1.0)
    assert receiver.peer_lost("s0", True, "dead", 2.0) == []
    outputs = receiver.receive("s1", wrote(0, 0, 1, 3, 1, 2, b""), 3.0)
    assert kinds(outputs) == [Committed, Arrived]


def test_late_messages_about_an_ended_epoch_are_dropped_and_counted() -> None:
    receiver = expecting()
    receiver.receive("s0", wrote(0, 0, 1, 3, result=b"s"), 1.0)
    assert receiver.receive("s0", wrote(0, 0, 1, 3, result=b"s"), 1.0) == []
    assert receiver.receive("s0", Stopped(*KEY, True), 1.0) == []
    assert receiver.num_unknown == 2
    assert kinds(receiver.expect(*KEY, {"s0": (0, (10,))}, 5.0, 2.0)) == [Failed, WriterStopped]


# -- the fence -------------------------------------------------------------------------------------------------------


def test_fence_only_moves_forward_and_forgets_the_oldest_request() -> None:
    fence = Fence()
    fence.end("r", 3)
    fence.end("r", 1)
    assert fence.has_ended("r", 3)
    assert not fence.has_ended("r", 4)
    assert not fence.has_ended("other", 0)
    for number in range(20_000):
        fence.end(f"x{number}", 1)
    assert not fence.has_ended("r", 3)
    assert fence.has_ended("x19999", 1)
