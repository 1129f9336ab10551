"""How many pages a rank has room for: the arithmetic with numbers, and what is measured, on a GPU that is pretended."""

import pytest
import torch

from crossdock.kernels.backend import TORCH
from crossdock.workers.model import kv_memory
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.kv_memory import MARGIN, PageBudget, largest_step, room_for_pages, share
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.memory_budget import ON_CPUS, MemoryBudget
from crossdock.workers.model.model import PagedModel
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine
from tests.workers.architectures import build

GIB = 1 << 30


def test_a_share_is_of_the_whole_gpu() -> None:
    """An H200 with Llama-3.1-8B: 140 GiB, 15 for weights, 1 that is not torch's, 2 for the largest step."""
    assert share(0.9, 140 * GIB, 124 * GIB, 0, 2 * GIB) == 126 * GIB - 16 * GIB - 2 * GIB - MARGIN
    assert share(0.5, 140 * GIB, 124 * GIB, 0, 2 * GIB) == 70 * GIB - 16 * GIB - 2 * GIB - MARGIN


def test_another_process_has_a_share_of_its_own() -> None:
    """Two of 0.45 on one GPU: the second gets what the first got. What nobody has is not promised to anyone."""
    first = share(0.45, 100 * GIB, 80 * GIB, 0, 2 * GIB)
    assert first == 45 * GIB - 20 * GIB - 2 * GIB - MARGIN
    assert share(0.45, 100 * GIB, 35 * GIB, 45 * GIB, 2 * GIB) == first
    assert share(0.9, 100 * GIB, 35 * GIB, 45 * GIB, 2 * GIB) == 35 * GIB - 2 * GIB - MARGIN


def test_too_little_is_nothing() -> None:
    assert share(0.1, 80 * GIB, 60 * GIB, 0, GIB) == 0
    assert share(0.9, 80 * GIB, 2 * GIB, 0, 2 * GIB) == 0


@pytest.mark.parametrize(("num_tokens", "lengths"), [(64, [64]), (100, [100]), (250, [100, 100, 50])])
def test_the_largest_step_fills_the_budget_with_prompts_that_can_be(num_tokens: int, lengths: list[int]) -> None:
    step = largest_step(num_tokens, 100, 8)
    assert step.kv_len.tolist() == lengths
    assert len(step.token_ids) == num_tokens
    assert step.wanted.tolist() == list(range(num_tokens)), "as a request for its prompt's logprobs would"
    assert len(set(step.slots.tolist())) == num_tokens
    assert step.slots.max() < (step.page_table.max() + 1) * 8


def a_model() -> PagedModel:
    return wrap_module(build("llama", {}), attention=TORCH)


def test_on_a_cpu_nothing_is_measured() -> None:
    model = a_model()
    page_bytes = model.layout(16).page_bytes
    assert room_for_pages(model, MemoryBudget(), 16) == PageBudget(ON_CPUS // page_bytes, page_bytes)
    assert room_for_pages(model, MemoryBudget(1 << 20), 16) == PageBudget((1 << 20) // page_bytes, page_bytes)
    assert EngineConfig().budget == MemoryBudget()
    assert model.pool is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[StepInputs]:
    """One of 1 GiB, on which each run takes 100 MiB and the weights 200; the steps that were run."""
    steps: list[StepInputs] = []
    run = StepInputs.run

    def watched(self: StepInputs, model: PagedModel) -> torch.Tensor:
        steps.append(self)
        return run(self, model)

    monkeypatch.setattr(StepInputs, "run", watched)
    monkeypatch.setattr(MemoryBudget, "known", lambda self, _: self.kv_cache_memory)
    monkeypatch.setattr(kv_memory, "MARGIN", 24 << 20)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 200 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 300 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (824 << 20, 1024 << 20))
    return steps


def test_what_the_largest_steps_leave_is_for_pages(gpu: list[StepInputs]) -> None:
    model = a_model()
    config = EngineConfig(gpu_memory_utilization=0.5, max_num_batched_tokens=300, max_num_seqs=9)
    page_bytes = model.layout(16).page_bytes
    # half of it, less the weights, the prompts, the decodes and the margin
    expected = PageBudget(((512 - 200 - 100 - 100 - 24) << 20) // page_bytes, page_bytes)
    assert room_for_pages(model, config.budget, 16) == expected
    assert {len(step.token_ids) for step in gpu} == {300}
    assert model.pool is None, "the pages it ran on are given back"
    assert model.pages == []
    assert Engine(model, config).pages.num_pages == expected.num_pages
    fixed = MemoryBudget(1 << 20)
    gpu.clear()
    assert room_for_pages(model, fixed, 16).num_pages == (1 << 20) // page_bytes
    assert not gpu


@pytest.mark.usefixtures("gpu")
def test_a_share_that_holds_no_request_is_refused_with_numbers() -> None:
    config = EngineConfig(gpu_memory_utilization=0.4, max_num_batched_tokens=300, max_num_seqs=9)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization \(0.4\) leaves memory that holds 0 tokens .* needs"):
        Engine(a_model(), config)
