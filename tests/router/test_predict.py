"""Predicted times are those of the replicas' own schedulers."""

import random
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from crossdock.router.fleet import Fleet
from crossdock.router.query import Query
from crossdock.workers.report.live_profile import LENGTHS, Prompts
from crossdock.workers.report.publisher import Publisher
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.policies.chunk_policies import POLICIES, Meaning
from crossdock.workers.schedule.policies.chunking import LEAST_SHARE
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES
from crossdock.workers.schedule.request.submission import Adapter, Leg, Overloaded, SamplingParams, Submission
from crossdock.workers.schedule.scheduler import Scheduler
from tests.router.replicas import CLASSES, COST, LONG_STEPS, Replica, changed, fleet_of, live, place, profile, query
from tests.workers.schedule.model_free_replica import ModelFreeReplica

BENT = (  # a GPU that launches a chunk's kernels for 20 ms; a CPU whose first rows cost more than others
    replace(COST, breakpoint_rows=256, per_early_row=-1e-4, least_with_chunk=20e-3),
    replace(COST, breakpoint_rows=8, per_early_row=1e-3),
)


def late_by(take: Callable[[], object]) -> float:
    """Return the seconds by which a request is refused as late; 0: it is taken."""
    try:
        take()
    except Overloaded as refusal:
        return refusal.retry_after
    return 0.0


def predicted_ttft(fleet: Fleet, request: Query, now: float = 0.0) -> float:
    return fleet.choose(request, now).predicted_ttft


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_ttft_behind_a_backlog_is_the_schedulers_own_prediction(rng: random.Random) -> None:
    """A live profile has prompts by class and length only. Where a group has both shorter and longer prompts than the
    new one, the router takes all of them to go before it, or none."""
    policy = rng.choice(["adaptive", "fixed"])
    depth = rng.choice([1, 1, 2, 4])
    pipeline = {"pipeline_parallel_size": depth, "interval_share": rng.choice([1 / depth, 1.0])}
    cost = rng.choice([COST, *BENT, profile(30.0).cost])
    replica = Replica(profile(cost=cost, chunk_policy=policy, admission="queue", **pipeline))
    for number in range(rng.randrange(8)):
        prompt = [number, *range(rng.choice([10, 100, 1000, 4000]))]
        leg = rng.choice([Leg.LOCAL, Leg.LOCAL, Leg.RECEIVE])
        replica.add(f"{number}", prompt, rng.choice(CLASSES), max_tokens=50, leg=leg)
        for _ in range(rng.choice([0, 1, 2, 3, 30])):  # after 30, streams are ahead, and lend
            replica.step()
    fleet = fleet_of({"a": replica.profile})
    replica.report(fleet, "a", 0.0)
    prompt = [99, *range(rng.choice([10, 100, 1000, 4000]))]
    request = Request(Submission("new", prompt, SamplingParams(max_tokens=50), slo_class=rng.choice(CLASSES)))
    request.priority = CLASSES.index(request.slo_class)
    exact = replica.scheduler.forecast.ttft(request)
    found = predicted_ttft(fleet, Query("new", len(prompt), slo_class=request.slo_class, max_tokens=50))
    own = replica.scheduler.forecast.prefill_seconds(request)
    groups = dict[int, list[float]]()
    for other in replica.scheduler.table.prefills():
        if other.priority == request.priority:
            seconds = replica.scheduler.forecast.prefill_seconds(other)
            groups.setdefault(bisect(LENGTHS, seconds), []).append(seconds)
    slack = sum(sum(group) for group in groups.values() if min(group) <= own < max(group))
    assert found == pytest.approx(exact.ttft, abs=slack / 0.05 + 1e-9)


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_router_refuses_the_prompts_that_the_replica_refuses(rng: random.Random) -> None:
    """All come before the first one's step ends, and count whole. Where promises are short, a prompt may take twice its
    time alone, which the second of two equal prompts does, to the last digit."""
    due = rng.choice([1e-9, 0.2, 2.0])
    depth = rng.choice([1, 1, 2, 4])
    replica = Replica(
        profile(
            cost=rng.choice([COST, *BENT, profile(30.0).cost]).slowed(rng.uniform(1, 3)),
            chunk_policy=rng.choice(["adaptive", "fixed"]),
            admission="reject",
            pipeline_parallel_size=depth,
            interval_share=rng.choice([1 / depth, 1.0]),
            runs_ahead=rng.random() < 0.3,
            slo_classes=[slo.model_copy(update={"ttft_s": slo.ttft_s * due}) for slo in DEFAULT_CLASSES],
        )
    )
    fleet = fleet_of({"a": replica.profile})
    for number in range(rng.choice([0, 0, 2])):
        replica.add(f"stream {number}", [number] * 10, rng.choice(CLASSES), max_tokens=50, may_refuse=False)
        replica.step_until_token(f"stream {number}")
    replica.report(fleet, "a", 0.0)
    between = rng.choice([0.0, 1e-5])  # seconds: all of them less than a step takes
    lengths = rng.choice([(20,), (4000,), (10, 100, 1000, 4000)])
    for number in range(8):
        if not between and rng.random() < 0.1:
            replica.report(fleet, "a", 0.0)
            for placed in range(number):
                fleet.taken(f"{placed}", "a", replica.publisher.sequence - 1)
        prompt, slo_class = [number] * rng.choice(lengths), rng.choice(CLASSES)
        asked = query(f"{number}", prompt=prompt, slo_class=slo_class)
        late = late_by(partial(place, fleet, asked, between * number))
        assert late == pytest.approx(
            late_by(partial(replica.add, asked.request_id, prompt, slo_class)), rel=1e-9, abs=0
        )


