"""The sampler against exact probabilities and transformers' processors, and a row against itself in any company."""

import dataclasses
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from crossdock.workers.model import sampler
from crossdock.workers.model.sampler import SampleRow, logprobs_of, sample
from crossdock.workers.schedule.request import SamplingParams, TokenLogprobs

VOCAB = 49152
EOS = (2, 7)


def some_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0, spread: float = 4.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def make_row(position: int = 5, prompt: int = 2, allowed: Tensor | None = None, **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**params), list(range(position)), prompt, EOS, allowed)


def draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    return [token.token_id for token in sample(logits, rows)]


def draw_many(logits: Tensor, num_draws: int, **params: Any) -> list[int]:
    """Tokens of one distribution [V] at as many positions. A range stands for the tokens: only its length matters."""
    sampling = SamplingParams(**params)
    rows = [SampleRow(sampling, range(position), 0) for position in range(num_draws)]
    return draw(logits.expand(num_draws, -1), rows)


def chi_square(tokens: Iterable[int], probabilities: Tensor) -> float:
    """How many standard deviations the statistic lies from its mean; rare tokens are counted as one."""
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


# The draw follows the distribution.


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 12345678901234567890])
def test_draws_follow_the_softmax(seed: int) -> None:
    logits = some_logits(1, 200, seed=3, spread=1.5)[0]
    tokens = draw_many(logits, 20_000, seed=seed, temperature=0.8)
    assert abs(chi_square(tokens, (logits / 0.8).softmax(-1))) < 4


def test_draws_over_seeds_follow_the_softmax() -> None:
    """Neighbouring seeds at one position are as independent as positions are."""
    logits = some_logits(1, 100, seed=4, spread=1.0)[0]
    rows = [make_row(seed=seed) for seed in range(20_000)]
    assert abs(chi_square(draw(logits.expand(len(rows), -1), rows), logits.softmax(-1))) < 4


def test_draws_over_a_large_flat_vocabulary() -> None:
    """Every token of 49152 gets its turn: in 64 buckets by the id's low bits and by its high bits."""
    tokens = torch.tensor(draw_many(torch.zeros(VOCAB), 3_000))
    for buckets in (tokens % 64, tokens // (VOCAB // 64)):
        assert abs(chi_square(buckets.tolist(), torch.full((64,), 1 / 64))) < 4


def test_successive_draws_are_independent() -> None:
    logits = torch.zeros(8)
    tokens = draw_many(logits, 20_001)
    pairs = [8 * first + second for first, second in pairwise(tokens)]
    assert abs(chi_square(pairs, torch.full((64,), 1 / 64))) < 4


def test_neighbours_in_seed_and_position_are_unrelated() -> None:
    """Seed 7 at position 9 is no shifted copy of seed 8 at position 8, nor of anything else nearby."""
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


@pytest.mark.parametrize(
    "params", [{"top_k": 12}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8, "min_p": 0.02}]
)
def test_draws_follow_the_cut_distribution(params: dict[str, Any]) -> None:
    logits = some_logits(1, 200, seed=5, spread=1.5)[0]
    tokens = draw_many(logits, 10_000, **params)
    assert abs(chi_square(tokens, oracle(logits, **params).softmax(-1))) < 4


# The kept set is transformers'.


