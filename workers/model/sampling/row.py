"""One row of logits and the request it belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.model.sampling.devices import copy_to
from crossdock.workers.model.token_bits import packed, unpacked
from crossdock.workers.schedule.request.submission import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures under this are greedy, as in vLLM: the division would overflow soon after


class TokenCounts:
    """How often a request has used each of its tokens, for penalties. Only new tokens are counted at each step."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_counted = 0
        self._slots: dict[int, int] = {}  # by token id
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)

    def catch_up(self, token_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Count the new tokens; return the distinct ids [U] and how often each is in the output [U].

        A last token below 0 is not known yet, and not counted. The arrays are valid until the next call.
        """
        num_known = len(token_ids) - (len(token_ids) > 0 and token_ids[-1] < 0)
        assert num_known >= self._num_counted, "tokens were taken back"
        for position in range(self._num_counted, num_known):
            token_id = token_ids[position]
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._counts[slot] += position >= self._num_prompt_tokens
        self._num_counted = num_known
        used = len(self._slots)
        return self._ids[:used], self._counts[:used]


@dataclass(slots=True, eq=False)
class _Kept:
    """Masks and counts that the rows of one request keep between steps, each built when a row first needs it."""

    counts: TokenCounts | None = None
    bias: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None
    forbidden: tuple[bool, Tensor] | None = None  # (may the request not end yet, mask [V])
    choosable: Tensor | None = None
    continuing: Tensor | None = None
    not_bad: Tensor | None = None
    bad_by_last: dict[int, list[tuple[int, ...]]] | None = None


@dataclass(slots=True, eq=False)
class SampleRow:
    """One row of logits and the request it belongs to. A row gives the same tokens, kept between steps or not.

    `token_ids` is the request's own growing list, prompt first. Its last token is below 0 while only the device knows
    it. The next sampled token has position `num_tokens`.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    eos_token_ids: Sequence[int] = ()  # masked, with stop_token_ids, until min_tokens are out
    allowed: Tensor | None = None  # the grammar's mask for this step: [V] bool, or its bits [ceil(V/32)] int32
    drafts: Sequence[int] = ()  # tokens after `token_ids` that this row takes for granted
    is_greedy: bool = field(init=False)
    is_filtered: bool = field(init=False)  # by top-k, top-p or min-p
    is_penalized: bool = field(init=False)
    reads_tokens: bool = field(init=False)  # its masks depend on the tokens before, which then must be on the host
    is_plain: bool = field(init=False)  # but for a grammar, its logits are drawn from as they are
    _is_always_edited: bool = field(init=False)  # by its parameters, in every step
    _kept: _Kept = field(default_factory=_Kept, repr=False)

    def __post_init__(self) -> None:
        params = self.params  # read once: each property of a row is asked for in every step
        self.is_greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        self.is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self.is_penalized = penalties != (1.0, 0.0, 0.0)
        self.reads_tokens = params.grammar is not None or self._has_long_bad_words
        masks = params.logit_bias, params.allowed_token_ids, params.bad_words
        self._is_always_edited = self.is_penalized or any(masks)
        is_edited = self._is_always_edited or params.min_tokens > 0
        self.is_plain = not (is_edited or self.is_filtered or params.logprobs is not None)

    def after(self, drafts: Sequence[int], allowed: Tensor | None) -> "SampleRow":
        """Return the row of the token after `drafts`. `allowed`: the grammar's mask there."""
        return replace(self, drafts=drafts, allowed=allowed)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.drafts)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def ends_unread(self) -> bool:
        """Whether only the device knows the last token."""
        return len(self.token_ids) > 0 and self.token_ids[-1] < 0

    @property
    def must_continue(self) -> bool:
        """Whether min_tokens are not out yet."""
        return self.num_output_tokens < self.params.min_tokens

    @property
    def is_edited(self) -> bool:
        """Whether anything changes the logits before temperature does."""
        is_masked = self.allowed is not None or (self.params.min_tokens > 0 and self.must_continue)
        return self._is_always_edited or is_masked

    @property
    def bias(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the token ids of logit_bias [B] and their biases [B], built at the first call."""
        if self._kept.bias is None:
            ids, bias = zip(*self.params.logit_bias, strict=True)
            self._kept.bias = np.array(ids, np.int64), np.array(bias, np.float32)
        return self._kept.bias

    def used_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the distinct tokens used so far [U], and how often each is in the output [U]. See `TokenCounts`."""
        if self._kept.counts is None:
            self._kept.counts = TokenCounts(self.num_prompt_tokens)
        ids, counts = self._kept.counts.catch_up(self.token_ids)
        return _with_drafts(ids, counts, self.drafts) if self.drafts else (ids, counts)

    def forbidden_on(self, device: torch.device, vocab_size: int) -> Tensor | None:
        """Return the tokens that the row must not use now, [V] bool on `device`; None: the row may use all.

        Kept between steps, unless a grammar or the previous tokens decide.
        """
        continues = self.must_continue
        if self._kept.forbidden is not None and self._kept.forbidden[0] is continues:
            return self._kept.forbidden[1]
        mask = self._usable(vocab_size)
        if mask is None:
            return None
        forbidden = copy_to(device, mask.logical_not())
        if not self.has_changing_mask:
            self._kept.forbidden = continues, forbidden
        return forbidden

    @property
    def has_changing_mask(self) -> bool:
        """Whether a grammar or the previous tokens decide in each step which tokens the row may use."""
        return self.allowed is not None or self._has_long_bad_words

    def usable_words(self, vocab_size: int) -> Tensor | None:
        """Return the tokens that the row may use as bits, [ceil(V/32)] int32 on the CPU; None for all."""
        params = self.params
        has_others = bool(params.allowed_token_ids or params.bad_words) or self.must_continue
        if self.allowed is not None and self.allowed.dtype is torch.int32 and not has_others:
            return self.allowed
        mask = self._usable(vocab_size)
        return None if mask is None else packed(mask)

    def _usable(self, vocab_size: int) -> Tensor | None:
        """Return the tokens that the row may use, [V] bool on the CPU; None for all.

        The grammar comes first, then allowed_token_ids, then min_tokens, then bad_words. A mask that would leave no
        token of those before it is dropped, so that there is always a token, and never one that breaks the grammar.
        """
        masks = [] if self.allowed is None else [unpacked(self.allowed, vocab_size)]
        if self.params.allowed_token_ids:
            masks.append(self.choosable(vocab_size))
        if self.must_continue:
            masks.append(self.continuing(vocab_size))
        if self.params.bad_words:
            masks.append(self.without_bad_words(vocab_size))
        combined = None
        for mask in masks:
            narrowed = mask if combined is None else combined & mask
            if combined is None or narrowed.any():
                combined = narrowed
        return combined

    @property
    def _has_long_bad_words(self) -> bool:
        return any(len(word) > 1 for word in self.params.bad_words)

    def choosable(self, vocab_size: int) -> Tensor:
        """Return the tokens of allowed_token_ids, [V] bool on the CPU, built at the first call."""
        kept = self._kept
        if kept.choosable is None:
            kept.choosable = torch.zeros(vocab_size, dtype=torch.bool)
            kept.choosable[list(self.params.allowed_token_ids)] = True
        return kept.choosable

    def continuing(self, vocab_size: int) -> Tensor:
        """Return the tokens that end no request, [V] bool on the CPU, built at the first call."""
        kept = self._kept
        if kept.continuing is None:
            kept.continuing = torch.ones(vocab_size, dtype=torch.bool)
            kept.continuing[[*self.eos_token_ids, *self.params.stop_token_ids]] = False
        return kept.continuing

    def without_bad_words(self, vocab_size: int) -> Tensor:
        """Return the tokens that complete no bad word, [V] bool on the CPU.

        As in vLLM, a word is completed by tokens of the output alone.
        """
        kept = self._kept
        if kept.not_bad is None or kept.bad_by_last is None:
            kept.not_bad = torch.ones(vocab_size, dtype=torch.bool)
            kept.not_bad[[word[0] for word in self.params.bad_words if len(word) == 1]] = False
            kept.bad_by_last = {}
            for word in self.params.bad_words:
                if len(word) > 1:
                    kept.bad_by_last.setdefault(word[-2], []).append(word)
        output = self.num_output_tokens
        completing = [
            word[-1]
            for word in (kept.bad_by_last.get(self._last(1)[0], ()) if output else ())
            if len(word) <= output + 1 and self._last(len(word) - 1) == word[:-1]
        ]
        if not completing:
            return kept.not_bad
        mask = kept.not_bad.clone()
        mask[completing] = False
        return mask

    def _last(self, num_tokens: int) -> tuple[int, ...]:
        """Return the last tokens before the one that the row samples."""
        return (*self.token_ids[-num_tokens:], *self.drafts)[-num_tokens:]


def _with_drafts(
    ids: NDArray[np.int64], counts: NDArray[np.float32], drafts: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return distinct ids and their counts in the output, drafts included."""
    drafted, more = np.unique(np.array(drafts, np.int64), return_counts=True)
    is_new = np.isin(drafted, ids, invert=True)
    with_drafts = np.concatenate([counts, np.zeros(is_new.sum(), np.float32)])
    ids = np.concatenate([ids, drafted[is_new]])
    for token_id, count in zip(drafted, more, strict=True):
        with_drafts[ids == token_id] += count
    return ids, with_drafts
