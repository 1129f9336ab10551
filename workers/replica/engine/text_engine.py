"""An engine whose steps read whole texts through a text encoder. Pages are numbers: no memory stands behind them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from crossdock.kvtransfer.layout import LayerShape, PoolSpec, Shard
from crossdock.kvtransfer.transport import Memory
from crossdock.workers.model.text_encoder import TextBatch, TextEncoder
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.emulated import NoGrammars
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.executor import Drawn, Executor
from crossdock.workers.replica.step_sizes import sized_for
from crossdock.workers.replica.text_settings import of_text_engine
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.request.failures import NOT_FINITE
from crossdock.workers.schedule.request.request import FinishReason, Request, TokenDelta
from crossdock.workers.schedule.request.submission import InvalidField, SamplingParams, Submission

_SWEPT_TEXTS = ((8, 1), (64, 1), (256, 1), (512, 1), (2048, 1), (8192, 1), (16, 8), (64, 8), (64, 32))
"""Tokens of each text, and number of texts, of the steps that are measured at a start."""
_LONG_STEP = 0.3  # seconds; larger steps are not measured
_REPEATS = 3


class _Step(NamedTuple):
    """The texts of a step that has begun. Names as `Pipeline` reads them."""

    texts: TextBatch
    pictures: None = None


@dataclass(frozen=True, slots=True)
class TextRunner:
    """Computes the hidden states of whole texts, those of a step in one pass."""

    encoder: TextEncoder
    graphs_text: str = ""
    num_stages: int = 1

    def begin(self, batch: Batch) -> tuple[_Step, list[range]]:
        texts = [part.request.submission.prompt_token_ids for part in batch.scheduled]
        seconds = [part.request.submission.second_text for part in batch.scheduled]
        return _Step(self.encoder.batch(texts, seconds)), []

    def is_usual(self, inputs: _Step) -> bool:
        return True

    def finish(self, step: tuple[_Step, list[range]], previous_tokens: Any = None) -> tuple[Any, list[range]]:
        raise AssertionError("each request of a text encoder wants a vector")

    def finish_pooled(
        self, step: tuple[_Step, list[range]], previous_tokens: Any = None
    ) -> tuple[tuple[Any, list[range]], Tensor]:
        """Compute a step. Returns nothing to sample from, and the hidden states [T, E] of its texts."""
        return (None, []), self.encoder.hidden(step[0].texts)

    def wait(self) -> None:
        self.encoder.wait()


@dataclass(slots=True)
class TextVectors:
    """Makes the vector of each text, or the numbers of its labels, in place of tokens."""

    encoder: TextEncoder
    _found: dict[str, Tensor] = field(default_factory=dict)  # by request: [E] or [L] float32, on the host

    def add(self, request: Request, grammar: Any = None) -> None:
        pass

    def accept(self, request_id: str, token_id: int) -> None:
        pass

    def remove(self, request_id: str) -> None:
        self._found.pop(request_id, None)

    def pool(self, batch: Batch, hidden: Tensor) -> None:
        """Pool the hidden states [T, E] of a step. Waits for the device."""
        rows = torch.split(hidden, [part.num_tokens for part in batch.scheduled])
        texts = list(zip(batch.scheduled, rows, strict=True))
        pooled = torch.stack([self._pooled(part, own) for part, own in texts])
        vectors = pooled.cpu()
        asks = [part.request.sampling.pooling == "labels" for part, _ in texts]
        labels = iter(
            self.encoder.labels(pooled[torch.tensor(asks)].to(hidden.dtype)).float().cpu() if any(asks) else ()
        )
        for (part, _), vector, is_asked in zip(texts, vectors, asks, strict=True):
            self._found[part.request.id] = next(labels) if is_asked else vector

    def _pooled(self, part: Scheduled, rows: Tensor) -> Tensor:
        """Return the vector [E] in float32 of one text's hidden states [n, E]."""
        pooling = part.request.sampling.pooling
        if pooling == "mean" or (pooling == "labels" and self.encoder.labels_of_mean):
            return rows.mean(0, dtype=torch.float32)
        return rows[-1 if pooling == "last" else 0].float()

    def complete(self, deltas: Sequence[TokenDelta]) -> None:
        """Add the vectors of texts to their deltas. A vector with NaN or infinity becomes an error."""
        for delta in deltas:
            vector = self._found.pop(delta.request_id, None)
            if vector is None:
                continue
            if bool(vector.isfinite().all()):
                delta.embedding = vector.numpy().astype("<f4").tobytes()
            else:
                delta.finish_reason = FinishReason.ERROR
                delta.error = NOT_FINITE
                delta.is_not_finite = True

    def reads_tokens(self, batch: Batch) -> bool:
        return False

    def draw(self, batch: Batch, logits: Any, rows: Sequence[range], previous_tokens: Any = None) -> Drawn:
        raise AssertionError("no step of a text encoder runs ahead")

    def sample(self, batch: Batch, logits: Any, rows: Sequence[range]) -> Mapping[str, SampledToken]:
        return {}


