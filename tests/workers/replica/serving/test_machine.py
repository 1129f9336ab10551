"""The report of a replica about its machine and its memory."""

import pytest
import torch

from crossdock.kernels.options import CpuKernels
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.replica.serving import machine
from crossdock.workers.replica.serving.machine import cpu_name, describe_machine, held_bytes
from tests.workers.architectures import build


@pytest.mark.parametrize("kernel", ["native", "onednn", "torch"])
def test_weights_are_counted_as_kernels_hold_them(kernel: CpuKernels) -> None:
    """In float32 native kernels keep the matrices of a bfloat16 checkpoint in bfloat16: half of the bytes."""
    sizes = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 32, "tie_word_embeddings": False}
    module = build("llama", sizes).bfloat16().float()
    matrices = sum(each.weight.numel() for each in module.modules() if isinstance(each, torch.nn.Linear))
    others = sum(each.numel() for each in module.parameters()) - matrices
    model = wrap_module(module, LoadOptions(cpu_kernels=kernel))
    assert model.kernels == kernel
    assert held_bytes(model.module) == matrices * (2 if kernel == "native" else 4) + others * 4


def test_machine_is_described_with_the_memory_of_weights_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (described["attention"], described["kernels"], described["slower"]) == ("cpp", "", "")
    monkeypatch.setattr(machine, "why_no_library", lambda: "no compiler")  # or it was not loaded from its folder
    described = describe_machine(model)
    assert (described["attention"], described["slower"]) == ("torch", "no compiler")
