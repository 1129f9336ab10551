"""Simulated encode replicas: rows take their time to encode and on the network, and a loss costs time and no more."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.cluster.bench.pictures import DrawnPicture
from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate.fleet import SimulatedFleet
from crossdock.cluster.simulate.simulation import Outcome
from crossdock.cluster.simulate.study import ratios
from tests.cluster.simulate.small_fleets import (
    ENCODER,
    Broken,
    assert_all_ended,
    assert_same_at_once_and_in_turn,
    encoder_profile,
    failures_of,
    fleet,
    job,
    play,
    profile,
    times,
)

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}
STEP, TEXT, ROWS = 1 / 64, 1 / 1024, 64 / 4096  # a step, a token of a prompt, and the encoding of a picture


def with_encoders(*others: dict[str, Any], encode: int = 1, shipping: str = "always", **fields: Any) -> SimulatedFleet:
    """Return pools that take pictures, one mixed replica unless `others` say more, beside encode replicas."""
    computing = [{"profile": profile(encoder_cost=ENCODER)} | each for each in others or ({},)]
    encoders = {"name": "encode", "replicas": encode, "profile": encoder_profile()}
    return fleet(*computing, encoders, router={"shipping": shipping}, **fields)


def num_encoded(outcome: Outcome) -> dict[str, int]:
    """Return the pictures that each replica has encoded."""
    encoded = {}
    for replica in outcome.replicas:
        encoded[replica.name] = replica.scheduler.encoding.totals.num_encoded
    return encoded


def test_prompt_is_computed_as_its_pictures_arrive() -> None:
    """Each has a step, after which 4 pages of 1 KiB travel at 1 MiB/s. The second travels beside the first's chunk."""
    simulated = with_encoders()
    jobs = [job("a", 64, 3, pictures=["x", "y"])]
    simulation, outcome = play(simulated, jobs)
    arrived = STEP + ROWS + 4 / 1024
    first = arrived + (STEP + 64 * TEXT) + (STEP + 128 * TEXT)
    assert times(outcome) == [[first, first + STEP + TEXT, first + 2 * (STEP + TEXT)]]
    assert num_encoded(outcome) == {"mixed/0": 0, "encode/0": 2}
    assert [placed.reason for placed in outcome.placed] == ["local encoder"]
    assert_all_ended(simulation, outcome, jobs)


def test_text_before_the_pictures_has_arrived_is_not_waited_for() -> None:
    """Requests of text, and the streams, go on while another waits for rows."""
    simulated = with_encoders()
    jobs = [job("a", 64, 2, pictures=["x"]), job("b", 64, 2)]
    simulation, outcome = play(simulated, jobs)
    assert times(outcome)[1][0] == STEP + 64 * TEXT
    assert_all_ended(simulation, outcome, jobs)


def test_pictures_are_encoded_for_a_prefill_replica_and_never_for_its_decode_replica() -> None:
    simulated = with_encoders({"name": "prefill"}, {"name": "decode"})
    jobs = [job(f"{number}", 64, 4, due=number / 16, pictures=["x", f"{number}"]) for number in range(6)]
    simulation, outcome = play(simulated, jobs)
    encoded = num_encoded(outcome)
    assert encoded["prefill/0"] == encoded["decode/0"] == 0
    assert encoded["encode/0"] == 7, "x is encoded once"
    assert all(placed.reason == "shipped encoder" for placed in outcome.placed)
    assert_all_ended(simulation, outcome, jobs)


@pytest.mark.parametrize(
    ("at", "num_lost"),
    [(0.25 * STEP, 2), (STEP + ROWS, 2), (STEP + ROWS + 2 / 1024, 2), (1.5 * (STEP + ROWS), 1), (1.0, 0)],
    ids=["not encoded", "encoded", "on its way", "one has arrived", "both have arrived"],
)
def test_picture_is_encoded_by_its_own_replica_after_the_death_of_the_encode_replica(at: float, num_lost: int) -> None:
    simulated = with_encoders(failures=[{"at": at, "kill": "encode/0"}])
    jobs = [job("a", 64, 3, pictures=["x", "y"]), job("b", 64, 3, due=2.0, pictures=["z"])]
    simulation, outcome = play(simulated, jobs)
    assert all(sample.ok for sample in outcome.samples)
    assert num_encoded(outcome)["mixed/0"] == num_lost + 1
    assert times(outcome)[1][0] == pytest.approx(2.0 + STEP + 128 * TEXT + ROWS)
    assert_all_ended(simulation, outcome, jobs)


def test_request_without_landing_pages_encodes_its_picture_itself() -> None:
    small = profile(encoder_cost=ENCODER, encoder_rows=64)
    simulated = with_encoders({"profile": small})
    jobs = [job("a", 64, 3, pictures=["x", "y"])]  # 128 rows
    simulation, outcome = play(simulated, jobs)
    assert num_encoded(outcome)["mixed/0"] == 2
    assert_all_ended(simulation, outcome, jobs)


