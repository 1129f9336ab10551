"""The chunks of one step: the budget of step_budget.py, filled prompt by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import Startable, is_long, may_be_partial
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.pictures.encoding import chunk_with_items
from crossdock.workers.schedule.policies.chunking import Candidate, ChunkBudget
from crossdock.workers.schedule.policies.order import AGEING, order_prefills, prefill_reason
from crossdock.workers.schedule.request.batch import Scheduled
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.step_budget import step_budget
from crossdock.workers.schedule.table import RequestTable

ChunkLimit: TypeAlias = Callable[[Request, int, int], int]
"""Returns how many of so many tokens of a running prompt, from a position on, may be computed."""


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
        budget = step_budget(self.forecast, decodes, prefills)
        budget.row_tile = self.row_tile
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
