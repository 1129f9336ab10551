"""Both pools in any history: every request ends while replicas live, pages balance, and urgent requests do not wait for
pages that less urgent ones hold."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from crossdock.kvtransfer.events import Arrived, Failed, Figures, Reason
from crossdock.workers.schedule import kv, preemption
from crossdock.workers.schedule.admission import num_slots
from crossdock.workers.schedule.handoff import Handoff
from crossdock.workers.schedule.memory.page_needs import PageNeeds
from crossdock.workers.schedule.memory.prefix_index import AttentionChunk, Window
from crossdock.workers.schedule.policies.order import order_prefills
from crossdock.workers.schedule.request.request import Request, Status
from crossdock.workers.schedule.request.submission import Leg
from tests.workers.replica.any_pools import AnyPools
from tests.workers.replica.pools_world import LONGEST, PAGE_SIZE, World

WINDOWS: list[tuple[Window, ...]] = [
    *((None,), (None, 9), (6,), (None, 5, 12)),
    *((None, AttentionChunk(12)), (AttentionChunk(9),)),
]  # of groups of layers
CLASS = st.sampled_from(["interactive", "standard", "batch"])


class Pools(AnyPools):
    """Requests of all classes arrive, leave and lose replicas, on page pools that few of them fill."""

    windows = WINDOWS
    state_pages = (0, 0, 3)
    spare = st.tuples(st.integers(1, 15), st.integers(1, 15))  # pages beyond the least, of each replica
    is_fetching = st.booleans()
    has_tiers = st.booleans()
    sizes = st.lists(st.integers(1, 50), min_size=1, max_size=6)  # of prompts

    @initialize(
        both_ways=st.booleans(),
        is_drafting=st.booleans(),
        seqs=st.integers(2, 8),
        data=st.data(),
    )
    def begin(self, both_ways: bool, is_drafting: bool, seqs: int, data: st.DataObject) -> None:
        spare, is_fetching, has_tiers = (data.draw(each) for each in (self.spare, self.is_fetching, self.has_tiers))
        windows, state_pages = data.draw(st.sampled_from(self.windows)), data.draw(st.sampled_from(self.state_pages))
        is_drafting &= len(windows) == 1
        needs = PageNeeds(PAGE_SIZE, windows, 24, state_pages)
        least = max(needs.at_most(LONGEST), needs.held(LONGEST))
        sizes = (least + each for each in spare)
        kind = both_ways, is_drafting, windows, state_pages, is_fetching, has_tiers
        self.world = World(*sizes, *kind, max_num_seqs=seqs, starvation_s=5.0)

    @rule(data=st.data(), slo_class=CLASS, max_tokens=st.integers(1, 12))
    def submit(self, data: st.DataObject, slo_class: str, max_tokens: int) -> None:
        for size in data.draw(self.sizes):
            self.world.submit(size, slo_class, max_tokens)

    @rule(choices=st.lists(st.integers(0, 99), min_size=1, max_size=30))
    def go_on(self, choices: list[int]) -> None:
        """Messages are delivered, writes end and replicas step, in any order."""
        for choice in choices:
            kind, number = choice % 5, choice // 5
            ready = self.world.ready()
            if kind < 2 and ready:
                self.world.deliver(ready[number % len(ready)])
            elif kind == 2 and self.world.writes:
                self.world.land(number % len(self.world.writes))
            elif kind == 3:
                self.world.prefill.step()
            else:
                self.world.decode.step()

    @rule(number=st.integers(0, 99))
    def refuse(self, number: int) -> None:
        """One leg is not taken, or a submission comes too late: the attempt is given up and another one begins."""
        clients = [client for client in self.world.clients.values() if not client.is_over]
        if clients:
            self.world.place_again(clients[number % len(clients)])

    @rule(role=st.sampled_from("PD"))
    def kill(self, role: str) -> None:
        self.world.kill(role)

    @invariant()
    def pages_balance(self) -> None:
        if not hasattr(self, "world"):
            return
        for replica in (self.world.prefill, self.world.decode):
            counts = replica.pages.counts()
            assert counts.free + counts.owned + counts.cached + counts.quarantined == counts.total


class FetchingPools(Pools):
    """Pools large enough to keep prefixes, which each replica fetches from the other."""

    spare = st.tuples(st.integers(10, 40), st.integers(10, 40))
    is_fetching = st.just(True)
    sizes = st.lists(st.integers(20, 50), min_size=1, max_size=3)

    @rule(size=st.integers(30, 50), role=st.sampled_from("PD"))
    def finish_and_replace(self, size: int, role: str) -> None:
        """A new replica needs what the other one has computed or received."""
        for _ in range(2):
            for _ in range(3):  # of two prefixes, by turns, and every third one without another leg
                self.world.submit(size, "standard", 2)
            for _ in range(25):
                self.world.go_round()
            self.world.kill(role)

    def teardown(self) -> None:
        self.finish_and_replace(40, "P")
        super().teardown()


class TieredPools(Pools):
    """Small pools above tiers: five prefixes evict each other and come back."""

    has_tiers = st.just(True)
    sizes = st.lists(st.integers(20, 50), min_size=1, max_size=3)

    @rule(size=st.integers(30, 50))
    def come_back(self, size: int) -> None:
        for _ in range(8):
            self.world.submit(size, "standard", 2)
            for _ in range(10):
                self.world.go_round()

    def teardown(self) -> None:
        self.come_back(50)
        super().teardown()


class PlainPools(Pools):
    """Pools of a model without windows."""

    windows: list[tuple[Window, ...]] = [(None,)]  # noqa: RUF012
    state_pages = (0, 0, 0)


HISTORIES = settings(
    max_examples=50,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPools = Pools.TestCase
TestPools.settings = HISTORIES


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [Pools, FetchingPools, TieredPools])
def test_pools_in_five_thousand_histories_all_end(machine: type[Pools]) -> None:
    run_state_machine_as_test(machine, settings=settings(HISTORIES, max_examples=5000))


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize(("machine", "name"), [(FetchingPools, "num_fetched"), (TieredPools, "num_loaded")])
def test_pools_mostly_fetch_or_load_pages_in_any_history(machine: type[Pools], name: str, count: int) -> None:
    found = list[int]()

    class Counted(machine):  # type: ignore[valid-type, misc]
        def teardown(self) -> None:
            super().teardown()
            found.append(getattr(self.world, name))

    run_state_machine_as_test(Counted, settings=settings(HISTORIES, max_examples=count))
    sys.stdout.write(f"{len(found)} histories, {name} {sum(found)}\n")
    assert sum(count > 0 for count in found) > len(found) / 2, found


@contextmanager
def grants_without_offers() -> Iterator[None]:
    """Grant pages in the decode replica's own order, also to prompts that wait for pages at the other one."""

    def grant(self: Handoff, now: float) -> list[Request]:
        table, granted = self.table, []
        arriving = [request for request in table.waiting if request.leg is Leg.RECEIVE]
        for request in order_prefills(arriving, now, table.config.starvation_s, table.tenants):
            if num_slots(table, request.priority) <= 0:
                break
            if not kv.admit(table, request, kv.match_prefix(table, request)):
                break
            granted.append(request)
        return granted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handoff, "grant", grant)
        patch.setattr(preemption, "return_transfers", lambda *_: None)
        yield