@pytest.mark.parametrize("waiting", [(4000, 4000, 4000), (300, 4000, 4000), (300, 300)])
def test_prompt_behind_others_has_its_token_after_the_shorter_ones_alone(waiting: Sequence[int]) -> None:
    replica = Replica(profile(cost=LONG_STEPS))
    fleet = fleet_of({"a": replica.profile})
    for number, num_tokens in enumerate(waiting):
        replica.add(f"{number}", [number] * num_tokens)
    replica.report(fleet, "a", 0.0)
    predicted = predicted_ttft(fleet, query("new", 1000))
    replica.add("new", [9] * 1000)
    replica.step_until_token("new")
    assert predicted == pytest.approx(
        replica.now, abs=LONG_STEPS.chunk_step_seconds(0, 512)
    )  # others fill its last step


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_placement_on_an_only_replica_is_as_among_several_of_which_it_alone_may_be_chosen(rng: random.Random) -> None:
    """Floats of one replica and arrays of several give the same figures, to the last digit."""
    depth, slowness = rng.choice([1, 1, 2]), rng.choice([1.0, 30.0])
    cost = rng.choice([COST, *BENT]).slowed(slowness)
    fields = {"cost": cost, "chunk_policy": rng.choice(["adaptive", "fixed"]), "max_num_seqs": rng.choice([4, 64])}
    replica = Replica(profile(pipeline_parallel_size=depth, interval_share=rng.choice([1 / depth, 1.0]), **fields))
    only, several = (fleet_of(dict.fromkeys(names, replica.profile)) for names in ("a", "ab"))
    prompts = [[first, *range(3, rng.choice([10, 100, 1000, 4000]))] for first in range(4)]
    now, booked = 0.0, dict[str, list[int]]()
    for number in range(rng.randrange(1, 14)):
        now += rng.choice([0.0, 0.001, 0.05, 1.0])
        prompt, slo_class = rng.choice(prompts), rng.choice(CLASSES)
        asked = query(f"{number}", prompt=prompt, slo_class=slo_class, may_refuse=rng.random() < 0.5, may_ship=False)
        several.hear("b", live(number + 2), now)
        found, expected = [], []
        for fleet, exclude, placements in ((only, (), found), (several, {"b"}, expected)):
            try:
                placements.append(fleet.choose(asked, now, exclude))
            except Overloaded:
                continue
            fleet.book(asked, placements[0])
        assert found == expected
        booked |= {asked.request_id: prompt} if found else {}
        if booked and rng.random() < 0.6:
            name = rng.choice([*booked])
            sequence = replica.add(name, booked.pop(name), max_tokens=30, may_refuse=False)
            for fleet in (only, several):
                fleet.taken(name, "a", sequence)
        for _ in range(rng.randrange(4)):
            ready = replica.step()
            for fleet, name in ((fleet, name) for fleet in (only, several) for name in ready):
                fleet.first_token(name)
        if rng.random() < 0.6:
            message, changes = replica.publisher.live(replica.now), list(replica.publisher.page_changes())
            for fleet in (only, several):
                fleet.hear("a", message, now)
                for each in changes:
                    fleet.hear_pages("a", each)


