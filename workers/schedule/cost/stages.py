"""When steps end in the stages of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field


def gap_of(num_steps: float, interval_share: float) -> float:
    """Return the longest gap between two tokens of a stream, divided by the seconds of one step.

    `num_steps`: in flight. The gap is the latency of a step. Where stages are not alike, the intervals of all these
    steps may take longer; then these are the gap. `interval_share`: of a step's seconds, until the next step ends.
    """
    return max(num_steps * interval_share, 1.0)


@dataclass(slots=True)
class Stages:
    """The stages of a pipeline, each with its share of every step's seconds. A replica without one has one stage."""

    shares: Sequence[float]
    _free: list[float] = field(init=False)  # when each stage is

    def __post_init__(self) -> None:
        self._free = [0.0] * len(self.shares)

    @classmethod
    def of(cls, depth: int, interval_share: float) -> "Stages":
        """Return `depth` stages of which the slowest takes the `interval_share` of a step, and the others are alike."""
        slowest = min(max(interval_share, 1 / depth), 1.0)
        return cls([slowest] + [(1 - slowest) / (depth - 1)] * (depth - 1) if depth > 1 else [1.0])

    @property
    def interval_share(self) -> float:
        return max(self.shares)

    def begin(self, seconds: float, now: float) -> float:
        """Return when a step that begins now and takes `seconds` alone ends, behind the steps before it."""
        for stage, share in enumerate(self.shares):
            now = self._free[stage] = max(now, self._free[stage]) + share * seconds
        return now
