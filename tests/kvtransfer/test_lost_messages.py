"""Any message may be lost with its connection. Whichever one is, both sides of its transfer end, and no page stays
granted: without any further call by their owners, and with all processes alive."""

from collections.abc import Callable, Iterator

import pytest

from crossdock.kvtransfer.messages import TransferMessage
from tests.kvtransfer.world import DEADLINE, Attempt, World

Story = Callable[[World], Iterator[None]]


def shipped(world: World) -> Iterator[None]:
    """Ship a prompt of five pages in three chunks. The target has the first page, and needs a while to grant."""
    yield world.begin("a", 0, 0, 19, 1, "both")
    yield world.offer(0, 0)
    yield world.offer(0, 1)
    yield world.wait_for_room(0)
    yield world.grant(0)
    for tokens in (8, 3, 8):
        for rank in (0, 1):
            yield world.compute(0, rank, tokens)


def shipped_without_pages(world: World) -> Iterator[None]:
    """Ship a prompt whose pages have all been written when its last token is computed: the result travels alone."""
    yield world.begin("a", 1, 0, 8, 0, "both")
    yield world.offer(0, 0)
    yield world.grant(0)
    yield world.compute(0, 0, 7)
    yield world.compute(0, 0, 1)


def shipped_before_it_is_expected(world: World) -> Iterator[None]:
    yield world.begin("a", 0, 0, 9, 0, "source")
    yield from offered(world)
    yield world.expect(0)
    yield world.grant(0)


def expected_before_it_is_shipped(world: World) -> Iterator[None]:
    yield world.begin("a", 0, 0, 9, 0, "target")
    yield world.ship(0)
    yield from offered(world)
    yield world.grant(0)


def cancelled_at_the_target(world: World) -> Iterator[None]:
    yield world.begin("a", 0, 0, 19, 0, "both")
    yield from offered(world)
    yield world.grant(0)
    yield world.compute(0, 0, 8)
    yield world.cancel_expect(0)


def cancelled_at_the_target_before_the_grant(world: World) -> Iterator[None]:
    yield world.begin("a", 0, 0, 19, 0, "both")
    yield from offered(world)
    yield world.cancel_expect(0)


def cancelled_at_the_sources(world: World) -> Iterator[None]:
    yield world.begin("a", 0, 0, 19, 0, "both")
    yield from offered(world)
    yield world.grant(0)
    yield world.compute(0, 0, 8)
    yield world.cancel_ship(0, 0)
    yield world.cancel_ship(0, 1)


def cancelled_at_the_sources_before_the_offer(world: World) -> Iterator[None]:
    """The prefill replica gives up while the request waits there. The target has granted nothing, and has no deadline
    of its own."""
    yield world.begin("a", 0, 0, 19, 0, "both")
    yield world.cancel_ship(0, 0)
    yield world.cancel_ship(0, 1)


def never_shipped(world: World) -> Iterator[None]:
    """The prefill replica refuses the request, and the decode replica is told to give up."""
    yield world.begin("a", 0, 0, 9, 0, "target")
    yield world.cancel_expect(0)


def never_expected(world: World) -> Iterator[None]:
    yield world.begin("a", 0, 0, 9, 0, "source")
    yield from offered(world)


def replaced_by_a_later_attempt(world: World) -> Iterator[None]:
    yield world.begin("a", 0, 0, 9, 0, "both")
    yield from offered(world)
    yield world.grant(0)
    yield world.compute(0, 0, 4)
    yield world.begin("a", 0, 0, 9, 0, "both")


def offered(world: World) -> Iterator[None]:
    for rank in (0, 1):
        yield world.offer(0, rank)


STORIES: tuple[Story, ...] = (
    shipped,
    shipped_without_pages,
    shipped_before_it_is_expected,
    expected_before_it_is_shipped,
    cancelled_at_the_target,
    cancelled_at_the_target_before_the_grant,
    cancelled_at_the_sources,
    cancelled_at_the_sources_before_the_offer,
    never_shipped,
    never_expected,
    replaced_by_a_later_attempt,
)


def play(story: Story, lost: set[int]) -> tuple[World, list[TransferMessage]]:
    """Play the story and let ten minutes pass. Messages whose numbers, in their order, are in `lost` never arrive."""
    world, messages = World(), list[TransferMessage]()

    def go_on() -> None:
        while ready := [key for key, waiting in world.channel.items() if waiting]:
            for key in ready:
                messages.append(world.channel[key][0])
                if len(messages) - 1 in lost:
                    world.channel[key].popleft()
                else:
                    world.deliver_one(key)
        for write in list(world.writes):
            world.land_one(write)
            world.complete_one(write)
        world.pass_time(0.05)

    for _ in story(world):
        go_on()
    for second in range(600):
        go_on()
        for attempt in world.attempts.values():
            owners_go_on(world, attempt, is_reminder=second % 2 == 0)
        world.pass_time(0.95)
    return world, messages


def owners_go_on(world: World, attempt: Attempt, *, is_reminder: bool) -> None:
    """Do what both replicas do with every transfer that is under way: offer, grant, compute, and remind the other side
    that this one is there."""
    key, receiver = attempt.key, attempt.goal.receiver
    expected = receiver._expected.get(key)
    if expected is not None and not expected.is_stopping:
        if attempt.is_offered and not attempt.is_granted:
            world.grant_to(attempt)
        elif is_reminder:
            world.run(attempt.goal, receiver.wait(*key, DEADLINE, world.now))
    for source in attempt.sources:
        if key in source.sender._shipments:
            world.run(source, source.sender.offer(*key))
            world.compute_at(attempt, source, attempt.num_tokens)
            if is_reminder:
                world.run(source, source.sender.wait(*key, DEADLINE))


def assert_ended(world: World) -> None:
    for source in world.sources.values():
        assert len(source.sender) == 0, "the source still reads pages"
    for goal in world.goals.values():
        assert not goal.owners, "pages stay in quarantine"
        assert len(goal.receiver) == 0
        assert goal.receiver.next_deadline == float("inf")
    for attempt in world.attempts.values():
        if attempt.is_shipped:
            assert all(attempt.num_released[source.name] for source in attempt.sources)
        if attempt.is_expected:
            assert attempt.has_arrived or attempt.has_stopped


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_transfer_that_loses_any_one_message_or_any_two_ends_on_both_sides(story: Story) -> None:
    world, messages = play(story, set())
    assert_ended(world)
    for first in range(len(messages)):
        assert_ended(play(story, {first})[0])
        for second in range(first + 1, min(first + 4, len(messages) + 2)):
            assert_ended(play(story, {first, second})[0])


def test_transfers_that_lose_no_message_arrive() -> None:
    for story in (shipped, shipped_without_pages, shipped_before_it_is_expected, expected_before_it_is_shipped):
        world, messages = play(story, set())
        assert all(attempt.has_arrived for attempt in world.attempts.values())
        assert {"Hello", "Offer", "Wait", "Grant", "Pages"} <= {type(message).__name__ for message in messages}
