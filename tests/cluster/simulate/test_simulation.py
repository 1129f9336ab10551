"""Simulations worked out by hand, and how routers spread requests in them."""

import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crossdock.cluster.bench.pictures import DrawnPicture
from crossdock.cluster.bench.workloads import Job, Segment, read_trace
from crossdock.cluster.simulate.clock import Clock
from crossdock.cluster.simulate.device import Noise
from crossdock.cluster.simulate.requests import token_ids
from crossdock.cluster.simulate.simulation import Simulation
from crossdock.cluster.simulate.virtual_dock import VirtualNetwork
from crossdock.kvtransfer.dock_core import MAX_WRITE_BYTES
from crossdock.workers.report.presets import preset
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.page_hashes import hash_pages
from crossdock.workers.schedule.scheduler import Scheduler
from tests.cluster.simulate.small_fleets import COST, Reported, fleet, job, play, play_out, profile, times


def test_one_request_takes_a_prompt_step_and_a_step_per_token() -> None:
    """A step of 100 prompt tokens, then one per token, each of one stream."""
    outcome = play(fleet(), [job("a", 100, 4, due=2.0)])
    first = 2 + 1 / 64 + 100 / 1024
    assert times(outcome) == [[first, *(first + n * (1 / 64 + 1 / 1024) for n in (1, 2, 3))]]
    assert outcome.duration == outcome.samples[0].ended == outcome.samples[0].times[-1]
    assert outcome.replicas[0].busy_s == outcome.duration - 2


def test_request_that_comes_during_a_step_waits_for_its_end() -> None:
    """b comes in the middle of a's third step. The next step carries both: a's decode and b's prompt."""
    decode = 1 / 64 + 1 / 1024
    first = 1 / 64 + 16 / 1024
    jobs = [job("a", 16, 6), job("b", 32, 2, due=first + 1.5 * decode)]
    outcome = play(fleet(), jobs)
    both = first + 2 * decode + 1 / 64 + (1 + 32) / 1024
    a = [first, first + decode, first + 2 * decode, both, both + 1 / 64 + 2 / 1024]
    assert times(outcome)[0] == [*a, a[-1] + decode]
    assert times(outcome)[1] == [both, both + 1 / 64 + 2 / 1024]


def test_request_that_comes_during_a_step_waits_for_the_next_one_too_where_steps_begin_ahead() -> None:
    """b comes in the middle of a's third step, when the fourth has been scheduled. The fifth carries both."""
    decode = 1 / 64 + 1 / 1024
    first = 1 / 64 + 16 / 1024
    jobs = [job("a", 16, 6), job("b", 32, 2, due=first + 1.5 * decode)]
    for at_once in (True, False):
        outcome = play(fleet({"profile": profile(runs_ahead=True)}), jobs, at_once=at_once)
        both = first + 3 * decode + 1 / 64 + (1 + 32) / 1024
        ends = [first + number * decode for number in range(4)]
        assert times(outcome) == [[*ends, both, both + 1 / 64 + 2 / 1024], [both, both + 1 / 64 + 2 / 1024]]