def text_engine(encoder: TextEncoder, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> Engine:
    """Return an engine on a text encoder, not calibrated yet.

    Raises:
        ValueError: a text of `max_model_len` tokens does not fit into a step; the message names the field.
    """
    config = sized_for(of_text_engine(config), encoder.device, encoder.max_model_len)
    size = config.page_size
    # A step's texts, and one more: a queue never waits for pages.
    num_pages = config.max_num_batched_tokens // size + config.max_num_seqs + -(-encoder.max_model_len // size)
    spec = PoolSpec("texts", "none", 1, size, (LayerShape(1, 0, 0),), (Shard(0, ((0, 1),)),), 0, num_pages)
    executor = Executor(
        config,
        TextRunner(encoder),
        TextVectors(encoder),
        NoGrammars(),
        PagePool(num_pages, size, False, [None]),
        lambda: Memory(0, 0),
        encoder.max_model_len,
        encoder.vocab_size,
        frozenset(),
        is_ahead=False,
        check=lambda sampling: _check(encoder, sampling),
        spec_of=lambda _: spec,
        why_text_alone="a text encoder reads text alone",
    )
    return Engine(executor, clock)


def calibrate_texts(engine: Engine, encoder: TextEncoder) -> SchedulingProfile:
    """Run an idle engine once and measure its steps, so that the scheduler predicts from now on.

    Returns the profile that the replica advertises.
    """
    most = min(engine.config.max_num_batched_tokens, encoder.max_model_len)
    sweep = list[tuple[StepWork, float]]()
    longest = 0.0
    for tokens, count in sorted({(min(tokens, most), count) for tokens, count in _SWEPT_TEXTS}):
        if count > engine.config.max_num_seqs or tokens * count > engine.config.max_num_batched_tokens:
            continue
        if longest > _LONG_STEP and tokens * count > max(work.prefill_tokens for work, _ in sweep):
            continue
        batch = _texts(encoder, tokens, count)
        seconds = min(engine.run_batch(batch) for _ in range(_REPEATS))
        sweep.append((batch.work, seconds))
        longest = max(longest, seconds)
    fit = engine.calibrate(sweep)
    return SchedulingProfile(
        **engine.settings,
        device=encoder.device.type,
        generates=False,
        cost=fit.cost,
        overrun=fit.overrun,
    )


def _texts(encoder: TextEncoder, num_tokens: int, count: int) -> Batch:
    """Return a step of `count` texts of `num_tokens` tokens, which the scheduler does not know."""
    sampling = SamplingParams(max_tokens=0, pooling="labels" if encoder.answer == "labels" else "mean")
    parts = []
    for number in range(count):
        ids = [(number + place) * 7919 % encoder.vocab_size for place in range(num_tokens)]
        request = Request(Submission(f"warm-up-{number}", ids, sampling))
        parts.append(Scheduled(request, 0, num_tokens, (), samples=False))
    return Batch(parts, 0)


def _check(encoder: TextEncoder, sampling: SamplingParams) -> None:
    """Refuse what a text encoder does not answer. InvalidField: names the field."""
    is_label = sampling.pooling == "labels"
    if sampling.pooling is None or sampling.max_tokens:
        raise InvalidField("max_tokens: this model reads texts and generates none", "max_tokens")
    if is_label != (encoder.answer == "labels"):
        raise InvalidField(f"pooling: this model makes {encoder.answer} of texts", "pooling")
