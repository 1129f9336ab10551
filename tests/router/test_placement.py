"""A request goes where it costs least: one replica or two, and a refusal where no replica can keep its promise."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.fleet import Fleet
from crossdock.router.loads import Slots
from crossdock.router.placement import PAIR_CANDIDATES, Candidates, Options, SlotPair, choose
from crossdock.router.predict import Prediction, predict_prompt, with_output
from crossdock.router.query import Query
from crossdock.workers.report.link import LinkCost
from crossdock.workers.report.live_profile import PageChanges, Prompts
from crossdock.workers.schedule.cost.formula import Floats
from crossdock.workers.schedule.request.page_hashes import hash_pages
from crossdock.workers.schedule.request.submission import Leg, Overloaded
from tests.router.replicas import CLASSES, COST, PAGE_SIZE, Replica, fleet_of, live, place, profile, query

# -- one replica -------------------------------------------------------------------------------------------------------


def test_cached_prefix_decides_while_it_saves_more_than_the_backlog_costs() -> None:
    fleet = fleet_of({"has it": profile(), "has not": profile()})
    prompt = list(range(2000))
    fleet.prefixes.expect(0, query("x", prompt=prompt).page_hashes)
    request = query("new", prompt=prompt)
    assert fleet.choose(request, 0.0).decode == "has it"
    assert fleet.choose(request, 0.0).reason == "local cached"
    backlog = COST.prefill_seconds(0, 1000, 512)
    fleet.hear("has it", live(2, prompts=(Prompts(0, 2, 1, 1000, backlog),)), 0.0)
    assert fleet.choose(request, 0.0).decode == "has it"
    fleet.hear("has it", live(3, prompts=(Prompts(0, 3, 5, 5000, 5 * backlog),)), 0.0)
    assert fleet.choose(request, 0.0).decode == "has not"


def test_request_goes_where_it_evicts_least() -> None:
    """Two replicas without work: "a" has the prompt's first 10 pages, and pages that are worth much; "b" has room."""
    prompt = list(range(1000, 2000))
    shared = hash_pages(prompt[:160], PAGE_SIZE)
    for seconds, expected in ((0.01, "b"), (0.0, "a")):  # of prefill that an evicted page costs
        fleet = fleet_of({"a": profile(), "b": profile()})
        fleet.hear("a", live(2, eviction_seconds=seconds, empty_pages=0), 0.0)
        fleet.hear("b", live(2, eviction_seconds=seconds, empty_pages=100), 0.0)
        fleet.hear_pages("a", PageChanges("first life", 1, shared))
        assert fleet.choose(query("r", prompt=prompt), 0.0).decode == expected


def test_empty_pages_that_are_booked_are_not_free_to_take() -> None:
    fleet = fleet_of({"a": profile(), "b": profile()})
    for name in "ab":
        fleet.hear(name, live(2, eviction_seconds=0.05, empty_pages=100), 0.0)
    placed = [place(fleet, query(str(n), 640, max_tokens=1)).decode for n in range(4)]  # 41 pages each
    assert sorted(placed) == ["a", "a", "b", "b"]


def test_stream_goes_where_its_tpot_is_kept_rather_than_where_it_starts_sooner() -> None:
    fleet = fleet_of({"fast": profile(), "slow": profile(40.0)})
    fleet.hear("fast", live(2, prompts=(Prompts(0, 4, 1, 5000, 0.6),)), 0.0)
    chosen = fleet.choose(query("new", 20, slo_class="interactive", max_tokens=200), 0.0)
    assert chosen.decode == "fast"
    assert chosen.predicted_gap < 0.05 < COST.base * 40


def test_request_late_everywhere_goes_where_it_is_least_late() -> None:
    fleet = fleet_of({"bad": profile(admission="queue"), "worse": profile(admission="queue")})
    for name, seconds in (("bad", 60.0), ("worse", 180.0)):
        fleet.hear(name, live(2, prompts=(Prompts(1, 6, 10, 100_000, seconds),)), 0.0)
    chosen = fleet.choose(query("new", 7000 * 9, slo_class="standard"), 0.0)
    assert chosen.decode == "bad"
    assert chosen.late > 0
    assert chosen.reason == "local late"


