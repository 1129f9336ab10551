"""The live profile agrees with the scheduler, and is published seldom."""

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.work import Work
from crossdock.workers.report.advertise import Message, observe
from crossdock.workers.report.frames import frame
from crossdock.workers.report.link import LinkCost
from crossdock.workers.report.live_profile import LENGTHS, Prompts
from crossdock.workers.report.publisher import Publisher
from crossdock.workers.schedule.output_lengths import OutputLengths
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Leg, Overloaded
from tests.router.replicas import live_profile
from tests.workers.schedule import model_free_replica
from tests.workers.schedule.model_free_replica import ModelFreeReplica, new_request, new_scheduler

COST = replace(model_free_replica.COST, base=10e-3)
"""A cost whose knee of throughput, 100 ms, is beyond the 64 tokens of a step."""

CLASSES = (
    SloClass(name="interactive", ttft_s=1.0, tpot_s=0.02, decode_share=0.25),
    SloClass(name="standard", ttft_s=2.0, tpot_s=0.05),
    SloClass(name="batch", ttft_s=50.0, tpot_s=0.5),
)


def new_replica(num_pages: int = 400) -> ModelFreeReplica:
    """Return a replica of 8 slots whose steps take no time; the tests set its clock."""
    scheduler = new_scheduler(num_pages, 1000, cost=COST, max_num_batched_tokens=64, slo_classes=CLASSES)
    return ModelFreeReplica(scheduler, sample=lambda token_ids: 7)


def add(
    replica: ModelFreeReplica,
    name: str,
    num_tokens: int,
    slo_class: str = "standard",
    max_tokens: int = 20,
    **fields: Any,
) -> None:
    """Queue a request that shares no prefix with others, without a salt: its pages are findable by its tokens."""
    replica.add(name, [sum(name.encode()), *range(num_tokens - 1)], slo_class, max_tokens, **fields)


def test_live_profile_counts_every_kind_of_request() -> None:
    replica = new_replica()
    add(replica, "stream", 9, "interactive")
    replica.step()
    replica.step()  # the stream has two tokens now
    add(replica, "here", 30)
    add(replica, "sent", 41, "batch", leg=Leg.SEND)
    add(replica, "received", 21, "interactive", leg=Leg.RECEIVE)
    live = Publisher(replica.scheduler, "me", sequence=4).live(0.0, step_seconds=0.25)
    assert live == live_profile(
        "me",
        5,
        cost=COST.advertised,
        prompts=(
            Prompts(1, 1, 1, 30, COST.prefill_seconds(0, 30, 64)),
            Prompts(2, 1, 1, 41, COST.prefill_seconds(0, 41, 64)),
        ),
        streams=(1, 0, 0),
        context_tokens=11,
        ends=((18, 3 + 1),),
        arriving=(1, 0, 0),
        leaving=(0, 0, 1),
        # Of 8 slots one is taken, and a second reserved for interactive requests; each waiting request takes one from
        # its own class and from less urgent ones.
        slots=(6, 4, 3),
        # The stream has 3 pages and needs one more soon; no request is less urgent.
        # Two of those that wait need one more for their first tokens; the third one's output is made elsewhere.
        free_pages=(400 - 4 - 7, 400 - 4 - 7 - 9, 400 - 4 - 7 - 9 - 11),
        pages_now=(400 - 4 - 7, 400 - 4 - 7 - 9, 400 - 4 - 7 - 9 - 11),  # all of them fit
        starting=(  # first the one whose prompt another replica computes
            (7, 0.0, 20),
            (9, COST.prefill_seconds(0, 30, 64), 20),
            (11, COST.prefill_seconds(0, 41, 64), 0),
        ),
        prompt_shares=(0.0, 0.0, 0.0),
        step_seconds=0.25,
        done_seconds=COST.chunk_seconds(0, 9),
        empty_pages=400 - 3,
    )
    assert LENGTHS[0] <= live.prefills.groups[0].seconds < LENGTHS[1]


@pytest.mark.parametrize("leg", [Leg.LOCAL, Leg.RECEIVE])
def test_prompts_pass_a_waiting_one_that_lacks_pages_wherever_that_is_computed(leg: Leg) -> None:
    replica = new_replica()
    add(replica, "stream", 900, max_tokens=20)
    replica.step()
    add(replica, "waits", 900, leg=leg)
    live = observe(replica.scheduler, "me", 1)
    assert live.room.free_pages[1] < 0
    assert live.room.pages_now[1] > 0