def oracle(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """transformers' processors on one row [V], in vLLM's order; the cut tokens are -inf."""
    scores = logits[None].float()
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores[0]


def kept_set(logits: Tensor, **params: Any) -> set[int]:
    """The tokens that can be drawn from one row [V], read off the floor that the sampler computes."""
    rows = [make_row(**params)]
    scores, device = logits[None].float(), logits.device
    temperatures, cuts = sampler._temperatures(rows, device), sampler._Cuts.of(rows, device)
    row_sums = sampler._row_sums(scores, rows, temperatures)
    for width in (*(w for w in sampler._HEADS if w < len(logits)), len(logits)):
        head = scores.topk(width).values / temperatures
        floor, is_settled = sampler._floor(head, row_sums, cuts, is_all=width == len(logits))
        if is_settled:
            return set((scores / temperatures >= floor)[0].nonzero().flatten().tolist())
    raise AssertionError("the whole row settles")


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
def test_kept_set_is_transformers(params: dict[str, Any], spread: float) -> None:
    """At three entropies: the nucleus of 0.95 holds about 43,000 tokens, 18,000 or 350 of 49,152."""
    for seed, temperature in ((0, 1.0), (1, 0.7)):
        logits = some_logits(1, seed=seed, spread=spread)[0]
        wanted = oracle(logits, temperature, min(params.get("top_k", 0), VOCAB), *rest(params))
        expected = set(wanted.isfinite().nonzero().flatten().tolist())
        difference = kept_set(logits, temperature=temperature, **params) ^ expected
        # transformers sums 49,152 floats in float32 from the small end, so its cut is off by a few tokens at the margin
        mass = wanted.new_tensor([(logits / temperature).softmax(-1)[i] for i in difference]).sum().item()
        assert mass < 1e-4, (len(expected), len(difference))
        if "top_p" not in params:
            assert not difference


def rest(params: dict[str, Any]) -> tuple[float, float]:
    return params.get("top_p", 1.0), params.get("min_p", 0.0)


@given(
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_kept_set_in_words(logits: list[int], top_k: int, top_p: float, min_p: float) -> None:
    """On rows full of ties: kept is every token no less likely than the last one needed."""
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
    assert len(set(draw_many(torch.zeros(1000), 500, top_k=5))) > 300, "a flat row has one tie, beyond any head"


def test_heads_of_any_size_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much of a row is sorted is a matter of speed."""
    logits = some_logits(64, 4096, spread=2.5)
    cuts: list[dict[str, Any]] = [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 700, "top_p": 0.97}]
    rows = [make_row(position=i, seed=i, **cuts[i % len(cuts)]) for i in range(len(logits))]
    tokens = draw(logits, rows)
    for heads in ((), (1,), (4, 16, 64), (1024,)):
        monkeypatch.setattr(sampler, "_HEADS", heads)
        assert draw(logits, rows) == tokens


def test_a_filter_that_keeps_all_changes_no_draw() -> None:
    """The noise belongs to the token id, so cutting only what would lose anyway changes nothing."""
    logits = some_logits(32, 1000, spread=2.0)
    plain = draw(logits, [make_row(seed=i) for i in range(32)])
    assert draw(logits, [make_row(seed=i, top_k=1000) for i in range(32)]) == plain
    assert draw(logits, [make_row(seed=i, top_p=1 - 1e-12) for i in range(32)]) == plain


# Greedy.


def test_greedy_is_argmax() -> None:
    logits = some_logits(32)
    assert draw(logits, [make_row(temperature=0.0)] * 32) == logits.argmax(-1).tolist()
    assert draw(logits.bfloat16(), [make_row(temperature=0.0)] * 32) == logits.bfloat16().argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [{"temperature": 9e-6}, {"top_k": 1}, {"temperature": 0.0, "top_p": 0.1, "top_k": 5}]
)
def test_what_else_is_greedy(params: dict[str, Any]) -> None:
    logits = some_logits(8)
    assert draw(logits, [make_row(**params)] * 8) == logits.argmax(-1).tolist()


def test_a_low_temperature_overflows_nothing() -> None:
    logits = some_logits(8, spread=30.0)
    for params in ({}, {"top_p": 0.9}, {"top_k": 9}):
        assert draw(logits, [make_row(temperature=2e-5, **params)] * 8) == logits.argmax(-1).tolist()


# Edits.


def edited(logits: Tensor, row: SampleRow) -> Tensor:
    scores = logits.float().clone()
    sampler._edit(scores, row)
    return scores


def test_repetition_penalty_is_transformers() -> None:
    logits = some_logits(1, 500)[0]
    row = SampleRow(SamplingParams(repetition_penalty=1.3), [3, 4, 4, 400, 7, 7], 3)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([row.token_ids]), logits[None].clone())[0]
    assert torch.equal(edited(logits, row), expected)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = some_logits(1, 50)[0]
    row = SampleRow(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [3, 3, 9, 9, 8, 9], 3)
    expected = logits.clone()
    expected[9] -= 0.5 + 0.25 * 2
    expected[8] -= 0.5 + 0.25
    torch.testing.assert_close(edited(logits, row), expected)


def test_counts_catch_up_as_the_request_grows() -> None:
    """A row kept beside the request edits as one made anew, through several doublings of its buffers."""
    logits = some_logits(1, 1000)[0]
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2)
    rng = random.Random(0)
    token_ids = [rng.randrange(1000) for _ in range(40)]
    kept = SampleRow(params, token_ids, 40)
    for _ in range(60):
        assert torch.equal(edited(logits, kept), edited(logits, SampleRow(params, token_ids, 40)))
        token_ids.extend(rng.randrange(1000) for _ in range(rng.randrange(10)))
    assert kept.counts is not None


def test_logit_bias_adds() -> None:
    logits = some_logits(1, 50)[0]
    expected = logits.clone()
    expected[4] += 3.5
    expected[6] -= 100
    assert torch.equal(edited(logits, make_row(logit_bias=((4, 3.5), (6, -100.0)))), expected)


def test_bias_comes_before_penalties() -> None:
    row = SampleRow(SamplingParams(logit_bias=((1, 5.0),), repetition_penalty=2.0), [1], 1)
    assert edited(torch.tensor([0.0, -1.0, 0.0]), row)[1].item() == 2.0, "as in vLLM: positive when it is penalised"


def test_allowed_token_ids_are_the_only_ones() -> None:
    logits = some_logits(200, 1000)
    tokens = draw(logits, [make_row(seed=i, allowed_token_ids=(4, 900, 17)) for i in range(200)])
    assert set(tokens) == {4, 900, 17}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}])
def test_ends_are_kept_back_until_min_tokens(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, 50)
    logits[0, [*EOS, 11]] = torch.tensor([50.0, 49.0, 48.0])
    logits[0, 30] = 20
    row = make_row(position=6, prompt=2, min_tokens=5, stop_token_ids=(11,), **params)
    assert draw(logits, [row]) == [30]
    row.token_ids = [*row.token_ids, 1]
    assert draw(logits, [row])[0] in {*EOS, 11}


def test_grammar_mask_holds_in_every_mode() -> None:
    logits = some_logits(100, 1000)
    allowed = torch.zeros(1000, dtype=torch.bool)
    allowed[[3, 500]] = True
    modes: list[dict[str, Any]] = [{}, {"top_k": 50}, {"top_p": 0.99}, {"min_p": 1e-9}, {"temperature": 0.0}]
    for mode in modes:
        rows = [make_row(seed=i, allowed=allowed, **mode) for i in range(100)]
        assert set(draw(logits, rows)) <= {3, 500}


def test_masks_never_leave_a_row_without_a_token() -> None:
    """The grammar over allowed_token_ids over min_tokens."""
    logits = some_logits(1, 50)
    only_eos = torch.zeros(50, dtype=torch.bool)
    only_eos[EOS[0]] = True
    assert draw(logits, [make_row(allowed=only_eos, min_tokens=100)]) == [EOS[0]]
    assert draw(logits, [make_row(allowed=only_eos, allowed_token_ids=(30,))]) == [EOS[0]]
    assert draw(logits, [make_row(allowed_token_ids=(EOS[0],), min_tokens=100)]) == [EOS[0]]
    pair = only_eos.clone()
    pair[30] = True
    assert draw(logits, [make_row(allowed=pair, allowed_token_ids=(30, 31), min_tokens=100)]) == [30]


def test_logits_are_left_as_they_are() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = some_logits(3, 1000).to(dtype)
        before = logits.clone()
        rows = [make_row(logit_bias=((1, 5.0),)), make_row(top_k=4, repetition_penalty=1.1), make_row(min_tokens=9)]
        sample(logits, rows)
        assert torch.equal(logits, before)


# Log-probabilities.


def test_logprobs_are_of_the_logits_as_given() -> None:
    logits = some_logits(4, 1000)
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


def test_only_rows_that_ask_get_logprobs_and_as_many() -> None:
    wanted = [None, 0, 5, None, 2, 5]
    tokens = sample(some_logits(6, 100), [make_row(logprobs=n) for n in wanted])
    assert [token.logprobs and len(token.logprobs.top) for token in tokens] == [None, 0, 5, None, 2, 5]


def test_logprobs_of_a_prompt_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = some_logits(7, 100).bfloat16()
    token_ids = [0, 1, 2, 3, 4, 5, 99]
    whole = logprobs_of(logits, token_ids, 4)
    monkeypatch.setattr(sampler, "_LOGPROB_CHUNK", 250)
    assert logprobs_of(logits, token_ids, 4) == whole
    assert [answer.token_id for answer in whole] == token_ids
    assert logprobs_of(logits, torch.tensor(token_ids), 4) == whole
    assert logprobs_of(logits[:0], [], 4) == []
    assert len(logprobs_of(logits[:1], [0], 1000)[0].top) == 100


def test_rank_of_equals_is_that_of_the_first() -> None:
    answers = logprobs_of(torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 4), [0, 1, 2, 3], 2)
    assert [answer.rank for answer in answers] == [3, 1, 1, 4]
    assert answers[0].top == ((1, answers[1].logprob), (2, answers[2].logprob))


# A row's answer is its own.

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 50, 300]),
    top_p=st.sampled_from([1.0, 1.0, 0.2, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1e-7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), (), ((5, 4.0), (6, -4.0))]),
    allowed_token_ids=st.sampled_from([(), (), (), (1, 2, 3, 600)]),
    logprobs=st.sampled_from([None, None, 0, 4, 20]),
    min_tokens=st.sampled_from([0, 0, 50]),
    seed=st.integers(0, 2**64 - 1),
)


@given(st.lists(st.tuples(PARAMS, st.integers(3, 60)), min_size=2, max_size=32), st.booleans(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_a_row_is_the_same_in_any_company(
    requests: list[tuple[SamplingParams, int]], is_bfloat16: bool, rng: random.Random
) -> None:
    """Bit for bit, its token and its log-probabilities: alone, in this batch and in another order."""
    logits = some_logits(len(requests), 1536, seed=len(requests), spread=3.0)
    logits = logits.bfloat16() if is_bfloat16 else logits
    rows = [SampleRow(params, list(range(length)), 3, EOS) for params, length in requests]
    together = sample(logits, rows)
    order = list(range(len(rows)))
    rng.shuffle(order)
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row]) == [together[i]]


def test_a_row_is_the_same_in_any_company_of_a_real_vocabulary() -> None:
    modes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 50},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 2.5},
        {"min_p": 0.1, "logprobs": 5},
        {"temperature": 0.0, "logprobs": 5, "frequency_penalty": 0.4},
        {"temperature": 0.0},
    ]
    logits = some_logits(32)
    rows = [make_row(position=100 + i, seed=i, **modes[i % len(modes)]) for i in range(32)]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(32)] == together


def test_top_p_of_the_top_k_is_the_same_beside_a_row_with_top_p_alone() -> None:
    """Of more than the first head holds: a share of what top-k leaves, though its neighbour needs its whole row."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(100):
        logits = 3 * torch.randn(2, 5_000, generator=generator)
        rows = [make_row(seed=seed, top_p=0.9), make_row(seed=seed, top_p=0.5, top_k=300)]
        assert sample(logits, rows)[1] == sample(logits[1:], rows[1:])[0]


def test_scores_and_noise_are_the_same_alone_bit_for_bit() -> None:
    """What the draw compares, not only what it picks: tokens would hide a last bit almost always."""
    logits = some_logits(32, VOCAB - 3)  # odd lengths: rows begin anywhere in a vector register
    rows = [make_row(seed=i, top_p=0.9, temperature=0.7) for i in range(32)]
    device, lanes = logits.device, sampler._lanes(logits)
    noise = sampler._log_race(lanes, sampler._keys(rows, device))
    scaled = logits / sampler._temperatures(rows, device)
    sums = sampler._row_sums(logits, rows, sampler._temperatures(rows, device))
    for i, row in enumerate(rows):
        one, temperatures = logits[i : i + 1], sampler._temperatures([row], device)
        assert torch.equal(sampler._log_race(lanes, sampler._keys([row], device))[0], noise[i])
        assert torch.equal((one / temperatures)[0], scaled[i])
        assert torch.equal(sampler._row_sums(one, [row], temperatures)[0], sums[i])


class Asked(TorchDispatchMode):
    """Counts what a GPU's host would have to wait for: values that decide what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if masked or func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_host_asks_for_nothing_but_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however rows are mixed; twice where a kept set passes the first head."""
    num_lists, tolist = 0, Tensor.tolist

    def counted(self: Tensor) -> Any:
        nonlocal num_lists
        num_lists += 1
        return tolist(self)

    monkeypatch.setattr(Tensor, "tolist", counted)
    ordinary = [{"temperature": 0.0}, {}, {"top_p": 0.9, "top_k": 50}, {"min_p": 0.1}, {"repetition_penalty": 1.2}]
    for kinds, expected in (([*ordinary], 1), (ordinary[2:3], 1), (ordinary[1:2], 1), ([{}, {"top_k": 1000}], 2)):
        rows = [make_row(seed=i, **kinds[i % len(kinds)]) for i in range(10)]
        num_lists = 0
        with Asked() as asked:
            sample(some_logits(10), rows)
        assert (num_lists, asked.found) == (expected, [])


def test_torch_generators_and_threads_do_not_matter() -> None:
    logits = some_logits(16)
    rows = [make_row(seed=i, **({"top_p": 0.9} if i % 2 else {})) for i in range(16)]
    tokens = draw(logits, rows)
    num_threads = torch.get_num_threads()
    try:
        for seed, threads in ((1, 1), (2, 2)):
            torch.manual_seed(seed)
            torch.set_num_threads(threads)
            state = torch.get_rng_state()
            assert draw(logits, rows) == tokens
            assert torch.equal(torch.get_rng_state(), state), "and the generator is left alone"
    finally:
        torch.set_num_threads(num_threads)


def test_another_process_draws_the_same() -> None:
    script = (
        "import torch\n"
        "from crossdock.workers.schedule.request import SamplingParams\n"
        "from crossdock.workers.model.sampler import SampleRow, sample\n"
        "logits = (torch.arange(8 * 5000) * 2654435761 % 1009).reshape(8, 5000) / 150\n"
        "rows = [SampleRow(SamplingParams(seed=i, top_p=1 - i / 10), range(i + 3), 1) for i in range(8)]\n"
        "tokens = [token.token_id for token in sample(logits, rows)]\n"
    )
    here: dict[str, Any] = {}
    exec(script, here)
    there = subprocess.run([sys.executable, "-c", script + "print(tokens)"], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here["tokens"])


def test_tokens_are_what_they_were() -> None:
    """A change here changes every seeded answer between two versions: say so in the release notes."""
    logits = (torch.arange(8 * 5000) * 2654435761 % 1009).reshape(8, 5000) / 150
    rows = [SampleRow(SamplingParams(seed=42 + i, top_p=1 - i / 10), range(i + 3), 1) for i in range(8)]
    assert draw(logits, rows) == [2915, 1030, 2052, 1175, 3050, 2230, 4652, 1930]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
def test_a_nudge_to_the_logits_rarely_changes_the_token(params: dict[str, Any]) -> None:
    """Rounding differs between batch shapes by 1e-4 at most (fp32 on a CPU): the chance of another token is as small,
    though the kept set changes now and then."""
    logits = some_logits(1, 2000, spread=3.0).expand(2000, -1)
    rows = [make_row(seed=i, **params) for i in range(2000)]
    nudge = some_logits(2000, 2000, seed=9, spread=1e-4)
    changed = sum(a != b for a, b in zip(draw(logits, rows), draw(logits + nudge, rows), strict=True))
    assert changed <= 3


# Shapes.


def test_one_row_of_a_tiny_vocabulary() -> None:
    assert draw(torch.zeros(1, 1), [make_row()]) == [0]
    assert draw(torch.zeros(1, 1), [make_row(top_p=0.5, top_k=5)]) == [0]


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 10), []) == []