@given(st.integers(0, 1 << 30), st.floats(1.1, 8.0))
@settings(deadline=None, max_examples=50)
def test_faster_replica_is_always_chosen(seed: int, slowness: float) -> None:
    fleet = fleet_of({"b": profile(slowness), "a": profile(), "c": profile(slowness)})
    assert fleet.choose(query(f"{seed}", 1000), 0.0).decode == "a"


def test_ties_are_spread_by_request_the_same_way_at_every_router() -> None:
    names = [f"r{number}" for number in range(10)]
    one = fleet_of({name: profile() for name in names})
    other = fleet_of({name: profile() for name in reversed(names)})
    chosen = [one.choose(query(f"{number}"), 0.0).decode for number in range(500)]
    assert chosen == [other.choose(query(f"{number}"), 0.0).decode for number in range(500)]
    counts = [chosen.count(name) for name in names]
    assert min(counts) > 20, counts


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_request_late_everywhere_is_refused_with_the_shortest_wait() -> None:
    fleet = fleet_of({"a": profile(), "b": profile()})
    for name, seconds in (("a", 20.0), ("b", 14.0)):
        fleet.hear(name, live(2, prompts=(Prompts(0, 6, 1, 100_000, seconds),)), 0.0)
    with pytest.raises(Overloaded, match="promises 10") as refusal:
        fleet.choose(query("new", 10), 0.0)
    own = COST.prefill_seconds(0, 10, 512)
    assert refusal.value.retry_after == pytest.approx(14.0 + own - 10.0)
    assert fleet.choose(query("new", 10, slo_class="batch"), 0.0).decode == "b"
    assert fleet.choose(query("new", 10, may_refuse=False), 0.0).decode == "b"
    with pytest.raises(Overloaded) as refusal:
        fleet.choose(query("new", 10), 0.0, exclude=["b"])
    assert refusal.value.retry_after == pytest.approx(20.0 + own - 10.0)


def test_late_request_is_not_refused_while_one_replica_queues() -> None:
    busy = live(2, prompts=(Prompts(0, 6, 1, 100_000, 20.0),))
    fleet = fleet_of({"a": profile(), "b": profile(admission="queue")})
    fleet.hear("a", busy, 0.0)
    fleet.hear("b", busy, 0.0)
    assert fleet.choose(query("new", 10), 0.0).late > 0


def test_late_request_is_not_refused_by_an_idle_replica() -> None:
    slow = fleet_of({"only": profile(1000.0)})  # it takes a second for a token
    placed = slow.choose(query("new", 5000, slo_class="interactive"), 0.0)
    assert placed.decode == "only"
    assert placed.predicted_ttft > slow.classes[0].ttft_s


# -- one or two --------------------------------------------------------------------------------------------------------


def pools(shipping: str = "auto", **fields: object) -> Fleet:
    """Return a router over a prefill replica `p` and a decode replica `d`."""
    profiles = {"p": profile(role="prefill", **fields), "d": profile(role="decode", **fields)}
    return fleet_of(profiles, shipping=shipping)


def test_prompt_is_shipped_when_the_decode_replica_is_busy_and_the_prefill_replica_is_not() -> None:
    fleet = pools(chunk_policy="fixed")
    assert fleet.choose(query("short", 40), 0.0).prefill is None  # both are idle: a handover gains nothing
    fleet.hear("d", live(2, streams=(40, 0, 0), context_tokens=20_000), 0.0)
    chosen = fleet.choose(query("long", 8000), 0.0)
    assert (chosen.prefill, chosen.decode, chosen.reason) == ("p", "d", "shipped")
    assert chosen.late == 0
    fleet.hear("p", live(2, prompts=(Prompts(0, 6, 4, 100_000, 200.0),)), 0.0)
    assert fleet.choose(query("another", 400), 0.0).prefill is None


