"""The mixed load: the seed decides all jobs, which have the shares of the mix and conversations that grow."""

import random
from collections import defaultdict
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.cluster.bench.mix import MIXES, Mix, mix_jobs
from crossdock.cluster.bench.workloads import Job, arrival_times


def jobs_of(mix: Mix, seed: int = 0, count: int = 4000) -> list[Job]:
    return list(islice(mix_jobs(mix, seed), count))


def conversations(jobs: list[Job]) -> dict[str, list[Job]]:
    """Return the chat jobs by conversation, in order."""
    found = defaultdict(list)
    for job in jobs:
        if job.role == "request":
            found[job.prompt[0].key.rsplit("/", 2)[0]].append(job)
    return found


@pytest.mark.parametrize("name", MIXES)
def test_jobs_with_same_seed_are_equal(name: str) -> None:
    assert jobs_of(MIXES[name], 3, 200) == jobs_of(MIXES[name], 3, 200)
    assert jobs_of(MIXES[name], 3, 200) != jobs_of(MIXES[name], 4, 200)


def test_jobs_have_the_shares_of_the_mix() -> None:
    mix = Mix(rate=2.0, long_share=0.2, interactive_share=0.6, batch_share=0.75)
    jobs = jobs_of(mix)
    long = [job for job in jobs if job.role == "long"]
    assert len(long) / len(jobs) == pytest.approx(0.2, abs=0.02)
    assert sum(job.service_tier == "batch" for job in long) / len(long) == pytest.approx(0.75, abs=0.05)
    assert {job.service_tier for job in long} == {"batch", "standard"}
    chats = conversations(jobs)
    firsts = [turns[0].service_tier for turns in chats.values()]
    assert firsts.count("interactive") / len(firsts) == pytest.approx(0.6, abs=0.05)
    assert {job.service_tier for turns in chats.values() for job in turns} == {"interactive", "standard"}
    dues = [job.due for job in jobs if job.due is not None]
    assert dues == sorted(dues)
    assert len(jobs) / dues[-1] == pytest.approx(2.0, rel=0.05)


def test_lengths_are_within_their_ranges() -> None:
    mix = Mix(rate=1.0, long_share=0.3, long_tokens=(1000, 2000))
    jobs = jobs_of(mix)
    lengths = [job.prompt_tokens for job in jobs if job.role == "long"]
    assert (min(lengths), max(lengths)) == pytest.approx((1000, 2000), rel=0.02)
    assert min(lengths) >= 1000
    assert max(lengths) <= 2000
    for turns in conversations(jobs).values():
        assert all(mix.turn_tokens[0] <= job.prompt[-1].tokens <= mix.turn_tokens[1] for job in turns)
        assert all(mix.answer_tokens[0] <= job.output_tokens <= mix.answer_tokens[1] for job in turns)


def test_turn_repeats_the_conversation_and_adds_a_message() -> None:
    chats = conversations(jobs_of(Mix(rate=5.0, long_share=0.1, turns=3.0)))
    for turns in chats.values():
        for before, after in pairwise(turns):
            assert after.prompt[: len(before.prompt)] == before.prompt
            answer, user = after.prompt[len(before.prompt) :]
            assert answer.tokens == before.output_tokens
            assert user.key not in {segment.key for segment in before.prompt}
            assert after.service_tier == before.service_tier
    lengths = [len(turns) for turns in chats.values()]
    assert np.mean(lengths) == pytest.approx(3.0, rel=0.15)


def test_two_conversations_share_no_prefix() -> None:
    firsts = [turns[0].prompt[0].key for turns in conversations(jobs_of(MIXES["chat-heavy"])).values()]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_with_burstiness_keep_the_rate(burstiness: float) -> None:
    between = np.diff(np.fromiter(islice(arrival_times(3.0, random.Random(1), burstiness), 40_001), dtype=float))
    assert between.mean() == pytest.approx(1 / 3, rel=0.03)
    assert between.std() / between.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@given(st.integers(200, 40_000))
def test_mix_within_a_context_fits_it(context: int) -> None:
    mix = MIXES["long-heavy"].within(context)
    longest = max(mix.long_tokens) + max(mix.long_answer_tokens)
    assert longest <= context
    if context > 16384 + 64:
        assert mix == MIXES["long-heavy"]


def test_presets_differ_as_their_names_promise() -> None:
    assert set(MIXES) == {"chat-heavy", "long-heavy", "bursty"}
    assert MIXES["long-heavy"].long_share > 2 * MIXES["chat-heavy"].long_share
    assert MIXES["bursty"].burstiness < 1 == MIXES["chat-heavy"].burstiness


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rate": 0.0}, "rate: must be above 0"),
        ({"burstiness": -1.0}, "burstiness: must be above 0"),
        ({"long_share": 1.5}, "long_share: must be a share between 0 and 1"),
        ({"long_tokens": (10, 5)}, "long_tokens: must be 1 or more, the smaller first"),
        ({"long_tokens": (0, 5)}, "long_tokens"),
    ],
)
def test_mix_with_wrong_value_raises(changes: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mix(**{"rate": 1.0, "long_share": 0.1, **changes})  # type: ignore[arg-type]
