"""A row's token depends on nothing but the row: not on other rows, threads, processes, devices or versions."""

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.model.sampling.filters import row_sums, temperatures_of
from crossdock.workers.model.sampling.row import SampleRow
from crossdock.workers.model.sampling.sampler import hashed_ids, negative_gumbel, row_keys, sample
from crossdock.workers.schedule.request.submission import SamplingParams

from .rows import EOS, VOCAB, draw, make_row, random_logits

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
    logprobs_mode=st.sampled_from(["raw_logprobs", "processed_logprobs", "processed_logits"]),
    min_tokens=st.sampled_from([0, 0, 50]),
    seed=st.integers(0, 2**64 - 1),
)


@given(st.lists(st.tuples(PARAMS, st.integers(3, 60)), min_size=2, max_size=32), st.booleans(), st.randoms())
@settings(max_examples=60, deadline=None)
def test_row_beside_any_others_gives_same_bits(
    requests: list[tuple[SamplingParams, int]], is_bfloat16: bool, rng: random.Random
) -> None:
    """Its token and its log-probabilities are the same alone, in this batch and in another order."""
    logits = random_logits(len(requests), 1536, seed=len(requests), spread=3.0)
    logits = logits.bfloat16() if is_bfloat16 else logits
    rows = [SampleRow(params, list(range(length)), 3, EOS) for params, length in requests]
    together = sample(logits, rows)
    order = list(range(len(rows)))
    rng.shuffle(order)
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]
    for i, row in enumerate(rows):
        assert sample(logits[i : i + 1], [row]) == [together[i]]


def test_row_of_real_vocabulary_beside_others_gives_same_bits() -> None:
    modes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 50},
        {"top_p": 0.9},
        {"top_p": 0.9, "temperature": 2.5},
        {"min_p": 0.1, "logprobs": 5},
        {"temperature": 0.0, "logprobs": 5, "frequency_penalty": 0.4},
        {"temperature": 0.0},
    ]
    logits = random_logits(32)
    rows = [make_row(position=100 + i, seed=i, **modes[i % len(modes)]) for i in range(32)]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(32)] == together


def test_row_with_top_p_of_top_k_beside_row_with_top_p_alone_gives_same_token() -> None:
    """Top-p is a share of what top-k keeps, more than the first head, though the other row needs its whole row."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(100):
        logits = 3 * torch.randn(2, 5_000, generator=generator)
        rows = [make_row(seed=seed, top_p=0.9), make_row(seed=seed, top_p=0.5, top_k=300)]
        assert sample(logits, rows)[1] == sample(logits[1:], rows[1:])[0]


def test_scores_and_noise_of_row_alone_are_same_bits() -> None:
    """Compare the numbers that decide the draw, not only the token: a token would nearly always hide a last bit."""
    logits = random_logits(32, VOCAB - 3)  # odd lengths: rows begin anywhere in a vector register
    rows = [make_row(seed=i, top_p=0.9, temperature=0.7) for i in range(32)]
    device, hashed = logits.device, hashed_ids(logits.shape[-1], logits.device)
    noise = negative_gumbel(hashed, row_keys(rows, device))
    scaled = logits / temperatures_of(rows, device)
    sums = row_sums(logits, rows, temperatures_of(rows, device))
    for i, row in enumerate(rows):
        one, temperatures = logits[i : i + 1], temperatures_of([row], device)
        assert torch.equal(negative_gumbel(hashed, row_keys([row], device))[0], noise[i])
        assert torch.equal((one / temperatures)[0], scaled[i])
        assert torch.equal(row_sums(one, [row], temperatures)[0], sums[i])


def test_tokens_depend_on_no_generator_and_no_threads() -> None:
    logits = random_logits(16)
    rows = [make_row(seed=i, **({"top_p": 0.9} if i % 2 else {})) for i in range(16)]
    tokens = draw(logits, rows)
    num_threads = torch.get_num_threads()
    try:
        for seed, threads in ((1, 1), (2, 2)):
            torch.manual_seed(seed)
            torch.set_num_threads(threads)
            state = torch.get_rng_state()
            assert draw(logits, rows) == tokens
            assert torch.equal(torch.get_rng_state(), state), "the generator stays unchanged"
    finally:
        torch.set_num_threads(num_threads)


def test_another_process_draws_same_tokens() -> None:
    script = (
        "import torch\n"
        "from crossdock.workers.schedule.request.request import SamplingParams\n"
        "from crossdock.workers.model.sampling.row import SampleRow\n"
        "from crossdock.workers.model.sampling.sampler import sample\n"
        "logits = (torch.arange(8 * 5000) * 2654435761 % 1009).reshape(8, 5000) / 150\n"
        "rows = [SampleRow(SamplingParams(seed=i, top_p=1 - i / 10), range(i + 3), 1) for i in range(8)]\n"
        "tokens = [token.token_id for token in sample(logits, rows)]\n"
    )
    here: dict[str, Any] = {}
    exec(script, here)
    there = subprocess.run([sys.executable, "-c", script + "print(tokens)"], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == str(here["tokens"])


def test_tokens_of_fixed_seeds_are_pinned() -> None:
    """A change here changes every seeded answer between two versions: write it in the release notes."""
    logits = (torch.arange(8 * 5000) * 2654435761 % 1009).reshape(8, 5000) / 150
    rows = [SampleRow(SamplingParams(seed=42 + i, top_p=1 - i / 10), range(i + 3), 1) for i in range(8)]
    assert draw(logits, rows) == [2915, 1030, 2052, 1175, 3050, 2230, 4652, 1930]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 20}], ids=str)
def test_nudged_logits_rarely_change_the_token(params: dict[str, Any]) -> None:
    """Rounding differs between batch shapes by 1e-4 at most (fp32 on a CPU). The chance of another token is as small,
    though the kept set changes now and then."""
    logits = random_logits(1, 2000, spread=3.0).expand(2000, -1)
    rows = [make_row(seed=i, **params) for i in range(2000)]
    nudge = random_logits(2000, 2000, seed=9, spread=1e-4)
    changed = sum(a != b for a, b in zip(draw(logits, rows), draw(logits + nudge, rows), strict=True))
    assert changed <= 3


@pytest.mark.gpu
def test_gpu_draws_same_tokens_as_cpu_except_near_ties() -> None:
    """The logarithms of two devices differ in their last bit."""
    logits = random_logits(64)
    modes: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 40, "repetition_penalty": 1.1}, {"temperature": 0.0}]
    rows = [make_row(seed=i, logprobs=3, **modes[i % 4]) for i in range(64)]
    here, there = draw(logits, rows), draw(logits.cuda(), rows)
    assert sum(a != b for a, b in zip(here, there, strict=True)) <= 1
