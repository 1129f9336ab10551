"""The router predicts for a tenant what the replicas' schedulers do: others get their shares first, no more."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.query import Query
from crossdock.workers.report.advertise import Message, observe
from crossdock.workers.report.frames import LENGTH, frame, read_frame
from crossdock.workers.report.live_profile import MOST_TENANTS
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.policies.chunking import LEAST_SHARE
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import Overloaded, SamplingParams, Submission
from tests.router.replicas import CLASSES, LONG_STEPS, Replica, fleet_of, place, profile, query

PROMPT = [3 + number % 50 for number in range(400)]
OWN_S = LONG_STEPS.prefill_seconds(0, 400, profile().max_num_batched_tokens)


def flooded(num_prompts: int, **fields: Any) -> Replica:
    replica = Replica(profile(**fields))
    for number in range(num_prompts):
        prompt = [60 + number, *PROMPT[1:]]
        replica.add(f"{number}", prompt, "interactive", tenant="flood", is_promised=False)
    return replica


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_ttft_of_a_tenant_is_at_least_what_its_scheduler_predicts(rng: random.Random) -> None:
    replica = Replica(profile(admission="queue"))
    weights = {"a": 1.0, "b": rng.choice([1.0, 4.0]), "": 1.0}
    for number in range(rng.randrange(10)):
        prompt, tenant = [60 + number, *PROMPT[1 : rng.choice([10, 100, 400])]], rng.choice(["a", "b", ""])
        replica.add(f"{number}", prompt, rng.choice(CLASSES), 50, tenant=tenant, weight=weights[tenant])
        for _ in range(rng.randrange(4)):
            replica.step()
    fleet = fleet_of({"a": replica.profile})
    replica.report(fleet, "a", 0.0)
    tenant = rng.choice(["a", "b", "new"])
    sampling, slo_class = SamplingParams(max_tokens=50), rng.choice(CLASSES)
    weight = weights.get(tenant, 2.0)
    request = Request(Submission("new", PROMPT, sampling, slo_class=slo_class, tenant=tenant, weight=weight))
    request.priority = CLASSES.index(slo_class)
    exact = replica.scheduler.forecast.ttft(request).ttft
    own = Query("new", 400, slo_class=slo_class, max_tokens=50, tenant=tenant, weight=weight)
    assert fleet.choose(own, 0.0).predicted_ttft >= exact - _not_told(replica, request, weights) - 1e-9


def _not_told(replica: Replica, request: Request, weights: dict[str, float]) -> float:
    """Return the most seconds that others get first since a tenant had more, which only the scheduler knows.

    Replicas do not tell what a tenant had that has no prompt waiting: routers take that it begins again."""
    scheduler = replica.scheduler
    waiting = {other.tenant for other in scheduler.table.prefills() if other.priority == request.priority}
    if request.tenant in waiting:
        return 0.0
    lead = scheduler.table.tenants.lead_s(request) * sum(weights[name] for name in waiting)
    return lead / max(scheduler.forecast.prefill_share(request.priority), LEAST_SHARE)


def test_flood_of_another_tenant_doubles_the_wait_and_refuses_nobody_else() -> None:
    replica = flooded(50, cost=LONG_STEPS)
    fleet = fleet_of({"a": replica.profile})
    replica.report(fleet, "a", 0.0)

    def ttft(**fields: Any) -> float:
        return fleet.choose(query("new", 400, slo_class="interactive", **fields), 0.0).predicted_ttft

    assert ttft(tenant="own") == pytest.approx(2 * OWN_S)
    assert ttft(tenant="own", weight=4.0) == pytest.approx(1.25 * OWN_S)
    with pytest.raises(Overloaded):
        ttft(tenant="flood")


def test_flood_that_is_only_booked_counts_too() -> None:
    replica = Replica(profile(admission="queue", cost=LONG_STEPS))
    fleet = fleet_of({"a": replica.profile})
    for number in range(20):
        place(fleet, query(f"{number}", 400, tenant="flood"), 0.0)
    step = StepWork(prefill_tokens=profile().max_num_batched_tokens)  # of the flood, and more than its share
    predicted = fleet.choose(query("own", 400, tenant="own"), 0.0).predicted_ttft
    assert predicted == pytest.approx(2 * LONG_STEPS.seconds(step)), "the flood fills the step of the own prompt too"
    assert fleet.choose(query("more", 400, tenant="flood"), 0.0).predicted_ttft > 15 * OWN_S


def test_live_profile_names_few_tenants_those_with_most_work() -> None:
    replica = Replica(profile(admission="queue"))
    for number in range(MOST_TENANTS + 4):
        replica.add(f"{number}", [60 + number, *PROMPT[1 : 20 + number]], tenant=f"t{number}", weight=2.0)
    live = observe(replica.scheduler, "x", 1)
    assert {work.tenant for work in live.prefills.tenants} == {f"t{number}" for number in range(4, MOST_TENANTS + 4)}
    assert read_frame(frame(Message(live=live))[LENGTH.size :]).live == live
