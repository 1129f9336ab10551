"""Large pictures among small ones: room in the encoder's cache goes to requests in their order, and by urgency."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.pictures.encoder_cost import EncoderCost
from crossdock.workers.schedule.pictures.encoding import Encoding
from crossdock.workers.schedule.request.items import Item
from tests.workers.schedule.model_free_replica import ModelFreeReplica, new_scheduler, new_timed_replica


def picture(start: int, rows: int, content: int) -> Item:
    return Item(start, rows, rows, "image", content.to_bytes(16, "little"))


def busy_replica(capacity: int = 20) -> ModelFreeReplica:
    """Return a replica that computes chunks of 16 tokens of two prompts in each step."""
    scheduler = new_scheduler(encoding=Encoding(capacity), long_prefill_token_threshold=16, caching=False)
    return ModelFreeReplica(scheduler)


@pytest.mark.parametrize("is_shared", [False, True])
def test_large_urgent_picture_is_encoded_while_small_ones_keep_coming(is_shared: bool) -> None:
    """Each small prompt ends its first chunk inside its picture, in the step in which the one before ends."""
    replica = busy_replica()
    for number in range(44):
        first = 16 * (number == 0)  # tokens: the prompts after it begin and end in turns
        items = [picture(first + 12, 8, 1 if is_shared else number + 1)]
        replica.add(f"small {number}", first + 32, "batch", items=items)
        if number == 13:
            large = replica.add("large", 32, "interactive", items=[picture(0, 18, 100)])
        if number > 3:
            replica.step()
    assert large.finish_reason is not None
    assert sum(name.startswith("small") for name in replica.token_times) > 20  # the others go on


@pytest.mark.parametrize("seed", range(8))
def test_most_urgent_picture_waits_no_longer_than_those_that_others_are_inside(seed: int) -> None:
    """Prompts of any shape keep coming; whichever one is interactive ends within the steps of those before it."""
    rng = random.Random(seed)
    replica = busy_replica(rng.choice([12, 20, 40]))
    number, waited, urgent = 0, 0, None
    while number < 150:
        slo_class = "batch"
        if urgent is None or urgent.finish_reason is not None:
            slo_class, waited = "interactive", 0
        length = rng.randint(10, 60)
        start = rng.randint(0, length - 10)
        rows = rng.randint(10, min(length - start, 12)) if slo_class == "interactive" else rng.randint(1, 10)
        request = replica.add(str(number), length, slo_class, items=[picture(start, rows, 20 * number + rows)])
        urgent = request if slo_class == "interactive" else urgent
        replica.step()
        number, waited = number + 1, waited + 1
        assert waited <= 12
    replica.run()


def test_step_without_time_encodes_one_picture_although_more_tokens_are_free() -> None:
    """A step with a chunk takes 10 ms at least, so that 100 tokens cost no more than a page: two pictures' tokens."""
    cost = StepCost(base=1e-3, per_prefill_token=1e-5, per_decode=1e-4, least_with_chunk=10e-3)
    replica = new_timed_replica(
        cost, encoding=Encoding(4000, EncoderCost(per_embedding_token=1e-3)), chunk_policy="adaptive"
    )
    replica.add("stream", 16, max_tokens=60)
    replica.step()
    for name in "ab":
        items = [picture(4 + 24 * number, 20, 10 * ord(name) + number) for number in range(4)]
        replica.add(name, 120, items=items)
    replica.run()
    encoded = [len(batch.encoder.items) for batch in replica.batches]
    assert (max(encoded), sum(encoded)) == (1, 8)
    assert len(replica.token_times["a"]) == len(replica.token_times["b"]) == 1


def replica_without_slack(capacity: int, **config: Any) -> ModelFreeReplica:
    """Return a replica whose running streams leave less urgent prompts no time, once a prompt is inside its picture."""
    encoding = Encoding(capacity, EncoderCost(per_embedding_token=1e-4))
    replica = new_timed_replica(encoding=encoding, chunk_policy="adaptive", caching=False, **config)
    replica.add("patient", 400, "batch", items=[picture(0, 400, 1)])
    replica.step()
    for number in range(4):
        replica.add(f"stream {number}", 4, "interactive", max_tokens=400)
    return replica