@pytest.mark.parametrize(("bytes_per_second", "prefill"), [(1e10, "p"), (1e6, None)], ids=["fast", "slow"])
def test_prompt_is_shipped_over_a_fast_network_only(bytes_per_second: float, prefill: str | None) -> None:
    fleet = pools(bytes_per_second=bytes_per_second)
    fleet.hear("d", live(2, prompts=(Prompts(1, 5, 1, 4000, 2.0),)), 0.0)
    assert fleet.choose(query("r", 4000), 0.0).prefill == prefill


@pytest.mark.parametrize(("transfer_s", "prefill"), [(0.01, "p"), (3.0, None)], ids=["quick", "slow"])
def test_prompt_is_shipped_where_a_transfer_takes_little_beside_its_bytes(
    transfer_s: float, prefill: str | None
) -> None:
    fleet = pools()
    fleet.hear("p", live(2, link=LinkCost(transfer_s, 1e10)), 0.0)
    fleet.hear("d", live(2, prompts=(Prompts(1, 5, 1, 4000, 2.0),)), 0.0)
    assert fleet.choose(query("r", 4000), 0.0).prefill == prefill


@pytest.mark.parametrize("policy", ["seconds", "least-requests"])
def test_pair_is_always_of_one_compatibility(policy: str) -> None:
    """During a rolling upgrade both kinds are up; pages never pass from one to the other."""
    kinds = {"old": "model A", "new": "model B"}
    profiles = {
        f"{role} {kind}": profile(role=role, compatibility=name, admission="queue")  # type: ignore[arg-type]
        for kind, name in kinds.items()
        for role in ("prefill", "decode")
    }
    fleet = fleet_of(profiles, policy=policy, shipping="always")
    decodes = set()
    for number in range(60):
        chosen = place(fleet, query(f"{number}", 3000))
        assert chosen.prefill is not None
        assert chosen.prefill.split()[1] == chosen.decode.split()[1]
        decodes.add(chosen.decode)
    assert len(decodes) == 2
    fleet.leave("decode new")
    chosen = fleet.choose(query("then", 3000), 0.0)
    assert (chosen.prefill, chosen.decode) == ("prefill old", "decode old")


def test_replica_without_a_transport_is_never_paired() -> None:
    assert pools(shipping="always", peer=b"").choose(query("r", 3000), 0.0).prefill is None


@pytest.mark.parametrize("shipping", ["always", "never"])
def test_shipping_setting_overrides_the_prediction(shipping: str) -> None:
    fleet = pools(shipping=shipping)
    fleet.hear("d", live(2, streams=(40, 0, 0), context_tokens=20_000), 0.0)
    for num_tokens in (PAGE_SIZE, 8000):
        assert (fleet.choose(query("r", num_tokens), 0.0).prefill is not None) is (shipping == "always")
    assert fleet.choose(query("short", PAGE_SIZE - 1), 0.0).prefill is None
    assert fleet.choose(query("local", 8000, may_ship=False), 0.0).prefill is None
    assert fleet.choose(query("local", 8000), 0.0, exclude=["p"]).decode == "d"
    alone = fleet.choose(query("local", 8000), 0.0, exclude=["d"])
    assert (alone.prefill, alone.decode) == (None, "p")  # a replica of any role can do everything


def test_replica_gets_the_work_of_the_role_that_it_reports() -> None:
    fleet = pools(shipping="always")
    for sequence, roles in enumerate((("prefill", "decode"), ("decode", "prefill")), start=2):
        for name, role in zip("pd", roles, strict=True):
            fleet.hear(name, live(sequence, role=role), 0.0)
        chosen = fleet.choose(query(f"{sequence}", 3000), 0.0)
        assert (chosen.prefill, chosen.decode) == (("p", "d") if sequence == 2 else ("d", "p"))