@pytest.mark.parametrize("cost", [COST, *BENT])
@pytest.mark.parametrize(("cached", "num_tokens"), [(0, 1), (0, 500), (0, 3000), (480, 500), (2992, 3000)])
@pytest.mark.parametrize("max_tokens", [128, 512])
def test_ttft_on_an_idle_replica_is_what_the_scheduler_takes(
    max_tokens: int, cached: int, num_tokens: int, cost: StepCost
) -> None:
    """Steps of 128 tokens are full; those of 512 end before, at the knee of throughput.

    There chunks end on page boundaries, and so one launch more or less may be needed.
    """
    launch = cost.least_with_chunk if max_tokens == 512 else 0.0
    replica = Replica(profile(cost=cost, max_num_batched_tokens=max_tokens))
    fleet = fleet_of({"a": replica.profile})
    prompt = [3 + number % 50 for number in range(num_tokens)]
    if cached:
        replica.add("before", prompt[:cached], max_tokens=1)
        replica.step_until_token("before")
        replica.report(fleet, "a", 0.0)
    found = fleet.choose(query("new", prompt=prompt), 0.0)
    assert found.cached_tokens == cached
    started = replica.now
    replica.add("new", prompt)
    replica.step_until_token("new")
    assert found.predicted_ttft == pytest.approx(replica.now - started, rel=0.02, abs=launch)


@pytest.mark.parametrize(
    "settings", [{"max_prefill_tokens": 64}, {"idle_step_share": 0.015}, {"chunk_policy": "fixed"}]
)
def test_ttft_follows_the_settings_that_bound_steps(settings: dict[str, Any]) -> None:
    replica = Replica(profile(**settings))
    new = query("new", 3000, slo_class="interactive")
    predicted = predicted_ttft(fleet_of({"a": replica.profile}), new)
    replica.add("new", list(range(3000)), "interactive")
    replica.step_until_token("new")
    assert predicted == pytest.approx(replica.now, rel=0.02)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_prompt_whose_tokens_seem_to_cost_nothing_has_a_prediction(num_replicas: int) -> None:
    """So a noisy machine may fit its steps: all of their seconds are the fixed part, which no promise has room for."""
    slow = profile(cost=StepCost(base=5.0, per_prefill_token=0.0))
    predicted = predicted_ttft(fleet_of({f"{number}": slow for number in range(num_replicas)}), query("new", 300))
    assert 5.0 <= predicted < float("inf")


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_short_prompt_has_its_token_when_the_step_ends_that_long_prompts_fill(runs_ahead: bool) -> None:
    """Its own chunk takes 5 ms, and the step 20."""
    replica = Replica(profile(runs_ahead=runs_ahead))
    fleet = fleet_of({"a": replica.profile})
    for number in range(3):
        replica.add(f"long {number}", [60 + number, *range(5000)])
    replica.step()
    reported_at = replica.now
    fleet.hear("a", replica.publisher.live(reported_at, step_seconds=reported_at), 0.0)
    predicted = predicted_ttft(fleet, query("short", 30))
    for _ in range(1 + runs_ahead):  # steps that had been scheduled when the prompt came
        replica.step()
    replica.add("short", list(range(30)))
    replica.step_until_token("short")
    assert predicted == pytest.approx(replica.now - reported_at, rel=0.12)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("num_streams", [0, 4])
