"""Tenants get shares of a replica's seconds by weight, however much each sends; one tenant alone notices nothing."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.policies.tenants import MOST_NAMED, OTHERS, Tenants
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.submission import Overloaded
from tests.workers.schedule.model_free_replica import COST, LONG_STEPS, ModelFreeReplica, new_request, new_timed_replica

STEP = 256  # tokens of a step
OUTPUT = 6  # most tokens of an output here
kinds = st.tuples(st.integers(64, 600), st.integers(1, OUTPUT))  # tokens of a prompt, and of its output


def paid(batches: Sequence[Batch], names: Mapping[str, str]) -> dict[str, float]:
    """Return each tenant's seconds, counted from steps alone: chunks what they add, the rest by streams or chunks."""
    found = defaultdict[str, float](float)
    for batch in batches:
        decodes, chunks = batch.scheduled[: batch.num_decodes], batch.scheduled[batch.num_decodes :]
        rest = COST.seconds(batch.work)
        for part in chunks:
            alone, without = StepWork.of([(part.start, part.num_tokens)]), StepWork()
            seconds = COST.seconds(alone) - COST.seconds(without)
            found[names[part.request.id]] += seconds
            rest -= seconds
        contexts = COST.per_context * sum(part.start for part in decodes)
        num_tokens = sum(part.num_tokens for part in decodes or chunks)
        for part in decodes or chunks:
            own = (rest - contexts) * part.num_tokens / num_tokens + (COST.per_context * part.start if decodes else 0)
            found[names[part.request.id]] += own
    return found


class Backlogs:
    """Tenants that always have prompts waiting, each of its own kinds of requests."""

    def __init__(self, replica: ModelFreeReplica, tenants: Mapping[str, tuple[float, Sequence[tuple[int, int]]]]):
        self.replica, self.tenants = replica, tenants
        self.tenant_of: dict[str, str] = {}  # by request

    def add(self, tenant: str) -> None:
        weight, requests = self.tenants[tenant]
        name = f"r{len(self.tenant_of)}"
        prompt, output = requests[len(self.tenant_of) % len(requests)]
        self.tenant_of[name] = tenant
        self.replica.add(name, prompt, max_tokens=output, tenant=tenant, weight=weight)

    def run(self, num_steps: int, depth: int = 8) -> list[Batch]:
        """Step so often, with `depth` prompts of each tenant waiting before each step."""
        first = len(self.replica.batches)
        for _ in range(num_steps):
            waiting = Counter(request.tenant for request in self.replica.scheduler.table.waiting)
            for tenant in self.tenants:
                for _ in range(depth - waiting[tenant]):
                    self.add(tenant)
            self.replica.step()
        return self.replica.batches[first:]


@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a smaller case is not clearer
@given(
    st.lists(kinds, min_size=1, max_size=4),
    st.lists(kinds, min_size=1, max_size=4),
    st.sampled_from([(1.0, 1.0), (3.0, 1.0), (1.0, 2.5)]),
    st.sampled_from([{}, {"chunk_policy": "fixed"}, {"mixed_chunks": False}, {"max_long_partial_prefills": 1}]),
)
def test_two_tenants_with_backlog_differ_by_bounded_seconds(
    first: list[tuple[int, int]], second: list[tuple[int, int]], weights: tuple[float, float], config: dict[str, Any]
) -> None:
    """There are more places than prompts of a step can fill: a tenant that had all would get no more seconds."""
    replica = new_timed_replica(max_num_seqs=48, **config)
    backlogs = Backlogs(replica, {"a": (weights[0], first), "b": (weights[1], second)})
    longest_step = COST.seconds(StepWork.of([(600, STEP)]))
    streams = 24 * OUTPUT * COST.decode_step_seconds(1, 600)  # all places decode to their ends
    batches: list[Batch] = []
    for num_steps in (60, 180):
        batches += backlogs.run(num_steps)
        had = paid(batches, backlogs.tenant_of)
        difference = had["a"] / weights[0] - had["b"] / weights[1]
        assert abs(difference) <= (2 * longest_step + streams) / min(weights), had
    charged = replica.scheduler.table.tenants.charged
    assert {name: charged[name, 1] for name in "ab"} == pytest.approx(dict(had)), "as counted from the steps alone"


def test_weights_of_three_to_one_give_seconds_of_three_to_one() -> None:
    replica = new_timed_replica()
    backlogs = Backlogs(replica, {"gold": (3.0, [(300, 4)]), "free": (1.0, [(20, 4), (900, 2)])})
    had = paid(backlogs.run(400), backlogs.tenant_of)
    assert had["gold"] / had["free"] == pytest.approx(3.0, rel=0.02)


