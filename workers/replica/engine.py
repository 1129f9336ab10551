"""One replica's engine: schedule, execute, sample, update. Synchronous, single-threaded, on the clock it is given."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from pydantic import ByteSize
from torch import Tensor

from crossdock.kvtransfer.layout import PoolSpec
from crossdock.workers.model.grammar import GrammarCompiler, GrammarState
from crossdock.workers.model.graphs import decode_graphs
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.kv_memory import count_pages_that_fit
from crossdock.workers.model.model import PagedModel
from crossdock.workers.model.runner import Runner
from crossdock.workers.model.sampling.logprobs import logprobs_of
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import PendingTokens, sample
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.ranks import Gang, held, pool_spec
from crossdock.workers.report.profile import SchedulingProfile
from crossdock.workers.schedule.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.cost import StepCostFit, StepWork
from crossdock.workers.schedule.pages import PagePool
from crossdock.workers.schedule.request import (
    FinishReason,
    InvalidField,
    Request,
    SamplingParams,
    Status,
    Submission,
    TokenDelta,
    TokenLogprobs,
)
from crossdock.workers.schedule.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did, and when: seconds on the engine's clock."""

    batch: Batch
    deltas: Sequence[TokenDelta]
    started: float
    seconds: float = 0.0
    predicted: float = 0.0  # seconds; 0 before the engine is warm


@dataclass(slots=True)
class _Flight:
    """A step that has begun: with pipeline stages, or ahead of its tokens, the next begins before it ends."""

    batch: Batch
    sampled: Callable[[], dict[str, SampledToken]]  # waits for its end
    started: float
    is_alone: bool = True  # no other was in flight at the same time: what it took is what it costs
    found: Tensor | None = None  # its tokens where they are computed, for a step that begins before they are known
    void: set[str] = field(default_factory=set)  # requests whose tokens before it turned out to be others


