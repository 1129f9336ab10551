"""Draws follow the distribution, and draws at different seeds and positions are independent."""

import math
from itertools import pairwise

import pytest
import torch

from .rows import VOCAB, chi_square, draw, draw_many, make_row, random_logits


@pytest.mark.parametrize("seed", [0, -1, 12345678901234567890])
def test_draws_over_positions_follow_softmax(seed: int) -> None:
    logits = random_logits(1, 200, seed=3, spread=1.5)[0]
    tokens = draw_many(logits, 20_000, seed=seed, temperature=0.8)
    assert abs(chi_square(tokens, (logits / 0.8).softmax(-1))) < 4


def test_draws_over_seeds_follow_softmax() -> None:
    """Neighbouring seeds at one position are as independent as positions are."""
    logits = random_logits(1, 100, seed=4, spread=1.0)[0]
    rows = [make_row(seed=seed) for seed in range(20_000)]
    assert abs(chi_square(draw(logits.expand(len(rows), -1), rows), logits.softmax(-1))) < 4


def test_draws_from_large_flat_vocabulary_are_uniform() -> None:
    """Every token of 49152 is drawn at its rate: in 64 buckets by the id's low bits and by its high bits."""
    tokens = torch.tensor(draw_many(torch.zeros(VOCAB), 3_000))
    for buckets in (tokens % 64, tokens // (VOCAB // 64)):
        assert abs(chi_square(buckets.tolist(), torch.full((64,), 1 / 64))) < 4


def test_successive_draws_are_independent() -> None:
    logits = torch.zeros(8)
    tokens = draw_many(logits, 20_001)
    pairs = [8 * first + second for first, second in pairwise(tokens)]
    assert abs(chi_square(pairs, torch.full((64,), 1 / 64))) < 4


def test_draws_at_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """Seed 7 at position 9 is no shifted copy of seed 8 at position 8, nor of any other neighbour."""
    side, choices = 80, 16
    rows = [make_row(seed=seed, position=2 + at) for seed in range(side) for at in range(side)]
    grid = torch.tensor(draw(torch.zeros(len(rows), choices), rows)).reshape(side, side)
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1), (2, -1), (1, -2)):
        shifted = grid.roll((down, right), (0, 1))[2:-2, 2:-2]
        pairs = choices * grid[2:-2, 2:-2] + shifted
        assert abs(chi_square(pairs.flatten().tolist(), torch.full((choices**2,), 1 / choices**2))) < 4


def test_rare_tokens_are_drawn_at_their_rate() -> None:
    """One token in a hundred thousand, shared among a thousand ids: the noise must be fine where it is large."""
    logits = torch.cat([torch.tensor([0.0]), torch.full((999,), math.log(1e-2 / 999))])
    rare = sum(token != 0 for token in draw_many(logits, 20_000))
    assert abs(rare - 20_000 * (1e-2 / 1.01)) < 4 * math.sqrt(200)