def test_tenant_that_was_idle_gets_no_credit_for_idle_time() -> None:
    replica = new_timed_replica()
    alone = Backlogs(replica, {"a": (1.0, [(200, 4)])})
    alone.run(100)
    both = Backlogs(replica, {"a": (1.0, [(200, 4)]), "b": (1.0, [(200, 4)])})
    both.tenant_of = alone.tenant_of
    had = paid(both.run(100), both.tenant_of)
    assert abs(had["a"] - had["b"]) < 1.0


def test_tenant_whose_streams_go_on_gets_no_credit_for_sending_nothing() -> None:
    """It is charged for few tokens all the time, so that its time falls behind that of a tenant with prompts."""
    replica = new_timed_replica()
    replica.add("endless", 8, max_tokens=3000, tenant="b")
    backlogs = Backlogs(replica, {"a": (1.0, [(400, 1)])})
    backlogs.run(100)
    both = Backlogs(replica, {"a": (1.0, [(400, 1)]), "b": (1.0, [(400, 1)])})
    both.tenant_of = backlogs.tenant_of | {"endless": "b"}
    had = paid(both.run(100), both.tenant_of)
    assert abs(had["a"] - had["b"]) < 1.0


def test_tenant_beside_a_flood_waits_for_its_own_prompts_alone() -> None:
    def first_token(num_flooding: int) -> float:
        replica = new_timed_replica()
        for number in range(num_flooding):
            replica.add(f"flood {number}", 200, max_tokens=4, tenant="flood")
        replica.step()
        replica.add("own", 200, max_tokens=4, tenant="own")
        began = replica.now
        while "own" not in replica.token_times:
            replica.step()
        return replica.token_times["own"][0] - began

    assert first_token(100) < first_token(2) + 2 * COST.seconds(StepWork.of([(0, STEP)], [200] * 16))


def test_flood_that_waits_long_does_not_starve() -> None:
    """Old requests of a tenant wait because of its own work: they go before no class, and no other tenant."""
    replica = new_timed_replica(LONG_STEPS, starvation_s=2.0, idle_step_share=1.0)
    for number in range(100):
        replica.add(f"flood {number}", 200, tenant="flood")
    while replica.now < 6.0:
        replica.step()
    replica.add("own", 200, tenant="own")
    for _ in range(4):  # two chunks, in turns
        replica.step()
    assert "own" in replica.token_times


def test_no_tenant_of_many_starves() -> None:
    replica = new_timed_replica()
    for number in range(60):
        replica.add(f"flood {number}", 300, tenant="flood")
    small = [replica.add(f"small {number}", 300, tenant=f"t{number}").id for number in range(20)]
    replica.run()
    others = sorted(times[0] for name, times in replica.token_times.items() if name.startswith("flood"))
    assert all(replica.token_times[name][0] < others[25] for name in small), "each has its turn before a second one"


plans = st.lists(
    st.tuples(
        st.floats(0, 3), st.integers(1, 300), st.integers(1, 12), st.sampled_from(["interactive", "standard", "batch"])
    ),
    min_size=1,
    max_size=20,
)


LACKS_PAGES_BEFORE_A_CHUNK = [  # after the chunk of another, a third one may pass
    *((0.0, tokens, 7, "interactive") for tokens in (194, 250)),
    *[(1.0, 1, 1, "interactive")] * 6,
    *[(0.25, 32, 1, "interactive"), (0.25, 36, 9, "interactive"), (0.125, 34, 11, "interactive")],
]


@settings(max_examples=20)
@given(plans, st.integers(76, 200), st.sampled_from([{}, {"admission": "reject"}, {"prefill_order": "fcfs"}]))
@example(LACKS_PAGES_BEFORE_A_CHUNK, 76, {})
def test_history_of_one_tenant_is_that_without_tenants(
    plan: list[tuple[float, int, int, str]], num_pages: int, config: dict[str, Any]
) -> None:
    def play(tenant: str) -> list[object]:
        replica = new_timed_replica(num_pages=num_pages, max_model_len=300, max_num_seqs=6, starvation_s=1.0, **config)
        coming, seen = sorted(plan, reverse=True), list[object]()
        while coming or replica.scheduler.table.has_work:
            if not replica.scheduler.table.has_work:
                replica.now = max(replica.now, coming[-1][0])
            while coming and coming[-1][0] <= replica.now:
                _, prompt, output, slo_class = coming.pop()
                try:
                    name = f"r{len(coming)}"
                    new = replica.add(name, min(prompt, 280), slo_class, output, tenant=tenant, weight=3.0)
                    seen.append(new.predicted_ttft)
                except Overloaded as refusal:
                    seen.append(refusal.retry_after)
            step = replica.step()
            seen += [(part.request.id, part.start, part.num_tokens, part.reason) for part in step.batch.scheduled]
            seen.append((step.batch.limit, replica.now, replica.scheduler.table.num_preemptions))
        return seen

    assert play("a") == play("")


