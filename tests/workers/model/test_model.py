"""Chunking is invisible to the model: through our pages every served architecture gives transformers' own logits."""

import dataclasses
import importlib.util
import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from crossdock.kernels.attention import AttentionBatch, reference_store_kv
from crossdock.kernels.backend import TORCH, choose_attention
from crossdock.workers.model.model import PagedModel, UnsupportedModelError, load_model, wrap_module
from crossdock.workers.model.model_spec import ModelSpec
from tests.workers.architectures import REFUSED, SERVED, build

PAGE_SIZE = 8


@torch.inference_mode()
def monolithic(module: PreTrainedModel, ids: Tensor) -> Tensor:
    """transformers' own forward over the whole prompt: [T, vocab]."""
    logits: Tensor = module(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def through_pages(model: PagedModel, prompts: list[Tensor], steps: list[list[tuple[int, int, int]]]) -> list[Tensor]:
    """Every token's logits, computed in `steps` of (sequence, start, end) parts, each step one flat forward pass."""
    per_sequence = -(-max(map(len, prompts)) // PAGE_SIZE)
    model.allocate_pool(per_sequence * len(prompts), PAGE_SIZE)
    assert model.pool is not None
    model.pool.copy_(torch.tensor(float("nan")))  # a page slot that was never written must never be read
    pages = torch.randperm(per_sequence * len(prompts)).view(len(prompts), -1).int()
    logits = [torch.full((len(prompt), model.vocab_size), float("nan")) for prompt in prompts]
    for parts in steps:
        positions = torch.cat([torch.arange(start, end) for _, start, end in parts])
        owners = torch.cat([torch.full((end - start,), s) for s, start, end in parts])
        slots = pages[owners, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
        lengths = [end - start for _, start, end in parts]
        batch = AttentionBatch(
            query_start=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
            kv_len=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            page_table=pages[[s for s, _, _ in parts]],
            slots=slots,
            max_query_len=max(lengths),
            max_kv_len=max(end for _, _, end in parts),
        )
        ids = torch.cat([prompts[s][start:end] for s, start, end in parts])
        flat = model.forward(ids, positions, batch, torch.arange(len(ids)))
        if not model.part.place.is_last_stage:
            continue
        for (s, start, end), part in zip(parts, flat.split(lengths), strict=True):
            logits[s][start:end] = part
    return logits


def random_steps(lengths: list[int], seed: int) -> list[list[tuple[int, int, int]]]:
    """Ragged chunks and single tokens of all sequences, mixed at random."""
    rng = random.Random(seed)
    done = [0] * len(lengths)
    steps = []
    while done != lengths:
        parts = []
        for s, length in enumerate(lengths):
            if done[s] < length and rng.random() < 0.8:
                end = min(length, done[s] + rng.choice([1, 1, 3, PAGE_SIZE, 13, 30]))
                parts.append((s, done[s], end))
                done[s] = end
        rng.shuffle(parts)
        if parts:
            steps.append(parts)
    return steps


@pytest.mark.parametrize("name", SERVED)
def test_logits_equal_transformers_at_every_chunk_boundary(name: str) -> None:
    module = build(name, SERVED[name])
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 120, (n,), generator=generator) for n in (5, 23, 40, 57, 8)]
    expected = [monolithic(module, prompt) for prompt in prompts]
    model = wrap_module(module)
    got = through_pages(model, prompts, random_steps([len(p) for p in prompts], seed=7))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_backend_gives_the_same_logits(name: str) -> None:
    module = build(name, SERVED[name])
    prompts = [torch.arange(3, 3 + n) for n in (5, 30)]
    steps = [[(0, 0, 5), (1, 0, 8)], [(1, 8, 28)], [(1, 28, 29)], [(1, 29, 30)]]
    expected = [monolithic(module, prompt) for prompt in prompts]
    for backend in (TORCH, choose_attention("triton", torch.device("cpu"))):
        got = through_pages(wrap_module(module, attention=backend), prompts, steps)
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


def test_a_page_size_that_attention_cannot_read_is_refused() -> None:
    model = wrap_module(build("llama", {}), attention=dataclasses.replace(TORCH, name="flash_attn", page_multiple=256))
    with pytest.raises(ValueError, match=r"page_size \(16\) must be a multiple of 256 tokens .* flash_attn"):
        model.allocate_pool(4, 16)
    model.allocate_pool(4, 256)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_with_the_reason(name: str) -> None:
    options, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        wrap_module(build(name, options))


@pytest.mark.parametrize(
    "chunk", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE - 1, 2 * PAGE_SIZE, 37, 64]
)
def test_chunk_ends_swept_around_page_sizes(chunk: int) -> None:
    module = build("llama", {})
    prompt = torch.randint(3, 120, (64,), generator=torch.Generator().manual_seed(2))
    expected = monolithic(module, prompt)
    steps = [[(0, start, min(start + chunk, 64))] for start in range(0, 64, chunk)]
    torch.testing.assert_close(through_pages(wrap_module(module), [prompt], steps)[0], expected, atol=1e-4, rtol=1e-4)


