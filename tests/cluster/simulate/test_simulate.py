"""`crossdock simulate`: schedules worked out by hand, everything that begins ends, and the same seed gives the same."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from crossdock.cluster import cli
from crossdock.cluster.bench.metrics import DEFAULT_TARGETS
from crossdock.cluster.bench.workloads import Job, Segment, read_trace
from crossdock.cluster.simulate import report
from crossdock.cluster.simulate.fleet import SimulatedFleet, describe, load_fleet
from crossdock.cluster.simulate.presets import GPUS, MODELS, preset
from crossdock.cluster.simulate.replica import Noise
from crossdock.cluster.simulate.simulation import Outcome, Simulation, token_ids
from crossdock.cluster.simulate.study import Estimate, ratios
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.pages import hash_pages
from crossdock.workers.schedule.slo import SloClass

# Exact in binary, so that sums come out even: 1/64 s and a 1/1024 s per prompt token and per stream.
COST = StepCost(base=1 / 64, per_prefill_token=1 / 1024, per_decode=1 / 1024)
CLASSES = (
    SloClass(name="interactive", ttft_s=1.0, tpot_s=0.05, weight=4.0),
    SloClass(name="standard", ttft_s=10.0, tpot_s=0.1),
    SloClass(name="batch", ttft_s=600.0, tpot_s=2.0),
)


def profile(**changes: Any) -> SchedulingProfile:
    plain = {
        "max_model_len": 2048,
        "vocab_size": 1000,
        "page_size": 16,
        "num_pages": 512,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "slo_classes": CLASSES,
        "chunk_policy": "fixed",
        "min_chunk_tokens": 32,
        "admission": "queue",
        "compatibility": "one",
        "page_bytes": 16 * 1024,
        "bytes_per_second": 1024 * 1024.0,
        "cost": COST,
    }
    return SchedulingProfile.model_validate(plain | changes)


def fleet(*pools: dict[str, Any], **settings: Any) -> SimulatedFleet:
    plain = {"name": "mixed", "replicas": 1, "profile": profile()}
    its = [plain | pool for pool in pools] or [plain]
    return describe({"pools": its, "latency_s": 0.0, "publish_s": 0.05, **settings})


def job(name: str, prompt: int, output: int, due: float = 0.0, tier: str = "standard") -> Job:
    return Job((Segment(name, prompt),), output, due, service_tier=tier)


def play(fleet: SimulatedFleet, jobs: Sequence[Job], seed: int = 0, at_once: bool = True) -> tuple[Simulation, Outcome]:
    simulation = Simulation(fleet, seed, at_once)
    return simulation, simulation.run(jobs)


def times(outcome: Outcome) -> list[list[float]]:
    return [list(sample.times) for sample in outcome.samples]


def assert_all_is_well(simulation: Simulation, outcome: Outcome, jobs: Sequence[Job]) -> None:
    """Every request ended once, with all its tokens or an error; no page is held by anyone."""
    assert len(outcome.samples) == len(jobs)
    assert not simulation.requests
    for sample, each in zip(outcome.samples, jobs, strict=True):
        assert sample.sent == each.due
        assert sample.ended >= sample.sent
        assert sample.error != "it never ended"
        assert len(sample.counts) == len(sample.times)
        assert list(sample.times) == sorted(sample.times)
        if sample.error is None:
            assert sample.output_tokens == each.output_tokens
    for replica in outcome.replicas:
        if replica.until is None:
            counts = replica.scheduler.pages.counts()
            assert counts.owned == counts.quarantined == 0
            assert counts.free + counts.cached == counts.total
            assert not replica.scheduler.requests()
    for router in simulation.routers:
        assert all(router.num_booked(name) == 0 for name in simulation.replicas)


# -- worked out by hand ----------------------------------------------------------------------------------------------


def test_one_request() -> None:
    """A step of 100 prompt tokens, then one per token, each of one stream."""
    _, outcome = play(fleet(), [job("a", 100, 4, due=2.0)])
    first = 2 + 1 / 64 + 100 / 1024
    assert times(outcome) == [[first, *(first + n * (1 / 64 + 1 / 1024) for n in (1, 2, 3))]]
    assert outcome.duration == outcome.samples[0].ended == outcome.samples[0].times[-1]
    assert outcome.replicas[0].busy_s == outcome.duration - 2


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    """b comes in the middle of a's third step. The next step carries both: a's decode and b's prompt."""
    decode = 1 / 64 + 1 / 1024
    first = 1 / 64 + 16 / 1024
    jobs = [job("a", 16, 6), job("b", 32, 2, due=first + 1.5 * decode)]
    _, outcome = play(fleet(), jobs)
    both = first + 2 * decode + 1 / 64 + (1 + 32) / 1024
    a = [first, first + decode, first + 2 * decode, both, both + 1 / 64 + 2 / 1024]
    assert times(outcome)[0] == [*a, a[-1] + decode]
    assert times(outcome)[1] == [both, both + 1 / 64 + 2 / 1024]