@dataclass(slots=True, eq=False)
class Engine:
    """Serves requests on one model. `add`, `abort` and `step` must not overlap."""

    model: PagedModel
    config: EngineConfig
    tokenizer_dir: Path | None = None  # needed for grammars only
    clock: Callable[[], float] = time.monotonic  # seconds
    cost_fit: StepCostFit | None = None  # set by `warm_up`
    gang: Gang | None = None  # the other ranks, of which `model` is this one's part
    pages: PagePool = field(init=False)
    scheduler: Scheduler = field(init=False)
    _runner: Runner = field(init=False)
    _grammar_compiler: GrammarCompiler | None = None
    _rows: dict[str, SampleRow] = field(default_factory=dict)  # by request
    _grammars: dict[str, GrammarState] = field(default_factory=dict)
    _prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    _flights: deque[_Flight] = field(default_factory=deque)
    _is_ahead: bool = field(init=False)

    def __post_init__(self) -> None:
        num_pages = self._num_pages()
        self.model.allocate_pool(num_pages, self.config.page_size)
        self.pages = PagePool(num_pages, self.config.page_size, self.config.enable_prefix_caching)
        depth = self.model.part.position.num_stages
        self.scheduler = Scheduler(
            self.config, self.pages, self.model.max_model_len, self.model.eos_token_ids, depth=depth
        )
        tell = self.gang.step if self.gang is not None else None
        graphs = None
        if not self.config.enforce_eager:
            graphs = decode_graphs(self.model, self.config.page_size, self.config.max_num_seqs)
        self._runner = Runner(self.model, self.config.page_size, tell, graphs)
        self._is_ahead = self._may_be_ahead()
        if self.gang is not None:
            self.gang.begin(num_pages)

    def _may_be_ahead(self) -> bool:
        """Whether steps begin before the tokens of those before them are known. ValueError: they should, and cannot."""
        wanted, is_whole = self.config.async_scheduling, self.model.part.position.size == 1
        if wanted and not is_whole:
            raise ValueError("async_scheduling must be false or null where several ranks share the model")
        return wanted if wanted is not None else is_whole and self.model.device.type == "cuda"

    def _num_pages(self) -> int:
        """As many as every rank can hold. ValueError: too few for one request."""
        config, page_size = self.config, self.config.page_size
        room = self.gang.room if self.gang is not None else count_pages_that_fit(self.model, config.budget, page_size)
        num_pages, page_bytes = room
        needed = -(-self.model.max_model_len // page_size)
        if num_pages >= needed:
            return num_pages
        known = config.budget.known(self.model.device.type)
        limit = f"gpu_memory_utilization ({config.gpu_memory_utilization:g}) leaves memory that"
        if known is not None:
            limit = f"kv_cache_memory ({ByteSize(known).human_readable()})"
        raise ValueError(
            f"{limit} holds {num_pages * page_size} tokens of {page_bytes // page_size} bytes; one request of "
            f"max_model_len ({self.model.max_model_len}) needs {ByteSize(needed * page_bytes).human_readable()}"
        )

    def pool_spec(self, name: str) -> PoolSpec:
        """The KV pool here as other replicas must know it; `name` names the weights."""
        everyone = self.gang.everyone if self.gang is not None else [held(self.model)]
        rank = self.model.part.position.rank
        return pool_spec(everyone, rank, self.model, name, self.config.page_size, self.pages.num_pages)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flights)

    def add(self, submission: Submission, arrived: float | None = None) -> None:
        """Queues a request that arrived at `arrived` on the engine's clock; None: now.

        Raises:
            InvalidField: it can never be served.
            Overloaded: its class's time to first token cannot be met now.
        """
        for token in submission.prompt_token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise InvalidField(
                    f"prompt has token id {token}; this model's are 0 to {self.model.vocab_size - 1}", "prompt"
                )
        grammar = submission.sampling.grammar
        state = self._compile(grammar) if grammar is not None else None
        request = Request.from_submission(submission, self.clock() if arrived is None else arrived)
        self.scheduler.add(request)
        eos = tuple(self.model.eos_token_ids)
        self._rows[request.id] = SampleRow(request.sampling, request.token_ids, request.num_prompt_tokens, eos)
        if state is not None:
            self._grammars[submission.id] = state
            for token in submission.output_token_ids:
                state.accept(token)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is, but not in flight. None if it has ended already."""
        assert not self.is_in_flight(request_id), "its pages would be others' while a step still writes to them"
        self._forget(request_id)
        return self.scheduler.abort(request_id)

    def step(self) -> Step:
        """Computes one batch: any mix of chunks and decodes in one forward pass. With pipeline stages, as many batches
        are begun as there are stages, and the oldest is ended. With `async_scheduling` the next one is begun, as far as
        it can be foreseen, before the tokens of this one are read: the device goes on while the host does the rest."""
        begin, most = (self._fly, 2) if self._is_ahead else (self._enter, self.scheduler.depth)
        while len(self._flights) < most and begin(self.clock()):
            pass
        return self._land() if self._flights else Step(Batch((), 0), (), self.clock())

    def _enter(self, now: float) -> bool:
        """Begins a step on the first of the stages; whether there was one."""
        batch = self.scheduler.schedule(now)
        if batch:
            for flight in self._flights:
                flight.is_alone = False
            finish = partial(self._finish, batch, self._runner.begin(batch))
            self._flights.append(_Flight(batch, finish, now, is_alone=not self._flights))
        return bool(batch)

    def _fly(self, now: float) -> bool:
        """Begins a step here, perhaps behind one in flight; whether there was one that could."""
        if not self._flights:
            return self._launch(self.scheduler.schedule(now), now)
        before = self._flights[-1]
        if before.found is None or self.scheduler.needs_preemption:
            return False
        predicted = self.cost_fit.cost.seconds(before.batch.work) if self.cost_fit is not None else 0.0
        ended = max(before.started + predicted, now)
        with self.scheduler.assume_ended(before.batch, ended):
            return self._launch(self.scheduler.schedule(ended), now, before.found)

    def _launch(self, batch: Batch, now: float, found: Tensor | None = None) -> bool:
        if not batch:
            return False
        logits, rows = self._runner.finish(self._runner.begin(batch), found)
        its = [self._rows[part.request.id] for part in batch.scheduled]
        if all(row.is_plain for row in its):
            sampling = [row for part, row in zip(batch.scheduled, its, strict=True) if part.samples]
            drawn = PendingTokens(logits, sampling)
            flight = _Flight(batch, partial(self._read, batch, drawn), now, found=drawn.on_device)
        else:
            flight = _Flight(batch, partial(self._sampled, batch, logits, rows), now)
        self._flights.append(flight)
        return True

    def _read(self, batch: Batch, drawn: PendingTokens) -> dict[str, SampledToken]:
        """Waits for a step. Where a token is found only now, the step behind it has begun with another."""
        ids = [part.request.id for part in batch.scheduled if part.samples]
        token_ids, late = drawn.read()
        for flight in self._flights if late else ():
            flight.void, flight.found = {ids[i] for i in late}, None
        return {id_: SampledToken(token_id) for id_, token_id in zip(ids, token_ids, strict=True)}

    def is_in_flight(self, request_id: str) -> bool:
        """Whether a step that has begun computes some of it. Between two steps, where the next has begun already."""
        return any(part.request.id == request_id for flight in self._flights for part in flight.batch.scheduled)

    def land(self) -> list[Step]:
        """Ends every step in flight, without beginning others."""
        return [self._land() for _ in range(len(self._flights))]

    def _land(self) -> Step:
        """Ends the oldest step in flight."""
        flight = self._flights.popleft()
        batch = flight.batch
        sampled = {id_: token for id_, token in flight.sampled().items() if id_ not in flight.void}
        ended = self.clock()
        if self._is_ahead:
            for later in self._flights:
                later.started = ended
        deltas = self.scheduler.update(batch, sampled, ended)
        for delta in deltas:
            delta.prompt_logprobs = self._prompt_logprobs.pop(delta.request_id, None)
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
        seconds = ended - flight.started
        return Step(batch, deltas, flight.started, seconds, self._learn(batch, seconds, flight.is_alone))

    def _compute(self, batch: Batch) -> dict[str, SampledToken]:
        return self._finish(batch, self._runner.begin(batch))

    def _finish(self, batch: Batch, inputs: tuple[StepInputs, list[range]]) -> dict[str, SampledToken]:
        return self._sampled(batch, *self._runner.finish(inputs))

    def _sampled(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> dict[str, SampledToken]:
        self._collect_prompt_logprobs(batch, logits, rows)
        sampled = self._sample(batch, logits, rows)
        self.model.wait()  # also where nothing was sampled: its pages may be shipped, and it has taken so long
        return sampled

    def _learn(self, batch: Batch, seconds: float, is_alone: bool) -> float:
        """Compares a step with its prediction, and predicts better from then on."""
        if self.cost_fit is None:
            return 0.0
        if not is_alone:
            return self.cost_fit.cost.seconds(batch.work)
        predicted = self.cost_fit.observe(batch.work, seconds)
        self.scheduler.learn(self.cost_fit.cost, self.cost_fit.overrun)
        return predicted

    def arrive(self, request_id: str, token_id: int) -> None:
        """All pages of a held request have arrived, with the first token: it decodes from the next step on."""
        if (grammar := self._grammars.get(request_id)) is not None:
            grammar.accept(token_id)
        self.scheduler.start_decoding(request_id, token_id, self.clock())

    def ship(self, request_id: str) -> None:
        """All pages of a held request are at another replica: it ends here."""
        self._forget(request_id)
        self.scheduler.finish_sent(request_id)

    def fail_all(self, error: str) -> list[tuple[Request, TokenDelta]]:
        """Ends every request with an error, after a step raised. Pages are freed; the engine can go on."""
        self._flights.clear()
        self.model.wait()
        self.scheduler.drop_steps_in_flight()
        failed = []
        for request in self.scheduler.requests():
            self.abort(request.id)
            delta = TokenDelta(request.id, [], epoch=request.epoch, finish_reason=FinishReason.ERROR, error=error)
            failed.append((request, delta))
        return failed

    def _forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
        self._grammars.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def _compile(self, grammar: object) -> GrammarState:
        if self._grammar_compiler is None:
            if self.tokenizer_dir is None:
                raise InvalidField(
                    "structured output needs the model's tokenizer, which this engine was started without", "grammar"
                )
            self._grammar_compiler = GrammarCompiler(
                self.tokenizer_dir, self.model.vocab_size, tuple(self.model.eos_token_ids)
            )
        return self._grammar_compiler.compile(grammar)  # type: ignore[arg-type]

    def _sample(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> dict[str, SampledToken]:
        parts = [
            (part, row[-1])
            for part, row in zip(batch.scheduled, rows, strict=True)
            if part.samples and part.request.status is not Status.FINISHED  # else with the step before
        ]
        if not parts:
            return {}
        if len(parts) < len(logits):
            logits = logits[torch.tensor([row for _, row in parts], device=logits.device)]
        sample_rows = [self._rows[part.request.id] for part, _ in parts]
        for part, _ in parts:
            if (grammar := self._grammars.get(part.request.id)) is not None:
                self._rows[part.request.id].allowed = grammar.mask()
        sampled = {}
        for (part, _), token in zip(parts, sample(logits, sample_rows), strict=True):
            state = self._grammars.get(part.request.id)
            if state is not None:
                state.accept(token.token_id)
            ends = state is not None and state.finished
            error = state.error if state is not None else None
            sampled[part.request.id] = SampledToken(token.token_id, token.logprobs, ends, error)
        return sampled

    def _collect_prompt_logprobs(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> None:
        """The logits of token i are the distribution of token i + 1; the prompt's first token has none."""
        for part, row in zip(batch.scheduled, rows, strict=True):
            top = part.request.sampling.prompt_logprobs
            if top is None or part.start >= part.request.num_prompt_tokens or part.request.num_output_tokens:
                continue
            found = self._prompt_logprobs.setdefault(part.request.id, [None])
            known = part.request.prompt_token_ids[part.start + 1 : part.start + part.num_tokens + 1]
            if known and len(found) == part.start + 1:  # not computed before a preemption
                found += logprobs_of(logits[row.start : row.start + len(known)], known, top)


