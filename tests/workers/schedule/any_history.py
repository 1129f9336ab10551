"""Any history: requests arrive, step, move between replicas and end in any order, and the invariants hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.memory.page_events import PageEvents
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.prefixes.awaited import AwaitedPrefix
from crossdock.workers.schedule.prefixes.loading import PrefixLoad
from crossdock.workers.schedule.prefixes.tier_pages import PageTier, TierPages
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.coming_pages import ArrivingTail
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import InvalidField, Leg, Overloaded, SamplingParams, Submission
from tests.workers.schedule.model_free_replica import (
    CLASSES,
    COST,
    EOS,
    begin_step,
    new_scheduler,
    next_token,
    reference_output,
    sampled_by,
)
from tests.workers.schedule.page_reader import PageReader
from tests.workers.schedule.paged_device import PagedDevice, PagedTier, StatePair
from tests.workers.schedule.pictures.test_encoding import Device, item
from tests.workers.schedule.step_checks import LONGEST, check_no_part_reads_what_another_writes, check_step

NO_WINDOWS: tuple[Window, ...] = (None,)
WINDOWS: tuple[tuple[Window, ...], ...] = (
    *((5,), (None, 6), (None, 1, 9), (None, None, 4, 4)),
    *((AttentionChunk(10),), (None, AttentionChunk(8)), (None, AttentionChunk(1), 5, AttentionChunk(6))),
)
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=6)
MOST_ROWS = 15  # of a picture
RETURNING = ([1] * 36, [2] * 29, [3] * 34, [4] * 33, [5] * 36)  # prefixes
ITEMS = ([], [(2, 7)], [(0, 5), (6, 12)], [(1, 15)], [(9, 9), (19, 14)], [(4, 4), (8, 8), (16, 4)])


@dataclass(frozen=True, slots=True)
class Mode:
    """The kind of model, and how its steps follow each other."""

    windows: tuple[Window, ...]  # of each group of layers
    state_pages: int  # of a request's recurrent state; 0: no layer is recurrent
    most_flights: int  # steps that have begun and not ended
    depth: int  # of the scheduler: pipeline stages, whose steps have different streams
    has_drafts: bool
    pictures: str  # "": no prompt has some; "whole": a chunk never ends inside one; "parts": it may
    has_tiers: bool  # evicted pages are stored, and loaded again
    returns: bool  # prompts begin with one of few long prefixes, which evict each other and come back
    meets: bool  # a prefix is computed from its beginning while it is loaded from its end
    room: int  # further pages in the pool: with them, prefixes stay cached for long


@st.composite
def modes(draw: st.DrawFn, returns: bool = False) -> Mode:
    """Draw any mode that a replica can have: drafts begin no step ahead, pictures kept whole have no states.

    `returns`: as in `Mode`."""
    most_flights, depth = draw(st.sampled_from([(1, 1), (2, 1), (3, 3)]))
    meets = returns and draw(st.booleans())
    windows = NO_WINDOWS if meets else draw(st.one_of(st.just(NO_WINDOWS), st.sampled_from(WINDOWS)))
    layers = "attention" if meets else draw(st.sampled_from(["attention", "recurrent", "recurrent", "pictures"]))
    pictures = {"attention": [""], "recurrent": ["", "", "parts"], "pictures": ["whole", "parts"]}[layers]
    return Mode(
        windows,
        draw(st.integers(1, 3)) if layers == "recurrent" else 0,
        most_flights,
        depth,
        has_drafts=draw(st.booleans()) and (most_flights == 1 or depth > 1),
        pictures=draw(st.sampled_from(pictures)),
        has_tiers=returns or draw(st.booleans()),
        returns=returns,
        meets=meets,
        room=0 if returns else draw(st.sampled_from([0, 20])),
    )


@dataclass(slots=True)
class Arrival:
    """The pages that another replica may write to."""

    pages: list[int]
    state: list[int]
    num_landed: int  # tokens in pages that it has written for good


class Flight(NamedTuple):
    """A step as a device gets it: after this, only its result comes back."""

    batch: Batch
    token_ids: list[list[int]]  # of each part; below 0: the result of the step before, in that row
    pages: list[list[list[int]]]  # of each part and group of layers
    states: list[StatePair]


class AnyHistory(RuleBasedStateMachine):
    """Add, step and abort in any order, with shared prefixes and salts, on a pool small enough to preempt.

    The device knows only what is in its pages. It writes to them as late as it may: when its step ends.
    """

    modes = modes()

    @initialize(
        data=st.data(),
        pages=st.one_of(st.just(0), st.integers(10, 30)),  # 0: as few as the longest request needs
        budget=st.integers(12, 40),
        seqs=st.integers(1, 8),
        partial=st.sampled_from([(1, 1), (2, 1), (8, 2)]),
        rows=st.sampled_from([15, 24, 60]),
        encoder_cost=st.sampled_from(
            [None, EncoderCost(base=1e-3, per_embedding_token=5e-4), EncoderCost(per_embedding_token=0.02)]
        ),
        config=st.fixed_dictionaries(
            {
                "long_prefill_token_threshold": st.sampled_from([0, 4, 9]),
                "caching": st.booleans(),
                "enable_chunked_prefill": st.booleans(),
                "mixed_chunks": st.booleans(),
                "chunk_policy": st.sampled_from(["adaptive", "fixed"]),
                "prefill_order": st.sampled_from(["shortest_remaining", "fcfs"]),
                "short_lane_share": st.sampled_from([0.0, 0.5, 0.9]),
                "admission": st.sampled_from(["queue", "reject"]),
            }
        ),
    )
    def start(
        self,
        data: st.DataObject,
        pages: int,
        budget: int,
        seqs: int,
        partial: tuple[int, int],
        rows: int,
        encoder_cost: EncoderCost | None,
        config: dict[str, Any],
    ) -> None:
        self.mode = mode = data.draw(self.modes)
        pages = 0 if mode.returns else pages
        if mode.meets:
            config |= {"chunk_policy": "adaptive", "enable_chunked_prefill": True}
        budget = budget if config["enable_chunked_prefill"] else max(budget, LONGEST)
        self.needs = PageNeeds(4, mode.windows, budget, mode.state_pages)
        self.embeddings = Device(15 + budget if mode.pictures == "whole" else rows)
        encoding = Encoding(self.embeddings.capacity, encoder_cost, keeps_items_whole=mode.pictures == "whole")
        self.device = PagedDevice(4, mode.windows)
        load_s = data.draw(st.sampled_from([2e-3, 4e-3, 1e-2])) if mode.meets else 1e-4
        self.tier = PagedTier(self.device, TierPages([PageTier("host", store_s=1e-4, load_s=load_s)]))
        self.scheduler = new_scheduler(
            tiers=self.tier.tiers if mode.has_tiers else None,
            on_evict=self.tier.evicted if mode.has_tiers else None,
            events=PageEvents(4),
            num_pages=max(pages, self.needs.at_most(LONGEST)) + mode.room,
            windows=mode.windows,
            state_pages=mode.state_pages,
            max_model_len=LONGEST,
            cost=COST if config["chunk_policy"] == "adaptive" else None,
            max_num_batched_tokens=budget,
            max_num_seqs=min(seqs, budget - 4),
            max_num_partial_prefills=partial[0],
            max_long_partial_prefills=partial[1],
            starvation_s=0.5,
            slo_classes=CLASSES,
            depth=mode.depth,
            drafting=DraftPolicy(DRAFTS) if mode.has_drafts else None,
            encoding=encoding if mode.pictures else None,
            **config | {"caching": config["caching"] or mode.room > 0 or mode.returns},
        )
        self.handoff = self.scheduler.handoff
        self.pages = self.scheduler.pages
        self.reader = PageReader(4)
        self.now = 0.0
        self.live: dict[str, Request] = {}
        self.being_read: set[str] = set()  # owners whose pages are being sent
        self.count = 0
        self.loads: list[PrefixLoad] = []
        self.num_loaded = 0  # pages
        self.num_met = 0  # tails
        self.in_hand: dict[str, int] = {}  # by owner: the entry of a load that the tier is filling
        self.sent: dict[str, list[int]] = {}  # tokens whose state is being sent, by owner
        self.arriving: dict[str, Arrival] = {}  # by owner
        self.awaited: list[AwaitedPrefix] = []
        self.left: list[AwaitedPrefix] = []  # prefixes that have ended while somebody may still write to their pages
        self.flights: list[Flight] = []
        self.found: list[int] = []  # tokens sampled by the last step that ended
        self.late_rows: set[int] = set()  # of the next step that ends: the step behind it begins with wrong tokens
        self.ended: list[list[int]] = []  # the tokens of requests that have ended by themselves
        self.late: set[str] = set()  # requests whose part of the step in flight began with a wrong token

    def items_of(self, prompt: Sequence[int]) -> list[Item]:
        """Return the pictures in a prompt. They end anywhere, and prompts share prefixes that end inside of them."""
        spans = ITEMS[prompt[-1] % len(ITEMS)] if self.mode.pictures else []
        return [item(start, length, start) for start, length in spans if start + length <= len(prompt)]

    @rule(
        prefix=st.sampled_from([[], [1] * 8, [1] * 8 + [2] * 8, [3] * 20]),
        tail=st.one_of(st.sampled_from([[5] * 4, [6] * 8]), st.lists(st.integers(1, 49), min_size=1, max_size=19)),
        max_tokens=st.integers(0, 25),
        salt=st.sampled_from(["", "tenant"]),
        ignore_eos=st.booleans(),
        slo_class=st.sampled_from(["interactive", "standard", "batch"]),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from(["", "", "a", "b"]),
        leg=st.sampled_from([Leg.LOCAL, Leg.LOCAL, Leg.SEND, Leg.RECEIVE]),
        is_offered=st.booleans(),
        others=st.sampled_from([0, 0, 1, 4]),
    )
    def add(
        self,
        prefix: list[int],
        tail: list[int],
        max_tokens: int,
        salt: str,
        ignore_eos: bool,
        slo_class: str,
        priority: int,
        tenant: str,
        leg: Leg,
        is_offered: bool,
        others: int,
    ) -> None:
        leg = Leg.LOCAL if self.pages.has_windows else leg
        if self.mode.returns:
            prefix, tail = RETURNING[len(prefix) % len(RETURNING)], tail[:3]
        params = SamplingParams(max_tokens=max(max_tokens, leg is not Leg.LOCAL), ignore_eos=ignore_eos)
        for number in range(1 + others):  # alike but for their last token
            prompt = [*prefix, *tail[:-1], (tail[-1] + number) % 50][:39]
            submission = Submission(
                f"r{self.count}",
                prompt,
                params,
                salt,
                slo_class,
                priority_in_class=priority if self.scheduler.config.prefill_order == "shortest_remaining" else 0,
                tenant=tenant,
                leg=leg,
                epoch=int(leg is not Leg.LOCAL),
                items=self.items_of(prompt),
            )
            self.submit(Request(submission, self.now), is_offered)

    def submit(self, new: Request, is_offered: bool) -> None:
        self.count += 1
        try:
            self.scheduler.add(new)
            self.live[new.id] = new
            if is_offered:
                self.handoff.offer(new.id)
        except InvalidField:
            assert new.items, "only a picture may be too long"
        except Overloaded:
            assert self.scheduler.config.admission == "reject"
            assert self.live, "an idle replica refuses no request"
            assert self.scheduler.table.get(new.id) is None

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), tail=st.lists(st.integers(1, 49), min_size=1, max_size=5), max_tokens=st.integers(1, 9))
    def follow_up(self, data: st.DataObject, tail: list[int], max_tokens: int) -> None:
        """The next turn of a conversation: it repeats the turn before and its answer, and both may go on."""
        tokens = data.draw(st.sampled_from(self.ended))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        leg = Leg.LOCAL if self.pages.has_windows else data.draw(st.sampled_from([Leg.LOCAL, Leg.RECEIVE]))
        prompt, name, moves = [*tokens[:34], *tail], f"r{self.count}", leg is not Leg.LOCAL
        new = Request(Submission(name, prompt, params, leg=leg, epoch=int(moves)), self.now)
        self.submit(new, is_offered=moves)
        self.one_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.live))))

    def leave(self, name: str) -> None:
        """End a request, unless the steps in flight do."""
        self.land_with(name)
        if name not in self.live:
            return
        request = self.live.pop(name)
        assert self.scheduler.abort(name) is request
        if request.leg is Leg.SEND:
            self.being_read.add(request.owner)
        else:
            assert not self.pages.pages_of(request.owner)

    @rule(data=st.data(), pages=st.integers(0, 10))
    def deliver(self, data: st.DataObject, pages: int) -> None:
        """A transfer of a request proceeds: more pages arrive, or all; or all have been read."""
        if not self.scheduler.table.held:
            return
        request = data.draw(st.sampled_from(sorted(self.scheduler.table.held, key=lambda request: request.id)))
        if request.leg is Leg.SEND:
            self.finish_sent(request)
        elif (end := request.num_computed_tokens + pages * self.pages.page_size) < request.num_tokens:
            start = request.num_computed_tokens
            self.device.write(self.pages.pages_of(request.owner), start, request.token_ids[start:end])
            self.handoff.commit(request.id, end)
            self.arriving[request.owner].num_landed = end
        else:
            start = request.num_computed_tokens
            self.device.write(self.pages.pages_of(request.owner), start, request.token_ids[start:])
            self.device.write_state(self.pages.states.newest(request.owner), request.token_ids)
            self.arriving.pop(request.owner, None)
            token = next_token(request.token_ids)
            is_full = request.num_tokens + 1 >= self.scheduler.table.max_model_len
            if token == EOS or request.sampling.max_tokens == 1 or is_full:  # the sender would have ended it
                self.scheduler.abort(request.id)
                del self.live[request.id]
            else:
                self.handoff.start_decoding(request.id, token, self.now)

    def finish_sent(self, request: Request) -> None:
        if self.pages.state_pages:
            prompt = request.token_ids[: request.num_prompt_tokens]
            assert self.device.read_state(self.pages.states.newest(request.owner)) == prompt
            self.sent[request.owner] = prompt
        self.handoff.finish_sent(request.id)
        self.being_read.add(request.owner)
        del self.live[request.id]

    @rule()
    def write_some_of_what_arrives(self) -> None:
        """Transfers have begun to write pages, also those of requests that have been aborted or taken over."""
        for each in self.arriving.values():
            self.device.spoil_states(each.state)
            first = -(-each.num_landed // self.pages.page_size) * self.pages.page_size
            self.device.write(each.pages, first, [EOS] * (len(each.pages) * self.pages.page_size - first))

    @rule(data=st.data(), num_pages=st.integers(1, 9), seconds=st.sampled_from([0.0, 0.02, 10.0]))
    def await_a_prefix(self, data: st.DataObject, num_pages: int, seconds: float) -> None:
        """Pages of a waiting prompt will come from elsewhere."""
        waiting = [each for each in self.scheduler.table.waiting if each.leg is not Leg.RECEIVE]
        if waiting:
            request = data.draw(st.sampled_from(sorted(waiting, key=lambda request: request.id)))
            num_pages = min(num_pages, (request.num_tokens - 1) // self.pages.page_size)
            prefix = self.scheduler.awaited.begin(request, num_pages, self.now + seconds)
            if prefix is not None:
                assert len(prefix.hashes) == num_pages > prefix.num_landed or prefix.state
                self.awaited.append(prefix)

    @precondition(lambda self: self.awaited)
    @rule(data=st.data(), pages=st.integers(0, 9), ends=st.booleans(), may_be_written=st.booleans())
    def fill_a_prefix(self, data: st.DataObject, pages: int, ends: bool, may_be_written: bool) -> None:
        """More pages from elsewhere land, and perhaps no further one will."""
        prefix = data.draw(st.sampled_from(sorted(self.awaited, key=lambda prefix: prefix.owner)))
        num_landed = min(prefix.num_landed + pages, len(prefix.hashes))
        size, tokens = self.pages.page_size, prefix.request.token_ids
        for number, _, page in prefix.empty:
            if prefix.num_landed <= number < num_landed:
                self.device.write([page] * (number + 1), number * size, tokens[number * size : (number + 1) * size])
        if num_landed == len(prefix.hashes) > prefix.num_landed:
            self.device.write_state(prefix.state, tokens[: num_landed * size])
        self.scheduler.awaited.land(prefix, num_landed)
        if ends:
            self.end_prefix(prefix, may_be_written)

    def end_prefix(self, prefix: AwaitedPrefix, may_be_written: bool) -> None:
        self.scheduler.awaited.end(prefix, may_be_written)
        self.awaited.remove(prefix)
        if may_be_written:
            self.left.append(prefix)

    @precondition(lambda self: self.awaited or self.left)
    @rule()
    def write_some_of_what_is_awaited(self) -> None:
        """Pages that have not landed may hold anything, also after the request has stopped to wait for them."""
        for prefix in [*self.awaited, *self.left]:
            if prefix.num_landed < len(prefix.hashes):
                self.device.spoil_states(prefix.state)
            for number, _, page in prefix.empty:
                if number >= prefix.num_landed:
                    self.device.write([page], 0, [EOS] * self.pages.page_size)

    @precondition(lambda self: self.flights)
    @rule()
    def fail_a_step(self) -> None:
        """The steps in flight have no update, and may have written to some of their pages."""
        for flight in self.flights:
            for _, written in flight.states:
                self.device.spoil_states(written)
        self.flights.clear()
        self.late.clear()
        self.scheduler.drop_steps_in_flight()
        self.embeddings.rows.clear()
        self.take_returned()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose_the_sender(self, data: st.DataObject) -> None:
        arriving = sorted(
            name for name, request in self.live.items() if request.leg is Leg.RECEIVE and request.num_output_tokens == 0
        )
        if arriving:
            self.handoff.take_over(data.draw(st.sampled_from(arriving)), self.now)

    @rule()
    def offer_all(self) -> None:
        for name in self.live:
            self.handoff.offer(name)

    @rule()
    def writers_and_readers_stop(self) -> None:
        for owner in self.being_read:
            if owner in self.sent:
                assert self.device.read_state(self.pages.states.newest(owner)) == self.sent.pop(owner)
            self.pages.release(owner)
        self.being_read.clear()
        for number in range(self.count):
            if f"r{number}" not in self.live or self.live[f"r{number}"].status is not Status.HELD:
                self.arriving.pop(f"r{number}#1", None)
        for number in range(self.count):
            self.pages.end_quarantine(f"r{number}#1")
        for prefix in self.left:
            self.pages.end_quarantine(prefix.owner)
        self.left.clear()

    @rule(
        steps=st.integers(1, 6),
        late_rows=st.sets(st.integers(0, 5), max_size=2),
        loaded=st.sampled_from([None, 9, 9, 9, 2]),
    )
    def run_steps(self, steps: int, late_rows: set[int], loaded: int | None) -> None:
        self.late_rows = late_rows if self.mode.depth == 1 else set()  # with stages no step begins with unknown tokens
        for _ in range(steps):
            if self.loads and loaded is not None:
                self.end_a_load(loaded)
            self.one_step()

    def end_a_load(self, pages: int) -> None:
        """A tier fills so many further pages of a prompt. Then it loses the next one, or takes it in hand for later."""
        load = self.loads.pop(0)
        number = self.in_hand.pop(load.prefix.owner, None)
        if number is None:
            number = load.take()
        for _ in range(pages if load.tail is None else min(pages, 3)):
            if number is None:
                break
            each = load.pages[number]
            self.tier.fill(each.key, each.pages)
            self.num_loaded += len(each.pages)
            load.land()
            number = load.take()
        if number is not None and pages != 2:
            self.in_hand[load.prefix.owner] = number
            self.loads.insert(0, load)
            return
        if number is not None:
            load.pages[number].tier.lost(load.pages[number].key)
        self.scheduler.loading.end(load)
        self.num_met += load.tail is not None and 0 < load.landed_from < load.tail.num_pages

    def begun_from(self, tail: ArrivingTail) -> int:
        """Return the first page of a tail that is being filled, or has landed."""
        if tail.landed_from is not None:
            return tail.landed_from
        (load,) = [each for each in self.loads if each.tail is tail]
        number = self.in_hand.get(tail.owner)
        return load.landed_from if number is None else load.pages[number].number

    def one_step(self) -> None:
        self.grant()  # as the engine's thread does: an abort before this step may have freed pages
        while len(self.flights) < self.mode.most_flights and self.begin():
            pass
        if self.flights:
            self.land()
        self.grant()

    def grant(self) -> None:
        for request in self.handoff.grant(self.now):
            owner, computed = request.owner, request.num_computed_tokens
            self.arriving[owner] = Arrival([*self.pages.pages_of(owner)], [*self.pages.states.newest(owner)], computed)
        self.take_returned()

    def take_returned(self) -> None:
        """Requests that made way have a transfer, which is cancelled: their pages come back later."""
        for request in self.scheduler.table.take_returned():
            assert self.live.pop(request.id) is request
            assert not request.num_in_flight_tokens
            if request.leg is Leg.SEND:
                self.being_read.add(request.owner)

    def begin(self) -> bool:
        if not self.flights:
            batch = begin_step(self.scheduler, self.now)
            self.take_returned()
            assert len(self.scheduler.table.running) <= self.scheduler.config.max_num_seqs
            waits = self.scheduler.table.held or self.being_read or self.scheduler.table.awaited
            if batch or not (waits or self.pages.counts().quarantined):
                assert bool(batch) == self.scheduler.table.has_work, "there is work, so a step must do some"
            return self.launch(batch)
        if self.mode.depth > 1:
            return self.launch(begin_step(self.scheduler, self.now))
        if self.scheduler.table.needs_preemption or self.late:
            return False
        before = self.flights[-1].batch
        state = self.state_of(before)
        with assume_ended(self.scheduler.table, before, self.now + COST.seconds(before.work)):
            is_launched = self.launch(self.scheduler.schedule(self.now))
        assert self.state_of(before) == state, "the assumption leaves no trace"
        return is_launched

    def state_of(self, batch: Batch) -> list[tuple[list[int], int, float]]:
        requests = [part.request for part in batch.scheduled]
        return [(list(each.token_ids), each.num_computed_tokens, each.due) for each in requests]

    def launch(self, batch: Batch) -> bool:
        self.take_returned()
        self.loads += self.scheduler.loading.take_begun()
        check_step(self.scheduler, batch, self.now)
        computed = [part.request for part in batch.scheduled]
        assert not [each for each in computed if each.coming.until > self.now], "pages are computed and loaded"
        for part in batch.scheduled:
            tail, size = part.request.coming.tail, self.pages.page_size
            if tail is not None and part.start < tail.num_pages * size:
                assert part.start + part.num_tokens <= self.begun_from(tail) * size, "pages are computed and loaded"
        self.embeddings.run(batch)
        if batch and self.scheduler.encoding is not None:
            num_embedding_tokens = self.scheduler.encoding.num_embedding_tokens
            assert sum(self.embeddings.rows.values()) == num_embedding_tokens
            assert num_embedding_tokens <= self.embeddings.capacity + self.scheduler.config.max_num_seqs * MOST_ROWS
        if batch:
            ids = [
                [*part.request.token_ids[part.start : part.start + part.num_tokens], *part.drafts]
                for part in batch.scheduled
            ]
            pages = [[list(group) for group in (part.pages, *part.further_pages)] for part in batch.scheduled]
            states = [(list(part.state.read), list(part.state.write)) for part in batch.scheduled]
            check_no_part_reads_what_another_writes(states, self.pages.state_pages)
            self.flights.append(Flight(batch, ids, pages, states))
        return bool(batch)

    def land(self) -> None:
        """The oldest step in flight ends: it writes its pages, reads its contexts, and samples."""
        batch, token_ids, pages, states = self.flights.pop(0)
        self.now += COST.seconds(batch.work)
        known = [[self.found[~token] if token < 0 else token for token in ids] for ids in token_ids]
        for part, ids, written in zip(batch.scheduled, known, pages, strict=True):
            for group in written:
                self.device.write(group, part.start, ids)
        if self.pages.state_pages:
            self.device.advance_states(batch.scheduled, known, states)
        reads = [self.device.read(owned, part) for part, owned in zip(batch.scheduled, pages, strict=True)]
        sampling = [(part, read) for part, read in zip(batch.scheduled, reads, strict=True) if part.samples]
        names = [part.request.id for part, _ in sampling]
        results = [sampled_by(part, read) for part, read in sampling]
        self.found = [result.token_id for result in results]
        sampled = {name: result for name, result in zip(names, results, strict=True) if name not in self.late}
        self.found = [EOS if row in self.late_rows else token for row, token in enumerate(self.found)]
        self.late = {name for row, name in enumerate(names) if self.flights and row in self.late_rows}
        self.late_rows = set()
        for delta in self.scheduler.update(batch, sampled, self.now):
            if delta.finish_reason is not None:
                done = self.live.pop(delta.request_id)
                self.ended.append(done.token_ids)
                if done.leg is Leg.SEND:
                    self.being_read.add(done.owner)
                expected = reference_output(done.submission.prompt_token_ids, done.sampling, LONGEST)
                assert done.token_ids[done.num_prompt_tokens :] == expected

    def land_with(self, name: str) -> None:
        """All steps end if one of them computes a request to which something is about to happen."""
        if any(part.request.id == name for flight in self.flights for part in flight.batch.scheduled):
            while self.flights:
                self.land()

    @invariant()
    def pages_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        counts = self.pages.counts()
        assert counts.free + counts.owned + counts.cached + counts.quarantined == counts.total
        owners = {each.owner for each in [*self.scheduler.table.running, *self.scheduler.table.held]} | self.being_read
        owners |= {part.request.owner for flight in self.flights for part in flight.batch.scheduled}
        owners |= set(self.scheduler.table.awaited)
        assert counts.owned == self.pages.num_freed_by(list(owners))
        most = self.needs.at_once(LONGEST) + (1 + self.mode.most_flights) * self.pages.state_pages  # with snapshots
        for owner in owners:
            assert self.pages.num_held_by(owner) <= most, "windows hold what a chunk needs at most"
        for each in self.scheduler.table.waiting:
            assert not self.pages.num_held_by(each.owner)
            assert each.num_computed_tokens == 0
        for each in self.live.values():
            assert each.status in (Status.WAITING, Status.RUNNING, Status.HELD)
        assert all(each.leg is not Leg.LOCAL for each in self.scheduler.table.held)

    @invariant()
    def events_of_pages_tell_what_is_cached(self) -> None:
        if hasattr(self, "scheduler") and (events := self.pages.prefixes.events) is not None:
            self.reader.read(events.take())
            assert self.reader.hashes == set(self.pages.prefixes.findable())
            for tier in self.scheduler.loading.tiers.tiers:
                assert self.reader.in_tiers[tier.name] == {key.page_hash for key in tier.pages if not key.group}

    @invariant()
    def steps_in_flight_write_to_pages_of_their_own(self) -> None:
        for flight in self.flights if hasattr(self, "flights") else ():
            for part, groups in zip(flight.batch.scheduled, flight.pages, strict=True):
                written = slice(part.start // self.pages.page_size, None)
                for group, pages in enumerate(groups):
                    owned = [*self.pages.pages_of(part.request.owner, group)]
                    assert pages[written] == owned[written][: len(pages[written])], "a page was given to another"

    @invariant()
    def every_request_is_listed_once_by_status(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        listed = {
            Status.WAITING: self.scheduler.table.waiting,
            Status.RUNNING: self.scheduler.table.running,
            Status.HELD: self.scheduler.table.held,
        }
        assert all(each.status is status for status, requests in listed.items() for each in requests)
        names = [each.id for requests in listed.values() for each in requests]
        assert sorted(names) == sorted(self.live) == sorted(each.id for each in self.scheduler.table.requests())

    def end_arrivals(self) -> None:
        for prefix in [*self.awaited]:
            self.end_prefix(prefix, may_be_written=False)
        while self.loads:
            self.end_a_load(9)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        limit = 2_000
        while self.live:
            self.one_step()
            self.writers_and_readers_stop()
            self.end_arrivals()
            for name, each in list(self.live.items()):
                if each.status is Status.HELD and each.leg is Leg.SEND:
                    self.finish_sent(each)
                elif each.leg is Leg.RECEIVE and each.num_output_tokens == 0:
                    self.handoff.take_over(name, self.now)
            limit -= 1
            assert limit, "not everything ends"
        while self.flights:
            self.land()
        self.end_arrivals()
        self.writers_and_readers_stop()
        assert self.pages.counts().owned == self.pages.counts().quarantined == 0
        assert not self.scheduler.table.has_work
