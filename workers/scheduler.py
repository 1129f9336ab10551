"""Which tokens the next step computes. One rule: every request has tokens that are not computed yet; each step hands
out some, running decodes first, then prefills that have begun, then new ones. No torch, no ray, no clock."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, model_validator

from crossdock.workers.chunking import chunk_tokens, prefill_budget
from crossdock.workers.pages import PagePool, hash_pages
from crossdock.workers.request import FinishReason, Request, Status, TokenDelta, TokenLogprobs


class SchedulerConfig(BaseModel):
    """How much one step may carry. Names, meanings and defaults as in vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_batched_tokens: int = Field(
        512, ge=1, description="Tokens one step may compute, decodes and chunks together."
    )
    max_num_seqs: int = Field(64, ge=1, description="Requests that may hold pages at once.")
    enable_chunked_prefill: bool = Field(True, description="Off: a prompt is computed in one step or not at all.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Longest chunk of one prompt; 0 is the whole budget."
    )
    page_size: int = Field(16, ge=1, description="Tokens a KV page holds (vLLM's block size).")

    @model_validator(mode="after")
    def _every_step_can_progress(self) -> "SchedulerConfig":
        if self.max_num_batched_tokens < self.max_num_seqs + self.page_size:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}) + page_size ({self.page_size}): a step in which every stream decodes must "
                f"still have room for one page of a prompt"
            )
        if 0 < self.long_prefill_token_threshold < self.page_size:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must be 0 (off) or at least "
                f"page_size ({self.page_size}): chunks end on page boundaries"
            )
        return self


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's part of a step: compute its tokens `[start, start + num_tokens)`."""

    request: Request
    start: int
    num_tokens: int
    pages: Sequence[int]  # page i holds tokens [i * page_size, (i + 1) * page_size) of the request
    samples: bool  # the last of these tokens is the newest known: its logits give the next one


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: decodes first, then chunks."""

    scheduled: Sequence[Scheduled]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass(slots=True)
class Sampled:
    """What a step found for one request that `samples`."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    ends: bool = False  # the grammar is complete: nothing may follow
    error: str | None = None  # the grammar cannot go on: the request fails, others do not


