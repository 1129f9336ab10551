"""Which requests slow down when time runs short: classes are tiers, short prompts have a lane, none starves."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from crossdock.workers.schedule.request.submission import InvalidField
from tests.workers.schedule.model_free_replica import CLASSES, COST, LONG_STEPS, ModelFreeReplica, new_timed_replica

SLOW_ATTENTION = replace(COST, per_attended=1e-6)


def order_of_first_tokens(replica: ModelFreeReplica) -> list[str]:
    return sorted(replica.token_times, key=lambda name: (replica.token_times[name][0], name))


def test_classes_are_strict_tiers() -> None:
    replica = new_timed_replica(max_num_batched_tokens=64, short_lane_share=0.0)
    for name in ("batch", "standard", "interactive"):
        for number in range(3):
            replica.add(f"{name} {number}", 60, name)
    replica.run()
    order = [name.split()[0] for name in order_of_first_tokens(replica)]
    assert order == ["interactive"] * 3 + ["standard"] * 3 + ["batch"] * 3


def test_priorities_of_clients_order_the_prompts_of_a_class() -> None:
    replica = new_timed_replica(max_num_batched_tokens=64, short_lane_share=0.0)
    for name, slo_class, priority in (
        ("s2", "standard", 2),
        ("s0", "standard", 0),
        ("s-1", "standard", -1),
        ("i9", "interactive", 9),
        ("b-9", "batch", -9),
    ):
        replica.add(name, 60, slo_class, priority_in_class=priority)
    replica.run()
    assert order_of_first_tokens(replica) == ["i9", "s-1", "s0", "s2", "b-9"]


def test_more_urgent_prompt_of_a_class_is_not_counted_behind_partly_computed_ones() -> None:
    replica = new_timed_replica(max_long_partial_prefills=1)
    replica.add("low", 3000, priority_in_class=5)
    replica.step()
    replica.add("high", 2000, priority_in_class=-5)
    replica.run()
    assert order_of_first_tokens(replica) == ["high", "low"]


def test_predicted_first_token_counts_no_less_urgent_prompt_of_the_class() -> None:
    replica = new_timed_replica(LONG_STEPS, admission="queue", idle_step_share=1.0)
    for number in range(5):
        replica.add(f"later {number}", 400, priority_in_class=1)
    first = replica.add("first", 400)
    last = replica.add("last", 400, priority_in_class=2)
    assert first.predicted_ttft is not None
    assert last.predicted_ttft is not None
    alone = LONG_STEPS.prefill_seconds(0, 400, replica.scheduler.config.max_num_batched_tokens)
    assert first.predicted_ttft == pytest.approx(alone)
    assert last.predicted_ttft == pytest.approx(7 * alone)


def test_priority_is_refused_where_arrival_decides() -> None:
    replica = new_timed_replica(prefill_order="fcfs")
    with pytest.raises(InvalidField, match="--prefill-order fcfs") as refused:
        replica.add("a", 10, priority_in_class=1)
    assert refused.value.field == "priority_in_class"
    replica.add("b", 10)


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Half of each step is the lane of short prompts; first come, first served computes the long one first."""

    def steps(**config: Any) -> int:
        replica = new_timed_replica(LONG_STEPS, idle_step_share=1.0, **config)
        replica.add("long", 3000)
        replica.step()
        replica.add("short", 100)
        count = 0
        while "short" not in replica.token_times:
            replica.step()
            count += 1
        return count

    assert steps() <= 2
    assert steps(prefill_order="fcfs", chunk_policy="fixed") == 12


@pytest.mark.parametrize(("computed", "order"), [(2000, ["short", "long"]), (2800, ["long", "short"])])
def test_prompt_passes_a_longer_one_that_has_begun_while_more_is_left_of_that_one(
    computed: int, order: list[str]
) -> None:
    replica = new_timed_replica(short_lane_share=0.0, max_num_batched_tokens=64)
    long = replica.add("long", 3000)
    while long.num_computed_tokens < computed:
        replica.step()
    replica.add("short", 400)
    replica.run()
    assert order_of_first_tokens(replica) == order


def test_equal_prompts_take_no_turns() -> None:
    replica = new_timed_replica(short_lane_share=0.0, max_num_batched_tokens=64)
    for name in "abc":
        replica.add(name, 300)
    batches = replica.run()
    parts = [part.request.id for batch in batches for part in batch.scheduled]
    assert [name for name, after in pairwise([*parts, ""]) if name != after] == ["a", "b", "c"]


def test_prompt_most_of_which_is_cached_counts_as_a_short_one() -> None:
    replica = new_timed_replica(short_lane_share=0.0)
    document = [*range(2000)]
    replica.add("first", document)
    replica.run()
    replica.add("other", 1000)
    replica.add("cached", document)
    replica.run()
    assert order_of_first_tokens(replica) == ["first", "cached", "other"]


@pytest.mark.parametrize("seed", range(3))
def test_none_passes_a_prompt_once_16_times_as_much_was_computed_as_it_takes_alone(seed: int) -> None:
    """The bound on a prompt's wait, for prompts of any lengths that come at any time."""
    draw = random.Random(seed)
    replica = new_timed_replica(short_lane_share=0.0, max_long_partial_prefills=64, max_num_partial_prefills=64)
    came = list[tuple[str, float, float]]()
    computed = replica.scheduler.table.prefilled
    for number in range(40):
        length = int(20 * 200 ** draw.random()) - 1
        replica.add(str(number), length)
        came.append((str(number), computed.seconds, COST.prefill_seconds(0, length, 256)))
        for _ in range(draw.randrange(3)):
            replica.step()
    replica.run()
    first = {name: times[0] for name, times in replica.token_times.items()}
    later = [(one, other) for place, one in enumerate(came) for other in came[place + 1 :]]
    passed = [one for one, other in later if first[other[0]] < first[one[0]]]
    assert len(passed) > 20
    late = [(one, other) for one, other in later if other[1] - one[1] > 16 * one[2]]
    assert len(late) > 100
    assert all(first[one[0]] <= first[other[0]] for one, other in late)


