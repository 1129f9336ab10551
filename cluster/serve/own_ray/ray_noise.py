"""Messages of Ray about its own processes that say nothing to a user of a Ray that is this server's alone."""

from collections.abc import Mapping
from typing import Any

from ray._private import worker

_NOISE = (
    "worker processes have been started",  # each replica and each ingress is one
    "A worker died or was killed while executing",  # the command tells of a lost replica in its own words
)


def without_noise() -> None:
    """Have this process show no messages of the raylet that are `_NOISE`. Other messages are shown as before."""
    show = worker.print_to_stdstream

    def shown(data: Mapping[str, Any], *arguments: Any, **options: Any) -> None:
        lines = [line for line in data["lines"] if not any(noise in line for noise in _NOISE)]
        if lines:
            show({**data, "lines": lines}, *arguments, **options)

    worker.print_to_stdstream = shown
