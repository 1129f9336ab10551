"""Any history of a scheduler without a model, in every mode that a replica can have."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.workers.schedule.any_history import AnyHistory

HISTORIES = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = HISTORIES


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_any_history_at_length() -> None:
    run_state_machine_as_test(AnyHistory, settings=settings(HISTORIES, max_examples=20_000, stateful_step_count=100))
