"""One replica's engine: schedule, execute, update. Synchronous, single-threaded, on the clock it is given."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct, structs

from crossdock.workers.replica.engine.chunk_log import chunk_logger, log_chunks
from crossdock.workers.replica.engine.executor import Drafts, Executor, TokenSampler
from crossdock.workers.replica.engine.pipeline import FinishedStep, Pipeline
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.cost.cost import NO_LIMIT, StepWork
from crossdock.workers.schedule.cost.cost_fit import IntervalShare, StepCostFit
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCostFit
from crossdock.workers.schedule.pictures.encoding import ItemFailure
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.failures import NOT_FINITE
from crossdock.workers.schedule.request.items import items_in
from crossdock.workers.schedule.request.page_hashes import PageHash
from crossdock.workers.schedule.request.request import FinishReason, Request, Status, TokenDelta
from crossdock.workers.schedule.request.submission import InvalidField, Submission
from crossdock.workers.schedule.scheduler import Scheduler

if TYPE_CHECKING:  # an engine on an emulated device imports no torch
    from crossdock.workers.model.model import LoadedModel
    from crossdock.workers.model.pictures.vision import PictureEncoder, PromptPictures

logger = logging.getLogger(__name__)


OnScheduled: TypeAlias = Callable[[Batch], None]
"""Takes the batch of a step before the step is executed."""


class Step(Struct, frozen=True):
    """A step that has ended: its batch, its deltas and its times, in seconds on the engine's clock."""

    batch: Batch
    deltas: Sequence[TokenDelta]
    started: float
    seconds: float = 0.0
    predicted: float = 0.0  # seconds; 0 before the engine is calibrated
    interval: float = 0.0  # seconds since it began or the step before it ended, whichever was later
    encoder_seconds: float = 0.0  # of `seconds`, for pictures


class OtherWeights(RuntimeError):
    """The request is for other weights than this replica's: the router places it again."""


