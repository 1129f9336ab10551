"""Comparisons of simulations: confidence intervals, and the best ratio of prefill to decode replicas."""

import pytest

from crossdock.cluster.simulate.simulation import Simulation
from crossdock.cluster.simulate.study import Estimate, ratios
from tests.cluster.simulate.small_fleets import fleet, job, profile


def test_confidence_interval_is_students() -> None:
    """1, 2, 4: mean 7/3, s = 1.5275, t(0.975, 2) = 4.3027: 4.3027 x 1.5275 / sqrt(3)."""
    estimate = Estimate.of([1.0, 2.0, 4.0])
    assert estimate.mean == pytest.approx(7 / 3)
    assert estimate.margin == pytest.approx(3.7946, rel=1e-3)
    assert Estimate.of([5.0]).margin is None


def test_sweep_has_every_ratio_of_the_same_number_of_replicas() -> None:
    found = dict(ratios(fleet({"replicas": 4})))
    assert list(found) == ["mixed 4", *(f"prefill {n} : decode {4 - n}" for n in (1, 2, 3))]
    for each in found.values():
        assert sum(pool.replicas for pool in each.pools) == 4
        assert all(pool.profile.role == pool.role for pool in each.pools)
    assert len(dict(ratios(fleet({"replicas": 100})))) == 17
    with pytest.raises(ValueError, match="sweep"):
        list(ratios(fleet()))


def test_best_ratio_follows_the_lengths_of_prompts_and_outputs() -> None:
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