def warm_up(engine: Engine) -> SchedulingProfile:
    """Makes an idle engine ready: runs it once, so that no user pays for first calls, then measures what steps of
    different kinds take. From then on the scheduler predicts."""
    config, model, pages = engine.config, engine.model, engine.pages
    prompt = [position % model.vocab_size for position in range(min(64, model.max_model_len - 4))]
    engine.add(Submission("warm-up", prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    pages.clear_cache()

    engine.cost_fit = StepCostFit(_sweep(engine))
    engine.scheduler.learn(engine.cost_fit.cost, engine.cost_fit.overrun)
    return SchedulingProfile(
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        page_size=config.page_size,
        num_pages=pages.num_pages,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        slo_classes=config.slo_classes,
        chunk_policy=config.chunk_policy,
        min_chunk_tokens=config.min_chunk_tokens or config.page_size,
        admission=config.admission,
        page_bytes=model.layout(config.page_size).page_bytes,
        tensor_parallel_size=model.part.position.tensor_size,
        pipeline_parallel_size=model.part.position.num_stages,
        cost=engine.cost_fit.cost,
        overrun=engine.cost_fit.overrun,
    )


def _sweep(engine: Engine) -> list[tuple[StepWork, float]]:
    """Steps of every kind and what they took, the best of three: chunks of several sizes and contexts, decodes in
    several numbers and contexts, and both together. What lies in the pages does not matter to the time, so deep
    contexts are swept without computing them. It takes 5 s of two cores (CPU time; SmolLM2-135M, Zen 4, 2026-11-21).
    """
    sweep: list[tuple[StepWork, float]] = []

    def measure(chunk: tuple[int, int] | None, num_streams: int = 0, context: int = 0) -> float:
        step = measure_step(engine, chunk, num_streams, context)
        if step is None:
            return 0.0
        sweep.append((step[0], min(step[1])))
        return min(step[1])

    config = engine.config
    longest = min(engine.model.max_model_len, engine.pages.num_pages * config.page_size)
    ceiling = min(config.max_num_batched_tokens, longest)
    small = large = min(64, ceiling)
    for large in [tokens for tokens in _SWEPT_CHUNKS if tokens <= ceiling] or [ceiling]:
        if measure((0, large)) > _LONG_STEP:
            break  # on this device a larger one only takes longer
    shallow, deep = ((longest - max(small, large)) // part // config.page_size * config.page_size for part in (4, 1))
    if shallow:
        measure((shallow, large))
        measure((shallow, small))
        measure((deep, small))
        measure((deep, min(config.page_size, small)))
    for streams in (1, 4, 16, 64):
        if streams > config.max_num_seqs:
            break
        for context in (32, 256, 2048):
            if context < longest and streams * context <= _SWEPT_CONTEXT:
                measure(None, streams, context)
        measure((0, small), streams, min(32, longest - 1))
        if shallow and streams in (4, 64):
            measure((shallow, small), streams, min(256, longest - 1))
    return sweep


_SWEPT_CHUNKS = (16, 64, 256, 1024, 4096)
_LONG_STEP = 0.1  # seconds
_SWEPT_CONTEXT = 16_384  # tokens of all streams together


def measure_step(
    engine: Engine,
    chunk: tuple[int, int] | None,
    num_streams: int,
    context: int,
    repeats: int = 3,
    vocabulary: int = 1,
) -> tuple[StepWork, list[float]] | None:
    """The work, and the seconds of each of `repeats` steps, of `chunk`, (start, tokens), beside `num_streams` decodes
    after `context` tokens each. Token ids are spread over the first `vocabulary`: experts are chosen by them. None: the
    pool does not hold so much now."""
    size = engine.config.page_size
    wanted = [(context, 1)] * num_streams + ([chunk] if chunk is not None else [])
    if sum(-(-(start + tokens) // size) for start, tokens in wanted) > engine.pages.num_available:
        return None
    parts = []
    for number, (start, tokens) in enumerate(wanted):
        name = f"warm-up-{number}"
        token_ids = [(number + place) * 7919 % vocabulary for place in range(start + tokens)]
        request = Request(name, token_ids, SamplingParams(temperature=0.0))
        pages = engine.pages.allocate(name, -(-(start + tokens) // size))
        engine._rows[name] = SampleRow(request.sampling, request.token_ids, request.num_prompt_tokens, ())
        parts.append(Scheduled(request, start, tokens, pages, samples=True))
    batch = Batch(parts, num_streams)
    seconds = []
    for _ in range(repeats):
        started = engine.clock()
        engine._compute(batch)
        seconds.append(engine.clock() - started)
    for part in parts:
        engine._forget(part.request.id)
        engine.pages.release(part.request.id)
    return batch.work, seconds