def test_long_prompts_of_less_urgent_classes_do_not_keep_an_urgent_one_out() -> None:
    """The limit on partly computed long prompts counts those of a prompt's own class and of more urgent ones."""
    replica = new_timed_replica(max_long_partial_prefills=1)
    replica.add("batch", 3000, "batch")
    replica.step()
    replica.add("standard", 2000, "standard")
    replica.step()
    second = replica.add("second", 2000, "standard")
    replica.add("urgent", 1000, "interactive")  # long too, and takes several steps
    while "urgent" not in replica.token_times:
        batch = replica.step().batch
        assert [part.request.id for part in batch.scheduled][:1] == ["urgent"]
        assert second.num_computed_tokens == 0, "the limit holds in its class"
    replica.run()
    assert order_of_first_tokens(replica) == ["urgent", "standard", "second", "batch"]


def test_partial_prefills_are_bounded() -> None:
    replica = new_timed_replica(max_num_batched_tokens=64, max_num_partial_prefills=3, max_long_partial_prefills=1)
    for number in range(6):
        replica.add(f"long {number}", 1000)
        replica.add(f"short {number}", 100)
    while replica.scheduler.table.has_work:
        replica.step()
        partial = [request for request in replica.scheduler.table.running if not request.is_decoding]
        assert len(partial) <= 3
        long = [each for each in partial if each.id.startswith("long") and each.num_uncached_tokens > 160]
        assert len(long) <= 1


@pytest.mark.parametrize(("limits", "most"), [((3, 3), 3), ((8, 2), 2), ((8, 8), 8)])
def test_budget_left_by_small_chunks_starts_prompts_up_to_the_limit(limits: tuple[int, int], most: int) -> None:
    """Chunks of 16 tokens leave room for eight prompts in a step."""
    replica = new_timed_replica(
        max_num_batched_tokens=128,
        chunk_policy="fixed",
        long_prefill_token_threshold=16,
        max_num_partial_prefills=limits[0],
        max_long_partial_prefills=limits[1],
    )
    for number in range(12):
        replica.add(f"long {number}", 100)
    replica.step()
    assert len(replica.scheduler.table.running) == most


def test_batch_streams_skip_steps_for_an_interactive_one() -> None:
    """The interactive stream keeps its pace; no batch stream stops for good."""
    replica = new_timed_replica(max_num_seqs=48)
    for number in range(30):
        replica.add(f"b{number}", 4, "batch", max_tokens=40)
    for _ in range(3):
        replica.step()
    replica.add("i", 4, "interactive", max_tokens=60)
    replica.run()
    gaps = [after - before for before, after in pairwise(replica.token_times["i"])]
    assert sorted(gaps)[len(gaps) // 2] <= 1.25 * CLASSES[0].tpot_s
    assert any(batch.num_skipped for batch in replica.batches)
    for number in range(30):
        times = replica.token_times[f"b{number}"]
        assert len(times) == 40
        assert max(after - before for before, after in pairwise(times)) <= CLASSES[2].tpot_s


def test_batch_prompt_makes_no_interactive_stream_late() -> None:
    """Deep in its context even a page takes longer than an interactive token may.

    So the prompt waits for a gap between streams, and gets its floor once it starves.
    """
    replica = new_timed_replica(cost=COST, starvation_s=8.0)
    replica.scheduler.learn(SLOW_ATTENTION, 1.0)
    long = replica.add("long", 3000, "batch")
    while long.num_computed_tokens < 2000:
        replica.step()
    replica.add("i", 4, "interactive", max_tokens=100)
    while len(replica.token_times.get("i", ())) < 20:
        batch = replica.step().batch
        if batch.num_decodes:
            assert not any(part.request.id == "long" for part in batch.scheduled)
    replica.run()
    assert "long" in replica.token_times


@pytest.mark.parametrize("length", [100, 2000])
def test_batch_prompt_under_endless_urgent_load_does_not_starve(length: int) -> None:
    """With more interactive work than the replica can do, a batch prompt still gets its first token.

    It comes within `starvation_s` or its own promise, whichever is later, plus its own time, plus that of prompts that
    starved before it; here there are none.
    """
    replica = new_timed_replica(starvation_s=2.0, max_num_seqs=64)
    victim = replica.add("victim", length, "batch")
    alone = COST.prefill_seconds(0, length, 256)
    arrivals = 0
    while "victim" not in replica.token_times:
        while arrivals * 0.05 <= replica.now:  # 100 tokens each 50 ms: twice what a millisecond a token allows
            replica.add(f"i{arrivals}", 100, "interactive")
            arrivals += 1
        replica.step()
        assert replica.now < 60
    assert victim.arrival_time == 0.0
    bound = max(2.0, replica.scheduler.config.slo_classes[2].ttft_deadline(alone))
    assert bound <= replica.token_times["victim"][0] <= bound + 2 * alone + 0.5
