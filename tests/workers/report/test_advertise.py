"""What a replica says of itself is what its scheduler knows, and it is said seldom."""

import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.report.advertise import LENGTHS, LiveProfile, Prompts, Publisher, observe
from crossdock.workers.schedule.batch import SampledToken
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.pages import PagePool
from crossdock.workers.schedule.request import Leg, Overloaded, Request, SamplingParams
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.slo import SloClass

COST = StepCost(base=1e-3, per_prefill_token=1e-3, per_attended=1e-7, per_decode=5e-4, per_context=1e-6)
CLASSES = (
    SloClass(name="interactive", ttft_s=1.0, tpot_s=0.02, decode_share=0.25),
    SloClass(name="standard", ttft_s=2.0, tpot_s=0.05),
    SloClass(name="batch", ttft_s=50.0, tpot_s=0.5),
)


def scheduler(num_pages: int = 400) -> Scheduler:
    config = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=8, page_size=4, slo_classes=CLASSES, default_slo_class="standard"
    )
    it = Scheduler(config, PagePool(num_pages, 4), 1000)
    it.cost = COST
    return it


def request(name: str, num_tokens: int, slo_class: str = "standard", max_tokens: int = 20, **more: object) -> Request:
    prompt = [sum(name.encode()), *range(num_tokens - 1)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), slo_class=slo_class, **more)  # type: ignore[arg-type]


def step(it: Scheduler, now: float = 0.0) -> None:
    batch = it.schedule(now)
    it.update(batch, {part.request.id: SampledToken(7) for part in batch.scheduled if part.samples}, now)


def test_what_it_says_of_every_kind_of_request() -> None:
    it = scheduler()
    it.add(request("stream", 9, "interactive"))
    step(it)
    step(it)  # it has two tokens now
    it.add(request("here", 30))
    it.add(request("sent", 41, "batch", leg=Leg.SEND))
    it.add(request("received", 21, "interactive", leg=Leg.RECEIVE))
    live = observe(it, "me", 5, step_seconds=0.25)
    assert live == LiveProfile(
        incarnation="me",
        sequence=5,
        cost=COST.coefficients,
        prompts=(
            Prompts(1, 1, 1, 30, COST.prefill_seconds(0, 30, 64)),
            Prompts(2, 1, 1, 41, COST.prefill_seconds(0, 41, 64)),
        ),
        streams=(1, 0, 0),
        context_tokens=11,
        remaining_tokens=18,
        arriving=(1, 0, 0),
        leaving=(0, 0, 1),
        places=(
            6,
            4,
            3,
        ),  # of 8 one is taken and a second kept for the interactive; who waits takes one from those below
        free_pages=(400 - 3 - 6, 400 - 3 - 6 - 8, 400 - 3 - 6 - 8 - 11),  # nobody below the stream gives any up
        step_seconds=0.25,
        done_seconds=COST.chunk_seconds(0, 9),
    )
    assert LENGTHS[0] <= live.prompts[0].seconds < LENGTHS[1]


def test_a_replica_without_work_says_so() -> None:
    it = scheduler()
    assert observe(it, "me", 1, 0.25) == LiveProfile(
        "me", 1, COST.coefficients, (), (0, 0, 0), 0, 0, (0, 0, 0), (0, 0, 0), (8, 6, 6), (400, 400, 400)
    )


def test_the_urgent_count_on_pages_of_those_below() -> None:
    it = scheduler()
    it.add(request("stream", 40, "batch", max_tokens=100))
    step(it)
    held = len(it.pages.pages_of("stream"))
    assert observe(it, "me", 1).free_pages == (400, 400, 400 - held)


def test_how_much_of_its_time_goes_into_prompts_of_whom() -> None:
    it = scheduler()
    said = Publisher(it, "me")
    said.live(0.0)
    for second in range(1, 60):  # every second 0.2 s of interactive prompts and 0.1 s of standard ones
        it.add(request(f"i{second}", 200, "interactive", max_tokens=1))
        it.add(request(f"s{second}", 100, "standard", max_tokens=1))
        while it.has_work:
            step(it, float(second))
        live = said.live(float(second))
    assert live.prompt_shares == pytest.approx((0.2, 0.1, 0.0), rel=0.02)
    assert said.live(120.0).prompt_shares == pytest.approx((0.0, 0.0, 0.0), abs=1e-3)


