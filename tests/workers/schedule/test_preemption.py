"""When pages run short: the least urgent requests lose theirs, and their output stays the same."""

from crossdock.workers.schedule.request.batch import Batch, SampledToken
from crossdock.workers.schedule.request.request import Status
from tests.workers.schedule.model_free_replica import (
    CLASSES,
    ModelFreeReplica,
    new_request,
    new_scheduler,
    new_timed_replica,
)


def test_least_urgent_class_loses_its_pages_first() -> None:
    """Batch requests lose their pages, then standard ones; interactive ones are never preempted."""
    replica = new_timed_replica(num_pages=64, max_model_len=200, max_num_seqs=8, starvation_s=1000.0)
    requests = {}
    for name in ("batch", "standard", "interactive"):
        requests[name] = replica.add(name, 40, name, max_tokens=100)
        for _ in range(8):
            replica.step()
    assert all(request.status is Status.RUNNING for request in requests.values())
    late = replica.add("interactive 2", 120, "interactive", max_tokens=4)  # needs 30 of the 64 pages at once
    replica.step()
    assert late.status is Status.RUNNING
    assert requests["batch"].status is Status.WAITING
    replica.run()
    assert requests["batch"].num_preemptions >= 1
    assert requests["batch"].num_preemptions >= requests["standard"].num_preemptions
    assert requests["interactive"].num_preemptions == late.num_preemptions == 0


def test_least_urgent_of_a_class_loses_its_pages_first() -> None:
    """Though it was admitted first: without priorities the last admitted would."""

    def preempted(first: int, second: int) -> list[bool]:
        replica = new_timed_replica(num_pages=20, max_model_len=60, starvation_s=1000.0)
        requests = [
            replica.add("first", 20, max_tokens=30, priority_in_class=first),
            replica.add("second", 20, max_tokens=30, priority_in_class=second),
        ]
        replica.run()
        for request in requests:
            assert request.num_output_tokens == 30
        return [request.num_preemptions > 0 for request in requests]

    assert preempted(0, 0) == [False, True]
    assert preempted(1, 0) == [True, False]
    assert preempted(-1, 0) == [False, True]


def test_request_in_flight_is_not_preempted() -> None:
    """Two steps are in flight, with a stream each, and one stream needs the other's pages."""
    scheduler = new_scheduler(num_pages=6, max_model_len=24, caching=False, depth=2)
    for name in "ab":
        scheduler.add(new_request(name, [ord(name)] * 8, max_tokens=12))
    flights: list[Batch] = []
    while scheduler.table.has_work:
        while len(flights) < 2 and (batch := scheduler.schedule(0.0)):
            flights.append(batch)
            assert all(part.request.status is Status.RUNNING for flight in flights for part in flight.scheduled)
        landed = flights.pop(0)
        sampled = {part.request.id: SampledToken(7) for part in landed.scheduled if part.samples}
        scheduler.update(landed, sampled, 0.0)
    assert scheduler.table.num_preemptions > 0
    assert scheduler.pages.counts().owned == 0


def test_request_is_preempted_only_if_the_urgent_one_can_start() -> None:
    """The urgent prompt shares five pages with the stream, and needs all others but those of the stream.

    Once, the pages to share were counted as free: the stream lost its pages, and the urgent prompt did not start.
    """
    scheduler = new_scheduler(num_pages=10, max_model_len=40, max_num_batched_tokens=60, slo_classes=CLASSES)
    replica = ModelFreeReplica(scheduler, sample=lambda token_ids: 7)
    replica.add("stream", [3] * 20 + [1], "standard", max_tokens=9)
    replica.step()
    urgent = replica.add("urgent", [3] * 20 + [1] * 17, "interactive")
    while scheduler.table.has_work:
        assert replica.step().batch, "there is work, so a step must do some"
        assert scheduler.table.num_preemptions == 0 or urgent.num_computed_tokens
    assert urgent.num_cached_tokens == 20


def test_streams_are_not_preempted_once_the_length_of_outputs_is_known() -> None:
    """Admission leaves room for as many tokens as recent outputs had; 30 are preempted where it leaves a page each."""
    replica = ModelFreeReplica(new_scheduler(num_pages=64, caching=False))
    for number in range(60):
        replica.add(f"{number}", 20, max_tokens=40)
    while len(replica.scheduler.table.requests()) > 56:
        replica.step()
    before = replica.scheduler.table.num_preemptions
    replica.run()
    assert replica.scheduler.table.num_preemptions <= before + 4, "those that were admitted before"


def test_short_outputs_that_end_first_let_no_prompt_in_that_takes_the_pages_of_streams() -> None:
    """The first output to end has one token. Streams that have 20 go on for 40 more, and need all pages by then."""
    replica = new_timed_replica(num_pages=64, max_model_len=200, max_num_seqs=8, starvation_s=1000.0)
    streams = [replica.add(name, 20, max_tokens=60) for name in "abc"]
    while any(stream.num_output_tokens < 20 for stream in streams):
        replica.step()
    short = replica.add("short", 8, max_tokens=1)
    while short.status is not Status.FINISHED:
        replica.step()
    late = replica.add("late", 100, max_tokens=4)
    replica.run()
    assert late.num_output_tokens == 4
    assert replica.scheduler.table.num_preemptions == 0
