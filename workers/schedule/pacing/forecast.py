"""Predict seconds: of a prompt's rest, of the share of time that prompts get beside streams, of the first token."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.order import is_starving
from crossdock.workers.schedule.pacing.chunk_policies import Beside, meaning_of
from crossdock.workers.schedule.pacing.chunking import LEAST_SHARE
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.submission import Leg
from crossdock.workers.schedule.table import RequestTable


def predicted_ttft(
    own_seconds: float,
    urgency: tuple[int, int],
    backlog: Iterable[tuple[tuple[int, int], float]],
    prefill_share: float,
) -> float:
    """Return the seconds until the first token of a prompt that takes `own_seconds` alone.

    All more urgent prompts go first. Prompts of the same urgency share the time, as under processor sharing: each
    delays the prompt by at most its own length.

    Args:
        urgency: of its class and in its class, as `Request.urgency`.
        backlog: (urgency, seconds) of every unfinished prompt.
        prefill_share: share of the time that running streams leave for prompts.
    """
    ahead = sum(
        seconds if other < urgency else min(seconds, own_seconds) for other, seconds in backlog if other <= urgency
    )
    return (ahead + own_seconds) / max(prefill_share, LEAST_SHARE)


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
        ttft = predicted_ttft(own, request.urgency, self._backlog(), self.prefill_share(request.priority))
        return ttft + drain, own + drain

    def _backlog(self) -> list[tuple[tuple[int, int], float]]:
        """Return (urgency, seconds) of every unfinished prompt. Starving prompts go before all others.

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
            *((self._turn(other), seconds) for other, seconds in queued if other.leg is not Leg.RECEIVE),
            *((self._turn(other), self.prefill_seconds(other)) for other in running),
        ]

    def factor(self, request: Request) -> float:
        """Return the factor by which a chunk of the prompt takes longer than other chunks of its length."""
        return self.scored_factor if request.sampling.prompt_logprobs is not None else 1.0

    def _turn(self, request: Request) -> tuple[int, int]:
        return (-1, 0) if is_starving(request, self.table.now, self.table.config.starvation_s) else request.urgency

    def compute_seconds(self, request: Request, start: int, end: int) -> float:
        """Return the seconds of this replica's time that tokens [start, end) of a prompt take; without a cost: inf."""
        if self.cost is None:
            return inf
        seconds = self.cost.prefill_seconds(start, end, self.table.config.max_num_batched_tokens)
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
        return (1 - self.interval_share) * self.cost.last_step_seconds(*self._rest(request), most)

    def _rest(self, request: Request) -> tuple[int, int]:
        """Return first and last position of the uncached tokens of a request."""
        return request.num_tokens - request.num_uncached_tokens, request.num_tokens

    def prefill_share(self, priority: int) -> float:
        """Return the share of the time that goes into prompts of a class, beside the streams that run or arrive."""
        streams, arriving = [each for each in self.table.running if each.is_decoding], self.table.arriving()
        cost, config = self.cost, self.table.config
        if cost is None or not (streams or arriving):
            return 1.0
        num_streams = (len(streams) + len(arriving)) / self.depth  # in a step: each has its share of the streams
        context = sum(stream.num_tokens for stream in streams) / self.depth
        work = StepWork(decodes=num_streams, context=context)
        priorities = [each.priority for each in (*streams, *arriving)]
        tpot, page = min(config.slo_classes[each].tpot_s for each in priorities), self.table.pages.page_size
        beside = Beside(work, tpot, self.overrun_when_full, config.max_num_batched_tokens, page)
        floor = config.chunk_floor if priority <= min(priorities) else 0
        return meaning_of(config.chunk_policy).share(cost, beside, floor)

    def second_token_due(self, request: Request, now: float) -> float:
        """Return the time at which a request's second token is due, where another replica computes the prompt.

        The other replica is assumed to compute the rest alone and as fast as this one. A step that ends by then does
        not delay the request.
        """
        return now + self.seconds_alone(request) + self.table.tpot_s(request)
