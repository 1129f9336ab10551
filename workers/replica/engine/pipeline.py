"""The steps that have begun and not ended. Three ways to run them share `begin` and `finish`.

- In turn: one step at a time; `finish` computes it.
- Pipelined: as many steps as there are pipeline stages. The other stages compute a step from `begin` on, this rank,
  which is on the last stage, in `finish`.
- Ahead: up to two steps. The device computes from `begin` on; the second step reads the tokens of the first on the
  device, and `finish` waits until the host has them. Where a row's mask depends on the token before, as a grammar's
  does, the device computes the second step meanwhile, and its tokens are drawn as soon as the first are on the host.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from crossdock.workers.replica.engine.executor import Drawn, StepRunner, TokenSampler
from crossdock.workers.replica.ranks.step_deadline import StepDeadline
from crossdock.workers.schedule.pictures.encoding import ItemFailure
from crossdock.workers.schedule.request.batch import Batch, SampledToken


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step that has begun and not ended."""

    batch: Batch
    started: float  # seconds, on the engine's clock
    result: Callable[[], Mapping[str, SampledToken]]  # waits for the end of the step
    is_alone: bool = True  # no other step was in flight meanwhile: its duration is its cost
    is_usual: bool = True  # computed as others of its size are, see `Runner.is_usual`
    device_tokens: Any = None  # [N] sampled ids on the device; None: the next step must wait for the host
    draw: Callable[[], None] | None = None  # draws the tokens, once those of the step before are on the host
    pictures: Any = None  # `StepPictures`; None: the step has none
    recomputed: Collection[str] = ()  # requests whose part began with a wrong token and is void


def _undrawn() -> Mapping[str, SampledToken]:
    raise AssertionError("a step ends after its tokens are drawn")


class FinishedStep(NamedTuple):
    """A step that has ended; times are seconds on the engine's clock."""

    batch: Batch
    sampled: Mapping[str, SampledToken]
    started: float
    ended: float
    interval: float  # seconds since it began or the step before it ended, whichever was later
    is_alone: bool
    is_usual: bool
    is_full: bool  # every stage had a step to compute since the step before it ended, and none was encoding
    encoder_seconds: float = 0.0  # part of the seconds that pictures took
    picture_failures: Mapping[bytes, ItemFailure] = {}  # of pictures that it read, by content hash


class StepReader(Protocol):
    """Reads hidden states of each step: a head that drafts from them."""

    @property
    def reads_last_states(self) -> bool:
        """Return whether `observe` needs the last hidden states of a step."""

    def observe(self, batch: Batch, hidden: Any) -> None:
        """Take a computed step.

        hidden: its last hidden states [T, E], valid until the next step; None: they were not asked for.
        """


