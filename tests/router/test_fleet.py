"""A router counts every request once, forgets it when it ends, and treats silent replicas as busy."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from crossdock.router import replica_table
from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.placement import Placement
from crossdock.router.query import Query
from crossdock.workers.report.live_profile import PageChanges, Prompts
from crossdock.workers.schedule.request.page_hashes import hash_pages
from crossdock.workers.schedule.request.slo import DEFAULT_CLASSES, SloClass
from crossdock.workers.schedule.request.submission import Overloaded
from tests.router.replicas import (
    CLASSES,
    ENCODER,
    LONG_STEPS,
    PAGE_SIZE,
    Replica,
    fleet_of,
    live,
    picture_query,
    place,
    profile,
    query,
    with_pictures,
)


def choices(fleet: Fleet, number: int = 60, now: float = 0.0, num_tokens: int = 200) -> Counter[str]:
    """Count where `number` requests would go, none of which is booked."""
    return Counter(fleet.choose(query(f"{at}", num_tokens), now).decode for at in range(number))


def test_request_goes_where_its_adapter_is_unless_the_backlog_there_takes_longer_than_a_load() -> None:
    fleet = fleet_of({"a": profile(), "b": profile()})
    fleet.hear("a", live(2, adapters=("sql",), adapter_load_s=0.3), 0.0)
    fleet.hear("b", live(2, adapters=("chat",), adapter_load_s=0.3), 0.0)
    chosen = {
        (adapter, at): fleet.choose(query(f"{at}", adapter=adapter), 0.0)
        for adapter in ("sql", "chat")
        for at in range(20)
    }
    assert {(adapter, placement.decode) for (adapter, _), placement in chosen.items()} == {("sql", "a"), ("chat", "b")}
    other = fleet.choose(query("new", adapter="new"), 0.0)
    assert other.predicted_ttft == pytest.approx(chosen["sql", 0].predicted_ttft + 0.3), "the load counts"
    place(fleet, query("new", adapter="new"))
    assert fleet.choose(query("again", adapter="new"), 0.0).decode == other.decode, "it will be loaded there"
    fleet.hear("a", live(3, adapters=("sql",), adapter_load_s=0.3, prompts=(Prompts(0, 4, 9, 4000, 9.0),)), 0.0)
    assert fleet.choose(query("late", adapter="sql"), 0.0).decode == "b"


def test_rows_are_made_a_few_hundred_times_for_thousands_of_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 vectors of one request took 17 s to place, and their replica seemed to be lost."""
    num_seen = 0
    made = replica_table.row

    def counted(profile: Any, live: Any, booked: Any, *rest: Any) -> Any:
        nonlocal num_seen
        num_seen += len(booked)
        return made(profile, live, booked, *rest)

    monkeypatch.setattr(replica_table, "row", counted)
    fleet = fleet_of({"a": profile(admission="queue")})
    for number in range(2048):
        last = place(fleet, query(f"{number}", 20), 0.0)
    assert num_seen < 300 * 2048, "each placement would look at all before it: 2 million"
    fleet.table.by_name["a"].touch()
    exact = fleet.choose(query("new", 20), 0.0).predicted_ttft
    assert last.predicted_ttft == pytest.approx(exact, rel=1 / 32)


# -- in-flight loads -------------------------------------------------------------------------------------------------


def test_in_flight_counts_until_a_live_profile_includes_the_request() -> None:
    replica = Replica(profile())
    fleet = fleet_of({"a": replica.profile})
    other = query("other", 1000)
    idle = fleet.choose(other, 0.0).predicted_ttft
    place(fleet, query("r", 1000))
    booked = fleet.choose(other, 0.0).predicted_ttft
    assert booked == pytest.approx(2 * idle, rel=0.01)
    replica.report(fleet, "a", 0.0)  # it crossed with the request and does not include it
    sequence = replica.add("r", list(range(1000)))
    assert fleet.choose(other, 0.0).predicted_ttft == pytest.approx(booked)
    fleet.taken("r", "a", sequence)
    assert fleet.choose(other, 0.0).predicted_ttft == pytest.approx(booked)
    replica.report(fleet, "a", 0.0)  # this one includes it
    assert fleet.choose(other, 0.0).predicted_ttft == pytest.approx(booked, rel=0.01)
    assert fleet.num_booked("a") == 1
    fleet.settle("r")
    assert fleet.choose(other, 0.0).predicted_ttft == pytest.approx(booked, rel=0.01), "the replica still reports it"


