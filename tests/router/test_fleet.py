"""What a router knows: told once, counted once, and gone when it is over; silence draws no crowd."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.placement import Placement, Query
from crossdock.workers.report.advertise import PageChanges, Prompts
from crossdock.workers.schedule.pages import hash_pages
from crossdock.workers.schedule.request import Overloaded
from crossdock.workers.schedule.slo import DEFAULT_CLASSES, SloClass
from tests.router.replicas import COST, SIZE, Replica, fleet_of, place, profile, query, quiet

CLASSES = [slo.name for slo in DEFAULT_CLASSES]


def counts(fleet: Fleet, number: int = 60, now: float = 0.0, num_tokens: int = 200) -> Counter[str]:
    """Where so many requests would go, each placed as the last one's only successor."""
    return Counter(fleet.choose(query(f"{it}", num_tokens), now).decode for it in range(number))


# -- bookings ----------------------------------------------------------------------------------------------------------


def test_what_was_given_counts_until_the_replica_has_said_so_itself() -> None:
    replica = Replica(profile())
    fleet = fleet_of({"it": replica.profile})
    asked = query("other", 1000)
    idle = fleet.choose(asked, 0.0).predicted_ttft
    place(fleet, query("a", 1000))
    booked = fleet.choose(asked, 0.0).predicted_ttft
    assert booked == pytest.approx(2 * idle)
    replica.say(fleet, "it", 0.0)  # it crossed with the request: it does not include it
    sequence = replica.add("a", list(range(1000)))
    assert fleet.choose(asked, 0.0).predicted_ttft == pytest.approx(booked)
    fleet.taken("a", "it", sequence)
    assert fleet.choose(asked, 0.0).predicted_ttft == pytest.approx(booked)
    replica.say(fleet, "it", 0.0)  # this one does
    assert fleet.choose(asked, 0.0).predicted_ttft == pytest.approx(booked)
    assert fleet.num_booked("it") == 1
    fleet.settle("a")
    assert fleet.choose(asked, 0.0).predicted_ttft == pytest.approx(booked), "the replica still says that it has it"


def test_the_word_that_it_was_taken_may_come_after_the_profile_that_includes_it() -> None:
    replica = Replica(profile())
    fleet = fleet_of({"it": replica.profile})
    place(fleet, query("a", 1000))
    sequence = replica.add("a", list(range(1000)))
    replica.say(fleet, "it", 0.0)
    fleet.taken("a", "it", sequence)
    alone = COST.prefill_seconds(0, 1000, 512)
    assert fleet.choose(query("other", 1000), 0.0).predicted_ttft == pytest.approx(2 * alone)


def test_a_burst_is_spread_before_anybody_has_said_anything() -> None:
    fleet = fleet_of({name: profile() for name in "abcd"})
    placed = Counter(place(fleet, query(f"{number}", 1000)).decode for number in range(40))
    assert placed == dict.fromkeys("abcd", 10)


def test_a_fast_replica_gets_as_many_more_as_it_is_faster() -> None:
    fleet = fleet_of({"fast": profile(), "slow": profile(4.0)})
    placed = Counter(place(fleet, query(f"{number}", 1000, slo_class="batch")).decode for number in range(50))
    assert placed["fast"] == pytest.approx(40, abs=4)


def test_siblings_go_where_the_first_went() -> None:
    """Nothing of the first is computed yet. When its replica has more of them than the others can do whole, they go on
    elsewhere."""
    fleet = fleet_of({name: profile() for name in "abcd"})
    prompt = list(range(3000))
    placed = [place(fleet, query(f"{number}", prompt=[*prompt, number])).decode for number in range(8)]
    assert len(set(placed)) == 1
    others = [place(fleet, query(f"other {number}", 3000)).decode for number in range(3)]
    assert placed[0] not in others
    for number in range(8):
        fleet.settle(f"{number}")
    assert fleet.choose(query("late", prompt=prompt), 0.0).cached_tokens == 0  # it never said that it has them


