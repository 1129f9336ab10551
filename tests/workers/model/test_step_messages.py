"""Other ranks receive every step as the driver made it, though only changes of its page tables travel."""

import random
from dataclasses import replace

import numpy as np
import pytest

from crossdock.workers.model.forward.step_pictures import StepPictures
from crossdock.workers.model.inputs import StepInputs, StepTensors
from crossdock.workers.model.step_messages import StepReceiver, StepSender
from crossdock.workers.schedule.request.batch import Batch, EncoderWork, Scheduled, StatePages
from crossdock.workers.schedule.request.items import Item
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

PAGE_SIZE = 4


def step_of(parts: list[tuple[str, int, int, list[int]]], num_groups: int = 1) -> tuple[StepInputs, list[str]]:
    """Return a step of parts (request, start, tokens, pages), and the names of its requests.

    Each group of layers after the first has the pages in another order.
    """
    scheduled = []
    for name, start, tokens, pages in parts:
        request = Request(Submission(name, list(range(start + tokens)), SamplingParams()))
        further = [pages[group:] + pages[:group] for group in range(1, num_groups)]
        scheduled.append(Scheduled(request, start, tokens, pages, True, further_pages=further))
    return StepInputs.of(Batch(scheduled, 0), PAGE_SIZE)[0], [name for name, *_ in parts]


def check(received: StepInputs, sent: StepInputs) -> None:
    for name in set(StepTensors._fields) - {"page_table"}:
        assert np.array_equal(getattr(received, name), getattr(sent, name)), name
        assert getattr(received, name).dtype == getattr(sent, name).dtype
    assert received.pages.shape == sent.pages.shape
    assert received.pages.counts.tolist() == sent.pages.counts.tolist()
    assert received.pages.entries.tolist() == sent.pages.entries.tolist()
    assert received.pages.entries.dtype == sent.pages.entries.dtype


@pytest.mark.parametrize("num_groups", [1, 3])
def test_any_history_of_steps_is_received(num_groups: int) -> None:
    """Requests come, grow, lose their pages, return with others and end, among more names than there are rows."""
    rng, num_pages = random.Random(3), 50
    sender, receiver = StepSender(PAGE_SIZE), StepReceiver()
    held: dict[str, list[int]] = {}
    for _ in range(300):
        names = rng.sample([f"{number}" for number in range(40)], rng.randrange(1, 9))
        parts = []
        for name in names:
            if rng.random() < 0.2:
                held.pop(name, None)  # preempted, or another request of that name
            pages = held.setdefault(name, [])
            start = max(len(pages) * PAGE_SIZE - rng.randrange(4), 0)
            tokens = rng.randrange(1, 9)
            while len(pages) * PAGE_SIZE < start + tokens:
                pages.append(rng.randrange(num_pages))
            parts.append((name, start, tokens, list(pages)))
        sent, requests = step_of(parts, num_groups)
        check(receiver.unpack(sender.pack(sent, requests)), sent)


def test_pages_of_recurrent_states_are_received() -> None:
    request = Request(Submission("a", list(range(9)), SamplingParams()))
    states = [StatePages((), [4, 7, 1]), StatePages([2, 3, 5], [2, 3, 5])]
    parts = [Scheduled(request, 0, 9, [0, 8, 6], True, state=state) for state in states]
    sent = StepInputs.of(Batch(parts, 0), PAGE_SIZE)[0]
    received = StepReceiver().unpack(StepSender(PAGE_SIZE).pack(sent, ["a", "b"]))
    check(received, sent)
    assert received.state_read.tolist() == [[-1, -1, -1], [2, 3, 5]]


def test_new_sender_needs_no_new_receiver() -> None:
    """A receiver's rows may hold anything where a sender begins: nothing is taken for known, page 0 neither."""
    receiver = StepReceiver()
    for pages in ([7, 8, 9], [0, 0, 5], [1, 0, 0]):
        sent, requests = step_of([("a", 8, 4, pages)])
        check(receiver.unpack(StepSender(PAGE_SIZE).pack(sent, requests)), sent)


def test_message_of_a_decode_has_no_page_that_was_sent() -> None:
    sender, pages = StepSender(PAGE_SIZE), list(range(2000))
    sizes = [len(sender.pack(*step_of([("a", start, 1, pages)]))) for start in (7990, 7991, 7992)]
    assert sizes[0] > 2 * 4 * 1998, "a place and a page for each entry of a new request"
    assert sizes[1] < 200
    assert sizes[1] < sizes[2] < 200, "a new page"


@pytest.mark.parametrize("axes", [1, 3])
def test_rows_and_positions_of_pictures_are_received_without_embeddings(axes: int) -> None:
    """The message has a row for each token at most, and three positions: no tensors of the pictures."""
    num_tokens = 900
    step, requests = step_of([("a", 0, num_tokens, list(range(num_tokens // PAGE_SIZE)))])
    rows = np.arange(5, num_tokens, 2)
    positions = np.arange(3 * num_tokens).reshape(3, -1) if axes == 3 else None
    item = Item(5, 895, len(rows), "image", b"h" * 16, {"pixel_values": np.ones((4 * len(rows), 1176), np.float32)})
    key_end = np.arange(1, num_tokens + 1, dtype=np.int32) if axes == 1 else None
    pictures = StepPictures(EncoderWork((b"e" * 16,), [item]), rows, [(b"h" * 16, 0, len(rows))], positions, key_end)
    sender, receiver = StepSender(PAGE_SIZE), StepReceiver()
    sender.pack(step, requests)
    plain = sender.pack(step, requests)
    sent = replace(step, pictures=pictures)
    message = sender.pack(sent, requests)
    assert len(message) <= len(plain) + 8 * len(rows) + (8 * 3 if axes == 3 else 4) * num_tokens + 32
    receiver.unpack(StepSender(PAGE_SIZE).pack(step, requests))
    received = receiver.unpack(message)
    check(received, sent)
    assert received.pictures is not None
    assert received.pictures.is_read
    assert np.array_equal(received.pictures.rows, rows)
    assert (received.pictures.positions is None) == (axes == 1)
    if positions is not None:
        assert np.array_equal(received.pictures.positions, positions)
    if key_end is not None:
        assert received.pictures.key_end is not None
        assert np.array_equal(received.pictures.key_end, key_end)
    assert not received.pictures.work.items


def test_step_that_only_forgets_embeddings_is_one_of_tokens_to_other_ranks() -> None:
    step, requests = step_of([("a", 0, 4, [1])])
    sent = replace(step, pictures=StepPictures(EncoderWork((b"e" * 16,), ()), np.zeros(0, np.int64), ()))
    assert not sent.reads_pictures
    assert StepReceiver().unpack(StepSender(PAGE_SIZE).pack(sent, requests)).pictures is None
