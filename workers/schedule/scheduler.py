"""Which tokens the next step computes, and what a step changed: running decodes first, then chunks of prompts.

There is no prefill phase: every request has tokens that are not computed yet, and each step computes some of them.

The scheduler's plain path, for text alone, in reading order: request/request.py, request/batch.py, table.py,
policies/order.py, admission.py, kv.py, prefills.py, step_budget.py, policies/chunking.py, policies/pace.py, outputs.py,
and this file. A request is made from a submission, request/submission.py. Below stand pages (memory/) and predicted
seconds (cost/, first_token.py, forecast.py). Other rooms add to the path, each at one line that asks whether there is
any: drafts/, recurrent/, pictures/, windows.py, preemption.py (pages run short), handoff.py (two replicas), ahead.py
and fast_forward.py (several steps).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import structs

from crossdock.workers.schedule import admission, kv, windows
from crossdock.workers.schedule.adapter_slots import AdapterSlots, SlotChange
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.drafts.verify import Verification, longest_verified
from crossdock.workers.schedule.forecast import Forecast
from crossdock.workers.schedule.handoff import Handoff
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.outputs import append_sampled, new_delta
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.policies.chunk_policies import meaning_of
from crossdock.workers.schedule.policies.order import AGEING
from crossdock.workers.schedule.policies.pace import next_due, skip_decodes
from crossdock.workers.schedule.prefills import ChunkLimit, PrefillScheduler
from crossdock.workers.schedule.prefixes import split_point
from crossdock.workers.schedule.prefixes.awaited import Awaited
from crossdock.workers.schedule.prefixes.borrowed import BorrowedPrefixes
from crossdock.workers.schedule.prefixes.loading import TierLoading
from crossdock.workers.schedule.prefixes.tier_pages import TierPages
from crossdock.workers.schedule.recurrent.states import RecurrentStates
from crossdock.workers.schedule.request.batch import NO_ENCODER_WORK, Batch, SampledToken, Scheduled
from crossdock.workers.schedule.request.request import FinishReason, Request, Status, TokenDelta
from crossdock.workers.schedule.request.slo import priority_of
from crossdock.workers.schedule.request.submission import InvalidField, Leg
from crossdock.workers.schedule.request.weight_version import WeightVersion
from crossdock.workers.schedule.table import RequestTable


class Streams(NamedTuple):
    """Which streams a step may decode, chosen before any of them has a page for its newest token."""

    chosen: Sequence[Request]
    prefilling: Sequence[Request] = ()  # requests that run and are no streams yet
    wanted_drafts: Mapping[str, int] = {}  # how many drafts each may profit from; 0 is left out


class Scheduler:
    """Decides what every step computes, and owns the state of requests and their pages.

    Every `schedule` is followed by the `update` of its batch, in the same order. Up to `depth` steps may be in flight
    between the two. `add` may be called at any time. `abort` and the methods of `handoff` may be called between steps,
    for requests that no step in flight computes.

    Its parts are public: `table` has the requests by status, `forecast` predicts seconds, `handoff` takes prompts and
    tokens to other replicas and from them, `awaited` takes prefixes from elsewhere, `loading` those of tiers,
    `borrowed` those of other replicas, `encoding` plans what pictures need, `verification` adds drafts.

    With several steps in flight, each takes its share of the streams, and a prompt's next chunk may follow before the
    previous one has ended. A request that samples in a step in flight waits for it, except in `assume_ended`. A
    request in flight keeps its pages.

    When time or pages run short, requests slow down in this order. Prompts of the least urgent class wait for those of
    all others. Then its streams skip steps while they can still be in time, and lose their pages first. Then comes the
    next class; streams of the most urgent class are last. A request that has waited for `starvation_s`, and longer
    than its class promises, is exempt.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PagePool,
        max_model_len: int,
        eos_token_ids: Collection[int] = (),
        cost: StepCost | None = None,
        overrun: float = 1.0,
        depth: int = 1,
        interval_share: float = 1.0,
        drafting: DraftPolicy | None = None,
        encoding: Encoding | None = None,
        tiers: TierPages | None = None,
        max_loras: int = 0,
        row_tile: int = 1,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            config: settings.
            pages: the KV pages to hand out.
            max_model_len: most tokens of a request, prompt and output together.
            eos_token_ids: tokens that end a request.
            cost: what steps take. Without it chunks are fixed, and no request is refused.
            overrun: factor by which some steps take longer than `cost` predicts.
            depth: most steps in flight, the number of pipeline stages.
            interval_share: interval of the steps of a full pipeline / seconds that one takes, see `IntervalShare`.
            drafting: how many drafts streams get. Without it none do.
            encoding: the cache of pictures' embeddings. Without it no request may have items.
            tiers: the pages in tiers below the pool. Without it there are none.
            max_loras: adapters that the model holds at once. 0: it takes none.
            row_tile: rows that the device multiplies at a time.

        Raises:
            ValueError: a request of `max_model_len` could not be served, or there are recurrent layers and items that
                one chunk must compute whole.
        """
        encoding = self.encoding = encoding if encoding is not None else Encoding(0)
        encoding.check_states(bool(pages.state_pages))
        config.check_capacity(pages, max_model_len)
        self.config = config
        self.pages = pages
        self.eos_token_ids = eos_token_ids
        table = self.table = RequestTable(config, pages, max_model_len)
        if drafting is not None:
            num_drafts = longest_verified(drafting.config, bool(pages.state_pages))
            table = self.table = RequestTable(config, pages, max_model_len, num_drafts, drafting.forget)
        self.forecast = Forecast(table, cost, overrun, depth, interval_share, encoding)
        self.handoff = Handoff(table, self.forecast)
        self.awaited = Awaited(table)
        self.loading = TierLoading(table, self.forecast, self.awaited, tiers or TierPages())
        self.adapters = AdapterSlots(table, max_loras)
        self.borrowed = BorrowedPrefixes(table, self.forecast, self.awaited)
        self._states = RecurrentStates(table, self.forecast) if pages.state_pages else None
        limits = _limits(self.forecast, encoding, self._states, has_tiers=bool(self.loading.tiers.tiers))
        self._when_computed = _when_computed(table, has_tiers=bool(self.loading.tiers.tiers))
        self._prefills = PrefillScheduler(table, self.forecast, limits, row_tile)
        self.verification = Verification(table, self.forecast, drafting, self._states) if drafting is not None else None
        if cost is not None:
            pages.block_pool.price.learn(cost, self.loading.tiers.page_s)
        self._computed_chunks = False  # in the last step; used without mixed_chunks
        self.weights = WeightVersion()  # the weights that steps compute with
        self.is_paused = False  # no step begins; requests keep their tokens and pages

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidField: the request can never be served.
            Overloaded: the promised time to its first token cannot be met, and `admission` is `reject`.
        """
        if not request.num_prompt_tokens:
            raise InvalidField("prompt must have at least one token", "prompt")
        longest = self.table.max_model_len - (1 if request.sampling.max_tokens else 0)
        if request.num_prompt_tokens > longest:
            raise InvalidField(
                f"prompt has {request.num_prompt_tokens} tokens; this model takes at most {longest} "
                f"(max_model_len is {self.table.max_model_len})",
                "prompt",
            )
        asked = request.submission
        if request.items or request.adapter is not None or asked.priority_in_class:
            self._check_features(request)
        if self.table.get(request.id) is not None:
            raise InvalidField(f"request_id {request.id!r} is already being served", "request_id")
        request.priority = priority_of(self.config.slo_classes, asked.slo_class)
        request.queued_at = request.arrival_time - asked.waited_s
        num_pages, load_s = kv.match_prefix(self.table, request).num_pages, 0.0
        if self.loading.tiers.tiers:
            num_pages, load_s = self.loading.predicted(request)
        request.expected_cached_tokens = max(num_pages * self.pages.page_size, asked.source_tokens)
        request.aged_rest = self.forecast.prompt_work(request) + AGEING * self.forecast.work.done
        if request.leg is not Leg.RECEIVE and not asked.output_token_ids:  # else the first token is made elsewhere
            admission.promise(self.table, self.forecast, request, load_s)
        if request.adapter is not None:
            self.adapters.use(request.adapter)
        self.table.add(request)

    def _check_features(self, request: Request) -> None:
        """Check that this replica serves the pictures, the adapter and the priority that a request asks for.

        Raises:
            InvalidField: it does not.
        """
        if request.items:
            self.encoding.check(request, self.config, self.pages.page_size)
        if request.adapter is not None and not self.adapters.num_slots:
            raise InvalidField("this server takes no adapters; start it with --enable-lora", "model")
        own = request.submission.priority_in_class
        if own and self.config.prefill_order == "fcfs":
            reason = f"priority is {own}, but this server computes prompts in order of arrival"
            raise InvalidField(f"{reason} (--prefill-order fcfs)", "priority_in_class")

    def abort(self, request_id: str) -> Request | None:
        """End a request in any status and free its pages. None: it has ended already."""
        request = self.table.get(request_id)
        if request is not None:
            self.table.end(request, FinishReason.ABORT)
            self.loading.take_back()
        return request

    def fail(self, request: Request, error: str, field: str = "") -> TokenDelta:
        """End a request with an error, and free its pages once no step uses them. Returns its last delta.

        `field`: the field of the request that is at fault; empty: the request is not.
        """
        delta = new_delta(request)
        delta.finish_reason = FinishReason.ERROR
        delta.error = error
        delta.error_field = field
        self.table.end(request, FinishReason.ERROR)
        self.loading.take_back()
        return delta

    def pause(self, *, is_paused: bool) -> None:
        """Begin no step from now on, or go on. Requests keep their tokens and pages, and new ones queue."""
        self.is_paused = is_paused

    def change_weights(self, weights: WeightVersion) -> None:
        """Note that the next step computes with other weights. Cached pages go: no request will look for them."""
        self.weights = weights
        self.pages.block_pool.clear_cache()

    def drop_steps_in_flight(self) -> None:
        """Forget the steps in flight, which will have no update: every request is where it was before them.

        Where layers are recurrent, requests of these steps begin again. Requests that send their pages return to the
        router instead, see `RequestTable.take_returned`.
        """
        self.table.drop_flights()
        self.loading.take_back()
        self.encoding.clear()

    def learn(self, cost: StepCost, overrun: float, interval_share: float = 1.0) -> None:
        """Predict with a new cost from now on. `overrun`: factor by which some steps exceed their predicted seconds.
        `interval_share`: interval of the steps of a full pipeline, as a share of these seconds."""
        self.forecast.learn(cost, overrun, interval_share)
        self.pages.block_pool.price.learn(cost, self.loading.tiers.page_s)

    def adapters_to_load(self, now: float) -> list[SlotChange]:
        """Return the adapters to load from now on, for the requests that are next to start.

        Prompts that other replicas compute already come first: these replicas wait with their slots for a grant.
        """
        if not self.adapters.num_slots or not any(self.table.lacks_adapter(each) for each in self.table.waiting):
            return []
        self.table.begin_step(now)
        arriving = [each for each in self.table.waiting if each.leg is Leg.RECEIVE]
        offered, others = ([each for each in arriving if each.is_offered is which] for which in (True, False))
        return self.adapters.begin([*offered, *self._prefills.candidates(self.table.running), *others])

    # -- schedule: what the next step computes -----------------------------------------------------------------------

    def choose_streams(self, now: float) -> Streams:
        """Return the streams of the step that begins at `now`, and how many drafts each of them may profit from.

        Ask a drafter for these drafts. Give streams and drafts to `schedule`, before anything else changes.
        """
        self.table.begin_step(now)
        streams = _choose_streams(self.forecast)
        if self.verification is None:
            return streams
        return streams._replace(wanted_drafts=self.verification.wanted(streams.chosen))

    def schedule(
        self, now: float, drafts: Mapping[str, Sequence[int]] | None = None, streams: Streams | None = None
    ) -> Batch:
        """Return the next step, empty if there is nothing to do. `now`: seconds on the clock of arrival times.

        Args:
            drafts: guesses of the tokens after the newest one, by request. The step verifies as many as have room.
            streams: from `choose_streams`; None: the step chooses its streams itself.
        """
        self.table.begin_step(now)
        self.table.needs_preemption = False
        if self.encoding.capacity:
            self.encoding.begin_step(self.table.urgency)
        streams = streams or _choose_streams(self.forecast)
        decodes = self._grow(streams.chosen)
        prefills = self._prefills.candidates(streams.prefilling)
        if self.loading.tiers.tiers:
            self.loading.begin(prefills)
        if self.adapters.num_slots:
            prefills = self.adapters.startable(prefills)
        if any(map(self.table.awaits_pages, prefills)):
            prefills = self.awaited.without_waiting(prefills)
        if self.config.mixed_chunks or not decodes or not prefills:
            batch = self._mix(decodes, prefills)
        else:
            batch = self._alternate(decodes, prefills)
        if self.verification is not None:
            batch = self.verification.with_drafts(batch, drafts or {})
        self.table.lacks_pages = False
        if self._states is not None:
            batch = self._states.with_states(batch)
        if self.encoding.capacity and batch and (work := self.encoding.take_work()) is not NO_ENCODER_WORK:
            batch = structs.replace(batch, encoder=work)
        for part in batch.scheduled:
            part.request.num_in_flight_tokens += part.num_tokens
        if self.table.tenants.in_use:
            self.forecast.charge(batch)
        return batch

    def _grow(self, streams: Sequence[Request]) -> list[Scheduled]:
        """Return the decodes of the streams that have a page for their newest token, or get one now."""
        pages = self.pages
        size = self.pages.page_size
        num_preemptions = self.table.num_preemptions
        has_groups = pages.num_groups > 1
        decodes = list[Scheduled]()
        for stream in streams:  # short: this runs for every token of every stream
            held = pages.pages_of(owner := stream.owner)
            num_tokens = len(stream.token_ids)
            if (has_groups or num_tokens > len(held) * size) and not kv.reach(self.table, stream, num_tokens):
                continue
            further = pages.further_pages_of(owner) if has_groups else ()
            decodes.append(Scheduled(stream, stream.num_computed_tokens, 1, held, True, "decode", further))
        if self.table.num_preemptions > num_preemptions:  # perhaps of a stream, for one after it
            decodes = _running(decodes)
        return decodes if self._states is None else self._states.with_tokens_again(decodes)

    def _mix(self, decodes: list[Scheduled], prefills: Sequence[Request]) -> Batch:
        """Return the step of `decodes` and of chunks for as many prompts as fit."""
        num_skipped = len(self.table.skipped)
        if not prefills:
            return Batch(decodes, len(decodes), "", num_skipped)
        chunks, limit = self._prefills.schedule(decodes, prefills)
        # A request that started may have preempted others.
        decodes = _running(decodes)
        chunks = _running(chunks)
        return Batch([*decodes, *chunks], len(decodes), limit if chunks else "", num_skipped)

    def _alternate(self, decodes: list[Scheduled], prefills: Sequence[Request]) -> Batch:
        """Return a step of chunks, or of decodes if the last one computed chunks."""
        self._computed_chunks = not self._computed_chunks
        if self._computed_chunks and (batch := self._mix([], prefills)):
            return batch
        return self._mix(_running(decodes), [])  # the attempt may have preempted streams

    # -- update: what the step found ---------------------------------------------------------------------------------

    def update(self, batch: Batch, sampled: Mapping[str, SampledToken], now: float) -> list[TokenDelta]:
        """Record a computed step that ended at `now`, and return what it adds to outputs.

        `sampled` has an entry for each part that `samples`. A part that began with a wrong assumption has no entry, and
        is computed again.
        """
        deltas = []
        size = self.pages.page_size
        table = self.table
        tpots = [slo.tpot_s for slo in self.config.slo_classes]
        # Once: Python 3.11 takes 0.2 µs to look up a member of an enum.
        running = Status.RUNNING
        send = Leg.SEND
        self.pages.block_pool.cached.pass_time(now)
        for part in batch.scheduled:
            request = part.request
            request.num_in_flight_tokens -= part.num_tokens
            if request.status is not running:
                table.release_after_flight(request)
                continue
            end = part.start + part.num_tokens
            delta = None
            reason = None
            if part.samples:
                if (token := sampled.get(request.id)) is None:
                    if self._states is not None:
                        self._states.undo(part)
                    continue
                delta, reason = append_sampled(table, request, token, self.eos_token_ids)
                if part.drafts:
                    end = request.num_tokens - 1  # rejected drafts do not count, nor do tokens after the last one
            elif end == request.num_tokens:  # max_tokens is 0: only the prompt was asked for
                delta = new_delta(request)
                reason = FinishReason.LENGTH
            if self._states is not None:
                end = self._states.end(part, end)
            request.num_computed_tokens = end
            if end // size > part.start // size:
                kv.index_full_pages(table, request, part.start)
            for follow in self._when_computed:
                follow(request)
            if part.drafts and self.verification is not None:
                self.verification.verified(request, len(part.drafts), len(sampled[request.id].accepted))
            if delta is None:
                continue
            deltas.append(delta)
            tpot = tpots[request.priority]
            for _ in delta.token_ids:
                request.due = next_due(request.due, now, tpot)
            if request.paced_from is None:
                request.paced_from = now - tpot * request.num_output_tokens
            if reason is not None:
                delta.finish_reason = reason
                delta.charged_s = request.charged_s
                if self._states is not None:
                    self._states.keep_last(request)
                table.end(request, reason)
            elif request.leg is send:
                table.hold(request)
        if self.loading.tiers.tiers:
            self.loading.take_back()
        return deltas


