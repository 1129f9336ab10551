"""Which tokens the next step computes. One rule: every request has tokens that are not computed yet; each step hands
out some, running decodes first, then prefills in the order chunking.py gives. No torch, no ray, no clock."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from crossdock.workers.schedule.chunking import (
    IDLE,
    ChunkBudget,
    adaptive_chunk_budget,
    fixed_chunk_budget,
    is_starving,
    next_due,
    order_prefills,
    predicted_ttft,
    prefill_reason,
    reserved_slots,
    share_of_prompts,
    skip_decodes,
    steps_without_skips,
)
from crossdock.workers.schedule.cost import StepCost, StepWork
from crossdock.workers.schedule.pages import PageHash, PagePool, hash_pages
from crossdock.workers.schedule.request import (
    FinishReason,
    InvalidField,
    Leg,
    Overloaded,
    Request,
    Status,
    TokenDelta,
    TokenLogprobs,
)
from crossdock.workers.schedule.slo import DEFAULT_CLASS, DEFAULT_CLASSES, SloClass, priority_of


class SchedulerConfig(BaseModel):
    """How much one step may carry, and whose work goes first. Names and meanings as in vLLM where vLLM has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Tokens one step may compute, decodes and chunks together; the adaptive ceiling."
    )
    max_num_seqs: int = Field(64, ge=1, description="Requests that may hold pages at once.")
    chunk_policy: Literal["adaptive", "fixed"] = Field(
        "adaptive", description="adaptive: chunks fit the tightest stream's slack; fixed: vLLM's token budget."
    )
    min_chunk_tokens: int = Field(
        0, ge=0, description="Adaptive: prompt tokens a step carries however tight the slack is; 0 is one page."
    )
    enable_chunked_prefill: bool = Field(True, description="Off: a prompt is computed in one step or not at all.")
    mixed_chunks: bool = Field(
        True, description="Off: steps with chunks and steps with decodes alternate, as in SGLang."
    )
    max_prefill_tokens: int = Field(0, ge=0, description="Prompt tokens per step; 0 is whatever the budget leaves.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Longest chunk of one prompt, and where 'long' begins; 0: no limit, 4 % of max_model_len."
    )
    max_num_partial_prefills: int = Field(
        8, ge=1, description="Prompts that may be partly computed at once, those of less urgent classes not counted."
    )
    max_long_partial_prefills: int = Field(2, ge=1, description="Of these, how many may be long.")
    short_lane_share: float = Field(0.5, ge=0, lt=1, description="Share of each step's chunks kept for short prompts.")
    prefill_order: Literal["response_ratio", "fcfs"] = Field(
        "response_ratio", description="response_ratio: by class, then 1 + waited work / uncached tokens; fcfs: arrival."
    )
    starvation_s: float = Field(
        60.0, gt=0, description="Who has waited this long, and longer than its promise, goes first."
    )
    slo_classes: tuple[SloClass, ...] = Field(DEFAULT_CLASSES, description="What is promised, most urgent first.")
    default_slo_class: str = Field(DEFAULT_CLASS, description="The class of requests that name none.")
    admission: Literal["reject", "queue"] = Field(
        "reject", description="reject: 429 when the class's ttft_s cannot be met; queue: wait anyway."
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
        for name in ("long_prefill_token_threshold", "max_prefill_tokens", "min_chunk_tokens"):
            if 0 < getattr(self, name) < self.page_size:
                raise ValueError(
                    f"{name} ({getattr(self, name)}) must be 0 (the default) or at least page_size ({self.page_size}): "
                    f"chunks end on page boundaries"
                )
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills ({self.max_long_partial_prefills}) must be at most "
                f"max_num_partial_prefills ({self.max_num_partial_prefills})"
            )
        return self

    @model_validator(mode="after")
    def _classes_are_told_apart(self) -> "SchedulerConfig":
        names = [slo.name for slo in self.slo_classes]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"slo_classes must have different names, one at least; they are {', '.join(names)}")
        if self.default_slo_class not in names:
            raise ValueError(f"default_slo_class {self.default_slo_class!r} is none of {', '.join(names)}")
        if sum(int(slo.decode_share * self.max_num_seqs) for slo in self.slo_classes) >= self.max_num_seqs:
            raise ValueError("slo_classes: the decode_share of all classes together must be less than 1")
        return self


