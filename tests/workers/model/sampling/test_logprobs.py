"""Log-probabilities are those of the logits as given, or of the mode that a row names, for the rows that ask."""

from typing import Any

import pytest
import torch

from crossdock.workers.model.sampling import logprobs
from crossdock.workers.model.sampling.logprobs import PendingLogprobs
from crossdock.workers.model.sampling.sampler import sample
from crossdock.workers.schedule.request.request import TokenLogprobs

from .rows import make_row, oracle, random_logits


def answers_of(logits: torch.Tensor, token_ids: Any, top_n: int) -> list[TokenLogprobs]:
    return PendingLogprobs(logits, token_ids, top_n).read()


def test_logprobs_are_of_logits_as_given() -> None:
    logits = random_logits(4, 1000)
    row = make_row(logprobs=3, logit_bias=((9, 100.0),), temperature=0.5, top_p=0.5, repetition_penalty=1.5)
    expected = logits.double().log_softmax(-1)
    for i, token in enumerate(sample(logits, [row] * 4)):
        assert token.token_id == 9
        assert token.logprobs is not None
        assert token.logprobs.token_id == 9
        assert token.logprobs.logprob == pytest.approx(expected[i, 9].item(), abs=1e-5)
        assert token.logprobs.rank == 1 + (logits[i] > logits[i, 9]).sum().item()
        assert [t for t, _ in token.logprobs.top] == logits[i].topk(3).indices.tolist()
        assert [p for _, p in token.logprobs.top] == pytest.approx(expected[i].topk(3).values.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "cuts",
    [
        {},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.6, "top_p": 0.9},
        {"top_k": 1},
        {"top_p": 0.8, "min_p": 0.01},
    ],
    ids=str,
)
def test_processed_logprobs_are_of_what_a_token_is_drawn_from(cuts: dict[str, float]) -> None:
    """vLLM's meaning: bias and masks first, then temperature and the cuts, where tokens that are cut have -inf."""
    logits, allowed = random_logits(3, 1000, spread=2.0), torch.arange(1000) % 7 > 0
    edited = logits.clone()
    edited[:, 9] += 3.0
    edited[:, ~allowed] = -torch.inf
    wanted = torch.stack([oracle(row, **cuts) for row in edited])
    for mode, scores in (("processed_logprobs", wanted.double().log_softmax(-1)), ("processed_logits", wanted)):
        row = make_row(logprobs=1000, logprobs_mode=mode, logit_bias=((9, 3.0),), allowed=allowed, **cuts)
        for expected, found in zip(scores, sample(logits, [row] * 3), strict=True):
            assert found.logprobs is not None
            assert found.logprobs.logprob == pytest.approx(expected[found.token_id].item(), abs=1e-5)
            assert dict(found.logprobs.top) == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)


def test_modes_of_a_greedy_row_differ_by_its_edits_and_not_by_its_cuts() -> None:
    """As in vLLM, temperature 0 leaves scale and tail as they are."""
    logits = random_logits(1, 100)
    edited = logits[0].clone()
    edited[9] -= 50.0
    raw, row = logits[0], {"temperature": 0.0, "top_k": 3, "logit_bias": ((9, -50.0),), "logprobs": 100}
    wanted = {"raw_logits": raw, "processed_logits": edited, "raw_logprobs": raw.log_softmax(-1)}
    for mode, expected in {**wanted, "processed_logprobs": edited.log_softmax(-1)}.items():
        (found,) = sample(logits, [make_row(logprobs_mode=mode, **row)])
        assert found.logprobs is not None
        assert dict(found.logprobs.top) == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)


def test_only_rows_that_ask_get_logprobs_and_as_many() -> None:
    wanted = [None, 0, 5, None, 2, 5]
    tokens = sample(random_logits(6, 100), [make_row(logprobs=n) for n in wanted])
    assert [token.logprobs and len(token.logprobs.top) for token in tokens] == [None, 0, 5, None, 2, 5]


def test_logprobs_of_prompt_in_chunks_equal_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(7, 100).bfloat16()
    token_ids = [0, 1, 2, 3, 4, 5, 99]
    whole = answers_of(logits, token_ids, 4)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 250)
    assert answers_of(logits, token_ids, 4) == whole
    assert [answer.token_id for answer in whole] == token_ids
    assert answers_of(logits, torch.tensor(token_ids), 4) == whole
    assert answers_of(logits[:0], [], 4) == []
    assert len(answers_of(logits[:1], [0], 1000)[0].top) == 100


def test_rank_of_equal_logits_is_that_of_the_first() -> None:
    answers = answers_of(torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 4), [0, 1, 2, 3], 2)
    assert [answer.rank for answer in answers] == [3, 1, 1, 4]
    assert answers[0].top == ((1, answers[1].logprob), (2, answers[2].logprob))


def test_listed_tokens_replace_the_likeliest() -> None:
    logits = random_logits(3, 100)
    expected = logits.double().log_softmax(-1)
    rows = [make_row(logprobs=0, logprob_token_ids=(7, 99, 7)), make_row(logprobs=2), make_row(logprobs=0)]
    listed, likeliest, none = (token.logprobs for token in sample(logits, rows))
    assert listed is not None
    assert [token_id for token_id, _ in listed.top] == [7, 99, 7]
    assert [logprob for _, logprob in listed.top] == pytest.approx(expected[0, [7, 99, 7]].tolist(), abs=1e-5)
    assert likeliest is not None
    assert [token_id for token_id, _ in likeliest.top] == logits[1].topk(2).indices.tolist()
    assert none is not None
    assert none.top == ()
