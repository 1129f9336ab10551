"""Find the highest rate of requests that a fleet carries, and tell whether a queue grows. Pure."""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import NamedTuple

from crossdock.cluster.bench.metrics import Sample

_CLOSE = 1.05  # the search ends when the two rates are so close
_MOST_RUNS = 24
_GREW = 1.5  # times as many requests without a first token at the end of arrivals as after half of them
_GREW_SHARE = 0.02  # of the requests that came in between
_DEVIATIONS = 2  # standard deviations that are put down to chance


class Queue(NamedTuple):
    """Requests without a first token: after half of the time of arrivals, and at their end."""

    half: int
    end: int
    arrived: int  # in the second half

    @property
    def grows(self) -> bool:
        """Whether requests came faster than they were begun: a longer run would keep fewer promises."""
        chance = _DEVIATIONS * sqrt(self.half + self.end + 1)  # counts of waiting requests vary by so much
        return self.end > _GREW * self.half and self.end - self.half > _GREW_SHARE * self.arrived + chance


def queue_of(samples: Sequence[Sample]) -> Queue:
    """Count the requests without a first token at the middle and at the end of all arrivals."""
    if not samples:
        return Queue(0, 0, 0)
    first = min(sample.sent for sample in samples)
    last = max(sample.sent for sample in samples)
    middle = (first + last) / 2

    def waiting(at: float) -> int:
        begun = [sample.times[0] if sample.times else sample.ended for sample in samples if sample.sent < at]
        return sum(moment > at for moment in begun)

    return Queue(waiting(middle), waiting(last), sum(sample.sent >= middle for sample in samples))


def offered_rate(samples: Sequence[Sample]) -> float:
    """Return how many requests arrived per second; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    seconds = max(sample.sent for sample in samples) - min(sample.sent for sample in samples)
    return (len(samples) - 1) / seconds if seconds else 0.0


class Trial(NamedTuple):
    """A rate that was tried: the share of good requests, and whether a queue grew."""

    rate: float
    good: float
    grows: bool


def highest_rate(run: Callable[[float], tuple[float, bool]], goal: float, start: float) -> list[Trial]:
    """Return the trials of a search for the highest rate that keeps a share of requests good, by rising rate.

    `run` returns the share of good requests at a rate, and whether a queue grew. The search doubles or halves `start`
    until one rate keeps `goal` and the next does not, and then halves the distance until 5 % are left.
    """
    trials: list[Trial] = []

    def keeps(rate: float) -> bool:
        good, grows = run(rate)
        trials.append(Trial(rate, good, grows))
        return good >= goal and not grows

    low = high = 0.0
    rate = start
    while len(trials) < _MOST_RUNS and (not low or not high):
        if keeps(rate):
            low = rate
            rate = 2 * rate
        else:
            high = rate
            rate = rate / 2
    while len(trials) < _MOST_RUNS and high / low > _CLOSE:
        middle = (low * high) ** 0.5
        if keeps(middle):
            low = middle
        else:
            high = middle
    return sorted(trials)


def best_of(trials: Sequence[Trial], goal: float) -> Trial | None:
    """Return the trial with the highest rate that keeps the goal; None: no rate does."""
    return max((trial for trial in trials if trial.good >= goal and not trial.grows), default=None)
