"""Any history: requests arrive, step, move between replicas and end in any order, and the invariants hold."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.batch import Batch, Scheduled
from crossdock.workers.schedule.drafts.drafting import DraftPolicy
from crossdock.workers.schedule.drafts.speculative_config import SpeculativeConfig
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.pictures.items import Item
from crossdock.workers.schedule.request import InvalidField, Leg, Overloaded, Request, SamplingParams, Status
from tests.workers.schedule.model_free_replica import (
    CLASSES,
    COST,
    EOS,
    first_seen,
    guesses,
    new_scheduler,
    next_token,
    reference_output,
    sampled_by,
)


class Flight(NamedTuple):
    """A step as a device gets it: after this, only its result comes back."""

    batch: Batch
    token_ids: list[list[int]]  # of each part; below 0: the result of the step before, in that row
    pages: list[list[list[int]]]  # of each part and group of layers
    states: list[tuple[list[int], list[int]]]  # that each part reads and writes


class AnyHistory(RuleBasedStateMachine):
    """Add, step and abort in any order, with shared prefixes and salts, on a pool small enough to preempt.

    The device knows only what is in its pages. It writes to them as late as it may: when its step ends.
    """

    most_flights = 1
    depth = 1  # of the scheduler
    group_windows: Sequence[tuple[Window, ...]] = ((None,),)  # of the groups of layers of each model to choose from
    drafting: SpeculativeConfig | None = None  # what steps verify; None: no drafts
    state_pages: Sequence[int] = (0,)  # of a request's recurrent state, of each model
    room = 0  # further pages in the pool: with them, prefixes stay cached for long

    @initialize(
        pages=st.integers(10, 30),
        budget=st.integers(12, 40),
        seqs=st.integers(1, 8),
        threshold=st.sampled_from([0, 4, 9]),
        caching=st.booleans(),
        chunked=st.booleans(),
        mixed=st.booleans(),
        policy=st.sampled_from(["adaptive", "fixed"]),
        order=st.sampled_from(["response_ratio", "fcfs"]),
        partial=st.sampled_from([(1, 1), (2, 1), (8, 2)]),
        lane=st.sampled_from([0.0, 0.5, 0.9]),
        admission=st.sampled_from(["queue", "reject"]),
        model=st.integers(0, 6),
    )
    def start(
        self,
        pages: int,
        budget: int,
        seqs: int,
        threshold: int,
        caching: bool,
        chunked: bool,
        mixed: bool,
        policy: str,
        order: str,
        partial: tuple[int, int],
        lane: float,
        admission: str,
        model: int,
    ) -> None:
        budget = budget if chunked else max(budget, 40)
        self.windows = self.group_windows[model % len(self.group_windows)]
        state_pages = self.state_pages[model % len(self.state_pages)]
        self.needs = PageNeeds(4, self.windows, budget, state_pages)
        self.scheduler = new_scheduler(
            num_pages=max(pages, self.needs.at_most(40)) + self.room,
            windows=self.windows,
            state_pages=state_pages,
            max_model_len=40,
            caching=caching or self.room > 0,
            cost=COST if policy == "adaptive" else None,
            max_num_batched_tokens=budget,
            max_num_seqs=min(seqs, budget - 4),
            long_prefill_token_threshold=threshold,
            enable_chunked_prefill=chunked,
            mixed_chunks=mixed,
            chunk_policy=policy,
            prefill_order=order,
            max_num_partial_prefills=partial[0],
            max_long_partial_prefills=partial[1],
            short_lane_share=lane,
            admission=admission,
            starvation_s=0.5,
            slo_classes=CLASSES,
            depth=self.depth,
            drafting=None if self.drafting is None else DraftPolicy(self.drafting),
            encoding=self.new_encoding(budget),
        )
        self.pages = self.scheduler.pages
        self.now = 0.0
        self.live: dict[str, Request] = {}
        self.being_read: set[str] = set()  # owners whose pages are being sent
        self.count = 0
        self.memory: dict[tuple[int, int], int] = {}  # token by page and position in it
        self.remembered: dict[int, tuple[int, list[int]]] = {}  # by page of a state: its place and the tokens so far
        self.sent: dict[str, list[int]] = {}  # tokens whose state is being sent, by owner
        self.arriving: dict[str, list[int]] = {}  # pages of the state that another replica may write to, by owner
        self.flights: list[Flight] = []
        self.found: list[int] = []  # tokens sampled by the last step that ended
        self.late_rows: set[int] = set()  # of the next step that ends: the step behind it begins with wrong tokens
        self.ended: list[list[int]] = []  # the tokens of requests that have ended by themselves
        self.late: set[str] = set()  # requests whose part of the step in flight began with a wrong token

    def new_encoding(self, budget: int) -> Encoding | None:
        """Return the cache of embeddings; None: no prompt has pictures."""

    def items_of(self, prompt: Sequence[int]) -> Sequence[Item]:
        """Return the pictures in a prompt."""
        return ()

    @rule(
        prefix=st.sampled_from([[], [1] * 8, [1] * 8 + [2] * 8, [3] * 20]),
        tail=st.lists(st.integers(1, 49), min_size=1, max_size=19),
        max_tokens=st.integers(0, 25),
        salt=st.sampled_from(["", "tenant"]),
        ignore_eos=st.booleans(),
        slo_class=st.sampled_from(["interactive", "standard", "batch"]),
        priority=st.integers(-1, 1),
        leg=st.sampled_from([Leg.LOCAL, Leg.LOCAL, Leg.SEND, Leg.RECEIVE]),
        is_offered=st.booleans(),
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
        leg: Leg,
        is_offered: bool,
    ) -> None:
        leg = Leg.LOCAL if self.pages.has_windows else leg
        params = SamplingParams(max_tokens=max(max_tokens, leg is not Leg.LOCAL), ignore_eos=ignore_eos)
        name, prompt = f"r{self.count}", (prefix + tail)[:39]
        epoch = int(leg is not Leg.LOCAL)
        new = Request(name, prompt, params, salt, slo_class, leg=leg, epoch=epoch, arrival_time=self.now)
        new.items = self.items_of(prompt)
        if self.scheduler.config.prefill_order == "response_ratio":
            new.priority_in_class = priority
        self.count += 1
        try:
            self.scheduler.add(new)
            self.live[new.id] = new
            if is_offered:
                self.scheduler.handoff.offer(new.id)
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
        new = Request(name, prompt, params, leg=leg, epoch=int(moves), is_offered=moves, arrival_time=self.now)
        self.count += 1
        with suppress(Overloaded):
            self.scheduler.add(new)
            self.live[new.id] = new
        self.one_step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
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
            self.write(self.pages.pages_of(request.owner), start, request.token_ids[start:end])
            self.scheduler.handoff.commit(request.id, end)
        else:
            start = request.num_computed_tokens
            self.write(self.pages.pages_of(request.owner), start, request.token_ids[start:])
            self.write_state(self.pages.state_of(request.owner), request.token_ids)
            self.arriving.pop(request.owner, None)
            token = next_token(request.token_ids)
            is_full = request.num_tokens + 1 >= self.scheduler.max_model_len
            if token == EOS or request.sampling.max_tokens == 1 or is_full:  # the sender would have ended it
                self.scheduler.abort(request.id)
                del self.live[request.id]
            else:
                self.scheduler.handoff.start_decoding(request.id, token, self.now)

    def finish_sent(self, request: Request) -> None:
        if self.pages.state_pages:
            assert self.read_state(self.pages.state_of(request.owner)) == request.prompt_token_ids
            self.sent[request.owner] = request.prompt_token_ids
        self.scheduler.handoff.finish_sent(request.id)
        self.being_read.add(request.owner)
        del self.live[request.id]

    @rule()
    def write_some_of_the_states(self) -> None:
        """Transfers have begun to write states, also those of requests that have been aborted or taken over."""
        for pages in self.arriving.values():
            for page in pages:
                self.remembered[page] = (-1, [])

    @precondition(lambda self: self.flights)
    @rule()
    def fail_a_step(self) -> None:
        """The steps in flight have no update, and may have written to some of their pages."""
        for flight in self.flights:
            for _, written in flight.states:
                self.remembered.update(dict.fromkeys(written, (-1, [])))
        self.flights.clear()
        self.late.clear()
        self.scheduler.drop_steps_in_flight()
        self.forget_embeddings()
        self.take_returned()

    def forget_embeddings(self) -> None:
        """Do what the device does after a step has failed."""

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose_the_sender(self, data: st.DataObject) -> None:
        arriving = sorted(
            name for name, request in self.live.items() if request.leg is Leg.RECEIVE and request.num_output_tokens == 0
        )
        if arriving:
            self.scheduler.handoff.take_over(data.draw(st.sampled_from(arriving)), self.now)

    @rule()
    def offer_all(self) -> None:
        for name in self.live:
            self.scheduler.handoff.offer(name)

    @rule()
    def writers_and_readers_stop(self) -> None:
        for owner in self.being_read:
            if owner in self.sent:
                assert self.read_state(self.pages.state_of(owner)) == self.sent.pop(owner)
            self.pages.release(owner)
        self.being_read.clear()
        for number in range(self.count):
            if f"r{number}" not in self.live or self.live[f"r{number}"].status is not Status.HELD:
                self.arriving.pop(f"r{number}#1", None)
        for number in range(self.count):
            self.pages.end_quarantine(f"r{number}#1")

    @rule(steps=st.integers(1, 6), late_rows=st.sets(st.integers(0, 5), max_size=2))
    def run_steps(self, steps: int, late_rows: set[int]) -> None:
        self.late_rows = late_rows if self.depth == 1 else set()  # with stages no step begins with unknown tokens
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        self.grant()  # as the engine's thread does: an abort before this step may have freed pages
        while len(self.flights) < self.most_flights and self.begin():
            pass
        if self.flights:
            self.land()
        self.grant()

    def grant(self) -> None:
        for request in self.scheduler.handoff.grant(self.now):
            self.arriving[request.owner] = list(self.pages.state_of(request.owner))
        self.take_returned()

    def take_returned(self) -> None:
        """Requests that made way have a transfer, which is cancelled: their pages come back later."""
        for request in self.scheduler.table.take_returned():
            assert self.live.pop(request.id) is request
            assert not request.num_in_flight_tokens
            if request.leg is Leg.SEND:
                self.being_read.add(request.owner)

    def schedule(self) -> Batch:
        streams = self.scheduler.choose_streams(self.now)
        for name, most in streams.wanted_drafts.items():
            request = self.live[name]
            assert 0 < most < request.sampling.max_tokens - request.num_output_tokens
            assert request.num_tokens + most < 40
        return self.scheduler.schedule(self.now, guesses(self.scheduler, streams.wanted_drafts), streams)

    def begin(self) -> bool:
        if not self.flights:
            batch = self.schedule()
            self.take_returned()
            assert len(self.scheduler.table.running) <= self.scheduler.config.max_num_seqs
            if batch or not (self.scheduler.table.held or self.being_read or self.pages.counts().quarantined):
                assert bool(batch) == self.scheduler.table.has_work, "there is work, so a step must do some"
            return self.launch(batch)
        if self.depth > 1:
            return self.launch(self.schedule())
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
        config, size = self.scheduler.config, self.pages.page_size
        assert batch.num_tokens <= config.max_num_batched_tokens
        assert len(batch.scheduled) <= config.max_num_seqs
        names = [part.request.id for part in batch.scheduled]
        assert len(names) == len(set(names))
        held_to_arrive = [each for each in self.scheduler.table.held if each.leg is Leg.RECEIVE]
        num_computed_here = len(self.scheduler.table.running) + len(self.scheduler.table.waiting) + len(held_to_arrive)
        for number, part in enumerate(batch.scheduled):
            each, end = part.request, part.start + part.num_tokens
            assert part.start == each.num_scheduled_tokens - part.num_tokens >= each.num_computed_tokens
            known = end - len(part.drafts)
            is_decode = number < batch.num_decodes
            assert is_decode or not each.num_verified_tokens
            assert part.samples == (known == each.num_tokens and each.sampling.max_tokens > 0)
            assert self.pages.has_windows or len(part.pages) * size >= each.num_tokens
            assert all(len(pages) * size >= end for pages in (part.pages, *part.further_pages))
            self.check_end(part, known)
            if is_decode:  # a partially prefilled request is never decodable
                assert each.num_output_tokens > 0
                assert part.num_tokens == each.num_verified_tokens + 1 + len(part.drafts)
                assert not part.drafts or not self.pages.state_pages or part.state.read is not part.state.write
                assert part.samples
                assert each.num_output_tokens < each.sampling.max_tokens, "it is known to have ended"
                assert each.num_tokens < 40
            assert part.reason
            threshold = config.long_prefill_token_threshold
            is_bounded = threshold and config.enable_chunked_prefill and num_computed_here > 1
            assert is_decode or not is_bounded or part.num_tokens <= self.longest_chunk(part, threshold)
        if not config.mixed_chunks:
            assert batch.num_decodes in (0, len(batch.scheduled)), "chunks and decodes take turns"
        if batch:
            ids = [
                [*part.request.token_ids[part.start : part.start + part.num_tokens], *part.drafts]
                for part in batch.scheduled
            ]
            self.check_no_stream_is_late_for_drafts(batch)
            are_longer = [part.num_tokens > 1 for part in batch.scheduled[: batch.num_decodes]]
            assert are_longer == sorted(are_longer), "decodes of one token come first"
            pages = [[list(group) for group in (part.pages, *part.further_pages)] for part in batch.scheduled]
            states = [(list(part.state.read), list(part.state.write)) for part in batch.scheduled]
            self.check_no_part_reads_what_another_writes(states)
            self.flights.append(Flight(batch, ids, pages, states))
        return bool(batch)

    def check_end(self, part: Scheduled, end: int) -> None:
        """Check that a part may end where its drafts begin."""
        assert end == part.request.num_tokens or end % self.pages.page_size == 0

    def longest_chunk(self, part: Scheduled, threshold: int) -> int:
        """Return the tokens of the longest chunk that a threshold allows there."""
        return threshold

    def check_no_part_reads_what_another_writes(self, states: Sequence[tuple[list[int], list[int]]]) -> None:
        written = [page for _, pages in states for page in pages]
        assert len(written) == len(set(written)) == len(states) * self.pages.state_pages
        for read, own in states:
            assert len(read) in (0, self.pages.state_pages)
            assert not set(read) & (set(written) - set(own))

    def check_no_stream_is_late_for_drafts(self, batch: Batch) -> None:
        if self.scheduler.forecast.cost is None or not batch.num_drafts:
            return
        plain = [part._replace(num_tokens=part.num_tokens - len(part.drafts), drafts=()) for part in batch.scheduled]
        decodes = sorted(plain[: batch.num_decodes], key=lambda part: part.num_tokens)
        without = Batch([*decodes, *plain[batch.num_decodes :]], batch.num_decodes)
        for stream in self.scheduler.table.running:
            if stream.is_decoding and self.now + COST.seconds(without.work) <= stream.due:
                assert self.now + COST.seconds(batch.work) <= stream.due

    def land(self) -> None:
        """The oldest step in flight ends: it writes its pages, reads its contexts, and samples."""
        batch, token_ids, pages, states = self.flights.pop(0)
        self.now += COST.seconds(batch.work)
        for part, ids, written in zip(batch.scheduled, token_ids, pages, strict=True):
            known = [self.found[~token] if token < 0 else token for token in ids]
            for group in written:
                self.write(group, part.start, known)
        if self.pages.state_pages:
            self.advance_states(batch, token_ids, states)
        reads = [self.read(owned, part) for part, owned in zip(batch.scheduled, pages, strict=True)]
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
                expected = reference_output(done.prompt_token_ids, done.sampling, 40)
                assert done.token_ids[done.num_prompt_tokens :] == expected

    def advance_states(
        self, batch: Batch, token_ids: Sequence[list[int]], states: Sequence[tuple[list[int], list[int]]]
    ) -> None:
        """Every part reads the state of exactly the tokens before it; then all write the states after it."""
        before = [self.read_state(read) for read, _ in states]
        for part, tokens in zip(batch.scheduled, before, strict=True):
            assert tokens == part.request.token_ids[: part.start]
        for tokens, ids, (_, written) in zip(before, token_ids, states, strict=True):
            self.write_state(written, tokens + [self.found[~token] if token < 0 else token for token in ids])

    def read_state(self, pages: Sequence[int]) -> list[int]:
        """Return the tokens whose state these pages hold."""
        if not pages:
            return []
        parts = [self.remembered[page] for page in pages]
        assert [place for place, _ in parts] == list(range(len(pages)))
        assert all(tokens == parts[0][1] for _, tokens in parts)
        return parts[0][1]

    def write_state(self, pages: Sequence[int], tokens: list[int]) -> None:
        for place, page in enumerate(pages):
            self.remembered[page] = (place, list(tokens))
            for at in range(self.pages.page_size):
                self.memory.pop((page, at), None)

    def land_with(self, name: str) -> None:
        """All steps end if one of them computes a request to which something is about to happen."""
        if any(part.request.id == name for flight in self.flights for part in flight.batch.scheduled):
            while self.flights:
                self.land()

    def write(self, pages: Sequence[int], start: int, token_ids: Sequence[int]) -> None:
        for at, token in enumerate(token_ids, start):
            self.memory[pages[at // self.pages.page_size], at % self.pages.page_size] = token
            self.remembered.pop(pages[at // self.pages.page_size], None)

    def read(self, pages: Sequence[Sequence[int]], part: Scheduled) -> list[int]:
        """Return the tokens up to the end of a part, all of those that each group sees read from its pages."""
        size, end, tokens = self.pages.page_size, part.start + part.num_tokens, part.request.token_ids[: part.start]
        for owned, window in zip(pages, self.windows, strict=True):
            first = first_seen(window, part.start)
            seen = [self.memory[owned[at // size], at % size] for at in range(first, end)]
            assert seen == tokens[first:] or len(tokens) == part.start, "groups of layers have unlike tokens"
            tokens[first:] = seen
        return tokens

    @invariant()
    def pages_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        counts = self.pages.counts()
        assert counts.free + counts.owned + counts.cached + counts.quarantined == counts.total
        owners = {each.owner for each in [*self.scheduler.table.running, *self.scheduler.table.held]} | self.being_read
        owners |= {part.request.owner for flight in self.flights for part in flight.batch.scheduled}
        assert counts.owned == self.pages.num_freed_by(list(owners))
        most = self.needs.at_once(40) + (1 + self.most_flights) * self.pages.state_pages  # with checkpoints
        for owner in owners:
            assert self.pages.num_held_by(owner) <= most, "windows hold what a chunk needs at most"
        for each in self.scheduler.table.waiting:
            assert not self.pages.num_held_by(each.owner)
            assert each.num_computed_tokens == 0
        for each in self.live.values():
            assert each.status in (Status.WAITING, Status.RUNNING, Status.HELD)
        assert all(each.leg is not Leg.LOCAL for each in self.scheduler.table.held)

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

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        limit = 10_000
        while self.live:
            self.one_step()
            self.writers_and_readers_stop()
            for name, each in list(self.live.items()):
                if each.status is Status.HELD and each.leg is Leg.SEND:
                    self.finish_sent(each)
                elif each.leg is Leg.RECEIVE and each.num_output_tokens == 0:
                    self.scheduler.handoff.take_over(name, self.now)
            limit -= 1
            assert limit, "not everything ends"
        while self.flights:
            self.land()
        self.writers_and_readers_stop()
        assert self.pages.counts().owned == self.pages.counts().quarantined == 0
        assert not self.scheduler.table.has_work


class AnyHistoryAhead(AnyHistory):
    """The same with each step begun before the tokens of the previous one are known."""

    most_flights = 2


class AnyHistoryInStages(AnyHistory):
    """The same with pipeline stages: a step begins before the previous ones have ended, with other streams."""

    most_flights = depth = 3


class AnyHistoryWithWindows(AnyHistory):
    """The same with layers that see the last tokens alone, whose pages go while a request runs."""

    group_windows = (
        *((5,), (None, 6), (None, 1, 9), (None, None, 4, 4)),
        *((AttentionChunk(10),), (None, AttentionChunk(8)), (None, AttentionChunk(1), 5, AttentionChunk(6))),
    )


class AnyHistoryWithWindowsAhead(AnyHistoryWithWindows):
    """Windows, with each step begun before the tokens of the previous one are known."""

    most_flights = 2


class AnyHistoryWithWindowsInStages(AnyHistoryWithWindows):
    """Windows, with several steps of different streams in flight."""

    most_flights = depth = 3


class AnyHistoryWithDrafts(AnyHistory):
    """The same with drafts, of which some are right."""

    drafting = SpeculativeConfig(method="ngram", num_speculative_tokens=6)


class AnyHistoryWithDraftsInStages(AnyHistoryWithDrafts):
    """Drafts and pipeline stages."""

    most_flights = depth = 3


class AnyHistoryWithWindowsAndDrafts(AnyHistoryWithDrafts):
    """Drafts, and layers whose pages go while a request runs."""

    group_windows = AnyHistoryWithWindows.group_windows


class AnyHistoryWithStates(AnyHistory):
    """The same with recurrent layers: each part of a step reads the state of exactly the tokens before it."""

    state_pages = (1, 2, 3)
    room = 20


class AnyHistoryWithStatesAhead(AnyHistoryWithStates):
    """Recurrent layers, with each step begun before the tokens of the previous one are known."""

    most_flights = 2


class AnyHistoryWithStatesInStages(AnyHistoryWithStates):
    """Recurrent layers, with several steps of different streams in flight, and several chunks of one prompt."""

    most_flights = depth = 3


class AnyHistoryWithStatesAndDrafts(AnyHistoryWithStates):
    """Recurrent layers and drafts, of which some are right: a rejected one has the tokens before it computed again."""

    drafting = AnyHistoryWithDrafts.drafting


class AnyHistoryWithStatesAndDraftsInStages(AnyHistoryWithStatesAndDrafts):
    """Recurrent layers and drafts, with several steps of different streams in flight."""

    most_flights = depth = 3


class AnyHistoryWithStatesWindowsAndDrafts(AnyHistoryWithStatesAndDrafts):
    """Recurrent layers, groups of layers whose pages go while a request runs, and drafts, on few pages."""

    group_windows = ((None, 6), (5,), (None, 1, 9))
    room = 0


class AnyHistoryWithStatesAndWindows(AnyHistoryWithStates):
    """Recurrent layers beside groups of layers whose pages go while a request runs, with overlapping steps."""

    group_windows = ((None, 6), (5,), (None, 1, 9))
    most_flights = 2


MACHINES = (
    *(AnyHistory, AnyHistoryAhead, AnyHistoryInStages),
    *(AnyHistoryWithWindows, AnyHistoryWithWindowsAhead, AnyHistoryWithWindowsInStages),
    *(AnyHistoryWithDrafts, AnyHistoryWithDraftsInStages, AnyHistoryWithWindowsAndDrafts),
    *(AnyHistoryWithStates, AnyHistoryWithStatesAhead, AnyHistoryWithStatesInStages, AnyHistoryWithStatesAndWindows),
    *(AnyHistoryWithStatesAndDrafts, AnyHistoryWithStatesAndDraftsInStages, AnyHistoryWithStatesWindowsAndDrafts),
)
for machine in MACHINES:
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistory = AnyHistory.TestCase
TestAnyHistoryAhead = AnyHistoryAhead.TestCase
TestAnyHistoryInStages = AnyHistoryInStages.TestCase
TestAnyHistoryWithWindows = AnyHistoryWithWindows.TestCase
TestAnyHistoryWithWindowsAhead = AnyHistoryWithWindowsAhead.TestCase
TestAnyHistoryWithWindowsInStages = AnyHistoryWithWindowsInStages.TestCase
TestAnyHistoryWithDrafts = AnyHistoryWithDrafts.TestCase
TestAnyHistoryWithDraftsInStages = AnyHistoryWithDraftsInStages.TestCase
TestAnyHistoryWithWindowsAndDrafts = AnyHistoryWithWindowsAndDrafts.TestCase
TestAnyHistoryWithStates = AnyHistoryWithStates.TestCase
TestAnyHistoryWithStatesAhead = AnyHistoryWithStatesAhead.TestCase
TestAnyHistoryWithStatesInStages = AnyHistoryWithStatesInStages.TestCase
TestAnyHistoryWithStatesAndDrafts = AnyHistoryWithStatesAndDrafts.TestCase
TestAnyHistoryWithStatesAndDraftsInStages = AnyHistoryWithStatesAndDraftsInStages.TestCase
TestAnyHistoryWithStatesWindowsAndDrafts = AnyHistoryWithStatesWindowsAndDrafts.TestCase
TestAnyHistoryWithStatesAndWindows = AnyHistoryWithStatesAndWindows.TestCase


@pytest.mark.soak
@pytest.mark.parametrize("machine", MACHINES)
def test_any_history_at_length(machine: type[AnyHistory]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=5000, stateful_step_count=100, deadline=None))