@dataclass(slots=True)
class Scheduler:
    """Owns every request's state and the pages they hold. `schedule` and `update` alternate; `add` and `abort` come
    between them."""

    config: SchedulerConfig
    pages: PagePool
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: Collection[int] = ()
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)  # in order of admission: the last is preempted first
    num_preemptions: int = 0
    _requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        capacity = self.pages.num_pages * self.pages.page_size
        if capacity < self.max_model_len:
            raise ValueError(
                f"the KV pool holds {capacity} tokens ({self.pages.num_pages} pages of {self.pages.page_size}), less "
                f"than one request of max_model_len ({self.max_model_len}): give it more memory or lower max_model_len"
            )
        if not self.config.enable_chunked_prefill and self.config.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.config.max_num_batched_tokens}) must be at least max_model_len "
                f"({self.max_model_len}) when enable_chunked_prefill is off: a prompt is computed in one step"
            )

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request. ValueError, naming the field, for one that can never be served."""
        if not request.prompt_token_ids:
            raise ValueError("prompt must have at least one token")
        longest = self.max_model_len - (1 if request.sampling.max_tokens else 0)
        if request.num_prompt_tokens > longest:
            raise ValueError(
                f"prompt has {request.num_prompt_tokens} tokens; this model takes at most {longest} "
                f"(max_model_len is {self.max_model_len})"
            )
        if request.id in self._requests:
            raise ValueError(f"request_id {request.id!r} is already being served")
        self._requests[request.id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is and frees its pages. None if it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    # -- schedule: what the next step computes -----------------------------------------------------------------------

    def schedule(self, now: float) -> Batch:
        """The next step, empty when there is nothing to do. `now`: seconds on the clock of the arrival times."""
        batch = self._schedule_decodes()
        num_decodes = len(batch)
        budget = prefill_budget(self.config.max_num_batched_tokens, num_decodes)
        budget = self._continue_prefills(batch, budget)
        self._start_prefills(batch, budget)
        return Batch(batch, num_decodes)

    def _schedule_decodes(self) -> list[Scheduled]:
        decoding = [request for request in self.running if request.is_decoding]
        return [self._part(request, 1) for request in decoding if self._grow(request)]

    def _continue_prefills(self, batch: list[Scheduled], budget: int) -> int:
        for request in self.running:
            if not request.is_decoding:
                budget -= self._append_chunk(batch, request, budget)
        return budget

    def _start_prefills(self, batch: list[Scheduled], budget: int) -> None:
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            hits = self._match_prefix(request)
            if not self._chunk_tokens(request, len(hits) * self.pages.page_size, budget):
                break
            if not self._admit(request, hits):
                break
            self.waiting.popleft()
            budget -= self._append_chunk(batch, request, budget)

    def _chunk_tokens(self, request: Request, start: int, budget: int) -> int:
        if not self.config.enable_chunked_prefill:
            return request.num_tokens - start if request.num_tokens - start <= budget else 0
        threshold = self.config.long_prefill_token_threshold
        return chunk_tokens(start, request.num_tokens, budget, threshold, self.pages.page_size)

    def _append_chunk(self, batch: list[Scheduled], request: Request, budget: int) -> int:
        num_tokens = self._chunk_tokens(request, request.num_computed_tokens, budget)
        if num_tokens:
            batch.append(self._part(request, num_tokens))
        return num_tokens

    def _part(self, request: Request, num_tokens: int) -> Scheduled:
        start = request.num_computed_tokens
        samples = start + num_tokens == request.num_tokens and request.sampling.max_tokens > 0
        return Scheduled(request, start, num_tokens, self.pages.pages_of(request.id), samples)

    # -- pages -------------------------------------------------------------------------------------------------------

    def _match_prefix(self, request: Request) -> list[int]:
        """Cached pages this request can start from. At least one token is left to compute: its logits are wanted."""
        if not self.pages.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return []
        size = self.pages.page_size
        request.page_hashes = hash_pages(request.token_ids, size, request.cache_salt, request.page_hashes)
        return self.pages.match_prefix(request.page_hashes[: (request.num_tokens - 1) // size])

    def _admit(self, request: Request, hits: Sequence[int]) -> bool:
        """Reserves pages for *all* tokens the request has, before its first chunk: no prompt starts that cannot end."""
        num_new = -(-request.num_tokens // self.pages.page_size) - len(hits)
        headroom = len(self.running)  # a page each, so that an admission does not preempt in the very next step
        if not self.pages.can_allocate(num_new + headroom, shared=hits):
            return False
        self.pages.share(request.id, hits)
        self.pages.allocate(request.id, num_new)
        request.num_computed_tokens = len(hits) * self.pages.page_size
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        request.status = Status.RUNNING
        self.running.append(request)
        return True

    def _grow(self, request: Request) -> bool:
        """A page for the newest token where it begins one, preempting the last admitted until there is one; False
        when the request itself had to go."""
        if request.status is not Status.RUNNING:
            return False
        while request.num_tokens > len(self.pages.pages_of(request.id)) * self.pages.page_size:
            if self.pages.num_available:
                self.pages.allocate(request.id, 1)
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, to be recomputed: its tokens stay, its pages go (their cached prefix may
        still be there when it returns). Counter-based sampling makes the continuation the same."""
        self.running.remove(request)
        self.pages.release(request.id)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    # -- update: what the step found ---------------------------------------------------------------------------------

    def update(self, batch: Batch, sampled: Mapping[str, Sampled]) -> list[TokenDelta]:
        """Takes in a computed step. `sampled` has an entry for every part that `samples`."""
        deltas = []
        for part in batch.scheduled:
            request = part.request
            if request.status is not Status.RUNNING:  # aborted while the step ran
                continue
            request.num_computed_tokens = part.start + part.num_tokens
            self._index_pages(request, part.start)
            if part.samples:
                deltas.append(self._append_token(request, sampled[request.id]))
            elif request.num_computed_tokens == request.num_tokens:  # max_tokens is 0: only the prompt was wanted
                self._finish(request, FinishReason.LENGTH)
                deltas.append(self._delta(request, []))
        return deltas

    def _index_pages(self, request: Request, start: int) -> None:
        size = self.pages.page_size
        num_full = request.num_computed_tokens // size
        if num_full > start // size and self.pages.enable_prefix_caching:
            request.page_hashes = hash_pages(request.token_ids, size, request.cache_salt, request.page_hashes)
            self.pages.index(request.id, request.page_hashes[:num_full], first=start // size)

    def _append_token(self, request: Request, sampled: Sampled) -> TokenDelta:
        request.token_ids.append(sampled.token_id)
        params = request.sampling
        may_stop = request.num_output_tokens > params.min_tokens
        is_eos = sampled.token_id in self.eos_token_ids and not params.ignore_eos
        is_stop = may_stop and (is_eos or sampled.token_id in params.stop_token_ids)
        if sampled.error is not None:
            self._finish(request, FinishReason.ERROR)
        elif is_stop or sampled.ends:
            self._finish(request, FinishReason.STOP)
        elif request.num_output_tokens >= params.max_tokens or request.num_tokens >= self.max_model_len:
            self._finish(request, FinishReason.LENGTH)
        delta = self._delta(request, [sampled.token_id])
        delta.logprobs = [sampled.logprobs] if sampled.logprobs else None
        delta.error = sampled.error
        delta.stop_token_id = sampled.token_id if is_stop else None
        return delta

    def _delta(self, request: Request, token_ids: list[int]) -> TokenDelta:
        return TokenDelta(
            request.id, token_ids, finish_reason=request.finish_reason, num_cached_tokens=request.num_cached_tokens
        )

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.pages.release(request.id)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._requests[request.id]
