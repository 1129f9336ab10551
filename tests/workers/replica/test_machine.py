"""The report of a replica about its machine and its memory."""

import torch

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.machine import cpu_name, describe_machine
from tests.workers.architectures import build


def test_machine_is_described_with_the_memory_of_weights_and_of_pages_written_so_far() -> None:
    module = build("llama", {})
    num_weights = sum({each.data_ptr(): each.numel() for each in module.parameters()}.values())
    model = wrap_module(module)
    layout = model.layout(16)
    num_pages = (256 << 20) // layout.page_bytes
    model.allocate_pool(num_pages, 16)
    before = describe_machine(model)
    assert (before["device"], before["threads"]) == (cpu_name(), torch.get_num_threads())
    assert before["device"]
    assert before["weights"] == num_weights * model.dtype.itemsize
    assert before["pool"] == num_pages * layout.page_bytes
    assert before["pool_in_use"] < before["pool"] // 2, "memory is given when it is written first"
    assert model.pool is not None
    model.pool.fill_(1)
    assert describe_machine(model)["pool_in_use"] == before["pool"]
    assert (before["attention"], before["layers"]) == ("cpp", "transformers")