def test_short_prompt_that_comes_at_once_with_long_ones_has_its_token_when_their_step_ends(
    num_streams: int, runs_ahead: bool
) -> None:
    """The replica has decoded for a while, or has done nothing. A prompt that comes first begins alone there."""
    replica = Replica(profile(runs_ahead=runs_ahead))
    fleet = fleet_of({"a": replica.profile})
    for number in range(num_streams):
        replica.add(f"{number}", [number + 3] * 40, max_tokens=50)
        replica.step_until_token(f"{number}")
    replica.report(fleet, "a", replica.now)
    for _ in range(5 if num_streams else 0):
        replica.step()
    now = replica.now + 1e-4
    for number in range(2):
        place(fleet, query(f"long {number}", 600), now)
    place(fleet, query("tiny", 10), now)
    predicted = predicted_ttft(fleet, query("short", 30), now)
    if not num_streams:
        replica.engine.now = now
        replica.add("long 0", [60, *range(599)])
    for _ in range(1 + runs_ahead):  # the step that runs, and the one that is scheduled
        replica.step()
    if num_streams:
        replica.add("long 0", [60, *range(599)])
    replica.add("long 1", [61, *range(599)])
    replica.add("tiny", [62] * 10)
    replica.add("short", [63] * 30)
    replica.step_until_token("short")
    assert predicted == pytest.approx(replica.now - now, rel=0.2)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_prompt_that_comes_while_a_booked_one_is_computed_waits_for_that_step_alone(runs_ahead: bool) -> None:
    """No report includes the long prompt. Its step has begun, so it neither goes behind a shorter one nor fills the
    step of that one. A replica that runs ahead has scheduled a step of streams behind it."""
    replica = Replica(profile(runs_ahead=runs_ahead))
    fleet = fleet_of({"a": replica.profile})
    for number in range(4):
        replica.add(f"{number}", [number + 3] * 40, max_tokens=50)
        replica.step_until_token(f"{number}")
    replica.report(fleet, "a", replica.now)
    place(fleet, query("long", 300), replica.now + 1e-4)
    for _ in range(1 + runs_ahead):  # the step that runs, and the one that is scheduled
        replica.step()
    replica.add("long", [60] * 300)
    began = replica.now
    replica.step()
    now = (began + replica.now) / 2
    predicted = predicted_ttft(fleet, query("short", 30), now)
    for _ in range(runs_ahead):
        replica.step()
    replica.add("short", [63] * 30)
    replica.step_until_token("short")
    assert predicted == pytest.approx(replica.now - now, rel=0.05)


def test_steps_with_adapters_take_what_the_replica_says() -> None:
    """Streams with two adapters and without one: of the present, of an in-flight load, and a prompt alone."""
    cost = replace(LONG_STEPS, per_adapter=5e-9, per_adapted=1e-9)
    replica, adapters = Replica(profile(cost=cost), max_loras=4), [Adapter(name, "", name, 10**6) for name in "abc"]
    fleet = fleet_of({"a": replica.profile})
    for number, adapter in enumerate([None, *adapters[:2], adapters[0]]):
        replica.add(f"{number}", [number + 3] * 40, max_tokens=50, adapter=adapter)
    replica.step_until_token("3")
    replica.report(fleet, "a", 0.0)
    fleet.table.refresh(0.0)
    batch = replica.scheduler.schedule(replica.now)
    assert batch.work[-2:] == (2e6, 3e6)
    newest = batch.work._replace(context=batch.work.context + 4)  # the router counts the newest token of each stream
    assert fleet.table.loads.now.gap[0] == pytest.approx(cost.seconds(newest))
    new = structs.replace(query("new", 80), adapter="c", adapter_weights=10**6)
    alone = fleet_of({"a": replica.profile}).choose(new, 0.0)
    assert alone.prefill_seconds == pytest.approx(cost.chunk_seconds(0, 80, 10**6) + cost.base)
    gaps, more = [float(fleet.table.loads.future.gap[0])], cost.per_decode + 80 * cost.per_context
    for name in ("new", "again"):
        place(fleet, structs.replace(new, request_id=name))
        fleet.table.refresh(0.0)
        gaps.append(float(fleet.table.loads.future.gap[0]))
    assert gaps[1] - gaps[0] == pytest.approx(more + 5e-3 + 1e-3)
    assert gaps[2] - gaps[1] == pytest.approx(more + 1e-3), "the matrices of an adapter are read once"


def test_report_of_another_cost_changes_the_pace_of_the_same_streams() -> None:
    fleet, gaps = fleet_of({"a": profile()}), list[float]()
    for sequence, slowness in enumerate((1, 3, 3), start=2):
        cost = tuple([slowness * each for each in COST.coefficients])
        fleet.hear("a", live(sequence, streams=(0, 4, 0), context_tokens=400, cost=cost), 0.0)
        fleet.table.refresh(0.0)
        gaps.append(float(fleet.table.loads.now.gap[0]))
    assert gaps == pytest.approx([COST.decode_step_seconds(4, 400) * slowness for slowness in (1, 3, 3)])


