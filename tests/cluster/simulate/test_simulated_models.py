"""Several simulated models that divide GPUs by demand, with the same division as live ones."""

import pytest

from crossdock.cluster.simulate import report
from crossdock.router.scaling import Resize
from tests.cluster.simulate.small_fleets import fleet, job, play_out

MODELS = [{"name": "day", "share": {0: 1, 40: 0}}, {"name": "night", "share": {40: 1}}]
SCALING = {"interval_s": 0.5, "up_delay_s": 1.0, "down_delay_s": 200.0, "zero_after_s": 300.0, "utilisation": 0.7}
POOLS = [{"name": name, "model": name, "replicas": 0, "max_replicas": 2} for name in ("day", "night")]


def test_models_change_places_by_demand_and_no_request_is_lost() -> None:
    """256 tokens take 0.27 s alone: five a second are 1.3 replicas' work, of which each model has the half of a run.

    A model that has no work gives its replicas up to the other one, before they are idle for so long that they end.
    """
    jobs = [job(f"{number}", 256, 4, number * 0.2) for number in range(400)]
    models = fleet(*POOLS, models=MODELS, gpus=2, scaling=SCALING, start_s=3.0)
    outcome = play_out(models, jobs)
    assert all(sample.ok for sample in outcome.samples)
    changes = [
        (each.action.pool, each.action.replicas) for each in outcome.decisions if isinstance(each.action, Resize)
    ]
    assert changes == [("day", 1), ("day", 2), ("day", 1), ("night", 1), ("day", 0), ("night", 2)]
    first = {name: next(each for each in outcome.samples if each.model == name) for name in ("day", "night")}
    assert 3.0 <= first["day"].times[0] <= 4.5, "a look at the demand, and the start"
    assert {sample.sent < 40 for sample in outcome.samples if sample.model == "day"} == {True}
    ends = sorted(replica.until or 1e9 for replica in outcome.replicas if replica.pool.name == "day")
    begins = sorted(replica.since for replica in outcome.replicas if replica.pool.name == "night")
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True)), "two GPUs hold two replicas"
    figures = report.figures(outcome, {})
    assert {name: each["requests_ok"] for name, each in figures["models"].items()} == {"day": 200, "night": 200}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": MODELS[:1]}, "models: each must have pools, and each pool must name one"),
        (
            {"models": MODELS, "gpus": 2, "pools": [{**each, "replicas": 2} for each in POOLS]},
            "gpus: the pools have more",
        ),
    ],
)
def test_models_and_pools_that_do_not_go_together_are_refused(settings: dict[str, object], message: str) -> None:
    pools = settings.pop("pools", POOLS)
    with pytest.raises(ValueError, match=message):
        fleet(*pools, **settings)  # type: ignore[misc]
