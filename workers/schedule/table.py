"""Every request that has not ended, by status, and its pages. Requests change status here and nowhere else."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.output_lengths import OutputLengths
from crossdock.workers.schedule.policies.order import is_starving
from crossdock.workers.schedule.policies.tenants import Tenants
from crossdock.workers.schedule.request.request import FinishReason, Request, Status
from crossdock.workers.schedule.request.submission import Leg

CLASS_MEMORY_S = 60.0
"""Seconds since its last request for which a class counts as in use: the pause of a person who reads an answer."""


@dataclass(slots=True)
class PrefillTotals:
    """Prompt work scheduled since the start."""

    tokens: int = 0
    seconds: float = 0.0  # predicted, without the fixed part of steps; see `PromptWork`
    tokens_by_priority: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class RequestTable:
    """The scheduler's state: requests by status, their page pool, and the step that is being scheduled.

    A request is in exactly one of `waiting`, `running` and `held`, by its status, until `end` removes the request.
    Running and held requests own pages for all their tokens; waiting ones own none.
    """

    config: SchedulerConfig
    pages: PagePool
    max_model_len: int  # tokens, prompt and output together
    num_drafts: int = 0  # of a stream in a step at most, with the tokens that are computed again
    on_end: Callable[[str], None] = lambda _: None  # called with the id of each request that has ended
    waiting: list[Request] = field(default_factory=list)  # in order of arrival, preempted ones first
    running: list[Request] = field(default_factory=list)  # in order of admission
    held: list[Request] = field(default_factory=list)  # their pages are being transferred, in or out
    prefilled: PrefillTotals = field(default_factory=PrefillTotals)
    tenants: Tenants = field(init=False)
    num_preemptions: int = 0
    returned: list[Request] = field(default_factory=list)  # since `take_returned`
    awaited: dict[str, Request] = field(default_factory=dict)  # requests whose prefixes arrive, by owner of the pages
    left_behind: set[str] = field(default_factory=set)  # owners of pages that a tier may still fill, perhaps for ever
    kept_back: set[str] = field(default_factory=set)  # waiting requests behind an offered one that lacks pages
    arrived: dict[int, float] = field(default_factory=dict)  # when the last request of a class did, by priority
    outputs: OutputLengths = field(default_factory=OutputLengths)
    now: float = 0.0  # time of the step that is being scheduled, in seconds
    skipped: Collection[str] = ()  # ids of streams that the step leaves out for more urgent ones
    assumed_ended: Collection[str] = ()  # requests of a step in flight that is assumed to have ended, see ahead.py
    needs_preemption: bool = False  # the last `schedule` did, which cannot be while a step is assumed to end
    loaded_adapters: dict[str, None] = field(default_factory=dict)  # fingerprints, the least recently used first
    lacks_pages: bool = False  # since the last step was scheduled, a waiting request had too few pages to start
    needs: PageNeeds = field(init=False)
    _by_id: dict[str, Request] = field(default_factory=dict)
    _room: int | None = None  # see `room_for_outputs`; None: to be counted
    _read: list[str] = field(default_factory=list)  # owners that ended while their pages may have been read elsewhere
    _ended_in_flight: list[Request] = field(default_factory=list)  # a step in flight still uses their pages

    def __post_init__(self) -> None:
        pages = self.pages
        chunk = self.config.max_num_batched_tokens
        self.tenants = Tenants(self.config.prefill_order != "fcfs")
        self.needs = PageNeeds(pages.page_size, pages.windows, chunk, pages.state_pages, self.num_drafts)

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Return whether a step would compute something. Requests that wait for a transfer do not count."""
        return bool(self.running) or any(request.leg is not Leg.RECEIVE for request in self.waiting)

    def get(self, request_id: str) -> Request | None:
        """Return the request of that id, None if it has ended."""
        return self._by_id.get(request_id)

    def request(self, request_id: str) -> Request:
        """Return the request of that id, which must not have ended."""
        return self._by_id[request_id]

    def requests(self) -> list[Request]:
        """Return all requests that have not ended."""
        return list(self._by_id.values())

    def prefills(self, running: Sequence[Request] | None = None) -> list[Request]:
        """Return the requests with prompt tokens left to compute on this replica.

        `running`: the only ones to look at beside those that wait; None: all that run."""
        receive = Leg.RECEIVE
        waiting = [request for request in self.waiting if request.leg is not receive]
        started = self.running if running is None else running
        return waiting + [each for each in started if each.status is Status.RUNNING and not each.is_decoding]

    def awaits_pages(self, request: Request) -> bool:
        """Return whether a request waits for pages from elsewhere, see awaited.py."""
        return request.coming.until > self.now

    def lacks_adapter(self, request: Request) -> bool:
        """Return whether a request needs an adapter that is in no slot, see adapter_slots.py."""
        return request.adapter is not None and request.adapter.fingerprint not in self.loaded_adapters

    def arriving(self) -> list[Request]:
        """Return the requests whose prompts another replica computes, and whose tokens will be made here."""
        return [request for request in (*self.held, *self.waiting) if request.leg is Leg.RECEIVE]

    def tpot_s(self, request: Request) -> float:
        """Return the seconds per token that the request's class promises."""
        return self.config.slo_classes[request.priority].tpot_s

    def tightest_ttft_s(self) -> float:
        """Return the shortest time to first token that a class in use promises.

        A class is in use while it has prompts here, and for `CLASS_MEMORY_S` after its last request. Where no class is
        in use, all count.
        """
        classes = self.config.slo_classes
        in_use = {priority for priority, arrived in self.arrived.items() if self.now - arrived < CLASS_MEMORY_S}
        in_use.update(request.priority for request in self._by_id.values() if not request.num_output_tokens)
        return min([classes[priority].ttft_s for priority in in_use or range(len(classes))])

    def is_starving(self, request: Request) -> bool:
        """Return whether a request starves, see `policies.order.is_starving`."""
        return is_starving(request, self.now, self.config.starvation_s, self.tenants)

    def urgency(self, request: Request) -> tuple[int, int]:
        """Return the urgency of a request, the lower the more urgent: one that starves goes before all classes."""
        return (-1, 0) if self.is_starving(request) else request.urgency

    def is_full(self, request: Request) -> bool:
        """Return whether the newest token of a request is the last that it may have."""
        num_tokens = len(request.token_ids)  # not by properties: this runs for every new token
        return num_tokens >= request.most_tokens or num_tokens >= self.max_model_len

    def keeps_pages(self, request: Request) -> bool:
        """Return whether a request must not be preempted: its pages are being sent, or a step in flight uses them."""
        return request.leg is Leg.SEND or request.num_in_flight_tokens > 0 or request.id in self.assumed_ended

    def num_growth_pages(self, request: Request) -> int:
        """Return the pages that a request is expected to need beyond those it has, until it ends.

        See `num_expected`.
        """
        if request.leg is Leg.SEND:
            return 0
        now = self.needs.pages(request.num_tokens)
        later = self.needs.pages(request.num_tokens + self.num_expected(request))
        if self.pages.has_windows:
            return self._growth_with_windows(request.owner, now, later)
        return self.pages.num_groups * max(later - max(len(self.pages.pages_of(request.owner)), now), 0)

    def _growth_with_windows(self, owner: str, now: int, later: int) -> int:
        """Return the growth of an owner whose tokens lie on `now` pages of each group, and at their end on `later`."""
        return sum(
            max((later if most is None else min(later, most)) - max(self.pages.num_held(owner, group), now), 0)
            for group, most in enumerate(self.needs.most_decoding)
        )

    def num_expected(self, request: Request) -> int:
        """Return the tokens that a request is expected to make from now on.

        An output is expected to go on as recent ones did, and never to end within its next page.
        """
        rest = int(self.outputs.expected_rest(request.num_output_tokens))
        return min(self.most_left(request), max(rest, self.pages.page_size))

    def most_left(self, request: Request) -> int:
        """Return the tokens that a request may still make."""
        return min(request.most_tokens, self.max_model_len) - len(request.token_ids)

    def room_for_outputs(self) -> int:
        """Return the growth pages of all that own pages, counted again when a step begins or a status changes."""
        if self._room is None:
            self._room = sum(map(self.num_growth_pages, (*self.running, *self.held)))
        return self._room

    def num_returning_pages(self) -> int:
        """Return how many pages come back without a further preemption, once no transfer or tier uses them."""
        self._read = self._still_read()
        quarantined = self.pages.num_quarantined - self.pages.num_quarantined_of(self.left_behind)
        return quarantined + self.pages.num_freed_by([*self._read, *self.awaited])

    def _still_read(self) -> list[str]:
        return [owner for owner in self._read if self.pages.pages_of(owner)]

    # -- changing ----------------------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """Note the time of the step that is being scheduled. Outputs have grown since the last one."""
        self.now = now
        self._room = None
        self.outputs.grow()
        self.pages.block_pool.cached.pass_time(now)

    def note_tenants(self, prefills: Sequence[Request]) -> None:
        """Note whose prompts wait, before they are put in order. `prefills`: as `prefills` returns them."""
        arriving = [request for request in self.waiting if request.leg is Leg.RECEIVE]
        self.tenants.note((*prefills, *arriving), self.now)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.tenants.in_use |= bool(request.tenant)
        self._by_id[request.id] = request
        self.waiting.append(request)
        self.arrived[request.priority] = request.arrival_time

    def start(self, request: Request) -> None:
        """Move a waiting request, which now has its pages, to `running`; to `held` if another replica fills them."""
        self._room = None
        self.waiting.remove(request)
        if request.leg is Leg.RECEIVE:
            request.status = Status.HELD
            self.held.append(request)
        else:
            request.status = Status.RUNNING
            self.running.append(request)
            if request.leg is Leg.LOCAL:
                self.outputs.begin(request)

    def forget_offer(self, request: Request) -> None:
        """Note that a request needs no grant any more, so that no other request waits for this one."""
        request.is_offered = False
        self.kept_back.clear()

    def hold(self, request: Request) -> None:
        """Stop computing a request, whose pages are sent to another replica."""
        self._room = None
        self.running.remove(request)
        request.status = Status.HELD
        self.held.append(request)

    def resume(self, request: Request) -> None:
        """Let a held request, all of whose pages have arrived, continue here."""
        self._room = None
        self.held.remove(request)
        if request.is_offered:
            self.forget_offer(request)
        request.status = Status.RUNNING
        request.leg = Leg.LOCAL
        self.running.append(request)
        self.outputs.begin(request)

    def preempt(self, request: Request) -> None:
        """Return a running request to the front of the queue; its tokens stay, its pages go.

        The tokens are computed again later, less the prefix that is still cached. Counter-based sampling makes the
        continuation the same.
        """
        self._room = None
        self.running.remove(request)
        self.pages.release(request.owner)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._requeue(request, 0, self.now)

    def give_back(self, request: Request) -> None:
        """End a request here for the sake of a more urgent one: the router places it again.

        Its pages come back when the transfer is cancelled, see `take_returned`.
        """
        self.returned.append(request)
        self.end(request, FinishReason.RETURNED)

    def take_returned(self) -> list[Request]:
        """Return the requests that were ended since the last call, to make way for more urgent ones.

        The caller cancels their transfers and hands them back to the router. Only requests with a transfer are here.
        """
        returned = self.returned
        self.returned = []
        return returned

    def recall(self, request: Request, now: float) -> None:
        """Return a held request, whose transfer in has failed, to the front of the queue.

        The other replica may still write to the pages, so those without another owner are quarantined.
        """
        self._room = None
        self.held.remove(request)
        self._quarantine(request)
        self._requeue(request, request.num_computed_tokens, now)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Remove a request in any status and free its pages, unless something still uses them.

        Pages that another replica may write to are quarantined. Pages that a step in flight writes to are released by
        the update of that step. Pages that are being sent are released by the engine, with `pages.release(owner)`.
        """
        self._room = None
        if request.is_offered:
            self.forget_offer(request)
        match request.status:
            case Status.RUNNING:
                self.running.remove(request)
            case Status.WAITING:
                self.waiting.remove(request)
            case Status.HELD:
                self.held.remove(request)
        if request.status is Status.HELD and request.leg is Leg.RECEIVE:
            self._quarantine(request)
        elif request.leg is Leg.SEND:
            self._read = [*self._still_read(), request.owner]
        elif not request.num_in_flight_tokens:
            self.pages.release(request.owner)
        if request.num_in_flight_tokens:
            self._ended_in_flight.append(request)
        self.outputs.end(request, is_whole=reason in (FinishReason.STOP, FinishReason.LENGTH))
        request.status = Status.FINISHED
        request.finish_reason = reason
        del self._by_id[request.id]
        self.on_end(request.id)

    def release_after_flight(self, request: Request) -> None:
        """Release the pages of a request that ended in flight, once no step writes to them and no transfer reads."""
        is_used = request.num_in_flight_tokens or request.leg is Leg.SEND
        if request.status is Status.FINISHED and not is_used:
            self.pages.release(request.owner)
        if not request.num_in_flight_tokens and request in self._ended_in_flight:
            self._ended_in_flight.remove(request)

    def drop_flights(self) -> None:
        """Forget all steps in flight: requests are where they were before these, or wait if their state is lost.

        Only the pages of tokens are written again. Recurrent layers overwrite their state, so that a request whose
        state a step has written to begins again; if its pages are being sent, it ends and the router places it again.
        """
        for request in self.requests():
            is_in_flight = request.num_in_flight_tokens > 0
            request.num_in_flight_tokens = 0
            if is_in_flight and self.pages.state_pages:
                if request.leg is Leg.SEND:
                    self.give_back(request)
                else:
                    self.preempt(request)
        ended = self._ended_in_flight
        self._ended_in_flight = []
        for request in ended:
            request.num_in_flight_tokens = 0
            self.release_after_flight(request)

    def _requeue(self, request: Request, expected_cached_tokens: int, now: float) -> None:
        request.status = Status.WAITING
        request.queued_at = now
        request.coming.forget()
        request.expected_cached_tokens = expected_cached_tokens
        request.num_computed_tokens = request.num_verified_tokens = 0
        self.waiting.insert(0, request)

    def _quarantine(self, request: Request) -> None:
        self.pages.quarantine(request.owner, request.num_computed_tokens // self.pages.page_size)