def test_taken_after_the_profile_that_includes_the_request_counts_it_once() -> None:
    replica = Replica(profile(cost=LONG_STEPS))
    fleet = fleet_of({"a": replica.profile})
    place(fleet, query("r", 1000))
    sequence = replica.add("r", list(range(1000)))
    replica.report(fleet, "a", 0.0)
    fleet.taken("r", "a", sequence)
    alone = LONG_STEPS.prefill_seconds(0, 1000, 512)
    assert fleet.choose(query("other", 1000), 0.0).predicted_ttft == pytest.approx(2 * alone)


def test_booked_prompts_without_output_lengthen_the_backlog_and_no_gap() -> None:
    fleet = fleet_of({"a": profile()})
    idle = fleet.choose(query("other", 1000), 0.0)
    fleet.table.refresh(0.0)
    gap = float(fleet.table.loads.future.gap[0])
    for number in range(20):
        place(fleet, structs.replace(query(f"{number}", 1000), max_tokens=1, is_prompt_alone=True))
    assert fleet.choose(query("other", 1000), 0.0).predicted_ttft > 15 * idle.predicted_ttft
    fleet.table.refresh(0.0)
    assert fleet.table.loads.future.gap[0] == gap
    assert not fleet.table.loads.future.counts[:, 0].any()


def test_burst_before_any_new_report_is_spread_evenly() -> None:
    fleet = fleet_of({name: profile() for name in "abcd"})
    placed = Counter(place(fleet, query(f"{number}", 1000)).decode for number in range(40))
    assert placed == dict.fromkeys("abcd", 10)


def test_replica_four_times_as_fast_gets_four_times_as_many() -> None:
    fleet = fleet_of({"fast": profile(), "slow": profile(4.0)})
    placed = Counter(place(fleet, query(f"{number}", 1000, slo_class="batch")).decode for number in range(50))
    assert placed["fast"] == pytest.approx(40, abs=4)


def test_prompts_with_one_beginning_go_where_the_first_went() -> None:
    """Nothing of the first is computed yet. Once its replica is too busy, other prompts go elsewhere."""
    fleet = fleet_of({name: profile() for name in "abcd"})
    prompt = list(range(3000))
    placed = [place(fleet, query(f"{number}", prompt=[*prompt, number])).decode for number in range(8)]
    assert len(set(placed)) == 1
    others = [place(fleet, query(f"other {number}", 3000)).decode for number in range(3)]
    assert placed[0] not in others
    for number in range(8):
        fleet.settle(f"{number}")
    assert fleet.choose(query("late", prompt=prompt), 0.0).cached_tokens == 0  # the replica never reported the pages


def test_same_prompt_of_another_tenant_finds_no_prefix() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    prompt = list(range(3000))
    for salt, cached in (("one", 0), ("one", 2992), ("two", 0)):
        request = Query(f"{salt} {cached}", 3000, hash_pages(prompt, PAGE_SIZE, salt))
        assert place(fleet, request).cached_tokens == cached


