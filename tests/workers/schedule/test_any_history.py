"""Any history of a scheduler without a model, in every mode that a replica can have."""

import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.workers.schedule.any_history import RETURNING, AnyHistory, modes

HISTORIES = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = HISTORIES


class ReturningHistory(AnyHistory):
    """Long prefixes evict each other, lie in a tier, and come back."""

    modes = modes(returns=True)

    @rule(number=st.integers(0, 4), tail=st.integers(1, 49), loaded=st.sampled_from([9, 9, 2]))
    def come_back(self, number: int, tail: int, loaded: int | None) -> None:
        """One more prompt with a prefix that others have evicted since."""
        prompt = [*RETURNING[number], tail]
        self.submit(Request(Submission(f"r{self.count}", prompt, SamplingParams(max_tokens=2)), self.now), False)
        self.run_steps(4, set(), loaded)

    @rule(
        number=st.integers(0, 4), tail=st.integers(1, 49), filled=st.sampled_from([0, 1, 3]), leaves=st.integers(0, 3)
    )
    def come_back_to_a_slow_tier(self, number: int, tail: int, filled: int, leaves: int) -> None:
        """The request leaves, or its patience ends, while a page is filled. Another prompt takes pages meanwhile, and
        comes back once the tier has filled the page."""
        self.end_loads()
        name = f"r{self.count}"
        prompt = [*RETURNING[number], tail]
        self.submit(Request(Submission(name, prompt, SamplingParams(max_tokens=2)), self.now), False)
        self.one_step()
        if self.loads:
            self.end_a_load(filled)
        if leaves > 1 and name in self.live:  # while a step computes it
            if not self.flights:
                self.begin()
            request = self.live.pop(name)
            assert self.scheduler.abort(name) is request
        elif leaves and name in self.live:
            self.leave(name)
        else:
            self.now += 10.0
        other = (number + 1) % len(RETURNING)
        self.come_back(other, tail, None)
        self.end_loads()
        self.come_back(other, tail % 49 + 1, None)

    def end_loads(self) -> None:
        while self.loads:
            self.end_a_load(9)

    @rule(number=st.integers(0, 4), tail=st.integers(1, 49), num_pages=st.integers(1, 9))
    def wait_twice(self, number: int, tail: int, num_pages: int) -> None:
        """Pages of a prompt stop coming while somebody may still write to them, come from elsewhere, and stop again.
        The first writer ends before the second."""
        prompt = [*RETURNING[number], tail]
        new = Request(Submission(f"r{self.count}", prompt, SamplingParams(max_tokens=2)), self.now)
        self.submit(new, False)
        pages = min(num_pages, (new.num_tokens - 1) // self.pages.page_size)
        for _ in range(2 * (new.id in self.live)):
            if (prefix := self.scheduler.awaited.begin(new, pages, self.now + 10.0)) is not None:
                self.awaited.append(prefix)
                self.end_prefix(prefix, may_be_written=True)
        if [each.request for each in self.left].count(new) == 2:
            first = next(each for each in self.left if each.request is new)
            self.left.remove(first)
            self.pages.end_quarantine(first.owner)
            self.come_back((number + 1) % len(RETURNING), tail, None)
            self.write_some_of_what_is_awaited()
            self.come_back((number + 1) % len(RETURNING), tail % 49 + 1, None)

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
