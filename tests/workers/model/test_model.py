"""Chunks do not change the result: through our pages every served architecture gives transformers' own logits."""

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels.attention import reference_store_kv
from crossdock.kernels.backend import TORCH, choose_attention
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from tests.sweeps import rest_in_soak
from tests.workers.architectures import SERVED, build
from tests.workers.model.paged import (
    PAGE_SIZE,
    assert_any_chunks,
    assert_near,
    in_random_steps,
    monolithic,
    through_pages,
)

EVERY_MECHANISM = [
    *("llama", "qwen2 sliding", "gemma2", "gemma4_text", "phi", "gpt2", "opt", "gpt_bigcode", "olmo2", "cohere2"),
    *("granitemoe", "glm4_moe", "exaone4", "nemotron", "deepseek_v3", "longcat_flash", "gpt_oss", "llama4_text"),
    *("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"),
    *("qwen3_next", "kimi_linear", "lfm3 conv", "falcon_h1", "nemotron_h"),
]
"""Windows and chunks of attention, softcaps, sinks, biases, places learnt and rotated in part, norms of queries and
behind layers, layers side by side, few KV heads, experts, latents, indexers, and each kind of recurrent layer."""


@pytest.mark.parametrize("name", rest_in_soak(SERVED, *EVERY_MECHANISM))
def test_logits_of_any_chunks_equal_transformers(name: str) -> None:
    assert_any_chunks(build(name, SERVED[name]), "cpu")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize(
    "name",
    rest_in_soak(
        ["llama", "gemma2", "deepseek_v3", "deepseek_v32", "minimax_m3_vl_text", "llama4_text"],
        "gemma2",
        "deepseek_v3",
        "deepseek_v32",
        "minimax_m3_vl_text",
    ),
)
def test_logits_of_every_backend_equal_transformers(name: str) -> None:
    module = build(name, SERVED[name])
    prompts = [torch.arange(3, 3 + n) for n in (5, 38)]
    steps = [[(0, 0, 5), (1, 0, 8)], [(1, 8, 36)], [(1, 36, 37)], [(1, 37, 38)]]
    expected = [monolithic(module, prompt) for prompt in prompts]
    model = wrap_module(module, LoadOptions(attention=TORCH))
    for backend in (TORCH, choose_attention("triton", torch.device("cpu"))):
        assert_near(through_pages(dataclasses.replace(model, attention=backend), prompts, steps), expected)


def test_page_size_that_attention_cannot_read_is_refused() -> None:
    model = wrap_module(
        build("llama", {}), LoadOptions(attention=dataclasses.replace(TORCH, name="flash_attn", page_multiple=256))
    )
    with pytest.raises(ValueError, match=r"page_size \(16\) must be a multiple of 256 tokens .* flash_attn"):
        model.allocate_pool(4, 16)
    model.allocate_pool(4, 256)


@pytest.mark.parametrize("chunk", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 37, 64])
def test_logits_of_chunks_around_page_size_equal_transformers(chunk: int) -> None:
    module = build("llama", {})
    prompt = torch.randint(3, 120, (64,), generator=torch.Generator().manual_seed(2))
    expected = monolithic(module, prompt)
    steps = [[(0, start, min(start + chunk, 64))] for start in range(0, 64, chunk)]
    torch.testing.assert_close(through_pages(wrap_module(module), [prompt], steps)[0], expected, atol=1e-4, rtol=1e-4)


def test_positions_reset_in_every_chunk_change_logits() -> None:
    """Positions that start at 0 in every chunk are a mutation that the comparisons above must detect."""
    module = build("llama", {})
    prompt = torch.randint(3, 120, (64,), generator=torch.Generator().manual_seed(2))
    expected = monolithic(module, prompt)
    model = wrap_module(module)

    class Reset(LoadedModel):
        def forward(self, token_ids: Tensor, positions: Tensor, *rest: Any) -> Tensor:
            return super().forward(token_ids, positions - positions[0], *rest)

    broken = Reset(**vars(model))
    got = through_pages(broken, [prompt], [[(0, 0, 16)], [(0, 16, 64)]])[0]
    torch.testing.assert_close(got[:16], expected[:16], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got[16:], expected[16:], atol=1e-2)


# -- pages of e4m3 ----------------------------------------------------------------------------------------------------


WITH_EXPERTS = ["gemma4_text", "deepseek_v2", "gpt_oss"]


@pytest.mark.parametrize(
    "name",
    rest_in_soak(
        ["llama", "qwen3", "gemma2", "phi3", "gpt2", "olmo2", "cohere2", *WITH_EXPERTS],
        "llama",
        "deepseek_v2",
        "gpt_oss",
    ),
)
def test_logits_over_e4m3_pages_are_near_transformers(name: str) -> None:
    """e4m3 stores 4 bits of an element, an error of up to 6 %, and the logits of random models differ by about as much.

    They differ by more where a router chooses other experts. Those models are here for their shapes: wider heads in
    some layers, values narrower than keys, sinks.
    """
    module = build(name, SERVED[name])
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 40, 57)]
    expected = [monolithic(module, prompt) for prompt in prompts]
    model = wrap_module(module, LoadOptions(kv_cache_dtype="fp8"))
    got = in_random_steps(model, prompts, seed=7)
    assert model.pool.tensor.dtype == torch.float8_e4m3fn
    for ours, theirs in zip(got, expected, strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert 0 < error < (0.6 if name in WITH_EXPERTS else 0.12)


def test_chunks_over_e4m3_pages_change_no_logits() -> None:
    """Every row reads its keys and values from pages, those of its own chunk too."""
    module = build("gemma2", SERVED["gemma2"])
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)) for n in (23, 64)]
    model = wrap_module(module, LoadOptions(kv_cache_dtype="fp8"))
    whole = through_pages(model, prompts, [[(0, 0, 23)], [(1, 0, 64)]])
    for seed in range(3):
        for ours, alone in zip(in_random_steps(model, prompts, seed), whole, strict=True):
            assert float((ours - alone).norm() / alone.norm()) < 0.01


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_triton_over_e4m3_pages_equals_torch() -> None:
    """From pages that torch has written: Triton's interpreter rounds wrongly where rounding carries."""
    module = build("gemma2", SERVED["gemma2"])
    prompts = [torch.arange(3, 3 + n) for n in (5, 14)]
    steps = [[(0, 0, 5), (1, 0, 8)], [(1, 8, 13)], [(1, 13, 14)]]
    triton = choose_attention("triton", torch.device("cpu"), "fp8")
    model = wrap_module(module, LoadOptions(attention=TORCH, kv_cache_dtype="fp8"))
    got, expected = (
        through_pages(dataclasses.replace(model, attention=attention), prompts, steps)
        for attention in (dataclasses.replace(triton, store_kv=reference_store_kv), TORCH)
    )
    assert_near(got, expected)
