"""A replica without a model: a real scheduler, steps that take what a cost predicts, and a simulated clock."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.memory.block_pool import OnEvict
from crossdock.workers.schedule.memory.page_events import PageEvents
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.prefixes.tier_pages import TierPages
from crossdock.workers.schedule.request.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.request.request import Request, TokenDelta
from crossdock.workers.schedule.request.slo import DEFAULT_CLASS, SloClass
from crossdock.workers.schedule.request.submission import Leg, SamplingParams, Submission
from crossdock.workers.schedule.scheduler import Scheduler

EOS = 0
COST = StepCost(base=1e-3, per_prefill_token=1e-3, per_attended=1e-7, per_decode=5e-4, per_context=1e-6)
LONG_STEPS = replace(COST, base=30e-3)
"""A cost whose knee of throughput, 300 ms, is beyond the 256 tokens that a step of `new_timed_replica` may hold."""
CLASSES = (
    SloClass(name="interactive", ttft_s=0.4, tpot_s=0.004, decode_share=0.25),
    SloClass(name="standard", ttft_s=0.5, tpot_s=0.02),
    SloClass(name="batch", ttft_s=5.0, tpot_s=0.5),
)


def next_token(token_ids: Sequence[int], vocabulary: int = 50) -> int:
    """Return a token that depends on all before it, sometimes EOS: stands in for the model."""
    return hashlib.blake2b(str(list(token_ids)).encode(), digest_size=4).digest()[0] % vocabulary


def first_seen(window: Window, position: int) -> int:
    """Return the first token that a layer with the window sees at a position."""
    if isinstance(window, AttentionChunk):
        return next(first for first in range(position, -1, -1) if first % window.tokens == 0)
    return 0 if window is None else max(position - window + 1, 0)


def reference_output(prompt: Sequence[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """Return the output of a request that is served alone by `next_token`."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens and len(tokens) < max_model_len:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


def sampled_by(part: Scheduled, read: Sequence[int]) -> SampledToken:
    """Return the sampled token of a part with its accepted drafts, given all its tokens."""
    accepted, known = list[SampledToken](), part.start + part.num_tokens - len(part.drafts)
    for number, draft in enumerate(part.drafts):
        token = next_token(read[: known + number])
        if token != draft:
            return SampledToken(token, accepted=accepted)
        accepted.append(SampledToken(token))
    return SampledToken(next_token(read), accepted=accepted)


def guesses(scheduler: Scheduler, wanted: Mapping[str, int]) -> dict[str, list[int]]:
    """Return so many drafts for each request: right ones, in many of which one is wrong."""
    found = {}
    for name, most in wanted.items():
        request = scheduler.table.get(name)
        assert request is not None
        tokens = list(request.token_ids)
        for _ in range(most):
            tokens.append(next_token(tokens))
        found[name] = tokens[request.num_tokens :]
        if (wrong := request.token_ids[-1] % 8) < most:
            found[name][wrong] += 1
    return found


def begin_step(scheduler: Scheduler, now: float) -> Batch:
    """Schedule a step, with as many drafts as its streams profit from."""
    streams = scheduler.choose_streams(now)
    for name, most in streams.wanted_drafts.items():
        request = scheduler.table.get(name)
        assert request is not None
        assert 0 < most < request.sampling.max_tokens - request.num_output_tokens
        assert request.num_tokens + most < scheduler.table.max_model_len
    return scheduler.schedule(now, guesses(scheduler, streams.wanted_drafts), streams)


