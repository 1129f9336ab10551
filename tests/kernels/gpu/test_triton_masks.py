"""Masks of bits against masks of booleans: interpreted on CPUs, compiled where there is a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.sampling import edits
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.token_bits import packed
from tests.workers.model.sampling.rows import make_row, random_logits

pytest.importorskip("triton", reason="needs Triton: pip install triton")

from crossdock.kernels.gpu import triton_masks
from crossdock.kernels.gpu.triton_masks import mask_rows


@pytest.mark.parametrize("vocab_size", [31, 64, 1000])
def test_bits_mask_the_tokens_of_their_row(vocab_size: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_masks, "BLOCK", 128)
    scores = torch.randn(5, vocab_size)
    allowed = torch.rand(3, vocab_size) < 0.4
    numbers = [4, 0, 3]
    table = [torch.cat([torch.tensor([i]).int(), packed(mask)]) for i, mask in zip(numbers, allowed, strict=True)]
    expected = scores.clone()
    for i, mask in zip(numbers, allowed, strict=True):
        expected[i, ~mask] = -torch.inf
    on_device = scores.to(device)
    mask_rows(on_device, torch.stack(table).to(device))
    assert torch.equal(on_device.cpu(), expected)


def rows_of(number: int, vocab_size: int) -> list[SampleRow]:
    """Return rows of which most have a grammar's bits, and some other masks beside or instead."""
    allowed = torch.rand(number, vocab_size, generator=torch.Generator().manual_seed(1)) < 0.3
    others: list[dict[str, Any]] = [
        {},
        {"bad_words": ((30,), (3, 31))},
        {"min_tokens": 100},
        {"allowed_token_ids": (4, 50, 51)},
        {"logit_bias": ((9, 3.0),)},
    ]
    rows = [make_row(allowed=packed(mask), **others[i % 5]) for i, mask in enumerate(allowed)]
    return [*rows, make_row(bad_words=((4, 30),)), make_row(allowed_token_ids=(7,)), make_row()]


def test_grammars_of_a_step_go_to_the_device_in_one_copy_and_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(67, 500)
    expected = edits.edited_scores(logits, rows_of(64, 500))
    copies: list[int] = []
    launches: list[int] = []

    def copied(_: torch.device, tensor: Tensor) -> Tensor:
        copies.append(tensor.nbytes)
        return tensor

    def mask_counted(scores: Tensor, table: Tensor) -> None:
        launches.append(len(table))
        mask_rows(scores, table)

    monkeypatch.setattr(edits, "has_kernels", lambda _: True)
    monkeypatch.setattr(triton_masks, "mask_rows", mask_counted)
    rows = rows_of(64, 500)
    monkeypatch.setattr(edits, "copy_to", copied)
    scores = edits.edited_scores(logits, rows)
    assert torch.equal(scores, expected)
    assert launches == [65], "those of 64 grammars, and one that depends on the token before"
    assert len(copies) == 3, "biases take two"
    assert copies[-1] == 65 * (1 + 16) * 4
