"""Which prompt is computed first, and who is preempted first. Pure functions of data: a policy is changed here."""

from collections.abc import Iterable, Sequence
from math import inf

from crossdock.workers.schedule.request import Request


def response_ratio(request: Request, work_done: int) -> float:
    """Return 1 + waited work / uncached tokens.

    Waited work is what the replica has prefilled since the request arrived, in tokens. So the ratio needs no clock, is
    the same on every device, and does not change while nothing is computed.
    """
    return 1 + (work_done - request.arrival_work) / max(request.num_uncached_tokens, 1)


def is_starving(request: Request, now: float, starvation_s: float) -> bool:
    """Return whether a request has waited for `starvation_s`, and for as long as its class may let it wait.

    A request whose first token was promised for later is not urgent yet.
    """
    return now - request.queued_at >= max(starvation_s, request.ttft_deadline)


def order_prefills(requests: Iterable[Request], now: float, work_done: int, starvation_s: float) -> list[Request]:
    """Return the requests in the order in which their prompts are computed.

    First those that starve, the oldest first. Then by class, and within a class by the clients' own priorities. Among
    equals, preempted requests go first, because their clients are already reading; then the highest response ratio.
    Ties go by arrival, then by id.
    """

    def key(request: Request) -> tuple[tuple[int, int], float, float, str]:
        if is_starving(request, now, starvation_s):
            return ((-1, 0), 0.0, request.arrival_time, request.id)
        ratio = inf if request.num_preemptions else response_ratio(request, work_done)
        return (request.urgency, -ratio, request.arrival_time, request.id)

    return sorted(requests, key=key)


def prefill_reason(request: Request, now: float, work_done: int, starvation_s: float) -> str:
    """Return the reason for a request's place in `order_prefills`, for its timeline."""
    if is_starving(request, now, starvation_s):
        return f"waited {now - request.queued_at:.0f} s"
    if request.num_preemptions:
        return "preempted before"
    priority = f"priority {request.priority_in_class}, " if request.priority_in_class else ""
    return f"{priority}response ratio {response_ratio(request, work_done):.2f}"


def first_victim(requests: Sequence[Request]) -> Request:
    """Return the request to preempt first: the least urgent, and among equals the last admitted."""
    return max(enumerate(requests), key=lambda pair: (pair[1].urgency, pair[0]))[1]
