"""Large pictures among small ones: room in the encoder's cache goes to requests in their order."""

import random

import pytest

from crossdock.workers.schedule.cost import StepCost
from crossdock.workers.schedule.encoder_cost import EncoderCost
from crossdock.workers.schedule.encoding import Encoding
from crossdock.workers.schedule.items import Item
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


@pytest.mark.parametrize("seed", range(30))
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
    replica = new_timed_replica(cost, encoding=Encoding(4000, EncoderCost(per_row=1e-3)), chunk_policy="adaptive")
    replica.add("stream", 16, max_tokens=60)
    replica.step()
    for name in "ab":
        items = [picture(4 + 24 * number, 20, 10 * ord(name) + number) for number in range(4)]
        replica.add(name, 120, items=items)
    replica.run()
    encoded = [len(batch.encoder.items) for batch in replica.batches]
    assert (max(encoded), sum(encoded)) == (1, 8)
    assert len(replica.token_times["a"]) == len(replica.token_times["b"]) == 1