def test_urgent_picture_takes_the_room_of_a_less_urgent_one_that_streams_keep_waiting() -> None:
    replica = replica_without_slack(capacity=400)
    patient = replica.scheduler.table.get("patient")
    assert patient is not None
    for _ in range(8):
        replica.step()
    inside = patient.num_computed_tokens
    assert 0 < inside < 400
    urgent = replica.add("urgent", 40, "interactive", items=[picture(4, 20, 2)])
    while urgent.finish_reason is None:
        replica.step()
        assert replica.now < 1.0
    assert patient.num_computed_tokens == inside
    encoded = Counter(each.content_hash[0] for batch in replica.run() for each in batch.encoder.items)
    assert encoded == {1: 1}  # again: the rest of the prompt reads its rows
    assert len(replica.token_times["patient"]) == 1


def test_picture_takes_no_room_of_one_as_urgent() -> None:
    replica = replica_without_slack(capacity=400)
    replica.add("equal", 40, "batch", items=[picture(4, 20, 2)])
    batches = replica.run()
    assert [each.content_hash[0] for batch in batches for each in batch.encoder.items] == [2]
    assert replica.token_times["patient"] < replica.token_times["equal"]


def test_starving_picture_takes_room_and_keeps_it_from_more_urgent_ones() -> None:
    replica = replica_without_slack(capacity=400, starvation_s=6.0)
    for _ in range(8):
        replica.step()
    replica.now += 7.0  # the replica stood still, and the prompt inside its picture starves
    urgent = replica.add("urgent", 40, "interactive", items=[picture(4, 20, 2)])
    replica.run()
    assert urgent.finish_reason is not None
    assert replica.token_times["patient"] < replica.token_times["urgent"]
    assert sum(len(batch.encoder.items) for batch in replica.batches) == 2  # none is encoded again


def random_prompts(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield prompts of all classes; in most of them are pictures."""
    for number in range(count):
        items, start = [], rng.randint(0, 8)
        length = rng.randint(start + 1, 60)
        while start < length - 4 and rng.random() < 0.8:
            rows = rng.randint(1, min(length - start, 20))
            items.append(picture(start, rows, 100 * number + rows if rng.random() < 0.8 else rows))
            start += rows + rng.randint(1, 5)
        slo_class = rng.choice(["interactive", "standard", "batch", "batch"])
        yield {"prompt": length, "slo_class": slo_class, "max_tokens": rng.choice([1, 1, 30]), "items": items}


@pytest.mark.parametrize("seed", range(8))
def test_most_urgent_prompt_has_a_chunk_in_each_step(seed: int) -> None:
    """Whatever room less urgent prompts hold, and however little time streams leave these to give it back."""
    rng = random.Random(seed)
    encoding = Encoding(rng.choice([20, 30, 60]), EncoderCost(per_embedding_token=1e-4))
    replica = new_timed_replica(encoding=encoding, chunk_policy="adaptive", caching=False, starvation_s=1e6)
    prompts, urgent, num_urgent = random_prompts(rng, 200), None, 0
    while (more := next(prompts, None)) is not None:
        if more["slo_class"] == "interactive":
            replica.add(f"stream {len(replica.batches)}", 1, "interactive", max_tokens=rng.randint(1, 30))
            more["slo_class"] = "batch"
        if len(replica.scheduler.table.requests()) < 12:
            replica.add(f"other {len(replica.batches)}", **more)
        if urgent is None and more["items"] and rng.random() < 0.3:
            more |= {"slo_class": "interactive", "max_tokens": 1, "priority_in_class": -1}
            urgent, num_urgent = replica.add(f"urgent {len(replica.batches)}", **more), num_urgent + 1
        batch = replica.step().batch
        if urgent is not None:
            assert any(part.request is urgent for part in batch.scheduled)
            urgent = None if urgent.finish_reason else urgent
    assert num_urgent > 10
    replica.run()