@dataclass(slots=True, eq=False)
class Pipeline:
    """The steps in flight on one model, oldest first."""

    runner: StepRunner
    sampler: TokenSampler
    clock: Callable[[], float]  # seconds
    is_ahead: bool  # steps begin before the host has the tokens of the step before
    deadline: StepDeadline | None = None  # told of every step; None: calls between ranks have a deadline of their own
    head: StepReader | None = None  # reads hidden states of each step, before it is sampled
    _steps: deque[StepInFlight] = field(default_factory=deque)
    _ended: float = 0.0  # when the last step did

    @property
    def depth(self) -> int:
        """How many steps may be in flight."""
        return 2 if self.is_ahead else self.runner.num_stages

    @property
    def is_empty(self) -> bool:
        return not self._steps

    @property
    def has_room(self) -> bool:
        return len(self._steps) < self.depth

    @property
    def batches(self) -> Sequence[Batch]:
        """The batches in flight, oldest first."""
        return [step.batch for step in self._steps]

    @property
    def newest(self) -> StepInFlight | None:
        return self._steps[-1] if self._steps else None

    def contains(self, request_id: str) -> bool:
        """Return whether a step in flight computes a part of the request."""
        return any(part.request.id == request_id for step in self._steps for part in step.batch.scheduled)

    def begin(self, batch: Batch, now: float) -> None:
        """Begin to execute `batch`, behind the steps in flight."""
        if self.deadline is not None:
            self.deadline.begin()
        inputs = self.runner.begin(batch)
        if self.is_ahead:
            step = self._launch(batch, inputs, now)
        else:
            for other in self._steps:
                other.is_alone = False
            step = StepInFlight(batch, now, partial(self._compute, batch, inputs), is_alone=not self._steps)
        step.is_usual = self.runner.is_usual(inputs[0])
        step.pictures = inputs[0].pictures
        self._steps.append(step)

    def finish(self) -> FinishedStep:
        """Wait for the oldest step in flight."""
        is_full = len(self._steps) == self.depth > 1 and not self.is_ahead and self._steps[0].started < self._ended
        is_full = is_full and not any(each.batch.encoder.items for each in self._steps)
        step = self._steps.popleft()
        sampled = step.result()
        step.result = _undrawn  # it refers to the step: without a cycle the step's requests are freed at once
        if self.deadline is not None:
            self.deadline.end()
        ended = self.clock()
        if self.is_ahead:
            for later in self._steps:
                later.started = ended  # the device computes one step after the other
        interval = ended - max(step.started, self._ended)
        self._ended = ended
        pictures = (step.pictures.seconds, step.pictures.failures) if step.pictures is not None else ()
        return FinishedStep(
            step.batch, sampled, step.started, ended, interval, step.is_alone, step.is_usual, is_full, *pictures
        )

    def draw_waiting(self) -> None:
        """Draw the tokens of a step that waited for those of the step before. The requests have these now."""
        for step in self._steps:
            if step.draw is not None:
                draw = step.draw
                step.draw = None
                draw()

    def compute(self, batch: Batch) -> Mapping[str, SampledToken]:
        """Execute `batch` from its begin to its end, with no step in flight."""
        assert self.is_empty, "steps end in the order in which they began"
        return self._compute(batch, self.runner.begin(batch))

    def compute_often(self, batch: Batch, times: int = 3) -> list[float]:
        """Execute `batch` so many times for every step that may be in flight, with none in flight before.

        Returns the seconds between the ends, of those times when every stage had a step to compute, or when the step
        began ahead of the one before.
        """
        assert self.is_empty, "steps end in the order in which they began"
        intervals = []
        for number in range(times * self.depth + self.depth - 1):
            if number < times * self.depth:
                self.begin(batch, self.clock())
            if number >= self.depth - 1:
                step = self.finish()
                intervals += [step.interval] * (step.is_full or (self.is_ahead and number >= self.depth))
        return intervals

    def clear(self) -> None:
        """Drop the steps in flight, after one of them failed. Waits until the device no longer computes these."""
        self._steps.clear()
        self.runner.wait()

    def _launch(self, batch: Batch, inputs: tuple[Any, list[range]], now: float) -> StepInFlight:
        """Have the device compute `batch`. Tokens of the step before may be known to the device alone."""
        previous_tokens = self.newest.device_tokens if self.newest is not None else None
        logits, rows = self._logits(batch, inputs, previous_tokens)
        step = StepInFlight(batch, now, _undrawn)
        if previous_tokens is not None and self.sampler.reads_tokens(batch):
            step.draw = partial(self._draw, step, logits, rows)
        else:
            self._draw(step, logits, rows, previous_tokens)
        return step

    def _draw(self, step: StepInFlight, logits: Any, rows: Sequence[range], previous_tokens: Any = None) -> None:
        """Have the device draw the tokens of a launched step."""
        drawn = self.sampler.draw(step.batch, logits, rows, previous_tokens)
        step.result = partial(self._read, step, drawn)
        step.device_tokens = None if step.recomputed else drawn.on_device

    def _read(self, step: StepInFlight, drawn: Drawn) -> Mapping[str, SampledToken]:
        """Wait for the tokens of a launched step. The step behind began without the tokens that only the host can draw:
        in it the parts of these requests are void."""
        sampled, late = drawn.read(step.recomputed)
        for later in self._steps if late else ():
            later.recomputed = late
            later.device_tokens = None
        return sampled

    def _compute(self, batch: Batch, inputs: tuple[Any, list[range]]) -> Mapping[str, SampledToken]:
        return self._sample(batch, *self._logits(batch, inputs))

    def _logits(
        self, batch: Batch, inputs: tuple[Any, list[range]], previous_tokens: Any = None
    ) -> tuple[Any, list[range]]:
        """Compute a step as `Runner.finish` does. Hand over its hidden states: of prompts that want a vector, and those
        that a head reads."""
        hidden = None
        wants_vectors = batch.wants_vectors
        if wants_vectors or (self.head is not None and self.head.reads_last_states):
            computed, hidden = self.runner.finish_pooled(inputs, previous_tokens)
        else:
            computed = self.runner.finish(inputs, previous_tokens)
        if wants_vectors:
            self.sampler.pool(batch, hidden)
        if self.head is not None:
            self.head.observe(batch, hidden)
        return computed

    def _sample(self, batch: Batch, logits: Any, rows: Sequence[range]) -> Mapping[str, SampledToken]:
        sampled = self.sampler.sample(batch, logits, rows)
        # Also where nothing was sampled: the pages may be shipped next, and the step's seconds are learnt from.
        self.runner.wait()
        return sampled