class History:
    """A router and real schedulers, whose messages are late, lost or doubled; replicas join, leave and restart."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fleet, self.now = Fleet(RouterConfig(ttl_s=1.0)), 0.0
        self.replicas: dict[str, Replica] = {}
        self.running: dict[str, Placement] = {}
        self.num_lives = 0

    def join(self, name: str) -> None:
        self.num_lives += 1
        role = self.rng.choice(["mixed", "mixed", "prefill", "decode"])
        slowness = self.rng.choice([1.0, 3.0])
        replica = Replica(profile(slowness, role, encoder_cost=ENCODER))  # type: ignore[arg-type]
        replica.publisher.incarnation = f"{self.num_lives}"
        self.replicas[name] = replica
        self.fleet.join(name, replica.profile, self.now)

    def happen(self, number: int) -> None:
        """Let one thing happen."""
        self.now += self.rng.choice([0.0, 0.01, 0.3, 2.0])
        name = self.rng.choice(sorted(self.replicas))
        match self.rng.randrange(8):
            case 0:
                self.join(f"r{self.rng.randrange(10)}")  # perhaps it is up: it has restarted
            case 1 if name != "r0":
                self.fleet.leave(name)
                del self.replicas[name]
            case 2 | 3 | 4:
                self.arrive(number)
            case 5:
                for request_id in self.replicas[name].step():
                    self.fleet.first_token(request_id)
            case 6:
                reported = self.replicas[name].publisher.live(self.replicas[name].now)
                for _ in range(self.rng.randrange(3)):  # lost, or doubled
                    self.fleet.hear(name, reported, self.now)
            case 7 if self.running:
                request_id = self.rng.choice(sorted(self.running))
                del self.running[request_id]
                self.fleet.settle(request_id)
                for replica in self.replicas.values():
                    replica.scheduler.abort(request_id)

    def arrive(self, number: int) -> None:
        slo_class = self.rng.choice([*CLASSES, "unheard-of"])
        rows, num_text = self.rng.choice([(), (), (40,), (400, 100)]), self.rng.choice([5, 50, 700])
        submission = with_pictures(f"{number}", rows, num_text, slo_class=slo_class)
        prompt, request = submission.prompt_token_ids, picture_query(submission, may_refuse=True)
        try:
            chosen = place(self.fleet, request, self.now)
        except Overloaded:
            return
        self.running[request.request_id] = chosen
        assert chosen.decode in self.replicas
        assert chosen.prefill is None or chosen.prefill in self.replicas
        assert chosen.predicted_ttft > 0
        if self.rng.random() > 0.9:
            return  # the request is lost on its way
        first = chosen.prefill or chosen.decode
        try:
            sequence = self.replicas[first].add(request.request_id, prompt, items=submission.items)
        except Overloaded:
            self.fleet.settle(request.request_id)
            del self.running[request.request_id]
            return
        if self.rng.random() < 0.8:
            self.fleet.taken(request.request_id, first, sequence)


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_router_after_any_history_equals_a_new_one(rng: random.Random) -> None:
    """When every request is settled, only the reports remain: routers with the same reports agree."""
    history = History(rng)
    history.join("r0")
    for number in range(rng.randrange(5, 60)):
        history.happen(number)
    fleet, now = history.fleet, history.now
    for request_id in history.running:
        fleet.settle(request_id)
    fresh = Fleet(RouterConfig(ttl_s=1.0))
    for name, replica in history.replicas.items():
        fleet.hear(name, reported := replica.publisher.live(replica.now), now)
        fresh.join(name, replica.profile, now)
        fresh.hear(name, reported, now)
        assert fleet.num_booked(name) == 0
    assert len(fleet.prefixes) == 0
    for name in history.replicas:
        assert all(
            np.array_equal(one, other) for one, other in zip(row(fleet, name, now), row(fresh, name, now), strict=True)
        )
    others = sorted(history.replicas)[1:]
    for number, (size, slo_class) in enumerate((size, name) for size in (10, 3000) for name in CLASSES):
        request = query(f"{number}", size, slo_class=slo_class)
        for exclude in ([], others[:1]):
            assert outcome(fleet, request, now, exclude) == outcome(fresh, request, now, exclude)


def row(fleet: Fleet, name: str, now: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the replica's row, up to date."""
    fleet.table.refresh(now)
    slot = fleet.table.by_name[name].slot
    return fleet.table.loads.columns[:, slot], fleet.table.loads.groups[..., slot]


def outcome(fleet: Fleet, request: Query, now: float, exclude: Sequence[str]) -> Placement | float:
    """Return the placement, or the seconds after which a refused request may try again."""
    try:
        return fleet.choose(request, now, exclude)
    except Overloaded as refusal:
        return refusal.retry_after