class Engine:
    """Serves requests on one executor. Calls of `add`, `abort` and `step` must not overlap."""

    def __init__(self, executor: Executor, clock: Callable[[], float] = time.monotonic) -> None:
        self.executor = executor
        self.clock = clock  # seconds
        self.config = executor.config
        self.pages = executor.pages
        self.worker_group = executor.worker_group
        self._step_deadline = executor.step_deadline
        self.tiers = executor.tiers
        self.adapters = executor.adapters
        self.grammars = executor.grammars
        self.speculation = executor.speculation
        self.pool_spec = executor.spec_of
        self.cost_fit: StepCostFit | None = None  # set by `calibrate`
        self.encoder_fit: EncoderCostFit | None = None  # set by `calibrate_encoder`
        self.intervals = IntervalShare(())  # set by `calibrate`
        self.num_not_finite = 0  # requests that ended because the model computed NaN or infinity
        self._sampler = executor.sampler
        self.head = executor.head
        self.scheduler = Scheduler(
            executor.config,
            executor.pages,
            executor.max_model_len,
            executor.eos_token_ids,
            depth=executor.runner.num_stages,
            drafting=None if executor.speculation is None else executor.speculation.policy,
            encoding=executor.encoding,
            tiers=None if executor.tiers is None else executor.tiers.tiers,
            max_loras=0 if executor.adapters is None else executor.config.max_loras,
            row_tile=executor.row_tile,
        )
        self.pipeline = Pipeline(executor.runner, executor.sampler, clock, executor.is_ahead, head=self.head)

    @property
    def model(self) -> "LoadedModel":
        """The model that computes the steps. An emulated device has none."""
        assert self.executor.model is not None
        return self.executor.model

    @property
    def _encoder(self) -> "PictureEncoder | None":
        return None if self.executor.model is None else self.executor.model.encoder

    @property
    def page_bytes(self) -> int:
        """The bytes of one KV page at all ranks together. Ranks that hold the same head count both."""
        spec = self.pool_spec("")
        return sum(spec.layouts_of(rank)[0].page_bytes for rank in range(len(spec.shards)))

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a `SchedulingProfile` that say how this engine is set up."""
        return {
            **SchedulingProfile.settings_of(self.config),
            "max_model_len": self.executor.max_model_len,
            "vocab_size": self.executor.vocab_size,
            "num_pages": self.pages.num_pages,
            "page_bytes": self.page_bytes,
            "runs_ahead": self.executor.is_ahead,
            "caches_prefixes": self.config.enable_prefix_caching,
        }

    @property
    def has_work(self) -> bool:
        return not self.pipeline.is_empty or (self.scheduler.table.has_work and not self.scheduler.is_paused)

    def offer_to_tiers(self) -> None:
        """Write cached pages to files while there is nothing to compute, so that a restart finds them."""
        if self.tiers is not None and not self.has_work:
            self.tiers.offer(self.pages.block_pool)

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(
        self,
        submission: Submission,
        arrived: float | None = None,
        grammar: Any = None,
        page_hashes: Sequence[PageHash] = (),
    ) -> None:
        """Queue a request that arrived at `arrived` on the engine's clock; None: now.

        `grammar` is the state of the request's grammar after its output tokens; None: `add` waits for the compile.
        `page_hashes`: of the first pages of the prompt, where the caller has them.

        Raises:
            InvalidField: the request can never be served.
            Overloaded: the time to first token that its class promises cannot be met now.
            OtherWeights: an update has replaced the weights that the request was placed for, or will.
        """
        if submission.weights != self.scheduler.weights.id:
            raise OtherWeights(f"the request is for weights {submission.weights!r}, not {self.scheduler.weights.id!r}")
        for token in _extremes(submission.prompt_token_ids):
            if not 0 <= token < self.executor.vocab_size:
                raise InvalidField(
                    f"prompt has token id {token}; this model's are 0 to {self.executor.vocab_size - 1}", "prompt"
                )
        self.executor.check(submission.sampling)
        if grammar is None and submission.sampling.grammar is not None:
            grammar = self.grammars.compile(submission.sampling.grammar, submission.output_token_ids)
        request = Request(submission, self.clock() if arrived is None else arrived)
        request.page_hashes = list(page_hashes)
        pictures = self._locate(request) if request.items else None
        self.scheduler.add(request)
        if pictures is not None and self._encoder is not None:
            self._encoder.add(request.id, pictures)
        self._sampler.add(request, grammar)
        if self.speculation is not None:
            self.speculation.add(request)

    def _locate(self, request: Request) -> "PromptPictures | None":
        if self.executor.encoding is None:
            raise InvalidField(f"prompt has pictures: {self.executor.why_text_alone}", "prompt")
        return None if self._encoder is None else self._encoder.locate(request)

    def _forget(self, request_id: str) -> None:
        """Drop the state of a request in sampling, drafting and the encoder."""
        self._sampler.remove(request_id)
        if self._encoder is not None:
            self._encoder.remove(request_id)
        if self.speculation is not None:
            self.speculation.remove(request_id)

    async def compiled(self, submission: Submission) -> Any:
        """Return the state of the request's grammar after its output tokens; None for a request without one.

        May be called at any time, on an event loop. Nothing of the engine waits for the compile.

        Raises:
            InvalidField: the grammar cannot be served. Overloaded: too many other grammars come first.
        """
        grammar = submission.sampling.grammar
        if grammar is None:
            return None
        may_refuse = submission.may_refuse
        owner = submission.key_owner
        return await self.grammars.compiled(grammar, submission.output_token_ids, may_refuse, owner)

    def abort(self, request_id: str) -> Request | None:
        """End a request in any state, unless the request is in flight. Returns None: the request has ended already."""
        assert not self.is_in_flight(request_id), "a step in flight still writes to its pages"
        self._forget(request_id)
        return self.scheduler.abort(request_id)

    def arrive(self, request_id: str, token_id: int) -> None:
        """Let a held request decode from the next step on: all its pages and its first token have arrived."""
        self._sampler.accept(request_id, token_id)
        self.scheduler.handoff.start_decoding(request_id, token_id, self.clock())

    def ship(self, request_id: str) -> None:
        """End a held request here: all its pages are at another replica."""
        self._forget(request_id)
        self.scheduler.handoff.finish_sent(request_id)

    def take_returned(self) -> list[Request]:
        """Return the requests that ended here since the last call, to make way for more urgent ones."""
        returned = self.scheduler.table.take_returned()
        for request in returned:
            self._forget(request.id)
        return returned

    def is_in_flight(self, request_id: str) -> bool:
        """Return whether a step that has begun computes a part of the request.

        Between two calls of `step` the next one may have begun already."""
        return self.pipeline.contains(request_id)

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self, on_scheduled: OnScheduled = lambda _: None) -> Step:
        """Schedule, execute, update: begin as many steps as may be in flight, then end the oldest.

        A step is any mix of chunks and decodes in one forward pass. See pipeline.py for how many are in flight.
        `on_scheduled`: called with each batch before the batch is executed.
        """
        failed = self.load_adapters()
        while self.pipeline.has_room and self.begin_step(on_scheduled):
            pass
        step = self.finish_step() if not self.pipeline.is_empty else Step(Batch((), 0), (), self.clock())
        return structs.replace(step, deltas=[*failed, *step.deltas]) if failed else step

    def load_adapters(self) -> list[TokenDelta]:
        """Begin to load the adapters that waiting requests need, and let those start whose adapters are loaded.

        Returns the last deltas of the requests whose adapters cannot be loaded.
        """
        if self.adapters is None:
            return []
        for request, _ in (failed := self.adapters.take_in(self.scheduler.adapters)):
            self._forget(request.id)
        deltas = [self.scheduler.fail(request, reason, "model") for request, reason in failed]
        self.adapters.begin(self.scheduler.adapters_to_load(self.clock()))
        return deltas

    def watch_loads(self, post: Callable[[Callable[[], object]], None]) -> None:
        """Have pages of tiers and adapters taken in between two steps, once they are loaded. `post` may be called in
        another thread."""
        if self.adapters is not None:
            self.adapters.on_done.append(lambda: post(lambda: None))  # every turn takes in what is loaded
        if self.tiers is not None:
            take_in = partial(self.tiers.take_in, self.scheduler.loading)
            self.tiers.on_done.append(lambda: post(take_in))

    def begin_step(self, on_scheduled: OnScheduled = lambda _: None) -> bool:
        """Schedule the next step and begin to execute it. Return whether there was one that can begin now."""
        if self.scheduler.is_paused:
            return False
        if self.tiers is not None:
            self.tiers.take_in(self.scheduler.loading)
        now = self.clock()
        before = self.pipeline.newest
        if before is None or not self.pipeline.is_ahead:
            if self.speculation is None:
                return self._execute(self.scheduler.schedule(now), now, on_scheduled)
            streams = self.scheduler.choose_streams(now)
            drafts = self.speculation.drafts(streams.wanted_drafts)
            now = self.clock()  # drafting is no part of the step, whose seconds are learnt from
            return self._execute(self.scheduler.schedule(now, drafts, streams), now, on_scheduled)
        if before.device_tokens is None or self.scheduler.table.needs_preemption:
            return False
        predicted = self._predicted(before.batch)
        ended = max(before.started + predicted, now)
        with assume_ended(self.scheduler.table, before.batch, ended):
            return self._execute(self.scheduler.schedule(ended), now, on_scheduled)

    def _execute(self, batch: Batch, now: float, on_scheduled: OnScheduled) -> bool:
        if self.tiers is not None:
            self.tiers.load(self.scheduler.loading.take_begun())
        on_scheduled(batch)
        if chunk_logger.isEnabledFor(logging.DEBUG):
            log_chunks(batch, self.scheduler.forecast.cost, self._predicted(batch))
        if batch:
            self.pipeline.begin(batch, now)
        return bool(batch)

    def finish_step(self) -> Step:
        """Wait for the oldest step in flight, and update its requests."""
        step = self.pipeline.finish()
        batch = step.batch
        seconds = step.ended - step.started
        deltas = self._fail_pictures(batch, step.picture_failures) if step.picture_failures else []
        deltas += self.scheduler.update(batch, step.sampled, step.ended)
        self.pipeline.draw_waiting()
        self._sampler.complete(deltas)
        if self.scheduler.weights.number:
            for delta in deltas:
                delta.weights = self.scheduler.weights.name
        for delta in deltas:
            if delta.is_not_finite:
                self.num_not_finite += 1
                logger.error("request %s ends: %s", delta.request_id, NOT_FINITE)
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
        predicted = self._learn(step)
        return Step(batch, deltas, step.started, seconds, predicted, step.interval, step.encoder_seconds)

    def _fail_pictures(self, batch: Batch, failures: Mapping[bytes, ItemFailure]) -> list[TokenDelta]:
        """End the requests whose part of a step read a picture that could not be encoded, before its update indexes
        pages. `failures`: the reasons by content hash. After a reason that passes, the next request tries again."""
        deltas = list[TokenDelta]()
        for part in batch.scheduled:
            items = items_in(part.request.items, part.start, part.start + part.num_tokens)
            reasons = [failures[item.content_hash].reason for item in items if item.content_hash in failures]
            if reasons and self.scheduler.table.get(part.request.id) is part.request:
                deltas.append(self.scheduler.fail(part.request, reasons[0]))
        for content_hash, failure in failures.items():
            if failure.is_passing:
                self.scheduler.encoding.forget(content_hash)
        return deltas

    def fail_all(self, error: str) -> list[tuple[Request, TokenDelta]]:
        """End every request with an error, after a step raised. Pages are freed; the engine can go on."""
        self.pipeline.clear()
        self.scheduler.drop_steps_in_flight()
        if self._encoder is not None:
            self._encoder.clear()
        failed = []
        for request in self.scheduler.table.requests():
            self.abort(request.id)
            delta = TokenDelta(request.id, [], epoch=request.epoch, finish_reason=FinishReason.ERROR, error=error)
            failed.append((request, delta))
        return failed

    # -- what steps cost ---------------------------------------------------------------------------------------------

    def run_batch(self, batch: Batch) -> float:
        """Execute and sample `batch` past the scheduler, which does not know its requests. Returns the seconds.

        For measurements, with no step in flight. The caller owns the requests' pages."""
        with _known(batch, self._sampler, self.speculation):
            started = self.clock()
            self.pipeline.compute(batch)
            return self.clock() - started

    def run_batch_often(self, batch: Batch, times: int = 3) -> list[float]:
        """Execute and sample `batch` often, with a step in every stage, or each step ahead of the tokens before it.

        Returns the seconds between two ends."""
        with _known(batch, self._sampler, self.speculation):
            return self.pipeline.compute_often(batch, times)

    def calibrate(
        self,
        sweep: Sequence[tuple[StepWork, float]],
        intervals: Sequence[tuple[float, float]] = (),
        most_context: float = NO_LIMIT,
    ) -> StepCostFit:
        """Predict the seconds of steps from now on, beginning with the measurements in `sweep`.

        `intervals`: (interval, seconds alone) of the steps of a full pipeline. `most_context`: see `StepCost`.
        """
        self.cost_fit = StepCostFit(sweep, most_context=most_context)
        self.intervals = IntervalShare(intervals)
        if self._step_deadline is not None and self.model.device.type == "cuda" and self.pipeline.deadline is None:
            # Not before: first steps compile kernels, for minutes.
            self.pipeline.deadline = self._step_deadline()
        self.scheduler.learn(self.cost_fit.cost, self.cost_fit.overrun, self.intervals.share)
        return self.cost_fit

    def calibrate_encoder(self, sweep: Sequence[tuple[Sequence[int], float]]) -> None:
        """Predict the seconds of pictures from now on, beginning with measurements of batches: see `EncoderCostFit`."""
        self.encoder_fit = EncoderCostFit(sweep)
        self.scheduler.encoding.cost = self.encoder_fit.cost

    def _predicted(self, batch: Batch) -> float:
        """Return the predicted seconds of a step with its pictures; 0 without a cost."""
        cost = self.scheduler.forecast.cost
        return 0.0 if cost is None else cost.seconds(batch.work) + self.scheduler.encoding.seconds(batch.encoder.items)

    def _learn(self, step: FinishedStep) -> float:
        """Compare a step with its prediction, and refine the next predictions. Returns the predicted seconds."""
        if self.encoder_fit is not None and step.encoder_seconds and not step.picture_failures:
            self.encoder_fit.observe(step.batch.encoder.items, step.encoder_seconds)
            self.scheduler.encoding.cost = self.encoder_fit.cost
        if self.cost_fit is None:
            return 0.0
        work = step.batch.work
        predicted = self._predicted(step.batch)
        if step.batch.is_scored or not step.is_usual:
            return predicted
        if step.is_alone:
            self.cost_fit.observe(work, step.ended - step.started - step.encoder_seconds)
        elif step.is_full:
            self.intervals.observe(step.interval, predicted)
            predicted *= max(self.pipeline.depth * self.intervals.share, 1.0)
        self.scheduler.learn(self.cost_fit.cost, self.cost_fit.overrun, self.intervals.share)
        return predicted