def test_ttft_behind_a_booked_prompt_falls_while_that_is_computed() -> None:
    fleet = fleet_of({"a": profile()})
    alone = predicted_ttft(fleet, query("alone", 5000))
    placement = place(fleet, query("first", 5000))
    half = placement.prefill_seconds / 2
    left = [predicted_ttft(fleet, query("new", 5000), now) - alone for now in (0.0, half, 3 * half)]
    step = COST.chunk_step_seconds(0, 512)
    assert left[0] == pytest.approx(2 * half, rel=0.01)
    assert half - 1e-9 <= left[1] <= half + step
    assert 0 <= left[2] <= step


def test_ttft_beside_streams_alone_waits_for_no_chunk() -> None:
    """The last step had a chunk and took 0.1 s; those that follow only decode."""
    fleet = fleet_of({"a": profile()})
    beside = live(2, streams=(0, 4, 0), context_tokens=400)
    fleet.hear("a", beside, 0.0)
    before = predicted_ttft(fleet, query("new"))
    fleet.hear("a", changed(beside, sequence=3, step_seconds=0.1), 0.0)
    after = predicted_ttft(fleet, query("new"))
    assert after - before == pytest.approx(COST.decode_step_seconds(4, 400) / 2)


def test_prompt_joins_the_step_after_the_next_one_of_a_replica_that_runs_ahead() -> None:
    """The running step has a chunk of 20 ms, those that follow only decode."""
    fleet = fleet_of({"a": profile(runs_ahead=True)})
    step, running = COST.decode_step_seconds(4, 400), 0.02
    beside = live(2, streams=(0, 4, 0), context_tokens=400, step_seconds=step, in_flight_seconds=running)
    fleet.hear("a", beside, 100.0)
    ages = 0.0, 0.01, running + 1.5 * step  # in the running step, and in the one behind it
    first, later, behind = (predicted_ttft(fleet, query("new"), 100.0 + age) for age in ages)
    assert first - later == pytest.approx(0.01)
    assert later - behind == pytest.approx((running + 2 * step - 0.01) - 1.5 * step)
    fleet.table.refresh(100.01)
    turn_left = fleet.table.loads.turn_left(fleet.table.ages(100.01))
    assert turn_left[0] == pytest.approx(running + step - 0.01), "messages wait for the running step"


def test_prompts_that_were_on_their_way_at_a_report_are_in_the_step_before() -> None:
    joins, found = list[float](), list[float]()
    for booked_at in (99.99, 100.001):
        fleet = fleet_of({"a": profile(runs_ahead=True)}, 99.9)
        place(fleet, query("before", 200), booked_at)
        beside = live(2, streams=(0, 4, 0), context_tokens=400, step_seconds=0.03, in_flight_seconds=0.02)
        fleet.hear("a", beside, 100.0)
        found.append(predicted_ttft(fleet, query("new", 20), 100.002))
        joins.append(float(fleet.table.loads.step_left(fleet.table.ages(100.002))[0]))
    assert joins[0] - joins[1] > 0.01, "the other one is in the step that the new one joins"
    assert found[0] == pytest.approx(found[1], rel=0.05), "which ends when both are computed"


def test_silence_of_a_replica_with_a_booked_prompt_is_no_wait() -> None:
    fleet = fleet_of({"a": profile(runs_ahead=True)}, 1000.0)
    place(fleet, query("before"), 1000.0)
    assert predicted_ttft(fleet, query("new"), 1010.0) < 0.1


def test_ttft_grows_by_the_recent_share_of_more_urgent_prompts() -> None:
    fleet = fleet_of({"a": profile()})
    alone = predicted_ttft(fleet, query("new", 1000))
    fleet.hear("a", live(2, prompt_shares=(0.5, 0.3, 0.0)), 0.0)
    assert predicted_ttft(fleet, query("new", 1000, slo_class="interactive")) == pytest.approx(alone)
    assert predicted_ttft(fleet, query("new", 1000)) == pytest.approx(alone / 0.5)
    assert predicted_ttft(fleet, query("new", 1000, slo_class="batch")) == pytest.approx(alone / 0.2)


