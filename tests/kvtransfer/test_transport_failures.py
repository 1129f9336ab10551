"""The contract of transfers that fail, over every transport, between real processes: no byte lands in a freed page.

benchmarks/records/nixl.md has the failures that were measured.
"""

import signal
import time

import pytest

from crossdock.kvtransfer.calls import CancelExpectCall, CancelShipCall, PeerDeadCall
from tests.kvtransfer.transfer import PAGE, Start, Transfer, mid_transfer, source_and_target
from tests.sweeps import shared_out

HUNG_S = 8.0  # a deadline that passes soon; but not before a busy machine has begun the transfer

# -- cancelled ---------------------------------------------------------------------------------------------------------


STAGES, CANCELLERS = ("begun", "granted", "chunk sent", "arrived"), ("source", "target", "both")


@pytest.mark.parametrize(("stage", "canceller"), shared_out(2, STAGES, CANCELLERS))
def test_transfer_cancelled_at_any_stage_frees_pages_on_both_sides(start: Start, stage: str, canceller: str) -> None:
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
    if canceller != "target":
        source.call(CancelShipCall(*transfer.key))
    if canceller != "source":
        target.call(CancelExpectCall(*transfer.key))
    if stage != "arrived" or canceller != "target":
        source.event("Released", transfer.request)
    if stage != "arrived" or canceller != "source":
        target.event("WriterStopped", transfer.request)


def test_pages_of_a_delayed_writer_stay_in_quarantine_until_it_has_stopped(start: Start) -> None:
    """Nothing can revoke a write (benchmarks/records/nixl.md), so no other request may get its target pages."""
    source, target = start(role="prefill", delayed=True), start(role="decode")
    transfer = Transfer(source, target).begin()
    transfer.fill(range(4))
    transfer.grant([10, 11, 12, 13])
    transfer.chunk(range(4), 4 * PAGE)
    while source.ask("counts")["num_open_writes"] == 0:
        time.sleep(0.01)
    # The write has begun, and is delayed on its way.
    target.call(CancelExpectCall(*transfer.key))
    assert source.event("Failed", transfer.request)["reason"] == "peer_stopped"
    time.sleep(0.3)
    assert not target.has("WriterStopped", transfer.request), "the pages are free while a write is open"
    assert not source.has("Released", transfer.request)
    target.ask("zero")  # as another request would, had it been given the pages
    source.ask("release")
    target.event("WriterStopped", transfer.request)
    source.event("Released", transfer.request)
    assert transfer.equal([10, 11, 12, 13]), "the late write did land: only quarantine prevented damage"


# -- dead or hung ------------------------------------------------------------------------------------------------------


def test_target_killed_during_a_transfer_is_replaced_by_another(start: Start) -> None:
    transfer, pages = mid_transfer(start, deadline=60.0)
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


def test_target_killed_while_idle_fails_the_next_transfer(start: Start) -> None:
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


def test_source_killed_during_a_transfer_is_replaced_from_the_frontier(start: Start) -> None:
    transfer, pages = mid_transfer(start, deadline=60.0)
    (source,), (target,) = transfer.sources, transfer.targets
    source.kill()
    target.call(PeerDeadCall(source.blob))
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


def test_hung_target_fails_at_the_deadline_and_keeps_source_pages_in_use(start: Start) -> None:
    transfer, _ = mid_transfer(start, HUNG_S)
    (source,), (target,) = transfer.sources, transfer.targets
    target.signal(signal.SIGSTOP)
    assert source.event("Failed", transfer.request)["reason"] == "deadline"
    assert not source.has("Released", transfer.request), "its write is open, and reads the pages"
    assert source.ask("counts")["num_open_writes"] == 1
    target.signal(signal.SIGCONT)
    source.event("Released", transfer.request)
    target.event("WriterStopped", transfer.request)


def test_hung_target_that_dies_releases_source_pages(start: Start) -> None:
    transfer, _ = mid_transfer(start, HUNG_S)
    (source,), (target,) = transfer.sources, transfer.targets
    target.signal(signal.SIGSTOP)
    source.event("Failed", transfer.request)
    target.kill()
    source.call(PeerDeadCall(target.blob))
    source.event("Released", transfer.request)


def test_hung_source_fails_at_the_deadline_and_keeps_target_pages_in_quarantine(start: Start) -> None:
    transfer, _ = mid_transfer(start, HUNG_S)
    (source,), (target,) = transfer.sources, transfer.targets
    source.signal(signal.SIGSTOP)
    assert target.event("Failed", transfer.request)["reason"] == "deadline"
    time.sleep(0.5)
    assert not target.has("WriterStopped", transfer.request), "it may wake up and write"
    source.signal(signal.SIGCONT)
    target.event("WriterStopped", transfer.request)
    source.event("Released", transfer.request)
