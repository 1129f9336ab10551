"""The report of a replica about its machine and its memory."""

import torch

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.serving.machine import cpu_name, describe_machine
from tests.workers.architectures import build


def test_machine_is_described_with_the_memory_of_weights_and_pages() -> None:
    module = build("llama", {})
    num_weights = sum({each.data_ptr(): each.numel() for each in module.parameters()}.values())
    model = wrap_module(module)
    layout = model.layout(16)
    num_pages = 10
    model.allocate_pool(num_pages, 16)
    described = describe_machine(model)
    assert (described["device"], described["threads"]) == (cpu_name(), torch.get_num_threads())
    assert described["device"]
    assert described["weights"] == num_weights * model.dtype.itemsize
    assert described["pool"] == num_pages * layout.page_bytes
    assert (described["attention"], described["kernels"]) == ("cpp", "")
