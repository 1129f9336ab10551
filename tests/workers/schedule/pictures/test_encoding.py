"""Pictures in the scheduler: encoded once, just before the chunk that reads them, and within the streams' slack."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost, EncoderCostFit
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.policies.chunking import SLACK_SHARE
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.items import Item, items_in, salted
from crossdock.workers.schedule.request.page_hashes import hash_pages
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import InvalidField
from tests.workers.schedule.model_free_replica import (
    COST,
    LONG_STEPS,
    ModelFreeReplica,
    new_request,
    new_scheduler,
    new_timed_replica,
)

ENCODER = EncoderCost(base=1e-3, per_embedding_token=5e-4)


def item(start: int, length: int, content: int = 0) -> Item:
    return Item(start, length, length, "image", content.to_bytes(16, "little"))


def with_items(*spans: tuple[int, int, int]) -> list[Item]:
    """Return items by (start, length, content)."""
    return [item(*span) for span in spans]


@dataclass
class Device:
    """The embeddings on the device, as the steps that it computes change them."""

    capacity: int
    rows: dict[bytes, int] = field(default_factory=dict)
    num_encoded: int = 0

    def run(self, batch: Batch) -> None:
        for content_hash in batch.encoder.evicted:
            del self.rows[content_hash]
        for each in batch.encoder.items:
            assert each.content_hash not in self.rows, "encoded twice"
            self.rows[each.content_hash] = each.num_embedding_tokens
            self.num_encoded += 1
        for part in batch.scheduled:
            for each in items_in(part.request.items, part.start, part.start + part.num_tokens):
                assert each.content_hash in self.rows, "a chunk reads embeddings that are not there"


def run(replica: ModelFreeReplica, capacity: int = 10_000) -> Device:
    device = Device(capacity)
    while replica.scheduler.table.has_work:
        device.run(replica.step().batch)
        assert len(replica.batches) < 5000
    return device


def test_page_hashes_name_every_page_that_holds_a_token_of_the_item() -> None:
    tokens, size = list(range(40)), 4
    plain, one, other = (hash_pages(tokens, size, items=items) for items in ([], [item(10, 9, 1)], [item(10, 9, 2)]))
    assert plain[:2] == one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])
    assert not set(plain[2:]) & set(one[2:])
    assert hash_pages(tokens, size, items=[item(10, 9, 1)]) == one
    assert hash_pages(tokens, size, items=[item(11, 8, 1)])[2] != one[2]  # the same picture one token later
    assert hash_pages(tokens, size, known=one[:5], items=[item(10, 9, 1)]) == one


def test_salts_keep_embeddings_apart() -> None:
    items = with_items((4, 20, 1), (30, 20, 2))
    plain, one, other = (salted(items, salt) for salt in ("", "one", "other"))
    assert plain == items
    assert len({item.content_hash for group in (plain, one, other) for item in group}) == 6
    assert [item.content_hash for item in salted(items, "one")] == [item.content_hash for item in one]
    assert [(item.start, item.num_embedding_tokens) for item in one] == [(4, 20), (30, 20)]


def test_first_token_is_predicted_with_the_pictures_that_are_not_in_memory() -> None:
    scheduler = new_scheduler(max_model_len=200, cost=COST, encoding=Encoding(100, ENCODER), max_num_batched_tokens=64)
    request = new_request("a", [7] * 60)
    text = scheduler.forecast.prefill_seconds(request)
    request.items = with_items((4, 20, 1), (30, 20, 2))
    assert scheduler.forecast.prefill_seconds(request) == pytest.approx(text + 1e-3 + 40 * 5e-4)
    replica = ModelFreeReplica(scheduler)
    replica.add("b", 60, items=with_items((4, 20, 1)))
    replica.run()
    assert scheduler.forecast.prefill_seconds(request) == pytest.approx(text + 1e-3 + 20 * 5e-4)


def test_computed_seconds_count_the_encoder_and_scored_prompts_as_the_backlog_does() -> None:
    """The scaler adds computed and waiting seconds: a pool that encodes all the time must not look idle."""

    def computed(request: Request) -> float:
        scheduler = new_scheduler(max_model_len=200, cost=LONG_STEPS, encoding=Encoding(100, ENCODER))
        scheduler.forecast.scored_factor = 1.5
        scheduler.add(request)
        ModelFreeReplica(scheduler).run()
        return scheduler.table.prefilled.seconds

    text = computed(new_request("a", [7] * 60))
    pictured = new_request("a", [7] * 60)
    pictured.items = with_items((4, 20, 1), (30, 20, 2))
    assert computed(pictured) == pytest.approx(text + 1e-3 + 40 * 5e-4)
    assert computed(new_request("a", [7] * 60, prompt_logprobs=0)) == pytest.approx(1.5 * text)


def test_item_is_encoded_in_the_step_of_the_first_chunk_that_reads_it() -> None:
    scheduler = new_scheduler(max_model_len=200, encoding=Encoding(100))
    replica = ModelFreeReplica(scheduler)
    replica.add("a", 100, items=with_items((40, 20, 1), (62, 30, 2)))
    encoded = [[each.content_hash[0] for each in batch.encoder.items] for batch in replica.run()]
    assert encoded == [[], [1, 2], [], []]


def test_same_picture_of_two_requests_is_encoded_once() -> None:
    scheduler = new_scheduler(max_model_len=200, encoding=Encoding(100))
    replica = ModelFreeReplica(scheduler)
    for name in "ab":
        replica.add(name, 60, items=with_items((4, 20, 1), (30, 20, 1)))
    assert run(replica).num_encoded == 1
    assert scheduler.encoding.totals.num_hits == 1  # of the second request; a request counts a picture once


def test_prefix_hit_past_a_picture_encodes_nothing() -> None:
    scheduler = new_scheduler(max_model_len=200, encoding=Encoding(100))
    replica = ModelFreeReplica(scheduler)
    prompt = [7] * 60
    replica.add("a", prompt, items=with_items((4, 20, 1)))
    replica.run()
    scheduler.encoding.clear()
    replica.add("b", prompt, items=with_items((4, 20, 1)))
    replica.add("c", prompt, items=with_items((4, 20, 2)))
    batches = replica.run()
    assert [each.content_hash[0] for batch in batches for each in batch.encoder.items] == [2]
    cached = {part.request.id: part.request.num_cached_tokens for batch in batches for part in batch.scheduled}
    assert cached == {"b": 56, "c": 4}


def test_pictures_wait_for_slack_and_streams_keep_their_pace() -> None:
    """Eight pictures of 21 ms each arrive beside a stream of 60 ms a token: no gap is longer than 60 ms."""
    paced = new_timed_replica(encoding=Encoding(4000, ENCODER), chunk_policy="adaptive")
    paced.add("stream", 16, "standard", max_tokens=60)
    for _ in range(4):
        paced.step()
    tpot = paced.scheduler.config.slo_classes[1].tpot_s
    spans = [(4 + 50 * number, 20, number) for number in range(8)]
    paced.add("pictures", 420, "batch", items=with_items(*spans))
    device = run(paced)
    assert device.num_encoded == 8
    times = paced.token_times["stream"]
    longest = max(later - earlier for earlier, later in pairwise(times[3:]))
    assert longest <= 3 * tpot * SLACK_SHARE + 1e-9  # LONGEST_GAP is below 3
    encoding_steps = [batch for batch in paced.batches if batch.encoder.items]
    assert len(encoding_steps) > 1  # not all at once
    assert any(batch.limit.startswith("encoder") for batch in paced.batches)


def test_picture_in_memory_makes_room_for_one_that_the_same_chunk_reads_first() -> None:
    encoding = Encoding(20)
    scheduler = new_scheduler(max_model_len=200, encoding=encoding, max_num_batched_tokens=100, caching=False)
    replica = ModelFreeReplica(scheduler)
    replica.add("known", 20, items=with_items((0, 10, 1)))
    device = run(replica)
    replica.add("both", 60, items=with_items((0, 15, 2), (30, 10, 1)))
    most = 0
    while scheduler.table.has_work:
        device.run(replica.step().batch)
        most = max(most, sum(device.rows.values()))
    assert most <= encoding.capacity


def test_item_larger_than_the_cache_is_refused_with_the_flag() -> None:
    scheduler = new_scheduler(encoding=Encoding(10))
    request = new_request("a", [7] * 40)
    request.items = with_items((3, 11, 1))
    with pytest.raises(InvalidField, match="--mm-encoder-cache"):
        scheduler.add(request)
    with pytest.raises(InvalidField, match="encodes none"):
        new_scheduler().add(request)


def batches_of(sizes: Sequence[int]) -> list[Item]:
    return with_items(*((0, size, number) for number, size in enumerate(sizes)))


def test_cost_is_learnt_from_measured_batches() -> None:
    truth = EncoderCost(base=2e-3, per_embedding_token=1e-4, per_square=1e-7)
    sweep = [(sizes, truth.seconds(batches_of(sizes))) for sizes in ([4], [64], [64] * 4, [256])]
    fit = EncoderCostFit(sweep)
    for sizes in ([16], [100, 7], [1000]):
        assert fit.cost.seconds(batches_of(sizes)) == pytest.approx(truth.seconds(batches_of(sizes)), rel=0.05)
    slower = EncoderCost(base=4e-3, per_embedding_token=2e-4, per_square=2e-7)
    rng = random.Random(0)
    for _ in range(600):
        sizes = [rng.choice([16, 64, 256])] * rng.randint(1, 3)
        fit.observe(batches_of(sizes), slower.seconds(batches_of(sizes)))
    assert fit.cost.seconds(batches_of([64])) == pytest.approx(slower.seconds(batches_of([64])), rel=0.15)


def test_outliers_do_not_count_until_they_are_the_rule() -> None:
    truth = EncoderCost(base=2e-3, per_embedding_token=1e-4)
    fit = EncoderCostFit([(sizes, truth.seconds(batches_of(sizes))) for sizes in ([4], [64], [256])])
    before = fit.cost
    fit.observe(batches_of([64]), 0.04)
    assert fit.cost == before
    for _ in range(50):
        fit.observe(batches_of([64]), 0.04)
    assert fit.cost.seconds(batches_of([64])) > 3 * before.seconds(batches_of([64]))
