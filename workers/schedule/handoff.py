"""Requests whose prompt is computed by one replica and whose tokens are made by another.

The two replicas never wait for each other's pages in a circle. A prefill replica admits a prompt without asking the
decode replica, and offers it then. A decode replica grants pages to offered prompts alone. So every prompt with pages
on both is being computed, and every prompt that waits for a grant waits for streams, which end without the other side.
Replicas that prefill for each other can be full of computed prompts that wait for grants. A replica with nothing else
gives the last such prompt back to the router.
"""

from dataclasses import dataclass

from crossdock.workers.schedule import kv
from crossdock.workers.schedule.admission import has_slot
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.policies.order import STARVING, Turn, before, order_prefills, turn
from crossdock.workers.schedule.request.request import FinishReason, Request, Status
from crossdock.workers.schedule.request.submission import Leg
from crossdock.workers.schedule.table import RequestTable


@dataclass(frozen=True, slots=True)
class Handoff:
    """The events of prompts and tokens on two replicas, for the requests of one table."""

    table: RequestTable
    forecast: Forecast

    def offer(self, request_id: str) -> None:
        """Note that the other replica has pages for a prompt and will compute it: pages may be granted for it here."""
        request = self.table.request(request_id)
        request.is_offered = request.leg is Leg.RECEIVE
        request.due = self.forecast.second_token_due(request, self.table.now)

    def grant(self, now: float) -> list[Request]:
        """Reserve pages for requests that another replica has offered, in prompt order, as far as there are any.

        A request that lacks pages keeps back less urgent ones; one that was preempted also those of its own turn; a
        starving request keeps back all others. Returns the requests that got pages. The first `num_computed_tokens` of
        each are cached here and need no transfer.
        """
        table = self.table
        table.begin_step(now)
        table.kept_back.clear()
        granted: list[Request] = []
        if not any(request.is_offered for request in table.waiting):
            return granted
        ready = (request for request in table.waiting if not table.lacks_adapter(request))
        here = (request for request in ready if not table.awaits_pages(request))
        waiting = [request for request in here if request.is_offered or request.leg is not Leg.RECEIVE]
        if table.tenants.in_use:
            table.note_tenants(table.prefills())
        startable: Turn = (len(table.config.slo_classes), 0.0, 0)
        set_aside = 0
        for request in order_prefills(waiting, now, table.config.starvation_s, table.tenants):
            own = turn(request, table.tenants)
            if own > startable:
                table.kept_back.add(request.id)
                continue
            if not has_slot(table, request):
                continue
            hit = kv.match_prefix(table, request)
            if not request.is_offered:  # computed here: the next step starts it if there are pages
                needed = table.needs.num_to_start(request.num_tokens, hit)
                if table.pages.block_pool.can_allocate(needed + set_aside, shared=hit.pages):
                    set_aside += needed
                    continue
            elif kv.admit(table, request, hit, set_aside):
                granted.append(request)
                continue
            least = before(own) if request.num_preemptions else own
            startable = STARVING if table.is_starving(request) else min(startable, least)
        if not granted:
            _end_circular_wait(table)
        return granted

    def commit(self, request_id: str, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a held request have arrived: others can share their full pages."""
        _commit(self.table, self.table.request(request_id), num_tokens)

    def start_decoding(self, request_id: str, token_id: int, now: float) -> None:
        """Let a held request decode: all its pages have arrived, and `token_id`, sampled by the other replica.

        Its first step reads the state, where layers are recurrent, in `pages.states.newest(owner)`.
        """
        table = self.table
        request = self.table.request(request_id)
        assert request.status is Status.HELD
        _commit(table, request, request.num_tokens)
        request.token_ids.append(token_id)
        request.due = now + table.tpot_s(request)
        table.resume(request)

    def take_over(self, request_id: str, now: float) -> None:
        """Compute the prompt of a request here, because the other replica is lost.

        Arrived pages are found again by their hashes, as far as every group of layers can continue from them. The state
        of recurrent layers comes last: without it, all tokens after the last snapshot here are computed again. Pages
        that the other replica may still write to are quarantined until `pages.end_quarantine(owner)`.
        """
        table = self.table
        request = self.table.request(request_id)
        assert request.leg is Leg.RECEIVE
        if request.is_offered:
            table.forget_offer(request)
        request.leg = Leg.LOCAL
        request.due = 0.0
        if request.status is Status.HELD:
            table.recall(request, now)
            if table.pages.state_pages or table.pages.has_windows:
                request.expected_cached_tokens = kv.match_prefix(table, request).num_pages * table.pages.page_size

    def finish_sent(self, request_id: str) -> None:
        """End a held request here: the other replica has all its pages."""
        self.table.end(self.table.request(request_id), FinishReason.SHIPPED)


def _end_circular_wait(table: RequestTable) -> None:
    """Give back a prompt that waits for a grant, where only a move of the other side could free a page here.

    The least urgent first, among equals the last admitted.
    """
    if table.running or any(request.leg is Leg.RECEIVE for request in table.held) or table.num_returning_pages():
        return
    if table.held:
        table.give_back(max(reversed(table.held), key=lambda request: request.urgency))


def _commit(table: RequestTable, request: Request, num_tokens: int) -> None:
    start = request.num_computed_tokens
    request.num_computed_tokens = num_tokens
    kv.index_full_pages(table, request, start)
