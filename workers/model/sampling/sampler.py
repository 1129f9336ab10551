"""Draw one token a row.

The draw is Gumbel-max: `argmax(logit / temperature + noise)`, with noise hashed from (seed, position, token id). So a
token depends on its seed, its position and its row's logits, never on the batch, the process or a generator's state.

Compared with walking a cumulative sum, this needs no softmax and no order over the vocabulary, and it is less
sensitive to the last-bit differences between batch shapes. A nudged logit changes the token only where two scores
nearly tie, and a token that enters or leaves the kept set changes the result only if it is the winner.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from crossdock.workers.model.sampling import heads
from crossdock.workers.model.sampling.devices import HostCopy, blocks_of, copy_to, has_kernels
from crossdock.workers.model.sampling.edits import edited_scores
from crossdock.workers.model.sampling.filters import temperatures_of
from crossdock.workers.model.sampling.logprobs import SampledLogprobs
from crossdock.workers.model.sampling.noise import hashed_ids, negative_gumbel, row_keys
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.schedule.batch import SampledToken
from crossdock.workers.schedule.request import TokenLogprobs

SORTED_AT_ONCE = 64
"""Rows whose head is not narrow are drawn so many at a time: sorting 128k tokens takes 5.8 MB a row.

Such rows are rare, and a GPU keeps the memory for them, which pages of the cache do not get."""

_OPEN = -1  # in place of a token that is not known yet


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """Draw one token a row from `logits` [N, V], float or bfloat16, which stay unchanged.

    In vLLM's order: logit bias, penalties, masks, temperature, min-p, top-k, top-p. Log-probabilities are of the logits
    as given, before all of these, unless a row's `logprobs_mode` is another. A row's answer is the same bit for bit
    whichever rows are sampled with it.

    On a GPU the host waits once, for the tokens. It waits more often only for log-probabilities, and for rows whose
    kept set is larger than the first head.
    """
    assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} requests"
    if not rows:
        return []
    is_plain = _are_plain(rows)
    scores = _scores_of(logits, rows, is_plain)
    first, *wider = heads.widths_of(scores.shape[-1])
    token_ids: list[int] = _draw(scores, rows, first, is_plain).tolist()
    _draw_open(token_ids, scores, rows, wider)
    asking = () if is_plain else rows
    return _with_logprobs(token_ids, SampledLogprobs(logits, torch.tensor(token_ids), asking).read())


class PendingTokens:
    """Tokens that are drawn on the device while the host does other work. They equal those of `sample`."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow], previous_tokens: Tensor | None = None) -> None:
        """Begin to draw from `logits` [N, V], which may change afterwards. `previous_tokens`: see `edited_scores`."""
        is_plain = _are_plain(rows)
        self._scores, self._rows = _scores_of(logits, rows, is_plain, True, previous_tokens), rows
        width = min(heads.WIDTHS[-1], logits.shape[-1])
        self.on_device = _draw(self._scores, rows, width, is_plain) if rows else logits.new_empty(0, dtype=torch.int64)
        """Token ids [N] on the device, below 0 where the host must draw from more of the row."""
        self._on_host = HostCopy(self.on_device)
        self._logprobs = SampledLogprobs(logits, self.on_device, () if is_plain else rows, previous_tokens)

    def read(self) -> tuple[list[SampledToken], list[int]]:
        """Wait for the device; return the tokens [N], and the indices of rows whose token is known only now."""
        token_ids: list[int] = self._on_host.read()[0]
        late = [i for i, token_id in enumerate(token_ids) if token_id == _OPEN] if _OPEN in token_ids else []
        _draw_open(token_ids, self._scores, self._rows, [self._scores.shape[-1]])
        return _with_logprobs(token_ids, self._logprobs.read(token_ids if late else None)), late


def _with_logprobs(token_ids: Sequence[int], logprobs: Mapping[int, TokenLogprobs]) -> list[SampledToken]:
    if not logprobs:
        return [SampledToken(token_id) for token_id in token_ids]
    return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