def test_ttft_of_a_longer_prompt_follows_the_recent_stream_share_more() -> None:
    """No stream runs now; recently, streams took half of the time."""
    fleet = fleet_of({"a": profile()})
    sequence = 1

    def slower(num_tokens: int, now: float) -> float:
        nonlocal sequence
        sequence += 2
        fleet.hear("a", live(sequence), now)
        alone = predicted_ttft(fleet, query("new", num_tokens), now)
        fleet.hear("a", live(sequence + 1, stream_share=0.5), now)
        return predicted_ttft(fleet, query("new", num_tokens), now) / alone

    assert 1 < slower(32, 0.0) < 1.2
    assert 1.5 < slower(5000, 0.0) < 2


def test_recent_stream_share_fades_while_nothing_new_is_reported() -> None:
    fleet = fleet_of({"a": profile()})
    alone = predicted_ttft(fleet, query("new", 5000))
    fleet.hear("a", live(2, stream_share=0.5), 0.0)
    later = []
    for now in (0.0, 5.0, 50.0):
        fleet.hear("a", live(2, stream_share=0.5), now)  # it is alive, and reports nothing new
        later.append(predicted_ttft(fleet, query("new", 5000), now) / alone)
    assert later == sorted(later, reverse=True)
    assert later[-1] == pytest.approx(1, abs=0.01)


def test_streams_whose_prompts_are_computed_elsewhere_count_as_running() -> None:
    fleet = fleet_of({"a": profile()})
    request = query("new", 2000)
    alone = predicted_ttft(fleet, request)
    fleet.hear("a", live(2, arriving=(4, 0, 0)), 0.0)
    expecting = predicted_ttft(fleet, request)
    fleet.hear("a", live(3, streams=(4, 0, 0)), 0.0)
    assert alone < expecting == pytest.approx(predicted_ttft(fleet, request))


def test_ttft_without_a_free_place_waits_for_a_stream_to_end() -> None:
    fleet = fleet_of({"a": profile(max_num_seqs=4)})
    alone = predicted_ttft(fleet, query("new"))
    full = live(2, streams=(0, 4, 0), context_tokens=400, ends=tuple((tokens, 7) for tokens in (40, 80, 120, 160)))
    fleet.hear("a", full, 0.0)
    beside = predicted_ttft(fleet, query("new"))
    step = COST.decode_step_seconds(4, 400)
    fleet.hear("a", changed(full, sequence=4, slots=(0, 0, 0)), 0.0)
    waits = predicted_ttft(fleet, query("new")) - beside
    assert beside > alone
    assert waits == pytest.approx(40 * step)
    fleet.hear("a", changed(full, sequence=5, slots=(0, 0, 0), free_pages=(-100, -100, -100)), 0.0)
    assert predicted_ttft(fleet, query("new")) - beside > waits  # and for the pages of several of them


def test_page_that_is_missing_waits_for_the_end_of_a_whole_stream() -> None:
    fleet = fleet_of({"a": profile()})
    full = live(2, streams=(0, 1, 0), context_tokens=4000, ends=((100, 250),))
    found = []
    for sequence, free in enumerate((4000, 6, 1, -300), start=2):  # of which the prompt needs 8, a stream has 250
        fleet.hear("a", changed(full, sequence=sequence, free_pages=(free,) * 3), 0.0)
        found.append(predicted_ttft(fleet, query("new")))
    step = COST.decode_step_seconds(1, 4000)
    assert [each - found[0] for each in found[1:]] == pytest.approx([100 * step, 100 * step, 200 * step], abs=step)


def test_short_prompt_passes_waiting_ones_that_lack_pages() -> None:
    fleet = fleet_of({"a": profile()})
    full = live(2, streams=(0, 1, 0), context_tokens=4000, ends=((100, 250),))
    waits = changed(full, free_pages=(-300,) * 3, pages_now=(50,) * 3)
    short, long = [], []
    for sequence, report in enumerate((full, waits), start=2):
        fleet.hear("a", changed(report, sequence=sequence), 0.0)
        short.append(predicted_ttft(fleet, query("short", 100)))
        long.append(predicted_ttft(fleet, query("long", 1000)))
    assert short[0] == short[1]
    assert long[0] < long[1]


