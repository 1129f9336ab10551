"""Predict seconds: of a prompt's rest, of the share of time that prompts get beside streams, of the first token."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from crossdock.workers.schedule.batch import Batch
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.pacing.chunk_policies import (
    NOTHING_LENT,
    Beside,
    Lent,
    lent_beside,
    meaning_of,
    pace_beside,
)
from crossdock.workers.schedule.pacing.chunking import LEAST_SHARE
from crossdock.workers.schedule.pacing.pace import lead
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request import Request, adapter_work
from crossdock.workers.schedule.submission import Leg
from crossdock.workers.schedule.table import RequestTable


def predicted_ttft(
    own_seconds: float,
    urgency: tuple[int, int],
    backlog: Iterable[tuple[tuple[int, int], float]],
    prefill_share: float,
    lent: Lent = NOTHING_LENT,
    before: Callable[[float], float] = lambda _: 0.0,
) -> float:
    """Return the seconds until the first token of a prompt that takes `own_seconds` alone.

    All more urgent prompts go first. Prompts of the same urgency share the time, as under processor sharing: each
    delays the prompt by at most its own length.

    Args:
        urgency: of its class and in its class, as `Request.urgency`.
        backlog: (urgency, seconds) of every unfinished prompt but those of other tenants in its class.
        prefill_share: share of the time that running streams leave for prompts.
        lent: what they lend beside.
        before: the seconds that the other tenants of its class get until the prompt's has had so many in that class.
    """
    ahead = own_turns = 0.0
    for other, seconds in backlog:
        if other <= urgency:
            seconds = seconds if other < urgency else min(seconds, own_seconds)
            ahead += seconds
            own_turns += seconds if other[0] == urgency[0] else 0.0
    ahead += before(own_turns + own_seconds)
    total = ahead + own_seconds
    return total * float(pace_beside(max(prefill_share, LEAST_SHARE), *lent, total, max))


@dataclass(slots=True)
class Forecast:
    """Predictions for the requests of one replica, from what its steps cost."""

    table: RequestTable
    cost: StepCost | None = None  # without a cost nothing is predicted: chunks are fixed and no request is refused
    overrun: float = 1.0  # factor by which some steps take longer than predicted, see `StepCostFit.overrun`
    depth: int = 1  # steps in flight, the number of pipeline stages
    interval_share: float = 1.0  # interval of steps / seconds of one, see `IntervalShare`; 1 where `depth` is 1
    encoding: Encoding = field(default_factory=lambda: Encoding(0))
    scored_factor: float = 1.0  # learnt: how many times as long a chunk takes that needs log-probabilities
    _queue: list[Request] = field(default_factory=list)  # the waiting requests at the last look
    _seconds: list[float] = field(default_factory=list)  # of their prompts
    _looked: tuple[StepCost | None, float, float] = (None, 0.0, 0.0)  # cost, interval share and step time at that look

    def learn(self, cost: StepCost, overrun: float, interval_share: float = 1.0) -> None:
        """Predict with a new cost from now on. `overrun`: factor by which some steps exceed their predicted seconds.
        `interval_share`: interval of the steps of a full pipeline, as a share of these seconds."""
        self.cost, self.overrun, self.interval_share = cost, overrun, interval_share

    @property
    def overrun_when_full(self) -> float:
        """Return the factor by which some steps take longer than predicted while the pipeline is full.

        A step then ends after as many intervals as there are steps in flight, which is more than its latency where the
        stages are not alike.
        """
        return self.overrun * max(self.depth * self.interval_share, 1.0)

    def ttft(self, request: Request) -> tuple[float, float]:
        """Return the seconds until a new request's first token, now and on an idle replica; (0, 0) without a cost."""
        own, drain = self.prefill_seconds(request), self._drain_seconds(request)
        backlog, rivals = list[tuple[tuple[int, int], float]](), list[tuple[Request, float]]()
        for other, seconds in self._backlog():
            if self.table.tenants.are_rivals(request, other):
                rivals.append((other, seconds))
            else:
                backlog.append((self._turn(other), seconds))
        beside = self._beside(request.priority)
        share = self._share(beside)
        lent = self._lent(beside, share)
        before = partial(self._rivals_before, request, rivals)
        return predicted_ttft(own, request.urgency, backlog, share, lent, before) + drain, own + drain

    def _rivals_before(self, request: Request, rivals: Iterable[tuple[Request, float]], own_seconds: float) -> float:
        """Return the seconds that other tenants' prompts get until a request's tenant has had `own_seconds` more."""
        first, totals = dict[str, Request](), defaultdict[str, float](float)
        for other, seconds in rivals:
            first.setdefault(other.payer, other)
            totals[other.payer] += seconds
        tenants = self.table.tenants
        return sum(
            min(totals[name], tenants.seconds_before(request, other, own_seconds)) for name, other in first.items()
        )

    def _backlog(self) -> list[tuple[Request, float]]:
        """Return every unfinished prompt and its seconds.

        Between two steps prompts only arrive, sometimes by the thousand: the seconds of each are computed once.
        """
        waiting, now = self.table.waiting, (self.cost, self.interval_share, self.table.now)
        if now != self._looked or waiting[: len(self._queue)] != self._queue:
            self._queue, self._seconds, self._looked = [], [], now
        arrived = waiting[len(self._queue) :]
        self._queue += arrived
        self._seconds += [self.prefill_seconds(other) for other in arrived]
        queued = zip(waiting, self._seconds, strict=True)
        running = (other for other in self.table.running if not other.is_decoding)
        return [
            *((other, seconds) for other, seconds in queued if other.leg is not Leg.RECEIVE),
            *((other, self.prefill_seconds(other)) for other in running),
        ]

    def factor(self, request: Request) -> float:
        """Return the factor by which a chunk of the prompt takes longer than other chunks of its length."""
        return self.scored_factor if request.sampling.prompt_logprobs is not None else 1.0

    def _turn(self, request: Request) -> tuple[int, int]:
        return (-1, 0) if self.table.is_starving(request) else request.urgency

    def charge(self, batch: Batch) -> None:
        """Charge what a step that begins takes beyond its chunks, which were charged as they were chosen.

        Streams share the fixed part, and each pays for its context. In a step without streams, the chunks share the
        fixed part. In a full pipeline, what counts is the interval between two steps.
        """
        tenants, cost = self.table.tenants, self.cost
        if not batch or not tenants.in_use or cost is None:
            return
        scheduled, num_decodes, work = batch.scheduled, batch.num_decodes, batch.work
        chunks = sum(
            [self.chunk_seconds(part.request, part.start, part.num_tokens) for part in scheduled[num_decodes:]]
        )
        fixed = max(cost.seconds(work) - chunks - cost.per_context * work.context, 0.0)
        parts, per_context = (scheduled[:num_decodes], cost.per_context) if num_decodes else (scheduled, 0.0)
        fixed *= self.interval_share / sum([part.num_tokens for part in parts])
        per_context *= self.interval_share
        spent, one_of = defaultdict[tuple[int, str], float](float), dict[tuple[int, str], Request]()
        for part in parts:  # short: this runs for every token of every stream
            request = part.request
            seconds = fixed * part.num_tokens + per_context * part.start
            request.charged_s += seconds
            key = request.priority, request.payer
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
        most = self.table.config.max_num_batched_tokens
        seconds = self.cost.prefill_seconds(start, end, most, request.adapter_weights)
        return self.factor(request) * self.interval_share * seconds

    def prefill_seconds(self, request: Request) -> float:
        """Return the seconds of this replica's time that the rest of a request's prompt takes; 0 without a cost.

        Another prompt waits for these seconds. In a pipeline, the next step begins before the first one has ended.
        """
        if self.cost is None:
            return 0.0
        encoder_seconds = self.encoding.seconds_left(request) if request.items else 0.0
        return self.compute_seconds(request, *self._rest(request)) + self.interval_share * encoder_seconds

    def seconds_alone(self, request: Request) -> float:
        """Return the seconds until the rest of a request's prompt is computed on an idle replica; 0 without a cost."""
        return self.prefill_seconds(request) + self._drain_seconds(request)

    def _drain_seconds(self, request: Request) -> float:
        """Return the seconds of a prompt's last step in the pipeline, beyond the interval between two steps."""
        if self.cost is None or self.interval_share >= 1:
            return 0.0
        most = self.table.config.max_num_batched_tokens
        return (1 - self.interval_share) * self.cost.last_step_seconds(
            *self._rest(request), most, request.adapter_weights
        )

    def _rest(self, request: Request) -> tuple[int, int]:
        """Return first and last position of the uncached tokens of a request."""
        return request.num_tokens - request.num_uncached_tokens, request.num_tokens

    def prefill_share(self, priority: int) -> float:
        """Return the share of the time that goes into prompts of a class, beside the streams that run or arrive."""
        return self._share(self._beside(priority))

    def lead(self) -> float:
        """Return the seconds that all streams are ahead of their mean; 0 where others arrive, or none runs."""
        streams = [each for each in self.table.running if each.is_decoding]
        if not streams or self.table.arriving():
            return 0.0
        return min([lead(stream, self.table.tpot_s(stream)) for stream in streams])

    def _beside(self, priority: int) -> Beside | None:
        """Return the steps that have chunks of a class; None: no stream runs or arrives, or there is no cost."""
        streams, arriving = [each for each in self.table.running if each.is_decoding], self.table.arriving()
        cost, config = self.cost, self.table.config
        if cost is None or not (streams or arriving):
            return None
        # Each step in flight has its share of the streams.
        context, adapters = sum(stream.num_tokens for stream in streams), adapter_work(streams)
        work = StepWork.of_streams(len(streams) + len(arriving), context, adapters, self.depth)
        priorities = [each.priority for each in (*streams, *arriving)]
        tpot, page = min(config.slo_classes[each].tpot_s for each in priorities), self.table.pages.page_size
        is_urgent = priority <= min(priorities)
        return Beside(
            work, cost.seconds(work), tpot, self.overrun_when_full, config.max_num_batched_tokens, page, is_urgent
        )

    def _share(self, beside: Beside | None) -> float:
        if beside is None or self.cost is None:
            return 1.0
        config = self.table.config
        return meaning_of(config.chunk_policy).share(self.cost, beside, config.chunk_floor if beside.is_urgent else 0)

    def _lent(self, beside: Beside | None, share: float) -> Lent:
        fits_streams = meaning_of(self.table.config.chunk_policy).fits_streams
        if beside is None or self.cost is None or not (beside.is_urgent and fits_streams):
            return NOTHING_LENT
        return lent_beside(self.cost, beside, share, self.lead())

    def second_token_due(self, request: Request, now: float) -> float:
        """Return the time at which a request's second token is due, where another replica computes the prompt.

        The other replica is assumed to compute the rest alone and as fast as this one. A step that ends by then does
        not delay the request.
        """
        return now + self.seconds_alone(request) + self.table.tpot_s(request)