def _are_plain(rows: Sequence[SampleRow]) -> bool:
    """Return whether all rows are drawn from as they are, as most are. One look at each row, in every step."""
    return all(row.is_plain and row.allowed is None for row in rows)


def _scores_of(
    logits: Tensor,
    rows: Sequence[SampleRow],
    is_plain: bool,
    copy: bool = False,
    previous_tokens: Tensor | None = None,
) -> Tensor:
    """Return `edited_scores`; the logits themselves where no row is edited, and none may be sorted later."""
    if not is_plain and any(row.is_edited or row.is_filtered for row in rows):
        return edited_scores(logits, rows, copy, previous_tokens)
    return logits


def _draw_open(token_ids: list[int], scores: Tensor, rows: Sequence[SampleRow], widths: Sequence[int]) -> None:
    """Replace every `_OPEN` in `token_ids`, by heads of `widths` in turn."""
    for width in widths:
        if _OPEN not in token_ids:
            break
        open_rows = [i for i, token_id in enumerate(token_ids) if token_id == _OPEN]
        for first in range(0, len(open_rows), SORTED_AT_ONCE):
            some = open_rows[first : first + SORTED_AT_ONCE]
            drawn = _draw_cut(scores[some], [rows[i] for i in some], width).tolist()
            for i, token_id in zip(some, drawn, strict=True):
                token_ids[i] = token_id


def _draw(scores: Tensor, rows: Sequence[SampleRow], width: int, is_plain: bool) -> Tensor:
    """Return token ids [N], greedy, uncut or cut as each row asks; `_OPEN` where `_draw_cut` needs a wider head."""
    cut = [] if is_plain else [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    uncut = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
    if len(cut) == len(rows):
        return _draw_cut(scores, rows, width)
    if uncut and has_kernels(scores.device):
        token_ids, uncut = _draw_in_one_pass(scores, rows), []
    elif len(uncut) == len(rows):
        return _draw_uncut(scores, rows)
    else:
        token_ids = argmax(scores)
    if cut:
        at = copy_to(scores.device, torch.tensor(cut))
        token_ids[at] = _draw_cut(scores[at], [rows[i] for i in cut], width)
    if uncut:
        at = copy_to(scores.device, torch.tensor(uncut))
        token_ids[at] = _draw_uncut(scores[at], [rows[i] for i in uncut])
    return token_ids


def argmax(scores: Tensor) -> Tensor:
    """Return the first highest score of each row, [N]. On a CPU by NumPy: torch takes 12 times as long in bfloat16."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(scores.float().numpy().argmax(-1))


def _draw_in_one_pass(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return token ids [N]: `_draw_uncut`, and greedy rows, in one kernel that reads the scores once."""
    from crossdock.kernels.gpu.triton_sampling import draw_tokens  # Triton is not on every machine

    temperatures = torch.tensor([[0.0 if row.is_greedy else row.params.temperature] for row in rows])
    return draw_tokens(scores, copy_to(scores.device, temperatures), row_keys(rows, scores.device))


def _draw_uncut(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return token ids [N] drawn from the whole of each distribution."""
    device = scores.device
    hashed, keys = hashed_ids(scores.shape[-1], device), row_keys(rows, device)
    temperatures = temperatures_of(rows, device)
    return torch.cat(
        [
            argmax((scores[block] / temperatures[block]).sub_(negative_gumbel(hashed, keys[:, block])))
            for block in blocks_of(scores)
        ]
    )


def _draw_cut(scores: Tensor, rows: Sequence[SampleRow], width: int) -> Tensor:
    """Draw token ids [N] from the part of each distribution that min-p, top-k and top-p keep; `_OPEN` where this part
    may be more than the `width` highest scores."""
    device = scores.device
    hashed, keys = hashed_ids(scores.shape[-1], device), row_keys(rows, device)
    head, ids, floor, is_settled = heads.cut_head(scores, rows, temperatures_of(rows, device), width)
    finish = (head - negative_gumbel(hashed[ids], keys)).masked_fill_(head < floor, -torch.inf)
    winner = finish.argmax(-1, keepdim=True)
    return ids.gather(-1, winner).squeeze(-1).masked_fill_(~is_settled, _OPEN)
