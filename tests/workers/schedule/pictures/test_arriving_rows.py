"""Embeddings that another replica sends: every request ends, no landing page is lost, and no row is read too early."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.batch import Batch, SampledToken
from crossdock.workers.schedule.pictures.arriving_rows import LONGEST_PATIENCE_S, ArrivingRows, LandingCalls
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import ON_THEIR_WAY, Encoding
from crossdock.workers.schedule.pictures.items import Item, items_in, row_prompt
from crossdock.workers.schedule.request import Request, Status
from crossdock.workers.schedule.submission import Leg, SamplingParams
from tests.workers.schedule.model_free_replica import CLASSES, COST, new_request, new_scheduler, next_token

PAGE_SIZE = 4
LONGEST = 60
GARBAGE = (b"", -1)
Row = tuple[bytes, int]


def item(start: int, length: int, content: int) -> Item:
    return Item(start, length, length, "image", content.to_bytes(16, "little"))


def rows_of(content_hash: bytes, num_rows: int) -> list[Row]:
    """Return the embeddings of an item: each row is unlike all others."""
    return [(content_hash, number) for number in range(num_rows)]


def leg_rows(items: Sequence[Item]) -> list[Row]:
    """Return the rows of an encoding leg's pages: garbage between and after the items."""
    laid, num_tokens = row_prompt(items, PAGE_SIZE)
    rows = [GARBAGE] * num_tokens
    for each in laid:
        rows[each.start : each.end] = rows_of(each.content_hash, each.num_rows)
    return rows


@dataclass(eq=False)
class Source:
    """The other replica's end of one transfer."""

    request: Request
    rows: list[Row]
    is_silent: bool  # it never got the request
    is_offered: bool = False
    first_page: int = 0
    pages: Sequence[int] | None = None
    num_sent: int = 0
    is_stopping: bool = False  # one side has given the transfer up: what it still writes means nothing
    is_over: bool = False