def test_no_step_is_scheduled_for_reports_nor_behind_a_step_in_which_a_request_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """a takes 6.7 s, and is reported every second. b comes in one of its steps, with another begun behind it. The steps
    that are scheduled have the prompt of a, the prompt of b, and the first tokens after each and after b has ended."""
    begun = list[float]()
    schedule = Scheduler.schedule

    def counted(scheduler: Scheduler, now: float) -> Batch:
        begun.append(now)
        return schedule(scheduler, now)

    monkeypatch.setattr(Scheduler, "schedule", counted)
    simulation = Reported(fleet({"profile": profile(runs_ahead=True)}))
    simulation.run([job("a", 16, 400), job("b", 16, 2, due=3.0)])
    assert len(simulation.reports) > 8
    assert len(begun) == 5


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_simulation_leaves_no_cycles_so_that_requests_that_have_ended_are_freed(runs_ahead: bool) -> None:
    """Simulations do not search for cycles, so what is in one stays for ever: steps that run ahead had one each."""
    simulation = Simulation(fleet({"profile": profile(runs_ahead=runs_ahead)}))
    jobs = [job(f"{number}", 16, 8, due=number / 8) for number in range(20)]
    gc.collect()
    gc.disable()
    try:
        simulation.run(jobs)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_first_token_beside_streams_comes_when_the_router_predicts_it(runs_ahead: bool) -> None:
    """On average over where in a step the prompts come; a prompt that waits for one step more takes a third longer."""
    streams = [job(f"s{number}", 16, 900) for number in range(8)]
    prompts = [job(f"p{number}", 48, 1, due=1 + 0.313 * number) for number in range(40)]
    placed = play(fleet({"profile": profile(runs_ahead=runs_ahead)}), [*streams, *prompts]).placed[len(streams) :]
    predicted, found = (sum(each) for each in zip(*((p.predicted_ttft, p.ttft) for p in placed), strict=True))
    assert predicted == pytest.approx(found, rel=0.05)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_first_token_behind_prompts_that_no_report_has_comes_when_the_router_predicts_it(runs_ahead: bool) -> None:
    """Chats on a GPU, whose prompts take as long as two reports are apart. Shorter prompts that come later are unknown.
    A router that lets a new prompt share the step of one that is computed already errs by 13 % on average."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / 8, 200)).tolist()
    jobs = [job(f"{number}", int(rng.integers(50, 2000)), 64, due=due) for number, due in enumerate(arrivals)]
    gpu = preset("h100-8b").model_copy(update={"runs_ahead": runs_ahead})
    placed = play(fleet({"profile": gpu}), jobs).placed
    errors = [abs(each.ttft - each.predicted_ttft) for each in placed]
    assert sum(errors) < 0.1 * sum([each.ttft for each in placed])


def test_router_knows_a_prompt_of_another_router_before_the_step_that_computes_it_has_ended() -> None:
    """Both replicas have had a step. The first router sends a, the second b to the other replica, which takes longer. c
    comes to the first router: it waits for a, although a router that had not heard of b would expect no wait there."""
    ahead = {"replicas": 2, "profile": profile(runs_ahead=True)}
    steps = [job("first", 16, 1), job("second", 16, 1)]
    jobs = [job("a", 128, 1, due=1), job("b", 256, 1, due=1 + 1 / 64), job("c", 16, 1, due=1 + 2 / 64)]
    outcome = play(fleet(ahead, routers=2), [*steps, *jobs])
    assert times(outcome)[2:] == [[1 + 9 / 64], [1 + 18 / 64], [1 + 11 / 64]]


def test_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    outcome = play(fleet(), [job("a", 600, 1)])
    assert times(outcome) == [[3 / 64 + 600 / 1024]]  # 256 + 256 + 88
    assert outcome.replicas[0].num_steps == 3
    assert outcome.replicas[0].num_prefilled == 600


def test_pool_carries_more_streams_where_windows_give_pages_back() -> None:
    """In the same bytes, 256 pages of one group of four layers or 1,024 of four groups, three with a window."""
    jobs = [job(f"r{number}", 960, 32) for number in range(10)]
    ended = []
    for pages in ({"num_pages": 256}, {"num_pages": 1024, "windows": (None, 64, 64, 64)}):
        pools = [{"replicas": 2, "profile": profile(max_model_len=1024, **pages)}]
        outcome = play_out(fleet(*pools), jobs)
        ended.append(max(sample.ended for sample in outcome.samples))
    assert ended[1] < ended[0]


def test_shared_prefix_is_computed_once() -> None:
    prefix = Segment("prefix", 64)
    jobs = [Job((prefix, Segment(name, 16)), 1, due) for name, due in (("a", 0.0), ("b", 1.0))]
    outcome = play(fleet(), jobs)
    assert outcome.samples[0].ttft == 1 / 64 + 80 / 1024
    assert outcome.samples[1].ttft == 1 / 64 + 16 / 1024
    off = fleet({"enable_prefix_caching": False})
    assert play(off, jobs).samples[1].ttft == 1 / 64 + 80 / 1024


def test_chunks_of_a_shipped_prompt_travel_while_the_next_is_computed() -> None:
    """A page takes 1/64 s to travel, 16 pages 1/4 s; a step of 256 tokens 17/64 s. The second chunk's pages leave when
    it is done: the link is free again by then. The token after the first needs all of them."""
    pools = {"name": "prefill"}, {"name": "decode"}
    outcome = play(fleet(*pools, router={"shipping": "always"}), [job("a", 512, 3)])
    chunk = 17 / 64
    arrived = 2 * chunk + 1 / 4
    decode = 1 / 64 + 1 / 1024
    assert times(outcome) == [[2 * chunk, arrived + decode, arrived + 2 * decode]]
    prefill, receiver = outcome.replicas
    assert (prefill.num_prefilled, receiver.num_prefilled, receiver.num_decoded) == (512, 0, 2)
    slow = tuple({**pool, "profile": profile(bytes_per_second=512 * 1024.0)} for pool in pools)
    outcome = play(fleet(*slow, router={"shipping": "always"}), [job("a", 512, 3)])
    assert times(outcome)[0][1] == pytest.approx(chunk + 2 * 1 / 2 + decode), "the second waits for the first"


@pytest.mark.parametrize("at_once", [True, False])
def test_first_token_of_a_pair_waits_for_pages_of_the_decode_replica(at_once: bool) -> None:
    """One stream has the only place of the decode replica for 64 steps; the next prompt is computed long before."""
    pools = {"name": "prefill"}, {"name": "decode", "profile": profile(max_num_seqs=1)}
    jobs = [job("a", 256, 65), job("b", 256, 3, due=0.5), job("c", 256, 1, due=0.5)]
    outcome = play(fleet(*pools, router={"shipping": "always"}), jobs, at_once=at_once)
    a, b, c = times(outcome)
    assert b[0] == pytest.approx(a[-1] + 1 / 4), "once the stream before it has ended, and its pages have travelled"
    assert b[1] - b[0] == pytest.approx(1 / 64 + 1 / 1024), "a step"
    assert c == [0.5 + 2 * 17 / 64], "an output of one token needs no pages there"
    assert [each.ttft for each in outcome.placed] == [pytest.approx(a[0]), c[0] - 0.5, b[0] - 0.5]


def test_pages_of_a_short_prompt_wait_for_one_write_of_a_long_one() -> None:
    """A page is a write and takes a second. The second write of the long prompt ends at 17/64 + 2 s."""
    large = profile(page_bytes=MAX_WRITE_BYTES, bytes_per_second=float(MAX_WRITE_BYTES))
    pools = [{"name": name, "profile": large} for name in ("prefill", "decode")]
    outcome = play(fleet(*pools, router={"shipping": "always"}), [job("a", 512, 2), job("b", 16, 2, due=2.0)])
    decode = 1 / 64 + 1 / 1024
    assert times(outcome) == [[2 * 17 / 64, 17 / 64 + 33 + decode], [2 + 2 / 64, 17 / 64 + 3 + decode]]


def test_link_sends_to_an_idle_replica_while_the_link_of_another_is_busy() -> None:
    network = VirtualNetwork(Clock(), 0.0)
    ends = [network.send(*pair, 1024, 1024.0) for pair in (("near", "busy"), ("far", "busy"), ("far", "idle"))]
    assert ends == [1.0, 2.0, 2.0], "the last one travels while the one before it still arrives"


def test_pages_that_a_window_has_passed_do_not_travel() -> None:
    """The group with a window of 64 tokens ships the last four of its 32 pages, with the second chunk."""
    pools = tuple({"name": name, "profile": profile(windows=(None, 64))} for name in ("prefill", "decode"))
    outcome = play_out(fleet(*pools, router={"shipping": "always"}), [job("a", 512, 2)])
    assert times(outcome) == [[2 * 17 / 64, 2 * 17 / 64 + (16 + 4) / 64 + 1 / 64 + 1 / 1024]]


def test_output_of_one_token_is_not_shipped() -> None:
    pools = {"name": "prefill"}, {"name": "decode"}
    jobs = [job("a", 512, 1), job("b", 512, 1, due=0.1)]
    outcome = play_out(fleet(*pools, router={"shipping": "always"}), jobs)
    assert outcome.replicas[1].num_steps == 0


def test_latency_delays_the_first_token_and_no_gap() -> None:
    near = play(fleet(), [job("a", 64, 3)])
    far = play(fleet(latency_s=0.25), [job("a", 64, 3)])
    assert times(far) == [[time + 0.25 for time in times(near)[0]]]


def test_router_by_seconds_sends_siblings_to_the_replica_with_their_prefix() -> None:
    """Siblings of one prefix, half a second apart: routed by seconds they go where it is."""
    prefix = Segment("prefix", 480)
    jobs = [Job((prefix, Segment(f"{n}", 16)), 1, n / 2) for n in range(8)]
    outcome = play(fleet({"replicas": 4}), jobs)
    assert sum(replica.num_prefilled for replica in outcome.replicas) == 480 + 8 * 16
    apart = play(fleet({"replicas": 4}, router={"policy": "round-robin"}), jobs)
    assert sum(replica.num_prefilled for replica in apart.replicas) == 4 * 480 + 8 * 16


def test_slow_replica_gets_only_requests_that_it_can_serve_in_time() -> None:
    slow = {"base": COST.base * 8, "per_prefill_token": COST.per_prefill_token * 8}
    pools = {"name": "fast"}, {"name": "slow", "profile": profile(cost=replace(COST, **slow))}
    jobs = [job(f"{n}", 64, 8, n / 10) for n in range(40)]
    counts = {}
    for policy in ("seconds", "round-robin"):
        outcome = play(fleet(*pools, router={"policy": policy}), jobs)
        counts[policy] = {replica.name: replica.num_prefilled // 64 for replica in outcome.replicas}
    assert counts["round-robin"] == {"fast/0": 20, "slow/0": 20}
    assert counts["seconds"]["slow/0"] < 8


def test_picture_takes_its_rows_and_the_seconds_of_the_encoder_once() -> None:
    """A picture of 112 pixels has 16 rows. The second request with it is on a replica that has its embeddings."""
    pictured = {
        "profile": profile(encoder_cost=EncoderCost(base=1 / 8, per_embedding_token=1 / 256), encoder_tokens=100)
    }
    picture = DrawnPicture("cat", 112)
    jobs = [Job((Segment(name, 32),), 1, due, pictures=(picture,)) for name, due in (("a", 0.0), ("b", 2.0))]
    outcome = play(fleet({"enable_prefix_caching": False, **pictured}), jobs)
    prompt = 1 / 64 + (16 + 32) / 1024
    assert times(outcome) == [[prompt + 1 / 8 + 16 / 256], [2 + prompt]]
    outcome = play(fleet(pictured), jobs)
    assert times(outcome) == [[prompt + 1 / 8 + 16 / 256], [2 + prompt - 16 / 1024]]  # the picture's page is found
    assert [(sample.prompt_tokens, sample.cached_tokens) for sample in outcome.samples] == [(48, 0), (48, 16)]


def test_prompts_are_equal_where_their_segments_are_equal() -> None:
    one = Job((Segment("x", 40), Segment("y", 24)), 1)
    other = Job((Segment("x", 33), Segment("y", 31)), 1)
    assert len(token_ids(one)) == len(token_ids(other)) == 64
    same = [a == b for a, b in zip(hash_pages(token_ids(one), 16), hash_pages(token_ids(other), 16), strict=True)]
    assert same == [True, True, False, False]
    longer = Job((Segment("x", 64),), 1)
    assert token_ids(longer)[:40] == token_ids(one)[:40]


def test_mooncake_trace_shares_its_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [7, 8, 9]},
        {"timestamp": 5000, "input_length": 1300, "output_length": 2, "hash_ids": [7, 8, 10]},
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = read_trace(path)
    outcome = play_out(fleet(), jobs)
    assert outcome.replicas[0].num_prefilled == 1100 + 1300 - 1024


def test_noise_has_its_spread_and_depends_on_seed_and_step_alone() -> None:
    noise = Noise(0.2, (1, 2))
    factors = np.array([noise.factor(step) for step in range(5000)])
    assert factors.mean() == pytest.approx(1, abs=0.01)
    assert np.log(factors).std() == pytest.approx(0.2, rel=0.05)
    assert [Noise(0.2, (1, 2)).factor(step) for step in (3000, 7, 3000)] == [factors[3000], factors[7], factors[3000]]
    assert Noise(0.2, (2, 2)).factor(0) != factors[0]
    assert noise.overrun == pytest.approx(np.quantile(factors, 0.95), rel=0.02)
    assert Noise(0.0, (1, 2)).factor(9) == Noise(0.0, (1, 2)).overrun == 1


def test_late_request_is_refused_where_the_job_names_a_class_and_waits_where_none_does() -> None:
    """Ten prompts of 2 s each come at once; the class promises the first token within 10 s."""
    refusing = fleet({"profile": profile(admission="reject")})
    named = [job(f"{n}", 2000, 2) for n in range(10)]
    outcome = play(refusing, named)
    refused = [sample.refused for sample in outcome.samples]
    assert any(refused)
    assert not all(refused)
    unnamed = [replace(each, service_tier=None) for each in named]
    outcome = play_out(refusing, unnamed)
    assert {sample.error for sample in outcome.samples} == {None}
    assert max(sample.ttft for sample in outcome.samples) > 10
