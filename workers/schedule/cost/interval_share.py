"""Learn at which interval the steps of a full pipeline end."""

from collections.abc import Iterable
from dataclasses import dataclass, field

_OUTLIER = 3.0  # interval / predicted latency that counts at most: one pause must not count more


@dataclass(slots=True)
class IntervalShare:
    """Learns how soon the steps of a full pipeline follow each other, as a share of the seconds that one takes.

    A step alone in a pipeline takes the seconds of all stages: that is its latency, which `StepCost` predicts. With a
    step in every stage, one ends whenever the slowest stage has done its part. The share is the mean of these
    intervals, divided by the mean predicted latency. The share is 1 / stages where stages are alike, more where one is
    slower or waits for others, and 1 for a replica of one stage. Prompts wait for the interval of steps, a stream for
    their latency.

    Both means are over the warm-up and, with exponential forgetting, over the full steps since. A single step's
    interval also depends on its neighbours' work, so the single ratios are not averaged.
    """

    measured: Iterable[tuple[float, float]]  # (interval, predicted latency) of steps in the warm-up, in seconds
    memory: int = 256  # steps after which a step's weight is 1/e
    _intervals: float = field(init=False)
    _latencies: float = field(init=False)

    def __post_init__(self) -> None:
        measured = list(self.measured)
        self._intervals = sum(interval for interval, _ in measured)
        self._latencies = sum(latency for _, latency in measured)

    @property
    def share(self) -> float:
        """Seconds between the ends of two steps of a full pipeline, as a share of a step's predicted seconds."""
        return self._intervals / self._latencies if self._latencies else 1.0

    def observe(self, interval: float, latency: float) -> None:
        """Learn from a step that ended `interval` after the one before it, and is predicted to take `latency` alone."""
        forget = 1 - 1 / self.memory
        self._intervals = forget * self._intervals + min(interval, _OUTLIER * latency)
        self._latencies = forget * self._latencies + latency
