"""Pictures have their price in seconds, and are encoded where that costs least."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.fleet import Fleet
from crossdock.router.placement import HANDOVER_S, Placement
from crossdock.workers.report.advertise import PageChanges, Prompts
from crossdock.workers.schedule.memory.prefix_index import hash_pages
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding_leg import encoding_leg
from crossdock.workers.schedule.pictures.items import Item
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import Submission
from tests.router.replicas import (
    CLASSES,
    COST,
    ENCODER,
    PAGE_SIZE,
    Replica,
    encoder_profile,
    fleet_of,
    live,
    picture_query,
    place,
    profile,
    query,
    with_pictures,
)

LEG_TOKENS = 3 * 208 + 1  # of three pictures of 200 rows, each on 13 pages
STREAMS: dict[str, Any] = {"streams": (8, 0, 0), "context_tokens": 8000, "remaining_tokens": 4000}


def picture_profile(**fields: Any) -> Any:
    """Return the profile of a replica that takes pictures, and embeddings from encode replicas."""
    return profile(**{"encoder_cost": ENCODER, "rows_peer": b"landing"} | fields)


def with_encoder(fields: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> Fleet:
    """Return a router over a mixed replica `m` and an encode replica `e`."""
    return fleet_of({"m": picture_profile(**fields or {}), "e": encoder_profile()}, **config or {})


def choose(fleet: Fleet, rows: tuple[int, ...] = (200, 200, 200), num_text: int = 100, name: str = "r") -> Placement:
    return fleet.choose(picture_query(with_pictures(name, rows, num_text)), 0.0)


# -- seconds of a request's own pictures -------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_ttft_of_pictures_bounds_the_schedulers_own_prediction(rng: random.Random) -> None:
    """As in test_predict.py; pictures of waiting prompts are in the backlog, and the cached prefix may cover some."""
    replica = Replica(picture_profile(admission="queue"))
    before = with_pictures("before", (100, 37), 20)
    if rng.random() < 0.5:
        replica.add("before", before.prompt_token_ids, max_tokens=1, items=before.items)
        replica.step_until_token("before")
    for number in range(rng.randrange(4)):
        other = with_pictures(f"{number}", [rng.choice([40, 300])] * rng.randrange(4), rng.choice([10, 1000]))
        replica.add(other.id, other.prompt_token_ids, rng.choice(CLASSES), 50, items=other.items)
        for _ in range(rng.randrange(3)):
            replica.step()
    fleet = fleet_of({"a": replica.profile})
    replica.scheduler.encoding.clear()  # routers know of no embeddings in memory
    replica.report(fleet, "a", 0.0)
    slo_class = rng.choice(CLASSES)
    submission = with_pictures("before", (100, 37, 300)[: rng.randrange(1, 4)], 30, slo_class=slo_class)
    request = Request.from_submission(submission, 0.0)
    request.priority = CLASSES.index(slo_class)
    exact, own = replica.scheduler.forecast.ttft(request)
    found = fleet.choose(picture_query(submission), 0.0)
    cached = found.cached_tokens
    if cached:  # the scheduler looks for a prefix only when it admits the request
        request.num_computed_tokens = cached
        request.expected_cached_tokens = cached
        exact, own = replica.scheduler.forecast.ttft(request)
    peers = [other for other in replica.scheduler.table.prefills() if other.priority == request.priority]
    slack = sum(max(own - replica.scheduler.forecast.prefill_seconds(other), 0.0) for other in peers)
    assert exact <= found.predicted_ttft + 1e-9
    assert found.predicted_ttft <= exact + slack / 0.05 + 1e-9
    assert found.prefill_seconds == pytest.approx(own)


def test_equal_pictures_of_a_prompt_count_once_and_cached_ones_not_at_all() -> None:
    fleet = fleet_of({"a": picture_profile()})
    items = [Item(start, 64, 64, "image", content.ljust(16)) for start, content in ((0, b"x"), (64, b"y"), (128, b"x"))]
    submission = Submission("r", [9] * 200, items=items)
    asked = picture_query(submission)
    text = COST.prefill_seconds(0, 200, 512)
    assert fleet.choose(asked, 0.0).prefill_seconds == pytest.approx(text + ENCODER.seconds(items[:2]))
    fleet.hear_pages("a", PageChanges("first life", 1, asked.page_hashes[: 128 // PAGE_SIZE]))
    found = fleet.choose(asked, 0.0)
    assert found.cached_tokens == 128
    assert found.prefill_seconds == pytest.approx(COST.prefill_seconds(128, 200, 512) + ENCODER.seconds(items[:1]))


def test_groups_of_frames_of_a_video_cost_what_pictures_of_their_rows_cost() -> None:
    """As `EncoderCost` says, here and on an encode replica."""
    video = {"video_grid_thw": np.array([[8, 16, 16]])}
    items = [Item(0, 512, 512, "video", b"v".ljust(16), video), Item(512, 64, 64, "image", b"p".ljust(16))]
    asked = picture_query(Submission("r", [9] * 700, items=items))
    found = fleet_of({"a": picture_profile()}).choose(asked, 0.0)
    text = COST.prefill_seconds(0, 700, 512)
    assert found.prefill_seconds == pytest.approx(text + ENCODER.seconds(items))
    assert ENCODER.seconds(items) < ENCODER.seconds([replace(items[0], tensors={}), items[1]]) * 0.8
    assert asked.encoding is not None
    assert [parts for _, _, parts in asked.encoding.items] == [8, 1]


def test_reported_encoder_cost_takes_the_place_of_the_profiles() -> None:
    fleet = fleet_of({"a": picture_profile()})
    text = COST.prefill_seconds(0, 300, 512)
    assert choose(fleet, (200,)).prefill_seconds == pytest.approx(text + ENCODER.base + ENCODER.added_seconds(200))
    learnt = EncoderCost(base=0.5, per_row=1e-3, per_square=0.0)
    fleet.hear("a", live(2, encoder_cost=(0.5, 1e-3, 0.0)), 0.0)
    assert choose(fleet, (200,)).prefill_seconds == pytest.approx(text + learnt.base + learnt.added_seconds(200))


def test_request_with_pictures_goes_where_they_are_encoded_sooner() -> None:
    slow = EncoderCost(base=0.0, per_row=1e-3)
    fleet = fleet_of({"a": picture_profile(encoder_cost=slow), "b": picture_profile(slowness=1.2)})
    assert fleet.choose(query("text", 700), 0.0).decode == "a"
    assert choose(fleet).decode == "b"


def test_pictures_make_streams_late_where_one_takes_longer_than_their_promise() -> None:
    fleet = fleet_of({"a": picture_profile()})
    fleet.hear("a", live(2, **STREAMS), 0.0)
    small, large = (
        fleet.choose(picture_query(with_pictures("r", (rows,) * 2, 20, slo_class="interactive")), 0.0).late
        for rows in (50, 600)
    )
    assert small == 0
    assert large > 0  # 97 ms each, twice the TPOT of interactive streams


# -- encode replicas ---------------------------------------------------------------------------------------------------


def test_encode_replica_computes_no_prompt_and_no_output() -> None:
    fleet = fleet_of({"e": encoder_profile()})
    with pytest.raises(LookupError):
        fleet.choose(query("text", 40), 0.0)
    with pytest.raises(LookupError):
        choose(fleet)
    fleet = fleet_of(
        {"m": picture_profile(slowness=50.0, admission="queue"), "e": encoder_profile()}, shipping="always"
    )
    for number in range(20):
        chosen = place(fleet, query(f"{number}", 500))
        assert (chosen.decode, chosen.prefill, chosen.encoder) == ("m", None, None)


def test_idle_replica_encodes_its_picture_and_one_beside_streams_gets_embeddings() -> None:
    """An idle one gains from an encode replica only where both work at the same time: several pictures."""
    fleet = with_encoder()
    assert choose(fleet, (200,)).encoder is None
    fleet.hear("m", live(2, **STREAMS), 0.0)
    chosen = choose(fleet)
    assert (chosen.decode, chosen.encoder, chosen.reason) == ("m", "e", "local encoder")
    assert chosen.late == 0
    assert chosen.encoder_seconds == pytest.approx(
        encoder_profile().cost.prefill_seconds(0, LEG_TOKENS, 512) + ENCODER.base + 3 * ENCODER.added_seconds(200)
    )
    fleet.hear("e", live(2, prompts=(Prompts(0, 5, 4, 4000, 9.0),)), 0.0)
    assert choose(fleet).encoder is None


@pytest.mark.parametrize("slowness", [1.0, 3.0])
def test_ttft_with_an_encode_replica_waits_for_rows_and_then_computes_what_needs_them(slowness: float) -> None:
    """A picture takes 24 ms, and so a step of its own, with which all its pages leave."""
    first_replica = picture_profile(slowness=slowness)
    fleet, cost = fleet_of({"m": first_replica, "e": encoder_profile()}, shipping="always"), first_replica.cost
    chosen = choose(fleet, (200, 200, 200), 10)
    rows = encoder_profile().cost.prefill_seconds(0, LEG_TOKENS, 512)
    rows += ENCODER.base + 3 * ENCODER.added_seconds(200)
    travel = HANDOVER_S + (LEG_TOKENS / PAGE_SIZE * 50_000) / 1e9 * (512 / LEG_TOKENS)  # of the last chunk, at most
    first = rows * 200 / LEG_TOKENS + HANDOVER_S + cost.prefill_seconds(0, 610, 512)
    last = rows + travel + cost.prefill_seconds(400, 610, 512)
    assert (first > last) is (slowness == 3.0)
    assert chosen.predicted_ttft == pytest.approx(max(first, last))
    assert chosen.encoder_seconds == pytest.approx(rows)
    assert chosen.prefill_seconds == pytest.approx(cost.prefill_seconds(0, 610, 512))
    fleet.hear("m", live(2, prompts=(Prompts(0, 6, 1, 9000, 5.0),)), 0.0)  # the rows are there before its turn
    assert choose(fleet).predicted_ttft == pytest.approx(5.0 + cost.prefill_seconds(0, 700, 512))


@pytest.mark.parametrize(
    "fields", [{"rows_peer": b""}, {"page_size": 32}], ids=["takes no embeddings", "other page size"]
)
def test_replica_that_cannot_take_embeddings_encodes_itself(fields: dict[str, Any]) -> None:
    for config in ({}, {"shipping": "always"}, {"policy": "least-requests"}):
        fleet = with_encoder(fields, config)
        fleet.hear("m", live(2, **STREAMS), 0.0)
        assert choose(fleet).encoder is None


def test_slow_network_keeps_pictures_where_their_prompt_is() -> None:
    for rate, expected in ((1e9, "e"), (1e6, None)):
        fleet = fleet_of({"m": picture_profile(), "e": encoder_profile(bytes_per_second=rate)})
        fleet.hear("m", live(2, **STREAMS), 0.0)
        assert choose(fleet).encoder == expected


def test_prompt_whose_cached_prefix_covers_all_pictures_needs_no_encode_replica() -> None:
    fleet = with_encoder(config={"shipping": "always"})
    asked = picture_query(with_pictures("r", (200, 200), 100))
    assert fleet.choose(asked, 0.0).encoder == "e"
    fleet.hear_pages("m", PageChanges("first life", 1, asked.page_hashes[: 400 // PAGE_SIZE]))
    found = fleet.choose(asked, 0.0)
    assert (found.encoder, found.cached_tokens) == (None, 400)


def test_pictures_go_to_the_encode_replica_that_has_their_embeddings() -> None:
    fleet = fleet_of(
        {"m": picture_profile(), **{name: encoder_profile() for name in ("e1", "e2", "e3")}}, shipping="always"
    )
    submission = with_pictures("r", (200, 200), 10)
    leg = encoding_leg(submission, PAGE_SIZE)
    hashes = hash_pages(leg.prompt_token_ids, PAGE_SIZE, items=leg.items)
    for name in ("e3", "e2"):
        fleet.leave("e1")
        fleet.join(name, encoder_profile(), 0.0)
        fleet.hear(name, live(), 0.0)
        fleet.hear_pages(name, PageChanges("first life", 1, hashes))
        found = fleet.choose(picture_query(submission), 0.0, exclude=["e3"] if name == "e2" else [])
        assert (found.encoder, found.cached_rows) == (name, 2 * 208), "the last picture too"


def test_leg_of_an_encode_replica_is_its_backlog_until_it_is_settled() -> None:
    fleet = with_encoder(config={"shipping": "always"})
    before = choose(fleet, name="other")
    submission = with_pictures("r", (200, 200, 200), 100)
    placement = place(fleet, picture_query(submission))
    assert placement.encoder == "e"
    assert fleet.num_booked("e") == fleet.num_booked("m") == 1
    after = choose(fleet, name="other")
    assert after.predicted_ttft == pytest.approx(before.predicted_ttft + placement.encoder_seconds)
    replica = Replica(encoder_profile())
    sequence = replica.add_leg(submission)
    fleet.taken("r", "e", sequence)
    replica.report(fleet, "e", 0.0)  # what it reports is what was booked
    assert choose(fleet, name="other").predicted_ttft == pytest.approx(after.predicted_ttft)
    fleet.settle("r")
    fleet.hear("e", live(9), 0.0)
    assert choose(fleet, name="other") == before
    assert fleet.num_booked("e") == fleet.num_booked("m") == 0
    assert len(fleet.prefixes) == 0


def test_silent_encode_replica_is_as_busy_as_the_busiest_encode_replica() -> None:
    fleet = fleet_of({"m": picture_profile(), "e1": encoder_profile(), "e2": encoder_profile()}, shipping="always")
    fleet.hear("m", live(2, prompts=(Prompts(0, 6, 1, 9000, 50.0),)), 10.0)
    fleet.hear("e2", live(2, prompts=(Prompts(1, 4, 1, 600, 1.0),)), 10.0)
    fleet.table.refresh(10.0)
    backlogs = {
        name: fleet.table.loads.groups[0, 1, :, :, fleet.table.by_name[name].slot].sum() for name in ("e1", "e2")
    }
    assert backlogs == pytest.approx({"e1": 1.0, "e2": 1.0})


@pytest.mark.parametrize(("shipping", "expected"), [("always", {"e1", "e2"}), ("never", {None})])
@pytest.mark.parametrize("policy", ["least-requests", "round-robin"])
def test_other_policies_use_encode_replicas_in_turn(policy: str, shipping: str, expected: set[str | None]) -> None:
    profiles = {"m": picture_profile(), "e1": encoder_profile(), "e2": encoder_profile()}
    fleet = fleet_of(profiles, policy=policy, shipping=shipping)
    chosen = [place(fleet, picture_query(with_pictures(f"{number}", (20,)))).encoder for number in range(10)]
    assert set(chosen) == expected
    assert all(one != other for one, other in pairwise(chosen)) or expected == {None}


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_placement_costs_no_more_than_with_any_one_encode_replica(rng: random.Random) -> None:
    """All replicas compute alike, so that the least sum of seconds is the least TTFT and work."""
    names = [f"e{number}" for number in range(rng.randrange(1, 5))]
    profiles = {
        name: encoder_profile(rng.choice([1.0, 2.0]), bytes_per_second=rng.choice([1e7, 1e9])) for name in names
    }
    profiles |= {f"m{number}": picture_profile(admission="queue") for number in range(rng.randrange(1, 4))}
    fleet = fleet_of(profiles)
    for name in profiles:
        waiting = (Prompts(rng.randrange(3), 4, 2, 1000, rng.choice([0.05, 0.5])),) if rng.random() < 0.5 else ()
        streams = STREAMS if name.startswith("m") and rng.random() < 0.5 else {}
        fleet.hear(name, live(2, prompts=waiting, **streams), 0.0)
    asked = picture_query(with_pictures("r", [rng.choice([30, 200])] * rng.randrange(1, 5), rng.choice([20, 800])))

    def cost(found: Placement) -> float:
        slo = fleet.classes[1]
        return slo.weight * found.predicted_ttft + found.prefill_seconds + found.encoder_seconds + 100 * found.late

    best = cost(fleet.choose(asked, 0.0))
    others = [[other for other in names if other != name] for name in names] + [names]
    single = [cost(fleet.choose(asked, 0.0, exclude=left_out)) for left_out in others]
    assert best <= 1.05 * min(single) + 1e-9  # ties are spread over nearly equal replicas
    assert np.isfinite(best)
