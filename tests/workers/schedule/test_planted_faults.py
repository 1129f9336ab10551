"""The state machine of schedulers finds every planted fault: most within 600 histories, some in a long run alone."""

import pytest

from tests.workers.replica.transfer.test_pools_any_history import FetchingPools
from tests.workers.schedule.any_history import AnyHistory
from tests.workers.schedule.planted_faults import FAULTS, FETCHES, TIERS, Fault, histories_to_find, planted
from tests.workers.schedule.test_any_history import ReturningHistory


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", [*FAULTS, *FETCHES], ids=lambda fault: fault.what.replace(" ", "-"))
def test_planted_fault_is_found(fault: Fault) -> None:
    machine = ReturningHistory if fault in TIERS else FetchingPools if fault in FETCHES else AnyHistory
    assert histories_to_find(fault, machine) is not None


@pytest.mark.parametrize("fault", [*FAULTS, *FETCHES], ids=lambda fault: fault.what.replace(" ", "-"))
def test_line_of_a_planted_fault_stands_in_the_scheduler(fault: Fault) -> None:
    with planted(fault):
        pass