def test_how_much_of_its_time_streams_keep_from_prompts() -> None:
    """A stream is there for every other second, at the end of each of which there is something to say."""
    it = scheduler()
    said = Publisher(it, "me")
    kept = 0.0
    for second in range(0, 60, 2):
        it.add(request(f"{second}", 100, "interactive", max_tokens=2))
        while not it.running or not it.running[0].is_decoding:
            step(it, float(second))
        kept = 1 - it.prefill_share(0)
        said.live(float(second))
        step(it, second + 1.0)
        live = said.live(second + 1.0)
    assert 0.05 < kept < 1
    assert live.stream_share == pytest.approx(kept / 2, rel=0.15)  # the last second counts a little more
    assert said.live(120.0).stream_share == pytest.approx(0.0, abs=1e-3)


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_nothing_is_lost_or_counted_twice(rng: random.Random) -> None:
    it = scheduler(num_pages=300)
    names = [slo.name for slo in CLASSES]
    for number in range(rng.randrange(1, 25)):
        leg = rng.choice([Leg.LOCAL, Leg.LOCAL, Leg.SEND, Leg.RECEIVE])
        try:
            it.add(request(f"{number}", rng.randrange(1, 120), rng.choice(names), rng.randrange(1, 9), leg=leg))
        except Overloaded:
            continue
        it.grant(0.0)
        for _ in range(rng.randrange(3)):
            step(it)
    live = observe(it, "me", 1)
    everyone = it.requests()
    for priority in range(3):
        here = [request for request in everyone if request.priority == priority]
        held_to_send = [request for request in it.held if request.priority == priority and request.leg is Leg.SEND]
        prompts = sum(prompts.count for prompts in live.prompts if prompts.priority == priority)
        assert prompts + live.streams[priority] + live.arriving[priority] + len(held_to_send) == len(here)
    uncached = sum(request.num_uncached_tokens for request in it.prefills())
    assert sum(prompts.tokens for prompts in live.prompts) == uncached
    assert live.context_tokens == sum(request.num_tokens for request in it.running if request.is_decoding)
    assert len(pickle.dumps(live)) < 1000, "it travels with every few steps, whatever the backlog"


def test_it_speaks_when_there_is_something_to_say() -> None:
    it = scheduler()
    said = Publisher(it, "me", interval_s=0.05)
    assert not said.is_due(0.0)
    assert not said.is_due(100.0)  # idle, and known to be
    it.add(request("a", 9, max_tokens=3))
    assert said.is_due(100.0)  # work at once
    first = said.live(100.0)
    assert not said.is_due(100.06)  # all is as it was
    step(it)
    assert not said.is_due(100.04)
    assert said.is_due(100.06)  # its prompt is computed
    second = said.live(100.06, step_seconds=0.01)
    assert (first.sequence, second.sequence) == (1, 2)
    step(it)
    assert not said.is_due(101.0)  # the stream goes on
    assert said.is_due(101.1)
    assert said.live(101.1).step_seconds == 0.01  # the last step's, for as long as there is no other
    while it.has_work:
        step(it)
    assert said.is_due(101.11)  # idle at once
    assert said.live(101.11).step_seconds == 0.0
    assert not said.is_due(200.0)


def test_page_changes_are_numbered_and_a_late_reader_gets_all() -> None:
    it = scheduler()
    said = Publisher(it, "me")
    assert said.page_changes() == ()
    it.add(request("a", 17, max_tokens=1))
    step(it)
    (first,) = said.page_changes()
    assert (first.number, len(first.added), first.evicted, first.is_all) == (1, 4, [], False)
    everything = said.all_pages()
    assert (everything.number, everything.added, everything.is_all) == (1, first.added, True)
    it.pages.clear_cache()
    (second,) = said.page_changes()
    assert (second.number, second.added, sorted(second.evicted)) == (2, [], sorted(first.added))


def test_bandwidth_is_what_transfers_had_of_late() -> None:
    said = Publisher(scheduler(), "me")
    assert said.live(0.0).bytes_per_second == 0.0  # unknown: the router takes what is advertised
    said.transferred(10_000_000, 0.1)
    assert said.live(0.0).bytes_per_second == 1e8
    for _ in range(50):
        said.transferred(10_000_000, 0.01)
    assert 9e8 < said.live(0.0).bytes_per_second <= 1e9