@contextmanager
def _known(batch: Batch, sampler: TokenSampler, speculation: Drafts | None) -> Iterator[None]:
    """Have the requests of a batch sampled that no call of `add` has brought. A head that drafts computes its share of
    prompts in their steps."""
    parties: list[TokenSampler | Drafts] = [sampler] if speculation is None else [sampler, speculation]
    for party, part in product(parties, batch.scheduled):
        party.add(part.request)
    try:
        yield
    finally:
        for party, part in product(parties, batch.scheduled):
            party.remove(part.request.id)


def _extremes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the lowest and the highest token id. Fast: a thousand choices of one long prompt call this."""
    return (min(token_ids), max(token_ids)) if token_ids else ()


def progress_of(engine: Engine, request_id: str, epoch: int, num_computed: int) -> list[int | str] | None:
    """Return how far an attempt is: numbers, one of which differs whenever the attempt has moved. None: not here.

    A waiting attempt moves whenever the engine computes anything, and every one while it is paused. May be called
    while a step is computed. `num_computed`: tokens that the engine has computed.
    """
    request = engine.scheduler.table.get(request_id)
    if request is None or request.epoch != epoch:
        return None
    own = [request.status.value, request.num_computed_tokens, request.num_tokens, request.num_preemptions]
    if engine.scheduler.is_paused:  # not stuck
        own.append(int(1000 * engine.clock()))
    waits = request.status is not Status.HELD and not request.is_decoding
    return [*own, num_computed] if waits else own