def test_a_long_prompt_in_chunks_of_the_budget() -> None:
    _, outcome = play(fleet(), [job("a", 600, 1)])
    assert times(outcome) == [[3 / 64 + 600 / 1024]]  # 256 + 256 + 88
    assert outcome.replicas[0].num_steps == 3
    assert outcome.replicas[0].num_prefilled == 600


def test_a_prefix_is_computed_once() -> None:
    prefix = Segment("prefix", 64)
    jobs = [Job((prefix, Segment(name, 16)), 1, due) for name, due in (("a", 0.0), ("b", 1.0))]
    _, outcome = play(fleet(), jobs)
    assert outcome.samples[0].ttft == 1 / 64 + 80 / 1024
    assert outcome.samples[1].ttft == 1 / 64 + 16 / 1024
    off = fleet({"enable_prefix_caching": False})
    assert play(off, jobs)[1].samples[1].ttft == 1 / 64 + 80 / 1024


def test_the_chunks_of_a_shipped_prompt_travel_while_the_next_is_computed() -> None:
    """A page takes 1/64 s to travel, 16 pages 1/4 s; a step of 256 tokens 17/64 s. The second chunk's pages leave when
    it is done: the link is free again by then. The token after the first needs all of them."""
    pools = {"name": "prefill"}, {"name": "decode"}
    _, outcome = play(fleet(*pools, router={"shipping": "always"}), [job("a", 512, 3)])
    chunk = 17 / 64
    arrived = 2 * chunk + 1 / 4
    decode = 1 / 64 + 1 / 1024
    assert times(outcome) == [[2 * chunk, arrived + decode, arrived + 2 * decode]]
    prefill, receiver = outcome.replicas
    assert (prefill.num_prefilled, receiver.num_prefilled, receiver.num_decoded) == (512, 0, 2)
    slow = tuple({**pool, "profile": profile(bytes_per_second=512 * 1024.0)} for pool in pools)
    _, outcome = play(fleet(*slow, router={"shipping": "always"}), [job("a", 512, 3)])
    assert times(outcome)[0][1] == pytest.approx(chunk + 2 * 1 / 2 + decode), "the second waits for the first"


def test_an_output_of_one_token_is_not_shipped() -> None:
    pools = {"name": "prefill"}, {"name": "decode"}
    jobs = [job("a", 512, 1), job("b", 512, 1, due=0.1)]
    simulation, outcome = play(fleet(*pools, router={"shipping": "always"}), jobs)
    assert_all_is_well(simulation, outcome, jobs)
    assert outcome.replicas[1].num_steps == 0


def test_latency_is_added_to_the_first_token_and_to_nothing_else() -> None:
    _, near = play(fleet(), [job("a", 64, 3)])
    _, far = play(fleet(latency_s=0.25), [job("a", 64, 3)])
    assert times(far) == [[time + 0.25 for time in times(near)[0]]]


# -- failures --------------------------------------------------------------------------------------------------------


