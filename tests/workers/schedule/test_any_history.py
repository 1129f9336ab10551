"""Any history of a scheduler without a model, in every mode that a replica can have."""

import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams
from tests.workers.schedule.any_history import RETURNING, AnyHistory, modes

HISTORIES = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = HISTORIES


class ReturningHistory(AnyHistory):
    """Long prefixes evict each other, lie in a tier, and come back."""

    modes = modes(returns=True)

    @rule(number=st.integers(0, 4), tail=st.integers(1, 49), loaded=st.sampled_from([9, 9, 2]))
    def come_back(self, number: int, tail: int, loaded: int) -> None:
        """One more prompt with a prefix that others have evicted since."""
        prompt = [*RETURNING[number], tail]
        self.submit(Request(f"r{self.count}", prompt, SamplingParams(max_tokens=2), arrival_time=self.now), False)
        self.run_steps(4, set(), loaded)

    def teardown(self) -> None:
        for number in (0, 1, 2, 3, 4, 0, 1):
            self.come_back(number, number + 5, 9)
        super().teardown()


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_any_history_of_prefixes_that_return_mostly_loads_pages(count: int) -> None:
    loaded, met = list[int](), list[int]()

    class Counted(ReturningHistory):
        def teardown(self) -> None:
            super().teardown()
            loaded.append(self.num_loaded)
            met.append(self.num_met)

    run_state_machine_as_test(Counted, settings=settings(HISTORIES, max_examples=count))
    sys.stdout.write(f"{len(loaded)} histories, {sum(loaded)} pages loaded, {sum(met)} prompts met their load\n")
    assert sum(count > 0 for count in loaded) > len(loaded) / 2, loaded
    assert sum(count > 0 for count in met) >= 3, met


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("machine", [AnyHistory, ReturningHistory])
def test_any_history_at_length(machine: type[AnyHistory]) -> None:
    run_state_machine_as_test(machine, settings=settings(HISTORIES, max_examples=20_000, stateful_step_count=100))
