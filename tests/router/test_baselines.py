"""Policies of other routers choose as those routers do."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.baselines import (
    POLICIES,
    PolicyView,
    block_cost,
    least_requests,
    pinned,
    power_of_two,
    prefix_affinity,
    remaining_work,
    round_robin,
)
from crossdock.workers.report.live_profile import Prompts
from tests.router.replicas import Replica, fleet_of, live, place, profile, query


def view(requests: list[float], cached: list[float] | None = None, **fields: object) -> PolicyView:
    zeros = [0.0] * len(requests)
    defaults = {"waiting": zeros, "context": zeros, "page_size": [16.0] * len(requests)}
    arrays = {name: np.array(fields.get(name, default)) for name, default in defaults.items()}
    rest = {"num_tokens": 160, "seed": 12345, "number": 0} | {k: v for k, v in fields.items() if k not in defaults}
    return PolicyView(np.array(requests, dtype=float), np.array(cached or zeros), **arrays, **rest)  # type: ignore[arg-type]


def test_round_robin_takes_replicas_in_turn() -> None:
    assert [round_robin(view([0, 0, 0], number=number)) for number in range(5)] == [0, 1, 2, 0, 1]


def test_least_requests_with_ties_spreads_them_by_seed() -> None:
    assert least_requests(view([3, 1, 2])) == 1
    assert {least_requests(view([1, 3, 1], seed=seed)) for seed in range(10)} == {0, 2}


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 2**32 - 1))
def test_power_of_two_never_takes_the_single_busiest_replica(requests: list[int], seed: int) -> None:
    chosen = power_of_two(view([float(count) for count in requests], seed=seed))
    if len(requests) > 1:
        assert any(requests[chosen] <= other for at, other in enumerate(requests) if at != chosen)


def test_power_of_two_over_many_seeds_tries_every_pair_equally_often() -> None:
    loads = [0.0, 1.0, 2.0, 3.0]
    chosen = Counter(power_of_two(view(loads, seed=seed * 2_654_435_761 % 2**32)) for seed in range(2000))
    assert [chosen[place] / 2000 for place in range(4)] == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0], abs=0.05)


@pytest.mark.parametrize(
    ("requests", "cached", "chosen"),
    [
        ([30, 0, 0], [96, 0, 0], 0),  # 60 % of the prompt is cached, and 30 requests apart is even enough
        ([30, 5, 3], [64, 0, 0], 2),  # 40 % of the prompt is too little
        ([90, 5, 3], [160, 0, 0], 2),  # too uneven, whatever is cached
    ],
    ids=["cached", "too little cached", "too uneven"],
)
def test_prefix_affinity_follows_cache_within_thresholds(
    requests: list[float], cached: list[float], chosen: int
) -> None:
    assert prefix_affinity(view(requests, cached)) == chosen


def test_block_cost_adds_pages_to_prefill_and_pages_of_streams() -> None:
    assert block_cost(view([0, 0], [160, 0], context=[0, 0])) == 0
    assert block_cost(view([0, 0], [160, 0], context=[161, 0])) == 1
    assert block_cost(view([0, 0], [160, 0], waiting=[161, 0])) == 1
    assert block_cost(view([0, 0], [160, 0], waiting=[159, 0])) == 0


@pytest.mark.parametrize(
    ("cached", "chosen"), [([96, 0, 0], 0), ([80, 0, 0], 2)], ids=["a later turn", "half of the prompt: a new one"]
)
def test_pinned_conversation_stays_whatever_waits_there_and_a_new_one_goes_where_least_is_held(
    cached: list[float], chosen: int
) -> None:
    assert pinned(view([9, 1, 1], cached, waiting=[1e6, 0, 0], context=[0, 700, 500])) == chosen


@pytest.mark.parametrize(
    ("waiting", "chosen"), [([39_000, 10, 0], 0), ([41_000, 10, 0], 2)], ids=["within the gate", "beyond the gate"]
)
def test_remaining_work_leaves_the_holder_of_a_prefix_where_its_work_is_beyond_the_gate(
    waiting: list[float], chosen: int
) -> None:
    assert remaining_work(view([1, 1, 1], [16, 0, 0], waiting=waiting)) == chosen


@pytest.mark.parametrize("policy", ["pinned", "remaining-work"])
def test_decode_replica_that_holds_a_conversation_computes_its_later_turns(policy: str) -> None:
    replica = Replica(profile(role="decode"))
    profiles = {"p": profile(role="prefill"), "d1": profile(role="decode"), "d2": replica.profile}
    fleet = fleet_of(profiles, policy=policy)
    prompt = list(range(800))
    assert fleet.choose(query("first", prompt=prompt), 0.0).prefill == "p"
    replica.add("before", prompt, max_tokens=1)
    while replica.scheduler.table.has_work:
        replica.step()
    replica.report(fleet, "d2", 0.0)
    later = fleet.choose(query("later", prompt=[*prompt, 1, 2]), 0.0)
    assert (later.prefill, later.decode) == (None, "d2")
    assert fleet.choose(query("another", 800), 0.0).prefill == "p"


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_in_a_fleet_counts_what_is_reported_and_booked(policy: str) -> None:
    fleet = fleet_of({name: profile() for name in "abc"}, policy=policy)
    crowd = (Prompts(1, 6, 50, 50_000, 60.0),)
    fleet.hear("a", live(2, prompts=crowd, streams=(0, 50, 0), context_tokens=90_000), 0.0)
    placed = Counter(place(fleet, query(f"{number}", 500)).decode for number in range(30))
    if policy == "round-robin":
        assert placed == dict.fromkeys("abc", 10)
    else:
        assert placed["a"] == 0
        assert abs(placed["b"] - placed["c"]) <= (2 if policy != "power-of-two" else 12)
    assert place(fleet, query("only", 500), 0.0).reason == policy


@pytest.mark.parametrize("policy", ["prefix-affinity", "block-cost", "pinned", "remaining-work"])
def test_cache_aware_policy_finds_a_reported_prefix(policy: str) -> None:
    replicas = {name: Replica(profile()) for name in "abcd"}
    fleet = fleet_of({name: replica.profile for name, replica in replicas.items()}, policy=policy)
    prompt = list(range(800))
    replicas["c"].add("before", prompt, max_tokens=1)
    while replicas["c"].scheduler.table.has_work:
        replicas["c"].step()
    replicas["c"].report(fleet, "c", 0.0)
    for number in range(10):
        assert fleet.choose(query(f"{number}", prompt=[*prompt, number]), 0.0).decode == "c"


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_with_prefill_replicas_ships_every_prompt_it_may(policy: str) -> None:
    profiles = {
        "p": profile(role="prefill"),
        "d1": profile(role="decode"),
        "d2": profile(role="decode"),
        "m": profile(),
    }
    fleet = fleet_of(profiles, policy=policy)
    pairs = {
        (chosen.prefill, chosen.decode) for chosen in (place(fleet, query(f"{number}", 500)) for number in range(20))
    }
    assert {prefill for prefill, _ in pairs} == {"p"}
    assert {"d1", "d2"} <= {decode for _, decode in pairs}
    assert fleet.choose(query("short", 10), 0.0).prefill is None
    assert fleet.choose(query("local", 500, may_ship=False), 0.0).prefill is None
    assert fleet.choose(query("without", 500), 0.0, exclude=["d1", "d2", "m"]).decode == "p"
