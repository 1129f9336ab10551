"""One contract, over every transport, between real processes: bytes arrive exactly, in order, once, or not at all.

What is expected of a fault is in the table of DESIGN.md, section 2.
"""

import signal
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(90)

PAGE = 16  # tokens
Start = Callable[..., Any]
_numbers = count()


class Transfer:
    """One request's way from the ranks of a source to the ranks of a target, step by step."""

    def __init__(self, sources: Any, targets: Any, request: str = "", epoch: int = 1, deadline: float = 10.0) -> None:
        self.sources = sources if isinstance(sources, list) else [sources]
        self.targets = targets if isinstance(targets, list) else [targets]
        self.request = request or f"request-{next(_numbers)}"
        self.epoch = epoch
        self.deadline = deadline
        self.seed = next(_numbers)
        self.first_frontier = 0
        self.names = {"request": self.request, "epoch": epoch}

    def fill(self, pages: Sequence[int]) -> None:
        for source in self.sources:
            source.ask("fill", seed=self.seed, pages=pages)

    def ship(self) -> None:
        blobs = [target.blob for target in self.targets]
        for source in self.sources:
            source.ask("ship", **self.names, peers=blobs, deadline_seconds=self.deadline)

    def expect(self) -> None:
        blobs = [source.blob for source in self.sources]
        for target in self.targets:
            target.ask("expect", **self.names, peers=blobs, deadline_seconds=self.deadline)

    def begin(self) -> "Transfer":
        self.expect()
        self.ship()
        return self

    def grant(self, pages: Sequence[int], first_page: int = 0) -> None:
        for target in self.targets:
            target.ask("grant", **self.names, first_page=first_page, pages=pages)

    def chunk(self, pages: Sequence[int], num_tokens: int) -> None:
        for source in self.sources:
            source.ask("chunk", request=self.request, pages=pages, num_tokens=num_tokens)

    def finish(self, pages: Sequence[int], num_tokens: int, state: bytes = b"state") -> None:
        for source in self.sources:
            source.ask("finish", request=self.request, pages=pages, num_tokens=num_tokens, state=state.hex())

    def arrived(self) -> dict[str, Any]:
        released = [source.event("Released", self.request, self.epoch) for source in self.sources]
        assert all(event["arrived"] for event in released)
        arrived = [target.event("Arrived", self.request, self.epoch) for target in self.targets]
        return {**arrived[0], "released": released[0]["figures"]}

    def equal(self, pages: Sequence[int], first: int = 0) -> bool:
        return all(all(target.ask("equal", seed=self.seed, pages=pages, first=first)) for target in self.targets)

    def frontiers(self) -> list[int]:
        """The frontiers that the first target has committed, forgotten hereby."""
        found = []
        while self.targets[0].has("Committed", self.request, self.epoch):
            found.append(self.targets[0].event("Committed", self.request, self.epoch)["num_tokens"])
        return found


def source_and_target(start: Start, **config: Any) -> tuple[Any, Any]:
    source, target = start(role="prefill", **config), start(role="decode", **config)
    return source, target


# -- the good path ---------------------------------------------------------------------------------------------------