class Scheduled(NamedTuple):
    """One request's part of a step: compute its tokens `[start, start + num_tokens)`. A tuple, since every stream needs
    one for each of its tokens."""

    request: Request
    start: int
    num_tokens: int
    pages: Sequence[int]  # page i holds tokens [i * page_size, (i + 1) * page_size) of the request
    samples: bool  # the last of these tokens is the newest known: its logits give the next one
    reason: str = "decode"  # why it is in this step


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: decodes first, then chunks."""

    scheduled: Sequence[Scheduled]
    num_decodes: int
    limit: str = ""  # what bounded its chunks
    num_skipped: int = 0  # streams left out in favour of more urgent ones

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.scheduled)

    @property
    def work(self) -> StepWork:
        """What it costs, in the terms of `StepCost`."""
        return StepWork.of(
            [(part.start, part.num_tokens) for part in self.scheduled[self.num_decodes :]],
            [part.start for part in self.scheduled[: self.num_decodes]],
        )

    def __bool__(self) -> bool:
        return bool(self.scheduled)


@dataclass(slots=True)
class SampledToken:
    """What a step found for one request that `samples`."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    ends: bool = False  # the grammar is complete: nothing may follow
    error: str | None = None  # the grammar cannot go on: the request fails, others do not


@dataclass(slots=True)
class Scheduler:
    """Owns every request's state and the pages they hold. Every `schedule` is followed by its `update`, in the same
    order; `depth` steps may be in flight between the two. `add` comes at any time, all else while nothing is in flight.

    With several steps in flight, each takes its share of the streams, and a prompt's next chunk may follow before the
    one before has ended; what samples is waited for, unless it is `foreseen`. A request in flight keeps its pages.

    When time or pages run short, this is who slows down, first to last: prompts of the least urgent class, which wait
    for those of the others; its streams, which skip steps while their own promise allows it and lose their pages first;
    then the next class; the most urgent class's streams last. Who has waited `starvation_s`, and beyond
    its own promise, is exempt.
    """

    config: SchedulerConfig
    pages: PagePool
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: Collection[int] = ()
    cost: StepCost | None = None  # what steps take; without it chunks are fixed and nobody is refused
    overrun: float = 1.0  # by what factor they take longer now and then
    depth: int = 1  # steps in flight at most: pipeline stages
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)  # in order of admission
    held: list[Request] = field(default_factory=list)  # their pages are on the way in or out
    num_preemptions: int = 0
    work_done: int = 0  # prompt tokens handed out since the start: the clock of response ratios
    prefilled_seconds: float = 0.0  # what `cost` says of that work, the fixed part of steps left out
    work_of: Counter[int] = field(default_factory=Counter)  # of these, by priority
    lacks_pages: bool = False  # some that are `foreseen` to be kept are wanted: nothing is to be foreseen for now
    _requests: dict[str, Request] = field(default_factory=dict)
    _chunks_last: bool = False  # without mixed_chunks: the last step was one of chunks
    _now: float = 0.0  # of the step being scheduled
    _foreseen: Collection[str] = ()  # requests of the step that is taken to have ended

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
        """Whether a step would compute something. Requests whose pages are on the way do not count."""
        return bool(self.running) or any(request.leg is not Leg.RECEIVE for request in self.waiting)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def requests(self) -> list[Request]:
        """All that have not ended."""
        return list(self._requests.values())

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            InvalidField: it can never be served.
            Overloaded: its class's time to first token cannot be met, and `admission` is `reject`.
        """
        if not request.prompt_token_ids:
            raise InvalidField("prompt must have at least one token", "prompt")
        longest = self.max_model_len - (1 if request.sampling.max_tokens else 0)
        if request.num_prompt_tokens > longest:
            raise InvalidField(
                f"prompt has {request.num_prompt_tokens} tokens; this model takes at most {longest} "
                f"(max_model_len is {self.max_model_len})",
                "prompt",
            )
        if request.id in self._requests:
            raise InvalidField(f"request_id {request.id!r} is already being served", "request_id")
        request.priority = priority_of(self.config.slo_classes, request.slo_class)
        request.arrival_work, request.queued_at = self.work_done, request.arrival_time
        request.expected_cached_tokens = len(self._match_prefix(request)) * self.pages.page_size
        if request.leg is not Leg.RECEIVE and not request.output_token_ids:  # else its first token comes from elsewhere
            self._promise(request)
        self._requests[request.id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request in whatever state it is and frees its pages. None if it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def lose_flights(self) -> None:
        """No step in flight will have its update: nothing is written any more, and all is where it was before."""
        for request in self._requests.values():
            request.num_in_flight_tokens = 0

    # -- admission: can the promise be kept --------------------------------------------------------------------------

    def predict_ttft(self, request: Request) -> tuple[float, float]:
        """Seconds until the request's first token if it came now, and if it were alone; (0, 0) without a cost."""
        own = self.prefill_seconds(request)
        backlog = [(other.priority, self.prefill_seconds(other)) for other in self.prefills()]
        return predicted_ttft(own, request.priority, backlog, self.prefill_share(request.priority)), own

    def _promise(self, request: Request) -> None:
        """Notes when the first token will come, and refuses the request where that is too late."""
        if self.cost is None:
            return
        request.predicted_ttft, alone = self.predict_ttft(request)
        slo = self.config.slo_classes[request.priority]
        request.patience = deadline = slo.ttft_deadline(alone)
        late = request.predicted_ttft - deadline
        if late > 0 and self.config.admission == "reject" and self.has_work:
            raise Overloaded(
                f"the first token would come in {request.predicted_ttft:.1f} s; class {slo.name!r} promises "
                f"{deadline:.1f} s. Retry in {late:.1f} s, or ask for a less urgent class",
                retry_after=late,
            )

    def prefills(self) -> list[Request]:
        """Whose prompts are to be computed here, or in part."""
        waiting = [request for request in self.waiting if request.leg is not Leg.RECEIVE]
        return [*waiting, *(request for request in self.running if not request.is_decoding)]

    def prefill_seconds(self, request: Request) -> float:
        """What is left of a request's prompt takes on an idle replica; 0 without a cost."""
        if self.cost is None:
            return 0.0
        end = request.num_tokens
        return self.cost.prefill_seconds(end - request.num_uncached_tokens, end, self.config.max_num_batched_tokens)

    def prefill_share(self, priority: int) -> float:
        """The share of the time that goes into prompts of class `priority` while those streams run that are here, or soon
        will be."""
        streams = [request for request in self.running if request.is_decoding]
        arriving = [request for request in (*self.held, *self.waiting) if request.leg is Leg.RECEIVE]
        if self.cost is None or not (streams or arriving):
            return 1.0
        num_streams = len(streams) + len(arriving)
        seconds = self.cost.base + self.cost.decode_seconds(num_streams, sum(it.num_tokens for it in streams))
        if self.config.chunk_policy == "fixed":
            room = self.config.max_num_batched_tokens - num_streams
            return 1 - seconds / (seconds + self.cost.chunk_seconds(0, room))
        priorities = [it.priority for it in (*streams, *arriving)]
        return share_of_prompts(
            seconds,
            min(self.config.slo_classes[it].tpot_s for it in priorities),
            self.overrun,
            self.cost.per_prefill_token * self._floor if priority <= min(priorities) else 0.0,
            self.cost.per_prefill_token * self.pages.page_size,
        )

    # -- schedule: what the next step computes -----------------------------------------------------------------------

    def schedule(self, now: float) -> Batch:
        """The next step, empty when there is nothing to do. `now`: seconds on the clock of the arrival times."""
        self._now, self.lacks_pages = now, False
        batch = self._next_batch()
        for part in batch.scheduled:
            part.request.num_in_flight_tokens += part.num_tokens
        return batch

    def _next_batch(self) -> Batch:
        decodes, skipped = self._schedule_decodes()
        prefills = self._ordered_prefills()
        if self.config.mixed_chunks or not decodes or not prefills:
            return self._schedule_prefills(decodes, skipped, prefills)
        self._chunks_last = not self._chunks_last
        if self._chunks_last and (batch := self._schedule_prefills([], skipped, prefills)):
            return batch
        running = [part for part in decodes if part.request.status is Status.RUNNING]  # the attempt may have preempted
        return self._schedule_prefills(running, skipped, [])

    def _schedule_decodes(self) -> tuple[list[Scheduled], set[str]]:
        streams = [request for request in self.running if request.is_decoding]
        skipped: set[str] = set()
        if self.cost is not None and self.config.chunk_policy == "adaptive":
            skipped = skip_decodes(streams, self._now, self.cost)
        if self.depth > 1:
            share = -(-len(streams) // self.depth)
            streams = sorted((it for it in streams if not it.num_in_flight_tokens), key=lambda it: it.due)[:share]
        grown = [request for request in streams if request.id not in skipped and self._grow(request)]
        return [self._decode(request) for request in grown if request.status is Status.RUNNING], skipped

    def _ordered_prefills(self) -> list[Request]:
        if self.config.prefill_order == "response_ratio":
            return order_prefills(self.prefills(), self._now, self.work_done, self.config.starvation_s)
        prefills = self.prefills()
        return sorted(prefills, key=lambda request: request.status is Status.WAITING)  # stable: started ones first

    def _schedule_prefills(
        self, decodes: list[Scheduled], skipped: Collection[str], prefills: Sequence[Request]
    ) -> Batch:
        """The step of `decodes` and of chunks for as many prompts as there is room for."""
        if not prefills:  # nor was anybody preempted for one, unless decodes and chunks take turns
            decodes = [part for part in decodes if part.request.status is Status.RUNNING]
            return Batch(decodes, len(decodes), "", len(skipped))
        room = self._room(decodes, skipped)
        reason = room.reason
        if self.config.prefill_order == "response_ratio" and self.config.enable_chunked_prefill:
            short = sum(request.num_uncached_tokens for request in prefills if not self._is_long(request))
            room.keep_lane(self.config.short_lane_share, short)
        chunks = self._fill(room, prefills)
        if room.lane_tokens:  # the short ones did not need all of it, or had no pages or places
            room.end_lane()
            served = {part.request.id for part in chunks}
            chunks += self._fill(room, [request for request in prefills if request.id not in served])
        # Admitting one request may have preempted another that already had its part.
        decodes = [part for part in decodes if part.request.status is Status.RUNNING]
        chunks = [part for part in chunks if part.request.status is Status.RUNNING]
        return Batch([*decodes, *chunks], len(decodes), reason if chunks else "", len(skipped))

    def _room(self, decodes: Sequence[Scheduled], skipped: Collection[str]) -> ChunkBudget:
        config = self.config
        if self.cost is None or config.chunk_policy == "fixed" or not config.enable_chunked_prefill:
            room = fixed_chunk_budget(config.max_num_batched_tokens, len(decodes))
        else:
            streams = [it for it in self.running if it.is_decoding and it.id not in skipped]
            arriving = [self._due_at_best(it) for it in (*self.held, *self.waiting) if it.leg is Leg.RECEIVE]
            room = adaptive_chunk_budget(
                config.max_num_batched_tokens,
                self._floor,
                [part.start for part in decodes],
                min([it.due for it in streams] + arriving, default=inf) - self._now,
                IDLE * min(slo.ttft_s for slo in config.slo_classes),
                self.cost,
                min([it.priority for it in streams], default=len(config.slo_classes)),
                self.overrun,
            )
        if config.max_prefill_tokens and config.max_prefill_tokens < room.tokens:
            room.tokens, room.reason = config.max_prefill_tokens, "max_prefill_tokens"
        return room

    @property
    def _floor(self) -> int:
        """Prompt tokens of a step however little time there is."""
        return self.config.min_chunk_tokens or self.config.page_size

    def _due_at_best(self, request: Request) -> float:
        """When the second token of a request is due whose prompt another replica computes, if the rest of that is
        computed alone and as fast as here: a step that ends by then does not keep it waiting."""
        return self._now + self.prefill_seconds(request) + self.config.slo_classes[request.priority].tpot_s

    def _fill(self, room: ChunkBudget, prefills: Sequence[Request]) -> list[Scheduled]:
        chunks: list[Scheduled] = []
        blocked = len(self.config.slo_classes)  # from this priority on nobody may start: somebody before it lacks pages
        for request in prefills:
            if request.status is Status.WAITING:
                if request.priority > blocked:
                    continue
                started = self._start(request, room)
                if self.config.prefill_order == "fcfs" and not started:
                    blocked = -1
                elif started is None:
                    blocked = -1 if self._is_starving(request) else min(blocked, request.priority)
                if not started:
                    continue
            is_long, start = self._leaves_the_lane(request), request.num_scheduled_tokens
            num_tokens = self._chunk(request, start, room)
            if num_tokens:
                chunks.append(self._part(request, num_tokens, self._reason(request)))
                room.take(start, num_tokens, is_long)
                self.work_done += num_tokens
                if self.cost is not None:
                    self.prefilled_seconds += self.cost.chunk_seconds(start, num_tokens)
                self.work_of[request.priority] += num_tokens
        return chunks

    def _reason(self, request: Request) -> str:
        if self.config.prefill_order == "fcfs":
            return "first come"
        return prefill_reason(request, self._now, self.work_done, self.config.starvation_s)

    def _is_starving(self, request: Request) -> bool:
        return is_starving(request, self._now, self.config.starvation_s)

    def _chunk(self, request: Request, start: int, room: ChunkBudget) -> int:
        end = request.num_tokens
        if not self.config.enable_chunked_prefill:
            return end - start if end - start <= room.tokens else 0
        priority = -1 if self._is_starving(request) else request.priority
        threshold = self.config.long_prefill_token_threshold
        return room.chunk(start, end, priority, self._leaves_the_lane(request), threshold, self.pages.page_size)

    def _start(self, request: Request, room: ChunkBudget) -> bool | None:
        """Admits a waiting request if it would get a chunk now. None: only pages are missing."""
        if not self._has_place(request):
            return False
        hits = self._match_prefix(request)
        request.expected_cached_tokens = start = len(hits) * self.pages.page_size
        num_tokens = self._chunk(request, start, room)
        if not num_tokens:
            return False
        if start + num_tokens < request.num_tokens and not self._may_be_partial(request):
            return False
        return self._admit(request, hits) or None

    def _has_place(self, request: Request) -> bool:
        return self.num_places(request.priority) > 0

    def num_places(self, priority: int) -> int:
        """How many more of class `priority` may hold pages: of the places, some are kept for more urgent classes."""
        taken = [other.priority for other in self.running]
        taken += [
            other.priority for other in self.held if other.leg is Leg.RECEIVE
        ]  # one that is sent decodes elsewhere
        kept = reserved_slots(self.config.slo_classes, self.config.max_num_seqs, taken, priority)
        return self.config.max_num_seqs - len(taken) - kept

    def _may_be_partial(self, request: Request) -> bool:
        """Whether one more of its class or a more urgent one may be partly computed: the others do not keep it out."""
        partial = [other for other in self.running if not other.is_decoding and other.priority <= request.priority]
        num_long = sum(map(self._is_long, partial))
        if self._is_long(request) and num_long >= self.config.max_long_partial_prefills:
            return False
        return len(partial) < self.config.max_num_partial_prefills

    def _is_long(self, request: Request) -> bool:
        threshold = self.config.long_prefill_token_threshold or self.max_model_len // 25  # vLLM's default: 4 %
        return request.num_uncached_tokens > max(threshold, self.pages.page_size)

    def _leaves_the_lane(self, request: Request) -> bool:
        """Whether the room that is kept for short prompts is not for this one: it is long, and does not starve."""
        return self._is_long(request) and not self._is_starving(request)

    def _decode(self, request: Request) -> Scheduled:
        return Scheduled(request, request.num_computed_tokens, 1, self.pages.pages_of(request.owner), True)

    def _part(self, request: Request, num_tokens: int, reason: str) -> Scheduled:
        start = request.num_scheduled_tokens
        samples = start + num_tokens == request.num_tokens and request.sampling.max_tokens > 0
        return Scheduled(request, start, num_tokens, self.pages.pages_of(request.owner), samples, reason)

    # -- pages -------------------------------------------------------------------------------------------------------

    def _match_prefix(self, request: Request) -> list[int]:
        """Cached pages this request can start from. At least one token is left to compute: its logits are wanted."""
        if not self.pages.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return []
        return self.pages.match_prefix(self._hashes(request)[: (request.num_tokens - 1) // self.pages.page_size])

    def _hashes(self, request: Request) -> Sequence[PageHash]:
        """Of its full pages. Each is hashed once."""
        size = self.pages.page_size
        if len(request.page_hashes) < request.num_tokens // size:
            request.page_hashes = hash_pages(request.token_ids, size, request.cache_salt, request.page_hashes)
        return request.page_hashes

    def _admit(self, request: Request, hits: Sequence[int]) -> bool:
        """Reserves pages for *all* tokens the request has, before its first chunk: no prompt starts that cannot end."""
        num_new = -(-request.num_tokens // self.pages.page_size) - len(hits)
        arriving = [other for other in self.held if other.leg is Leg.RECEIVE]
        wanted = num_new + len(self.running) + len(arriving)  # a page each: nobody is preempted in the next step
        if not self.pages.can_allocate(wanted, shared=hits) and not self._make_way(request, wanted, hits):
            return False
        self.pages.share(request.owner, hits)
        self.pages.allocate(request.owner, num_new)
        request.num_computed_tokens = len(hits) * self.pages.page_size
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        self.waiting.remove(request)
        if request.leg is Leg.RECEIVE:
            request.status = Status.HELD
            self.held.append(request)
        else:
            request.status = Status.RUNNING
            self.running.append(request)
        return True

    def _make_way(self, request: Request, num_pages: int, hits: Sequence[int]) -> bool:
        """Preempts requests of less urgent classes, where that gives the pages `request` wants; else nobody."""
        self.lacks_pages |= any(
            other.priority > request.priority and other.id in self._foreseen for other in self.running
        )
        below = [
            other
            for other in self.running
            if other.priority > request.priority
            and not self._keeps_its_pages(other)
            and (other.is_decoding or not self._is_starving(other))
        ]
        if sum(len(self.pages.pages_of(other.owner)) for other in below) + self.pages.num_available < num_pages:
            return False
        while below and not self.pages.can_allocate(num_pages, shared=hits):
            victim = _last_to_keep(below)
            below.remove(victim)
            self._preempt(victim)
        return self.pages.can_allocate(num_pages, shared=hits)

    def _grow(self, request: Request) -> bool:
        """A page for the newest token where it begins one, preempting until there is one: the least urgent class first,
        in it the last admitted. False when the request itself had to go."""
        if request.status is not Status.RUNNING:
            return False
        while len(request.token_ids) > len(self.pages.pages_of(request.owner)) * self.pages.page_size:
            if self.pages.num_available:
                self.pages.allocate(request.owner, 1)
                break
            if self._foreseen:
                self.lacks_pages = True
                return False
            victim = _last_to_keep([other for other in self.running if not self._keeps_its_pages(other)])
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _keeps_its_pages(self, request: Request) -> bool:
        """They are being read to be sent, or written by a step in flight."""
        return request.leg is Leg.SEND or request.num_in_flight_tokens > 0 or request.id in self._foreseen

    def _preempt(self, request: Request) -> None:
        """Back to the queue, to be recomputed: its tokens stay, its pages go (their cached prefix may still be there
        when it returns). Counter-based sampling makes the continuation the same."""
        self.running.remove(request)
        self.pages.release(request.owner)
        request.status = Status.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.expected_cached_tokens = 0
        request.queued_at = self._now
        self.waiting.insert(0, request)

    # -- legs: a request's prompt is computed here, its tokens there ---------------------------------------------------

    def grant(self, now: float) -> list[Request]:
        """Reserves pages for requests that another replica prefills, in the order of prompts, as far as there are
        pages and places. The pages it found cached are the first `num_computed_tokens` of each."""
        granted = []
        arriving = [request for request in self.waiting if request.leg is Leg.RECEIVE]
        for request in order_prefills(arriving, now, self.work_done, self.config.starvation_s) if arriving else ():
            if not self._has_place(request) or not self._admit(request, self._match_prefix(request)):
                break
            granted.append(request)
        return granted

    def commit(self, request_id: str, num_tokens: int) -> None:
        """The first `num_tokens` of a held request have arrived; others can share their full pages from now on."""
        request = self._requests[request_id]
        start, request.num_computed_tokens = request.num_computed_tokens, num_tokens
        self._index_pages(request, start)

    def arrive(self, request_id: str, token_id: int, now: float) -> None:
        """All of a held request has arrived, and the token that the other replica sampled after it: it decodes."""
        request = self._requests[request_id]
        assert request.status is Status.HELD
        self.commit(request_id, request.num_tokens)
        request.token_ids.append(token_id)
        request.due = next_due(request.due, now, self.config.slo_classes[request.priority].tpot_s)
        request.status, request.leg = Status.RUNNING, Leg.LOCAL
        self.held.remove(request)
        self.running.append(request)

    def take_over(self, request_id: str, now: float) -> None:
        """The other replica is lost: this one finishes the prompt. What has arrived is found again by its hashes; the
        pages that the other may still be writing are quarantined until `pages.end_quarantine(owner)`."""
        request = self._requests[request_id]
        assert request.leg is Leg.RECEIVE
        request.leg = Leg.LOCAL
        if request.status is Status.HELD:
            self.held.remove(request)
            self.pages.quarantine(request.owner, request.num_computed_tokens // self.pages.page_size)
            request.status, request.queued_at = Status.WAITING, now
            request.expected_cached_tokens, request.num_computed_tokens = request.num_computed_tokens, 0
            self.waiting.insert(0, request)

    def shipped(self, request_id: str) -> None:
        """The pages of a held request are all at the other replica: it ends here."""
        self._finish(self._requests[request_id], FinishReason.SHIPPED)

    # -- before it is known what a step finds ------------------------------------------------------------------------

    @contextmanager
    def foreseen(self, batch: Batch, ended: float) -> Iterator[None]:
        """As if `batch`, the one step in flight, had ended at `ended`: to schedule the step after it. For a token that
        is not known stands `~row`, with its row among those that `batch` samples. Who ends whatever it is, is gone; who
        turns out to have ended was scheduled in vain. Nobody loses pages over what is not certain: see `lacks_pages`.
        """
        running, ids = self.running, {request.id for request in self.running}
        taken = []
        row = 0
        for part in batch.scheduled:
            request = part.request
            if request.status is Status.RUNNING:
                taken.append((part, request.due))
                request.num_in_flight_tokens -= part.num_tokens
                request.num_computed_tokens += part.num_tokens
                if part.samples:
                    request.token_ids.append(~row)
                    request.due = next_due(request.due, ended, self.config.slo_classes[request.priority].tpot_s)
            row += part.samples
        self._foreseen = {part.request.id for part, _ in taken}
        gone = {part.request.id for part, _ in taken if self._is_over(part)}
        self.running = [request for request in running if request.id not in gone]
        try:
            yield
        finally:
            started = [request for request in self.running if request.id not in ids]
            self.running = [request for request in running if request.status is Status.RUNNING] + started
            self._foreseen = ()
            for part, due in taken:
                request, request.due = part.request, due
                request.num_in_flight_tokens += part.num_tokens
                request.num_computed_tokens -= part.num_tokens
                if part.samples:
                    request.token_ids.pop()

    def _is_over(self, part: Scheduled) -> bool:
        """Whether its request does not go on after this part, whatever the token is that it ended with."""
        request = part.request
        if part.samples:
            return request.leg is Leg.SEND or self._is_full(request)
        return request.num_computed_tokens == request.num_tokens  # only the prompt was wanted

    def _is_full(self, request: Request) -> bool:
        """Whether its newest token is the last that it may have."""
        return request.num_output_tokens >= request.sampling.max_tokens or request.num_tokens >= self.max_model_len

    # -- update: what the step found ---------------------------------------------------------------------------------

    def update(self, batch: Batch, sampled: Mapping[str, SampledToken], now: float) -> list[TokenDelta]:
        """Takes in a computed step that ended at `now`. `sampled` has an entry for every part that `samples`, but for
        those that were computed from a token which was not the one foreseen: they are to be computed again."""
        deltas, size = [], self.pages.page_size
        for part in batch.scheduled:
            request = part.request
            request.num_in_flight_tokens -= part.num_tokens
            if request.status is not Status.RUNNING:
                is_written = request.num_in_flight_tokens or request.leg is Leg.SEND
                if request.status is Status.FINISHED and not is_written:
                    self.pages.release(request.owner)
                continue
            if part.samples and request.id not in sampled:
                continue
            end = request.num_computed_tokens = part.start + part.num_tokens
            if end // size > part.start // size:
                self._index_pages(request, part.start)
            if part.samples:
                deltas.append(self._append_token(request, sampled[request.id]))
                request.due = next_due(request.due, now, self.config.slo_classes[request.priority].tpot_s)
                if request.leg is Leg.SEND and request.status is Status.RUNNING:
                    self.running.remove(request)
                    request.status = Status.HELD
                    self.held.append(request)
            elif request.num_computed_tokens == request.num_tokens:  # max_tokens is 0: only the prompt was wanted
                self._finish(request, FinishReason.LENGTH)
                deltas.append(self._delta(request, []))
        return deltas

    # -- many equal steps at once: for a clock that knows how long they take -------------------------------------------

    def steady_steps(self, batch: Batch) -> int:
        """How many steps, the scheduled `batch` the first of them, are the same decodes and nothing else while nobody
        comes or goes: at most up to the one that makes somebody's last token. 1 where more are not certain."""
        parts, requests = batch.scheduled, [part.request for part in batch.scheduled]
        if self.waiting or not parts or not len(parts) == batch.num_decodes == len(self.running):
            return 1
        steps = min(
            min(it.sampling.max_tokens - it.num_output_tokens, self.max_model_len - it.num_tokens) for it in requests
        )
        steps = min(steps, self.pages.num_available // len(parts) * self.pages.page_size + 1)  # preempting nobody
        if (
            self.cost is not None
            and self.config.chunk_policy == "adaptive"
            and len({it.priority for it in requests}) > 1
        ):
            tpot = min(self.config.slo_classes[it.priority].tpot_s for it in requests)
            steps = min(steps, steps_without_skips([it.num_tokens for it in requests], tpot, self.cost))
        return steps

    def advance(self, batch: Batch, tokens: Mapping[str, Sequence[int]], ends: Sequence[float]) -> Batch:
        """Takes in fewer than `steady_steps` steps, `batch` the first of them, that ended at `ends`; `tokens` are what
        each stream sampled in them, none of which ends it. All is then as if `schedule` and `update` had been called
        in turns. Returns the batch of the step that follows."""
        if not ends:
            return batch
        parts, size = [], self.pages.page_size
        for part in batch.scheduled:
            request, start = part.request, part.start
            request.token_ids += tokens[request.id]
            request.num_computed_tokens = request.num_tokens - 1
            missing = -(-request.num_tokens // size) - len(part.pages)
            if missing > 0:
                self.pages.allocate(request.owner, missing)
            if request.num_computed_tokens // size > start // size:
                self._index_pages(request, start)
            due, tpot = request.due, self.config.slo_classes[request.priority].tpot_s
            for end in ends:
                due = next_due(due, end, tpot)
            request.due = due
            parts.append(part._replace(start=request.num_computed_tokens))
        self._now = ends[-1]
        return Batch(parts, len(parts))

    def _index_pages(self, request: Request, start: int) -> None:
        size = self.pages.page_size
        num_full = request.num_computed_tokens // size
        if num_full > start // size and self.pages.enable_prefix_caching:
            self.pages.index(request.owner, self._hashes(request)[:num_full], first=start // size)

    def _append_token(self, request: Request, sampled: SampledToken) -> TokenDelta:
        token_id, params = sampled.token_id, request.sampling
        request.token_ids.append(token_id)
        is_eos = token_id in self.eos_token_ids and not params.ignore_eos
        is_stop = (is_eos or token_id in params.stop_token_ids) and request.num_output_tokens > params.min_tokens
        if sampled.error is not None:
            self._finish(request, FinishReason.ERROR)
        elif is_stop or sampled.ends:
            self._finish(request, FinishReason.STOP)
        elif self._is_full(request):
            self._finish(request, FinishReason.LENGTH)
        delta = self._delta(request, [token_id])
        if sampled.logprobs is not None:
            delta.logprobs = [sampled.logprobs]
        if is_stop:
            delta.stop_token_id = token_id
        delta.error = sampled.error
        return delta

    def _delta(self, request: Request, token_ids: list[int]) -> TokenDelta:
        first = len(request.token_ids) - len(request.prompt_token_ids) - len(token_ids)
        delta = TokenDelta(request.id, token_ids, first, request.epoch)
        delta.finish_reason, delta.num_cached_tokens = request.finish_reason, request.num_cached_tokens
        return delta

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request. Pages that are being written from afar are quarantined; those that a step in flight writes to
        stay its own until the update of that step, those that are being read to be sent until the engine, which knows
        when that is over, releases `request.owner`."""
        match request.status:
            case Status.RUNNING:
                self.running.remove(request)
            case Status.WAITING:
                self.waiting.remove(request)
            case Status.HELD:
                self.held.remove(request)
        if request.status is Status.HELD and request.leg is Leg.RECEIVE:
            self.pages.quarantine(request.owner, request.num_computed_tokens // self.pages.page_size)
        elif request.leg is not Leg.SEND and not request.num_in_flight_tokens:
            self.pages.release(request.owner)
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._requests[request.id]


def _last_to_keep(requests: Sequence[Request]) -> Request:
    """Who gives up pages first: the least urgent class, in it the last admitted."""
    return max(enumerate(requests), key=lambda pair: (pair[1].priority, pair[0]))[1]
