"""The contract of transfers, over every transport, between real processes: bytes arrive exactly, in order and once."""

import time

import pytest

from crossdock.kvtransfer.calls import WaitCall
from tests.kvtransfer.transfer import PAGE, Start, Transfer, source_and_target


def test_scattered_pages_sent_by_chunks_arrive_byte_for_byte(start: Start) -> None:
    source, target = source_and_target(start)
    transfer = Transfer(source, target).begin()
    here, there = [3, 9, 4, 30, 31, 32, 1], [60, 2, 3, 4, 59, 63, 0]
    transfer.fill(here)
    transfer.grant(there)
    for num_tokens in (10, 40, 64, 70):
        transfer.chunk(here[: -(-num_tokens // PAGE)], num_tokens)
    transfer.finish(here, 6 * PAGE + 5, b"first token")
    event = transfer.arrived()
    assert (event["num_tokens"], bytes.fromhex(event["result"])) == (101, b"first token")
    frontiers = transfer.frontiers()
    assert frontiers == sorted(frontiers)
    assert frontiers[-1] == 101
    assert transfer.equal(there)
    assert target.ask("are_zero", pages=[page for page in range(64) if page not in there])


def test_pages_the_target_has_are_not_sent(start: Start) -> None:
    source, target = source_and_target(start)
    transfer = Transfer(source, target).begin()
    transfer.fill(range(8))
    transfer.grant([50, 40, 30], first_page=5)
    transfer.chunk(range(4), 4 * PAGE)
    transfer.finish(range(8), 8 * PAGE)
    event = transfer.arrived()
    assert event["figures"]["num_pages"] == 3
    assert transfer.equal([50, 40, 30], first=5)
    assert target.ask("are_zero", pages=[p for p in range(64) if p not in (30, 40, 50)])


def test_prompt_the_target_has_entirely_sends_the_state_alone(start: Start) -> None:
    transfer = Transfer(*source_and_target(start)).begin()
    transfer.grant([], first_page=2)
    transfer.finish([1, 2], 2 * PAGE, b"only this")
    event = transfer.arrived()
    assert (event["figures"]["num_pages"], bytes.fromhex(event["result"])) == (0, b"only this")


@pytest.mark.parametrize("first", ["ship", "expect", "grant"])
def test_transfer_begun_by_either_side_first_arrives(start: Start, first: str) -> None:
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


def test_wait_extends_the_deadline(start: Start) -> None:
    transfer = Transfer(*source_and_target(start), deadline=5.0).begin()
    transfer.fill([0])
    transfer.targets[0].call(WaitCall(*transfer.key, 60))
    time.sleep(5.5)
    transfer.grant([1])
    transfer.sources[0].call(WaitCall(*transfer.key, 60))
    time.sleep(5.5)
    transfer.finish([0], PAGE)
    transfer.arrived()


def test_many_transfers_at_once_in_both_directions_arrive(start: Start) -> None:
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


def test_figures_separate_hidden_from_exposed_writes(start: Start) -> None:
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
    assert 0 < figures["handshake_seconds"] <= figures["grant_wait_seconds"] < 60


@pytest.mark.parametrize(("tp", "other_tp"), [(1, 2), (2, 1)])
def test_ranks_of_unequal_shards_arrive_byte_for_byte(start: Start, tp: int, other_tp: int) -> None:
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


def test_idle_dock_uses_less_than_a_twentieth_of_a_core(start: Start) -> None:
    transfer = Transfer(*source_and_target(start)).begin()
    transfer.grant([1])
    transfer.finish([1], 1)
    transfer.arrived()
    before = [dock.ask("cpu_seconds") for dock in (*transfer.sources, *transfer.targets)]
    time.sleep(1.0)
    after = [dock.ask("cpu_seconds") for dock in (*transfer.sources, *transfer.targets)]
    assert max(end - begin for begin, end in zip(before, after, strict=True)) < 0.05  # of a core