def new_scheduler(
    num_pages: int = 64,
    max_model_len: int = 100,
    caching: bool = True,
    cost: StepCost | None = None,
    depth: int = 1,
    interval_share: float = 1.0,
    windows: Sequence[Window] = (None,),
    drafting: DraftPolicy | None = None,
    state_pages: int = 0,
    encoding: Encoding | None = None,
    tiers: TierPages | None = None,
    on_evict: OnEvict | None = None,
    events: PageEvents | None = None,
    max_loras: int = 0,
    **config: Any,
) -> Scheduler:
    """Return a small scheduler: pages of 4 tokens, 8 places, 32 tokens in a step, unless `config` differs."""
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "page_size": 4} | config
    checked = SchedulerConfig(**settings)
    pool = PagePool(num_pages, checked.page_size, caching, windows, state_pages, on_evict, events)
    return Scheduler(
        *(checked, pool, max_model_len, {EOS}, cost),
        depth=depth,
        interval_share=interval_share,
        drafting=drafting,
        encoding=encoding,
        tiers=tiers,
        max_loras=max_loras,
    )


def new_request(
    name: str, prompt: Sequence[int], max_tokens: int = 8, slo_class: str = DEFAULT_CLASS, **sampling: Any
) -> Request:
    """Return a request that makes exactly `max_tokens` tokens."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    return Request(Submission(name, list(prompt), params, slo_class=slo_class))


@dataclass(frozen=True, slots=True)
class Stepped:
    """One step and what it added to outputs. Seconds on the simulated clock."""

    batch: Batch
    deltas: list[TokenDelta]
    started: float
    seconds: float


@dataclass(slots=True)
class ModelFreeReplica:
    """Steps a scheduler on a simulated clock. Without `seconds`, steps take no time."""

    scheduler: Scheduler
    seconds: Callable[[StepWork], float] = lambda work: 0.0
    sample: Callable[[Sequence[int]], int] = next_token  # the token after these
    now: float = 0.0
    batches: list[Batch] = field(default_factory=list)  # of all steps
    token_times: dict[str, list[float]] = field(default_factory=dict)  # by request

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        slo_class: str = "standard",
        max_tokens: int = 1,
        leg: Leg = Leg.LOCAL,
        **fields: Any,
    ) -> Request:
        """Queue a request that arrives now. `prompt`: its tokens, or how many; the latter share no prefix."""
        if isinstance(prompt, int):
            prompt, fields = [7] * prompt, {"cache_salt": name} | fields
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        submission = Submission(name, list(prompt), sampling, slo_class=slo_class, leg=leg, **fields)
        request = Request(submission, self.now)
        self.scheduler.add(request)
        return request

    def step(self) -> Stepped:
        """Schedule, compute and update one step."""
        started = self.now
        batch = self.scheduler.schedule(started)
        self.now += self.seconds(batch.work)
        self.now += self.scheduler.encoding.seconds(batch.encoder.items)
        sampled = {
            part.request.id: SampledToken(self.sample(part.request.token_ids))
            for part in batch.scheduled
            if part.samples
        }
        deltas = self.scheduler.update(batch, sampled, self.now)
        for delta in deltas:
            self.token_times.setdefault(delta.request_id, []).extend([self.now] * len(delta.token_ids))
        self.batches.append(batch)
        return Stepped(batch, deltas, started, self.now - started)

    def run(self, max_steps: int = 10_000) -> list[Batch]:
        """Step until no work is left, and return the batches."""
        first = len(self.batches)
        while self.scheduler.table.has_work:
            self.step()
            assert len(self.batches) - first < max_steps, "no end in sight"
        return self.batches[first:]


def new_timed_replica(cost: StepCost = COST, **config: Any) -> ModelFreeReplica:
    """Return a replica of 16 places and 4,000 pages that queues all requests and whose steps take what `cost` says."""
    defaults = {
        "max_num_batched_tokens": 256,
        "max_num_seqs": 16,
        "num_pages": 4000,
        "max_model_len": 4000,
        "slo_classes": CLASSES,
        "admission": "queue",
    }
    return ModelFreeReplica(new_scheduler(cost=cost, **(defaults | config)), cost.seconds)


def chunk_sizes(batches: Sequence[Batch], name: str) -> list[int]:
    """Return the number of tokens of each part of a request."""
    return [part.num_tokens for batch in batches for part in batch.scheduled if part.request.id == name]
