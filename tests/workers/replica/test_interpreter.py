"""The interpreter of a process that serves."""

import gc
import sys

from crossdock.workers.replica.interpreter import SWITCH_S, prepare_interpreter


def test_interpreter_for_serving_switches_soon_and_skips_what_is_loaded() -> None:
    before, interval = gc.get_freeze_count(), sys.getswitchinterval()
    loaded = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    try:
        prepare_interpreter()
        assert gc.get_freeze_count() >= before + len(loaded)
        assert sys.getswitchinterval() <= 2 * SWITCH_S < interval
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