@dataclass(eq=False)
class World:
    """A replica without a model, its landing pages, and a replica that encodes for it.

    `most_offers`: how many prompts the encode replica has pages for.
    """

    num_landing: int
    capacity: int = 30
    most_offers: int = 100
    patience_s: float = 1e9
    num_pages: int = 16
    cost: EncoderCost | None = None
    settings: dict[str, object] = field(default_factory=dict)
    now: float = 0.0
    memory: dict[int, list[Row]] = field(default_factory=dict)  # of landing pages
    embeddings: dict[bytes, list[Row]] = field(default_factory=dict)  # on the device
    sources: dict[str, Source] = field(default_factory=dict)  # by owner
    flights: list[Batch] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    num_encoded: int = 0
    count: int = 0

    def __post_init__(self) -> None:
        self.arriving = ArrivingRows(self.num_landing, PAGE_SIZE)
        self.encoding = Encoding(self.capacity, self.cost, arriving=self.arriving)
        defaults = {"admission": "queue", "slo_classes": CLASSES, "max_num_batched_tokens": 24}
        wanted = defaults | self.settings
        self.scheduler = new_scheduler(self.num_pages, LONGEST, cost=COST, encoding=self.encoding, **wanted)  # type: ignore[arg-type]

    # -- clients ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        num_tokens: int,
        items: Sequence[Item],
        slo_class: str = "standard",
        *,
        is_sent: bool = True,
        is_silent: bool = False,
        leg: Leg = Leg.LOCAL,
        max_tokens: int = 2,
        prompt: int = 7,
    ) -> Request:
        """Add a request whose items another replica encodes, if there are some and `is_sent`."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        is_elsewhere = is_sent and bool(items)
        request = Request(
            *(f"r{self.count}", [prompt] * num_tokens, sampling),
            slo_class=slo_class,
            leg=leg,
            items=items,
            is_encoded_elsewhere=is_elsewhere,
            arrival_time=self.now,
        )
        self.count += 1
        self.scheduler.add(request)
        if is_elsewhere:
            self.arriving.expect(request, self.now, self.patience_s)
            self.sources[request.owner] = Source(request, leg_rows(items), is_silent)
        return request

    def abort(self, request: Request) -> None:
        self.land_all()
        if self.scheduler.table.get(request.id) is request:
            self.scheduler.abort(request.id)
            self.scheduler.pages.release(request.owner)

    # -- the encode replica ----------------------------------------------------------------------------------------

    def is_open(self, source: Source) -> bool:
        return not source.is_over and not source.is_stopping

    def move(self, source: Source, num_rows: int) -> None:
        """Let the encode replica offer a prompt if it has pages, or send rows that were granted a place."""
        if not self.is_open(source) or source.is_silent:
            return
        held = sum(each.is_offered and not each.is_over for each in self.sources.values())
        if not source.is_offered:
            if held < self.most_offers:
                source.is_offered = True
                self.arriving.offer(source.request.owner)
            return
        if source.pages is None:
            return
        start = max(source.num_sent, source.first_page * PAGE_SIZE)
        end = source.num_sent = min(start + num_rows, len(source.rows))
        for number in range(start, end):
            self.write(source, number, source.rows[number])
        self.arriving.commit(source.request.owner, end)
        if end == len(source.rows):
            source.is_over = True
            self.arriving.arrive(source.request.owner, end)

    def write(self, source: Source, number: int, row: Row) -> None:
        assert source.pages is not None
        page = source.pages[number // PAGE_SIZE - source.first_page]
        self.memory.setdefault(page, [GARBAGE] * PAGE_SIZE)[number % PAGE_SIZE] = row

    def spoil(self, source: Source) -> None:
        """Write what means nothing to places whose rows have not arrived."""
        if source.pages is not None and not source.is_over:
            for number in range(max(source.num_sent, source.first_page * PAGE_SIZE), len(source.rows)):
                self.write(source, number, GARBAGE)

    def fail(self, source: Source) -> None:
        """Lose a transfer. `stop` follows later: until then a write may be on its way."""
        if self.is_open(source):
            source.is_stopping = True
            self.arriving.fail(source.request.owner)

    def stop(self, source: Source) -> None:
        if source.is_stopping and not source.is_over:
            self.spoil(source)
            source.is_over = True
            self.arriving.stop(source.request.owner)

    # -- the replica's turns ---------------------------------------------------------------------------------------

    def plan(self) -> LandingCalls:
        calls = self.arriving.plan(self.now, self.encoding.has)
        for request in calls.cancels:
            source = self.sources[request.owner]
            assert not source.is_stopping
            source.is_stopping = True
        taken = [page for each in self.sources.values() if not each.is_over for page in each.pages or ()]
        for request, first_page, pages in calls.grants:
            source = self.sources[request.owner]
            assert source.pages is None
            assert source.is_offered
            assert not set(pages) & set(taken), "granted twice"
            assert first_page + len(pages) == -(-len(source.rows) // PAGE_SIZE)
            source.first_page, source.pages = first_page, pages
            self.spoil(source)
        return calls

    def step(self, is_ahead: bool = False) -> Batch | None:
        """Do one turn: plan, begin a step, and end it, or the step before it if steps run ahead."""
        self.plan()
        batch = self.begin()
        for request in self.scheduler.table.take_returned():
            self.scheduler.pages.release(request.owner)
        if batch is not None and is_ahead and len(self.flights) < 2:
            return batch
        while self.flights:
            self.land()
        return batch

    def begin(self) -> Batch | None:
        if not self.scheduler.table.has_work:
            return None
        if self.flights:
            with assume_ended(self.scheduler.table, self.flights[-1], self.now):
                batch = self.scheduler.schedule(self.now)
        else:
            batch = self.scheduler.schedule(self.now)
        if not batch:
            return None
        self.batches.append(batch)
        self.flights.append(batch)
        return batch

    def compute(self, batch: Batch) -> None:
        """Do the encoder's work of a step, and check what its parts read."""
        for content_hash in batch.encoder.evicted:
            del self.embeddings[content_hash]
        for content_hash, pages, num_rows, _ in batch.encoder.landed:
            assert content_hash not in self.embeddings
            rows = [row for page in pages for row in self.memory[page]][:num_rows]
            assert rows == rows_of(content_hash, num_rows), "rows are read that have not arrived"
            self.embeddings[content_hash] = rows
        for each in batch.encoder.items:
            assert each.content_hash not in self.embeddings, "encoded twice"
            self.embeddings[each.content_hash] = rows_of(each.content_hash, each.num_rows)
            self.num_encoded += 1
        for part in batch.scheduled:
            for each in items_in(part.request.items, part.start, part.start + part.num_tokens):
                assert each.content_hash in self.embeddings, "a chunk reads embeddings that are not there"

    def land(self) -> None:
        """Compute the oldest step, as late as a device may, and end it."""
        batch = self.flights.pop(0)
        self.compute(batch)
        self.now += COST.seconds(batch.work)
        live = {
            part.request.id for part in batch.scheduled if self.scheduler.table.get(part.request.id) is part.request
        }
        sampled = {
            part.request.id: SampledToken(next_token([token for token in part.request.token_ids if token >= 0]))
            for part in batch.scheduled
            if part.samples and part.request.id in live
        }
        self.scheduler.update(batch, sampled, self.now)
        for request in list(self.scheduler.table.held):
            self.scheduler.handoff.finish_sent(request.id)  # its pages are at the decode replica
        for part in batch.scheduled:
            if part.request.leg is Leg.SEND and part.request.status is Status.FINISHED:
                self.scheduler.pages.release(part.request.owner)

    def land_all(self) -> None:
        while self.flights:
            self.land()

    def go_round(self, rows: int = 3) -> None:
        """Let both replicas go on."""
        for source in list(self.sources.values()):
            self.stop(source)
            self.move(source, rows)
        self.step()
        self.now += 0.01

    def settle(self) -> None:
        """Go on without faults: every request ends, and every landing page is free."""
        self.land_all()
        for _ in range(3000):
            if not self.scheduler.table.requests():
                break
            self.go_round()
        assert not self.scheduler.table.requests(), f"not everything ends: {self.describe()}"
        self.plan()
        for source in self.sources.values():
            self.stop(source)
        self.plan()
        assert self.arriving.num_free == self.num_landing
        assert not self.arriving.num_transfers
        assert self.scheduler.pages.counts().owned == 0

    def describe(self) -> str:
        return "; ".join(
            f"{each.id} {each.status.value} {each.num_computed_tokens}/{each.num_tokens} waits: {each.awaits_rows}"
            for each in self.scheduler.table.requests()
        )


