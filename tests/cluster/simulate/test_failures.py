"""Simulated replicas that die: requests go on elsewhere, and everything that begins ends."""

from itertools import pairwise
from typing import Any

import pytest

from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate.fleet import SimulatedFleet
from tests.cluster.simulate.small_fleets import fleet, job, play, play_out, profile, times

NONE_IS_UP = "no replica is up; the model may still be loading"


def test_request_of_a_dead_replica_goes_on_elsewhere_after_its_tokens() -> None:
    """mixed/1 dies between a's third token and its fourth: the other computes the prompt and three tokens again."""
    decode = 1 / 64 + 1 / 1024
    first = 1 / 64 + 64 / 1024
    dies = first + 2.5 * decode
    failures = [{"at": dies, "kill": "mixed/1"}, {"at": dies + 0.01, "kill": "mixed/1"}]
    pair = fleet({"replicas": 2}, failures=failures, router={"policy": "round-robin"})
    jobs = [job("a", 64, 5)]
    outcome = play_out(pair, jobs)
    again = dies + 1 / 64 + 67 / 1024
    assert times(outcome) == [[first, first + decode, first + 2 * decode, again, again + decode]]
    assert outcome.replicas[1].until == dies
    assert outcome.replicas[1].busy_s == dies


def test_request_of_a_replica_that_hangs_goes_on_elsewhere_once_it_is_lost() -> None:
    """mixed/1 hangs after a's third token. It is lost at the heartbeat after ten silent seconds."""
    decode = 1 / 64 + 1 / 1024
    third = 1 / 64 + 64 / 1024 + 2 * decode
    failures = [{"at": third + 0.5 * decode, "hang": "mixed/1"}, {"at": 30.0, "kill": "mixed/1"}]
    pair = fleet({"replicas": 2}, failures=failures, router={"policy": "round-robin"})
    outcome = play_out(pair, [job("a", 64, 5)])
    again = 11.0 + 1 / 64 + 67 / 1024
    assert times(outcome)[0][2:] == [third, again, again + decode]


def test_replica_that_hangs_gets_no_request_after_ten_silent_seconds() -> None:
    """One of a and b comes to it before anyone knows, and waits for an answer in vain. Later requests do not."""
    failures = [{"at": 0.5, "hang": "mixed/1"}]
    pair = fleet({"replicas": 2}, failures=failures, router={"policy": "round-robin"})
    jobs = [job("a", 64, 2, due=0.6), job("b", 64, 2, due=0.7), job("c", 64, 2, due=20.0), job("d", 64, 2, due=21.0)]
    outcome = play(pair, jobs)
    late = sorted(sample.ttft for sample in outcome.samples)
    assert late[:3] == [1 / 64 + 64 / 1024] * 3
    assert any(late[3] == pytest.approx(11 - due + late[0]) for due in (0.6, 0.7)), (
        "lost at the heartbeat after ten silent seconds"
    )


def test_decode_replica_computes_what_a_prefill_replica_that_hangs_has_not_sent() -> None:
    """After the second of three chunks, whose pages were still on their way. Its own pages come back when it dies."""
    failures = [{"at": 2 * 17 / 64 + 1 / 1024, "hang": "prefill/0"}, {"at": 40.0, "kill": "prefill/0"}]
    pools = fleet({"name": "prefill"}, {"name": "decode"}, failures=failures, router={"shipping": "always"})
    outcome = play_out(pools, [job("a", 768, 4)])
    assert outcome.replicas[1].num_prefilled == 512
    assert outcome.samples[0].ok
    assert 10 < outcome.samples[0].ttft < 21, "the transfer's deadline, after the question about the request"


def test_simulated_stream_goes_on_with_its_own_weights_alone() -> None:
    """After its replica dies, two seconds in, a stream waits behind others of its format; the other format is idle."""
    pools: list[dict[str, Any]] = [
        {"name": name, "replicas": replicas, "profile": profile(weights=name)}
        for name, replicas in (("bf16", 2), ("fp8", 1))
    ]
    jobs = [job(f"r{number}", 64, 200) for number in range(9)]
    for unlike_weights in ("apart", "mixed"):
        router = {"policy": "round-robin", "unlike_weights": unlike_weights}
        failures = [{"at": 2.0, "kill": "bf16/0"}]
        outcome = play_out(fleet(*pools, failures=failures, router=router), jobs)
        assert all(sample.ok for sample in outcome.samples)
        prefilled = {replica.name: replica.num_prefilled for replica in outcome.replicas}
        assert (prefilled["fp8/0"] == 3 * 64) == (unlike_weights == "apart"), prefilled
    lost = [{"at": 2.0 + number, "kill": f"bf16/{number}"} for number in (0, 1)]
    outcome = play_out(fleet(*pools, failures=lost, router={"policy": "round-robin"}), jobs)
    errors = [sample.error for sample in outcome.samples if not sample.ok]
    assert len(errors) == 6
    assert all("no replica is left with the weights" in str(error) for error in errors)


