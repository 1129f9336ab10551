"""How far one request is in its grammar: the tokens that may come next, and what its masks cost."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from crossdock.workers.model.grammar.matcher import failure
from crossdock.workers.model.token_bits import unpacked

ALLOWED_SECONDS = 0.01  # for each mask; usual ones take 0.1 ms
_MOST_OVERDRAFT = 0.5  # seconds that all masks of an owner's grammar may take beyond that
_NO_TOKEN = (1 << 31) - 1


@dataclass(slots=True, eq=False)
class MaskBudget:
    """The time that an owner has for the masks of one grammar, in all its requests together.

    Each mask is computed between two steps, so its seconds are a pause for every stream of the replica. llguidance
    bounds one mask; this bounds their sum.
    """

    overdraft: float = 0.0  # seconds of CPU time

    def spend(self, seconds: float, allowed: float = ALLOWED_SECONDS) -> None:
        """Note the CPU time of one mask; the time above `allowed` is an overdraft."""
        self.overdraft = max(0.0, self.overdraft + seconds - allowed)

    @property
    def is_spent(self) -> bool:
        return self.overdraft > _MOST_OVERDRAFT


class GrammarState:
    """How far one request is in its grammar. No method raises: a parser that fails ends only its own request.

    A state holds the request's tokens so far and lives as long as the request: a preemption keeps both.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, budget: MaskBudget, num_words: int = 0) -> None:
        """`num_words`: of 32 tokens, in the tokenizer's own vocabulary; 0: masks are computed one by one."""
        self._matcher = matcher
        self.num_words = num_words
        self._vocab_size = vocab_size
        self.budget = budget
        self._is_too_slow = False
        self._forced: Sequence[int] | None = None  # see `forced`; None: not computed since the last token

    @property
    def matcher(self) -> LLMatcher:
        """The parser, for masks of several states at once."""
        return self._matcher

    @property
    def can_share(self) -> bool:
        """Return whether the mask can be computed beside those of others."""
        return self.num_words > 0 and not self._matcher.is_stopped()

    @property
    def is_over_budget(self) -> bool:
        """Return whether the next mask ends the state."""
        return self.budget.is_spent and not self._matcher.is_error()

    def mask(self) -> Tensor:
        """Return the tokens that may come next, [V] bool on the CPU. See `packed_mask`."""
        return unpacked(self.packed_mask(), self._vocab_size)

    def packed_mask(self) -> Tensor:
        """Return the tokens that may come next as bits, [ceil(V/32)] int32 on the CPU, the lowest bit of a word first.

        End-of-sequence tokens are allowed exactly where the grammar may end. They are the only ones once it must end
        or `error` is set. Ids past the tokenizer's own are never allowed: models pad their vocabulary.
        """
        if self.is_over_budget:
            self._is_too_slow = True
            self._matcher.consume_token(_NO_TOKEN)  # from now on it has failed, and its memory is free
        started = time.thread_time()  # not the clock: other threads must not end a request
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        self.budget.spend(time.thread_time() - started)
        return torch.from_numpy(self.fitted(words))

    def fitted(self, words: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the bits of the tokenizer's tokens for the model's: cut, or with zeros for ids that only it has."""
        fitted = np.zeros(-(-self._vocab_size // 32), np.int32)
        fitted[: len(words)] = words[: len(fitted)]
        return fitted

    def masks(self, drafts: Sequence[int]) -> list[Tensor]:
        """Return `mask`, and the masks after each of `drafts` up to the first that the grammar refuses or ends with.

        The state itself does not change. A draft beyond the limits of the parser fails no request.
        """
        masks = [self.mask()]
        if not drafts or self.finished:
            return masks
        ahead = GrammarState(self._matcher.deep_copy(), self._vocab_size, self.budget, self.num_words)  # in 1 us
        for draft in drafts:
            if not masks[-1][draft]:
                break
            ahead.accept(draft)
            if ahead.finished:
                break
            masks.append(ahead.mask())
        return masks

    def forced(self) -> Sequence[int]:
        """Return the next tokens as far as the grammar allows one alone at each place.

        Where a text is dictated, `mask` allows only the first token of its usual tokens. The last tokens of a dictated
        text are missing where later text could merge with them.
        """
        if self._forced is None:
            started = time.thread_time()
            self._forced = () if self.finished else self._matcher.compute_ff_tokens()
            self.budget.spend(time.thread_time() - started, allowed=0.0)
        return self._forced

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of `drafts` the grammar allows, one after the other; 0 where one is no token at all."""
        return int(self._matcher.deep_copy().validate_tokens(list(drafts)))  # a copy: an unknown id makes it fail

    def accept(self, token_id: int) -> None:
        """Advance by the sampled token. A token that `mask` does not allow sets `error`."""
        self._matcher.consume_token(token_id)
        forced = self._forced
        self._forced = None
        if forced and len(forced) > 1 and forced[0] == token_id:
            self._forced = forced[1:]

    @property
    def finished(self) -> bool:
        """Whether no text may follow: the grammar cannot continue, its end was accepted, or `error` is set."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the parser failed: a token outside the mask, or a step beyond its limits. None: the parser works."""
        return "the grammar takes too long to follow" if self._is_too_slow else failure(self._matcher)