def _limits(
    forecast: Forecast, encoding: Encoding, states: RecurrentStates | None, has_tiers: bool
) -> list[ChunkLimit]:
    """List the limits of running prompts' chunks, beside the budget of a step: none on most replicas."""
    table = forecast.table
    limits = list[ChunkLimit]()
    if table.pages.has_windows:
        limits.append(partial(windows.chunk_within, table, encoding))
    if states is not None:
        limits.append(states.chunk_within)
    if has_tiers:
        limits.append(partial(split_point.chunk_within, table, forecast))
    if encoding.keeps_items_whole:
        limits.append(partial(encoding.outside_items, page_size=table.pages.page_size))
    return limits


def _choose_streams(forecast: Forecast) -> Streams:
    """Return the streams of the next step: in a pipeline its share, and none that can wait for more urgent ones."""
    table = forecast.table
    streams = list[Request]()
    prefilling = list[Request]()
    table.skipped = ()
    for request in table.running:
        (streams if request.is_decoding else prefilling).append(request)
    if (depth := forecast.depth) > 1:
        share = -(-len(streams) // depth)
        landed = [stream for stream in streams if not stream.num_in_flight_tokens]
        streams = sorted(landed, key=lambda stream: stream.due)[:share]
    is_mixed = len({stream.priority for stream in streams}) > 1  # one class alone is never left out
    if is_mixed and forecast.cost is not None and meaning_of(table.config.chunk_policy).fits_streams:
        table.skipped = skip_decodes(streams, table.now, forecast.cost)
        streams = [stream for stream in streams if stream.id not in table.skipped]
    return Streams(streams, prefilling)


def _when_computed(table: RequestTable, has_tiers: bool) -> list[Callable[[Request], None]]:
    """List the functions to call with each request of which a step has computed tokens: none on most replicas."""
    called = list[Callable[[Request], None]]()
    if table.pages.has_windows:
        called.append(partial(windows.slide, table))
    if has_tiers:
        called.append(partial(split_point.meet, table))
    return called


def _running(parts: Sequence[Scheduled]) -> list[Scheduled]:
    running = Status.RUNNING
    return [part for part in parts if part.request.status is running]
