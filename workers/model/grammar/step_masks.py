"""The masks of all grammars of a step: packed, and computed in parallel by llguidance's own threads.

One after the other, the masks of 64 streams take longer than the step that hides them.
"""

import time
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from llguidance import LLExecutor
from torch import Tensor

from crossdock.workers.model.grammar.state import ALLOWED_SECONDS, GrammarState


class StepMasks:
    """Computes masks together while none is slow, and alone otherwise, so that a slow one is charged to its owner."""

    def __init__(self) -> None:
        self._is_alone = False

    def of(self, states: Sequence[GrammarState]) -> list[Tensor]:
        """Return the tokens that may come next in each state, packed: [ceil(V/32)] int32 on the CPU, the lowest bit of
        a word first. The bits are those of `GrammarState.mask`."""
        together = () if self._is_alone else [state for state in states if state.can_share and not state.is_over_budget]
        if len(together) < 2:
            before = [state.budget.overdraft for state in states]
            masks = [state.packed_mask() for state in states]
            charged = zip(states, before, strict=True)
            self._is_alone = any(state.budget.overdraft > overdraft for state, overdraft in charged)
            return masks
        shared = dict(zip(map(id, together), self._shared(together), strict=True))
        return [state.packed_mask() if id(state) not in shared else shared[id(state)] for state in states]

    def _shared(self, states: Sequence[GrammarState]) -> list[Tensor]:
        """Compute masks in parallel. Whose mask made them slow is not known, so none is charged: the next are alone."""
        width = max(state.num_words for state in states)
        assert all(state.num_words == width for state in states), "grammars of one tokenizer"
        words = np.zeros((len(states), width), np.int32)
        places = [(state.matcher, place) for place, state in enumerate(states)]
        started = time.monotonic()
        _executor().unsafe_compute_mask_ptr(places, words.ctypes.data, 4 * width, len(states))
        seconds = time.monotonic() - started
        self._is_alone = seconds > ALLOWED_SECONDS
        return [torch.from_numpy(state.fitted(row)) for state, row in zip(states, words, strict=True)]


@lru_cache(maxsize=1)
def _executor() -> LLExecutor:
    """Return llguidance's threads, four fifths of the CPU cores."""
    return LLExecutor()
