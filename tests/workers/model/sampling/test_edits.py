"""Bias, penalties and masks change the logits as vLLM and transformers do."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from crossdock.workers.model.sampling.edits import edited_scores
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import sample
from crossdock.workers.schedule.request.submission import SamplingParams

from .rows import EOS, draw, make_row, random_logits


def edited(logits: Tensor, row: SampleRow) -> Tensor:
    return edited_scores(logits[None], [row])[0]


def edited_alone(logits: Tensor, row: SampleRow) -> Tensor:
    """Edit one row in plain torch: bias, penalties, then the tokens that `row` forbids."""
    scores, params = logits.float().clone(), row.params
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    output = list(row.token_ids)[row.num_prompt_tokens :]
    for token_id in set(row.token_ids):
        count, score = output.count(token_id), scores[token_id]
        score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        scores[token_id] = score - (
            torch.tensor(params.frequency_penalty) * count + torch.tensor(params.presence_penalty) * (count > 0)
        )
    ends = [*EOS, *params.stop_token_ids] if len(output) < params.min_tokens else []
    for token_id in {*ends, *(word[0] for word in params.bad_words)}:
        scores[token_id] = -torch.inf
    return scores


EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 0.7, "presence_penalty": -0.4, "frequency_penalty": 1.1, "min_tokens": 12},
    {"min_tokens": 6, "stop_token_ids": (11,)},
    {"logit_bias": ((3, 4.5), (40, -2.25)), "frequency_penalty": 0.1},
    {"bad_words": ((5,), (9,)), "logit_bias": ((5, 30.0),)},
]


def growing_rows(rng: random.Random, count: int = 30) -> list[SampleRow]:
    return [
        SampleRow(SamplingParams(**EDITS[i % len(EDITS)]), [rng.randrange(50) for _ in range(5 + i)], 4, EOS)
        for i in range(count)
    ]


def test_rows_edited_together_equal_rows_edited_alone() -> None:
    """Bit for bit, over several steps, whatever the other rows ask for."""
    rng = random.Random(1)
    rows = growing_rows(rng)
    for step in range(5):
        logits = random_logits(len(rows), 50, seed=step)
        expected = torch.stack([edited_alone(each, row) for each, row in zip(logits, rows, strict=True)])
        assert torch.equal(edited_scores(logits, rows), expected)
        for row in rows:
            row.token_ids.append(rng.randrange(50))  # type: ignore[attr-defined]


def test_last_tokens_that_only_the_device_knows_are_penalised_like_known_ones() -> None:
    """Whether a token is new to its row or not, and beside rows whose last token the host knows."""
    rng = random.Random(2)
    rows = growing_rows(rng)
    for step in range(8):
        logits = random_logits(len(rows), 50, seed=step)
        drawn = [rng.choice([*row.token_ids, rng.randrange(50)]) for row in rows]
        expected = [[*row.token_ids, token] for row, token in zip(rows, drawn, strict=True)]
        known = [SampleRow(row.params, ids, 4, EOS) for row, ids in zip(rows, expected, strict=True)]
        order = list(range(len(rows)))
        rng.shuffle(order)
        previous_tokens = torch.tensor([drawn[i] for i in order])
        for i, row in enumerate(rows):  # as the scheduler does while the step before is in flight
            row.token_ids.append(~order.index(i) if i % 3 or not step else drawn[i])  # type: ignore[attr-defined]
        found = edited_scores(logits, rows, previous_tokens=previous_tokens)
        assert torch.equal(found, edited_scores(logits, known))
        assert torch.equal(found[3], edited_alone(logits[3], known[3]))
        for row, token in zip(rows, drawn, strict=True):
            row.token_ids[-1] = token  # type: ignore[index]


def test_last_token_that_the_host_must_draw_again_is_no_error() -> None:
    row = SampleRow(SamplingParams(repetition_penalty=1.3), [4, 5, ~0], 1, EOS)
    assert edited_scores(random_logits(1, 50), [row], previous_tokens=torch.tensor([-1])).isfinite().all()


def test_repetition_penalty_equals_transformers() -> None:
    logits = random_logits(1, 500)[0]
    row = SampleRow(SamplingParams(repetition_penalty=1.3), [3, 4, 4, 400, 7, 7], 3)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([row.token_ids]), logits[None].clone())[0]
    assert torch.equal(edited(logits, row), expected)


@pytest.mark.parametrize("penalty", [1e-300, 5e-324, 1e-38])
@pytest.mark.parametrize("more", [{"temperature": 0.0}, {"temperature": 2e-5, "seed": 1}])
def test_tiny_repetition_penalty_makes_no_infinity(penalty: float, more: dict[str, Any]) -> None:
    """An infinite score would end the request as one of a model with damaged weights."""
    logits = torch.tensor([[-3.0, 40.0, 90.0, -90.0, 0.0]])
    row = SampleRow(SamplingParams(repetition_penalty=penalty, **more), [1, 3, 4], 3)
    assert edited(logits[0], row).isfinite().all()
    (drawn,) = sample(logits, [row])
    assert (drawn.token_id, drawn.is_not_finite) == (1, False), "the used token with the highest logit"


def test_presence_and_frequency_penalties_count_only_output() -> None:
    logits = random_logits(1, 50)[0]
    row = SampleRow(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [3, 3, 9, 9, 8, 9], 3)
    expected = logits.clone()
    expected[9] -= 0.5 + 0.25 * 2
    expected[8] -= 0.5 + 0.25
    torch.testing.assert_close(edited(logits, row), expected)


def test_token_counts_of_growing_request_catch_up() -> None:
    """A row kept between steps edits like one made again, through several doublings of its buffers."""
    logits = random_logits(1, 1000)[0]
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2)
    rng = random.Random(0)
    token_ids = [rng.randrange(1000) for _ in range(40)]
    kept = SampleRow(params, token_ids, 40)
    for _ in range(60):
        assert torch.equal(edited(logits, kept), edited(logits, SampleRow(params, token_ids, 40)))
        token_ids.extend(rng.randrange(1000) for _ in range(rng.randrange(10)))


def test_bias_is_added_before_penalties() -> None:
    row = SampleRow(SamplingParams(logit_bias=((1, 5.0),), repetition_penalty=2.0), [1], 1)
    assert edited(torch.tensor([0.0, -1.0, 0.0]), row)[1].item() == 2.0, "as in vLLM: positive when it is penalised"


def test_allowed_token_ids_are_the_only_drawn_tokens() -> None:
    logits = random_logits(200, 1000)
    tokens = draw(logits, [make_row(seed=i, allowed_token_ids=(4, 900, 17)) for i in range(200)])
    assert set(tokens) == {4, 900, 17}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}])
def test_end_tokens_before_min_tokens_are_masked(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, 50)
    logits[0, [*EOS, 11]] = torch.tensor([50.0, 49.0, 48.0])
    logits[0, 30] = 20
    row = make_row(position=6, prompt=2, min_tokens=5, stop_token_ids=(11,), **params)
    assert draw(logits, [row]) == [30]
    row.token_ids = [*row.token_ids, 1]
    assert draw(logits, [row])[0] in {*EOS, 11}


def test_grammar_mask_holds_in_every_mode() -> None:
    logits = random_logits(100, 1000)
    allowed = torch.zeros(1000, dtype=torch.bool)
    allowed[[3, 500]] = True
    modes: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-9}, {"temperature": 0.0}]
    for mode in modes:
        rows = [make_row(seed=i, allowed=allowed, **mode) for i in range(100)]
        assert set(draw(logits, rows)) <= {3, 500}


def test_conflicting_masks_leave_a_token() -> None:
    """The grammar has precedence over allowed_token_ids, and these over min_tokens."""
    logits = random_logits(1, 50)
    only_eos = torch.zeros(50, dtype=torch.bool)
    only_eos[EOS[0]] = True
    assert draw(logits, [make_row(allowed=only_eos, min_tokens=100)]) == [EOS[0]]
    assert draw(logits, [make_row(allowed=only_eos, allowed_token_ids=(30,))]) == [EOS[0]]
    assert draw(logits, [make_row(allowed_token_ids=(EOS[0],), min_tokens=100)]) == [EOS[0]]
    pair = only_eos.clone()
    pair[30] = True
    assert draw(logits, [make_row(allowed=pair, allowed_token_ids=(30, 31), min_tokens=100)]) == [30]


def test_bad_word_of_one_token_is_never_drawn() -> None:
    logits = random_logits(200, 100)
    logits[:, [4, 9]] += 20
    params: dict[str, Any] = {"bad_words": ((4,), (9,))}
    assert not {4, 9} & set(draw(logits, [make_row(seed=i, **params) for i in range(200)]))
    assert not make_row(**params).reads_tokens, "no token before it matters"


def test_bad_word_of_several_tokens_loses_its_last_one_after_the_others() -> None:
    """Only the output counts: the prompt may end in the beginning of a word."""
    logits = torch.zeros(1, 50)
    logits[0, [30, 20]] = torch.tensor([9.0, 8.0])
    params = SamplingParams(temperature=0.0, bad_words=((5, 6, 30), (6, 31)))
    assert SampleRow(params, [], 0).reads_tokens
    for prompt, output, drawn in (
        ([1], [5, 6], 20),
        ([1], [6], 30),
        ([1, 5], [6], 30),
        ([5, 6], [], 30),
        ([1], [5, 6, 5], 30),
        ([1], [7, 5, 6], 20),
    ):
        assert draw(logits, [SampleRow(params, [*prompt, *output], len(prompt))]) == [drawn], (prompt, output)


def test_bad_words_of_a_row_kept_between_steps_are_those_of_one_made_again() -> None:
    logits, rng = random_logits(1, 12)[0], random.Random(0)
    params = SamplingParams(bad_words=((3,), (1, 2), (2, 2, 1), (4, 5, 6)))
    token_ids = [1, 2]
    kept = SampleRow(params, token_ids, 2)
    for _ in range(100):
        assert torch.equal(edited(logits, kept), edited(logits, SampleRow(params, list(token_ids), 2)))
        token_ids.append(rng.randrange(7))


def test_bad_words_give_way_to_all_other_masks() -> None:
    logits = random_logits(1, 50)
    only = torch.zeros(50, dtype=torch.bool)
    only[30] = True
    assert draw(logits, [make_row(allowed=only, bad_words=((30,),))]) == [30]
    assert draw(logits, [make_row(allowed_token_ids=(30,), bad_words=((30,),))]) == [30]
    assert draw(logits, [make_row(allowed_token_ids=(30, 31), bad_words=((30,),))]) == [31]
    assert draw(logits, [make_row(allowed_token_ids=(30, EOS[0]), bad_words=((30,),), min_tokens=100)]) == [30]


def test_sampling_leaves_logits_unchanged() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(3, 1000).to(dtype)
        before = logits.clone()
        rows = [make_row(logit_bias=((1, 5.0),)), make_row(top_k=4, repetition_penalty=1.1), make_row(min_tokens=9)]
        sample(logits, rows)
        assert torch.equal(logits, before)


class CountedTuple(tuple[Any, ...]):
    """Counts how often the values are read."""

    num_reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_reads += 1
        return super().__iter__()


def test_bias_and_token_lists_of_a_request_are_read_once_for_all_its_steps() -> None:
    bias, allowed, stop = CountedTuple((i, 0.5) for i in range(300)), CountedTuple(range(300)), CountedTuple((5, 6))
    logits = random_logits(1, 500)
    params = SamplingParams(logit_bias=bias, allowed_token_ids=allowed, stop_token_ids=stop, min_tokens=10)
    row = SampleRow(params, [3], 1, EOS)
    first = edited(logits[0], row)
    for _ in range(5):
        assert torch.equal(edited(logits[0], row), first)
    assert [values.num_reads for values in (bias, allowed, stop)] == [1, 1, 1]
