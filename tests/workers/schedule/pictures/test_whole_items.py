"""Pictures whose rows attend in both directions: a chunk never ends inside one, and everything still ends."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.schedule.ahead import assume_ended
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import Encoding, chunk_with_items
from crossdock.workers.schedule.pictures.whole_items import least_tokens, most_tokens
from crossdock.workers.schedule.policies.chunking import Candidate, ChunkBudget
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import InvalidField
from tests.workers.schedule.model_free_replica import (
    ModelFreeReplica,
    chunk_sizes,
    new_request,
    new_scheduler,
    new_timed_replica,
)
from tests.workers.schedule.pictures.test_encoding import Device, item, run, with_items


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[Item], int]:
    """Draw the items of a prompt, and its length."""
    items, place = list[Item](), 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), max_size=6)):
        items.append(item(place + gap, length))
        place += gap + length
    return items, place + draw(st.integers(1, 30))


@given(prompts(), st.data(), st.sampled_from([1, 4, 8]))
@settings(max_examples=80, deadline=None)
def test_chunk_ends_at_the_last_place_where_it_may(
    prompt: tuple[list[Item], int], data: st.DataObject, page_size: int
) -> None:
    items, end = prompt
    start = data.draw(st.integers(0, end - 1))
    stop = data.draw(st.integers(start, end))
    cut = {position for each in items for position in range(each.start + 1, each.end)}
    allowed = {position for position in range(0, end + page_size, page_size) if position not in cut}
    allowed |= {each.end for each in items}
    later = [position for position in allowed if start < position <= stop]
    assert most_tokens(items, start, stop, page_size) == max(later, default=start) - start
    first = min([position for position in allowed if position > start] + [end])
    assert least_tokens(items, start, end, page_size) == first - start


def test_item_is_computed_by_one_chunk_that_may_end_with_it() -> None:
    scheduler = new_scheduler(max_model_len=200, encoding=Encoding(100, keeps_items_whole=True), max_num_seqs=2)
    replica = ModelFreeReplica(scheduler)
    replica.add("a", 100, items=with_items((9, 16, 1), (26, 28, 2), (55, 28, 3)))
    batches = replica.run()
    assert chunk_sizes(batches, "a") == [25, 29, 30, 16]  # no page ends between the items
    assert [[each.content_hash[0] for each in batch.encoder.items] for batch in batches] == [[1], [2], [3], []]


def test_prefix_hit_may_end_inside_an_item() -> None:
    scheduler = new_scheduler(max_model_len=200, encoding=Encoding(100, keeps_items_whole=True), num_pages=60)
    replica = ModelFreeReplica(scheduler)
    items = with_items((10, 20, 1))
    replica.add("a", [7] * 29 + [3] * 10, items=[item(10, 20, 1)])
    replica.run()
    for owner in ("b", "c"):
        replica.add(owner, [7] * 29 + [3] * 2, items=items)
    first, *_ = replica.run()
    assert {part.request.id: (part.start, part.num_tokens) for part in first.scheduled} == {"b": (28, 3), "c": (28, 3)}
    assert len(first.encoder.items) == 0  # the embeddings are in memory since the first prompt


def test_item_that_no_chunk_has_room_for_is_refused_with_the_setting() -> None:
    scheduler = new_scheduler(encoding=Encoding(100, keeps_items_whole=True), max_num_batched_tokens=32, max_num_seqs=8)
    request = new_request("a", [7] * 40)
    request.items = with_items((6, 22, 1))  # from the page boundary at 4
    scheduler.add(request)
    request = new_request("b", [7] * 40)
    request.items = with_items((7, 22, 1))
    with pytest.raises(InvalidField, match=r"one chunk of 25 tokens .* room for 24 \(max_num_batched_tokens - "):
        scheduler.add(request)
    scheduler = new_scheduler(encoding=Encoding(100, keeps_items_whole=True), max_prefill_tokens=20)
    with pytest.raises(InvalidField, match=r"room for 20 \(max_prefill_tokens\)"):
        scheduler.add(request)


@pytest.mark.parametrize("is_whole", [True, False])
def test_item_longer_than_any_slack_is_computed_for_the_class_that_streams_pay_for(is_whole: bool) -> None:
    """Streams leave time for a page. A prompt of their class gets its picture, and one of a lower class waits."""
    encoding = Encoding(4000, EncoderCost(per_embedding_token=1.0), keeps_items_whole=is_whole)
    replica = new_timed_replica(encoding=encoding, chunk_policy="adaptive")
    replica.add("stream", 16, "standard", max_tokens=50)
    replica.step()
    replica.add("urgent", 240, "standard", items=with_items((10, 100, 1), (111, 100, 2)))
    replica.add("patient", 240, "batch", items=with_items((10, 100, 3)))
    device = Device(4000)
    while any(replica.scheduler.table.get(name) for name in ("stream", "urgent")):
        device.run(replica.step().batch)
        request = replica.scheduler.table.get("patient")
        assert request is not None
        assert request.num_computed_tokens <= 16 or replica.scheduler.table.get("stream") is None
    if is_whole:
        assert chunk_sizes(replica.batches, "urgent")[:2] == [8, 102]  # a page or two, then the picture
        encoding_steps = [batch for batch in replica.batches if batch.encoder.items]
        assert [(len(batch.encoder.items), batch.num_decodes) for batch in encoding_steps] == [(1, 1), (1, 1)]
    run(replica)
    assert [len(batch.encoder.items) for batch in replica.batches if batch.encoder.items] == [1, 1, 1]


def test_chunk_without_time_for_an_item_ends_with_the_one_before() -> None:
    """Both lie in one page, so that no page ends between them."""
    encoding = Encoding(500, EncoderCost(per_embedding_token=1.0), keeps_items_whole=True)
    request = new_request("a", [7] * 300)
    request.items = with_items((1, 9, 1), (11, 100, 2))

    budget = ChunkBudget(300, 200.0, cost=StepCost(base=0.0, per_prefill_token=1.0))
    chunk = chunk_with_items(encoding, request, Candidate(0, 300, least=1), budget, 0, 4)
    assert chunk == (10, "encoder: an item of 100 rows takes 109000 ms")


def windowed() -> tuple[ModelFreeReplica, Request]:
    """Return a replica whose layers see five tokens, and a prompt of which 32 tokens can be computed in a step."""
    encoding = Encoding(100, keeps_items_whole=True)
    scheduler = new_scheduler(40, windows=(5,), max_model_len=120, encoding=encoding, max_num_seqs=2)
    replica = ModelFreeReplica(scheduler)
    return replica, replica.add("a", 100, items=with_items((34, 16, 1)))


def test_chunk_ahead_of_the_pages_that_a_window_returns_ends_before_the_item() -> None:
    replica, request = windowed()
    scheduler = replica.scheduler
    batch = scheduler.schedule(0.0)
    with assume_ended(scheduler.table, batch, 0.0):
        assert request.num_computed_tokens == 32
        assert 34 < scheduler.pages.num_tokens_held(request.owner) < 50
        assert not scheduler.schedule(0.0)
    scheduler.update(batch, {}, 0.0)
    assert chunk_sizes(replica.run(), "a") == [32, 32, 4]


def test_item_whose_pages_other_requests_took_gets_them_as_soon_as_there_are_some() -> None:
    replica, request = windowed()
    replica.step()
    replica.scheduler.pages.trim(request.owner, 10)  # 40 tokens: not to the end of the item
    assert chunk_sizes(replica.run(), "a") == [20, 32, 16]


def test_whole_items_beside_recurrent_states_are_refused_at_the_start() -> None:
    """A chunk that must end where a state is kept, and may end nowhere inside a picture, could have no end."""
    with pytest.raises(ValueError, match="recurrent layers takes no pictures"):
        new_scheduler(encoding=Encoding(100, keeps_items_whole=True), state_pages=2)
    new_scheduler(encoding=Encoding(100), state_pages=2)
