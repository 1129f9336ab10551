"""Edits of the logits before temperature, in place: bias and penalties of all rows together, then masks.

A row's last token may be known to the device alone: the step that draws it has not been read yet. Such a token is `~i`
on the host, and penalties look it up in row i of the tokens that the step before has drawn.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from crossdock.workers.model.sampling.devices import copy_to, has_kernels
from crossdock.workers.model.sampling.row import SampleRow

# A smaller repetition penalty would make an infinity of a logit, which is the sign of damaged weights.
_LEAST_PENALTY = 1e-30


def edited_scores(
    logits: Tensor, rows: Sequence[SampleRow], copy: bool = False, previous_tokens: Tensor | None = None
) -> Tensor:
    """Return scores [N, V] float32: the edited logits. If no row is edited they may be the logits themselves, unless
    `copy`.

    `previous_tokens` [N'], on the device of the logits, are those that the step before has drawn; needed where a
    penalised row's last token is one of them.
    """
    edited = [i for i, row in enumerate(rows) if row.is_edited]
    scores = logits.to(torch.float32, copy=copy or bool(edited))
    if edited:
        _add_biases(scores, rows, [i for i in edited if rows[i].params.logit_bias])
        _penalize(scores, rows, [i for i in edited if rows[i].is_penalized], previous_tokens)
        _mask(scores, rows, edited)
    return scores


def _add_biases(scores: Tensor, rows: Sequence[SampleRow], biased: Sequence[int]) -> None:
    """Add the logit_bias of the rows `biased`. A request's token ids are distinct."""
    if not biased:
        return
    ids, biases = zip(*(rows[i].bias for i in biased), strict=True)
    row_of = np.repeat(np.array(biased), [len(each) for each in ids])
    at = copy_to(scores.device, torch.from_numpy(np.stack([row_of, np.concatenate(ids)])))  # [2, B]
    scores[at[0], at[1]] += copy_to(scores.device, torch.from_numpy(np.concatenate(biases)))


def _penalize(
    scores: Tensor, rows: Sequence[SampleRow], penalised: Sequence[int], previous_tokens: Tensor | None
) -> None:
    """Repetition penalty (Keskar et al., 2019) over prompt and output; presence and frequency over the output.

    P rows are penalised, which have used U distinct tokens in all.
    """
    if not penalised:
        return
    device = scores.device
    used = [rows[i].used_tokens() for i in penalised]
    ids, counts = (np.concatenate(each) for each in zip(*used, strict=True))
    which = np.repeat(np.arange(len(penalised)), [len(each) for each, _ in used])  # [U], of the P
    known = copy_to(device, torch.from_numpy(np.stack([which, ids])))
    on_device = _Used(known[0], known[1], copy_to(device, torch.from_numpy(counts)))
    unread = [(p, ~rows[i].token_ids[-1]) for p, i in enumerate(penalised) if rows[i].ends_unread]
    if unread:
        assert previous_tokens is not None, "a row's last token is known to the device alone"
        on_device = on_device.with_last(copy_to(device, torch.tensor(unread)), previous_tokens, len(penalised))
    params = [rows[i].params for i in penalised]
    factors = copy_to(
        device,
        torch.tensor(
            [[max(p.repetition_penalty, _LEAST_PENALTY), p.frequency_penalty, p.presence_penalty] for p in params]
        ),
    )
    repetition, frequency, presence = factors[on_device.which].unbind(-1)
    at = copy_to(device, torch.tensor(penalised))[on_device.which], on_device.ids
    score = scores[at]
    score = torch.where(score > 0, score / repetition, score * repetition)
    score -= frequency * on_device.counts + presence * (on_device.counts > 0)
    scores[at] = score


class _Used:
    """The tokens that the penalised rows have used, on the device. A row may list a token twice, alike."""

    def __init__(self, which: Tensor, ids: Tensor, counts: Tensor) -> None:
        self.which = which  # [U] int64, the row, of the P
        self.ids = ids  # [U] int64
        self.counts = counts  # [U] float32, how often the token is in the row's output

    def with_last(self, unread: Tensor, previous_tokens: Tensor, num_rows: int) -> "_Used":
        """Return the tokens with one more for some rows. `unread` [Q, 2]: the row, and the index of its last token
        in `previous_tokens`.

        A drawn token below 0 counts as 0: the host draws it again, and this row's token is void.
        """
        rows = unread[:, 0]
        last = previous_tokens[unread[:, 1]].clamp(min=0)
        last_of = self.ids.new_full((num_rows,), -1).index_copy_(0, rows, last)
        again = self.ids == last_of[self.which]  # one of each row at most, so that the sum below is exact
        before = self.counts.new_zeros(num_rows).index_add_(0, self.which, self.counts * again)
        return _Used(
            torch.cat([self.which, rows]),
            torch.cat([self.ids, last]),
            torch.cat([self.counts + again, before[rows] + 1]),
        )


def _mask(scores: Tensor, rows: Sequence[SampleRow], edited: Sequence[int]) -> None:
    """Set the scores of tokens that a row must not use to -inf, in place, which moves no scores.

    Most masks stay on the device between steps. Those that change go there as bits, all in one copy, where the device
    has kernels.
    """
    changing = [i for i in edited if rows[i].has_changing_mask] if has_kernels(scores.device) else []
    if changing:
        from crossdock.kernels.gpu.triton_masks import mask_rows  # Triton is not on every machine

        found = [(i, rows[i].usable_words(scores.shape[-1])) for i in changing]
        table = [torch.cat([torch.tensor([i], dtype=torch.int32), words]) for i, words in found if words is not None]
        if table:
            mask_rows(scores, copy_to(scores.device, torch.stack(table)))
    by_row = set(edited).difference(changing)
    for i in sorted(by_row):
        forbidden = rows[i].forbidden_on(scores.device, scores.shape[-1])
        if forbidden is not None:
            scores[i].masked_fill_(forbidden, -torch.inf)
