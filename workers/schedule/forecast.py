"""Predict seconds: of a prompt's rest, of the share of time that prompts get beside streams, of the first token."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, TypeAlias

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.first_token import (
    PromptSteps,
    Sharing,
    drain_seconds,
    first_token_seconds,
    overrun_when_full,
    pace_of,
    prompt_seconds,
    rivals_seconds,
    seconds_of_equals,
)
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.policies.chunk_policies import ChunkLimits
from crossdock.workers.schedule.policies.order import PromptWork
from crossdock.workers.schedule.policies.pace import lead
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import Request, adapter_work
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable


class PromptGroup(NamedTuple):
    """Unfinished prompts of one urgency, class and tenant. `seconds`: of each prompt."""

    first: Request
    seconds: list[float]


class FirstToken(NamedTuple):
    """Predicts the first token of a prompt, in seconds."""

    ttft: float  # until it comes
    delays: float  # by which it delays the first tokens of longer prompts as urgent as it, of all together
    alone: float  # until it would come on an idle replica


_Groups: TypeAlias = dict[tuple[tuple[int, int], int, str], PromptGroup]
"""By urgency, class and tenant."""


@dataclass(slots=True)
class Forecast:
    """Predictions for the requests of one replica, from what its steps cost."""

    table: RequestTable
    cost: StepCost | None = None  # without a cost nothing is predicted: chunks are fixed and no request is refused
    overrun: float = 1.0  # factor by which some steps take longer than predicted, see `StepCostFit.overrun`
    depth: int = 1  # steps in flight, the number of pipeline stages
    interval_share: float = 1.0  # interval of steps / seconds of one, see `IntervalShare`; 1 where `depth` is 1
    encoding: Encoding = field(default_factory=lambda: Encoding(0))
    limits: ChunkLimits = field(init=False)  # of the chunks in each step
    scored_factor: float = 1.0  # learnt: how many times as long a chunk takes that needs log-probabilities
    _steps: tuple[StepCost, PromptSteps] | None = None  # of a prompt alone, and the cost that they follow from
    _queue: list[Request] = field(default_factory=list)  # the waiting requests at the last look
    _groups: "_Groups" = field(default_factory=dict)  # of these requests, those whose prompts are computed here
    _looked: tuple[StepCost | None, float, float] = (None, 0.0, 0.0)  # cost, interval share and step time at that look

    def __post_init__(self) -> None:
        config = self.table.config
        self.limits = ChunkLimits(
            config.chunk_policy,
            config.chunk_floor,
            config.max_num_batched_tokens,
            self.table.pages.page_size,
            overrun_when_full(self.overrun, self.depth, self.interval_share),
        )

    def learn(self, cost: StepCost, overrun: float, interval_share: float = 1.0) -> None:
        """Predict with a new cost from now on. `overrun`: factor by which some steps exceed their predicted seconds.
        `interval_share`: interval of the steps of a full pipeline, as a share of these seconds."""
        self.cost = cost
        self.overrun = overrun
        self.interval_share = interval_share
        self.limits = self.limits._replace(overrun=overrun_when_full(overrun, self.depth, interval_share))

    def ttft(self, request: Request) -> FirstToken:
        """Return when a new request's first token would come; without a cost after 0 seconds."""
        own = self.prefill_seconds(request)
        drain = self._drain_seconds(request) if self.interval_share < 1 else 0.0
        turns = own  # seconds of the class until the prompt of the request is computed, without those of other tenants
        ahead = 0.0
        equals = list[float]()
        rivals = list[tuple[Request, float]]()
        tenants = self.table.tenants
        for (urgency, _, _), group in self._backlog().items():
            if tenants.in_use and tenants.are_rivals(request, group.first):
                rivals.append((group.first, sum(group.seconds)))
            elif urgency < request.urgency:
                ahead += sum(group.seconds)
                turns += sum(group.seconds) if urgency[0] == request.priority else 0.0
            elif urgency == request.urgency:
                equals += group.seconds
        delays = 0.0
        if self.cost is not None:
            of_equals, delays = seconds_of_equals([1.0] * len(equals), equals, own, self.cost)
            of_rivals = self._rivals_before(request, rivals, turns + of_equals) if rivals else 0.0
            ahead += of_equals + of_rivals + self.in_flight_seconds()
        pace = self._pace(request.priority, ahead + own)
        ttft = first_token_seconds(0.0, ahead, own, pace, drain, 0.0, 0.0, max)
        return FirstToken(ttft, delays * pace, own + drain)

    def _rivals_before(self, request: Request, rivals: Iterable[tuple[Request, float]], own_seconds: float) -> float:
        """Return the seconds that other tenants' prompts get until a request's tenant has had `own_seconds` more."""
        first = dict[str, Request]()
        totals = defaultdict[str, float](float)
        for other, seconds in rivals:
            first.setdefault(other.tenant, other)
            totals[other.tenant] += seconds
        tenants = self.table.tenants
        turns = tenants.time(request) + own_seconds / request.submission.weight
        waiting = [(totals[name], other.submission.weight, tenants.time(other)) for name, other in first.items()]
        return float(rivals_seconds(turns, waiting))

    def _backlog(self) -> "_Groups":
        """Return the seconds of all unfinished prompts, by urgency, class and tenant.

        Between two steps prompts only arrive, sometimes by the thousand: the seconds of each are computed once, and a
        prompt that arrives is compared with groups, not with each prompt.
        """
        waiting = self.table.waiting
        now = (self.cost, self.interval_share, self.table.now)
        if now != self._looked or waiting[: len(self._queue)] != self._queue:
            self._queue = []
            self._groups = {}
            self._looked = now
        arrived = waiting[len(self._queue) :]
        self._queue += arrived
        self._add(self._groups, (other for other in arrived if other.leg is not Leg.RECEIVE))
        found = {key: PromptGroup(group.first, [*group.seconds]) for key, group in self._groups.items()}
        self._add(found, (other for other in self.table.running if not other.is_decoding))
        return found

    def _add(self, groups: "_Groups", prompts: Iterable[Request]) -> None:
        for prompt in prompts:
            key = self.table.urgency(prompt), prompt.priority, prompt.tenant
            groups.setdefault(key, PromptGroup(prompt, [])).seconds.append(self.prefill_seconds(prompt))

    def in_flight_seconds(self) -> float:
        """Return the seconds of the chunks in steps that have begun, which `_backlog` lacks; 0 without a cost."""
        chunks = [each for each in self.table.running if each.num_in_flight_tokens and not each.is_decoding]
        seconds = [self.chunk_seconds(each, each.num_computed_tokens, each.num_in_flight_tokens) for each in chunks]
        return self.interval_share * sum(seconds)

    def factor(self, request: Request) -> float:
        """Return the factor by which a chunk of the prompt takes longer than other chunks of its length."""
        return self.scored_factor if request.sampling.prompt_logprobs is not None else 1.0

    def charge(self, batch: Batch) -> None:
        """Charge what a step that begins takes beyond its chunks, which were charged as they were chosen.

        Streams share the fixed part, and each pays for its context. In a step without streams, the chunks share the
        fixed part. In a full pipeline, what counts is the interval between two steps.
        """
        tenants = self.table.tenants
        cost = self.cost
        if not batch or cost is None:
            return
        scheduled = batch.scheduled
        num_decodes = batch.num_decodes
        work = batch.work
        chunks = sum(
            [self.chunk_seconds(part.request, part.start, part.num_tokens) for part in scheduled[num_decodes:]]
        )
        most = cost.most_context
        context = sum([min(part.start, most) for part in scheduled[:num_decodes]])
        fixed = max(cost.seconds(work) - chunks - cost.per_context * context, 0.0)
        parts, per_context = (scheduled[:num_decodes], cost.per_context) if num_decodes else (scheduled, 0.0)
        fixed *= self.interval_share / sum([part.num_tokens for part in parts])
        per_context *= self.interval_share
        spent = defaultdict[tuple[int, str], float](float)
        one_of = dict[tuple[int, str], Request]()
        for part in parts:  # short: this runs for every token of every stream
            request = part.request
            seconds = fixed * part.num_tokens + per_context * min(part.start, most)
            request.charged_s += seconds
            key = request.priority, request.tenant
            spent[key] += seconds
            one_of[key] = request
        for key, request in one_of.items():
            tenants.spend(request, spent[key])

    def chunk_seconds(self, request: Request, start: int, num_tokens: int) -> float:
        """Return the seconds that a chunk of the prompt adds to a step of many rows; 0 without a cost."""
        return 0.0 if self.cost is None else self.cost.chunk_seconds(start, num_tokens, request.adapter_weights)

    def compute_seconds(self, request: Request, start: int, end: int) -> float:
        """Return the seconds of this replica's time that tokens [start, end) of a prompt take; without a cost: inf."""
        if self.cost is None:
            return inf
        adapter = request.adapter_weights
        chunk = self._chunk(self.cost, start, end, adapter)
        return self.factor(request) * float(prompt_seconds(self.cost, self.interval_share, start, end, chunk, adapter))

    def prefill_seconds(self, request: Request) -> float:
        """Return the seconds of this replica's time that the rest of a request's prompt takes; 0 without a cost.

        Another prompt waits for these seconds. In a pipeline, the next step begins before the first one has ended.
        """
        if self.cost is None:
            return 0.0
        encoder_seconds = self.interval_share * self._encoder_seconds(request)
        return self.compute_seconds(request, *self._rest(request)) + encoder_seconds

    @property
    def work(self) -> PromptWork:
        """Return the prompt work that was scheduled since the start."""
        totals = self.table.prefilled
        return PromptWork(totals.tokens, "tokens") if self.cost is None else PromptWork(totals.seconds, "s")

    def prompt_work(self, request: Request) -> float:
        """Return the work that the prompt of a new request will add."""
        return self.chunk_work(request, *self._rest(request), self._encoder_seconds(request))

    def chunk_work(self, request: Request, start: int, end: int, encoder_seconds: float) -> float:
        """Return the work of tokens [start, end) of a prompt and of its pictures, in the unit of `work`."""
        if self.cost is None:
            return end - start
        seconds = self.factor(request) * self.chunk_seconds(request, start, end - start)
        return self.interval_share * (seconds + encoder_seconds)

    def seconds_alone(self, request: Request) -> float:
        """Return the seconds until the rest of a request's prompt is computed on an idle replica; 0 without a cost."""
        seconds = self.prefill_seconds(request)
        return seconds + self._drain_seconds(request) if self.interval_share < 1 else seconds

    def _encoder_seconds(self, request: Request) -> float:
        """Return the seconds of the pictures of a prompt that are left to encode."""
        return self.encoding.seconds_left(request) if request.items else 0.0

    def _drain_seconds(self, request: Request) -> float:
        """Return the seconds of a prompt's last step in a pipeline, beyond the interval between two steps."""
        if self.cost is None:
            return 0.0
        start, end = self._rest(request)
        adapter = request.adapter_weights
        chunk = self._chunk(self.cost, start, end, adapter)
        return float(drain_seconds(self.cost, self.interval_share, start, end, chunk, adapter))

    def _chunk(self, cost: StepCost, start: int, end: int, adapter: float) -> float:
        """Return the tokens of a prompt, `[start, end)`, that a step computes without streams."""
        if self._steps is None or self._steps[0] is not cost:
            self._steps = cost, PromptSteps.of(self.table.config, cost)
        return float(self._steps[1].tokens(cost, cost.per_token((start + end) / 2, adapter)))

    def _rest(self, request: Request) -> tuple[int, int]:
        """Return first and last position of the uncached tokens of a request."""
        return request.num_tokens - request.num_uncached_tokens, request.num_tokens

    def prefill_share(self, priority: int) -> float:
        """Return the share of the time that goes into prompts of a class, beside the streams that run or arrive."""
        return 1.0 if self.cost is None else self._sharing(self.cost).share(priority)

    def _pace(self, priority: int, seconds: float) -> float:
        """Return `pace_of` prompts of a class that take `seconds` together on an idle replica."""
        if self.cost is None:
            return 1.0
        sharing = self._sharing(self.cost)
        share = sharing.share(priority)
        return float(pace_of(share, sharing.lent(priority, share, self.lead()), seconds, max))

    def lead(self) -> float:
        """Return the seconds that all streams are ahead of their mean; 0 where others arrive, or none runs."""
        streams = [each for each in self.table.running if each.is_decoding]
        if not streams or self.table.arriving():
            return 0.0
        return min([lead(stream, self.table.tpot_s(stream)) for stream in streams])

    def _sharing(self, cost: StepCost) -> Sharing:
        classes = self.table.config.slo_classes
        streams = [each for each in self.table.running if each.is_decoding]
        counts = [0] * len(classes)
        for each in (*streams, *self.table.arriving()):
            counts[each.priority] += 1
        context = sum([len(stream.token_ids) for stream in streams])
        step = StepWork.of_streams(sum(counts), context, adapter_work(streams), self.depth)
        return Sharing.of(cost, self.limits, counts, step, classes)

    def second_token_due(self, request: Request, now: float) -> float:
        """Return the time at which a request's second token is due, where another replica computes the prompt.

        The other replica is assumed to compute the rest alone and as fast as this one. A step that ends by then does
        not delay the request.
        """
        return now + self.seconds_alone(request) + self.table.tpot_s(request)
