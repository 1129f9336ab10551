"""Shared by all tests of this folder: readers that give no sign of life, as no ingress stands behind them."""

import pytest

from crossdock.workers.replica.serving import channel


@pytest.fixture(autouse=True)
def _silent_readers_keep_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test take longer than the silence after which a reader's requests end: a slow machine takes a minute."""
    monkeypatch.setattr(channel, "MOST_SILENCE_S", 3600.0)
