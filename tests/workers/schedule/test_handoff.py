"""Requests on two replicas: pages sent, received, granted, taken over."""

from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Leg, SamplingParams, Submission
from crossdock.workers.schedule.scheduler import Scheduler
from tests.workers.schedule.model_free_replica import (
    CLASSES,
    LONG_STEPS,
    ModelFreeReplica,
    chunk_sizes,
    new_request,
    new_scheduler,
    new_timed_replica,
    reference_output,
)


def pair_request(name: str, num_tokens: int, leg: Leg, priority: int = 0) -> Request:
    """Return a request on two replicas, for whose prompt the other one has pages."""
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    is_offered = leg is Leg.RECEIVE
    prompt = [ord(name[0])] * num_tokens
    submission = Submission(name, prompt, params, priority_in_class=priority, leg=leg, epoch=1)
    return Request(submission, is_offered=is_offered)


def granted(scheduler: Scheduler) -> list[str]:
    return [request.id for request in scheduler.handoff.grant(0.0)]


def test_committed_pages_are_shared_before_the_rest_arrives() -> None:
    scheduler = new_scheduler()
    scheduler.add(pair_request("a", 30, Leg.RECEIVE))
    scheduler.handoff.grant(0.0)
    scheduler.handoff.commit("a", 16)
    scheduler.add(Request(Submission("b", [ord("a")] * 30, SamplingParams(max_tokens=1))))
    (part,) = ModelFreeReplica(scheduler).step().batch.scheduled
    assert (part.start, part.num_tokens) == (16, 14)


def test_prompt_taken_over_is_computed_from_what_has_arrived() -> None:
    scheduler = new_scheduler()
    scheduler.add(pair_request("a", 30, Leg.RECEIVE))
    scheduler.handoff.grant(0.0)
    scheduler.handoff.commit("a", 16)
    scheduler.handoff.take_over("a", 1.0)
    assert scheduler.pages.counts().quarantined == 4
    replica = ModelFreeReplica(scheduler)
    (part,) = replica.step().batch.scheduled
    assert (part.start, part.num_tokens) == (16, 14)
    replica.run()
    assert scheduler.pages.counts().quarantined == 4, "the lost writer is not known to have stopped"
    scheduler.pages.end_quarantine("a#1")
    assert scheduler.pages.counts().quarantined == 0


def test_prompt_of_a_recurrent_model_is_taken_over_from_its_last_snapshot() -> None:
    """The state comes with the last chunk: all tokens after the last state that is here are computed again."""
    scheduler = new_scheduler(state_pages=2)
    replica = ModelFreeReplica(scheduler)
    scheduler.add(new_request("before", [ord("a")] * 12 + [1], 1))
    replica.run()
    scheduler.add(pair_request("a", 30, Leg.RECEIVE))
    (request,) = scheduler.handoff.grant(0.0)
    assert request.num_computed_tokens == 12, "these pages need no transfer, and no state"
    state = list(scheduler.pages.states.newest("a#1"))
    scheduler.handoff.commit("a", 24)
    scheduler.handoff.take_over("a", 1.0)
    assert request.expected_cached_tokens == 12
    assert scheduler.pages.counts().quarantined == 2 + 2, "the state, and the pages of six tokens"
    assert not scheduler.pages.num_held_by("a#1")
    parts = [part for batch in replica.run() for part in batch.scheduled]
    assert [(part.start, part.num_tokens) for part in parts][:2] == [(12, 12), (24, 4)], "to the pages that are here"
    assert not set(state) & {page for part in parts for page in (*part.state.read, *part.state.write)}


def test_grants_wait_for_pages() -> None:
    scheduler = new_scheduler(num_pages=26, max_model_len=100)
    scheduler.add(pair_request("a", 60, Leg.RECEIVE))
    scheduler.add(pair_request("b", 60, Leg.RECEIVE))
    assert granted(scheduler) == ["a"]
    assert granted(scheduler) == []
    scheduler.handoff.start_decoding("a", 1, 0.0)
    ModelFreeReplica(scheduler).run()
    assert granted(scheduler) == ["b"]


def test_grants_follow_the_priorities_of_clients() -> None:
    """One that lacks pages keeps back less urgent ones of its class, and no more urgent one."""
    scheduler = new_scheduler(num_pages=26)
    for name, num_tokens, priority in (("a", 30, 1), ("b", 88, 0), ("c", 30, -1)):
        scheduler.add(pair_request(name, num_tokens, Leg.RECEIVE, priority))
    assert granted(scheduler) == ["c"]
    scheduler.abort("b")
    assert granted(scheduler) == ["a"]