def test_stream_of_the_tenant_that_had_most_loses_its_pages() -> None:
    replica = new_timed_replica(num_pages=40, max_model_len=100, max_num_seqs=8)
    for number in range(3):
        replica.add(f"flood {number}", 30, max_tokens=60, tenant="flood")
    replica.add("own", 30, max_tokens=60, tenant="own")
    table = replica.scheduler.table
    while not table.num_preemptions and table.has_work:
        replica.step()
    assert [request.tenant for request in table.waiting if request.num_preemptions] == ["flood"]


def test_promise_counts_of_other_tenants_only_their_shares() -> None:
    replica = new_timed_replica(LONG_STEPS, admission="reject", idle_step_share=1.0)
    alone = LONG_STEPS.prefill_seconds(0, 200, STEP)
    flood = [replica.add(f"flood {n}", 200, tenant="flood", is_promised=False) for n in range(50)]
    own = replica.add("own", 200, tenant="own")
    assert own.predicted_ttft == pytest.approx(2 * alone)
    assert flood[-1].predicted_ttft == pytest.approx(50 * alone)
    heavy = replica.add("heavy", 200, tenant="heavy", weight=4.0)
    assert heavy.predicted_ttft == pytest.approx(1.5 * alone)
    with pytest.raises(Overloaded):
        replica.add("more", 200, tenant="flood")


def test_more_tenants_than_can_be_named_are_counted_together() -> None:
    tenants = Tenants(in_use=True)
    for number in range(MOST_NAMED + 5):
        request = new_request("r", [1])
        request.tenant = f"t{number}"
        tenants.charge(request, 2.0)
    assert len(tenants.charged) == MOST_NAMED + 1
    assert tenants.charged[OTHERS, 0] == 10.0


def charge(tenants: Tenants, name: str, seconds: float) -> None:
    request = new_request("r", [1])
    request.tenant = name
    tenants.charge(request, seconds)


def test_names_that_are_used_once_hide_no_later_tenant() -> None:
    """A stranger sends requests in thousands of names. Tenants that came before and after them are named."""
    tenants = Tenants(in_use=True)
    charge(tenants, "before", 10.0)
    for number in range(3000):
        charge(tenants, f"stranger {number}", 0.01)
    charge(tenants, "later", 5.0)
    total = sum(tenants.charged.values())
    tenants.note([], 20.0)
    charge(tenants, "later", 5.0)
    assert {"before", "later", OTHERS} <= {name for name, _ in tenants.charged}
    assert len(tenants.charged) <= MOST_NAMED + 1
    assert sum(tenants.charged.values()) == pytest.approx(total + 5.0), "seconds stay when names go"
    assert len(tenants.names._recent) <= 1025


def test_tenant_that_was_busy_long_ago_makes_way() -> None:
    tenants = Tenants(in_use=True)
    for number in range(MOST_NAMED):
        charge(tenants, f"old {number}", 100.0)
    tenants.note([], 3600.0)
    charge(tenants, "new", 1.0)
    tenants.note([], 3620.0)
    charge(tenants, "new", 1.0)
    assert tenants.charged["new", 0] == 1.0
    assert tenants.charged[OTHERS, 0] == 101.0


def test_places_are_left_to_a_tenant_that_comes_back_within_a_minute() -> None:
    """Else its prompt would wait until one of the other tenant's streams ends."""

    def first_token(pause_s: float) -> float:
        replica = new_timed_replica(max_num_seqs=32, num_pages=8000)
        replica.add("before", 10, tenant="own")
        replica.run()
        replica.now += pause_s
        for number in range(60):
            replica.add(f"flood {number}", 10, max_tokens=400, tenant="flood")
        for _ in range(80):
            replica.step()
        began, own = replica.now, replica.add("own", 10, tenant="own")
        assert own.priority == 1
        while "own" not in replica.token_times:
            replica.step()
        return replica.token_times["own"][0] - began

    assert first_token(1.0) < 0.2
    assert first_token(100.0) > 2.0, "one tenant alone has all places"