def test_chunks_end_before_an_item_on_its_way_and_go_on_when_it_has_arrived() -> None:
    world = World(num_landing=8)
    request = world.submit(30, [item(10, 8, 1)])
    source = world.sources[request.owner]
    world.move(source, 0)
    world.step()
    assert (request.num_computed_tokens, world.batches[-1].limit) == (8, ON_THEIR_WAY)
    world.move(source, 7)
    assert world.step() is None, "seven of eight rows are no picture"
    assert request.awaits_rows
    world.move(source, 1)
    world.settle()
    assert (world.num_encoded, world.encoding.totals.num_copied) == (0, 1)


def test_landing_pages_stay_until_the_step_that_copies_them_has_ended() -> None:
    """The step in flight copies late; another prompt's rows come for the pages meanwhile."""
    world = World(num_landing=3)
    first = world.submit(10, [item(0, 8, 1)])
    second = world.submit(10, [item(0, 8, 2)])
    for _ in range(2):
        world.move(world.sources[first.owner], 9)
        world.plan()
    assert world.sources[first.owner].is_over
    world.step(is_ahead=True)
    assert len(world.flights) == 1
    world.move(world.sources[second.owner], 0)
    assert not world.plan().grants
    world.land_all()
    assert [grant.request for grant in world.plan().grants] == [second]
    world.settle()


def test_landing_pages_of_a_request_that_left_stay_until_its_writer_has_stopped() -> None:
    world = World(num_landing=3)
    first, second = world.submit(10, [item(0, 8, 1)]), world.submit(10, [item(0, 8, 2)])
    source = world.sources[first.owner]
    world.move(source, 0)
    assert [grant.request for grant in world.plan().grants] == [first]
    world.abort(first)
    world.move(world.sources[second.owner], 0)
    assert not world.plan().grants
    world.stop(source)
    assert [grant.request for grant in world.plan().grants] == [second]
    world.settle()


def test_request_that_has_its_turn_and_finds_no_landing_pages_encodes_at_once() -> None:
    world = World(num_landing=3)
    first, second = world.submit(10, [item(0, 8, 1)], "batch"), world.submit(10, [item(0, 8, 2)], "interactive")
    world.move(world.sources[first.owner], 0)
    world.plan()
    world.move(world.sources[second.owner], 0)
    while world.scheduler.table.get(second.id) is second:
        assert world.step() is not None
    assert world.num_encoded == 1
    assert world.arriving.lost == {"no room": 1}
    assert world.step() is None
    assert first.awaits_rows
    world.settle()
    assert world.num_encoded == 1


