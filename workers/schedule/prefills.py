"""The chunks of one step: a budget of tokens and seconds, filled prompt by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import Startable, is_long, may_be_partial
from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.first_token import queue_seconds
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.pictures.encoding import chunk_with_items
from crossdock.workers.schedule.policies.chunk_policies import meaning_of
from crossdock.workers.schedule.policies.chunking import (
    LEAST_SHARE,
    Candidate,
    ChunkBudget,
    adaptive_chunk_budget,
    balanced_seconds,
    fixed_chunk_budget,
    floor_beside,
    idle_step,
    longest_step,
)
from crossdock.workers.schedule.policies.order import AGEING, order_prefills, prefill_reason
from crossdock.workers.schedule.policies.pace import LENT_KNEE, lent_due, longest_gap
from crossdock.workers.schedule.request.batch import Scheduled
from crossdock.workers.schedule.request.request import Request, Status, adapter_work
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable

ChunkLimit: TypeAlias = Callable[[Request, int, int], int]
"""Returns how many of so many tokens of a running prompt, from a position on, may be computed."""

NEAR_DEADLINE = 0.8
"""Share of the time left that the rest of a prompt may be predicted to take before streams lend all that they can. The
others are for predictions, which err by 15 % at the 90th percentile, and for the step that runs at the deadline."""


@dataclass(slots=True)
class PrefillScheduler:
    """Chooses the chunks of each step, and starts the requests that get their first."""

    table: RequestTable
    forecast: Forecast
    limits: Sequence[ChunkLimit] = ()  # of windows, recurrent states, tiers and pictures
    row_tile: int = 1  # see `ChunkBudget`

    def candidates(self, running: Sequence[Request]) -> list[Request]:
        """Return the requests with prompt tokens to compute here, in the order in which they get chunks.

        `running`: those that have run at the begin of the step, with or without the streams among them.
        """
        table = self.table
        prefills = self.table.prefills(running)
        if table.config.prefill_order == "shortest_remaining":
            if table.tenants.in_use:
                table.note_tenants(prefills)
            return order_prefills(prefills, table.now, table.config.starvation_s, table.tenants)
        return sorted(prefills, key=lambda request: request.status is Status.WAITING)  # stable: started ones first

    def schedule(self, decodes: Sequence[Scheduled], prefills: Sequence[Request]) -> tuple[list[Scheduled], str]:
        """Return chunks of `prefills` for the step of `decodes`, and what bounded them.

        Starting a request may preempt others, also those that already are in the step.
        """
        config = self.table.config
        budget = self._budget(decodes, prefills)
        if config.prefill_order == "shortest_remaining" and config.enable_chunked_prefill:
            in_turn = prefills[0].tenant
            own = (request for request in prefills if request.tenant == in_turn)
            if short := sum(request.num_uncached_tokens for request in own if not is_long(self.table, request)):
                budget.reserve_lane(config.short_lane_share, short)
        chunks = self._fill(budget, prefills)
        if budget.lane_tokens:  # short prompts did not need the whole lane, or lacked pages or slots
            budget.lane_tokens = 0
            served = {part.request.id for part in chunks}
            if others := [request for request in prefills if request.id not in served]:
                chunks += self._fill(budget, others)
        return chunks, budget.reason

    def _budget(self, decodes: Sequence[Scheduled], prefills: Sequence[Request]) -> ChunkBudget:
        """Return the budget for the chunks of `prefills`, in their order, beside `decodes`."""
        config = self.table.config
        cost = self.forecast.cost
        if cost is None or not config.enable_chunked_prefill or not meaning_of(config.chunk_policy).fits_streams:
            budget = self._fixed(decodes, prefills)
        else:
            budget = self._adaptive(cost, decodes, prefills)
        if self.table.num_drafts:
            _compute_again(budget, decodes)
        if config.max_prefill_tokens and config.max_prefill_tokens < budget.tokens:
            budget.tokens = config.max_prefill_tokens
            budget.reason = "max_prefill_tokens"
        budget.row_tile = self.row_tile
        return budget

    def _fixed(self, decodes: Sequence[Scheduled], prefills: Sequence[Request]) -> ChunkBudget:
        """Return a budget of tokens. Whole prompts of an adaptive policy take an idle step's seconds beside no stream,
        in the step or not."""
        config = self.table.config
        cost = self.forecast.cost
        budget = fixed_chunk_budget(config.max_num_batched_tokens, len(decodes), config.enable_chunked_prefill)
        has_streams = decodes or any(each.is_decoding for each in self.table.running)
        if cost is not None and meaning_of(config.chunk_policy).fits_streams and not has_streams:
            budget.cost = cost
            budget.seconds = self._idle_step(prefills, cost)
            budget.reason = f"idle step of {budget.seconds * 1e3:.0f} ms"
        return budget

    def _adaptive(self, cost: StepCost, decodes: Sequence[Scheduled], prefills: Sequence[Request]) -> ChunkBudget:
        """Return the budget by which no stream is late: none of `decodes`, and none that other replicas prefill."""
        table = self.table
        config = self.table.config
        first = prefills[0]
        streams = [each for each in table.running if each.is_decoding and each.id not in table.skipped]
        arriving = [self.forecast.second_token_due(each, table.now) - table.now for each in table.arriving()]
        overrun = self.forecast.limits.overrun
        tpots = {table.tpot_s(each) for each in streams}
        most_urgent = min([stream.priority for stream in streams], default=len(config.slo_classes))
        # The step can delay the token after the one in flight, whose step has begun before.
        due = [each.due + (table.tpot_s(each) if each.num_in_flight_tokens else 0.0) for each in streams]
        slack = min([each - table.now for each in due] + arriving, default=inf)
        if tpots:
            slack = min(slack, longest_gap(min(tpots), is_urgent=first.priority <= most_urgent))
        adapters = adapter_work([part.request for part in decodes])
        work = StepWork.of_streams(len(decodes), sum([part.start for part in decodes]), adapters)
        alone = cost.seconds(work)
        floor = floor_beside(cost, work, list(tpots), overrun, config.chunk_floor, alone)
        longest = config.idle_step_share * table.tightest_ttft_s() if streams else self._idle_step(prefills, cost)
        if streams and self.forecast.depth > 1:
            longest = min(longest, self._balanced(first, cost, work, alone))
        max_tokens = config.max_num_batched_tokens
        budget = adaptive_chunk_budget(max_tokens, floor, work, slack, longest, cost, most_urgent, overrun)
        if streams:
            most = longest if self._is_deadline_near(first) else min(LENT_KNEE * alone, longest)
            self._lend(budget, first, streams, arriving, most)
        return budget

    def _lend(
        self, budget: ChunkBudget, prompt: Request, streams: Sequence[Request], arriving: Sequence[float], most: float
    ) -> None:
        """Let the chunk of one prompt fill the slack that streams lend, in a step of at most `most` seconds.

        `arriving`: seconds until others that will decode here need theirs. They lend nothing.
        """
        if most <= budget.seconds:
            return
        slack = min([*[self._lent_slack(stream, prompt) for stream in streams], *arriving])
        seconds = min(longest_step(slack, self.forecast.limits.overrun), most)
        if seconds > budget.seconds:
            budget.lent_to = prompt.id
            budget.lent_seconds = seconds
            budget.reason = f"slack of {slack * 1e3:.0f} ms is lent"

    def _idle_step(self, prefills: Sequence[Request], cost: StepCost) -> float:
        """Return the seconds of the longest step for chunks of `prefills` beside no stream."""
        config = self.table.config
        tightest = self.table.tightest_ttft_s()
        behind = [(request.priority, request.num_uncached_tokens) for request in prefills[1:]]
        start = prefills[0].num_tokens - prefills[0].num_uncached_tokens
        waiting_s = queue_seconds(cost, behind, config.slo_classes, tightest)
        return idle_step(cost, start, config.idle_step_share * tightest, waiting_s)

    def _is_deadline_near(self, request: Request) -> bool:
        """Return whether a prompt would miss the deadline of its first token at the pace that streams allow."""
        left = request.arrival_time + request.ttft_deadline - self.table.now
        if left <= 0:  # missed, or none was promised
            return False
        share = max(self.forecast.prefill_share(request.priority), LEAST_SHARE)
        return self.forecast.seconds_alone(request) > NEAR_DEADLINE * left * share

    def _lent_slack(self, stream: Request, prompt: Request) -> float:
        """Return the seconds until a stream's token is due in a step with that prompt. More urgent streams lend
        nothing, not even the lead that they keep."""
        now = self.table.now
        tpot = self.table.tpot_s(stream)
        if stream.priority < prompt.priority:
            return min(stream.due - now, longest_gap(tpot, is_urgent=False))
        return lent_due(stream, tpot) - now

    def _balanced(self, prompt: Request, cost: StepCost, decodes: StepWork, alone: float) -> float:
        """Return the seconds of a step with streams and a chunk of a prompt that cost a pipeline least.

        `alone`: seconds of its decodes. Rows up to the breakpoint of the cost are a fixed part too: a chunk of fewer
        rows reads nearly all that a large one reads.
        """
        work = max(cost.chunk_seconds(0, prompt.num_tokens), alone)
        fixed = max(cost.fixed_seconds(0), cost.base)
        rest = cost.early_seconds(cost.breakpoint_rows) - cost.early_seconds(decodes.rows)
        return alone + max(rest, 0.0) + balanced_seconds(fixed, work, self.forecast.depth)

    def _fill(self, budget: ChunkBudget, prefills: Sequence[Request]) -> list[Scheduled]:
        table = self.table
        size = self.table.pages.page_size
        is_one_alone = len(table.running) + len(table.waiting) <= 1 and not table.arriving()
        threshold = 0 if is_one_alone else table.config.long_prefill_token_threshold  # as in vLLM
        chunks: list[Scheduled] = []
        charges: list[tuple[Request, float]] = []
        startable = Startable(table)
        for request in prefills:
            if budget.is_spent:
                break
            start = request.num_scheduled_tokens
            hit = None
            if request.status is Status.WAITING:
                if not startable.may_start(request):
                    continue
                hit = kv.match_prefix(table, request)
                request.expected_cached_tokens = start = hit.num_pages * size
            encoding = self.forecast.encoding if request.items else None
            prompt = self._prompt(request, start)
            if encoding is None:
                num_tokens, limit = budget.chunk(prompt, threshold, size), ""
            else:
                num_tokens, limit = chunk_with_items(encoding, request, prompt, budget, threshold, size)
            if hit is not None:
                is_whole = start + num_tokens == request.num_tokens
                may_begin = num_tokens > 0 and (is_whole or may_be_partial(table, request))
                if not may_begin or not kv.admit(table, request, hit):
                    startable.stays(request, "pages" if may_begin else "chunk")
                    budget.reason = budget.reason if num_tokens else limit or budget.reason
                    continue
            for within in self.limits:
                num_tokens = within(request, start, num_tokens)
            budget.reason = limit or budget.reason
            if num_tokens:
                chunks.append(self._part(request, start, num_tokens))
                if encoding is not None:
                    prompt = prompt._replace(encoder_seconds=encoding.take(request, start, num_tokens))
                budget.take(prompt, num_tokens)
                charges.append((request, self._count(request, start, num_tokens, prompt.encoder_seconds)))
        if table.tenants.in_use:
            for request, seconds in charges:  # only now: who may start is told by the turns before this step
                table.tenants.charge(request, seconds)
        return chunks

    def _prompt(self, request: Request, start: int) -> Candidate:
        """Describe the rest of a prompt from `start` on. A starving prompt is the most urgent one, and may use the lane
        of short ones. A chunk may end inside of a page where no page travels or arrives meanwhile."""
        table = self.table
        is_starving = table.is_starving(request)
        has_own_pages = request.leg is Leg.LOCAL and request.coming.tail is None
        return Candidate(
            start,
            request.num_tokens,
            priority=-1 if is_starving else request.priority,
            is_long=not is_starving and is_long(table, request),
            factor=self.forecast.factor(request),
            id=request.id,
            least=self.forecast.encoding.least_tokens(request, start, table.pages.page_size) if request.items else 0,
            may_split_page=has_own_pages and not request.items and not table.pages.state_pages,
            adapter_weights=request.adapter_weights,
        )

    def _part(self, request: Request, start: int, num_tokens: int) -> Scheduled:
        table = self.table
        samples = start + num_tokens == request.num_tokens and request.sampling.max_tokens > 0
        reason = "first come"
        if table.config.prefill_order != "fcfs":
            reason = prefill_reason(request, table.now, self.forecast.work, table.config.starvation_s, table.tenants)
        pages = table.pages.pages_of(request.owner)
        further = table.pages.further_pages_of(request.owner)
        return Scheduled(request, start, num_tokens, pages, samples, reason, further)

    def _count(self, request: Request, start: int, num_tokens: int, encoder_seconds: float) -> float:
        """Count a chunk, and return its seconds of this replica's time; 0 without a cost."""
        totals = self.table.prefilled
        totals.tokens += num_tokens
        totals.tokens_by_priority[request.priority] += num_tokens
        work = self.forecast.chunk_work(request, start, start + num_tokens, encoder_seconds)
        request.aged_rest -= (1 - AGEING) * work
        if self.forecast.cost is None:
            return 0.0
        totals.seconds += work
        return work


def _compute_again(budget: ChunkBudget, decodes: Sequence[Scheduled]) -> None:
    """Leave room in a budget for the tokens of streams that are computed again."""
    for part in decodes:
        if part.num_tokens > 1:
            budget.tokens -= part.num_tokens - 1
            budget.work = budget.work.plus_drafts(part.start, part.num_tokens - 1, part.request.adapter_weights)