def test_siblings_of_another_tenant_find_nothing() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    prompt = list(range(3000))
    for salt, cached in (("one", 0), ("one", 2992), ("two", 0)):
        asked = Query(f"{salt} {cached}", 3000, hash_pages(prompt, SIZE, salt))
        assert place(fleet, asked).cached_tokens == cached


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_when_all_is_said_and_done_a_router_knows_what_a_new_one_knows(rng: random.Random) -> None:
    """Real schedulers, messages that are late, lost or twice there, replicas that come, go and come back as another:
    nobody raises, and in the end nothing is left of it. So routers that hear the same agree, whatever each has done."""
    fleet, now = Fleet(RouterConfig(ttl_s=1.0)), 0.0
    up: dict[str, Replica] = {}
    running: dict[str, Placement] = {}
    lives = 0

    def join(name: str) -> None:
        nonlocal lives
        lives += 1
        role = rng.choice(["mixed", "mixed", "prefill", "decode"])
        up[name] = Replica(profile(rng.choice([1.0, 3.0]), role))  # type: ignore[arg-type]
        up[name].publisher.incarnation = f"{lives}"
        fleet.join(name, up[name].profile, now)

    join("r0")
    for number in range(rng.randrange(5, 60)):
        now += rng.choice([0.0, 0.01, 0.3, 2.0])
        name = rng.choice(sorted(up))
        match rng.randrange(8):
            case 0:
                join(f"r{rng.randrange(10)}")  # perhaps one that is up: it has restarted
            case 1 if len(up) > 1:
                fleet.leave(name)
                del up[name]
            case 2 | 3 | 4:
                prompt = [rng.randrange(2)] * rng.choice([5, 50, 700])
                asked = query(f"{number}", prompt=prompt, slo_class=rng.choice([*CLASSES, "unheard-of"]))
                try:
                    running[asked.request_id] = chosen = place(fleet, asked, now)
                except Overloaded:
                    continue
                assert chosen.decode in up
                assert chosen.prefill is None or chosen.prefill in up
                assert chosen.predicted_ttft > 0
                first = chosen.prefill or chosen.decode
                if rng.random() < 0.9:
                    try:
                        sequence = up[first].add(asked.request_id, prompt)
                    except Overloaded:
                        fleet.settle(asked.request_id)
                        del running[asked.request_id]
                        continue
                    if rng.random() < 0.8:
                        fleet.taken(asked.request_id, first, sequence)
            case 5:
                for request_id in up[name].step():
                    fleet.first_token(request_id, now)
            case 6:
                live = up[name].publisher.live(up[name].now)
                for _ in range(rng.randrange(3)):  # lost, or twice there
                    fleet.hear(name, live, now)
            case 7 if running:
                request_id = rng.choice(sorted(running))
                del running[request_id]
                fleet.settle(request_id)
                for replica in up.values():
                    replica.scheduler.abort(request_id)
    for request_id in running:
        fleet.settle(request_id)
    fresh = Fleet(RouterConfig(ttl_s=1.0))
    for name, replica in up.items():
        fleet.hear(name, live := replica.publisher.live(replica.now), now)
        fresh.join(name, replica.profile, now)
        fresh.hear(name, live, now)
        assert fleet.num_booked(name) == 0
    assert len(fleet.prefixes) == 0
    fleet._refresh(now)
    fresh._refresh(now)
    for name in up:
        one, other = fleet._replicas[name].slot, fresh._replicas[name].slot
        assert np.array_equal(fleet._loads.columns[:, one], fresh._loads.columns[:, other])
        assert np.array_equal(fleet._loads.prompts[..., one], fresh._loads.prompts[..., other])
    assert all(
        _same(fleet, fresh, query(f"{number}", size, slo_class=slo_class), now)
        for number, (size, slo_class) in enumerate((size, it) for size in (10, 3000) for it in CLASSES)
    )


def _same(one: Fleet, other: Fleet, asked: Query, now: float) -> bool:
    def choice(fleet: Fleet) -> Placement | float:
        try:
            return fleet.choose(asked, now)
        except Overloaded as refusal:
            return refusal.retry_after

    return choice(one) == choice(other)


# -- silence -----------------------------------------------------------------------------------------------------------


def busy(seconds: float) -> tuple[Prompts, ...]:
    return (Prompts(1, 5, 3, 3000, seconds),)


def test_a_silent_replica_draws_no_crowd() -> None:
    fleet = fleet_of({name: profile() for name in "abc"})
    for number in range(1, 12):
        now = 0.5 * number  # `a` has said at 0 that it is idle, and nothing since
        for name in "bc":
            fleet.hear(name, quiet(1 + number, prompts=busy(1.0)), now)
        chosen = counts(fleet, now=now)
        assert (chosen["a"] == 60) is (now <= 3.0), now
    assert 5 < chosen["a"] < 40, "nor is it shut out: it is as busy as the others"


def test_a_replica_that_was_busy_when_it_fell_silent_stays_so() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    fleet.hear("a", quiet(2, prompts=busy(8.0)), 0.0)
    fleet.hear("b", quiet(2), 10.0)
    assert counts(fleet, now=10.0) == {"b": 60}


def test_a_silent_replica_has_all_that_it_was_ever_given() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    for number in range(20):  # to `a`, which takes them and says so, while `b` is unknown
        asked = query(f"{number}", 1000)
        fleet.book(asked, fleet.choose(asked, 0.0, exclude=["b"]), 0.0)
        fleet.taken(f"{number}", "a", 1)
    fleet.hear("a", quiet(2), 0.0)
    assert "a" in counts(fleet)
    assert counts(fleet, now=10.0) == {"b": 60}  # both are silent


def test_nobody_has_said_anything() -> None:
    fleet = Fleet()
    with pytest.raises(LookupError):
        fleet.choose(query("it"), 0.0)
    for name in "abcd":
        fleet.join(name, profile(), 0.0)
    placed = Counter(place(fleet, query(f"{number}", 1000), 5.0).decode for number in range(40))
    assert placed == dict.fromkeys("abcd", 10)


