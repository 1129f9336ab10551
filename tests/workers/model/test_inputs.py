"""A step's integers arrive unchanged at every rank and on every device."""

from unittest.mock import create_autospec

import numpy as np
import torch

from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.model import PagedModel
from crossdock.workers.schedule.batch import Batch, Scheduled
from crossdock.workers.schedule.request import Request, SamplingParams


def mixed_step() -> StepInputs:
    decode = Request("decode", list(range(40, 61)), SamplingParams())
    prompt = Request("prompt", list(range(70, 100)), SamplingParams())
    parts = [Scheduled(decode, 20, 1, [3, 1, 2], True), Scheduled(prompt, 8, 13, [5, 0, 4], False)]
    return StepInputs.of(Batch(parts, 1), 8)[0]


def test_tensors_equal_the_packed_integers() -> None:
    step = mixed_step()
    received = StepInputs.unpack(step.pack())
    for tensors in (step.on(torch.device("cpu")), received.on(torch.device("cpu"))):
        for name in StepInputs.__slots__:
            array, tensor = getattr(step, name), getattr(tensors, name)
            assert tensor.dtype == getattr(torch, array.dtype.name)
            assert np.array_equal(tensor.numpy(), array), name
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 16 == 0, "else Triton compiles its kernels again"
    assert step.slots.tolist() == [2 * 8 + 4, *range(8), *range(32, 37)]
    assert (step.max_query_len, step.num_decodes) == (13, 1)


def test_model_is_told_how_many_decodes_come_first() -> None:
    """A GPU computes them apart from the chunks; otherwise they take the chunks' larger tiles."""
    model = create_autospec(PagedModel, instance=True)
    model.device = torch.device("cpu")
    decode = Request("decode", list(range(9)), SamplingParams())
    prompt = Request("prompt", list(range(30)), SamplingParams())
    for parts, expected in (
        ([Scheduled(decode, 8, 1, [3, 1], True)] * 3, 3),
        ([Scheduled(decode, 8, 1, [3, 1], True)] * 2 + [Scheduled(prompt, 0, 13, [5, 0], False)], 2),
        ([Scheduled(prompt, 0, 13, [5, 0], False), Scheduled(decode, 8, 1, [3, 1], True)], 0),
    ):
        StepInputs.of(Batch(parts, 0), 8)[0].run(model)
        batch = model.forward.call_args.args[2]
        assert (batch.num_decodes, batch.max_kv_len) == (expected, max(part.start + part.num_tokens for part in parts))


def test_step_without_wanted_rows_has_an_empty_tensor() -> None:
    request = Request("prompt", list(range(30)), SamplingParams())
    step = StepInputs.of(Batch([Scheduled(request, 0, 8, [1], False)], 0), 8)[0]
    assert step.on(torch.device("cpu")).wanted.shape == (0,)
