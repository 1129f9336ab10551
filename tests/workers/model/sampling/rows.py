"""Logits and rows for tests of the sampler."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import sample
from crossdock.workers.schedule.request.submission import SamplingParams

VOCAB = 49152
EOS = (2, 7)


def random_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0, spread: float = 4.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def make_row(position: int = 5, prompt: int = 2, allowed: Tensor | None = None, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), list(range(position)), prompt, EOS, allowed)


def oracle(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Return one row [V] through transformers' processors, in vLLM's order; the cut tokens are -inf."""
    scores = logits[None].float()
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores[0]


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return [token.token_id for token in sample(logits, rows)]


def draw_many(logits: Tensor, num_draws: int, **params: Any) -> list[int]:
    """Draw from one distribution [V] at as many positions. A range stands for the tokens: only its length matters."""
    sampling = SamplingParams(**params)
    rows = [SampleRow(sampling, range(position), 0) for position in range(num_draws)]
    return draw(logits.expand(num_draws, -1), rows)


def chi_square(tokens: Iterable[int], probabilities: Tensor) -> float:
    """Return how many standard deviations the statistic lies from its mean; rare tokens are counted as one."""
    counts = torch.zeros(len(probabilities), dtype=torch.float64)
    for token, count in Counter(tokens).items():
        counts[token] = count
    expected = probabilities.double() / probabilities.sum() * counts.sum()
    assert not counts[expected == 0].any(), "a token that was cut was drawn"
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * freedom)
