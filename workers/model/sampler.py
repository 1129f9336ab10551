"""Logits into tokens: edit each row, cut its tail, draw; and the log-probabilities to report.

The draw is Gumbel-max: `argmax(logit / temperature + noise)`, the noise a hash of (seed, position, token id). So a
token depends on its seed, its position and its row's logits, never on the batch, the process or a generator's state.
Against walking a cumulative sum it needs no softmax and no order over the vocabulary, and it bears the last-bit
differences between batch shapes better: a nudged logit changes the token only where two scores nearly tie, and a token
that enters or leaves the kept set moves nothing unless it is the winner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from crossdock.workers.schedule.request import SamplingParams, TokenLogprobs

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM: the division would overflow soon after

# How much of a row is sorted, in turns, until the kept set lies inside. Milliseconds for one row of 49152 on a Zen 4
# core (torch 2.13): topk(256) 0.16, topk(4096) 0.66, full sort 3.5.
_HEADS = (256, 4096)

_CPU_BLOCK = 1 << 19  # elements worked on at once, 2 MiB of float32: stays in cache, twice as fast as 32 rows at once

_LOGPROB_CHUNK = 1 << 22  # logits held as float32 at once while scoring a prompt: 16 MiB


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


class TokenCounts:
    """How often a request has used each of its tokens: what penalties look at, caught up with rather than recounted."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def catch_up(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Count what is new in `token_ids`; return the distinct ids [U] and each one's count in the output [U]."""
        assert len(token_ids) >= self._num_counted, "tokens were taken back"
        for position in range(self._num_counted, len(token_ids)):
            token_id = token_ids[position]
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._counts[slot] += position >= self._num_prompt_tokens
        self._num_counted = len(token_ids)
        used = len(self._slots)
        return torch.from_numpy(self._ids[:used]), torch.from_numpy(self._counts[:used])


@dataclass(slots=True, eq=False)
class SampleRow:
    """One row of logits and whose it is. Kept beside the request or made anew each step, it gives the same tokens.

    `token_ids` is the request's own growing list, prompt first; the token sampled next has position `len(token_ids)`.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: Sequence[int] = ()  # kept back, with stop_token_ids, until min_tokens are out
    allowed: Tensor | None = None  # [V] bool, the grammar's mask for this step
    counts: TokenCounts | None = field(default=None, repr=False)  # filled when penalties first need it

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1

    @property
    def is_penalized(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """Whether its token can be drawn before the host knows the one before, and nothing but the token is wanted."""
        params = self.params
        reports = params.logprobs is not None or params.prompt_logprobs is not None
        return not (self.is_penalized or reports or params.grammar is not None)

    @property
    def must_go_on(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens

    @property
    def is_edited(self) -> bool:
        """Anything that changes logits before temperature does."""
        return bool(
            self.is_penalized
            or self.must_go_on
            or self.params.logit_bias
            or self.params.allowed_token_ids
            or self.allowed is not None
        )

    @property
    def is_filtered(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1.0 or self.params.min_p > 0.0


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token a row from `logits` [N, V], float or bfloat16, which are left as they are.

    In vLLM's order: logit bias, penalties, masks, temperature, min-p, top-k, top-p. Log-probabilities are of the logits
    as given, before all of these. A row's answer is the same bit for bit whichever rows are sampled with it.

    On a GPU the host waits once, for the tokens; more often only for log-probabilities, and for rows whose kept set is
    larger than the first head.
    """
    assert len(logits) == len(rows), f"{len(logits)} rows of logits for {len(rows)} requests"
    if not rows:
        return []
    token_ids = _choose(logits, rows)
    logprobs = _sampled_logprobs(logits, token_ids, rows)
    return [SampledToken(token_id, logprobs.get(i)) for i, token_id in enumerate(token_ids)]


