"""Which requests may queue, and which of those may start: promises, places, and limits on partly computed prompts."""

from collections.abc import Sequence

from crossdock.workers.schedule.pacing.forecast import Forecast
from crossdock.workers.schedule.request import Request
from crossdock.workers.schedule.slo import SloClass
from crossdock.workers.schedule.submission import Leg, Overloaded
from crossdock.workers.schedule.table import RequestTable


def promise(table: RequestTable, forecast: Forecast, request: Request, load_s: float = 0.0) -> None:
    """Note when the first token of a new request will come and when it is due. `load_s`: until its pages are loaded.

    Raises:
        Overloaded: the first token would come too late, and `admission` is `reject`. An idle replica refuses none. No
            replica refuses a request that names no class, or that another replica has accepted.
    """
    if forecast.cost is None:
        return
    ttft, alone = forecast.ttft(request)
    request.predicted_ttft = max(ttft, load_s + alone)  # pages are loaded while other prompts are computed
    slo = table.config.slo_classes[request.priority]
    request.ttft_deadline = deadline = slo.ttft_deadline(load_s + alone)
    late = request.predicted_ttft - deadline
    may_refuse = request.may_refuse and request.is_promised and table.config.admission == "reject"
    if late > 0 and may_refuse and table.has_work:
        raise Overloaded.late(slo.name, deadline, late)


def num_places(table: RequestTable, priority: int) -> int:
    """Return how many more requests of a class may hold pages now, without the places reserved for urgent classes.

    A request whose pages are sent takes no place: it decodes elsewhere.
    """
    config = table.config
    taken = [other.priority for other in table.running]
    taken += [other.priority for other in table.held if other.leg is Leg.RECEIVE]
    return config.max_num_seqs - len(taken) - reserved_slots(config.slo_classes, config.max_num_seqs, taken, priority)


def has_place(table: RequestTable, request: Request) -> bool:
    """Return whether a request may hold pages now, without the places kept for other classes and tenants."""
    kept = table.tenants.kept_places(request, table.running, table.config.max_num_seqs)
    return num_places(table, request.priority) > kept


def reserved_slots(classes: Sequence[SloClass], max_num_seqs: int, taken: Sequence[int], priority: int) -> int:
    """Return how many free places are reserved for classes more urgent than `priority`.

    `taken`: the priority of each request that has a place.
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
    partial = [
        other
        for other in table.running
        if not other.is_decoding and other.urgency <= request.urgency and not table.tenants.are_rivals(request, other)
    ]
    num_long = sum(is_long(table, other) for other in partial)
    if is_long(table, request) and num_long >= config.max_long_partial_prefills:
        return False
    return len(partial) < config.max_num_partial_prefills


def is_long(table: RequestTable, request: Request) -> bool:
    """Return whether a prompt is long by the number of tokens that are left to compute."""
    return request.num_uncached_tokens > table.config.long_prompt_tokens(table.max_model_len)
