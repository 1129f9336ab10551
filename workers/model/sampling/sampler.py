"""Draw one token a row.

The draw is Gumbel-max: `argmax(logit / temperature + noise)`, with noise hashed from (seed, position, token id). So a
token depends on its seed, its position and its row's logits, never on the batch, the process or a generator's state.

Compared with walking a cumulative sum, this needs no softmax and no order over the vocabulary, and it is less
sensitive to the last-bit differences between batch shapes. A nudged logit changes the token only where two scores
nearly tie, and a token that enters or leaves the kept set changes the result only if it is the winner.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from crossdock.workers.model.sampling import heads
from crossdock.workers.model.sampling.devices import HostCopy, blocks_of, copy_to, has_kernels
from crossdock.workers.model.sampling.edits import edited_scores
from crossdock.workers.model.sampling.filters import temperatures_of
from crossdock.workers.model.sampling.logprobs import SampledLogprobs
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.schedule.request.batch import SampledToken
from crossdock.workers.schedule.request.request import TokenLogprobs

SORTED_AT_ONCE = 64
"""Rows whose head is not narrow are drawn so many at a time: sorting 128k tokens takes 5.8 MB a row.

Such rows are rare, and a GPU keeps the memory for them, which pages of the cache do not get."""

_OPEN = -1  # in place of a token that is not known yet
_BROKEN = -2  # in place of a token where the row's highest logit is NaN or infinite


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
    token_ids: list[int] = _marked(_draw(scores, rows, first, is_plain), scores, is_plain).tolist()
    _draw_open(token_ids, scores, rows, wider)
    asking = () if is_plain else rows
    return _with_logprobs(token_ids, SampledLogprobs(logits, torch.tensor(token_ids), asking).read())


class PendingTokens:
    """Tokens that are drawn on the device while the host does other work. They equal those of `sample`."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow], previous_tokens: Tensor | None = None) -> None:
        """Begin to draw from `logits` [N, V], which may change afterwards. `previous_tokens`: see `edited_scores`."""
        is_plain = _are_plain(rows)
        self._scores = _scores_of(logits, rows, is_plain, True, previous_tokens)
        self._rows = rows
        width = min(heads.WIDTHS[-1], logits.shape[-1])
        none = logits.new_empty(0, dtype=torch.int64)
        self.on_device = self._drawn(width, is_plain) if rows else none
        """Token ids [N] on the device, below 0 where the host must draw from more of the row, or there is no token."""
        self._on_host = HostCopy(self.on_device)
        self._logprobs = SampledLogprobs(logits, self.on_device, () if is_plain else rows, previous_tokens)

    def _drawn(self, width: int, is_plain: bool) -> Tensor:
        return _marked(_draw(self._scores, self._rows, width, is_plain), self._scores, is_plain)

    def read(self) -> tuple[list[SampledToken], list[int]]:
        """Wait for the device; return the tokens [N], and the indices of rows whose token is known only now."""
        token_ids: list[int] = self._on_host.read()[0]
        late = [i for i, token_id in enumerate(token_ids) if token_id == _OPEN] if _OPEN in token_ids else []
        _draw_open(token_ids, self._scores, self._rows, [self._scores.shape[-1]])
        return _with_logprobs(token_ids, self._logprobs.read(token_ids if late else None)), late


def _with_logprobs(token_ids: Sequence[int], logprobs: Mapping[int, TokenLogprobs]) -> list[SampledToken]:
    if not logprobs and _BROKEN not in token_ids:
        return [SampledToken(token_id) for token_id in token_ids]
    return [_sampled(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


def _sampled(token_id: int, logprobs: TokenLogprobs | None) -> SampledToken:
    if token_id == _BROKEN or not (logprobs is None or logprobs.is_finite):
        return SampledToken(0, is_not_finite=True)
    return SampledToken(token_id, logprobs)


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
            own = scores[some]
            drawn = _marked(_draw_cut(own, [rows[i] for i in some], width), own).tolist()
            for i, token_id in zip(some, drawn, strict=True):
                token_ids[i] = token_id


def _draw(scores: Tensor, rows: Sequence[SampleRow], width: int, is_plain: bool) -> Tensor:
    """Return token ids [N], greedy, uncut or cut as each row asks; `_OPEN` where `_draw_cut` needs a wider head."""
    cut = [] if is_plain else [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    uncut = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
    if len(cut) == len(rows):
        return _draw_cut(scores, rows, width)
    if uncut and has_kernels(scores.device):
        token_ids = _draw_in_one_pass(scores, rows)
        uncut = []
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


def _marked(token_ids: Tensor, scores: Tensor, is_plain: bool = False) -> Tensor:
    """Return drawn tokens [N], `_BROKEN` in rows where the highest score is NaN or infinite: nothing can be drawn.

    Wherever a row has such a score, the token that is drawn has one. So one score a row is looked at, on the device.
    `is_plain`: no token is `_OPEN`.
    """
    known = token_ids if is_plain else token_ids.clamp(min=0)
    chosen = scores.gather(-1, known[:, None]).squeeze(-1)
    if chosen.device.type == "cpu" and np.isfinite(chosen.float().numpy()).all():
        return token_ids
    is_drawn = chosen.abs() < torch.inf
    return token_ids.where(is_drawn if is_plain else is_drawn | (token_ids < 0), _BROKEN)


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
    hashed = hashed_ids(scores.shape[-1], device)
    keys = row_keys(rows, device)
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
    hashed = hashed_ids(scores.shape[-1], device)
    keys = row_keys(rows, device)
    head, ids, floor, is_settled = heads.cut_head(scores, rows, temperatures_of(rows, device), width)
    finish = (head - negative_gumbel(hashed[ids], keys)).masked_fill_(head < floor, -torch.inf)
    winner = finish.argmax(-1, keepdim=True)
    return ids.gather(-1, winner).squeeze(-1).masked_fill_(~is_settled, _OPEN)


@lru_cache(maxsize=4)  # one model a process; tests have more
def hashed_ids(vocab_size: int, device: torch.device) -> Tensor:
    """Return a hash of every token id [V] int32: the part of the noise that all rows share."""
    return _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))


def row_keys(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    """Return two 32-bit words a row, [2, N, 1] int32, hashed from seed and position; the second is odd."""
    keys = [_mix64(_mix64(row.params.seed) + row.num_tokens) for row in rows]
    words = np.array([keys, [key >> 32 | 1 for key in keys]], dtype=np.uint64).astype(np.uint32).view(np.int32)
    return copy_to(device, torch.from_numpy(words).unsqueeze(-1))


def negative_gumbel(hashed: Tensor, keys: Tensor) -> Tensor:
    """Return minus Gumbel noise [N, K] for the tokens whose hashed ids are given, [K] or [N, K].

    A token has the same noise wherever it stands. This is the log of an exponential variate: tokens race, each at the
    rate of its probability.
    """
    bits = _mix32((hashed ^ keys[0]) * keys[1])
    # Near zero lie the likely winners, and float32 is finest there: all bits matter. At 1 the log would be infinite.
    uniform = bits.float().abs_().mul_(2.0**-31).clamp_(2.0**-32, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix32(x: Tensor) -> Tensor:
    """Wellons' lowbias32 on int32, without its last step, which stirs low bits only."""
    x = x ^ _shift_right(x, 16)
    x *= 0x7FEB352D
    x ^= _shift_right(x, 15)
    x *= 0x846CA68B - (1 << 32)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically, where int32's own shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix64(x: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood, 2014)."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31
