"""Simulated pools that follow a load that changes, with the same decisions as live ones."""

from crossdock.cluster.bench.workloads import Job
from crossdock.cluster.simulate import report
from crossdock.cluster.simulate.simulation import Outcome
from crossdock.router.scaling import Flip, Resize
from tests.cluster.simulate.small_fleets import fleet, job, play, play_out, profile

SCALING = {"interval_s": 0.5, "up_delay_s": 1.0, "down_delay_s": 2.0, "utilisation": 0.7}


def arrivals(begin: float, end: float, every: float, prompt: int, output: int) -> list[Job]:
    count = int((end - begin) / every)
    return [job(f"{begin}/{number}", prompt, output, begin + number * every) for number in range(count)]


def sizes(outcome: Outcome) -> list[tuple[int, int]]:
    actions = [decision.action for decision in outcome.decisions]
    return [(each.replicas_before, each.replicas) for each in actions if isinstance(each, Resize)]


def test_pool_grows_under_load_and_shrinks_without_breaking_a_stream() -> None:
    """256 tokens take 0.27 s alone: five a second are 1.3 replicas' work."""
    jobs = [*arrivals(0, 12, 0.2, 256, 4), *arrivals(12, 40, 2.0, 16, 4)]
    elastic = fleet({"max_replicas": 3}, scaling=SCALING, start_s=3.0)
    outcome = play_out(elastic, jobs)
    changes = sizes(outcome)
    assert changes[0] == (1, 2)
    assert max(after for _, after in changes) == 3, "the backlog needs more than the arrivals"
    assert changes[-1] == (2, 1)
    first = outcome.decisions[0]
    assert 1.0 <= first.at <= 3.0
    assert first.action.load.demand > 0.7
    assert first.action.load.waiting_s > 0
    assert outcome.replicas[1].since == first.at + 3.0
    assert sum(replica.until is None for replica in outcome.replicas) == 1, "the others have ended"
    assert all(sample.ok for sample in outcome.samples)


def test_replica_that_is_given_up_finishes_its_streams_and_takes_no_others() -> None:
    """The streams of the first second run long: the second replica leaves while it has some."""
    jobs = [*arrivals(0, 4, 0.2, 256, 4), *arrivals(4, 5, 0.25, 16, 700), *arrivals(30, 31, 0.5, 16, 4)]
    elastic = fleet({"max_replicas": 2, "profile": profile(max_num_seqs=64)}, scaling=SCALING, start_s=0.0)
    outcome = play_out(elastic, jobs)
    (leaving,) = [
        each.at for each in outcome.decisions if isinstance(each.action, Resize) and each.action.replicas == 1
    ]
    gone = outcome.replicas[1]
    assert gone.until is not None
    assert gone.until > leaving + 1.0, "it had streams"
    found = report.figures(outcome, {})["decisions"][-1]
    assert found["running"] == 4
    assert found["broken"] == 0
    assert all(sample.ok for sample in outcome.samples)


def test_roles_follow_the_mix_of_requests() -> None:
    jobs = [*arrivals(0, 15, 0.2, 256, 2), *arrivals(20, 40, 0.25, 16, 120), *arrivals(60, 70, 2.0, 16, 4)]
    pools = fleet(
        {"name": "prefill"},
        {"name": "decode", "replicas": 2},
        scaling=SCALING | {"flip_roles": True},
        router={"shipping": "always"},
    )
    outcome = play_out(pools, jobs)
    flips = [each.action for each in outcome.decisions if isinstance(each.action, Flip)]
    assert [(flip.role_before, flip.role) for flip in flips] == [("decode", "prefill"), ("prefill", "decode")]
    assert flips[0].replica.startswith("decode/")
    assert flips[1].replica == flips[0].replica, "it returns to the role of its pool"
    assert flips[0].load.waiting_s > 0
    assert flips[0].spare_load.replicas == 2
    assert all(sample.ok for sample in outcome.samples)


def test_fleet_of_fixed_size_makes_no_decision() -> None:
    outcome = play(fleet(), arrivals(0, 10, 0.1, 256, 4))
    assert outcome.decisions == []