# -- silence -----------------------------------------------------------------------------------------------------------


def backlog(seconds: float) -> tuple[Prompts, ...]:
    return (Prompts(1, 5, 3, 3000, seconds),)


def test_silent_replica_attracts_no_crowd_and_is_not_shut_out() -> None:
    fleet = fleet_of({name: profile() for name in "abc"})
    for number in range(1, 12):
        now = 0.5 * number  # `a` reported at 0 that it is idle, and nothing since
        for name in "bc":
            fleet.hear(name, live(1 + number, prompts=backlog(1.0)), now)
        chosen = choices(fleet, now=now)
        assert (chosen["a"] == 60) is (now <= 3.0), now
    assert 5 < chosen["a"] < 40, "it counts as busy as the others"


def test_replica_silent_after_reporting_work_stays_busy() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    fleet.hear("a", live(2, prompts=backlog(8.0)), 0.0)
    fleet.hear("b", live(2), 10.0)
    assert choices(fleet, now=10.0) == {"b": 60}


def test_silent_replica_counts_every_request_it_was_given() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    for number in range(20):  # to `a`, which takes them and reports them
        request = query(f"{number}", 1000)
        fleet.book(request, fleet.choose(request, 0.0, exclude=["b"]))
        fleet.taken(f"{number}", "a", 1)
    fleet.hear("a", live(2), 0.0)
    assert "a" in choices(fleet)
    assert choices(fleet, now=10.0) == {"b": 60}  # both are silent


def test_router_without_any_report_spreads_requests_evenly() -> None:
    fleet = Fleet()
    with pytest.raises(LookupError):
        fleet.choose(query("r"), 0.0)
    for name in "abcd":
        fleet.join(name, profile(), 0.0)
    placed = Counter(place(fleet, query(f"{number}", 1000), 5.0).decode for number in range(40))
    assert placed == dict.fromkeys("abcd", 10)


def test_new_replica_counts_as_busy_until_its_first_report() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    for name in "ab":
        fleet.hear(name, live(2, prompts=backlog(1.0)), 0.0)
    fleet.join("new", profile(), 0.0)
    assert choices(fleet)["new"] < 40
    fleet.hear("new", live(), 0.0)
    assert choices(fleet) == {"new": 60}


def test_new_incarnation_ends_the_in_flights_of_requests_that_the_one_before_had_taken() -> None:
    fleet = fleet_of({"a": profile()})
    fleet.hear("a", live(1), 0.0)
    for name in ("taken", "included", "on its way"):
        place(fleet, query(name, 1000))
    fleet.taken("included", "a", 1)
    fleet.hear("a", live(2), 0.0)
    fleet.taken("taken", "a", 2)
    fleet.hear("a", live(1, incarnation="second life"), 0.0)
    assert fleet.num_booked("a") == 1
    for name in ("taken", "included", "on its way"):
        fleet.settle(name)
    assert fleet.num_booked("a") == 0


def test_late_report_is_ignored_and_one_of_a_new_incarnation_is_not() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    fleet.hear("a", live(9, prompts=backlog(1.0)), 0.0)
    fleet.hear("a", live(8), 0.0)
    assert choices(fleet) == {"b": 60}
    fleet.hear("a", live(1, incarnation="second life"), 0.0)  # it has restarted and is idle
    assert set(choices(fleet)) == {"a", "b"}


def test_messages_about_unknown_replicas_and_requests_are_ignored() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    fleet.hear("unknown", live(), 0.0)
    fleet.hear_pages("unknown", PageChanges("x", 1, []))
    fleet.leave("unknown")
    fleet.settle("unknown")
    fleet.first_token("unknown")
    assert len(fleet) == 2