def test_prompt_that_needs_more_pages_than_waiting_ones_leave_waits_for_their_ends_too() -> None:
    fleet = fleet_of({"a": profile()})
    full = live(2, streams=(0, 1, 0), context_tokens=4000, ends=((100, 250),))
    lacking = ((175, 0.15, 50), (175, 0.15, 50))  # pages, seconds, tokens of output
    waits = changed(full, sequence=3, free_pages=(-300,) * 3, pages_now=(50,) * 3, lacking=lacking)
    prompts = [query("new", num_tokens) for num_tokens in (1000, 2400)]  # of 63 and 150 pages
    found = []
    for report in (full, waits):
        fleet.hear("a", report, 0.0)
        found.append([predicted_ttft(fleet, each) for each in prompts])
    (short, long), (short_waits, long_waits) = found
    step = COST.decode_step_seconds(1, 4000)
    assert short_waits - short == pytest.approx(100 * step, abs=step), "one starts, and leaves 125 pages"
    assert long_waits - long == pytest.approx(0.3 + 200 * step, abs=3 * step), (
        "the other one starts when that has ended"
    )


@pytest.mark.parametrize("num_tokens", [500, 900])
def test_prompt_gets_pages_before_longer_ones_that_wait_and_after_shorter_ones(num_tokens: int) -> None:
    """A stream of 1,000 tokens frees pages for the prompt, or for the one of 800 that waits for pages: not for both."""
    replica = Replica(profile(num_pages=80, max_model_len=1200))
    fleet = fleet_of({"a": replica.profile})
    replica.add("stream", [1] * 1000, max_tokens=40)
    replica.step_until_token("stream")
    replica.add("waits", [2] * 800, max_tokens=40)
    replica.report(fleet, "a", replica.now)
    asked = query("new", num_tokens, max_tokens=40)
    predicted, began = predicted_ttft(fleet, asked, replica.now), replica.now
    replica.add("new", [3] * num_tokens, max_tokens=40)
    replica.step_until_token("new")
    assert predicted == pytest.approx(replica.now - began, rel=0.15)


def test_pages_that_a_prompt_takes_from_one_that_waits_count_as_that_ones_delay() -> None:
    fleet = fleet_of({"a": profile(), "b": profile()})
    pages = {"free_pages": (-170,) * 3, "pages_now": (50,) * 3}
    full = live(2, streams=(0, 1, 0), context_tokens=4000, ends=((100, 250), (200, 40)), **pages)
    fleet.hear("b", live(2, streams=(0, 1, 0), context_tokens=6000), 0.0)
    fleet.hear("a", changed(full, lacking=((290, 0.15, 50),)), 0.0)  # pages, seconds, tokens of output
    chosen = fleet.choose(query("new", 500), 0.0)  # 40 pages, of 300 that are free after 100 tokens
    sooner = fleet.choose(query("new", 500), 0.0, exclude=["b"])
    assert sooner.predicted_ttft < chosen.predicted_ttft, "it has room there now"
    assert chosen.decode == "b", "at the other replica, one that waits would wait for 100 tokens more"


def test_prompt_without_room_waits_at_least_as_long_as_those_have_that_need_no_more() -> None:
    fleet = fleet_of({"a": profile()})
    full = live(2, streams=(0, 1, 0), context_tokens=4000, ends=((1, 250),), free_pages=(-300,) * 3, pages_now=(0,) * 3)
    short, long = (query("new", num_tokens) for num_tokens in (1000, 2400))  # of 71 and 158 pages
    fleet.hear("a", changed(full, lacking=((100, 0.15, 50, 3), (200, 0.15, 50, 6))), 0.0)
    assert predicted_ttft(fleet, short) < 3 < predicted_ttft(fleet, long) < 6
    fleet.hear("a", changed(full, sequence=3, lacking=((100, 0.15, 50, 12), (200, 0.15, 50, 15))), 0.0)
    assert predicted_ttft(fleet, short) < 3
    with pytest.raises(Overloaded):  # its class promises 10 s
        fleet.choose(long, 0.0)


def test_pages_that_a_waiting_prompt_has_taken_since_the_report_are_not_free() -> None:
    fleet = fleet_of({"a": profile()})
    lacking = ((270, 0.15, 50),)  # pages, seconds, tokens of output
    full = live(2, streams=(0, 1, 0), context_tokens=4000, ends=((10, 250),), lacking=lacking)
    fleet.hear("a", changed(full, free_pages=(-220,) * 3, pages_now=(50,) * 3), 0.0)
    ends = 10 * COST.decode_step_seconds(1, 4000)
    waits = [fleet.choose(query("new", 500), now).predicted_ttft for now in (0.5 * ends, 1.5 * ends)]  # 40 pages
    assert waits[0] < 0.1 < 0.15 < waits[1], "then that prompt has all but 30 pages, and is computed and answered first"


