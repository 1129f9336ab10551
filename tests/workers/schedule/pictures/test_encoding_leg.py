"""The part of a request that goes to an encode replica, and how that replica divides it into steps."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import fields
from math import inf
from typing import Any

import pytest

from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.pictures.encoding_leg import encoding_leg
from crossdock.workers.schedule.pictures.items import Item, row_prompt
from crossdock.workers.schedule.submission import Adapter, Leg, SamplingParams, Submission
from tests.workers.schedule.model_free_replica import COST, ModelFreeReplica, new_scheduler


def test_leg_is_a_prompt_in_which_each_item_begins_on_a_page() -> None:
    items = [Item(3, 9, 6, "image", b"a" * 16), Item(12, 4, 4, "video", b"b" * 16)]
    whole = Submission(
        "a",
        list(range(20)),
        SamplingParams(max_tokens=100, min_tokens=7, prompt_logprobs=3, seed=5),
        output_token_ids=[7, 8],
        cache_salt="tenant",
        slo_class="batch",
        epoch=3,
        leg=Leg.RECEIVE,
        may_refuse=False,
        items=items,
        encoder=b"encoder",
        adapter=Adapter("sql", "adapters/sql", "f" * 32),
    )
    leg = encoding_leg(whole, 4)
    assert (leg.prompt_token_ids, leg.output_token_ids, leg.encoder, leg.adapter) == ((0,) * 13, (), b"", None)
    assert leg.leg is Leg.SEND
    assert [(item.start, item.length, item.num_rows) for item in leg.items] == [(0, 6, 6), (8, 4, 4)]
    assert [(item.kind, item.content_hash) for item in leg.items] == [("image", b"a" * 16), ("video", b"b" * 16)]
    assert leg.sampling == SamplingParams(max_tokens=2, ignore_eos=True), "pages of a request that ends are not sent"
    changed = {"prompt_token_ids", "output_token_ids", "sampling", "leg", "items", "encoder", "adapter"}
    for field in fields(Submission):
        if field.name not in changed:
            assert getattr(leg, field.name) == getattr(whole, field.name)
    assert whole.items == items


def replica_of(longest_s: float, capacity: int = 10_000, **config: Any) -> ModelFreeReplica:
    """Return a replica of encoding legs, whose pages have four rows. A row takes a millisecond to encode."""
    encoding = Encoding(capacity, EncoderCost(per_row=1e-3), longest_s=longest_s)
    settings = {"num_pages": 400, "max_model_len": 400, "max_num_batched_tokens": 64, "admission": "queue"} | config
    return ModelFreeReplica(new_scheduler(cost=COST, encoding=encoding, **settings))


def add_leg(replica: ModelFreeReplica, name: str, sizes: Sequence[int]) -> None:
    """Queue a prompt of items of so many rows each, none of which another prompt has."""
    items = list[Item]()
    for number, size in enumerate(sizes):
        content_hash = hashlib.blake2b(f"{name} {number}".encode(), digest_size=16).digest()
        items.append(Item(0, size, size, "image", content_hash))
    items, num_tokens = row_prompt(items, 4)
    replica.add(name, num_tokens, items=items)


@pytest.mark.parametrize(("longest_s", "expected"), [(inf, [3]), (0.02, [1, 1, 1]), (0.03, [2, 1]), (0.001, [1, 1, 1])])
def test_rows_of_an_item_leave_before_the_next_long_one_is_encoded(longest_s: float, expected: list[int]) -> None:
    replica = replica_of(longest_s)
    add_leg(replica, "a", [12, 16, 8])
    batches = replica.run()
    assert [len(batch.encoder.items) for batch in batches] == expected
    if longest_s != inf:
        assert batches[0].limit.startswith("encoder: an item of")


@pytest.mark.parametrize("seed", range(30))
def test_items_that_wait_for_others_are_all_encoded_once(seed: int) -> None:
    """Items have any size, several lie in one page, and the cache holds few: each prompt ends."""
    rng = random.Random(seed)
    longest_s = rng.choice([0.0, 0.005, 0.02, 0.1])
    replica = replica_of(longest_s, rng.choice([24, 60, 10_000]), max_num_batched_tokens=rng.choice([16, 64, 256]))
    legs = {str(number): [rng.randint(1, 20) for _ in range(rng.randint(1, 8))] for number in range(8)}
    for name, sizes in legs.items():
        add_leg(replica, name, sizes)
    batches = replica.run()
    encoded = [item.content_hash for batch in batches for item in batch.encoder.items]
    assert len(set(encoded)) == sum(map(len, legs.values()))
    for batch in batches:
        num_rows = 0
        for number, item in enumerate(batch.encoder.items):
            num_rows += item.num_rows
            if number and num_rows * 1e-3 > longest_s:
                (part,) = (part for part in batch.scheduled if item in part.request.items)
                assert item.start // 4 * 4 <= part.start, "it could have waited: it begins behind the first page"
                assert part.request.items[0] is not item, "it could have waited: its prompt had not begun"
                assert any(other in part.request.items for other in batch.encoder.items[:number])