class Drawn:
    """Tokens of plain rows that a device draws while the host does something else."""

    def __init__(self, logits: Tensor, rows: Sequence[SampleRow]) -> None:
        """Those that `sample` gives for `logits` [N, V], which may change afterwards."""
        self._scores, self._rows = _edited(logits, rows, copy=True), rows
        width = min(_HEADS[-1], logits.shape[-1])
        self.there = _draw(self._scores, rows, width) if rows else logits.new_empty(0, dtype=torch.int64)
        """Token ids [N] on the device, below 0 where the host has to look further."""
        self._here, self._event = self.there, None
        if logits.device.type == "cuda":
            self._here = torch.empty(len(rows), dtype=torch.int64, pin_memory=True)
            self._here.copy_(self.there, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> tuple[list[int], list[int]]:
        """Waits for all that was asked of the device until these tokens were. Returns their ids [N], and which of them
        were found only now."""
        if self._event is not None:
            self._event.synchronize()
        token_ids: list[int] = self._here.tolist()
        late = [i for i, token_id in enumerate(token_ids) if token_id == _OPEN]
        _look_further(token_ids, self._scores, self._rows, [self._scores.shape[-1]])
        return token_ids, late


def logprobs_of(logits: Tensor, token_ids: Sequence[int] | Tensor, top_n: int) -> list[TokenLogprobs]:
    """For each row of `logits` [N, V], the log-probability and rank of its token and the `top_n` likeliest tokens.

    Rows are worked through a few at a time: a long prompt's logits as float32 would not fit beside the model.
    """
    num_rows, vocab_size = logits.shape
    chosen_ids = torch.as_tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    answer: list[TokenLogprobs] = []
    step = max(1, _LOGPROB_CHUNK // vocab_size)
    for start in range(0, num_rows, step):
        logprobs = logits[start : start + step].float().log_softmax(-1)
        ids = chosen_ids[start : start + step]
        chosen = logprobs.gather(-1, ids)
        ranks = (logprobs > chosen).sum(-1) + 1
        top = logprobs.topk(min(top_n, vocab_size))  # [n, top_n]
        answer += [
            TokenLogprobs(token_id, logprob, rank, tuple(sorted(zip(top_ids, tops, strict=True), key=_likeliest_first)))
            for token_id, logprob, rank, top_ids, tops in zip(
                ids.squeeze(-1).tolist(),
                chosen.squeeze(-1).tolist(),
                ranks.tolist(),
                top.indices.tolist(),
                top.values.tolist(),
                strict=True,
            )
        ]
    return answer


def _likeliest_first(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]


def _sampled_logprobs(logits: Tensor, token_ids: Sequence[int], rows: Sequence[SampleRow]) -> dict[int, TokenLogprobs]:
    """Row index to log-probabilities, for the rows that asked. Rows that want the same number go together, so that
    which of several equally likely alternatives a row lists is its own affair."""
    by_top_n: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.params.logprobs is not None:
            by_top_n.setdefault(row.params.logprobs, []).append(i)
    answer: dict[int, TokenLogprobs] = {}
    for top_n, group in by_top_n.items():
        chosen = [token_ids[i] for i in group]
        answer.update(zip(group, logprobs_of(logits[group], chosen, top_n), strict=True))
    return answer


def _choose(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Token ids [N]."""
    scores = _edited(logits, rows)
    first, *wider = (*(width for width in _HEADS if width < scores.shape[-1]), scores.shape[-1])
    token_ids: list[int] = _draw(scores, rows, first).tolist()
    _look_further(token_ids, scores, rows, wider)
    return token_ids


def _look_further(token_ids: list[int], scores: Tensor, rows: Sequence[SampleRow], widths: Sequence[int]) -> None:
    """Replaces what is open in `token_ids`."""
    for width in widths:
        open_rows = [i for i, token_id in enumerate(token_ids) if token_id == _OPEN]
        if not open_rows:
            break
        drawn = _draw_cut(scores[open_rows], [rows[i] for i in open_rows], width).tolist()
        for i, token_id in zip(open_rows, drawn, strict=True):
            token_ids[i] = token_id


def _draw(scores: Tensor, rows: Sequence[SampleRow], width: int) -> Tensor:
    """Token ids [N], each row's in its own way; `_OPEN` where `_draw_cut` needs a wider head."""
    cut = [i for i, row in enumerate(rows) if not row.is_greedy and row.is_filtered]
    uncut = [i for i, row in enumerate(rows) if not row.is_greedy and not row.is_filtered]
    if len(cut) == len(rows):
        return _draw_cut(scores, rows, width)
    if len(uncut) == len(rows):
        return _draw_uncut(scores, rows)
    token_ids = scores.argmax(-1)
    if cut:
        at = _sent(torch.tensor(cut), scores.device)
        token_ids[at] = _draw_cut(scores[at], [rows[i] for i in cut], width)
    if uncut:
        at = _sent(torch.tensor(uncut), scores.device)
        token_ids[at] = _draw_uncut(scores[at], [rows[i] for i in uncut])
    return token_ids


def _draw_uncut(scores: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Token ids [N] from the whole of each distribution."""
    lanes, keys, temperatures = _lanes(scores), _keys(rows, scores.device), _temperatures(rows, scores.device)
    return torch.cat(
        [
            (scores[block] / temperatures[block]).sub_(_log_race(lanes, keys[:, block])).argmax(-1)
            for block in _blocks(scores)
        ]
    )


def _draw_cut(scores: Tensor, rows: Sequence[SampleRow], width: int) -> Tensor:
    """Token ids [N] from what min-p, top-k and top-p leave of each distribution; `_OPEN` where that may be more than
    the `width` highest.

    A row looks at as much of its head as its own kept set needs, so what it draws never depends on its neighbours.
    """
    device, vocab_size = scores.device, scores.shape[-1]
    lanes, keys = _lanes(scores), _keys(rows, device)
    temperatures, cuts = _temperatures(rows, device), _Cuts.of(rows, device)
    row_sums = _row_sums(scores, rows, temperatures)
    head, ids = scores.sort(descending=True) if width == vocab_size else scores.topk(width)  # [N, width] each
    head = head / temperatures
    floor, is_settled = _floor(head, row_sums, cuts, is_all=width == vocab_size)
    finish = (head - _log_race(lanes[ids], keys)).masked_fill_(head < floor, -torch.inf)
    winner = finish.argmax(-1, keepdim=True)
    return ids.gather(-1, winner).squeeze(-1).masked_fill_(~is_settled, _OPEN)


_OPEN = -1  # for a token that is not known yet


def _blocks(scores: Tensor) -> Iterator[slice]:
    """Rows of `scores` [N, V] to work on together: all at once but on a CPU."""
    num_rows, vocab_size = scores.shape
    size = max(1, _CPU_BLOCK // vocab_size) if scores.device.type == "cpu" else num_rows
    for start in range(0, num_rows, size):
        yield slice(start, start + size)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU's tensor on `device`, without waiting for what that still computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


# Edits: one row at a time, in place.


def _edited(logits: Tensor, rows: Sequence[SampleRow], copy: bool = False) -> Tensor:
    """Scores [N, V] float32, where nothing changes them perhaps the logits themselves, unless a `copy` is wanted."""
    edited = [i for i, row in enumerate(rows) if row.is_edited]
    scores = logits.to(torch.float32, copy=copy or bool(edited))
    for i in edited:
        _edit(scores[i], rows[i])
    return scores


def _edit(scores: Tensor, row: SampleRow) -> None:
    """Bias, penalties and masks on one row's `scores` [V]."""
    params, device = row.params, scores.device
    if params.logit_bias:
        ids, bias = zip(*params.logit_bias, strict=True)
        scores.index_add_(0, _sent(torch.tensor(ids), device), _sent(torch.tensor(bias), device))
    if row.is_penalized:
        _penalize(scores, row)
    mask = _mask(row, len(scores))
    if mask is not None:
        scores.masked_fill_(_sent(mask.logical_not(), device), -torch.inf)


def _penalize(scores: Tensor, row: SampleRow) -> None:
    """Repetition penalty (Keskar et al., 2019) over prompt and output; presence and frequency over the output."""
    if row.counts is None:
        row.counts = TokenCounts(row.num_prompt_tokens)
    ids, counts = (_sent(tensor, scores.device) for tensor in row.counts.catch_up(row.token_ids))
    used = scores[ids]
    penalty = row.params.repetition_penalty
    used = torch.where(used > 0, used / penalty, used * penalty)
    used -= row.params.frequency_penalty * counts + row.params.presence_penalty * (counts > 0)
    scores[ids] = used


def _mask(row: SampleRow, vocab_size: int) -> Tensor | None:
    """The tokens a row may use, [V] bool on the CPU; None for all.

    The grammar comes first, then allowed_token_ids, then min_tokens; what would leave nothing of those before it is
    dropped, so that there is always a token and never one that breaks the grammar.
    """
    masks = [] if row.allowed is None else [row.allowed]
    if row.params.allowed_token_ids:
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[list(row.params.allowed_token_ids)] = True
        masks.append(mask)
    if row.must_go_on:
        mask = torch.ones(vocab_size, dtype=torch.bool)
        mask[[*row.eos_token_ids, *row.params.stop_token_ids]] = False
        masks.append(mask)
    answer = None
    for mask in masks:
        narrowed = mask if answer is None else answer & mask
        if answer is None or narrowed.any():
            answer = narrowed
    return answer


# Filters: rows together, each by its own numbers. Neutral numbers stand for what a row did not ask for.


def _temperatures(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    return _sent(torch.tensor([[row.params.temperature] for row in rows]), device)  # [N, 1]


def _row_sums(scores: Tensor, rows: Sequence[SampleRow], temperatures: Tensor) -> Tensor:
    """Where top-p is a share of the whole row, the row's sum of exp(scaled score - the highest), else inf. [N, 1]"""
    sums = torch.full((len(rows), 1), torch.inf, dtype=torch.float64, device=scores.device)
    params = [row.params for row in rows]
    is_nuclear = [p.top_p < 1 and p.top_k <= 0 and p.min_p <= 0 for p in params]
    if any(is_nuclear):
        # By log_softmax, whose sum runs along one row at a time: a plain sum over a lone row is split among threads.
        for block in _blocks(scores):
            if any(is_nuclear[block]):
                scaled = scores[block] / temperatures[block]
                sums[block] = scaled.log_softmax(-1).amax(-1, keepdim=True).neg_().double().exp_()
        others = [[not it] for it in is_nuclear]  # that share a block with one
        sums.masked_fill_(_sent(torch.tensor(others), scores.device), torch.inf)
    return sums


class _Cuts(NamedTuple):
    """Where each row's tail is cut, as columns [N, 1]."""

    top_k: Tensor  # int64, the vocabulary's size and more where unset
    top_p: Tensor  # float64, 2 where unset: a sum of floats may pass 1
    log_min_p: Tensor  # float32, -inf where unset

    @classmethod
    def of(cls, rows: Sequence[SampleRow], device: torch.device) -> "_Cuts":
        params = [row.params for row in rows]
        return cls(
            _sent(torch.tensor([[p.top_k if p.top_k > 0 else 1 << 40] for p in params]), device),
            _sent(torch.tensor([[p.top_p if p.top_p < 1 else 2.0] for p in params], dtype=torch.float64), device),
            _sent(torch.tensor([[p.min_p] for p in params]).log_(), device),
        )


def _floor(head: Tensor, row_sums: Tensor, cuts: _Cuts, is_all: bool) -> tuple[Tensor, Tensor]:
    """The lowest score kept [n, 1], and whether `head` is known to hold all that are kept [n].

    `head` [n, K] is each row's largest scaled scores, descending; `is_all` where that is the whole row. Equal scores
    are kept or cut together: which of them a sort puts first is an accident.
    """
    width = head.shape[-1]
    peak, last = head[:, :1], head[:, -1:]
    floor = peak + cuts.log_min_p
    kth = head.gather(-1, cuts.top_k.clamp(max=width) - 1)
    floor = torch.where(cuts.top_k <= width, torch.maximum(floor, kth), floor)
    # Does the head hold all that min-p and top-k leave? Then top-p is a share of that, else of the whole row. Where
    # they do cut, but below the head, it is neither: `row_sums` is inf, the floor sinks to the last, the row goes on.
    is_exhausted = (last == -torch.inf) | is_all
    is_whole = (floor > last) | is_exhausted
    weights = (head - peak).double().exp_().masked_fill_(head < floor, 0.0)
    sums = weights.cumsum(-1)
    is_nucleus = sums - weights < cuts.top_p * torch.where(is_whole, sums[:, -1:], row_sums)
    floor = torch.maximum(floor, head.masked_fill(~is_nucleus, torch.inf).amin(-1, keepdim=True))
    return floor, ((floor > last) | is_exhausted).squeeze(-1)


# Randomness: counter-based, in 32-bit integers that wrap alike on every device.


def _lanes(scores: Tensor) -> Tensor:
    """Each token id hashed [V] int32: the part of the noise that all rows share."""
    return _hashed_ids(scores.shape[-1], scores.device)


@lru_cache(maxsize=4)  # one model a process; tests have more
def _hashed_ids(vocab_size: int, device: torch.device) -> Tensor:
    return _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _keys(rows: Sequence[SampleRow], device: torch.device) -> Tensor:
    """Two 32-bit words a row, [2, N, 1] int32, hashed from seed and position; the second is odd."""
    keys = [_mix64(_mix64(row.params.seed) + len(row.token_ids)) for row in rows]
    words = np.array([keys, [key >> 32 | 1 for key in keys]], dtype=np.uint64).astype(np.uint32).view(np.int32)
    return _sent(torch.from_numpy(words).unsqueeze(-1), device)


def _log_race(lanes: Tensor, keys: Tensor) -> Tensor:
    """Minus Gumbel noise [N, K] for the tokens of `lanes` ([K] or [N, K]), each the same wherever it stands.

    Put otherwise, the log of an exponential variate: tokens race, each at the rate of its probability.
    """
    bits = _mix32((lanes ^ keys[0]) * keys[1])
    # Near zero lie the likely winners, and float32 is finest there: all bits matter. At 1 the log would be infinite.
    uniform = bits.float().abs_().mul_(2.0**-31).clamp_(2.0**-32, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix32(x: Tensor) -> Tensor:
    """Wellons' lowbias32 on int32, less its last step, which stirs low bits only."""
    x = x ^ _shift_right(x, 16)
    x *= 0x7FEB352D
    x ^= _shift_right(x, 15)
    x *= 0x846CA68B - (1 << 32)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, where int32's own shift is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix64(x: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood, 2014)."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
    return x ^ x >> 31
