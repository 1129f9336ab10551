"""A row of logits that is not finite has no token. No other row notices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import PendingTokens, sample

from .rows import make_row, random_logits

VOCAB = 600
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 9},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.0, "top_p": 0.999, "top_k": 590},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": ((7, 3.0),), "allowed_token_ids": tuple(range(400))},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 0, "logprobs_mode": "raw_logits"},
    {"temperature": 1.0, "top_k": 9, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": (1, 5)},
]
GRAMMAR = torch.arange(VOCAB) < 300


def rows_of(ways: list[dict[str, Any]], with_grammar: bool) -> list[SampleRow]:
    return [make_row(allowed=GRAMMAR if with_grammar else None, **way) for way in ways]


def broken(number: float, at: slice) -> Tensor:
    logits = random_logits(1, VOCAB, seed=3)
    logits[0, at] = number
    return logits


BROKEN = {
    "all NaN": broken(float("nan"), slice(None)),
    "one NaN": broken(float("nan"), slice(37, 38)),
    "first is NaN": broken(float("nan"), slice(0, 1)),
    "one infinity": broken(float("inf"), slice(37, 38)),
    "many infinities": broken(float("inf"), slice(20, 290)),
    "all minus infinity": broken(float("-inf"), slice(None)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_grammar", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_row_that_is_not_finite_has_no_token_and_other_rows_have_theirs(
    way: dict[str, Any], with_grammar: bool, dtype: torch.dtype
) -> None:
    fine = random_logits(4, VOCAB).to(dtype)
    alone = sample(fine, rows_of([way, WAYS[0], WAYS[1], WAYS[8]], with_grammar))
    for name, row in BROKEN.items():
        logits = torch.cat([fine[:2], row.to(dtype), fine[2:]])
        ways = [way, WAYS[0], way, WAYS[1], WAYS[8]]
        drawn = sample(logits, rows_of(ways, with_grammar))
        ahead, _ = PendingTokens(logits.clone(), rows_of(ways, with_grammar)).read()
        for tokens in (drawn, ahead):
            assert [token.is_not_finite for token in tokens] == [False, False, True, False, False], name
            assert [(token.token_id, token.logprobs) for i, token in enumerate(tokens) if i != 2] == [
                (token.token_id, token.logprobs) for token in alone
            ]
        (token,) = sample(row.to(dtype), rows_of([way], with_grammar))
        assert token.is_not_finite, f"{name}, alone"


def test_tokens_that_a_model_forbids_by_minus_infinity_are_no_fault() -> None:
    logits = random_logits(1, VOCAB).repeat(len(WAYS), 1)
    logits[:, 1::2] = -torch.inf
    for with_grammar in (False, True):
        for token in sample(logits, rows_of(WAYS, with_grammar)):
            assert not token.is_not_finite
            assert token.token_id % 2 == 0