def test_pools_that_grant_without_offers_deadlock() -> None:
    """The machine finds the deadlock that offers prevent, so that it would find another one."""
    once = {"phases": [Phase.generate], "report_multiple_bugs": False, "derandomize": True}
    search = settings(HISTORIES, max_examples=500, database=None, **once)
    with grants_without_offers(), pytest.raises(AssertionError, match="not everything ends"):
        run_state_machine_as_test(PlainPools, settings=search)


def test_prompt_that_arrives_with_another_length_is_computed_here() -> None:
    """Its pages are of another prompt, or of another output before it: decoding from them would give wrong tokens."""
    world = World(26, 26)
    client = world.submit(40, "standard", 12)
    while not world.decode.scheduler.table.held:
        world.go_round()
    (request,) = world.decode.scheduler.table.held
    result = msgpack.packb(7)
    world.decode.handover.handle(Arrived(request.id, request.epoch, request.num_tokens - 1, result, Figures()))
    assert (request.leg, request.status) == (Leg.LOCAL, Status.WAITING)
    world.settle()
    assert client.is_over


def test_event_of_a_placement_that_is_over_ends_no_later_one() -> None:
    world = World(26, 26)
    client = world.submit(40, "standard", 12)
    while not world.decode.scheduler.table.held:
        world.go_round()
    (request,) = world.decode.scheduler.table.held
    world.decode.handover.handle(Failed(request.id, request.epoch - 1, False, Reason.PEER_LOST, "late"))
    assert (request.leg, request.status) == (Leg.RECEIVE, Status.HELD)
    world.settle()
    assert client.is_over


