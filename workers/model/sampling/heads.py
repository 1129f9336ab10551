"""The head of a row: its highest scores, as many as hold all that min-p, top-k and top-p keep."""

from collections.abc import Sequence

import torch
from torch import Tensor

from crossdock.workers.model.sampling.devices import copy_to
from crossdock.workers.model.sampling.edits import edited_scores
from crossdock.workers.model.sampling.filters import TailCuts, kept_floor, row_sums
from crossdock.workers.model.sampling.row import GREEDY_BELOW, SampleRow

# How much of a row is sorted, in turns, until the kept set lies inside. Milliseconds for one row of 49152 on a Zen 4
# core (torch 2.13): topk(256) 0.16, topk(4096) 0.66, full sort 3.5.
WIDTHS: tuple[int, ...] = (256, 4096)


def widths_of(vocab_size: int) -> tuple[int, ...]:
    """Return the widths of heads to try in turn; the last is the whole row."""
    return *(width for width in WIDTHS if width < vocab_size), vocab_size


def cut_head(
    scores: Tensor, rows: Sequence[SampleRow], temperatures: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each row's `width` highest scores over its temperature [N, width], descending, and their ids; then the
    lowest kept score [N, 1], and whether the head surely holds all kept scores [N].

    A row looks at as much of its head as its own kept set needs, so that its token never depends on other rows.
    """
    cuts = TailCuts.of(rows, scores.device)
    sums = row_sums(scores, rows, temperatures)
    is_all = width == scores.shape[-1]
    head, ids = scores.sort(descending=True) if is_all else scores.topk(width)
    head = head / temperatures
    return head, ids, *kept_floor(head, sums, cuts, is_all)


def kept_scores(logits: Tensor, rows: Sequence[SampleRow], previous_tokens: Tensor | None = None) -> Tensor:
    """Return the scores [N, V] float32 whose softmax the rows' tokens are drawn from; tokens that are cut have -inf.

    As in vLLM, a row of temperature 0 is edited alone: the logits keep their scale and their tail. On a GPU the host
    waits for rows that are cut. `previous_tokens`: see `edited_scores`.
    """
    scores = edited_scores(logits, rows, True, previous_tokens)
    warm = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    temperatures = torch.ones(len(rows), 1)
    temperatures[warm, 0] = torch.tensor([rows[i].params.temperature for i in warm])
    temperatures = copy_to(scores.device, temperatures)
    floors = scores.new_full((len(rows), 1), -torch.inf)
    open_rows = [i for i in warm if rows[i].is_filtered]
    for width in widths_of(scores.shape[-1]):
        if not open_rows:
            break
        at = copy_to(scores.device, torch.tensor(open_rows))
        *_, floor, is_settled = cut_head(scores[at], [rows[i] for i in open_rows], temperatures[at], width)
        floors[at] = floor
        open_rows = [i for i, settled in zip(open_rows, is_settled.tolist(), strict=True) if not settled]
    scores /= temperatures
    return scores.masked_fill_(scores < floors, -torch.inf)
