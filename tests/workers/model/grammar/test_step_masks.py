"""Masks of a step's grammars, computed together: the same bits as each alone, and slow ones are charged alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from crossdock.workers.model.grammar import step_masks
from crossdock.workers.model.grammar.matcher import new_matcher
from crossdock.workers.model.grammar.state import GrammarState, MaskBudget
from crossdock.workers.model.grammar.step_masks import StepMasks
from crossdock.workers.schedule.request.submission import Grammar
from tests.workers.replica.speculating import _BYTES

KINDS = ("[a-f]+", "(.|\n)*", '"[a-z]{3}": [0-9]', "b|cd")


def state_of(pattern: str, text: bytes = b"", vocab_size: int = 300, budget: MaskBudget | None = None) -> GrammarState:
    num_words = -(-_BYTES.vocab_size // 32)
    matcher = new_matcher(_BYTES, Grammar("regex", pattern))
    state = GrammarState(matcher, vocab_size, budget or MaskBudget(), num_words)
    for token_id in text:
        state.accept(token_id)
    return state


class Counted:
    """In place of llguidance's threads: computes masks one by one, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def unsafe_compute_mask_ptr(
        self, places: Sequence[tuple[LLMatcher, int]], address: int, num_bytes: int, num_rows: int
    ) -> None:
        self.calls.append(len(places))
        step_masks.LLExecutor(1).unsafe_compute_mask_ptr(places, address, num_bytes, num_rows)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    counted = Counted()
    monkeypatch.setattr(step_masks, "_executor", lambda: counted)
    monkeypatch.setattr(step_masks, "ALLOWED_SECONDS", float("inf"))  # a busy machine makes any mask slow
    return counted


@pytest.mark.parametrize("vocab_size", [100, 256, 290, 1000])
def test_masks_computed_together_have_the_bits_of_each_alone(counted: Counted, vocab_size: int) -> None:
    """Also of a text that has ended, of one that broke its grammar, and of logits wider or narrower than the
    tokenizer."""
    texts = [(kind, b"") for kind in KINDS] + [("b|cd", b"c"), ("b|cd", b"b"), ("b|cd", b"x")]
    states = [state_of(kind, text, vocab_size) for kind, text in texts]
    alone = [state_of(kind, text, vocab_size).mask() for kind, text in texts]
    packed = StepMasks().of(states)
    assert counted.calls == [5], "those that have ended are known without llguidance's threads"
    for words, mask in zip(packed, alone, strict=True):
        bits = np.unpackbits(words.numpy().view(np.uint8), bitorder="little").view(np.bool_)
        assert torch.equal(torch.from_numpy(bits[:vocab_size].copy()), mask)


def test_one_grammar_is_computed_without_other_threads(counted: Counted) -> None:
    StepMasks().of([state_of(KINDS[0])])
    assert counted.calls == []


def test_slow_masks_are_computed_alone_until_none_is_slow(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, the slow one is not known. Alone, its owner is charged."""
    masks, states = StepMasks(), [state_of(kind) for kind in KINDS]
    spend, taken = MaskBudget.spend, {"seconds": 1.0}

    def spend_so_many(budget: MaskBudget, _: float, **given: Any) -> None:
        spend(budget, taken["seconds"], allowed=0.01)

    monkeypatch.setattr(MaskBudget, "spend", spend_so_many)
    monkeypatch.setattr(step_masks, "ALLOWED_SECONDS", 0.0)
    masks.of(states)
    assert counted.calls == [4]
    assert not any(state.budget.overdraft for state in states)
    monkeypatch.setattr(step_masks, "ALLOWED_SECONDS", float("inf"))
    for _ in range(2):
        masks.of(states)
    assert counted.calls == [4], "alone, as long as one is slow"
    assert all(state.budget.overdraft > 0 for state in states)
    taken["seconds"] = 0.0
    fresh = [state_of(kind) for kind in KINDS]
    masks.of(fresh)
    masks.of(fresh)
    assert counted.calls == [4, 4]


def test_state_beyond_its_budget_fails_also_among_others(counted: Counted) -> None:
    budget = MaskBudget()
    states = [state_of(KINDS[0]), state_of(KINDS[1]), state_of(KINDS[2], budget=budget)]
    budget.spend(1.0)
    StepMasks().of(states)
    assert counted.calls == [2]
    assert [state.error is None for state in states] == [True, True, False]


def test_vocabulary_of_bytes_is_the_one_that_these_tests_assume() -> None:
    assert isinstance(_BYTES, LLTokenizer)
    assert 256 <= _BYTES.vocab_size <= 300