def test_who_was_on_a_dead_replica_goes_on_elsewhere_after_the_tokens_it_has() -> None:
    """mixed/1 dies between a's third token and its fourth: the other computes the prompt and three tokens again."""
    decode = 1 / 64 + 1 / 1024
    first = 1 / 64 + 64 / 1024
    dies = first + 2.5 * decode
    failures = [{"at": dies, "kill": "mixed/1"}, {"at": dies + 0.01, "kill": "mixed/1"}]
    it = fleet({"replicas": 2}, failures=failures, router={"policy": "round-robin"})
    jobs = [job("a", 64, 5)]
    simulation, outcome = play(it, jobs)
    again = dies + 1 / 64 + 67 / 1024
    assert times(outcome) == [[first, first + decode, first + 2 * decode, again, again + decode]]
    assert outcome.replicas[1].until == dies
    assert outcome.replicas[1].busy_s == dies
    assert_all_is_well(simulation, outcome, jobs)


def test_decode_goes_on_from_what_had_arrived_when_prefill_dies() -> None:
    """After the second of three chunks: the first is there, 256 tokens; the other 512 are computed by decode."""
    failures = [{"at": 2 * 17 / 64 + 1 / 1024, "kill": "prefill/0"}]
    it = fleet({"name": "prefill"}, {"name": "decode"}, failures=failures, router={"shipping": "always"})
    jobs = [job("a", 768, 4)]
    simulation, outcome = play(it, jobs)
    assert outcome.replicas[1].num_prefilled == 512
    assert_all_is_well(simulation, outcome, jobs)
    assert outcome.samples[0].ok


def test_no_replica_is_left() -> None:
    jobs = [job("a", 64, 50), job("b", 64, 5, due=3.0), job("c", 64, 5, due=6.0)]
    it = fleet(failures=[{"at": 0.5, "kill": "mixed/0"}, {"at": 5.0, "add": "mixed"}])
    simulation, outcome = play(it, jobs)
    none_is_up = "no replica is up; the model may still be loading"
    assert [sample.error for sample in outcome.samples] == [none_is_up, none_is_up, None]
    assert [replica.name for replica in outcome.replicas] == ["mixed/0", "mixed/1"]
    assert_all_is_well(simulation, outcome, jobs)


# -- anything --------------------------------------------------------------------------------------------------------

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
def test_all_requests_end_and_steps_at_once_are_as_steps_in_turn(
    plan: list[tuple[int, int, int, float, str]],
    broken: list[tuple[float, str, int, int]],
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
        for n, (prefix, prompt, output, due, tier) in enumerate(sorted(plan, key=lambda it: it[3]))
    ]
    its = profile(chunk_policy=chunks, admission=admission, num_pages=num_pages, max_num_seqs=6)
    it = fleet(
        *({"name": name, "replicas": 2, "profile": its} for name in names),
        router={"policy": policy, "shipping": shipping},
        noise=noise,
        latency_s=latency,
        routers=2,
        failures=[
            {"at": at, "kill": f"{names[place % len(names)]}/{number}"}
            if what == "kill"
            else {"at": at, "add": names[place % len(names)]}
            for at, what, place, number in broken
        ],
    )
    simulation, outcome = play(it, jobs, seed=3)
    assert_all_is_well(simulation, outcome, jobs)
    _, in_turn = play(it, jobs, seed=3, at_once=False)
    assert times(in_turn) == times(outcome)
    found, same = (report.figures(each, DEFAULT_TARGETS) for each in (outcome, in_turn))
    assert json.dumps(found) == json.dumps(same)


def test_a_replica_learns_of_what_others_share_only_as_it_reports_it() -> None:
    """Siblings of one prefix, half a second apart: routed by seconds they go where it is."""
    prefix = Segment("prefix", 480)
    jobs = [Job((prefix, Segment(f"{n}", 16)), 1, n / 2) for n in range(8)]
    _, outcome = play(fleet({"replicas": 4}), jobs)
    assert sum(replica.num_prefilled for replica in outcome.replicas) == 480 + 8 * 16
    _, apart = play(fleet({"replicas": 4}, router={"policy": "round-robin"}), jobs)
    assert sum(replica.num_prefilled for replica in apart.replicas) == 4 * 480 + 8 * 16