def test_a_position_reset_is_caught() -> None:
    """The mutation of the seed: positions that start at 0 in every chunk. The comparison above must see it."""
    module = build("llama", {})
    prompt = torch.randint(3, 120, (64,), generator=torch.Generator().manual_seed(2))
    expected = monolithic(module, prompt)
    model = wrap_module(module)

    class Reset(PagedModel):
        def forward(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor) -> Tensor:
            return super().forward(token_ids, positions - positions[0], batch, rows)

    broken = Reset(model.module, model.config, model.layers, model.max_model_len, model.eos_token_ids)
    got = through_pages(broken, [prompt], [[(0, 0, 16)], [(0, 16, 64)]])[0]
    torch.testing.assert_close(got[:16], expected[:16], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got[16:], expected[16:], atol=1e-2)


# -- pages of e4m3 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *((name, 0.12) for name in ("llama", "qwen3", "gemma2", "phi3", "gpt2", "olmo2", "cohere2")),
        *((name, 0.6) for name in ("gemma4_text", "deepseek_v2", "gpt_oss")),
    ],
)
def test_logits_over_e4m3_pages_are_near_transformers_own(name: str, most: float) -> None:
    """Elements keep 4 bits, an error of up to 6 %, and of random models about as much is left in the logits. Where that
    makes a router choose other experts it is more; these are here for their shapes: wider heads in some layers, values
    narrower than keys, sinks."""
    module = build(name, SERVED[name])
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 40, 57)]
    expected = [monolithic(module, prompt) for prompt in prompts]
    model = wrap_module(module, kv_cache_dtype="fp8")
    got = through_pages(model, prompts, random_steps([len(p) for p in prompts], seed=7))
    assert model.pool is not None
    assert model.pool.dtype == torch.float8_e4m3fn
    for ours, theirs in zip(got, expected, strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert 0 < error < most


def test_real_weights_over_e4m3_pages(model_dir: Path) -> None:
    """SmolLM2 on a text: the logits, and the choice of the next token where it is not near a tie."""
    model = load_model(ModelSpec(str(model_dir), "float32", kv_cache_dtype="fp8"))
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    text = AutoTokenizer.from_pretrained(model_dir)(_TEXT, return_tensors="pt").input_ids[0]
    expected = monolithic(theirs, text)
    ours = through_pages(model, [text], random_steps([len(text)], seed=1))[0]
    assert float((ours - expected).norm() / expected.norm()) < 0.05
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 1.0
    assert int(is_clear.sum()) > 30
    assert (ours.argmax(-1) == expected.argmax(-1))[is_clear].all()


_TEXT = """A cross-dock is the terminal where inbound freight goes straight to outbound trucks without being stored. The
trucks come in at one side in the early morning, and by noon every pallet has left at the other. Nobody keeps an
inventory, because there is none: what arrives has been sold already, and its way is known before the doors are opened.
The first of them was built in the 1930s, when the trucking industry of the United States of America found that it could
not wait."""


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_chunks_are_invisible_over_e4m3_pages_too(name: str) -> None:
    """Every row reads its keys and values from pages, also those of its own chunk."""
    module = build(name, SERVED[name])
    prompts = [torch.randint(3, 120, (n,), generator=torch.Generator().manual_seed(n)) for n in (23, 64)]
    model = wrap_module(module, kv_cache_dtype="fp8")
    whole = through_pages(model, prompts, [[(0, 0, 23)], [(1, 0, 64)]])
    for seed in range(3):
        got = through_pages(model, prompts, random_steps([23, 64], seed))
        for ours, alone in zip(got, whole, strict=True):
            assert float((ours - alone).norm() / alone.norm()) < 0.01


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_over_e4m3_pages_gives_what_torch_gives() -> None:
    """From pages that torch has written: Triton's interpreter rounds wrongly where that carries."""
    module = build("gemma2", SERVED["gemma2"])
    prompts = [torch.arange(3, 3 + n) for n in (5, 30)]
    steps = [[(0, 0, 5), (1, 0, 8)], [(1, 8, 28)], [(1, 28, 29)], [(1, 29, 30)]]
    triton = choose_attention("triton", torch.device("cpu"), "fp8")
    got, expected = (
        through_pages(wrap_module(module, attention=its, kv_cache_dtype="fp8"), prompts, steps)
        for its in (dataclasses.replace(triton, store_kv=reference_store_kv), TORCH)
    )
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