def test_repeated_report_keeps_a_replica_from_being_silent() -> None:
    fleet = fleet_of({name: profile() for name in "ab"})
    for number in range(1, 8):
        fleet.hear("a", live(), float(number))
        fleet.hear("b", live(1 + number, prompts=backlog(1.0)), float(number))
        assert choices(fleet, now=float(number)) == {"a": 60}


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_replicas_with_different_classes_are_routed_together() -> None:
    """During an upgrade, old and new replicas are up at once."""
    fleet = fleet_of({"old": profile()})
    fleet.hear("old", live(2, streams=(1, 2, 3), context_tokens=600), 0.0)
    more = (*DEFAULT_CLASSES, SloClass(name="bulk", ttft_s=1000.0, tpot_s=9.0))
    fleet.join("new", profile(slo_classes=more), 0.0)
    fleet.hear("new", live(1, streams=(1, 1, 1, 7), context_tokens=900), 0.0)
    for slo_class in (*CLASSES, "bulk"):
        place(fleet, query(slo_class, slo_class=slo_class))
    fleet.join("older", profile(slo_classes=DEFAULT_CLASSES[:2]), 0.0)
    fleet.hear("new", live(2, streams=(1, 1, 1, 7), context_tokens=900), 0.0)
    for slo_class in (*CLASSES, "bulk"):
        place(fleet, query(f"{slo_class} again", slo_class=slo_class))
    assert sum(fleet.num_booked(name) for name in ("old", "new", "older")) == 8
    old, new, older = (fleet.table.by_name[name].slot for name in ("old", "new", "older"))
    fleet.table.refresh(0.0)
    # By the two classes of the replica that joined last. It has not reported, and counts as busy as the busiest.
    assert fleet.table.loads.now.counts[:, [old, new, older]].tolist() == [[1, 1, 1], [5, 9, 9]]


def test_replica_of_another_page_size_has_no_prefix_hits() -> None:
    fleet = fleet_of({"a": profile(), "b": profile(page_size=32)})
    prompt = list(range(640))
    fleet.hear_pages("a", PageChanges("x", 1, query("x", prompt=prompt).page_hashes))
    assert fleet.choose(query("r", prompt=prompt), 0.0).cached_tokens == 624
    assert fleet.choose(query("r", prompt=prompt), 0.0, exclude=["a"]).cached_tokens == 0


def test_replicas_that_left_and_requests_that_ended_leave_nothing() -> None:
    fleet = fleet_of({"stays": profile()})
    pages = hash_pages(list(range(PAGE_SIZE * 4)), PAGE_SIZE, "")
    for number in range(300):
        name = f"r{number}"
        peer = b"" if number % 2 else b"dock"
        changes = {"peer": peer, "compatibility": f"model {number}"}
        fleet.join(name, profile().model_copy(update=changes), float(number))
        fleet.hear(name, live(1), float(number))
        fleet.hear_pages(name, PageChanges("one", 1, pages, is_all=True))
        place(fleet, query(f"q{number}", 1000))
        fleet.settle(f"q{number}")
        fleet.leave(name)
    kept = {field: getattr(fleet.table, field) for field in fleet.table.__slots__}
    sizes = {field: len(value) for field, value in kept.items() if isinstance(value, dict | set | list)}
    assert sizes["by_name"] == sizes["_group_of"] == 1
    assert sizes["by_slot"] == 8
    assert max(sizes.values()) <= 8
    assert not fleet._placed
    assert len(fleet.prefixes._slots) <= 1
    assert not fleet.prefixes._holders


def test_group_of_a_replica_that_left_is_not_given_to_another() -> None:
    fleet = fleet_of({})
    for name, compatibility in (("a", "x"), ("b", "y"), ("c", "y")):
        fleet.join(name, profile().model_copy(update={"peer": b"dock", "compatibility": compatibility}), 0.0)
    fleet.leave("a")
    fleet.join("d", profile().model_copy(update={"peer": b"dock", "compatibility": "z"}), 0.0)
    groups = {name: fleet.table.groups[replica.slot] for name, replica in fleet.table.by_name.items()}
    assert groups["b"] == groups["c"] != groups["d"]
    fleet.leave("b")
    fleet.join("e", profile().model_copy(update={"peer": b"dock", "compatibility": "y"}), 0.0)
    assert fleet.table.groups[fleet.table.by_name["e"].slot] == groups["c"], "as long as one of them is there"