def test_strided_logits() -> None:
    logits = some_logits(8, 2000)
    wide = torch.zeros(8, 2100)
    wide[:, :2000] = logits
    rows = [make_row(seed=i, logprobs=2, **({"top_p": 0.9} if i % 2 else {})) for i in range(8)]
    assert sample(wide[:, :2000], rows) == sample(logits, rows)


def test_answers_are_plain_python() -> None:
    (token,) = sample(some_logits(1, 100), [make_row(logprobs=1)])
    assert type(token.token_id) is int
    assert isinstance(token.logprobs, TokenLogprobs)
    assert [type(value) for value in dataclasses.astuple(token.logprobs)] == [int, float, int, tuple]
    assert [type(value) for value in token.logprobs.top[0]] == [int, float]


@pytest.mark.gpu
def test_cuda_draws_what_the_cpu_draws() -> None:
    """But for near ties: the logarithms of two devices differ in their last bit."""
    logits = some_logits(64)
    modes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 40, "repetition_penalty": 1.1}, {"temperature": 0.0}]
    rows = [make_row(seed=i, logprobs=3, **modes[i % 4]) for i in range(64)]
    here, there = draw(logits, rows), draw(logits.cuda(), rows)
    assert sum(a != b for a, b in zip(here, there, strict=True)) <= 1