def test_a_slow_replica_gets_what_it_can_do_in_time() -> None:
    slow = {"base": COST.base * 8, "per_prefill_token": COST.per_prefill_token * 8}
    pools = {"name": "fast"}, {"name": "slow", "profile": profile(cost=COST.model_copy(update=slow))}
    jobs = [job(f"{n}", 64, 8, n / 10) for n in range(40)]
    counts = {}
    for policy in ("seconds", "round-robin"):
        _, outcome = play(fleet(*pools, router={"policy": policy}), jobs)
        counts[policy] = {replica.name: replica.num_prefilled // 64 for replica in outcome.replicas}
    assert counts["round-robin"] == {"fast/0": 20, "slow/0": 20}
    assert counts["seconds"]["slow/0"] < 8


# -- loads -----------------------------------------------------------------------------------------------------------


def test_prompts_are_equal_where_their_segments_are() -> None:
    one = Job((Segment("x", 40), Segment("y", 24)), 1)
    other = Job((Segment("x", 33), Segment("y", 31)), 1)
    assert len(token_ids(one)) == len(token_ids(other)) == 64
    same = [a == b for a, b in zip(hash_pages(token_ids(one), 16), hash_pages(token_ids(other), 16), strict=True)]
    assert same == [True, True, False, False]
    longer = Job((Segment("x", 64),), 1)
    assert token_ids(longer)[:40] == token_ids(one)[:40]


def test_a_mooncake_trace_shares_its_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [7, 8, 9]},
        {"timestamp": 5000, "input_length": 1300, "output_length": 2, "hash_ids": [7, 8, 10]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = read_trace(path)
    simulation, outcome = play(fleet(), jobs)
    assert_all_is_well(simulation, outcome, jobs)
    assert outcome.replicas[0].num_prefilled == 1100 + 1300 - 1024


# -- profiles and fleets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_presets_reach_what_the_hardware_can_and_no_more(gpu: str, model: str) -> None:
    """A stream reads all weights for a token; a prompt multiplies by each of them."""
    tp = 8 if (gpu, model) == ("l4", "70b") else None
    if tp:
        with pytest.raises(ValueError, match="do not fit"):
            preset(f"{gpu}-{model}-tp4")
    it = preset(f"{gpu}-{model}" + (f"-tp{tp}" if tp else ""))
    weights = 2 * MODELS[model].parameters
    held = it.num_pages * it.page_bytes
    num_gpus = next(n for n in (1, 2, 4, 8) if weights + held <= n * GPUS[gpu].memory)
    assert weights / (num_gpus * GPUS[gpu].bandwidth) < it.cost.base
    assert it.cost.base < 2 * weights / (num_gpus * GPUS[gpu].bandwidth) + 0.01
    assert it.cost.per_prefill_token > weights / (num_gpus * GPUS[gpu].flops)
    assert it.max_model_len <= it.num_pages * it.page_size
    SimulatedFleet.model_validate({"pools": [{"name": "a", "profile": it}]})


def test_an_h100_with_8b_by_hand() -> None:
    """16.06 GB over 0.8 x 3.35 TB/s and 1 ms; 16.06 GFLOP a token over 0.6 x 989 TFLOP/s; 128 KiB of KV a token."""
    it = preset("h100-8b")
    assert it.cost.base == pytest.approx(5.9925e-3 + 1e-3, rel=1e-3)
    assert it.cost.per_prefill_token == pytest.approx(2.7065e-5, rel=1e-3)
    assert it.cost.per_context == pytest.approx(131072 / 2.68e12, rel=1e-6)
    assert it.page_bytes == 16 * 131072
    assert it.num_pages * it.page_bytes == pytest.approx(72e9 - 16.06e9, rel=1e-3)
    two = preset("h100-8b-tp2").cost
    assert two.base == pytest.approx(5.9925e-3 / 2 + 1e-3 + 64 * 10e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"pools": []}, "pools must have different names"),
        ({"pools": [{"name": "a", "profile": "h100-9b"}]}, "'h100-9b' is neither a file nor GPU-MODEL"),
        ({"pools": [{"name": "a", "profile": "l4-70b"}]}, "do not fit"),
        ({"pools": [{"name": "a", "profile": "none.json"}]}, "none.json: cannot be read"),
        ({"pools": [{"name": "a"}]}, "pools.0.profile: field required"),
        ({"pools": [{"name": "a", "profile": "h100-8b", "gpus": 3}]}, "pools.0.gpus: no such setting"),
        ({"pools": [{"name": "a", "profile": "h100-8b", "replicas": -1}]}, "pools.0.replicas: must be .* not -1"),
        ({"pools": [{"name": "prefill", "profile": "h100-8b"}]}, "all have the role 'prefill'"),
        ({"pools": [{"name": "a", "profile": "h100-8b", "engine": {"page_size": 32}}]}, "page_size is the profile's"),
        ({"pools": [{"name": "a", "profile": "h100-8b"}], "failures": [{"at": 1, "kill": "b/0"}]}, "no pool 'b'"),
        ({"pools": [{"name": "a", "profile": "h100-8b"}], "failures": [{"at": 1}]}, "give kill .* or add"),
        ({"pools": [{"name": "a", "profile": "h100-8b"}], "router": {"policy": "luck"}}, "router.policy: must be"),
    ],
)
def test_fleets_that_cannot_be(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe(data)


def test_a_fleet_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(profile(max_num_seqs=12).model_dump_json())
    classes = [{"name": "interactive", "ttft_s": 0.3, "tpot_s": 0.02}, {"name": "standard", "ttft_s": 3, "tpot_s": 0.1}]
    data = {
        "slo_classes": classes,
        "pools": [
            {"name": "prefill", "replicas": 2, "profile": "mine.json", "price": 3.5},
            {"name": "decode", "profile": "mine.json", "engine": {"max_num_seqs": 8, "prefill_order": "fcfs"}},
        ],
    }
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(data))
    it = load_fleet(path, noise=0.1)
    prefill, decode = it.pools
    assert [pool.role for pool in it.pools] == [pool.profile.role for pool in it.pools] == ["prefill", "decode"]
    assert (prefill.engine.max_num_seqs, decode.engine.max_num_seqs, decode.profile.max_num_seqs) == (12, 8, 8)
    assert decode.engine.prefill_order == "fcfs"
    assert prefill.profile.slo_classes == it.classes
    assert [slo.ttft_s for slo in it.classes] == [0.3, 3.0]
    assert it.noise == 0.1
    assert load_fleet(path, "mixed=3xh100-8b").pools[0].replicas == 3


