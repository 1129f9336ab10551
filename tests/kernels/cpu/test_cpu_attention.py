"""Prompts' chunks by AMX or by torch's flash attention, beside all else by attention.cpp, against float64."""

import random
from typing import Any

import pytest
import torch

from crossdock.kernels.attention import cpp_library
from crossdock.kernels.cpu import cpu_attention
from crossdock.kernels.cpu.choice import KernelChoice, only
from crossdock.kernels.cpu.cpu_attention import CpuAttention
from crossdock.kernels.options import CpuKernels, Kernel
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


def has_amx() -> bool:
    library = cpp_library()
    return library is not None and bool(library.crossdock_has_amx())


needs_amx = pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX (amx_bf16), and g++ 11 or newer")


@pytest.fixture
def by_amx(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let AMX compute all chunks that it can; the sequences that it computes."""
    calls: list[int] = []
    cpp = cpu_attention.cpp_attention

    def counted(*arguments: Any, **options: Any) -> None:
        if options.get("by_amx"):
            calls.append(arguments[4].start)
        cpp(*arguments, **options)

    def choice(_: int, __: object, kernels: tuple[Kernel, ...]) -> KernelChoice:
        return KernelChoice("native", "amx", 16) if "amx" in kernels else only("native")

    monkeypatch.setattr(cpu_attention, "cpp_attention", counted)
    monkeypatch.setattr(cpu_attention, "_measured", choice)
    return calls


@pytest.mark.parametrize("setting", ["auto", "native", "onednn", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_matches_longhand(setting: CpuKernels, dtype: torch.dtype, seed: int) -> None:
    check(Case(LENGTHS, q_heads=6, dtype=dtype, seed=seed), CpuAttention(setting).paged_attention)


def test_chunks_of_16_tokens_run_in_torch_where_it_is_named(flash_calls: list[int]) -> None:
    check(Case(LENGTHS), CpuAttention("torch").paged_attention)
    assert flash_calls == [1, 2, 5, 6]
    check(Case(LENGTHS), CpuAttention("native").paged_attention)
    assert flash_calls == [1, 2, 5, 6]


def test_chunk_near_the_start_and_chunk_deep_in_a_prompt_have_choices_of_their_own(
    flash_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def choice(past: int, *_: object) -> KernelChoice:
        measured.append(past)
        return only("native") if past else KernelChoice("native", "torch", 64)

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


SIGHTS: list[dict[str, Any]] = [
    *({}, {"window": 12}, {"window": 600}, {"attention_chunk": 150}, {"softcap": 2.0}, {"sinks": True}),
    {"blocks": {1: [(3, 30)], 6: [(1210, 1300)]}},
]


@needs_amx
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_chunks_by_amx_match_longhand(dim: int, sight: dict[str, Any], by_amx: list[int], seed: int) -> None:
    case = Case(LENGTHS, q_heads=6, k_dim=dim, v_dim=dim, dtype=torch.bfloat16, seed=seed, **sight)
    check(case, CpuAttention("auto").paged_attention)
    assert by_amx == [1, 2, 5, 6]


@needs_amx
def test_random_chunks_by_amx_match_longhand(by_amx: list[int], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        long = rng.randint(500, 2500)
        lengths = [(rng.randint(1, kv), kv) for kv in (rng.randint(1, 400) for _ in range(rng.randint(1, 4)))]
        kv_heads, dim = rng.choice([1, 2, 3]), rng.choice([32, 64, 96, 128])
        case = Case(
            [*lengths, (rng.randint(16, 200), long)],
            q_heads=kv_heads * rng.choice([1, 3, 4, 17]),
            kv_heads=kv_heads,
            k_dim=dim,
            v_dim=dim,
            page_size=rng.choice([16, 32, 48]),
            dtype=torch.bfloat16,
            seed=rng.randrange(2**31),
            **rng.choice([{}, {"window": rng.randint(1, 700)}, {"attention_chunk": rng.randint(1, 700)}]),
        )
        check(case, CpuAttention("auto").paged_attention)
        assert by_amx.pop() == len(lengths)


@needs_amx
@pytest.mark.parametrize(
    "shape", [{"page_size": 24}, {"k_dim": 80, "v_dim": 80}, {"v_dim": 64}, {"dtype": torch.float32}], ids=str
)
def test_shape_that_amx_does_not_take_runs_without(shape: dict[str, Any], by_amx: list[int]) -> None:
    check(Case(LENGTHS, **{"dtype": torch.bfloat16, **shape}), CpuAttention("auto").paged_attention)
    assert by_amx == []


@needs_amx
@pytest.mark.parametrize("setting", ["native", "torch"])
def test_setting_of_another_kernel_keeps_amx_out(setting: CpuKernels, by_amx: list[int]) -> None:
    check(Case(LENGTHS, dtype=torch.bfloat16), CpuAttention(setting).paged_attention)
    assert by_amx == []