def test_one_that_has_just_come_waits_for_its_first_word() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    for name in "ab":
        fleet.hear(name, quiet(2, prompts=busy(1.0)), 0.0)
    fleet.join("new", profile(), 0.0)
    assert counts(fleet)["new"] < 40
    fleet.hear("new", quiet(), 0.0)
    assert counts(fleet) == {"new": 60}


def test_late_words_and_those_of_an_earlier_life_are_not_believed() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    fleet.hear("a", quiet(9, prompts=busy(1.0)), 0.0)
    fleet.hear("a", quiet(8), 0.0)
    assert counts(fleet) == {"b": 60}
    fleet.hear("a", quiet(1, incarnation="second"), 0.0)  # it has restarted, and has nothing
    assert set(counts(fleet)) == {"a", "b"}
    fleet.hear("nobody", quiet(), 0.0)
    fleet.hear_pages("nobody", PageChanges("x", 1, []))
    fleet.leave("nobody")
    fleet.settle("nothing")
    fleet.first_token("nothing", 0.0)


def test_a_heartbeat_shows_life_and_says_nothing_new() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    for number in range(1, 8):
        fleet.hear("a", quiet(), float(number))
        fleet.hear("b", quiet(1 + number, prompts=busy(1.0)), float(number))
        assert counts(fleet, now=float(number)) == {"a": 60}


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_replicas_come_and_go_by_the_hundred() -> None:
    fleet = Fleet()
    for number in range(300):
        fleet.join(f"r{number}", profile(), 0.0)
        fleet.hear(f"r{number}", quiet(), 0.0)
        fleet.hear_pages(f"r{number}", PageChanges("a", 1, query("x", prompt=[number] * 64).page_hashes))
        if number >= 10:
            fleet.leave(f"r{number - 10}")
    assert len(fleet) == 10
    assert len(fleet._slots) == 16
    assert len(fleet.prefixes) == 10 * 4
    assert set(counts(fleet, 200)) == {f"r{number}" for number in range(290, 300)}
    asked = query("x", prompt=[295] * 64)
    assert fleet.choose(asked, 0.0).decode == "r295"


def test_a_class_that_comes_with_an_upgrade() -> None:
    """Old and new replicas are up at once, and do not have the same classes."""
    fleet = fleet_of({"old": profile()})
    fleet.hear("old", quiet(2, streams=(1, 2, 3), context_tokens=600, remaining_tokens=60), 0.0)
    more = (*DEFAULT_CLASSES, SloClass(name="bulk", ttft_s=1000.0, tpot_s=9.0))
    fleet.join("new", profile(slo_classes=more), 0.0)
    fleet.hear("new", quiet(1, streams=(1, 1, 1, 7), context_tokens=900, remaining_tokens=60), 0.0)
    for slo_class in (*CLASSES, "bulk"):
        place(fleet, query(slo_class, slo_class=slo_class))
    fleet.join("older", profile(slo_classes=DEFAULT_CLASSES[:2]), 0.0)
    fleet.hear("new", quiet(2, streams=(1, 1, 1, 7), context_tokens=900, remaining_tokens=60), 0.0)
    for slo_class in (*CLASSES, "bulk"):
        place(fleet, query(f"{slo_class} again", slo_class=slo_class))


def test_replicas_of_several_page_sizes() -> None:
    """Page hashes are of one size; to replicas of another every prompt is new."""
    fleet = fleet_of({"a": profile(), "b": profile(page_size=32)})
    prompt = list(range(640))
    fleet.hear_pages("a", PageChanges("x", 1, query("x", prompt=prompt).page_hashes))
    assert fleet.choose(query("it", prompt=prompt), 0.0).cached_tokens == 624
    assert fleet.choose(query("it", prompt=prompt), 0.0, exclude=["a"]).cached_tokens == 0


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_routers_that_hear_the_same_choose_the_same(rng: random.Random) -> None:
    """Whatever slots the replicas have, and whatever else each has placed meanwhile and seen ended."""
    names = [f"r{number}" for number in range(rng.randrange(1, 12))]
    one = fleet_of({name: profile() for name in names})
    other = fleet_of({name: profile() for name in sorted(names, reverse=True)})
    for number in range(10):
        place(other, query(f"own {number}"))
        other.settle(f"own {number}")
    for name in names:
        said = quiet(2, prompts=busy(rng.choice([0.5, 1.0])), streams=(rng.randrange(4), 0, 0), remaining_tokens=90)
        one.hear(name, said, 0.0)
        other.hear(name, said, 0.0)
    for number in range(20):
        asked = query(f"{number}", rng.choice([10, 1000]))
        assert one.choose(asked, 0.1) == other.choose(asked, 0.1) == one.choose(asked, 0.1)