def test_noise_has_its_spread_and_forgets_who_asked_when() -> None:
    noise = Noise(0.2, (1, 2))
    factors = np.array([noise.factor(step) for step in range(5000)])
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert np.log(factors).std() == pytest.approx(0.2, rel=0.05)
    assert [Noise(0.2, (1, 2)).factor(step) for step in (3000, 7, 3000)] == [factors[3000], factors[7], factors[3000]]
    assert Noise(0.2, (2, 2)).factor(0) != factors[0]
    assert noise.overrun == pytest.approx(np.quantile(factors, 0.95), rel=0.02)
    assert Noise(0.0, (1, 2)).factor(9) == Noise(0.0, (1, 2)).overrun == 1


# -- comparisons -----------------------------------------------------------------------------------------------------


def test_a_confidence_interval_is_students() -> None:
    """1, 2, 4: mean 7/3, s = 1.5275, t(0.975, 2) = 4.3027: 4.3027 x 1.5275 / sqrt(3)."""
    it = Estimate.of([1.0, 2.0, 4.0])
    assert it.mean == pytest.approx(7 / 3)
    assert it.margin == pytest.approx(3.7946, rel=1e-3)
    assert Estimate.of([5.0]).margin is None


def test_a_sweep_has_every_ratio_of_as_many_replicas() -> None:
    it = fleet({"replicas": 4})
    found = dict(ratios(it))
    assert list(found) == ["mixed 4", *(f"prefill {n} : decode {4 - n}" for n in (1, 2, 3))]
    for each in found.values():
        assert sum(pool.replicas for pool in each.pools) == 4
        assert all(pool.profile.role == pool.role for pool in each.pools)
    assert len(dict(ratios(fleet({"replicas": 100})))) == 17
    with pytest.raises(ValueError, match="sweep"):
        list(ratios(fleet()))


