"""The scheduler's settings: how much one step computes, and whose work goes first."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.policies.chunk_policies import ChunkPolicy
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS, DEFAULT_CLASSES, SloClass

_LONG_PROMPT_PART = 25  # a prompt above a 25th of max_model_len, 4 %, is long: vLLM's default for its own threshold


def _order_of(value: object) -> object:
    return "shortest_remaining" if value == "response_ratio" else value


class SchedulerConfig(BaseModel):
    """Settings of the scheduler. Names and meanings are vLLM's where vLLM has the same setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_batched_tokens: int = Field(
        2048, ge=1, description="Tokens one step may compute, decodes and chunks together; the adaptive ceiling."
    )
    max_num_seqs: int = Field(64, ge=1, description="Requests that may hold pages at once.")
    chunk_policy: ChunkPolicy = Field(
        "adaptive", description="adaptive: chunks fit the tightest stream's slack; fixed: vLLM's token budget."
    )
    min_chunk_tokens: int = Field(
        0, ge=0, description="Adaptive: prompt tokens a step computes however tight the slack is; 0 is one page."
    )
    enable_chunked_prefill: bool = Field(True, description="Off: a prompt is computed in one step or not at all.")
    mixed_chunks: bool = Field(
        True, description="Off: steps with chunks and steps with decodes alternate, as in SGLang."
    )
    max_prefill_tokens: int = Field(0, ge=0, description="Prompt tokens per step; 0 is all that the budget leaves.")
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="Longest chunk of a prompt that is not alone; where 'long' begins. 0: none, 4 % of the context.",
    )
    max_num_partial_prefills: int = Field(
        8,
        ge=1,
        description="Prompts that may be partly computed at once; less urgent classes do not count. Not in vLLM 0.32.",
    )
    max_long_partial_prefills: int = Field(2, ge=1, description="How many of these may be long.")
    # Interactive p99 TTFT with 0.1, 0.25, 0.5 and 1: 244, 357, 853 and 1,516 ms
    # (`crossdock simulate --pools mixed=1xl4-8b --request-rate 1 --mix long-heavy`, 2026-11-22). Less than 0.25 means
    # more steps for each prompt, and so more seconds where a step's fixed part is large.
    idle_step_share: float = Field(
        0.25,
        gt=0,
        description="Adaptive: longest step, as a share of the tightest ttft_s of the classes in use. A request that "
        "arrives meanwhile waits for the end of the step. Without streams, steps mostly end at the knee of throughput.",
    )
    short_lane_share: float = Field(
        0.5, ge=0, lt=1, description="Share of each step's chunks that is reserved for short prompts."
    )
    prefill_order: Annotated[Literal["shortest_remaining", "fcfs"], BeforeValidator(_order_of)] = Field(
        "shortest_remaining",
        description="shortest_remaining: by class, then the prompt with the fewest seconds left, less a sixteenth of "
        "what others got since it came; fcfs: arrival. Version 0.1 also takes response_ratio, the name of the order "
        "before.",
    )
    starvation_s: float = Field(
        60.0, gt=0, description="A request that has waited this long, and longer than its promise, goes first."
    )
    slo_classes: tuple[SloClass, ...] = Field(DEFAULT_CLASSES, description="The SLO classes, most urgent first.")
    default_slo_class: str = Field(DEFAULT_CLASS, description="The class of requests that name none.")
    admission: Literal["reject", "queue"] = Field(
        "reject",
        description="reject: a request that asks for a class gets 429 if the class's ttft_s cannot be met, and others "
        "wait; queue: all wait.",
    )
    page_size: int = Field(16, ge=1, description="Tokens a KV page holds (vLLM's block size).")

    @property
    def chunk_floor(self) -> int:
        """Return the prompt tokens that a step computes however tight the slack is."""
        return self.min_chunk_tokens or self.page_size

    @property
    def most_chunk_tokens(self) -> tuple[int, str]:
        """Return the tokens of a chunk that every step has room for, and the settings that say so."""
        most = self.max_num_batched_tokens - self.max_num_seqs
        settings = "max_num_batched_tokens - max_num_seqs"
        return min((most, settings), (self.max_prefill_tokens or most, "max_prefill_tokens"), key=lambda pair: pair[0])

    def long_prompt_tokens(self, max_model_len: int) -> int:
        """Return the number of uncached tokens above which a prompt is long."""
        threshold = self.long_prefill_token_threshold or max_model_len // _LONG_PROMPT_PART
        return max(threshold, self.page_size)

    def check_capacity(self, pages: PagePool, max_model_len: int) -> None:
        """Check that one request of `max_model_len` tokens can be served.

        Raises:
            ValueError: the pool or a step is too small for it; the message names the field.
        """
        chunk = self.max_num_batched_tokens
        size = pages.page_size
        needed = PageNeeds(size, pages.windows, chunk, pages.state_pages).at_most(max_model_len)
        if pages.num_pages < needed and (pages.has_windows or pages.state_pages):
            state = f", and twice {pages.state_pages} for its recurrent state" if pages.state_pages else ""
            raise ValueError(
                f"the KV pool holds {pages.num_pages} pages; one request of max_model_len ({max_model_len}) needs "
                f"{needed} in {pages.num_groups} groups of layers, with chunks of max_num_batched_tokens "
                f"({self.max_num_batched_tokens}){state}: give it more memory, or lower one of the two"
            )
        capacity = pages.num_pages * pages.page_size
        if capacity < max_model_len and not pages.has_windows:
            raise ValueError(
                f"the KV pool holds {capacity} tokens ({pages.num_pages} pages of {pages.page_size}), less "
                f"than one request of max_model_len ({max_model_len}): give it more memory or lower max_model_len"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({max_model_len}) when enable_chunked_prefill is off: a prompt is computed in one step"
            )

    @model_validator(mode="after")
    def _every_step_can_progress(self) -> "SchedulerConfig":
        num_seqs = self.max_num_seqs or 1  # 0, here and below: the device decides, see EngineConfig
        if 0 < self.max_num_batched_tokens < num_seqs + self.page_size:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({num_seqs}) + page_size ({self.page_size}): a step in which every stream decodes must "
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
    def _classes_differ(self) -> "SchedulerConfig":
        names = [slo.name for slo in self.slo_classes]
        if len(set(names)) != len(names) or not names:
            raise ValueError(f"slo_classes must have different names, one at least; they are {', '.join(names)}")
        if self.default_slo_class not in names:
            raise ValueError(f"default_slo_class {self.default_slo_class!r} is none of {', '.join(names)}")
        if sum(int(slo.decode_share * self.max_num_seqs) for slo in self.slo_classes) >= (self.max_num_seqs or 1):
            raise ValueError("slo_classes: the decode_share of all classes together must be less than 1")
        return self
