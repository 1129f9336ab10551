"""The state machine of schedulers finds every planted fault: most within 600 histories, some in a long run alone."""

import pytest

from tests.workers.schedule.any_history import AnyHistory
from tests.workers.schedule.planted_faults import FAULTS, Fault, histories_to_find


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_planted_fault_is_found(fault: Fault) -> None:
    assert histories_to_find(fault, AnyHistory) is not None