def test_the_best_ratio_is_found_where_it_must_be() -> None:
    """Long prompts and short outputs want prefill replicas; short prompts and long outputs want decode."""

    def best(prompt: int, output: int) -> str:
        jobs = [job(f"{n}", prompt, output, n / 8) for n in range(48)]
        waits = {}
        quick = profile(bytes_per_second=1e9)
        for name, each in ratios(fleet({"replicas": 4, "profile": quick}, router={"shipping": "always"})):
            outcome = Simulation(each).run(jobs)
            waits[name] = sum(sample.e2e for sample in outcome.samples)
        del waits["mixed 4"]
        return min(waits, key=lambda name: waits[name])

    assert best(1024, 4) == "prefill 3 : decode 1"
    assert best(32, 200) == "prefill 1 : decode 3"


# -- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["simulate", *arguments])


def test_the_command_shows_and_writes_the_same_each_time(tmp_path: Path) -> None:
    written = []
    for name in ("one.json", "two.json"):
        arguments = ("--pools", "mixed=2xh100-8b,decode=1xl4-8b", "--request-rate", "20", "--duration", "5", "--json")
        result = run(*arguments, str(tmp_path / name), "--plot", str(tmp_path / "ttft.png"), "--kill", "mixed/1@3")
        assert result.exit_code == 0, result.output
        written.append((tmp_path / name).read_text())
    assert written[0] == written[1]
    found = json.loads(written[0])
    assert found["requests"] == sum(found["placements"].values()) > 50
    assert set(found["pools"]["mixed"]["replicas"]) == {"mixed/0", "mixed/1"}
    assert found["cost"] is None
    assert "interactive: ok / refused / failed" in result.output
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_knows_prices_and_traces(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:{n:02}.0000000,{100 + n},10" for n in range(10)]
    (tmp_path / "azure.csv").write_text("\n".join(lines) + "\n")
    pools = [{"name": "mixed", "profile": "h100-8b", "price": 36.0}]
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"pools": pools}))
    files = ("--trace", str(tmp_path / "azure.csv"), "--json", str(tmp_path / "out.json"))
    result = run(str(tmp_path / "fleet.yaml"), *files, "--service-tier", "interactive")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["requests"] == 10
    assert found["cost"]["total"] == pytest.approx(found["duration_s"] * 0.01)
    assert found["cost"]["per_million_output_tokens"] == pytest.approx(found["duration_s"] * 0.01 * 1e4)
    assert list(found["classes"]) == ["interactive"]


def test_the_command_compares(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    load = ("--request-rate", "10", "--duration", "3", "--json", str(path))
    result = run("--pools", "mixed=2xh100-8b", "--policy", "seconds,round-robin", "--seeds", "2", *load)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert found["seeds"] == [0, 1]
    assert {name: len(its) for name, its in found["scores"].items()} == {"seconds": 2, "round-robin": 2}
    assert "±" in result.output
    result = run("--pools", "prefill=1xh100-8b,decode=1xh100-8b", "--shipping", "always,never", *load)
    assert result.exit_code == 0, result.output
    assert set(json.loads(path.read_text())["scores"]) == {"always", "never"}
    result = run("--pools", "mixed=3xh100-8b", "--sweep", *load)
    assert result.exit_code == 0, result.output
    assert set(json.loads(path.read_text())["scores"]) == {"mixed 3", "prefill 1 : decode 2", "prefill 2 : decode 1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a YAML file or give --pools"),
        (("--pools", "mixed=h100-8b", "--request-rate", "1"), "is not of the form NAME=COUNTxPROFILE"),
        (("--pools", "mixed=2xh100-8b"), "request_rate"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "-w", "interference"), "cannot be simulated"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "--kill", "mixed/0"), "REPLICA@SECONDS"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "--policy", "luck"), "luck"),
        (("--pools", "mixed=2xh100-8b", "--request-rate", "1", "--mix", "none"), "there is no 'none'"),
        (("none.yaml",), "cannot be read"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