def test_scattered_pages_arrive_byte_for_byte_chunk_by_chunk(start: Start) -> None:
    source, target = source_and_target(start)
    transfer = Transfer(source, target).begin()
    here, there = [3, 9, 4, 30, 31, 32, 1], [60, 2, 3, 4, 59, 63, 0]
    transfer.fill(here)
    transfer.grant(there)
    for num_tokens in (10, 40, 64, 70):
        transfer.chunk(here[: -(-num_tokens // PAGE)], num_tokens)
    transfer.finish(here, 6 * PAGE + 5, b"first token")
    event = transfer.arrived()
    assert (event["num_tokens"], bytes.fromhex(event["state"])) == (101, b"first token")
    frontiers = transfer.frontiers()
    assert frontiers == sorted(frontiers)
    assert frontiers[-1] == 101
    assert transfer.equal(there)
    assert target.ask("are_zero", pages=[page for page in range(64) if page not in there])


def test_only_what_the_target_lacks_is_sent(start: Start) -> None:
    source, target = source_and_target(start)
    transfer = Transfer(source, target).begin()
    transfer.fill(range(8))
    transfer.grant([50, 40, 30], first_page=5)
    assert source.event("Granted", transfer.request)["first_page"] == 5
    transfer.chunk(range(4), 4 * PAGE)
    transfer.finish(range(8), 8 * PAGE)
    event = transfer.arrived()
    assert event["figures"]["num_pages"] == 3
    assert transfer.equal([50, 40, 30], first=5)
    assert target.ask("are_zero", pages=[p for p in range(64) if p not in (30, 40, 50)])


def test_a_prompt_the_target_has_entirely_sends_the_state_alone(start: Start) -> None:
    transfer = Transfer(*source_and_target(start)).begin()
    transfer.grant([], first_page=2)
    transfer.finish([1, 2], 2 * PAGE, b"only this")
    event = transfer.arrived()
    assert (event["figures"]["num_pages"], bytes.fromhex(event["state"])) == (0, b"only this")


@pytest.mark.parametrize("first", ["ship", "expect", "grant"])
def test_either_side_may_be_told_first(start: Start, first: str) -> None:
    transfer = Transfer(*source_and_target(start))
    transfer.fill([5])
    if first == "ship":
        transfer.ship()
        time.sleep(0.05)
        transfer.expect()
        transfer.grant([7])
    else:
        transfer.expect()
        if first == "grant":
            transfer.grant([7])
            time.sleep(0.05)
        transfer.ship()
    transfer.finish([5], 3)
    if first == "expect":
        transfer.grant([7])
    transfer.arrived()
    assert transfer.equal([7])


def test_computing_begins_before_the_grant_and_then_goes_out_as_one_write(start: Start) -> None:
    transfer = Transfer(*source_and_target(start)).begin()
    transfer.fill(range(16))
    for end in range(1, 16):
        transfer.chunk(range(end), end * PAGE)
    transfer.grant(range(20, 36))
    assert transfer.targets[0].event("Committed", transfer.request)["num_tokens"] == 15 * PAGE
    transfer.finish(range(16), 16 * PAGE)
    assert transfer.arrived()["figures"]["num_writes"] == 2
    assert transfer.equal(range(20, 36))


def test_a_wait_extends_the_deadline(start: Start) -> None:
    transfer = Transfer(*source_and_target(start), deadline=0.4).begin()
    transfer.fill([0])
    transfer.targets[0].ask("wait", **transfer.names, seconds=5)
    time.sleep(0.8)
    transfer.grant([1])
    transfer.sources[0].ask("wait", **transfer.names, seconds=5)
    time.sleep(0.8)
    transfer.finish([0], PAGE)
    transfer.arrived()


def test_many_at_once_in_both_directions(start: Start) -> None:
    left, right = source_and_target(start)
    transfers = []
    for number in range(8):
        pair = (left, right) if number % 2 else (right, left)
        transfer = Transfer(*pair).begin()
        pages = range(number * 4, number * 4 + 4)
        transfer.fill(pages)
        transfers.append((transfer, pages, range(63 - number * 4, 59 - number * 4, -1)))
    for transfer, _, there in transfers:
        transfer.grant(there)
    for end in (1, 2, 3):
        for transfer, pages, _ in transfers:
            transfer.chunk(pages[:end], end * PAGE)
    for transfer, pages, there in transfers:
        transfer.finish(pages, 4 * PAGE)
        transfer.arrived()
        assert transfer.equal(there)


def test_figures_tell_how_much_was_hidden(start: Start) -> None:
    transfer = Transfer(*source_and_target(start)).begin()
    transfer.grant(range(32))
    transfer.chunk(range(31), 31 * PAGE)
    assert transfer.targets[0].event("Committed", transfer.request)["num_tokens"] == 31 * PAGE
    time.sleep(0.1)
    transfer.finish(range(32), 32 * PAGE)
    event = transfer.arrived()
    figures, page_bytes = event["released"], event["figures"]["num_bytes"] // 32
    assert figures["num_bytes"] == event["figures"]["num_bytes"]
    assert figures["hidden_bytes"] == 31 * page_bytes
    assert 0 < figures["hidden_seconds"] <= figures["write_seconds"] < figures["total_seconds"]
    assert 0 < figures["handshake_seconds"] <= figures["grant_wait_seconds"] < 5


@pytest.mark.parametrize(("tp", "other_tp"), [(1, 2), (2, 1)])
def test_unequal_shards(start: Start, tp: int, other_tp: int) -> None:
    sources = [start(role="prefill", tp=tp, rank=rank) for rank in range(tp)]
    targets = [start(role="decode", tp=other_tp, rank=rank) for rank in range(other_tp)]
    transfer = Transfer(sources, targets).begin()
    transfer.fill([8, 1, 5])
    transfer.grant([10, 20, 15])
    transfer.chunk([8, 1], 2 * PAGE)
    transfer.finish([8, 1, 5], 2 * PAGE + 1)
    assert transfer.arrived()["num_tokens"] == 2 * PAGE + 1
    assert transfer.equal([10, 20, 15])
    assert transfer.frontiers() in ([33], [32, 33])


def test_pools_that_differ_are_refused_with_both_printed(start: Start) -> None:
    source, target = start(role="prefill", page_size=8), start(role="decode")
    for dock, peer, verb in ((source, target, "ship"), (target, source, "expect")):
        answer = dock.answer(verb, request="r", epoch=1, peers=[peer.blob], deadline_seconds=1)
        text = answer["incompatible"]
        assert "pools differ in page_size" in text
        assert "8 tokens" in text
        assert "16 tokens" in text
        assert dock.ask("counts")["num_open"] == 0


def test_an_idle_dock_costs_next_to_nothing(start: Start) -> None:
    transfer = Transfer(*source_and_target(start)).begin()
    transfer.grant([1])
    transfer.finish([1], 1)
    transfer.arrived()
    before = [dock.ask("cpu_seconds") for dock in (*transfer.sources, *transfer.targets)]
    time.sleep(1.0)
    after = [dock.ask("cpu_seconds") for dock in (*transfer.sources, *transfer.targets)]
    assert max(end - begin for begin, end in zip(before, after, strict=True)) < 0.05  # of a core


# -- somebody no longer wants it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["begun", "granted", "chunk sent", "arrived"])
@pytest.mark.parametrize("who", ["source", "target", "both"])
def test_cancelled_at_any_stage_both_sides_are_told_when_their_pages_are_free(
    start: Start, stage: str, who: str
) -> None:
    source, target = source_and_target(start)
    transfer = Transfer(source, target).begin()
    if stage != "begun":
        transfer.grant(range(8))
    if stage == "chunk sent":
        transfer.chunk(range(4), 4 * PAGE)
        target.event("Committed", transfer.request)
    if stage == "arrived":
        transfer.finish(range(4), 4 * PAGE)
        transfer.arrived()
    if who != "target":
        source.ask("cancel_ship", **transfer.names)
    if who != "source":
        target.ask("cancel_expect", **transfer.names)
    if stage != "arrived" or who != "target":
        source.event("Released", transfer.request)
    if stage != "arrived" or who != "source":
        target.event("WriterStopped", transfer.request)


def test_a_target_that_gives_up_before_the_source_was_told(start: Start) -> None:
    source, target = source_and_target(start)
    transfer = Transfer(source, target)
    transfer.expect()
    transfer.grant(range(8))
    target.ask("cancel_expect", **transfer.names)
    target.event("WriterStopped", transfer.request)  # the source's word, though it had never heard of the target
    transfer.ship()  # and it keeps its word
    assert source.event("Failed", transfer.request)["reason"] == "superseded"
    assert not source.event("Released", transfer.request)["arrived"]


def test_a_stale_writer_cannot_touch_pages_before_it_says_that_it_stopped(start: Start) -> None:
    """The case of facts/nixl.md: nothing can revoke a write, so its target pages must not be given to anyone."""
    source, target = start(role="prefill", delayed=True), start(role="decode")
    transfer = Transfer(source, target).begin()
    transfer.fill(range(4))
    transfer.grant([10, 11, 12, 13])
    source.event("Granted", transfer.request)
    transfer.chunk(range(4), 4 * PAGE)
    while source.ask("counts")["num_open_writes"] == 0:
        time.sleep(0.01)
    # The write is begun, and is held up on its way.
    target.ask("cancel_expect", **transfer.names)
    assert source.event("Failed", transfer.request)["reason"] == "peer_stopped"
    time.sleep(0.3)
    assert not target.has("WriterStopped", transfer.request), "the pages are free while a write is open"
    assert not source.has("Released", transfer.request)
    target.ask("zero")  # what another request would have there, had it been given the pages
    source.ask("release")
    target.event("WriterStopped", transfer.request)
    source.event("Released", transfer.request)
    assert transfer.equal([10, 11, 12, 13]), "the late write did land: quarantine was all that prevented damage"


# -- somebody dies or hangs ------------------------------------------------------------------------------------------


def mid_transfer(start: Start, **config: Any) -> tuple[Transfer, list[int]]:
    """A transfer of 512 pages in as many writes, of which some have been committed."""
    big = {"max_write_bytes": 1, "num_pages": 512, "role": "big", **config}
    transfer = Transfer(start(**big), start(**big), deadline=1.0).begin()
    pages = list(range(512))
    transfer.fill(pages)
    transfer.grant(pages[::-1])
    transfer.chunk(pages, 512 * PAGE)
    transfer.first_frontier = transfer.targets[0].event("Committed", transfer.request)["num_tokens"]
    return transfer, pages


def test_target_killed_mid_transfer_and_another_takes_over(start: Start) -> None:
    transfer, pages = mid_transfer(start)
    (source,) = transfer.sources
    transfer.targets[0].kill()
    assert source.event("Failed", transfer.request)["reason"] == "peer_lost"
    assert not source.event("Released", transfer.request)["arrived"]
    again = Transfer(source, start(role="big", max_write_bytes=1, num_pages=512), transfer.request, epoch=2)
    again.seed = transfer.seed
    again.begin()
    again.grant(pages)
    again.finish(pages, 512 * PAGE)
    again.arrived()
    assert again.equal(pages)


def test_target_killed_while_idle(start: Start) -> None:
    source, target = source_and_target(start)
    first = Transfer(source, target).begin()
    first.grant([1])
    first.finish([1], 1)
    first.arrived()
    target.kill()
    transfer = Transfer(source, target, deadline=0.5)
    transfer.ship()
    assert source.event("Failed", transfer.request)["reason"] in ("peer_lost", "deadline")
    source.event("Released", transfer.request)


def test_source_killed_mid_transfer_and_another_continues_from_the_frontier(start: Start) -> None:
    transfer, pages = mid_transfer(start)
    (source,), (target,) = transfer.sources, transfer.targets
    source.kill()
    target.ask("peer_dead", blob=source.blob)
    assert target.event("Failed", transfer.request)["reason"] == "peer_lost"
    target.event("WriterStopped", transfer.request)
    frontier = [transfer.first_frontier, *transfer.frontiers()][-1]
    assert 0 < frontier < 512 * PAGE
    committed = frontier // PAGE
    there = pages[::-1]
    assert transfer.equal(there[:committed]), "what is committed is good"
    again = Transfer(start(role="big", max_write_bytes=1 << 20, num_pages=512), target, transfer.request, epoch=2)
    again.seed = transfer.seed
    again.begin()
    again.fill(pages)
    again.grant(there[committed:], first_page=committed)
    again.finish(pages, 512 * PAGE)
    assert again.arrived()["figures"]["num_pages"] == 512 - committed
    assert again.equal(there)


def test_a_hung_target_meets_the_deadline_and_keeps_the_source_pages_in_use(start: Start) -> None:
    transfer, _ = mid_transfer(start)
    (source,), (target,) = transfer.sources, transfer.targets
    target.signal(signal.SIGSTOP)
    assert source.event("Failed", transfer.request)["reason"] == "deadline"
    assert not source.has("Released", transfer.request), "its write is open, and reads the pages"
    assert source.ask("counts")["num_open_writes"] == 1
    target.signal(signal.SIGCONT)
    source.event("Released", transfer.request)
    target.event("WriterStopped", transfer.request)


def test_a_hung_target_that_dies_releases_the_source_pages(start: Start) -> None:
    transfer, _ = mid_transfer(start)
    (source,), (target,) = transfer.sources, transfer.targets
    target.signal(signal.SIGSTOP)
    source.event("Failed", transfer.request)
    target.kill()
    source.ask("peer_dead", blob=target.blob)
    source.event("Released", transfer.request)


def test_a_hung_source_meets_the_deadline_and_keeps_the_target_pages_in_quarantine(start: Start) -> None:
    transfer, _ = mid_transfer(start)
    (source,), (target,) = transfer.sources, transfer.targets
    source.signal(signal.SIGSTOP)
    assert target.event("Failed", transfer.request)["reason"] == "deadline"
    time.sleep(0.5)
    assert not target.has("WriterStopped", transfer.request), "it may wake up and write"
    source.signal(signal.SIGCONT)
    target.event("WriterStopped", transfer.request)
    source.event("Released", transfer.request)
