"""How many tokens of prompts a step may compute, and how long it may take: what streams leave, and what they lend."""

from collections.abc import Sequence
from math import inf

from crossdock.workers.schedule.cost.cost import StepCost, StepWork
from crossdock.workers.schedule.first_token import queue_seconds
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.policies.chunk_policies import meaning_of
from crossdock.workers.schedule.policies.chunking import (
    LEAST_SHARE,
    ChunkBudget,
    adaptive_chunk_budget,
    balanced_seconds,
    fixed_chunk_budget,
    floor_beside,
    idle_step,
    longest_step,
)
from crossdock.workers.schedule.policies.pace import LENT_KNEE, lent_due, longest_gap
from crossdock.workers.schedule.request.batch import Scheduled
from crossdock.workers.schedule.request.request import Request, adapter_work
from crossdock.workers.schedule.table import RequestTable

NEAR_DEADLINE = 0.8
"""Share of the time left that the rest of a prompt may be predicted to take before streams lend all that they can. The
others are for predictions, which err by 15 % at the 90th percentile, and for the step that runs at the deadline."""


def step_budget(forecast: Forecast, decodes: Sequence[Scheduled], prefills: Sequence[Request]) -> ChunkBudget:
    """Return the budget for the chunks of `prefills`, in their order, beside `decodes`."""
    config = forecast.table.config
    cost = forecast.cost
    if cost is None or not config.enable_chunked_prefill or not meaning_of(config.chunk_policy).fits_streams:
        budget = _fixed(forecast, decodes, prefills)
    else:
        budget = _adaptive(forecast, cost, decodes, prefills)
    if forecast.table.num_drafts:
        _compute_again(budget, decodes)
    if config.max_prefill_tokens and config.max_prefill_tokens < budget.tokens:
        budget.tokens = config.max_prefill_tokens
        budget.reason = "max_prefill_tokens"
    return budget


def _fixed(forecast: Forecast, decodes: Sequence[Scheduled], prefills: Sequence[Request]) -> ChunkBudget:
    """Return a budget of tokens. Whole prompts of an adaptive policy take an idle step's seconds beside no stream, in
    the step or not."""
    table = forecast.table
    config = table.config
    cost = forecast.cost
    budget = fixed_chunk_budget(config.max_num_batched_tokens, len(decodes), config.enable_chunked_prefill)
    has_streams = decodes or any(each.is_decoding for each in table.running)
    if cost is not None and meaning_of(config.chunk_policy).fits_streams and not has_streams:
        budget.cost = cost
        budget.seconds = _idle_step(table, prefills, cost)
        budget.reason = f"idle step of {budget.seconds * 1e3:.0f} ms"
    return budget


def _adaptive(
    forecast: Forecast, cost: StepCost, decodes: Sequence[Scheduled], prefills: Sequence[Request]
) -> ChunkBudget:
    """Return the budget by which no stream is late: none of `decodes`, and none that other replicas prefill."""
    table = forecast.table
    config = table.config
    first = prefills[0]
    streams = [each for each in table.running if each.is_decoding and each.id not in table.skipped]
    arriving = [forecast.second_token_due(each, table.now) - table.now for each in table.arriving()]
    overrun = forecast.limits.overrun
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
    longest = config.idle_step_share * table.tightest_ttft_s() if streams else _idle_step(table, prefills, cost)
    if streams and forecast.depth > 1:
        longest = min(longest, _balanced(first, cost, work, alone, forecast.depth))
    max_tokens = config.max_num_batched_tokens
    budget = adaptive_chunk_budget(max_tokens, floor, work, slack, longest, cost, most_urgent, overrun)
    if streams:
        most = longest if _is_deadline_near(forecast, first) else min(LENT_KNEE * alone, longest)
        _lend(budget, table, first, streams, arriving, most, overrun)
    return budget


def _idle_step(table: RequestTable, prefills: Sequence[Request], cost: StepCost) -> float:
    """Return the seconds of the longest step for chunks of `prefills` beside no stream."""
    config = table.config
    tightest = table.tightest_ttft_s()
    behind = [(request.priority, request.num_uncached_tokens) for request in prefills[1:]]
    start = prefills[0].num_tokens - prefills[0].num_uncached_tokens
    waiting_s = queue_seconds(cost, behind, config.slo_classes, tightest)
    return idle_step(cost, start, config.idle_step_share * tightest, waiting_s)


def _balanced(prompt: Request, cost: StepCost, decodes: StepWork, alone: float, depth: int) -> float:
    """Return the seconds of a step with streams and a chunk of a prompt that cost a pipeline least.

    `alone`: seconds of its decodes. Rows up to the breakpoint of the cost are a fixed part too: a chunk of fewer rows
    reads nearly all that a large one reads.
    """
    work = max(cost.chunk_seconds(0, prompt.num_tokens), alone)
    fixed = max(cost.fixed_seconds(0), cost.base)
    rest = cost.early_seconds(cost.breakpoint_rows) - cost.early_seconds(decodes.rows)
    return alone + max(rest, 0.0) + balanced_seconds(fixed, work, depth)


# -- what streams lend -----------------------------------------------------------------------------------------------


def _lend(
    budget: ChunkBudget,
    table: RequestTable,
    prompt: Request,
    streams: Sequence[Request],
    arriving: Sequence[float],
    most: float,
    overrun: float,
) -> None:
    """Let the chunk of one prompt fill the slack that streams lend, in a step of at most `most` seconds.

    `arriving`: seconds until others that will decode here need theirs. They lend nothing. `overrun`: see
    `longest_step`.
    """
    if most <= budget.seconds:
        return
    slack = min([*[_lent_slack(table, stream, prompt) for stream in streams], *arriving])
    seconds = min(longest_step(slack, overrun), most)
    if seconds > budget.seconds:
        budget.lent_to = prompt.id
        budget.lent_seconds = seconds
        budget.reason = f"slack of {slack * 1e3:.0f} ms is lent"


def _lent_slack(table: RequestTable, stream: Request, prompt: Request) -> float:
    """Return the seconds until a stream's token is due in a step with that prompt. More urgent streams lend nothing,
    not even the lead that they keep."""
    tpot = table.tpot_s(stream)
    if stream.priority < prompt.priority:
        return min(stream.due - table.now, longest_gap(tpot, is_urgent=False))
    return lent_due(stream, tpot) - table.now


def _is_deadline_near(forecast: Forecast, request: Request) -> bool:
    """Return whether a prompt would miss the deadline of its first token at the pace that streams allow."""
    left = request.arrival_time + request.ttft_deadline - forecast.table.now
    if left <= 0:  # missed, or none was promised
        return False
    share = max(forecast.prefill_share(request.priority), LEAST_SHARE)
    return forecast.seconds_alone(request) > NEAR_DEADLINE * left * share


# -- tokens that are computed again ----------------------------------------------------------------------------------


def _compute_again(budget: ChunkBudget, decodes: Sequence[Scheduled]) -> None:
    """Leave room in a budget for the tokens of streams that are computed again."""
    for part in decodes:
        if part.num_tokens > 1:
            budget.tokens -= part.num_tokens - 1
            budget.work = budget.work.plus_drafts(part.start, part.num_tokens - 1, part.request.adapter_weights)