def test_outputs_beyond_the_mean_end_one_after_another_as_fast_as_others_did() -> None:
    replica = new_replica()
    for number in range(5):
        add(replica, str(number), 40, max_tokens=60 if number == 4 else 300)
    running = replica.scheduler.table.running
    while len(running) < 5 or not all(each.is_decoding for each in running):
        replica.step()
    for request in running:
        made = request.sampling.max_tokens - 100 if request.sampling.max_tokens == 300 else 50
        request.token_ids += [7] * (made - request.num_output_tokens)
    for mean, lefts in ((1.0, [4] * 5), (100.0, [10, 20, 40, 60, 80])):
        with patch.object(OutputLengths, "mean", mean):
            found = [left for left, _ in observe(replica.scheduler, "me", 1).room.ends]
        assert found == lefts, "each in the page of its next token, or one in 20 tokens, but the one that may not"


def test_prompt_whose_vector_is_wanted_is_a_prompt_and_no_stream_to_come() -> None:
    replica = new_replica()
    replica.scheduler.add(new_request("vector", [7] * 30, max_tokens=1, pooling="last"))
    live = observe(replica.scheduler, "me", 1)
    assert [(prompts.count, prompts.tokens) for prompts in live.prefills.groups] == [(1, 30)]
    assert sum(live.streams.leaving) == 1
    assert sum(Work.of(live, len(CLASSES)).arriving) == 0


def test_live_profile_of_an_idle_replica_is_empty() -> None:
    none, shares = (0, 0, 0), (0.0, 0.0, 0.0)
    room: dict[str, Any] = {"slots": (8, 6, 6), "free_pages": (400,) * 3, "pages_now": (400,) * 3, "empty_pages": 400}
    idle = live_profile(
        "me", 1, cost=COST.advertised, streams=none, arriving=none, leaving=none, prompt_shares=shares, **room
    )
    assert Publisher(new_replica().scheduler, "me").live(0.0, step_seconds=0.25) == idle


def test_live_profile_has_what_pictures_cost_as_learnt_so_far() -> None:
    replica = new_replica()
    encoded = new_scheduler(400, 1000, cost=COST, slo_classes=CLASSES, encoding=Encoding(100))
    assert [observe(scheduler, "me", 1).learnt.encoder_cost for scheduler in (replica.scheduler, encoded)] == [(), ()]
    for base in (1.0, 2.0):
        encoded.encoding.cost = EncoderCost(base=base, per_embedding_token=0.5, per_square=0.25)
        assert observe(encoded, "me", 1).learnt.encoder_cost == (base, 0.5, 0.25)


def test_urgent_classes_count_on_pages_of_less_urgent_requests() -> None:
    replica = new_replica()
    add(replica, "stream", 40, "batch", max_tokens=100)
    replica.step()
    held = len(replica.scheduler.pages.pages_of("stream#0"))
    room = replica.scheduler.table.num_growth_pages(replica.scheduler.table.running[0])
    assert room > 0
    assert observe(replica.scheduler, "me", 1).room.free_pages == (400, 400, 400 - held - room)


