"""Many equal steps at once: how many are certain, and that the result is that of single steps."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.schedule import fast_forward as stretches
from crossdock.workers.schedule.request.batch import Batch, SampledToken
from tests.workers.schedule.model_free_replica import COST, ModelFreeReplica, new_timed_replica


def decoding_replica(
    *outputs: int, prompt: int = 8, slo_classes: tuple[str, ...] = ("standard",), **config: Any
) -> ModelFreeReplica:
    """Return a replica whose streams have just made the first of so many tokens each."""
    replica = new_timed_replica(**config)
    for number, max_tokens in enumerate(outputs):
        replica.add(f"r{number}", prompt, slo_classes[number % len(slo_classes)], max_tokens)
    while any(not request.is_decoding for request in replica.scheduler.table.requests()):
        replica.step()
    return replica


def steady_steps(replica: ModelFreeReplica) -> int:
    return stretches.steady_steps(
        replica.scheduler.table, replica.scheduler.forecast.cost, replica.scheduler.schedule(replica.now)
    )


def test_steps_are_steady_until_the_first_end() -> None:
    replica = decoding_replica(9, 5)
    assert steady_steps(replica) == 4
    replica.add("late", 8)
    assert steady_steps(replica) == 1, "a prompt is waiting"
    assert stretches.steady_steps(new_timed_replica().scheduler.table, COST, Batch([], 0)) == 1


def test_no_steps_are_steady_while_windows_give_pages_back() -> None:
    assert steady_steps(decoding_replica(9, 9, windows=(None, 6))) == 1


def test_steps_are_steady_while_pages_are_free() -> None:
    replica = decoding_replica(900, 900, num_pages=12, max_model_len=48)  # 3 pages each, 6 left
    assert steady_steps(replica) == 3 * 4 + 1


def test_steps_are_steady_while_no_stream_skips() -> None:
    """A step of two takes 1 ms + 2 x 0.5 ms + 1 us per token of context, of which there are two more in each.

    The most urgent promise is 4 ms.
    """
    replica = decoding_replica(1500, 1500, prompt=4, slo_classes=("interactive", "batch"))
    context = sum(request.num_tokens for request in replica.scheduler.table.running)
    assert steady_steps(replica) == 1 + int((0.99 * 4e-3 - 2e-3 - context * 1e-6) / 2e-6) < 1400
    same = decoding_replica(1500, 1500, slo_classes=("interactive",))
    assert steady_steps(same) > 1400, "no stream is less urgent than another"


arrivals = st.tuples(
    st.floats(0, 0.3), st.integers(1, 60), st.integers(1, 50), st.sampled_from(["interactive", "standard", "batch"])
)


@settings(max_examples=30)
@given(
    st.lists(arrivals, min_size=1, max_size=12),
    st.integers(16, 60),
    st.sampled_from([{}, {"chunk_policy": "fixed"}, {"mixed_chunks": False}, {"prefill_order": "fcfs"}]),
)
def test_steps_at_once_have_the_result_of_single_steps(
    plan: list[tuple[float, int, int, str]], num_pages: int, config: dict[str, Any]
) -> None:
    """Requests arrive at any time, also within a fast-forward, and in pools where streams are preempted."""

    def play(at_once: bool) -> tuple[list[object], list[float]]:
        replica = new_timed_replica(
            num_pages=num_pages, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=24, **config
        )
        scheduler = replica.scheduler
        coming, seen, ends = sorted(plan, reverse=True), [], []
        while coming or scheduler.table.has_work:
            if not scheduler.table.has_work:
                replica.now = max(replica.now, coming[-1][0])
            while coming and coming[-1][0] <= replica.now:
                _, prompt, output, slo_class = coming.pop()
                tenant = ("", "a", "b")[len(coming) % 3]
                replica.add(f"r{len(coming)}", min(prompt, 60), slo_class, output, tenant=tenant)
            batch = scheduler.schedule(replica.now)
            steps = stretches.steady_steps(scheduler.table, scheduler.forecast.cost, batch) if at_once else 1
            fast_forward = [replica.now + COST.seconds(batch.work)]
            work = batch.work
            while len(fast_forward) < steps and not (coming and coming[-1][0] <= fast_forward[-1]):
                work = work._replace(context=work.context + work.decodes)
                fast_forward.append(fast_forward[-1] + COST.seconds(work))
            tokens = {part.request.id: [9] * (len(fast_forward) - 1) for part in batch.scheduled}
            batch = stretches.advance(scheduler.table, batch, tokens, fast_forward[:-1], scheduler.forecast.charge)
            replica.now = fast_forward[-1]
            ends += fast_forward
            sampled = dict.fromkeys((request.id for request in scheduler.table.requests()), SampledToken(9))
            scheduler.update(batch, sampled, replica.now)
            if not at_once or len(ends) % 7 == 0 or steps > 1:
                state = [
                    (each.id, each.num_tokens, each.num_computed_tokens, each.due, each.status, each.charged_s)
                    for each in scheduler.table.requests()
                ]
                seen.append((replica.now, state, scheduler.pages.counts(), set(scheduler.pages.prefixes.findable())))
        return seen, ends

    single, ends = play(at_once=False)
    at_once, same_ends = play(at_once=True)
    assert same_ends == ends
    assert all(state in single for state in at_once)