def test_decode_replica_computes_only_the_missing_pages_when_prefill_replica_dies() -> None:
    """After the second of three chunks: the first is there, 256 tokens; the other 512 are computed by decode."""
    failures = [{"at": 2 * 17 / 64 + 1 / 1024, "kill": "prefill/0"}]
    pools = fleet({"name": "prefill"}, {"name": "decode"}, failures=failures, router={"shipping": "always"})
    jobs = [job("a", 768, 4)]
    outcome = play_out(pools, jobs)
    assert outcome.replicas[1].num_prefilled == 512
    assert outcome.samples[0].ok


def test_grant_of_an_attempt_that_was_given_up_lets_no_page_of_the_next_one_travel() -> None:
    """An urgent prompt takes the place of a batch on prefill in the last step of a stream on decode. When that step
    ends, decode grants pages to the batch's first attempt before it reads the abort; then the urgent prompt gets them.
    The second attempt is granted when that has ended."""
    small = {"profile": profile(num_pages=32, max_model_len=512, bytes_per_second=2.0**40)}
    pools = fleet({"name": "prefill", **small}, {"name": "decode", **small}, router={"shipping": "always"})
    jobs = [job("stream", 160, 60), job("batch", 400, 5, due=0.25, tier="batch")]
    last_step_ends = times(play(pools, jobs))[0][-1]
    jobs.append(job("urgent", 200, 40, due=last_step_ends - 1 / 128, tier="interactive"))
    outcome = play_out(pools, jobs)
    _, (_, _, *batch), urgent = times(outcome)  # the first two tokens are made on prefill, one in each attempt
    assert outcome.replicas[0].num_prefilled > 160 + 400 + 200, "a part of the batch was computed again"
    assert batch[0] > urgent[-1]


def test_prompt_whose_last_step_computes_one_token_is_shipped() -> None:
    """A decode replica dies after the first token. Another prefill replica computes prompt and token in two steps: the
    second one looks like that of a stream."""
    first = 1 / 64 + 256 / 1024
    failures = [{"at": 0.0, "add": "decode"}, {"at": first + 0.01, "kill": "decode/1"}]
    router = {"shipping": "always", "policy": "round-robin"}
    pools = fleet({"name": "prefill", "replicas": 2}, {"name": "decode"}, failures=failures, router=router)
    jobs = [job("a", 256, 5)]
    outcome = play_out(pools, jobs)
    assert [replica.num_prefilled for replica in outcome.replicas] == [256, 256, 0, 0]
    assert [replica.num_decoded for replica in outcome.replicas] == [1, 0, 3, 0]


def test_request_without_a_replica_fails() -> None:
    jobs = [job("a", 64, 50), job("b", 64, 5, due=3.0), job("c", 64, 5, due=6.0)]
    lonely = fleet(failures=[{"at": 0.5, "kill": "mixed/0"}, {"at": 5.0, "add": "mixed"}])
    outcome = play_out(lonely, jobs)
    assert [sample.error for sample in outcome.samples] == [NONE_IS_UP, NONE_IS_UP, None]
    assert [replica.name for replica in outcome.replicas] == ["mixed/0", "mixed/1"]


def waiting_pair(*failures: dict[str, Any]) -> tuple[SimulatedFleet, list[Job]]:
    """Return two replicas, and eight prompts of half a second. mixed/1 dies at 0.3 s: its four have no token."""
    pair = fleet(
        {"replicas": 2}, failures=[{"at": 0.3, "kill": "mixed/1"}, *failures], router={"policy": "round-robin"}
    )
    return pair, [job(f"{number}", 496, 3) for number in range(8)]


def test_suspects_of_a_dead_replica_are_tried_one_after_the_other() -> None:
    """Each of the four has its turn until its first token. Together they would have shared steps."""
    pair, jobs = waiting_pair()
    outcome = play_out(pair, jobs)
    assert all(sample.ok for sample in outcome.samples)
    prompt = 496 / 1024 + 2 / 64
    firsts = sorted(sample.times[0] for sample in outcome.samples)
    gaps = [late - early for early, late in pairwise(firsts)]
    assert min(gaps[-3:]) >= prompt, "the next suspect is placed when the one before has its first token"


def test_request_that_two_dead_replicas_had_without_a_token_is_not_tried_again() -> None:
    """The first suspect is at mixed/0, alone, when that dies too. The other suspects wait for their turns meanwhile."""
    pair, jobs = waiting_pair({"at": 0.35, "add": "mixed"}, {"at": 0.4, "kill": "mixed/0"})
    outcome = play_out(pair, jobs)
    errors = [sample.error for sample in outcome.samples]
    assert "2 replicas broke off" in str(errors[0])
    assert errors[1:] == [None] * 7


def test_suspects_that_find_no_replica_all_fail() -> None:
    """One has its turn at mixed/0, and the others wait, when that dies too. So many would overflow the stack if each
    began the turn of the next."""
    jobs = [job(f"{number}", 64, 2) for number in range(800)]
    failures = [{"at": 0.05, "kill": "mixed/1"}, {"at": 0.06, "kill": "mixed/0"}]
    outcome = play_out(fleet({"replicas": 2}, failures=failures, router={"policy": "round-robin"}), jobs)
    assert not any(sample.ok for sample in outcome.samples)
