"""How many pages fit on a rank: the arithmetic with numbers, and the measurement on a simulated GPU."""

import pytest
import torch

from crossdock.kernels.backend import TORCH
from crossdock.workers.model.inputs import StepInputs
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.memory import kv_memory
from crossdock.workers.model.memory.kv_memory import (
    GPU_RESERVE_BYTES,
    PageBudget,
    bytes_for_pages,
    count_pages_that_fit,
    largest_step,
)
from crossdock.workers.model.memory.memory_budget import ON_CPUS, MemoryBudget
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.replica.config import EngineConfig, StepSizes
from crossdock.workers.replica.engine.computing import new_engine
from tests.workers.architectures import build
from tests.workers.multimodal import build_multimodal

GIB = 1 << 30


def test_share_is_of_the_whole_gpu() -> None:
    """An H200 with Llama-3.1-8B: 140 GiB, 15 for weights, 1 that is not torch's, 2 for the largest step."""
    assert bytes_for_pages(0.9, 140 * GIB, 124 * GIB, 0, 2 * GIB) == 126 * GIB - 16 * GIB - 2 * GIB - GPU_RESERVE_BYTES
    assert bytes_for_pages(0.5, 140 * GIB, 124 * GIB, 0, 2 * GIB) == 70 * GIB - 16 * GIB - 2 * GIB - GPU_RESERVE_BYTES


def test_second_process_on_one_gpu_has_a_share_of_its_own() -> None:
    """Two of 0.45 on one GPU: the second gets as much as the first. Neither gets more than what is free."""
    first = bytes_for_pages(0.45, 100 * GIB, 80 * GIB, 0, 2 * GIB)
    assert first == 45 * GIB - 20 * GIB - 2 * GIB - GPU_RESERVE_BYTES
    assert bytes_for_pages(0.45, 100 * GIB, 35 * GIB, 45 * GIB, 2 * GIB) == first
    assert bytes_for_pages(0.9, 100 * GIB, 35 * GIB, 45 * GIB, 2 * GIB) == 35 * GIB - 2 * GIB - GPU_RESERVE_BYTES


def test_share_smaller_than_held_memory_gives_no_pages() -> None:
    assert bytes_for_pages(0.1, 80 * GIB, 60 * GIB, 0, GIB) == 0
    assert bytes_for_pages(0.9, 80 * GIB, 2 * GIB, 0, 2 * GIB) == 0


@pytest.mark.parametrize(("num_tokens", "lengths"), [(64, [64]), (100, [100]), (250, [100, 100, 50])])
def test_largest_step_fills_the_token_budget_with_whole_prompts(num_tokens: int, lengths: list[int]) -> None:
    step = largest_step(num_tokens, 100, 8)
    assert step.kv_len.tolist() == lengths
    assert len(step.token_ids) == num_tokens
    assert step.wanted.tolist() == list(range(num_tokens)), "as a request for prompt logprobs would"
    assert len(set(step.slots.tolist())) == num_tokens
    assert step.slots.max() < (step.pages.entries.max() + 1) * 8


def tiny_model() -> LoadedModel:
    return wrap_module(build("llama", {}), LoadOptions(attention=TORCH))


def test_pages_on_cpu_follow_from_the_settings() -> None:
    model = tiny_model()
    page_bytes = model.layout(16).page_bytes
    assert count_pages_that_fit(model, MemoryBudget(), 16) == PageBudget(ON_CPUS // page_bytes, page_bytes)
    assert count_pages_that_fit(model, MemoryBudget(1 << 20), 16) == PageBudget((1 << 20) // page_bytes, page_bytes)
    assert EngineConfig().sized(StepSizes.of_device("CPU", 0), 8192).budget == MemoryBudget()
    assert not len(model.pool.tensor)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[StepInputs]:
    """Simulate a GPU of 1 GiB, on which each run takes 100 MiB and the weights 200. Gives the steps that were run."""
    steps: list[StepInputs] = []
    run = StepInputs.run

    def watched(self: StepInputs, model: LoadedModel) -> torch.Tensor:
        steps.append(self)
        return run(self, model)

    monkeypatch.setattr(StepInputs, "run", watched)
    monkeypatch.setattr(MemoryBudget, "known", lambda self, _: self.kv_cache_memory)
    monkeypatch.setattr(kv_memory, "GPU_RESERVE_BYTES", 24 << 20)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 200 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 300 << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (824 << 20, 1024 << 20))
    return steps


def test_pages_on_gpu_get_what_the_largest_steps_leave(gpu: list[StepInputs]) -> None:
    model = tiny_model()
    config = EngineConfig(gpu_memory_utilization=0.5, max_num_batched_tokens=300, max_num_seqs=9)
    page_bytes = model.layout(16).page_bytes
    # half of the GPU, less the weights, the prompts, the decodes and the reserve
    expected = PageBudget(((512 - 200 - 100 - 100 - 24) << 20) // page_bytes, page_bytes)
    assert count_pages_that_fit(model, config.budget, 16) == expected
    assert {len(step.token_ids) for step in gpu} == {300}
    assert not len(model.pool.tensor), "the scratch pages are freed"
    assert not model.pool.pages
    assert new_engine(model, config).pages.num_pages == expected.num_pages
    fixed = MemoryBudget(1 << 20)
    gpu.clear()
    assert count_pages_that_fit(model, fixed, 16).num_pages == (1 << 20) // page_bytes
    assert not gpu


@pytest.mark.usefixtures("gpu")
def test_pages_on_gpu_leave_room_for_pictures() -> None:
    """Beside the steps: 16 MiB of embeddings, the encoder's largest call, and the rows of a step twice."""
    model = wrap_module(build_multimodal("qwen3_vl"), LoadOptions(attention=TORCH))
    assert model.encoder is not None
    config = EngineConfig.model_validate(
        {
            "gpu_memory_utilization": 0.6,
            "max_num_batched_tokens": 300,
            "max_num_seqs": 9,
            "mm_encoder_cache": "16MiB",
        }
    )
    page_bytes = model.layout(16).page_bytes
    steps = 100 + 100 + 24
    left = int(0.6 * (1 << 30)) - ((200 + steps + 100 + 16) << 20) - 2 * 300 * model.encoder.embedding_token_bytes
    assert count_pages_that_fit(model, config.budget, 16) == PageBudget(left // page_bytes, page_bytes)


@pytest.mark.usefixtures("gpu")
def test_share_too_small_for_one_request_is_refused_with_numbers() -> None:
    config = EngineConfig(gpu_memory_utilization=0.4, max_num_batched_tokens=300, max_num_seqs=9)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization \(0.4\) leaves memory that holds 0 tokens .* needs"):
        new_engine(tiny_model(), config)
