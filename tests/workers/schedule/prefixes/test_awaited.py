"""A prompt whose first pages come from elsewhere: the rest is computed once they have landed, or all of it in time."""

from crossdock.workers.schedule.prefixes.awaited import AwaitedPrefix
from tests.workers.schedule.model_free_replica import (
    LONG_STEPS,
    ModelFreeReplica,
    chunk_sizes,
    new_request,
    new_timed_replica,
)

PROMPT = [*range(1, 43)]  # ten full pages of four tokens, and two tokens


def waiting(until: float = 10.0, num_pages: int = 8) -> tuple[ModelFreeReplica, AwaitedPrefix]:
    """Return a replica whose only prompt waits for its first pages."""
    replica = new_timed_replica(LONG_STEPS)
    prefix = replica.scheduler.awaited.begin(replica.add("a", PROMPT), num_pages, until)
    assert prefix is not None
    return replica, prefix


def test_prompt_that_waits_for_pages_computes_nothing() -> None:
    replica, prefix = waiting()
    assert not replica.step().batch
    assert [each.number for each in prefix.empty] == [*range(8)]
    assert replica.scheduler.pages.counts().owned == 8


def test_prefix_that_has_landed_is_a_prefix_hit() -> None:
    replica, prefix = waiting()
    replica.step()
    replica.scheduler.awaited.land(prefix, 8)
    replica.scheduler.awaited.end(prefix)
    assert chunk_sizes(replica.run(), "a") == [len(PROMPT) - 32]
    assert prefix.request.num_cached_tokens == 32


def test_pages_that_have_not_landed_are_computed() -> None:
    replica, prefix = waiting()
    replica.scheduler.awaited.land(prefix, 3)
    replica.scheduler.awaited.end(prefix)
    assert sum(chunk_sizes(replica.run(), "a")) == len(PROMPT) - 12
    assert replica.scheduler.pages.counts().owned == 0


def test_prompt_waits_no_longer_than_its_deadline() -> None:
    replica, prefix = waiting(until=0.5)
    replica.step()
    replica.now = 0.5
    assert replica.step().batch.num_tokens == len(PROMPT)
    replica.scheduler.awaited.land(prefix, 8)  # others may have the same prefix
    replica.scheduler.awaited.end(prefix)
    assert replica.scheduler.pages.counts().owned == 0


def test_other_prompts_do_not_wait() -> None:
    replica, _ = waiting()
    replica.add("b", 20)
    assert [part.request.id for part in replica.step().batch.scheduled] == ["b"]


def test_prompt_with_the_same_prefix_waits_for_it_too() -> None:
    replica, prefix = waiting()
    replica.add("b", [*PROMPT[:32], 9, 9, 9])
    assert not replica.step().batch
    replica.scheduler.awaited.land(prefix, 8)
    replica.scheduler.awaited.end(prefix)
    assert sorted(part.num_tokens for part in replica.step().batch.scheduled) == [3, 10]


def test_pages_that_may_still_be_written_are_quarantined_until_the_writer_stops() -> None:
    replica, prefix = waiting()
    replica.scheduler.awaited.land(prefix, 3)
    replica.scheduler.awaited.end(prefix, may_be_written=True)
    assert replica.scheduler.pages.counts().quarantined == 5
    assert sum(chunk_sizes(replica.run(), "a")) == len(PROMPT) - 12
    assert replica.scheduler.pages.end_quarantine(prefix.owner) == 5


def test_prompt_without_room_waits_for_no_pages() -> None:
    replica = new_timed_replica(num_pages=12, max_model_len=48, max_num_batched_tokens=64)
    replica.scheduler.add(new_request("a", PROMPT[:20]))
    replica.step()
    assert replica.scheduler.awaited.begin(replica.add("b", [5, *PROMPT[1:]]), 8, 10.0) is None


def test_prompt_that_is_cached_already_waits_for_no_pages() -> None:
    replica = new_timed_replica(LONG_STEPS)
    replica.add("a", PROMPT)
    replica.run()
    assert replica.scheduler.awaited.begin(replica.add("b", PROMPT), 10, 10.0) is None
