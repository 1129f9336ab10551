"""GET /v1/playground/scheduler: the real scheduler in a given scenario, on predicted seconds, without a model."""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Query, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from crossdock.cluster.api.http.http_json import json_answer
from crossdock.workers.schedule.batch import Batch, SampledToken
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.submission import Leg, SamplingParams

PAGE_SIZE = 16
_MOST_STEPS = 1000
_STEPS_BEFORE = 12  # with decodes alone, for comparison
_STEPS_AFTER = 12


class Scenario(BaseModel):
    """Running streams, and prompts that arrive together a moment later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["adaptive", "fixed", "whole"] = Field("adaptive", description="whole: a prompt in a single step.")
    max_num_batched_tokens: int = Field(2048, ge=PAGE_SIZE, le=65536)
    num_decodes: int = Field(16, ge=0, le=128)
    decode_context: int = Field(1024, ge=1, le=32768, description="Tokens that each stream has already.")
    num_prompts: int = Field(1, ge=1, le=8)
    prompt_tokens: int = Field(8192, ge=1, le=65536)
    tpot_s: float = Field(0.05, ge=0.001, le=10, description="Target of the streams' SLO class, per token.")
    base: float = Field(0.004, ge=0, le=10, description="Seconds; a coefficient of `StepCost`, like those below.")
    per_prefill_token: float = Field(2e-5, ge=0, le=1)
    per_attended: float = Field(2e-9, ge=0, le=1)
    per_decode: float = Field(5e-5, ge=0, le=1)
    per_context: float = Field(2e-8, ge=0, le=1)
    bend_rows: float = Field(0, ge=0, le=65536, description="Rows of a step before which a row has another price.")
    per_early_row: float = Field(0, ge=-1, le=1, description="Seconds that a row before the bend costs in addition.")
    least_with_chunk: float = Field(0, ge=0, le=10, description="Seconds of the shortest step with a chunk.")

    @model_validator(mode="after")
    def _costs_are_valid(self) -> "Scenario":
        _ = self.cost  # raises ValueError, whose message names the field
        return self

    @model_validator(mode="after")
    def _streams_fit_into_a_step(self) -> "Scenario":
        if self.max_num_batched_tokens < self.num_decodes + self.num_prompts + PAGE_SIZE:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least num_decodes + num_prompts + "
                f"{PAGE_SIZE} ({self.num_decodes + self.num_prompts + PAGE_SIZE}): a step of streams alone must leave "
                f"room for a page of a prompt"
            )
        return self

    @property
    def cost(self) -> StepCost:
        return StepCost(**self.model_dump(include=set(StepCost.model_fields)))

    def scheduler(self) -> Scheduler:
        longest = max(self.prompt_tokens, self.decode_context) + 2 * _MOST_STEPS
        is_whole = self.policy == "whole"
        config = SchedulerConfig.model_validate(
            {
                "max_num_batched_tokens": longest + self.num_decodes if is_whole else self.max_num_batched_tokens,
                "max_num_seqs": self.num_decodes + self.num_prompts,
                "chunk_policy": "adaptive" if self.policy == "adaptive" else "fixed",
                "enable_chunked_prefill": not is_whole,
                "slo_classes": [{"name": "streams", "ttft_s": 3600, "tpot_s": self.tpot_s}],
                "default_slo_class": "streams",
                "admission": "queue",
                "page_size": PAGE_SIZE,
            }
        )
        num_requests = self.num_decodes + self.num_prompts
        pages = PagePool(num_requests * (-(-longest // PAGE_SIZE) + 1), PAGE_SIZE, enable_prefix_caching=False)
        return Scheduler(config, pages, longest, cost=self.cost)


@dataclass(slots=True)
class _Run:
    """A run of the scheduler: its clock, and the steps and tokens so far."""

    scheduler: Scheduler
    now: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)
    first_tokens: dict[str, float] = field(default_factory=dict)  # by prompt: when its first token came, in seconds
    gaps: list[float] = field(default_factory=list)  # between the tokens of streams, in seconds
    last: dict[str, float] = field(default_factory=dict)  # by stream: when its newest token came

    def add(self, name: str, num_tokens: int, leg: Leg = Leg.LOCAL) -> None:
        sampling = SamplingParams(max_tokens=2 * _MOST_STEPS, ignore_eos=True)
        request = Request(name, [0] * num_tokens, sampling, slo_class="streams", arrival_time=self.now, leg=leg)
        self.scheduler.add(request)
        self.scheduler.handoff.offer(name)

    def step(self) -> Batch:
        batch = self.scheduler.schedule(self.now)
        cost = self.scheduler.forecast.cost
        assert cost is not None
        seconds = cost.seconds(batch.work)
        chunks = batch.scheduled[batch.num_decodes :]
        self.steps.append(
            {
                "number": len(self.steps) + 1,
                "started": round(self.now, 6),
                "seconds": round(seconds, 6),
                "num_decodes": batch.num_decodes,
                "limit": batch.limit,
                "chunks": [
                    {
                        "prompt": int(part.request.id.removeprefix("prompt-")) + 1,
                        "start": part.start,
                        "num_tokens": part.num_tokens,
                        "num_prompt_tokens": part.request.num_prompt_tokens,
                        "reason": part.reason,
                    }
                    for part in chunks
                ],
            }
        )
        self.now += seconds
        sampled = {part.request.id: SampledToken(0) for part in batch.scheduled if part.samples}
        self.scheduler.update(batch, sampled, self.now)
        for name in sampled:
            self._token(name)
        return batch

    def _token(self, name: str) -> None:
        if name.startswith("prompt-"):
            self.first_tokens.setdefault(name, self.now)
        elif name in self.last:
            self.gaps.append(self.now - self.last[name])
        self.last[name] = self.now


def play(scenario: Scenario) -> dict[str, Any]:
    """Return every step from shortly before the prompts arrive until shortly after each has its first token, as JSON.

    Times are seconds from the beginning. `is_cut`: the run ended after too many steps, before the last first token.
    """
    run = _Run(scenario.scheduler())
    for number in range(scenario.num_decodes):
        name = f"stream-{number}"
        run.add(name, scenario.decode_context, Leg.RECEIVE)
        run.last[name] = 0.0
    for request in run.scheduler.handoff.grant(
        0.0
    ):  # their contexts are here already, as if another replica had sent them
        run.scheduler.handoff.start_decoding(request.id, 0, 0.0)
    for _ in range(_STEPS_BEFORE if scenario.num_decodes else 0):
        run.step()
    arrived = run.now
    for number in range(scenario.num_prompts):
        run.add(f"prompt-{number}", scenario.prompt_tokens)
    while len(run.first_tokens) < scenario.num_prompts and len(run.steps) < _MOST_STEPS:
        run.step()
    for _ in range(_STEPS_AFTER):
        run.step()
    gaps = sorted(run.gaps)
    return {
        "steps": run.steps,
        "arrived": round(arrived, 6),
        "first_tokens_s": [round(when - arrived, 6) for when in run.first_tokens.values()],
        "gap_p50_s": round(gaps[len(gaps) // 2], 6) if gaps else None,
        "gap_max_s": round(gaps[-1], 6) if gaps else None,
        "late_share": round(sum(gap > 1.25 * scenario.tpot_s for gap in gaps) / len(gaps), 6) if gaps else None,
        "is_cut": len(run.first_tokens) < scenario.num_prompts,
    }


class Playground:
    """The endpoint. One run at a time: the playground must leave the cores to real requests."""

    def __init__(self) -> None:
        self._running = asyncio.Lock()

    async def run(self, scenario: Annotated[Scenario, Query()]) -> Response:
        async with self._running:
            return json_answer(await asyncio.to_thread(play, scenario))
