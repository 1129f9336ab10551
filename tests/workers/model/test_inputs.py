"""A step's integers are those of its batch, and arrive unchanged on every device."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch

from crossdock.workers.model.inputs import StepInputs, StepTensors
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.schedule.memory.pages import PagePool
from crossdock.workers.schedule.memory.prefix_index import HOLE
from crossdock.workers.schedule.request.batch import Batch, Scheduled, StatePages
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

CPU = torch.device("cpu")


def mixed_step() -> StepInputs:
    decode = Request(Submission("decode", list(range(40, 61)), SamplingParams()))
    prompt = Request(Submission("prompt", list(range(70, 100)), SamplingParams()))
    parts = [Scheduled(decode, 20, 1, [3, 1, 2], True), Scheduled(prompt, 8, 13, [5, 0, 4], False)]
    return StepInputs.of(Batch(parts, 1), 8)[0]


def test_tensors_equal_the_integers() -> None:
    step = mixed_step()
    tensors = step.on(CPU)
    for name, tensor in zip(StepTensors._fields, tensors, strict=True):
        values = np.array([[3, 1, 2], [5, 0, 4]], np.int32) if name == "page_table" else getattr(step, name)
        assert tensor.dtype == getattr(torch, values.dtype.name)
        assert np.array_equal(tensor.numpy(), values), name
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0, "else Triton compiles its kernels again"
    assert step.token_ids.tolist() == [60, *range(78, 91)]
    assert step.positions.tolist() == [20, *range(8, 21)]
    assert step.slots.tolist() == [2 * 8 + 4, *range(8), *range(32, 37)]
    assert step.wanted.tolist() == [0]
    assert step.query_start.tolist() == [0, 1, 14]
    assert step.kv_len.tolist() == [21, 21]
    assert (step.max_query_len, step.num_decodes) == (13, 1)
    assert [tensor.dtype for tensor in tensors] == [torch.int64] * 4 + [torch.int32] * 5


def test_written_pages_are_those_of_rows_and_of_states() -> None:
    step = mixed_step()
    assert step.written_pages(8) == [0, 2, 4]
    states = np.array([[6, 2], [-1, -1]], np.int32)
    assert replace(step, state_write=states).written_pages(8) == [0, 2, 4, 6]
    grouped = np.array([[3, 40], [-1, -1]])
    assert replace(step, slots=grouped, state_write=states).written_pages(8) == [0, 2, 5, 6]
    assert StepInputs.empty(2).written_pages(8) == []


def test_table_has_page_0_past_the_end_of_a_sequence() -> None:
    """The host copies an entry for each page, however wide the table is."""
    request = Request(Submission("a", list(range(400)), SamplingParams()))
    long = Scheduled(request, 390, 1, list(range(1, 60)), True)
    parts = [Scheduled(request, 20, 1, [3, 1, 2, 9], True), long, Scheduled(request, 1, 1, [7], True)]
    step = StepInputs.of(Batch(parts, 3), 8)[0]
    assert len(step.pages.entries) == 3 + 49 + 1
    table = step.on(CPU).page_table
    assert table.tolist() == [[3, 1, 2] + [0] * 46, list(range(1, 50)), [7] + [0] * 48]


@pytest.mark.parametrize("held", [[HOLE, HOLE, 5, 6], array("i", [HOLE, HOLE, 5, 6])], ids=["list", "pool"])
def test_holes_of_a_group_have_the_first_page_after_them(held: Sequence[int]) -> None:
    request = Request(Submission("a", list(range(30)), SamplingParams()))
    parts = [Scheduled(request, 25, 3, [1, 2, 3, 4], True, further_pages=[held])] * 2
    step = StepInputs.of(Batch(parts, 0), 8)[0]
    assert step.on(CPU).page_table.tolist() == [[[1, 2, 3, 4], [5, 5, 5, 6]]] * 2
    assert step.slots.tolist() == [[4 * 8 + 1, 6 * 8 + 1], [4 * 8 + 2, 6 * 8 + 2], [4 * 8 + 3, 6 * 8 + 3]] * 2


def test_model_is_told_how_many_decodes_come_first() -> None:
    """A GPU computes them apart from the chunks; otherwise they take the chunks' larger tiles."""
    model = create_autospec(LoadedModel, instance=True)
    model.device = CPU
    decode = Request(Submission("decode", list(range(9)), SamplingParams()))
    prompt = Request(Submission("prompt", list(range(30)), SamplingParams()))
    for parts, expected in (
        ([Scheduled(decode, 8, 1, [3, 1], True)] * 3, 3),
        ([Scheduled(decode, 8, 1, [3, 1], True)] * 2 + [Scheduled(prompt, 0, 13, [5, 0], False)], 2),
        ([Scheduled(prompt, 0, 13, [5, 0], False), Scheduled(decode, 8, 1, [3, 1], True)], 0),
    ):
        StepInputs.of(Batch(parts, 0), 8)[0].run(model)
        batch = model.forward.call_args.args[2]
        assert (batch.num_decodes, batch.max_kv_len) == (expected, max(part.start + part.num_tokens for part in parts))


def test_pages_of_a_pool_are_those_of_a_list() -> None:
    """And the pool may grow an owner's pages afterwards: the step holds no view of them."""
    request = Request(Submission("a", list(range(40)), SamplingParams()))
    pool = PagePool(20, 8)
    pool.allocate("other", 7)
    pool.allocate("a", 4)
    of_pool = StepInputs.of(Batch([Scheduled(request, 5, 20, pool.pages_of("a"), True)], 0), 8)[0]
    of_list = StepInputs.of(Batch([Scheduled(request, 5, 20, [7, 8, 9, 10], True)], 0), 8)[0]
    pool.allocate("a", 9)
    for name, ours, theirs in zip(StepTensors._fields, of_pool.on(CPU), of_list.on(CPU), strict=True):
        assert torch.equal(ours, theirs), name
    assert of_pool.slots.tolist() == list(range(7 * 8 + 5, 7 * 8 + 25))


def test_states_of_a_step_are_those_of_its_parts() -> None:
    """A part without an earlier state reads none: its row is -1."""
    request = Request(Submission("a", list(range(40)), SamplingParams()))
    states = [StatePages([4, 2], [4, 2]), StatePages((), range(5, 7))]
    step = StepInputs.of(Batch([Scheduled(request, 9, 1, [3, 1], True, state=state) for state in states], 1), 8)[0]
    assert step.state_read.tolist() == [[4, 2], [-1, -1]]
    assert step.state_write.tolist() == [[4, 2], [5, 6]]
    assert step.on(CPU).state_write.tolist() == [[4, 2], [5, 6]]
    assert mixed_step().state_read.shape == mixed_step().state_write.shape == (2, 0)


@pytest.mark.parametrize("samples", [False, True])
def test_wanted_rows_are_those_that_sample(samples: bool) -> None:
    request = Request(Submission("prompt", list(range(30)), SamplingParams()))
    step, rows = StepInputs.of(Batch([Scheduled(request, 0, 8, [1], samples)], 0), 8)
    assert step.on(CPU).wanted.shape == (samples,)
    assert rows == [range(samples)]
