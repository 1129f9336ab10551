"""Seconds until a model without replicas can serve: learnt from its earlier starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_NEWEST = 0.5  # weight of the newest start: a second start finds files in the page cache


@dataclass(slots=True)
class Starts:
    """The starts of models: those that run, and how long earlier ones took. All times are on the caller's clock.

    A replica that wakes would begin here like one that starts, with seconds of its own.
    """

    guesses: Mapping[str, float]  # seconds of each model's first start
    learnt: dict[str, float] = field(default_factory=dict)  # by model
    _begun: dict[str, float] = field(default_factory=dict)  # by model

    def begin(self, model: str, now: float) -> None:
        """Note that the first replica of a model is starting."""
        self._begun[model] = now

    def end(self, model: str, now: float) -> float | None:
        """Note that a replica of the model is up. Returns the seconds that its start took; None: there was none."""
        begun = self._begun.pop(model, None)
        if begun is None:
            return None
        before = self.learnt.get(model, now - begun)
        self.learnt[model] = _NEWEST * (now - begun) + (1 - _NEWEST) * before
        return now - begun

    def remaining(self, model: str, now: float) -> float:
        """Return the predicted seconds until a replica of the model is up; its whole start where none has begun.

        A start that takes longer than predicted is expected to take a tenth of that longer.
        """
        whole = self.learnt.get(model, self.guesses.get(model, 0.0))
        return max(whole - (now - self._begun.get(model, now)), whole / 10)
