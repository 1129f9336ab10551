"""The tokens that top-k, top-p and min-p keep are those of transformers' processors."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crossdock.workers.model.sampling import heads, sampler

from .rows import VOCAB, chi_square, draw, draw_many, make_row, oracle, random_logits


def kept_set(logits: Tensor, **params: Any) -> set[int]:
    """Return the tokens that can be drawn from one row [V]."""
    return set((heads.kept_scores(logits[None], [make_row(**params)])[0] > -torch.inf).nonzero().flatten().tolist())


@pytest.mark.parametrize(
    "params", [{"top_k": 12}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8, "min_p": 0.02}]
)
def test_draws_with_filters_follow_cut_distribution(params: dict[str, Any]) -> None:
    logits = random_logits(1, 200, seed=5, spread=1.5)[0]
    tokens = draw_many(logits, 10_000, **params)
    assert abs(chi_square(tokens, oracle(logits, **params).softmax(-1))) < 4


CUTS = [
    {"top_k": 1_000},
    {"top_k": 50},
    {"top_k": 255},
    {"top_k": 256},
    {"top_k": 257},
    {"top_k": VOCAB + 5},
    {"top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"min_p": 1e-6},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 2_000, "top_p": 0.9},
    {"min_p": 0.01, "top_p": 0.8},
    {"min_p": 1e-5, "top_p": 0.99},
    {"min_p": 0.05, "top_k": 20, "top_p": 0.6},
]


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("params", CUTS, ids=str)
def test_kept_set_equals_transformers(params: dict[str, Any], spread: float) -> None:
    """At three entropies: the nucleus of 0.95 holds about 43,000 tokens, 18,000 or 350 of 49,152."""
    for seed, temperature in ((0, 1.0), (1, 0.7)):
        logits = random_logits(1, seed=seed, spread=spread)[0]
        top_k, top_p, min_p = min(params.get("top_k", 0), VOCAB), params.get("top_p", 1.0), params.get("min_p", 0.0)
        theirs = oracle(logits, temperature, int(top_k), top_p, min_p)
        expected = set(theirs.isfinite().nonzero().flatten().tolist())
        difference = kept_set(logits, temperature=temperature, **params) ^ expected
        # transformers sums 49,152 floats in float32 from the small end, so its cut is off by a few tokens at the margin
        mass = theirs.new_tensor([(logits / temperature).softmax(-1)[i] for i in difference]).sum().item()
        assert mass < 1e-4, (len(expected), len(difference))
        if "top_p" not in params:
            assert not difference


@given(
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_kept_set_of_rows_full_of_ties_equals_definition(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """Kept is every token no less likely than the last one needed."""
    weights = [math.exp(value) for value in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    floor = weights[order[0]] * min_p * (1 - 1e-6)
    if 0 < top_k < len(order):
        floor = max(floor, weights[order[top_k - 1]])
    left = [i for i in order if weights[i] >= floor]
    total, needed = sum(weights[i] for i in left), []
    margin = 0.0
    for i in left:
        margin = min((abs(sum(weights[j] for j in needed) / total - top_p), margin or 1.0))
        if top_p < 1 and sum(weights[j] for j in needed) >= top_p * total:
            break
        needed.append(i)
    if margin < 1e-9 or any(abs(weights[i] / weights[order[0]] - min_p) < 1e-5 for i in order):
        return  # rounding decides
    expected = {i for i in left if logits[i] >= min(logits[j] for j in needed)}
    assert kept_set(torch.tensor(logits).float(), top_k=top_k, top_p=top_p, min_p=min_p) == expected


def test_ties_at_the_cut_are_kept_together() -> None:
    logits = torch.full((1000,), -5.0)
    logits[[10, 500, 900]] = 3.0
    for params in ({"top_k": 2}, {"top_p": 0.5}):
        assert set(draw_many(logits, 200, **params)) == {10, 500, 900}
    assert len(set(draw_many(torch.zeros(1000), 500, top_k=5))) > 300, "a flat row has one tie, wider than any head"


def test_heads_of_any_width_give_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much of a row is sorted decides only the speed."""
    logits = random_logits(64, 4096, spread=2.5)
    cuts: list[dict[str, Any]] = [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 700, "top_p": 0.97}]
    rows = [make_row(position=i, seed=i, **cuts[i % len(cuts)]) for i in range(len(logits))]
    tokens = draw(logits, rows)
    for widths in ((), (1,), (4, 16, 64), (1024,)):
        monkeypatch.setattr(heads, "WIDTHS", widths)
        assert draw(logits, rows) == tokens


def test_rows_without_a_narrow_head_are_sorted_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU keeps memory for this sort. So the sort's memory does not grow with the rows."""
    logits, sorted_rows = random_logits(9, 600, spread=0.1), list[int]()
    rows = [make_row(seed=i, top_p=0.9) for i in range(9)]
    tokens, whole = draw(logits, rows), sampler._draw_cut

    def counted(scores: torch.Tensor, some: Any, width: int) -> torch.Tensor:
        sorted_rows.extend([len(scores)] * (width == 600))
        return whole(scores, some, width)

    monkeypatch.setattr(sampler, "_draw_cut", counted)
    monkeypatch.setattr(sampler, "SORTED_AT_ONCE", 4)
    assert draw(logits, rows) == tokens
    assert sorted_rows == [4, 4, 1]


def test_filter_that_keeps_all_changes_no_draw() -> None:
    """The noise belongs to the token id, so cutting only tokens that would lose anyway changes nothing."""
    logits = random_logits(32, 1000, spread=2.0)
    plain = draw(logits, [make_row(seed=i) for i in range(32)])
    assert draw(logits, [make_row(seed=i, top_k=1000) for i in range(32)]) == plain
    assert draw(logits, [make_row(seed=i, top_p=1 - 1e-12) for i in range(32)]) == plain


def test_sums_of_weights_are_the_same_in_whatever_order_a_device_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    equal: list[bool] = []
    forwards = Tensor.cumsum

    def backwards(weights: Tensor, dim: int) -> Tensor:
        sums = weights.sum(dim, keepdim=True) - forwards(weights.flip(dim), dim).flip(dim) + weights
        equal.append(torch.equal(sums, forwards(weights, dim)))
        return sums

    monkeypatch.setattr(Tensor, "cumsum", backwards)
    draw(random_logits(4), [make_row(seed=i, top_p=0.9) for i in range(4)])
    assert equal
    assert all(equal)
