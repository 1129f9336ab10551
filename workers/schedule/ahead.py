"""Look ahead: schedule the next step before the tokens of the step in flight are known."""

from collections.abc import Iterator
from contextlib import contextmanager

from crossdock.workers.schedule.policies.pace import next_due
from crossdock.workers.schedule.request.batch import Batch, Scheduled
from crossdock.workers.schedule.request.request import Status
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable

# Once: Python 3.11 takes 0.2 µs to look up a member of an enum.
_SEND = Leg.SEND
_RUNNING = Status.RUNNING


@contextmanager
def assume_ended(table: RequestTable, batch: Batch, ended: float) -> Iterator[None]:
    """Treat `batch`, the only step in flight, as ended at time `ended` within the context.

    An unknown token is `~row`: its row among the rows that `batch` samples. Requests that end whatever the token is are
    gone. A request that turns out to have ended was scheduled in vain. No request is preempted on an assumption: see
    `RequestTable.needs_preemption`.
    """
    running = table.running
    tpots = [slo.tpot_s for slo in table.config.slo_classes]
    assumed = dict[str, tuple[Scheduled, float]]()
    gone = set[str]()
    row = 0
    for part in batch.scheduled:
        request = part.request
        if request.status is _RUNNING:
            assumed[request.id] = part, request.due
            request.num_in_flight_tokens -= part.num_tokens
            request.num_computed_tokens += part.num_tokens
            if part.samples:
                request.token_ids.append(~row)
                request.due = next_due(request.due, ended, tpots[request.priority])
            if _is_over(table, part):
                gone.add(request.id)
        row += part.samples
    table.assumed_ended = assumed
    table.running = [request for request in running if request.id not in gone]
    going_on = table.running.copy()
    try:
        yield
    finally:
        if table.running == going_on:  # as in most steps
            table.running = running
        else:
            ids = {request.id for request in running}
            started = [request for request in table.running if request.id not in ids]
            table.running = [request for request in running if request.status is _RUNNING] + started
        table.assumed_ended = ()
        for part, due in assumed.values():
            request, request.due = part.request, due
            request.num_in_flight_tokens += part.num_tokens
            request.num_computed_tokens -= part.num_tokens
            if part.samples:
                request.token_ids.pop()


def _is_over(table: RequestTable, part: Scheduled) -> bool:
    """Return whether the request of a part ends with it, whatever token was sampled."""
    request = part.request
    if part.samples:
        return request.leg is _SEND or table.is_full(request)
    return request.num_computed_tokens == request.num_tokens  # max_tokens is 0: only the prompt was asked for