class Problem:
    """One choice of a random fleet, whose replicas have reported random work."""

    def __init__(self, rng: random.Random) -> None:
        profiles = {}
        for number in range(rng.randrange(2, 9)):
            fields = {"compatibility": rng.choice("AB"), "chunk_policy": rng.choice(["adaptive", "fixed"])}
            fields |= {"bytes_per_second": rng.choice([1e7, 1e10]), "admission": "queue"}
            role = rng.choice(["mixed", "prefill", "decode"])
            profiles[f"r{number}"] = profile(rng.choice([1.0, 2.0, 4.0]), role, **fields)  # type: ignore[arg-type]
        self.fleet = fleet_of(profiles)
        for name in profiles:
            length = rng.randrange(7)
            prompts = (Prompts(rng.randrange(3), length, 2, 1000, 4.0 ** (length - 3)),) if rng.random() < 0.6 else ()
            streams = (rng.randrange(9), rng.randrange(9), rng.randrange(9))
            context = 300 * sum(streams)
            cache = {"empty_pages": rng.randrange(60), "eviction_seconds": rng.choice([0.0, 1e-3, 0.1])}
            busy = live(2, prompts=prompts, streams=streams, context_tokens=context, **cache)
            self.fleet.hear(name, busy, 0.0)
        # Shorter than the shortest deadline.
        self.request: Query = query("new", rng.choice([20, 300, 900]), slo_class=rng.choice(CLASSES))
        table = self.fleet.table
        table.refresh(0.0)
        self.candidates: Candidates = table.candidates("auto" if self.request.num_tokens >= PAGE_SIZE else "never")
        self.zeros: Floats = np.zeros(len(table.by_slot))
        self.slo = self.fleet.classes[CLASSES.index(self.request.slo_class)]
        prompt = predict_prompt(table.loads, self.request, self.zeros, self.zeros)
        self.prediction: Prediction[Floats] = with_output(prompt, table.loads, self.request, self.zeros)

    def choose(self, alone: Slots, prefills: Slots, decodes: Slots) -> SlotPair:
        """Return the placement chosen from these slots only."""
        those = Candidates(alone, prefills, decodes, self.candidates.groups, self.candidates.name_hashes)
        return choose(Options(self.request, self.slo, those, self.fleet.table.loads, self.zeros, self.prediction))


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_chosen_placement_costs_least_of_all(rng: random.Random) -> None:
    problem = Problem(rng)
    candidates = problem.candidates
    alone, prefills, decodes, none = candidates.alone, candidates.prefills, candidates.decodes, candidates.alone[:0]
    found = problem.choose(alone, prefills, decodes)
    singles = [problem.choose(alone[n : n + 1], none, none) for n in range(len(alone))]
    pairs = [
        problem.choose(none, prefills[i : i + 1], decodes[j : j + 1])
        for i, near in enumerate(prefills)
        for j, far in enumerate(decodes)
        if near != far and candidates.groups[near] == candidates.groups[far]
    ]
    best = min([*singles, *pairs], key=lambda choice: choice.cost)
    if len(problem.fleet) <= PAIR_CANDIDATES:
        assert found.cost == pytest.approx(best.cost)
    assert found.cost <= 1.05 * best.cost + 0.05  # a pair that was not tried can only gain by a shorter transfer tail


def fill(fleet: Fleet, name: str, output: int) -> None:
    """Have a replica report that one stream has all pages until its last token, which is the `output`th from now."""
    room = {"free_pages": (0,) * 3, "pages_now": (0,) * 3, "ends": ((output, 4000),)}
    fleet.hear(name, live(output, streams=(0, 1, 0), context_tokens=1000, **room), 0.0)


def test_wait_for_pages_of_the_decode_replica_is_part_of_a_pairs_first_token() -> None:
    """The client gets the first token when there are pages for the next ones."""
    fleet = pools(shipping="always")
    computed = fleet.choose(query("r", 3000), 0.0).predicted_ttft
    fill(fleet, "d", 1000)
    chosen = fleet.choose(query("r", 3000), 0.0)
    assert chosen.predicted_ttft > 5 * computed
    assert chosen.late == 0
    fill(fleet, "d", 8000)
    late = fleet.choose(query("r", 3000), 0.0)
    assert late.predicted_ttft > 10
    assert (late.late > 0, late.reason) == (True, "shipped late")


