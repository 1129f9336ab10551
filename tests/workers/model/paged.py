"""Logits through our pages, computed in any chunks, beside those of transformers' own forward."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from crossdock.kernels.attention import AttentionBatch
from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.model import LoadedModel

PAGE_SIZE = 8
_TENSORS = ("query_start", "kv_len", "page_table", "slots")


@torch.inference_mode()
def monolithic(module: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits [T, vocab] of transformers' own forward over the whole prompt."""
    logits: Tensor = module(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def through_pages(
    model: LoadedModel,
    prompts: list[Tensor],
    steps: list[list[tuple[int, int, int]]],
    adapters: list[str] | None = None,
) -> list[Tensor]:
    """Return every token's logits, computed in `steps` of (sequence, start, end) parts, one flat forward pass each.

    `adapters`: the fingerprint of each prompt's, or an empty text.
    """
    per_sequence = -(-max(map(len, prompts)) // PAGE_SIZE)
    num_kv, width = per_sequence * len(prompts), model.state_pages(PAGE_SIZE)
    model.allocate_pool(num_kv + 2 * width * len(prompts), PAGE_SIZE)
    model.pool.tensor.copy_(torch.tensor(float("nan")))  # a page slot that was never written must never be read
    shuffled = torch.randperm(num_kv + 2 * width * len(prompts)).int()
    pages = shuffled[:num_kv].view(len(prompts), -1)
    old = shuffled[num_kv:].view(2, len(prompts), width)[0].clone()  # where each sequence's state is read
    new = shuffled[num_kv:].view(2, len(prompts), width)[1].clone()  # and where it goes
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
            num_decodes=next((s for s, n in enumerate(lengths) if n > 1), len(lengths)),
        )
        ids = torch.cat([prompts[s][start:end] for s, start, end in parts])
        owners_of_parts = [s for s, _, _ in parts]
        fresh = torch.tensor([start == 0 for _, start, _ in parts])[:, None]
        states = (old[owners_of_parts].masked_fill(fresh, -1), new[owners_of_parts])
        there = replace(
            batch,
            on_host=(batch.query_start, batch.kv_len),
            **{name: getattr(batch, name).to(model.device) for name in _TENSORS},
        )
        rows = None
        if adapters is not None and model.adapters is not None:
            rows = model.adapters.rows([adapters[s] for s in owners_of_parts], batch.query_start.numpy())
        given = tuple(each.to(model.device) for each in states) if width else None
        flat = model.forward(
            *(each.to(model.device) for each in (ids, positions)),
            there,
            torch.arange(len(ids), device=model.device),
            None,
            given,
            rows,
        )
        old[owners_of_parts], new[owners_of_parts] = new[owners_of_parts], old[owners_of_parts]
        if not model.part.position.is_last_stage:
            continue
        for (s, start, end), part in zip(parts, flat.cpu().split(lengths), strict=True):
            logits[s][start:end] = part
    return logits


def assert_any_chunks(module: PreTrainedModel, device: str) -> None:
    """Assert that ragged chunks of prompts on `device` have the logits of transformers' whole prompts on the CPU."""
    prompts = random_prompts(5, 23, 40, 57, 8)
    expected = [monolithic(module, prompt) for prompt in prompts]
    got = in_random_steps(wrap_module(module.to(device)), prompts, seed=7)
    assert_near(got, expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def assert_near(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 2e-3) -> None:
    """Assert that the logits of each prompt are those expected, up to rounding."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def random_prompts(*lengths: int, seed: int = 1) -> list[Tensor]:
    """Return random token ids, [n] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 120, (length,), generator=generator) for length in lengths]


def in_random_steps(model: LoadedModel, prompts: list[Tensor], seed: int) -> list[Tensor]:
    """Return every token's logits, computed in `random_steps`; see `through_pages`."""
    return through_pages(model, prompts, random_steps([len(prompt) for prompt in prompts], seed))


def random_steps(lengths: list[int], seed: int) -> list[list[tuple[int, int, int]]]:
    """Return steps of ragged chunks and single tokens of all sequences, mixed at random."""
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
