"""One replica's engine: schedule, execute, update. Synchronous, single-threaded, on the clock it is given."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from crossdock.kvtransfer.layout import PoolSpec
from crossdock.workers.draft.drafter import new_drafter
from crossdock.workers.model.encoder_model import EncoderModel
from crossdock.workers.model.grammar.compiler import GrammarCompiler
from crossdock.workers.model.grammar.state import GrammarState
from crossdock.workers.model.memory.kv_memory import count_pages_that_fit
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.pictures.vision import PromptPictures
from crossdock.workers.model.runner import Runner
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.chunk_log import chunk_logger, log_chunks
from crossdock.workers.replica.engine.pipeline import FinishedStep, Pipeline
from crossdock.workers.replica.engine.speculation import Speculation
from crossdock.workers.replica.engine.step_sampler import StepSampler
from crossdock.workers.replica.ranks.gang import Gang
from crossdock.workers.replica.ranks.pool_layout import choose_groups, held_layers, pool_spec
from crossdock.workers.replica.ranks.rank_messages import AllocatePool, RecordSteps
from crossdock.workers.replica.step_sizes import sized
from crossdock.workers.replica.tiers.open_tiers import open_tiers
from crossdock.workers.replica.tiers.tier_store import TierStore
from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.batch import Batch
from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit
from crossdock.workers.schedule.cost.interval_share import IntervalShare
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import Window
from crossdock.workers.schedule.pictures.arriving_rows import ArrivingRows
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCostFit
from crossdock.workers.schedule.pictures.encoding import LONGEST_SHIPPING_STEP_S, Encoding, ItemFailure
from crossdock.workers.schedule.pictures.items import items_in
from crossdock.workers.schedule.request import FinishReason, Request, TokenDelta
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.submission import InvalidField, Submission

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has ended: its batch, its deltas and its times, in seconds on the engine's clock."""

    batch: Batch
    deltas: Sequence[TokenDelta]
    started: float
    seconds: float = 0.0
    predicted: float = 0.0  # seconds; 0 before the engine is calibrated
    interval: float = 0.0  # seconds since it began or the step before it ended, whichever was later
    encoder_seconds: float = 0.0  # of `seconds`, for pictures