def test_first_token_that_waits_for_pages_comes_when_they_have_travelled() -> None:
    """18.8 MB, which begin to travel when there are pages for them."""
    found = []
    for bytes_per_second in (1e9, 1e8):
        fleet = pools(shipping="always", bytes_per_second=bytes_per_second)
        fill(fleet, "d", 1000)
        found.append(fleet.choose(query("r", 3000), 0.0).predicted_ttft)
    assert found[1] - found[0] == pytest.approx(3000 / PAGE_SIZE * 100_000 * (1e-8 - 1e-9), rel=0.01)


def test_pair_without_room_in_time_is_refused_where_prompts_wait_too() -> None:
    """An idle replica refuses nothing."""
    fleet = pools(shipping="always")
    fill(fleet, "d", 9000)
    assert fleet.choose(query("r", 3000), 0.0).late > 0
    fleet.hear("p", live(2, prompts=(Prompts(1, 2, 1, 1000, 0.1),)), 0.0)
    with pytest.raises(Overloaded):
        fleet.choose(query("r", 3000), 0.0)


def test_pair_with_a_full_decode_replica_costs_the_lateness_of_its_first_token() -> None:
    """A mixed replica that is late by less makes the output, although prompts wait there for longer than at "p"."""
    mixed = profile(admission="queue")
    fleet = fleet_of({"p": profile(role="prefill"), "d": profile(role="decode"), "m": mixed})
    fleet.hear("m", live(2, prompts=(Prompts(1, 6, 1, 100_000, 14.0),)), 0.0)
    assert fleet.choose(query("r", 3000), 0.0).decode == "d"
    fill(fleet, "d", 12_000)
    assert fleet.choose(query("r", 3000), 0.0).decode == "m"


def test_pages_that_travel_for_longer_than_a_token_may_take_make_a_stream_late() -> None:
    """The pages of the last chunk take 0.5 s; the busy replica computes the prompt in time, and in 2 s."""
    for bytes_per_second, prefill in ((1e9, "p"), (6.4e6, None)):
        fleet = pools(bytes_per_second=bytes_per_second)
        fleet.hear("d", live(2, prompts=(Prompts(1, 5, 1, 4000, 2.0),)), 0.0)
        assert fleet.choose(query("r", 512), 0.0).prefill == prefill


def test_shipped_request_is_a_backlog_at_one_replica_and_a_stream_at_the_other() -> None:
    fleet = pools(shipping="always")
    before = fleet.choose(query("other", 3000), 0.0)
    place(fleet, query("r", 3000))
    after = fleet.choose(query("other", 3000), 0.0)
    assert after.predicted_ttft == pytest.approx(2 * before.predicted_ttft, rel=0.01)
    assert after.predicted_gap > before.predicted_gap
    fleet.first_token("r")
    after = fleet.choose(query("other", 3000), 0.0)
    assert after.predicted_ttft == pytest.approx(before.predicted_ttft)
    assert after.predicted_gap > before.predicted_gap
    fleet.settle("r")
    assert fleet.choose(query("other", 3000), 0.0) == before


def test_prompt_that_will_be_shipped_adds_no_stream_at_its_prefill_replica() -> None:
    replica = Replica(profile(role="prefill"))
    fleet = fleet_of({"p": replica.profile, "d": profile(role="decode")}, shipping="always")
    before = fleet.choose(query("x", 500), 0.0)
    replica.add("r", list(range(500)), leg=Leg.SEND)
    replica.report(fleet, "p", 0.0)
    after = fleet.choose(query("x", 500), 0.0)
    assert after.predicted_ttft == pytest.approx(2 * before.predicted_ttft, rel=0.1)
    alone = fleet.choose(query("x", 500), 0.0, exclude=["d"])
    assert alone.predicted_gap == pytest.approx(before.predicted_gap)
