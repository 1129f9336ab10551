"""Which requests may queue, and which of those may start: promises, slots, and limits on partly computed prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.policies.order import STARVING, Turn, before, turn
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Leg, Overloaded
from crossdock.workers.schedule.table import RequestTable

MOST_MISFITS = 16  # requests of one class that a step tries to start and that lack pages: a step's work is bounded
_LEAST_URGENT: Turn = (1000, 0.0, 0)  # than any class


@dataclass(slots=True)
class Startable:
    """Which waiting requests a step may still try to start: none less urgent than one that could not.

    Requests that lack pages are passed by others of their turn, unless they starve, or were preempted: the client of a
    stream waits for its next token. With `fcfs`, nothing is passed."""

    table: RequestTable
    least_urgent: Turn = _LEAST_URGENT
    _num_misfits: int = 0  # requests of that turn that lack pages
    _without_slot: set[tuple[int, str]] = field(default_factory=set)  # tenants that leave the last ones of a class

    def may_start(self, request: Request) -> bool:
        """Return whether a request may start if it finds pages: there is a slot, and it passes none that could not."""
        own = request.priority, request.tenant
        if own in self._without_slot or not self.is_next(request):
            return False
        if num_slots(self.table, request.priority) <= 0:
            self.stays(request, "slot")
            return False
        if self.table.tenants.in_use and not has_slot(self.table, request):
            self._without_slot.add(own)
            return False
        return True

    def is_next(self, request: Request) -> bool:
        """Return whether no request that goes before this one could not start."""
        return turn(request, self.table.tenants) <= self.least_urgent and request.id not in self.table.kept_back

    def stays(self, request: Request, lacks: Literal["chunk", "pages", "slot"]) -> None:
        """Note that a request, which might have started, lacks something."""
        if self.table.config.prefill_order == "fcfs":
            self.least_urgent = STARVING
        elif lacks == "slot":
            self.least_urgent = (request.priority, -inf, 0)
        elif lacks == "pages":
            own = turn(request, self.table.tenants)
            self._num_misfits = self._num_misfits + 1 if own == self.least_urgent else 1
            goes_first = request.num_preemptions or self._num_misfits >= MOST_MISFITS
            self.least_urgent = before(own) if goes_first else own
            self.least_urgent = STARVING if self.table.is_starving(request) else self.least_urgent


def promise(table: RequestTable, forecast: Forecast, request: Request, load_s: float = 0.0) -> None:
    """Note when the first token of a new request will come and when it is due. `load_s`: until its pages are loaded.

    Raises:
        Overloaded: the first token would come too late, and `admission` is `reject`. The seconds by which the prompt
            delays longer ones count, too: shorter prompts that come later will delay it as well. An idle replica
            refuses none. No replica refuses a request that names no class, or that another replica has accepted.
    """
    if forecast.cost is None:
        return
    ttft, delays, alone = forecast.ttft(request)
    loaded = load_s + alone  # pages are loaded while other prompts are computed
    request.predicted_ttft = max(ttft, loaded)
    slo = table.config.slo_classes[request.priority]
    request.ttft_deadline = deadline = slo.ttft_deadline(loaded)
    late = max(ttft + delays, loaded) - deadline
    asked = request.submission
    may_refuse = asked.may_refuse and asked.is_promised and table.config.admission == "reject"
    if late > 0 and may_refuse and table.has_work:
        raise Overloaded.late(slo.name, deadline, late)


def num_slots(table: RequestTable, priority: int) -> int:
    """Return how many more requests of a class may hold pages now, without the slots reserved for urgent classes.

    A request whose pages are sent takes no slot: it decodes elsewhere.
    """
    config = table.config
    taken = [other.priority for other in table.running]
    taken += [other.priority for other in table.held if other.leg is Leg.RECEIVE]
    return config.max_num_seqs - len(taken) - reserved_slots(config.slo_classes, config.max_num_seqs, taken, priority)


def has_slot(table: RequestTable, request: Request) -> bool:
    """Return whether a request may hold pages now, without the slots kept for other classes and tenants."""
    tenants = table.tenants
    kept = tenants.kept_slots(request, table.running, table.config.max_num_seqs) if tenants.in_use else 0
    return num_slots(table, request.priority) > kept


def reserved_slots(classes: Sequence[SloClass], max_num_seqs: int, taken: Sequence[int], priority: int) -> int:
    """Return how many free slots are reserved for classes more urgent than `priority`.

    `taken`: the priority of each request that has a slot.
    """
    reserved = 0
    for urgent, slo in enumerate(classes[:priority]):
        if slo.decode_share:
            reserved += max(int(slo.decode_share * max_num_seqs) - taken.count(urgent), 0)
    return reserved


def may_be_partial(table: RequestTable, request: Request) -> bool:
    """Return whether one more prompt of its urgency may be partly computed.

    Less urgent prompts do not count, nor those of other tenants in its class.
    """
    config = table.config
    partial = [each for each in table.running if not each.is_decoding and each.urgency <= request.urgency]
    if table.tenants.in_use:
        partial = [each for each in partial if not table.tenants.are_rivals(request, each)]
    num_long = sum(is_long(table, other) for other in partial)
    if is_long(table, request) and num_long >= config.max_long_partial_prefills:
        return False
    return len(partial) < config.max_num_partial_prefills


def is_long(table: RequestTable, request: Request) -> bool:
    """Return whether a prompt is long by the number of tokens that are left to compute."""
    return request.num_uncached_tokens > table.config.long_prompt_tokens(table.max_model_len)
