"""Shared by all tests of this folder: readers that give no sign of life, as no ingress stands behind them; and steps
that are measured once, however busy the machine is."""

import pytest

from crossdock.workers.replica.engine import calibrate
from crossdock.workers.replica.serving import channel


@pytest.fixture(autouse=True)
def _silent_readers_keep_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test take longer than the silence after which a reader's requests end: a slow machine takes a minute."""
    monkeypatch.setattr(channel, "MOST_SILENCE_S", 3600.0)


@pytest.fixture(autouse=True)
def _disturbed_steps_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests each step would be repeated for 0.3 s: a warm-up would take many seconds of CPU."""
    monkeypatch.setattr(calibrate, "_REPEATED_S", 0.0)
