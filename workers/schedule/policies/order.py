"""Which prompt is computed first, and who is preempted first. Pure functions of data: a policy is changed here."""

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from crossdock.workers.schedule.policies.tenants import Tenants
from crossdock.workers.schedule.request.request import Request

Turn = tuple[int, float, float]
"""The place of a prompt: its class, its tenant's virtual time, its client's own priority. The lower goes first."""

STARVING: Turn = (-1, 0.0, 0)


AGEING = 1 / 16
"""Seconds by which a prompt's rest counts as shorter for each second that others got since it came.

Simulated, six seeds of `loaded` (router/placement.py) and ten shifts of a public trace: with 1, 1.1 points fewer of the
first are good, and the long prompts of the second have a p99 that is 2.7 s sooner; with 1/8, 0.3 points and 0.3 s.
"""


class PromptWork(NamedTuple):
    """Sums up the prompts that a replica has scheduled since its start."""

    done: float
    unit: str  # "s", predicted; without a cost "tokens"


def is_starving(request: Request, now: float, starvation_s: float, tenants: Tenants) -> bool:
    """Return whether a request has waited for `starvation_s`, and for as long as its class may let it wait.

    A request whose first token was promised for later is not urgent yet. Nor is one that waits because its tenant has
    had more than another that waits in its class.
    """
    has_waited = now - request.queued_at >= max(starvation_s, request.ttft_deadline)
    return has_waited and (not tenants.in_use or tenants.is_in_turn(request))


def turn(request: Request, tenants: Tenants) -> Turn:
    """Return the turn of a request that does not starve."""
    time = tenants.time(request) if tenants.in_use else 0.0
    return (request.priority, time, request.submission.priority_in_class)


def before(own: Turn) -> Turn:
    """Return a turn that goes just before a turn: the last one that may pass requests of it."""
    return (*own[:2], own[2] - 1)


def order_prefills(requests: Iterable[Request], now: float, starvation_s: float, tenants: Tenants) -> list[Request]:
    """Return the requests in the order in which their prompts are computed.

    First those that starve, the oldest first. Then by class, within a class by what their tenants have had, and for
    one tenant by the clients' own priorities. Among equals, preempted requests go first, because their clients are
    already reading. Then those that another replica computes and offers, because that one holds pages for them: first
    the one whose second token is due first. Then the shortest rest, aged. Ties go by arrival, then by id.

    A prompt's rest is the work that is left of it, less `AGEING` times the work that others got since it came. As this
    grows alike for all that wait, `aged_rest` leaves out what is the same: it is rest + `AGEING` * (the replica's work
    at arrival + the prompt's own since then). So a prompt passes a longer one that has begun while more is left of that
    one, equal prompts take no turns, and none passes a prompt once others got 16 times what it takes alone.
    """

    def key(request: Request) -> tuple[Turn, float, float, float, str]:
        if is_starving(request, now, starvation_s, tenants):
            return (STARVING, 0.0, 0.0, request.arrival_time, request.id)
        is_read = request.num_preemptions or request.is_offered
        rest = -inf if is_read else request.aged_rest
        due = request.due if request.is_offered else 0.0
        return (turn(request, tenants), rest, due, request.arrival_time, request.id)

    return sorted(requests, key=key)


def prefill_reason(request: Request, now: float, work: PromptWork, starvation_s: float, tenants: Tenants) -> str:
    """Return the reason for a request's place in `order_prefills`, for its timeline."""
    if is_starving(request, now, starvation_s, tenants):
        return f"waited {now - request.queued_at:.0f} s"
    if request.num_preemptions:
        return "preempted before"
    own = request.submission.priority_in_class
    priority = f"priority {own}, " if own else ""
    return f"{priority}{request.aged_rest - AGEING * work.done:.3g} {work.unit} of its prompt left, less ageing"


def first_victim(requests: Sequence[Request], tenants: Tenants) -> Request:
    """Return the request to preempt first: the least urgent, then of the tenant that has had most, then the last
    admitted."""

    return max(enumerate(requests), key=lambda pair: (turn(pair[1], tenants), pair[0]))[1]