@dataclass(slots=True, eq=False)
class Engine:
    """Serves requests on one model. Calls of `add`, `abort` and `step` must not overlap."""

    model: LoadedModel
    config: EngineConfig
    tokenizer_dir: Path | None = None  # needed for grammars only
    clock: Callable[[], float] = time.monotonic  # seconds
    cost_fit: StepCostFit | None = None  # set by `calibrate`
    encoder_fit: EncoderCostFit | None = None  # set by `calibrate_encoder`
    intervals: IntervalShare = field(default_factory=lambda: IntervalShare(()))  # set by `calibrate`
    gang: Gang | None = None  # the other ranks, where `model` is one rank's part
    weights: str = ""  # names the weights, for tiers whose files outlive the engine
    on_scheduled: list[Callable[[Batch], None]] = field(default_factory=list)  # called before a step is executed
    tiers: TierStore | None = field(init=False)  # below the pool; None: a page that is evicted is gone
    pages: PagePool = field(init=False)
    scheduler: Scheduler = field(init=False)
    pipeline: Pipeline = field(init=False)
    grammars: GrammarCompiler = field(init=False)
    speculation: Speculation | None = field(init=False, default=None)
    _sampler: StepSampler = field(init=False)

    def __post_init__(self) -> None:
        config, model = sized(self.config, self.model), self.model
        self.config = config
        speculative = config.speculative_config
        self._sampler = StepSampler(tuple(model.eos_token_ids))
        drafting: DraftPolicy | None = None
        if speculative is not None:
            self.speculation = Speculation(
                new_drafter(speculative, model), self._sampler
            )  # before pages take all memory
            drafting = DraftPolicy(speculative, self.speculation)
        if self.gang is None:  # else its ranks have chosen them together
            self.model = model = choose_groups(model, config)
        windows = [group.window for group in model.groups] or [None]
        state_pages = model.state_pages(config.page_size)
        num_pages = self._num_pages(windows, state_pages)
        model.allocate_pool(num_pages, config.page_size)
        self.tiers = open_tiers(model, config, self.weights, num_pages)
        on_evict = None if self.tiers is None else self.tiers.evicted
        self.pages = PagePool(num_pages, config.page_size, config.enable_prefix_caching, windows, state_pages, on_evict)
        depth = model.part.position.num_stages
        encoding = _new_encoding(model, config)
        self.scheduler = Scheduler(
            *(config, self.pages, model.max_model_len, model.eos_token_ids),
            depth=depth,
            drafting=drafting,
            encoding=encoding,
            tiers=None if self.tiers is None else self.tiers.tiers,
        )
        self.grammars = GrammarCompiler(self.tokenizer_dir, model.vocab_size, model.eos_token_ids)
        is_ahead = self._runs_ahead()
        self.pipeline = Pipeline(self._runner(num_pages), self._sampler, self.clock, is_ahead)

    def _runner(self, num_pages: int) -> Runner:
        """Return the runner of the steps, after every rank has allocated its pool and recorded its part of steps."""
        config, gang = self.config, self.gang
        sizes = config.max_num_seqs, config.max_num_batched_tokens
        broadcast: Callable[[bytes], None] | None = None
        if gang is not None:
            broadcast = gang.run_step
            gang.broadcast(AllocatePool(num_pages))
            if not config.enforce_eager:
                gang.broadcast(RecordSteps(*sizes, config.most_drafts))  # ends only if this rank records too
        if config.enforce_eager:
            return Runner(self.model, config.page_size, broadcast)
        return Runner.recorded(self.model, config.page_size, *sizes, broadcast, most_drafts=config.most_drafts)

    def _runs_ahead(self) -> bool:
        """Return whether steps begin before the tokens of the step before are known.

        Raises:
            ValueError: `async_scheduling` is on, and the model is divided into stages.
        """
        wanted, is_one_stage = self.config.async_scheduling, self.model.part.position.num_stages == 1
        if wanted and not is_one_stage:
            raise ValueError("async_scheduling must be false or null for the stages of a pipeline")
        if self.config.speculative_config is not None:
            return False  # drafts continue the tokens of the step before
        return wanted if wanted is not None else is_one_stage and self.model.device.type == "cuda"

    def _num_pages(self, windows: Sequence[Window], state_pages: int) -> int:
        """Return how many KV pages every rank can hold. ValueError: fewer than one request needs."""
        budget, page_size = self.config.budget, self.config.page_size
        room = self.gang.page_budget if self.gang is not None else count_pages_that_fit(self.model, budget, page_size)
        needs = PageNeeds(page_size, windows, self.config.max_num_batched_tokens, state_pages)
        budget.check_one_request_fits(
            room.num_pages, room.page_bytes, needs, self.model.max_model_len, self.model.device.type
        )
        return room.num_pages

    def pool_spec(self, name: str) -> PoolSpec:
        """Return the KV pool as other replicas must know it; `name` names the weights."""
        held = self.gang.held_by_rank if self.gang is not None else [held_layers(self.model)]
        rank = self.model.part.position.rank
        return pool_spec(held, rank, self.model, name, self.config.page_size, self.pages.num_pages)

    @property
    def makes_tokens(self) -> bool:
        """Return whether requests get tokens here. On an encode replica they get rows of embeddings."""
        return not isinstance(self.model, EncoderModel)

    @property
    def page_bytes(self) -> int:
        """The bytes of one KV page at all ranks together. Ranks that hold the same head count both."""
        spec = self.pool_spec("")
        return sum(spec.layouts_of(rank)[0].page_bytes for rank in range(len(spec.shards)))

    @property
    def has_work(self) -> bool:
        return self.scheduler.table.has_work or not self.pipeline.is_empty

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, submission: Submission, arrived: float | None = None, grammar: GrammarState | None = None) -> None:
        """Queue a request that arrived at `arrived` on the engine's clock; None: now.

        `grammar` is the state of the request's grammar after its output tokens; None: `add` waits for the compile.

        Raises:
            InvalidField: the request can never be served.
            Overloaded: the time to first token that its class promises cannot be met now.
        """
        for token in _extremes(submission.prompt_token_ids):
            if not 0 <= token < self.model.vocab_size:
                raise InvalidField(
                    f"prompt has token id {token}; this model's are 0 to {self.model.vocab_size - 1}", "prompt"
                )
        if submission.sampling.pooling is not None and not self.model.tap.is_possible:
            reason = f"{self.model.config.model_type}: no hidden states can be taken out of this model"
            raise InvalidField(f"pooling: {reason}", "pooling")
        if grammar is None and submission.sampling.grammar is not None:
            grammar = self.grammars.compile(submission.sampling.grammar, submission.output_token_ids)
        request = Request.from_submission(submission, self.clock() if arrived is None else arrived)
        pictures = self._locate(request) if request.items else None
        self.scheduler.add(request)
        if pictures is not None and self.model.encoder is not None:
            self.model.encoder.add(request.id, pictures)
        self._sampler.add(request, grammar)
        if self.speculation is not None:
            self.speculation.drafter.add(request.id, request.token_ids)

    def _locate(self, request: Request) -> PromptPictures:
        if self.model.encoder is None:
            raise InvalidField(f"prompt has pictures: {self.model.why_text_alone}", "prompt")
        return self.model.encoder.locate(request)

    def _forget(self, request_id: str) -> None:
        """Drop the state of a request in sampling, drafting and the encoder."""
        self._sampler.remove(request_id)
        if self.model.encoder is not None:
            self.model.encoder.remove(request_id)
        if self.speculation is not None:
            self.speculation.drafter.remove(request_id)

    async def compiled(self, submission: Submission) -> GrammarState | None:
        """Return the state of the request's grammar after its output tokens; None for a request without one.

        May be called at any time, on an event loop. Nothing of the engine waits for the compile.

        Raises:
            InvalidField: the grammar cannot be served. Overloaded: too many other grammars come first.
        """
        grammar = submission.sampling.grammar
        if grammar is None:
            return None
        may_refuse, tenant = submission.may_refuse, submission.tenant
        return await self.grammars.compiled(grammar, submission.output_token_ids, may_refuse, tenant)

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

    def step(self) -> Step:
        """Schedule, execute, update: begin as many steps as may be in flight, then end the oldest.

        A step is any mix of chunks and decodes in one forward pass. See pipeline.py for how many are in flight.
        """
        while self.pipeline.has_room and self.begin_step():
            pass
        return self.finish_step() if not self.pipeline.is_empty else Step(Batch((), 0), (), self.clock())

    def begin_step(self) -> bool:
        """Schedule the next step and begin to execute it. Return whether there was one that can begin now."""
        if self.tiers is not None:
            self.tiers.take_in(self.scheduler.loading)
        now, before = self.clock(), self.pipeline.newest
        if before is None or not self.pipeline.is_ahead:
            if self.speculation is None:
                return self._execute(self.scheduler.schedule(now), now)
            streams = self.scheduler.choose_streams(now)
            drafts = self.speculation.drafts(streams.wanted_drafts)
            now = self.clock()  # drafting is no part of the step, whose seconds are learnt from
            return self._execute(self.scheduler.schedule(now, drafts, streams), now)
        if before.device_tokens is None or self.scheduler.table.needs_preemption:
            return False
        predicted = self._predicted(before.batch)
        ended = max(before.started + predicted, now)
        with assume_ended(self.scheduler.table, before.batch, ended):
            return self._execute(self.scheduler.schedule(ended), now)

    def _execute(self, batch: Batch, now: float) -> bool:
        if self.tiers is not None:
            self.tiers.load(self.scheduler.loading.take_begun())
        for listener in self.on_scheduled:
            listener(batch)
        if chunk_logger.isEnabledFor(logging.DEBUG):
            log_chunks(batch, self.scheduler.forecast.cost, self._predicted(batch))
        if batch:
            self.pipeline.begin(batch, now)
        return bool(batch)

    def finish_step(self) -> Step:
        """Wait for the oldest step in flight, and update its requests."""
        step = self.pipeline.finish()
        batch, seconds = step.batch, step.ended - step.started
        deltas = self._fail_pictures(batch, step.picture_failures) if step.picture_failures else []
        deltas += self.scheduler.update(batch, step.sampled, step.ended)
        for delta in deltas:
            delta.prompt_logprobs = self._sampler.take_prompt_logprobs(delta.request_id)
            delta.embedding = self._sampler.pooler.take(delta.request_id)
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
        if self.model.encoder is not None:
            self.model.encoder.clear()
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
        with self._sampling(batch):
            started = self.clock()
            self.pipeline.compute(batch)
            return self.clock() - started

    def run_batch_often(self, batch: Batch) -> list[float]:
        """Execute and sample `batch` often, with a step in every stage. Returns the seconds between two ends."""
        with self._sampling(batch):
            return self.pipeline.compute_often(batch)

    @contextmanager
    def _sampling(self, batch: Batch) -> Iterator[None]:
        for part in batch.scheduled:
            self._sampler.add(part.request)
        try:
            yield
        finally:
            for part in batch.scheduled:
                self._sampler.remove(part.request.id)

    def calibrate(
        self, sweep: Sequence[tuple[StepWork, float]], intervals: Sequence[tuple[float, float]] = ()
    ) -> StepCostFit:
        """Predict the seconds of steps from now on, beginning with the measurements in `sweep`.

        `intervals`: (interval, seconds alone) of the steps of a full pipeline.
        """
        self.cost_fit, self.intervals = StepCostFit(sweep), IntervalShare(intervals)
        pipeline = self.pipeline
        if self.gang is not None and self.model.device.type == "cuda" and pipeline.deadline is None:
            pipeline.deadline = self.gang.step_deadline()  # not before: first steps compile kernels, for minutes
        self.scheduler.learn(self.cost_fit.cost, self.cost_fit.overrun, self.intervals.share)
        return self.cost_fit

    def calibrate_encoder(self, sweep: Sequence[tuple[Sequence[int], float]]) -> None:
        """Predict the seconds of pictures from now on, beginning with measurements of batches: see `EncoderCostFit`."""
        self.encoder_fit = EncoderCostFit(sweep)
        self.scheduler.encoding.cost = self.encoder_fit.cost

    def _predicted(self, batch: Batch) -> float:
        """Return the predicted seconds of a step with its pictures; 0 without a cost."""
        encoder = self.encoder_fit.cost.seconds(batch.encoder.items) if self.encoder_fit is not None else 0.0
        return self.cost_fit.cost.seconds(batch.work) + encoder if self.cost_fit is not None else 0.0

    def _learn(self, step: FinishedStep) -> float:
        """Compare a step with its prediction, and refine the next predictions. Returns the predicted seconds."""
        if self.encoder_fit is not None and step.encoder_seconds and not step.picture_failures:
            self.encoder_fit.observe(step.batch.encoder.items, step.encoder_seconds)
            self.scheduler.encoding.cost = self.encoder_fit.cost
        if self.cost_fit is None:
            return 0.0
        predicted = self._predicted(step.batch)
        if step.batch.is_scored or not step.is_usual:
            return predicted
        if step.is_alone:
            self.cost_fit.observe(step.batch.work, step.ended - step.started - step.encoder_seconds)
        elif step.is_full:
            self.intervals.observe(step.interval, predicted)
            predicted *= max(self.pipeline.depth * self.intervals.share, 1.0)
        self.scheduler.learn(self.cost_fit.cost, self.cost_fit.overrun, self.intervals.share)
        return predicted


def _new_encoding(model: LoadedModel, config: EngineConfig) -> Encoding | None:
    """Return the cache of a model's embeddings of pictures; None: the model takes none."""
    if model.encoder is None:
        return None
    model.encoder.clear()
    makes_tokens = not isinstance(model, EncoderModel)
    rows = int(config.mm_encoder_cache) // model.encoder.row_bytes
    keeps_whole = model.encoder.attends_both_ways and makes_tokens
    longest_s = inf if makes_tokens or not config.enable_chunked_prefill else LONGEST_SHIPPING_STEP_S
    num_landing = max(rows // config.page_size, 2) if model.encoder.takes_rows else 0  # the last has no row
    return Encoding(rows, None, keeps_whole, longest_s, ArrivingRows(num_landing, config.page_size))


def _extremes(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the lowest and the highest token id. Fast: a thousand choices of one long prompt call this."""
    return (min(token_ids), max(token_ids)) if token_ids else ()