def test_rows_that_another_request_has_brought_are_not_waited_for() -> None:
    """Two requests with one picture, on a slow network: those of the second are refused on their way."""
    slow = {"bytes_per_second": 16 * 1024.0}
    simulated = fleet(
        {"profile": profile(encoder_cost=ENCODER, **slow)},
        {"name": "encode", "profile": encoder_profile(**slow)},
        router={"shipping": "always"},
    )
    jobs = [job("a", 1, 3, pictures=["a", "x"]), job("b", 700, 3, pictures=["x"])]
    simulation, outcome = play(simulated, jobs)
    assert num_encoded(outcome) == {"mixed/0": 0, "encode/0": 2}
    assert_all_ended(simulation, outcome, jobs)


def test_replica_of_several_ranks_takes_embeddings() -> None:
    simulated = with_encoders({"profile": profile(encoder_cost=ENCODER, tensor_parallel_size=2)})
    _, outcome = play(simulated, [job("a", 64, 3, pictures=["x"])])
    assert num_encoded(outcome) == {"mixed/0": 0, "encode/0": 1}


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([{"name": "encode", "profile": encoder_profile()}], "all have the role 'encode'"),
        (
            [{"name": "prefill", "profile": profile()}, {"name": "encode", "profile": encoder_profile()}],
            "all have the role 'prefill' or 'encode'",
        ),
        ([{"name": "encode", "profile": profile()}, {"name": "mixed"}], "has the role 'encode' and the profile"),
        ([{"name": "mixed", "profile": encoder_profile()}], "of a replica of role 'encode'"),
        (
            [{"name": "mixed"}, {"name": "encode", "profile": encoder_profile(page_size=32)}],
            "page_size must be the same",
        ),
        ([{"name": "mixed"}, {"name": "encode", "profile": encoder_profile(), "max_replicas": 2}], "no scaler changes"),
        (
            [{"name": "mixed"}, {"name": "encode", "profile": encoder_profile(), "speculative_config": NGRAM}],
            "make no tokens",
        ),
    ],
)
def test_pools_that_do_not_fit_together_are_refused(pools: list[dict[str, Any]], message: str) -> None:
    if message.startswith("of a replica"):
        pools = [{**pools[0], "role": "mixed"}]
    with pytest.raises(ValueError, match=message):
        fleet(*pools)


def test_encode_replicas_are_not_split_between_roles() -> None:
    with pytest.raises(ValueError, match="sweep: replicas of role encode"):
        list(ratios(with_encoders()))


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # of which prefix
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from([2, 5, 8])), max_size=3),  # (name, side) of pictures
        st.sampled_from([1, 16, 40, 300]),
        st.sampled_from([1, 2, 17, 60]),
        st.floats(0, 3),
        st.sampled_from(["interactive", "standard", "batch"]),
    ),
    min_size=1,
    max_size=20,
)
failures = st.lists(
    st.tuples(st.floats(0, 4), st.sampled_from(["kill", "kill", "add"]), st.integers(0, 2), st.integers(0, 2)),
    max_size=4,
)
COMPUTING = [("mixed",), ("prefill", "decode"), ("mixed", "decode"), ("prefill", "mixed")]


@settings(max_examples=80, deadline=None)
@given(st.data(), requests, failures, st.sampled_from(COMPUTING), st.booleans())
def test_all_requests_end_and_steps_at_once_equal_steps_in_turn(
    data: st.DataObject,
    plan: list[tuple[int, list[tuple[int, int]], int, int, float, str]],
    broken: Broken,
    computing: tuple[str, ...],
    has_encoders: bool,
) -> None:
    """Over random loads, pools, policies and deaths, with so little room for pages that streams are preempted."""
    jobs = [
        Job(
            (Segment(f"prefix/{prefix}", 32), Segment(f"{n}", prompt)),
            *(output, due),
            service_tier=tier,
            pictures=tuple(DrawnPicture(f"{name}", side * 28) for name, side in pictures),
        )
        for n, (prefix, pictures, prompt, output, due, tier) in enumerate(sorted(plan, key=lambda request: request[4]))
    ]
    shared: dict[str, Any] = {
        "chunk_policy": data.draw(st.sampled_from(["adaptive", "fixed"])),
        "admission": data.draw(st.sampled_from(["queue", "reject"])),
        "num_pages": data.draw(st.integers(40, 120)),
        "encoder_rows": data.draw(st.sampled_from([64, 96, 400])),
        "max_num_seqs": 6,
        "max_model_len": 600,
    }
    pools = [{"name": name, "replicas": 2, "profile": profile(encoder_cost=ENCODER, **shared)} for name in computing]
    if has_encoders:
        pools.append({"name": "encode", "replicas": 2, "profile": encoder_profile(**shared)})
    policies = ["seconds", "round-robin", "prefix-affinity", "block-cost"]
    router = {
        "policy": data.draw(st.sampled_from(policies)),
        "shipping": data.draw(st.sampled_from(["auto", "always", "never"])),
    }
    simulated = fleet(
        *pools,
        router=router,
        noise=data.draw(st.sampled_from([0.0, 0.2])),
        latency_s=data.draw(st.sampled_from([0.0, 0.004])),
        routers=2,
        failures=failures_of(broken, [pool["name"] for pool in pools]),
    )
    assert_same_at_once_and_in_turn(simulated, jobs)