def overload(world: World) -> None:
    """Batch prompts come to the decode replica first, and standard ones to the prefill replica."""
    for _ in range(6):
        world.submit(40, "batch", 12)
    for key in world.ready():
        if key[1] == world.decode.name:
            while world.channels[key]:
                world.deliver(key)
    world.decode.step()
    for _ in range(6):
        world.submit(40, "standard", 12)


def test_overload_of_both_pools_in_opposite_orders_ends() -> None:
    world = World(26, 26)
    overload(world)
    world.settle()


def test_overload_of_both_pools_without_offers_never_ends() -> None:
    world = World(26, 26)
    with grants_without_offers():
        overload(world)
        with pytest.raises(AssertionError, match="not everything ends"):
            world.settle()


def test_overload_of_two_replicas_that_prefill_for_each_other_ends() -> None:
    """Each is full of prompts that the other has no pages for, and has no stream that could end."""
    world = World(26, 26, both_ways=True)
    for _ in range(8):
        world.submit(40, "standard", 12)
    for key in world.ready():
        while world.channels[key]:
            world.deliver(key)
    for _ in range(10):
        world.prefill.step()
        world.decode.step()
    world.settle()
    assert any(client.num_returned for client in world.clients.values())


@settings(max_examples=15)
@given(
    pages=st.tuples(st.integers(16, 30), st.integers(16, 30)),
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=10),
    rounds=st.integers(0, 40),
    size=st.integers(1, 50),
)
def test_interactive_request_does_not_wait_for_pages_of_batch_requests(
    pages: tuple[int, int], sizes: list[int], rounds: int, size: int
) -> None:
    """However many batch requests hold pages on both sides, and however long they would go on."""
    alone = World(*pages, starvation_s=1000.0)
    wanted = num_rounds(alone, size)
    world = World(*pages, starvation_s=1000.0)
    for each in sizes:
        world.submit(each, "batch", 60 - each)
    for _ in range(rounds):
        world.go_round()
    assert num_rounds(world, size) <= wanted + 12
    world.settle()


def num_rounds(world: World, size: int) -> int:
    """Return the rounds until an interactive request has ended."""
    client, rounds = world.submit(size, "interactive", 8), 0
    while not client.is_over:
        world.go_round()
        rounds += 1
        assert rounds < 500, world.describe()
    return rounds


@pytest.mark.parametrize("is_fetching", [False, True])
def test_damaged_pages_are_computed_again_and_the_stream_goes_on(is_fetching: bool) -> None:
    """Every step checks the content of what it reads, so a damaged page that were used would be found."""
    world = World(60, 60, windows=(None, 9), state_pages=2, is_fetching=is_fetching)
    clients = []
    for _ in range(4):
        clients.append(world.submit(40, "standard", 12))
        while not world.writes and not clients[-1].is_over:
            world.go_round()
        if world.writes:
            world.land(0, is_damaged=True)
        for _ in range(100):
            world.go_round()
    world.settle()
    assert all(client.is_over for client in clients)
    assert world.num_refused == world.num_damaged > 0
