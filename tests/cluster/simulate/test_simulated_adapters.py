"""LoRA adapters in the simulator: loads take their seconds, and the router sends requests where their adapter is."""

from dataclasses import replace

import pytest

from crossdock.cluster.simulate.fleet import SimulatedFleet
from tests.cluster.simulate.small_fleets import COST, fleet, job, play, profile


def with_adapters(cluster: SimulatedFleet, **adapters: float) -> SimulatedFleet:
    return SimulatedFleet.model_validate(dict(cluster) | {"adapters": adapters})


@pytest.mark.parametrize("policy", ["seconds", "round-robin"])
def test_router_keeps_adapters_apart(policy: str) -> None:
    """Four replicas of two slots have room for eight adapters: in turn, each replica would need all of them."""
    pool = {"name": "mixed", "replicas": 4, "profile": profile()}
    cluster = with_adapters(fleet(pool, router={"policy": policy}), count=8, slots=2, load_s=0.5)
    jobs = [job(f"{number}", 40, 4, 0.25 * number) for number in range(160)]
    outcome = play(cluster, jobs)
    assert all(sample.ok for sample in outcome.samples)
    num_loads = sum(replica.scheduler.adapters.num_loads for replica in outcome.replicas)
    assert num_loads < 40 if policy == "seconds" else num_loads > 80


@pytest.mark.parametrize("at_once", [True, False])
def test_steps_with_adapters_take_longer(at_once: bool) -> None:
    """A decode with its adapter takes 1/64 s more, and each token of its prompt 1/128 s."""
    dear = profile(cost=replace(COST, per_adapter=0.5**21, per_adapted=0.5**21))
    ended = []
    for num_weights in (0, 2**14):
        cluster = with_adapters(fleet({"profile": dear}), count=1, num_weights=num_weights, load_s=0.0)
        outcome = play(cluster, [job("a", 64, 3)], at_once=at_once)
        ended.append(outcome.samples[0].times[-1])
    assert ended[1] - ended[0] == 64 / 128 + 2 * (1 / 128 + 1 / 128)


def test_request_waits_for_the_load_of_its_adapter() -> None:
    cluster = with_adapters(fleet(), count=1, load_s=0.5)
    outcome = play(cluster, [job("a", 40, 4), job("b", 40, 4, 2.0)])
    first, second = (sample.ttft for sample in outcome.samples)
    assert first - second == pytest.approx(0.5, abs=0.01)
