"""Which tokens the next step computes, and what a step changed: running decodes first, then chunks of prompts.

There is no prefill phase: every request has tokens that are not computed yet, and each step computes some of them.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from crossdock.workers.schedule import admission, ahead, handoff, kv, stretch
from crossdock.workers.schedule.batch import Batch, SampledToken, Scheduled
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.drafts.verify import Verification, longest_verified
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.outputs import append_sampled, new_delta
from crossdock.workers.schedule.pacing.chunk_policies import meaning_of
from crossdock.workers.schedule.pacing.forecast import Forecast
from crossdock.workers.schedule.pacing.pace import next_due, skip_decodes
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import NO_ENCODER_WORK, Encoding
from crossdock.workers.schedule.pictures.whole_items import check_fit
from crossdock.workers.schedule.prefills import PrefillScheduler
from crossdock.workers.schedule.recurrent.states import RecurrentStates
from crossdock.workers.schedule.request import FinishReason, InvalidField, Leg, Request, Status, TokenDelta
from crossdock.workers.schedule.slo import priority_of
from crossdock.workers.schedule.table import PrefillTotals, RequestTable


class Scheduler:
    """Decides what every step computes, and owns the state of requests and their pages.

    Every `schedule` is followed by the `update` of its batch, in the same order. Up to `depth` steps may be in flight
    between the two. `add` may be called at any time. `abort` and the methods of handoff.py may be called between steps,
    for requests that no step in flight computes.

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

        Raises:
            ValueError: a request of `max_model_len` could not be served, or there are recurrent layers and items that
                one chunk must compute whole.
        """
        if encoding is not None and encoding.keeps_items_whole and pages.state_pages:
            raise ValueError(
                "a model with recurrent layers takes no pictures that attend in both directions: its chunks end where "
                "a state is kept, which may be inside a picture"
            )
        config.check_capacity(pages, max_model_len)
        self.config = config
        self.pages = pages
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.depth = depth
        self.encoding = encoding
        num_drafts = longest_verified(drafting.config, bool(pages.state_pages)) if drafting is not None else 0
        self._table = RequestTable(config, pages, max_model_len, num_drafts)
        self._forecast = Forecast(self._table, cost, overrun, depth, interval_share, encoding)
        self._states = RecurrentStates(self._table, self._forecast) if pages.state_pages else None
        self._prefills = PrefillScheduler(self._table, self._forecast, self._states)
        self.verification: Verification | None = None
        if drafting is not None:
            self.verification = Verification(self._table, self._forecast, drafting, self._states)
            self._table.on_end = lambda request: drafting.forget(request.id)
        if cost is not None:
            pages.cached.learn(cost)
        self._computed_chunks = False  # in the last step; used without mixed_chunks
        self._chosen: tuple[list[Request], set[str]] | None = None  # by `wanted_drafts`, for the next step

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidField: the request can never be served.
            Overloaded: the promised time to its first token cannot be met, and `admission` is `reject`.
        """
        if not request.prompt_token_ids:
            raise InvalidField("prompt must have at least one token", "prompt")
        longest = self.max_model_len - (1 if request.sampling.max_tokens else 0)
        if request.num_prompt_tokens > longest:
            raise InvalidField(
                f"prompt has {request.num_prompt_tokens} tokens; this model takes at most {longest} "
                f"(max_model_len is {self.max_model_len})",
                "prompt",
            )
        if request.items and self.encoding is None:
            raise InvalidField("prompt has pictures, and this replica encodes none", "prompt")
        if request.items and self.encoding is not None:
            self.encoding.check(request, self.config.enable_chunked_prefill)
            if self.encoding.keeps_items_whole and self.config.enable_chunked_prefill:
                check_fit(request, self.pages.page_size, *self.config.most_chunk_tokens)
        if self._table.get(request.id) is not None:
            raise InvalidField(f"request_id {request.id!r} is already being served", "request_id")
        if request.priority_in_class and self.config.prefill_order == "fcfs":
            reason = f"priority is {request.priority_in_class}, but this server computes prompts in order of arrival"
            raise InvalidField(f"{reason} (--prefill-order fcfs)", "priority_in_class")
        request.priority = priority_of(self.config.slo_classes, request.slo_class)
        request.arrival_work = self._table.prefilled.tokens
        request.queued_at = request.arrival_time - request.waited_s
        request.expected_cached_tokens = kv.match_prefix(self._table, request).num_pages * self.pages.page_size
        if request.leg is not Leg.RECEIVE and not request.output_token_ids:  # else the first token is made elsewhere
            admission.promise(self._table, self._forecast, request)
        self._table.add(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request in any status and free its pages. None: it has ended already."""
        request = self._table.get(request_id)
        if request is not None:
            self._table.end(request, FinishReason.ABORT)
        return request

    def fail(self, request: Request, error: str) -> TokenDelta:
        """End a request with an error, and free its pages once no step uses them. Returns its last delta."""
        delta = new_delta(request)
        delta.finish_reason, delta.error = FinishReason.ERROR, error
        self._table.end(request, FinishReason.ERROR)
        return delta

    def drop_steps_in_flight(self) -> None:
        """Forget the steps in flight, which will have no update: every request is where it was before them.

        Where layers are recurrent, requests of these steps begin again. Those that send their pages are returned to the
        router, see `take_returned`.
        """
        self._table.drop_flights()
        if self.encoding is not None:
            self.encoding.clear()

    def learn(self, cost: StepCost, overrun: float, interval_share: float = 1.0) -> None:
        """Predict with a new cost from now on, with the factor by which some steps overrun it, and the share of it
        after which the steps of a full pipeline follow each other."""
        self._forecast.cost, self._forecast.overrun = cost, overrun
        self._forecast.interval_share = interval_share
        self.pages.cached.learn(cost)

    def learn_encoder(self, cost: EncoderCost) -> None:
        """Predict the seconds of pictures with a new cost from now on."""
        if self.encoding is not None:
            self.encoding.cost = cost

    def learn_scored(self, factor: float) -> None:
        """Assume from now on that a chunk takes `factor` times as long if its tokens need log-probabilities."""
        self._forecast.scored_factor = factor

    # -- schedule: what the next step computes -----------------------------------------------------------------------

    def wanted_drafts(self, now: float) -> dict[str, int]:
        """Return how many drafts each running stream may profit from in the step that begins at `now`; 0 is left out.

        Ask a drafter for these, and give what it finds to `schedule`, before anything else changes.
        """
        if self.verification is None:
            return {}
        self._table.begin_step(now)
        self._chosen = self._choose_streams()
        return self.verification.wanted(self._chosen[0])

    def schedule(self, now: float, drafts: Mapping[str, Sequence[int]] | None = None) -> Batch:
        """Return the next step, empty if there is nothing to do. `now`: seconds on the clock of arrival times.

        `drafts`: guesses of the tokens after the newest one, by request. The step verifies as many as it has room for.
        """
        self._table.begin_step(now)
        self._table.needs_preemption = False
        if self.encoding is not None:
            self.encoding.begin_step(self._table.is_starving)
        streams, skipped = self._chosen or self._choose_streams()
        self._chosen = None
        decodes = self._grow(streams)
        prefills = self._prefills.candidates()
        if self.config.mixed_chunks or not decodes or not prefills:
            batch = self._mix(decodes, skipped, prefills)
        else:
            batch = self._alternate(decodes, skipped, prefills)
        if self.verification is not None:
            batch = self.verification.with_drafts(batch, drafts or {})
        self._table.lacks_pages = False
        if self._states is not None:
            batch = self._states.with_states(batch)
        if batch and self.encoding is not None and (work := self.encoding.take_work()) is not NO_ENCODER_WORK:
            batch = replace(batch, encoder=work)
        for part in batch.scheduled:
            part.request.num_in_flight_tokens += part.num_tokens
        return batch

    def _choose_streams(self) -> tuple[list[Request], set[str]]:
        """Return the streams to decode in this step, and the ids of those that skip it for more urgent ones."""
        streams = [request for request in self._table.running if request.is_decoding]
        skipped: set[str] = set()
        if self.depth > 1:
            share = -(-len(streams) // self.depth)
            landed = [stream for stream in streams if not stream.num_in_flight_tokens]
            streams = sorted(landed, key=lambda stream: stream.due)[:share]
        if self._forecast.cost is not None and meaning_of(self.config.chunk_policy).fits_streams:
            skipped = skip_decodes(streams, self._table.now, self._forecast.cost)
        if skipped:
            streams = [stream for stream in streams if stream.id not in skipped]
        return streams, skipped

    def _grow(self, streams: Sequence[Request]) -> list[Scheduled]:
        """Return the decodes of the streams that have a page for their newest token, or get one now."""
        table, pages, further_of = self._table, self.pages, self.pages.further_pages_of
        grown = [stream for stream in streams if kv.grow(table, stream)]
        decodes = [
            Scheduled(stream, stream.num_computed_tokens, 1, pages.pages_of(owner), True, "decode", further_of(owner))
            for stream in grown
            if stream.status is Status.RUNNING  # else preempted for a stream after it
            for owner in (stream.owner,)
        ]
        if self._states is None or self.verification is None:
            return decodes
        decodes = [part._replace(num_tokens=1 + part.request.num_verified_tokens) for part in decodes]
        return sorted(decodes, key=lambda part: part.num_tokens > 1)

    def _mix(self, decodes: list[Scheduled], skipped: Collection[str], prefills: Sequence[Request]) -> Batch:
        """Return the step of `decodes` and of chunks for as many prompts as fit."""
        if not prefills:
            return Batch(decodes, len(decodes), "", len(skipped))
        chunks, limit = self._prefills.schedule(decodes, skipped, prefills)
        decodes, chunks = _running(decodes), _running(chunks)  # a request that started may have preempted others
        return Batch([*decodes, *chunks], len(decodes), limit if chunks else "", len(skipped))

    def _alternate(self, decodes: list[Scheduled], skipped: Collection[str], prefills: Sequence[Request]) -> Batch:
        """Return a step of chunks, or of decodes if the last one computed chunks."""
        self._computed_chunks = not self._computed_chunks
        if self._computed_chunks and (batch := self._mix([], skipped, prefills)):
            return batch
        return self._mix(_running(decodes), skipped, [])  # the attempt may have preempted streams

    # -- update: what the step found ---------------------------------------------------------------------------------

    def update(self, batch: Batch, sampled: Mapping[str, SampledToken], now: float) -> list[TokenDelta]:
        """Record a computed step that ended at `now`, and return what it adds to outputs.

        `sampled` has an entry for each part that `samples`. Parts that began with an assumed token which turned out to
        be another one have none, and are computed again.
        """
        deltas, size, table, classes = [], self.pages.page_size, self._table, self.config.slo_classes
        self.pages.cached.pass_time(now)
        if self.encoding is not None:
            self.encoding.end_work(batch.encoder)
        for part in batch.scheduled:
            request = part.request
            request.num_in_flight_tokens -= part.num_tokens
            if request.status is not Status.RUNNING:
                table.release_after_flight(request)
                continue
            end = part.start + part.num_tokens
            delta, reason = None, None
            if part.samples:
                if (token := sampled.get(request.id)) is None:
                    if self._states is not None:
                        self._states.undo(part)
                    continue
                delta, reason = append_sampled(table, request, token, self.eos_token_ids)
                if part.drafts:
                    end = request.num_tokens - 1  # rejected drafts do not count, nor do tokens after the last one
            elif end == request.num_tokens:  # max_tokens is 0: only the prompt was asked for
                delta, reason = new_delta(request), FinishReason.LENGTH
            if self._states is not None:
                end = self._states.end(part, end)
            request.num_computed_tokens = end
            if end // size > part.start // size:
                kv.index_full_pages(table, request, part.start)
            if self.pages.has_windows:
                kv.slide(table, request)
            if part.drafts and self.verification is not None:
                self.verification.verified(request, len(part.drafts), len(sampled[request.id].accepted))
            if delta is None:
                continue
            deltas.append(delta)
            tpot = classes[request.priority].tpot_s
            for _ in delta.token_ids:
                request.due = next_due(request.due, now, tpot)
            if request.paced_from is None:
                request.paced_from = now - tpot * request.num_output_tokens
            if reason is not None:
                delta.finish_reason = reason
                if self._states is not None:
                    self._states.keep_last(request)
                table.end(request, reason)
            elif request.leg is Leg.SEND:
                table.hold(request)
        return deltas

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[Request]:
        """Return the requests that hold no pages."""
        return self._table.waiting

    @property
    def running(self) -> Sequence[Request]:
        """Return the requests that are computed here, in order of admission."""
        return self._table.running

    @property
    def held(self) -> Sequence[Request]:
        """Return the requests whose pages are being transferred, in or out."""
        return self._table.held

    @property
    def has_work(self) -> bool:
        """Return whether a step would compute something. Requests that wait for a transfer do not count."""
        return self._table.has_work

    @property
    def prefilled(self) -> PrefillTotals:
        """Return how much prompt work has been scheduled since the start."""
        return self._table.prefilled

    @property
    def num_preemptions(self) -> int:
        """Return how many requests have been preempted since the start."""
        return self._table.num_preemptions

    @property
    def cost(self) -> StepCost | None:
        """Return what steps are predicted to take."""
        return self._forecast.cost

    @property
    def overrun(self) -> float:
        """Return the factor by which some steps take longer than predicted."""
        return self._forecast.overrun

    @property
    def interval_share(self) -> float:
        """Return the interval at which steps end while there is enough to do, as a share of what each takes."""
        return self._forecast.interval_share

    def num_growth_pages(self, request: Request) -> int:
        """Return the available pages that admission leaves to the output of a request that runs or arrives."""
        return self._table.num_growth_pages(request)

    def get(self, request_id: str) -> Request | None:
        """Return the request of that id, None if it has ended."""
        return self._table.get(request_id)

    def requests(self) -> list[Request]:
        """Return all requests that have not ended."""
        return self._table.requests()

    # -- predictions and places: forecast.py, admission.py -----------------------------------------------------------

    def predict_ttft(self, request: Request) -> tuple[float, float]:
        """Return the seconds until a new request's first token, now and on an idle replica; (0, 0) without a cost."""
        return self._forecast.ttft(request)

    def prefills(self) -> list[Request]:
        """Return the requests with prompt tokens left to compute on this replica."""
        return self._table.prefills()

    def prefill_seconds(self, request: Request) -> float:
        """Return the seconds of this replica's time that the rest of a request's prompt takes; 0 without a cost."""
        return self._forecast.prefill_seconds(request)

    def seconds_alone(self, request: Request) -> float:
        """Return the seconds until the rest of a request's prompt is computed on an idle replica; 0 without a cost."""
        return self._forecast.seconds_alone(request)

    def prefill_share(self, priority: int) -> float:
        """Return the share of the time that goes into prompts of a class, beside the streams that run or arrive."""
        return self._forecast.prefill_share(priority)

    def num_places(self, priority: int) -> int:
        """Return how many more requests of a class may hold pages now."""
        return admission.num_places(self._table, priority)

    # -- prompts and tokens on two replicas: handoff.py --------------------------------------------------------------

    def offer(self, request_id: str) -> None:
        """Note that another replica has pages for the prompt of a request, and will compute it."""
        handoff.offer(self._table.request(request_id))

    def grant(self, now: float) -> list[Request]:
        """Reserve pages for requests that another replica has offered, as far as possible; return those requests."""
        return handoff.grant(self._table, now)

    def take_returned(self) -> list[Request]:
        """Return the requests that were ended since the last call, to make way for more urgent ones.

        The caller cancels their transfers and hands them back to the router. Only requests with a transfer are here.
        """
        returned, self._table.returned = self._table.returned, []
        return returned

    def commit(self, request_id: str, num_tokens: int) -> None:
        """Note that the first `num_tokens` of a held request have arrived."""
        handoff.commit(self._table, self._table.request(request_id), num_tokens)

    def start_decoding(self, request_id: str, token_id: int, now: float) -> None:
        """Let a held request decode, all of whose pages and first token have arrived."""
        handoff.start_decoding(self._table, self._table.request(request_id), token_id, now)

    def take_over(self, request_id: str, now: float) -> None:
        """Compute the prompt of a request here, because the other replica is lost."""
        handoff.take_over(self._table, self._table.request(request_id), now)

    def finish_sent(self, request_id: str) -> None:
        """End a held request, all of whose pages are at the other replica."""
        handoff.finish_sent(self._table, self._table.request(request_id))

    # -- the next step before a step's tokens are known: ahead.py ----------------------------------------------------

    def assume_ended(self, batch: Batch, ended: float) -> AbstractContextManager[None]:
        """Treat `batch`, the only step in flight, as ended at time `ended` within the context."""
        return ahead.assume_ended(self._table, batch, ended)

    @property
    def needs_preemption(self) -> bool:
        """Return whether the last `schedule` needed a preemption, which cannot happen while a step is assumed to end.

        Let the step in flight end before the next `schedule`.
        """
        return self._table.needs_preemption

    # -- many equal steps at once: stretch.py ------------------------------------------------------------------------

    def steady_steps(self, batch: Batch) -> int:
        """Return how many steps, `batch` the first of them, are the same decodes while no request arrives or leaves."""
        return 1 if self.verification is not None else stretch.steady_steps(self._table, self._forecast.cost, batch)

    def advance(self, batch: Batch, tokens: Mapping[str, Sequence[int]], ends: Sequence[float]) -> Batch:
        """Record fewer than `steady_steps` steps, `batch` the first of them, and return the batch of the next step."""
        return stretch.advance(self._table, batch, tokens, ends)


def _running(parts: Sequence[Scheduled]) -> list[Scheduled]:
    return [part for part in parts if part.request.status is Status.RUNNING]