def test_prompt_of_its_turn_passes_an_offered_one_that_lacks_pages() -> None:
    scheduler = new_scheduler(num_pages=26)
    scheduler.add(new_request("running", [1] * 60))
    ModelFreeReplica(scheduler).step()
    scheduler.add(pair_request("a", 60, Leg.RECEIVE))
    scheduler.add(new_request("after", [3] * 12))
    assert granted(scheduler) == []
    assert scheduler.table.kept_back == set()
    computed = [part.request.id for part in ModelFreeReplica(scheduler).step().batch.scheduled]
    assert computed == ["after", "running"]


def test_preempted_stream_that_lacks_pages_is_passed_by_none_of_its_turn() -> None:
    """Its client waits for the next token, others for their first."""
    scheduler = new_scheduler(num_pages=26)
    scheduler.add(new_request("running", [1] * 60))
    replica = ModelFreeReplica(scheduler)
    replica.step()
    scheduler.add(stream := new_request("stream", [2] * 24))
    replica.step()
    scheduler.table.preempt(stream)
    stream.token_ids += [2] * 36  # its pages are more than are free
    scheduler.add(pair_request("a", 12, Leg.RECEIVE))
    scheduler.handoff.offer("a")
    scheduler.add(new_request("after", [3] * 12))
    assert granted(scheduler) == []
    assert scheduler.table.kept_back == {"a", "after"}
    assert [part.request.id for part in replica.step().batch.scheduled] == ["running"]


def test_pages_are_granted_first_where_the_second_token_is_due_first() -> None:
    """The other replica takes longer for a long prompt, so that a short one which comes later needs its pages first."""
    scheduler = new_timed_replica(num_pages=31, max_model_len=120).scheduler
    for name, num_tokens in (("long", 100), ("short", 20)):
        scheduler.add(pair_request(name, num_tokens, Leg.RECEIVE))
        scheduler.handoff.offer(name)
    assert granted(scheduler) == ["short"]


def test_grants_leave_a_page_for_each_next_token() -> None:
    """Prompts that fill their pages need one more page on arrival, and none may be preempted for that."""
    scheduler = new_scheduler(num_pages=7, max_model_len=20)
    for name in "abc":
        scheduler.add(pair_request(name, 8, Leg.RECEIVE))
    assert granted(scheduler) == ["a", "b"], "c's two pages would leave one for two arrivals"
    for name in "ab":
        scheduler.handoff.start_decoding(name, 5, 0.0)
    ModelFreeReplica(scheduler).step()
    assert scheduler.table.num_preemptions == 0


def test_grants_wait_for_places() -> None:
    scheduler = new_scheduler(max_num_seqs=1)
    scheduler.add(pair_request("a", 6, Leg.RECEIVE))
    scheduler.add(pair_request("b", 6, Leg.RECEIVE))
    assert granted(scheduler) == ["a"]
    scheduler.add(new_request("local", [1, 2, 3]))
    assert not scheduler.schedule(0.0)


def test_request_with_output_of_a_lost_replica_continues_it() -> None:
    prompt = [9] * 30
    expected = reference_output(prompt, SamplingParams(max_tokens=10, ignore_eos=True), 100)
    replica, deltas = ModelFreeReplica(new_scheduler()), []
    replica.add("a", prompt, max_tokens=10, output_token_ids=expected[:4])
    while replica.scheduler.table.has_work:
        deltas += replica.step().deltas
    assert [token for delta in deltas for token in delta.token_ids] == expected[4:]
    assert deltas[0].first == 4


def test_step_ends_when_a_stream_from_another_replica_may_arrive() -> None:
    """Another replica computes the prompt of the stream; meanwhile this one computes a prompt of its own."""
    replica = new_timed_replica(LONG_STEPS)
    scheduler = replica.scheduler
    for name in ("long", "second", "third"):
        replica.add(name, 3000)
    idle = replica.step().seconds
    arriving = pair_request("a", 60, Leg.RECEIVE)
    scheduler.add(arriving)
    for committed in (0, 32, 56):
        if committed:
            scheduler.handoff.commit("a", committed)
        left = LONG_STEPS.prefill_seconds(committed, 60, 256) + CLASSES[1].tpot_s
        scheduler.handoff.grant(replica.now)
        step = replica.step()
        assert arriving.num_computed_tokens == committed
        assert left / 2 < step.seconds <= left < idle
        assert "slack" in step.batch.limit
    assert sum(chunk_sizes(replica.batches, "long")) > 0
