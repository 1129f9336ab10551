"""Simulated replicas that die: requests go on elsewhere, and everything that begins ends."""

from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.cluster.bench.workloads import Job, Segment
from tests.cluster.simulate.small_fleets import (
    Broken,
    assert_all_ended,
    assert_same_at_once_and_in_turn,
    failures_of,
    fleet,
    job,
    play,
    profile,
    times,
)

requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # of which prefix
        st.sampled_from([1, 16, 40, 300, 900]),
        st.sampled_from([1, 2, 17, 60]),
        st.floats(0, 3),
        st.sampled_from(["interactive", "standard", "batch"]),
    ),
    min_size=1,
    max_size=25,
)
failures = st.lists(
    st.tuples(st.floats(0, 4), st.sampled_from(["kill", "kill", "add"]), st.integers(0, 1), st.integers(0, 2)),
    max_size=4,
)


def test_request_of_a_dead_replica_goes_on_elsewhere_after_its_tokens() -> None:
    """mixed/1 dies between a's third token and its fourth: the other computes the prompt and three tokens again."""
    decode = 1 / 64 + 1 / 1024
    first = 1 / 64 + 64 / 1024
    dies = first + 2.5 * decode
    failures = [{"at": dies, "kill": "mixed/1"}, {"at": dies + 0.01, "kill": "mixed/1"}]
    pair = fleet({"replicas": 2}, failures=failures, router={"policy": "round-robin"})
    jobs = [job("a", 64, 5)]
    simulation, outcome = play(pair, jobs)
    again = dies + 1 / 64 + 67 / 1024
    assert times(outcome) == [[first, first + decode, first + 2 * decode, again, again + decode]]
    assert outcome.replicas[1].until == dies
    assert outcome.replicas[1].busy_s == dies
    assert_all_ended(simulation, outcome, jobs)


def test_decode_replica_computes_only_the_missing_pages_when_prefill_replica_dies() -> None:
    """After the second of three chunks: the first is there, 256 tokens; the other 512 are computed by decode."""
    failures = [{"at": 2 * 17 / 64 + 1 / 1024, "kill": "prefill/0"}]
    pools = fleet({"name": "prefill"}, {"name": "decode"}, failures=failures, router={"shipping": "always"})
    jobs = [job("a", 768, 4)]
    simulation, outcome = play(pools, jobs)
    assert outcome.replicas[1].num_prefilled == 512
    assert_all_ended(simulation, outcome, jobs)
    assert outcome.samples[0].ok


def test_request_without_a_replica_fails() -> None:
    jobs = [job("a", 64, 50), job("b", 64, 5, due=3.0), job("c", 64, 5, due=6.0)]
    lonely = fleet(failures=[{"at": 0.5, "kill": "mixed/0"}, {"at": 5.0, "add": "mixed"}])
    simulation, outcome = play(lonely, jobs)
    none_is_up = "no replica is up; the model may still be loading"
    assert [sample.error for sample in outcome.samples] == [none_is_up, none_is_up, None]
    assert [replica.name for replica in outcome.replicas] == ["mixed/0", "mixed/1"]
    assert_all_ended(simulation, outcome, jobs)


@settings(max_examples=60, deadline=None)
@given(
    requests,
    failures,
    st.sampled_from([("mixed",), ("prefill", "decode"), ("mixed", "decode"), ("prefill", "mixed")]),
    st.sampled_from(["auto", "always", "never"]),
    st.sampled_from(["seconds", "round-robin", "prefix-affinity", "block-cost"]),
    st.sampled_from(["adaptive", "fixed"]),
    st.sampled_from(["queue", "reject"]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.004]),
    st.integers(130, 200),
)
def test_all_requests_end_and_steps_at_once_equal_steps_in_turn(
    plan: list[tuple[int, int, int, float, str]],
    broken: Broken,
    names: tuple[str, ...],
    shipping: str,
    policy: str,
    chunks: str,
    admission: str,
    noise: float,
    latency: float,
    num_pages: int,
) -> None:
    """Over random loads, pools, policies and deaths, in pools of pages so small that streams are preempted."""
    jobs = [
        Job((Segment(f"prefix/{prefix}", 32), Segment(f"{n}", prompt)), output, due, service_tier=tier)
        for n, (prefix, prompt, output, due, tier) in enumerate(sorted(plan, key=lambda request: request[3]))
    ]
    shared = profile(chunk_policy=chunks, admission=admission, num_pages=num_pages, max_num_seqs=6)
    simulated = fleet(
        *({"name": name, "replicas": 2, "profile": shared} for name in names),
        router={"policy": policy, "shipping": shipping},
        noise=noise,
        latency_s=latency,
        routers=2,
        failures=failures_of(broken, names),
    )
    assert_same_at_once_and_in_turn(simulated, jobs)