def test_waiting_prompt_that_lacks_pages_takes_none_of_those_that_are_free_now() -> None:
    replica = new_replica(num_pages=300)
    for name, num_tokens in (("stream", 600), ("long", 900), ("short", 40)):
        add(replica, name, num_tokens)
        if name == "stream":
            replica.step()
    replica.scheduler.table.now = 3.0
    live, page_size = observe(replica.scheduler, "me", 1), replica.scheduler.pages.page_size
    (stream,) = replica.scheduler.table.running
    free = 300 - replica.scheduler.pages.num_held_by(stream.owner) - replica.scheduler.table.num_growth_pages(stream)
    long, short = (num_tokens // page_size + 1 for num_tokens in (900, 40))  # with the page of the first tokens
    assert live.room.pages_now[1] == free - short
    assert live.room.free_pages[1] == live.room.pages_now[1] - long < 0
    assert live.room.lacking == ((long, pytest.approx(COST.prefill_seconds(0, 900, 64)), 20, 3),)
    assert live.room.starting == ((short, pytest.approx(COST.prefill_seconds(0, 40, 64)), 20, 0),)


def test_pages_that_a_waiting_prompt_will_share_are_not_free_when_their_stream_ends() -> None:
    replica, prompt = new_replica(), [*range(41)]
    replica.add("stream", prompt, max_tokens=20)
    replica.step()
    replica.step()
    ends = [observe(replica.scheduler, "me", 1).room.ends]
    replica.add("next", prompt)
    ends.append(observe(replica.scheduler, "me", 2).room.ends)
    (before,), (now,) = ends
    assert now == (before[0], before[1] - 40 // replica.scheduler.pages.page_size)


def test_prefix_that_another_replica_will_send_takes_room() -> None:
    replica = new_replica()
    add(replica, "waits", 41, source_tokens=40)
    scheduler = replica.scheduler
    scheduler.borrowed.expect("waits", scheduler.table.request("waits"), 0.0, 10.0)
    assert observe(scheduler, "me", 1).room.pages_now == (400, 400 - 11 - 1, 400 - 11 - 1)
    assert scheduler.borrowed.grant("waits", 40, 0.0)
    live = observe(scheduler, "me", 2)
    assert live.room.pages_now[1] == 400 - 11 - 1
    assert [pages for pages, *_ in live.room.starting] == [11 + 1], "all of them are free when it ends"


def test_pages_that_requests_share_are_free_when_the_last_of_them_ends() -> None:
    replica, prompt = new_replica(), [*range(41)]
    for name, max_tokens in (("first", 20), ("last", 30)):
        replica.add(name, prompt, max_tokens=max_tokens)
        replica.step()
    replica.step()
    (first, few), (last, many) = observe(replica.scheduler, "me", 1).room.ends
    growth = sum(map(replica.scheduler.table.num_growth_pages, replica.scheduler.table.running))
    assert first < last
    assert few < 5 < 10 < many
    assert few + many == replica.scheduler.pages.counts().owned + growth


def test_waiting_prompt_takes_its_cached_pages_from_those_that_are_free() -> None:
    replica, prompt = new_replica(), [*range(41)]
    replica.add("before", prompt, max_tokens=1)
    replica.run()
    assert replica.scheduler.pages.counts().cached == 10
    replica.add("again", prompt, "standard")
    replica.scheduler.table.waiting[0].expected_cached_tokens = 40
    assert observe(replica.scheduler, "me", 1).room.free_pages[1] == 400 - 11


def test_prompt_shares_are_recent_shares_of_time() -> None:
    replica = new_replica()
    publisher = Publisher(replica.scheduler, "me")
    publisher.live(0.0)
    for second in range(1, 60):  # every second 0.2 s of interactive prompts and 0.1 s of standard ones
        add(replica, f"i{second}", 200, "interactive", max_tokens=1)
        add(replica, f"s{second}", 100, "standard", max_tokens=1)
        replica.now = float(second)
        replica.run()
        live = publisher.live(float(second))
    assert live.shares.prompts == pytest.approx((0.2, 0.1, 0.0), rel=0.02)
    assert publisher.live(120.0).shares.prompts == pytest.approx((0.0, 0.0, 0.0), abs=1e-3)


def test_stream_share_is_the_recent_share_that_streams_took() -> None:
    """A stream runs in every other second, and a profile is published at the end of each."""
    replica = new_replica()
    scheduler = replica.scheduler
    publisher = Publisher(scheduler, "me")
    taken = 0.0
    for second in range(0, 60, 2):
        add(replica, f"{second}", 100, "interactive", max_tokens=2)
        replica.now = float(second)
        while not scheduler.table.running or not scheduler.table.running[0].is_decoding:
            replica.step()
        taken = 1 - scheduler.forecast.prefill_share(0)
        publisher.live(float(second))
        replica.now = second + 1.0
        replica.step()
        live = publisher.live(second + 1.0)
    assert 0.05 < taken < 1
    assert live.shares.streams == pytest.approx(taken / 2, rel=0.15)  # the last second counts a little more
    assert publisher.live(120.0).shares.streams == pytest.approx(0.0, abs=1e-3)


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_live_profile_counts_each_request_once(rng: random.Random) -> None:
    replica = new_replica(num_pages=300)
    scheduler = replica.scheduler
    names = [slo.name for slo in CLASSES]
    for number in range(rng.randrange(1, 25)):
        leg = rng.choice([Leg.LOCAL, Leg.LOCAL, Leg.SEND, Leg.RECEIVE])
        try:
            add(replica, f"{number}", rng.randrange(1, 120), rng.choice(names), rng.randrange(1, 9), leg=leg)
        except Overloaded:
            continue
        scheduler.handoff.grant(0.0)
        for _ in range(rng.randrange(3)):
            replica.step()
    live = observe(scheduler, "me", 1)
    for priority in range(3):
        here = [request for request in scheduler.table.requests() if request.priority == priority]
        sending = [each for each in scheduler.table.held if each.priority == priority and each.leg is Leg.SEND]
        prompts = sum(prompts.count for prompts in live.prefills.groups if prompts.priority == priority)
        assert prompts + live.streams.counts[priority] + live.streams.arriving[priority] + len(sending) == len(here)
    uncached = sum(request.num_uncached_tokens for request in scheduler.table.prefills())
    assert sum(prompts.tokens for prompts in live.prefills.groups) == uncached
    assert live.streams.context_tokens == sum(
        request.num_tokens for request in scheduler.table.running if request.is_decoding
    )
    assert len(frame(Message(live=live))) < 1000, "it is sent with every few steps, for any backlog"


def test_live_profile_is_due_when_something_changed() -> None:
    replica = new_replica()
    publisher = Publisher(replica.scheduler, "me", interval_s=0.05)
    assert not publisher.is_due(0.0)
    assert not publisher.is_due(100.0)  # idle, as published
    add(replica, "a", 9, max_tokens=3)
    assert publisher.is_due(100.0)  # work: at once
    first = publisher.live(100.0)
    assert not publisher.is_due(100.06)  # nothing has changed
    replica.step()
    assert not publisher.is_due(100.04)
    assert publisher.is_due(100.06)  # the prompt is computed
    second = publisher.live(100.06, step_seconds=0.01)
    assert (first.sequence, second.sequence) == (1, 2)
    replica.step()
    assert not publisher.is_due(101.0)  # the stream goes on
    assert publisher.is_due(101.1)
    assert publisher.live(101.1).step_seconds == 0.01  # of the last step, until there is another
    replica.run()
    assert publisher.is_due(101.11)  # idle: at once
    assert publisher.live(101.11).step_seconds == 0.0
    assert not publisher.is_due(200.0)


def test_assigned_role_is_published_at_once() -> None:
    publisher = Publisher(new_replica().scheduler, "me")
    assert publisher.live(0.0).role is None
    publisher.assign_role("decode")
    assert publisher.is_due(0.0)
    assert publisher.live(0.0).role == "decode"
    assert not publisher.is_due(100.0)


def test_page_changes_are_numbered_and_a_late_reader_gets_all() -> None:
    replica = new_replica()
    publisher = Publisher(replica.scheduler, "me")
    assert publisher.page_changes() == ()
    add(replica, "a", 17, max_tokens=1)
    replica.step()
    (first,) = publisher.page_changes()
    assert (first.number, len(first.added), first.evicted, first.is_all) == (1, 4, [], False)
    everything = publisher.all_pages()
    assert (everything.number, everything.added, everything.is_all) == (1, first.added, True)
    replica.scheduler.pages.block_pool.clear_cache()
    (second,) = publisher.page_changes()
    assert (second.number, second.added, sorted(second.evicted)) == (2, [], sorted(first.added))


def test_link_is_advertised_as_recent_transfers_show_it() -> None:
    publisher = Publisher(new_replica().scheduler, "me")
    assert publisher.live(0.0).link == LinkCost()  # unknown: the router uses the advertised rate
    publisher.transferred(10_000_000, 0.1)
    assert publisher.live(0.0).link.seconds(10_000_000) == pytest.approx(0.1)
    for _ in range(50):
        publisher.transferred(10_000_000, 0.01)
        publisher.transferred(100_000_000, 0.055)
    assert publisher.live(0.0).link == pytest.approx((0.005, 2e9), rel=0.05)
