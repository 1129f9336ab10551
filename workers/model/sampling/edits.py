"""Edits of the logits before temperature: bias, penalties and masks, one row at a time, in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossdock.workers.model.sampling.devices import copy_to
from crossdock.workers.model.sampling.row import SampleRow, TokenCounts


def edited_scores(logits: Tensor, rows: Sequence[SampleRow], copy: bool = False) -> Tensor:
    """Return scores [N, V] float32: the edited logits. If no row is edited they may be the logits themselves, unless
    `copy`."""
    edited = [i for i, row in enumerate(rows) if row.is_edited]
    scores = logits.to(torch.float32, copy=copy or bool(edited))
    for i in edited:
        edit(scores[i], rows[i])
    return scores


def edit(scores: Tensor, row: SampleRow) -> None:
    """Apply bias, penalties and masks to one row's `scores` [V]."""
    params, device = row.params, scores.device
    if params.logit_bias:
        scores.index_add_(0, *row.bias_on(device))
    if row.is_penalized:
        _penalize(scores, row)
    mask = _mask(row, len(scores))
    if mask is not None:
        scores.masked_fill_(copy_to(device, mask.logical_not()), -torch.inf)


def _penalize(scores: Tensor, row: SampleRow) -> None:
    """Repetition penalty (Keskar et al., 2019) over prompt and output; presence and frequency over the output."""
    if row.counts is None:
        row.counts = TokenCounts(row.num_prompt_tokens)
    ids, counts = (copy_to(scores.device, tensor) for tensor in row.counts.catch_up(row.token_ids))
    used = scores[ids]
    penalty = row.params.repetition_penalty
    used = torch.where(used > 0, used / penalty, used * penalty)
    used -= row.params.frequency_penalty * counts + row.params.presence_penalty * (counts > 0)
    scores[ids] = used


def _mask(row: SampleRow, vocab_size: int) -> Tensor | None:
    """Return the tokens that a row may use, [V] bool on the CPU; None for all.

    The grammar comes first, then allowed_token_ids, then min_tokens, then bad_words. A mask that would leave no token
    of those before it is dropped, so that there is always a token, and never one that breaks the grammar.
    """
    masks = [] if row.allowed is None else [row.allowed]
    if row.params.allowed_token_ids:
        masks.append(row.choosable(vocab_size))
    if row.must_continue:
        masks.append(row.continuing(vocab_size))
    if row.params.bad_words:
        masks.append(row.without_bad_words(vocab_size))
    combined = None
    for mask in masks:
        narrowed = mask if combined is None else combined & mask
        if combined is None or narrowed.any():
            combined = narrowed
    return combined