def test_requests_that_wait_for_each_others_pages_all_end() -> None:
    """The KV pages are the first request's, the landing pages the second's, and the pages of the replica that encodes
    are the third's: each waits for the next, and none ever gives up by itself."""
    world = World(num_landing=3, num_pages=LONGEST // PAGE_SIZE, most_offers=1)
    first = world.submit(58, [item(8, 8, 1)], "batch")
    world.step()
    second, third = world.submit(58, [item(0, 8, 2)], "batch"), world.submit(58, [item(0, 8, 3)], "batch")
    for _ in range(2):
        world.move(world.sources[second.owner], 9)
        world.plan()
    world.move(world.sources[third.owner], 0)
    assert (first.num_computed_tokens, world.sources[third.owner].is_offered) == (8, True)
    assert first.awaits_rows or world.step() is None
    world.settle()
    assert world.arriving.lost == {"no room": 2}, "the third's, then the first's, which comes before the second"
    assert world.encoding.totals.num_copied == 1


@pytest.mark.parametrize("order", ["fcfs", "response_ratio"])
def test_prompts_behind_one_that_waits_for_rows_are_computed(order: str) -> None:
    """Neither the order of arrival nor the number of partly computed prompts lets others wait for the rows of one."""
    settings = {"prefill_order": order, "max_num_partial_prefills": 1, "max_long_partial_prefills": 1}
    world = World(8, num_pages=64, settings=settings)
    waiting = [world.submit(40, [item(8 * number, 8, number)], prompt=number) for number in range(2)]
    text = world.submit(40, [], prompt=9)
    for _ in range(20):
        world.step()
    assert text.status is Status.FINISHED
    assert [each.awaits_rows for each in waiting] == [True, True]
    world.settle()


def test_rows_of_one_request_serve_another_with_the_same_picture() -> None:
    world = World(num_landing=8)
    first = world.submit(20, [item(0, 8, 1)])
    second = world.submit(20, [item(4, 8, 1)], is_sent=False)
    for _ in range(2):
        world.move(world.sources[first.owner], 8)
        world.plan()
    world.abort(first)
    world.settle()
    assert second.status is Status.FINISHED
    assert world.num_encoded == 1, "the landing pages went with the first request"
    third, fourth = world.submit(20, [item(0, 8, 5)]), world.submit(20, [item(4, 8, 5)], is_sent=False)
    for _ in range(2):
        world.move(world.sources[third.owner], 8)
        world.plan()
    world.settle()
    assert fourth.status is Status.FINISHED
    assert world.num_encoded == 1


def test_only_rows_that_the_prefix_cache_lacks_get_landing_pages() -> None:
    world = World(num_landing=8, settings={"caching": True})
    both = [item(0, 8, 1), item(20, 8, 2)]
    world.submit(40, both[:1], is_sent=False)
    world.settle()
    again = world.submit(40, both)
    source = world.sources[again.owner]
    world.move(source, 0)
    grants = world.plan().grants
    assert [(grant.first_page, len(grant.pages)) for grant in grants] == [(2, 3)]
    world.settle()
    assert (world.num_encoded, world.encoding.totals.num_copied) == (1, 1)


def test_nothing_is_granted_for_pictures_in_memory() -> None:
    world = World(num_landing=8)
    world.submit(20, [item(0, 8, 1)], is_sent=False)
    world.settle()
    again = world.submit(20, [item(4, 8, 1)])
    world.move(world.sources[again.owner], 0)
    calls = world.plan()
    assert (list(calls.grants), list(calls.cancels)) == ([], [again])
    assert not world.arriving.lost
    world.settle()
    assert world.num_encoded == 1


@pytest.mark.parametrize(("predicted", "late_after"), [(0.5, 2.0), (4.0, 8.0), (1e3, LONGEST_PATIENCE_S)])
def test_offer_is_late_after_twice_the_predicted_seconds_within_bounds(predicted: float, late_after: float) -> None:
    world = World(num_landing=8)
    request = new_request("a", [7] * 20)
    request.items, request.rows_within_s = [item(4, 8, 1)], predicted
    assert world.arriving.expect(request, 10.0, 2.0) == 10.0 + late_after
    assert not world.arriving.plan(10.0 + late_after - 0.01, lambda _: False).cancels
    assert world.arriving.plan(10.0 + late_after, lambda _: False).cancels == [request]


def test_transfer_that_is_larger_than_all_landing_pages_is_given_up() -> None:
    world = World(num_landing=2)
    request = world.submit(30, [item(4, 8, 1), item(14, 8, 2)])
    world.move(world.sources[request.owner], 0)
    assert list(world.plan().cancels) == [request]
    world.settle()
    assert (world.num_encoded, world.arriving.lost) == (2, {"no room": 2})


def test_rows_that_arrived_before_the_loss_are_used() -> None:
    world = World(num_landing=8)
    request = world.submit(40, [item(4, 8, 1), item(20, 8, 2)])
    source = world.sources[request.owner]
    world.move(source, 0)
    world.plan()
    world.move(source, 9)
    world.fail(source)
    world.settle()
    assert (world.num_encoded, world.encoding.totals.num_copied, world.arriving.lost) == (1, 1, {"failed": 1})


def test_first_token_is_predicted_without_pictures_that_another_replica_encodes() -> None:
    """Until the transfer fails: then their seconds count here."""
    world = World(num_landing=8, cost=EncoderCost(base=1e-3, per_row=5e-4))
    request = world.submit(40, [item(4, 8, 1)])
    away = world.scheduler.forecast.prefill_seconds(request)
    world.fail(world.sources[request.owner])
    assert world.scheduler.forecast.prefill_seconds(request) == pytest.approx(away + 1e-3 + 8 * 5e-4)
    world.settle()
