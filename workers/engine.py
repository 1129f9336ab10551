"""One replica's engine: schedule, execute, sample, update. Synchronous and single-threaded; time is given to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ByteSize, Field
from torch import Tensor

from crossdock.workers.grammar import GrammarCompiler, GrammarState
from crossdock.workers.model import PagedModel
from crossdock.workers.pages import PagePool
from crossdock.workers.profile import SchedulingProfile
from crossdock.workers.request import FinishReason, Request, SamplingParams, Submission, TokenDelta, TokenLogprobs
from crossdock.workers.runner import Runner
from crossdock.workers.sampler import SampleRow, logprobs_of, sample
from crossdock.workers.scheduler import Batch, Sampled, Scheduler, SchedulerConfig


class EngineConfig(SchedulerConfig):
    """What an engine may use. Scheduling fields come from `SchedulerConfig`."""

    enable_prefix_caching: bool = Field(True, description="Share pages between requests with equal beginnings.")
    kv_cache_memory: ByteSize = Field(ByteSize(2 << 30), description="Memory for KV pages, e.g. 2GiB.")


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did."""

    batch: Batch
    deltas: Sequence[TokenDelta]


@dataclass(slots=True, eq=False)
class Engine:
    """Serves requests on one model. `add`, `abort` and `step` must not overlap."""

    model: PagedModel
    config: EngineConfig
    tokenizer_dir: Path | None = None  # needed for grammars only
    pages: PagePool = field(init=False)
    scheduler: Scheduler = field(init=False)
    _runner: Runner = field(init=False)
    _grammar_compiler: GrammarCompiler | None = None
    _rows: dict[str, SampleRow] = field(default_factory=dict)  # by request
    _grammars: dict[str, GrammarState] = field(default_factory=dict)
    _prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = self.model.layout(self.config.page_size)
        num_pages = int(self.config.kv_cache_memory) // layout.page_bytes
        needed = -(-self.model.max_model_len // self.config.page_size)
        if num_pages < needed:
            raise ValueError(
                f"kv_cache_memory ({self.config.kv_cache_memory.human_readable()}) holds "
                f"{num_pages * self.config.page_size} tokens of {layout.token_bytes} bytes; one request of "
                f"max_model_len ({self.model.max_model_len}) needs "
                f"{ByteSize(needed * layout.page_bytes).human_readable()}"
            )
        self.model.allocate_pool(num_pages, self.config.page_size)
        self.pages = PagePool(num_pages, self.config.page_size, self.config.enable_prefix_caching)
        self.scheduler = Scheduler(self.config, self.pages, self.model.max_model_len, self.model.eos_token_ids)
        self._runner = Runner(self.model, self.config.page_size)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, submission: Submission, now: float) -> None:
        """Queues a request. ValueError, naming the field, for one that cannot be served."""
        for token in submission.prompt_token_ids:
            if not 0 <= token < self.model.vocab_size:
                raise ValueError(f"prompt has token id {token}; this model's are 0 to {self.model.vocab_size - 1}")
        grammar = submission.sampling.grammar
        state = self._compile(grammar) if grammar is not None else None
        request = Request.from_submission(submission, now)
        self.scheduler.add(request)
        eos = tuple(self.model.eos_token_ids)
        self._rows[request.id] = SampleRow(request.sampling, request.token_ids, request.num_prompt_tokens, eos)
        if state is not None:
            self._grammars[submission.id] = state

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is. None if it has ended already."""
        self._forget(request_id)
        return self.scheduler.abort(request_id)

    def step(self, now: float) -> Step:
        """Computes one batch: any mix of chunks and decodes in one forward pass."""
        batch = self.scheduler.schedule(now)
        if not batch:
            return Step(batch, ())
        logits, rows = self._runner.execute(batch)
        self._collect_prompt_logprobs(batch, logits, rows)
        deltas = self.scheduler.update(batch, self._sample(batch, logits, rows))
        for delta in deltas:
            delta.prompt_logprobs = self._prompt_logprobs.pop(delta.request_id, None)
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
        return Step(batch, deltas)

    def fail_all(self, error: str) -> list[TokenDelta]:
        """Ends every request with an error, after a step raised. Pages are freed; the engine can go on."""
        deltas = []
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            self.abort(request.id)
            deltas.append(TokenDelta(request.id, [], finish_reason=FinishReason.ERROR, error=error))
        return deltas

    def _forget(self, request_id: str) -> None:
        self._rows.pop(request_id, None)
        self._grammars.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    def _compile(self, grammar: object) -> GrammarState:
        if self._grammar_compiler is None:
            if self.tokenizer_dir is None:
                raise ValueError("structured output needs the model's tokenizer, which this engine was started without")
            self._grammar_compiler = GrammarCompiler(
                self.tokenizer_dir, self.model.vocab_size, tuple(self.model.eos_token_ids)
            )
        return self._grammar_compiler.compile(grammar)  # type: ignore[arg-type]

    def _sample(self, batch: Batch, logits: Tensor, rows: Sequence[range]) -> dict[str, Sampled]:
        parts = [(part, row[-1]) for part, row in zip(batch.scheduled, rows, strict=True) if part.samples]
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
            sampled[part.request.id] = Sampled(token.token_id, token.logprobs, ends, error)
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


def warm_up(engine: Engine, clock: Callable[[], float]) -> SchedulingProfile:
    """Runs prompts and streams through an idle engine, so that no user pays for first calls, and times them."""
    config, model = engine.config, engine.model
    length = min(config.max_num_batched_tokens, 512, model.max_model_len - 16)
    num_streams = min(config.max_num_seqs, 8)

    def run(num_requests: int, num_tokens: int, max_tokens: int) -> list[float]:
        for number in range(num_requests):
            prompt = [(7 * position + number) % model.vocab_size for position in range(num_tokens)]
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            engine.add(Submission(f"warm-up-{number}", prompt, params), clock())
        seconds = []
        while engine.has_work:
            started = clock()
            engine.step(started)
            seconds.append(clock() - started)
        engine.pages.clear_cache()
        return seconds

    run(1, length, 4)
    prefill = min(run(1, length, 1)[0] for _ in range(2))
    alone = min(run(1, 4, 8)[1:])
    together = min(run(num_streams, 4, 8)[1:])
    return SchedulingProfile(
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        page_size=config.page_size,
        num_pages=engine.pages.num_pages,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        seconds_per_prompt_token=prefill / length,
        seconds_per_decode=max(together - alone, 0.0) / max(num_streams - 1, 1),
    )
