"""Prompts' chunks by torch's flash attention beside everything else by attention.cpp, against float64."""

import random
from typing import Any

import pytest
import torch

from crossdock.kernels.cpu import cpu_attention
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.cpu_attention import CpuAttention
from crossdock.kernels.options import CpuKernels
from tests.kernels.test_attention import Case, check

pytestmark = pytest.mark.usefixtures("poisoned_memory")
LENGTHS = [(1, 40), (37, 37), (20, 90), (1, 257), (3, 130), (64, 64), (100, 1300), (15, 15)]


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequences that run in torch's flash attention."""
    calls: list[int] = []
    flash = cpu_attention.flash_chunk

    def counted(*arguments: Any) -> None:
        calls.append(arguments[4])
        flash(*arguments)

    monkeypatch.setattr(cpu_attention, "flash_chunk", counted)
    return calls


@pytest.mark.parametrize("setting", ["auto", "own", "onednn", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_matches_longhand(setting: CpuKernels, dtype: torch.dtype, seed: int) -> None:
    check(Case(LENGTHS, q_heads=6, dtype=dtype, seed=seed), CpuAttention(setting).paged_attention)


def test_chunks_of_16_tokens_run_in_torch_where_it_is_named(flash_calls: list[int]) -> None:
    check(Case(LENGTHS), CpuAttention("torch").paged_attention)
    assert flash_calls == [1, 2, 5, 6]
    check(Case(LENGTHS), CpuAttention("own").paged_attention)
    assert flash_calls == [1, 2, 5, 6]


def test_chunk_near_the_start_and_chunk_deep_in_a_prompt_have_choices_of_their_own(
    flash_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def choice(past: int, _: object) -> KernelChoice:
        measured.append(past)
        return only("own") if past else KernelChoice("own", "torch", 64)

    monkeypatch.setattr(cpu_attention, "_measured", choice)
    attention = CpuAttention("auto").paged_attention
    for _ in range(2):
        check(Case(LENGTHS), attention)
    assert flash_calls == [5, 5]  # the chunk of 100 is after 1,200 tokens
    assert len(measured) == 2  # at the first sight of these heads


@pytest.mark.parametrize(
    "shape", [{"softcap": 2.0}, {"sinks": True}, {"window": 12}, {"attention_chunk": 12}, {"v_dim": 16}], ids=str
)
def test_what_flash_attention_does_not_know_runs_in_cpp(shape: dict[str, Any], flash_calls: list[int]) -> None:
    check(Case(LENGTHS, **shape), CpuAttention("torch").paged_attention)
    assert flash_calls == []


def test_rows_that_see_later_keys_run_in_cpp(flash_calls: list[int]) -> None:
    check(Case(LENGTHS, blocks={1: [(3, 30)], 6: [(1210, 1300)]}), CpuAttention("torch").paged_attention)
    assert flash_calls == []


@pytest.mark.parametrize("sight", ["window", "attention_chunk"])
def test_window_longer_than_the_sequence_is_none(sight: str, flash_calls: list[int]) -> None:
    check(Case(LENGTHS, **{sight: 90}), CpuAttention("torch").paged_attention)
    assert flash_calls == [1, 2, 5]


def test_random_batches_match_longhand(seed: int, flash_calls: list[int]) -> None:
    rng = random.Random(seed)
    for _ in range(15):
        lengths = [(rng.randint(1, kv), kv) for kv in (rng.randint(1, 300) for _ in range(rng.randint(1, 6)))]
        kv_heads, dim = rng.choice([1, 2, 3]), rng.choice([16, 31, 64, 80])
        case = Case(
            [*lengths, (30, 40)],
            q_heads=kv_heads * rng.choice([1, 3, 4]),
            kv_heads=kv_heads,
            k_dim=dim,
            v_dim=dim,
            page_size=rng.choice([1, 8, 16, 24]),
            dtype=rng.choice([torch.float32, torch.bfloat16]),
            seed=rng.randrange(2**31),
            **rng.choice([{}, {"window": 150}, {"attention_chunk": 150}]),
        )
        check(case, CpuAttention("torch").paged_attention)
    assert flash_calls