def test_prompts_that_hold_all_pages_are_computed_and_answered_first() -> None:
    fleet = fleet_of({"a": profile()})
    prompts = (Prompts(1, 2, 1, 1000, 0.1),)
    found = []
    for sequence, free in ((2, 4000), (3, 0)):
        report = live(sequence, prompts=prompts, started_seconds=0.1, ends=((128, 63),))
        fleet.hear("a", changed(report, free_pages=(free,) * 3), 0.0)
        found.append(predicted_ttft(fleet, query("new")))
    assert found[1] - found[0] > 100 * COST.decode_step_seconds(1, 1000)


def test_gap_beside_streams_with_drafts_is_their_share_of_it() -> None:
    fleet = fleet_of({"a": profile()})
    streams = live(2, streams=(0, 4, 0), context_tokens=400)
    fleet.hear("a", streams, 0.0)
    without = fleet.choose(query("new"), 0.0).predicted_gap
    fleet.hear("a", changed(streams, sequence=3, gap_share=0.5), 0.0)
    assert fleet.choose(query("new"), 0.0).predicted_gap == pytest.approx(without / 2)


def test_reported_backlog_shrinks_while_the_replica_is_silent() -> None:
    fleet = fleet_of({"a": profile(cost=LONG_STEPS)})
    fleet.hear("a", live(2, prompts=(Prompts(1, 4, 1, 20_000, 3.0),)), 0.0)
    request = query("new", 5000)
    own = LONG_STEPS.prefill_seconds(0, 5000, 512)
    found = [predicted_ttft(fleet, request, now) for now in (0.0, 2.0, 2.75, 2.9)]
    assert found == pytest.approx([own, own, own + 0.25, own + 0.1])  # the shorter rest goes first
    place(fleet, request, 2.9)  # the replica has not begun this one
    assert predicted_ttft(fleet, query("other", 5000), 2.9) == pytest.approx(2 * own + 0.1)


def test_prompt_on_fixed_chunks_delays_streams_and_on_adaptive_ones_waits() -> None:
    found = {}
    for policy in ("adaptive", "fixed"):
        fleet = fleet_of({"a": profile(4.0, chunk_policy=policy)})
        fleet.hear("a", live(2, streams=(8, 0, 0), context_tokens=8000), 0.0)
        found[policy] = fleet.choose(query("new", 4000, slo_class="standard"), 0.0)
    assert found["fixed"].late > 0  # 512 tokens take 0.2 s here, four times the TPOT of interactive streams
    assert found["adaptive"].late == 0
    assert found["adaptive"].predicted_ttft > found["fixed"].predicted_ttft


@pytest.mark.parametrize("policy", ["adaptive", "fixed", "added", "of a newer version"])
def test_share_of_prompts_is_the_schedulers_own_for_every_chunk_policy(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a policy that is only an entry of the table, and for one of which only the name is known."""
    added = Meaning(fits_streams=False, share=lambda cost, beside: 0.3 if beside.is_urgent else 0.2)
    monkeypatch.setitem(POLICIES, "added", added)  # type: ignore[misc]
    static = profile(admission="queue").model_copy(update={"chunk_policy": policy})
    idle = Replica(profile(admission="queue")).scheduler
    config = idle.config.model_copy(update={"chunk_policy": policy})
    scheduler = Scheduler(config, idle.pages, static.max_model_len, cost=static.cost)
    replica = ModelFreeReplica(scheduler, static.cost.seconds, sample=lambda tokens: 7)
    for number in range(12):
        replica.add(f"{number}", [number, *range(400)], "standard", 200, Leg.LOCAL)
    while not all(request.is_decoding for request in scheduler.table.running) or scheduler.table.waiting:
        replica.step()
    fleet = fleet_of({"a": static})
    fleet.hear("a", Publisher(scheduler, "first", sequence=9).live(replica.now), 0.0)
    fleet.table.refresh(0.0)
    shares = [max(scheduler.forecast.prefill_share(priority), LEAST_SHARE) for priority in range(len(CLASSES))]
    assert fleet.table.loads.shares.now[:, 0] == pytest.approx(shares)
    if policy == "added":
        assert shares == [0.3, 0.3, 0.2]
