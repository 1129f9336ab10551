"""Simulated replicas verify drafts: the real scheduler, and acceptances that are drawn."""

import pytest

from .small_fleets import COST, fleet, job, play, times

FIXED = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


def test_accepted_drafts_come_in_one_step_which_takes_their_rows_longer() -> None:
    outcome = play(fleet({"speculative_config": FIXED, "draft_acceptance": 1.0}), [job("a", 16, 9)])
    [found] = times(outcome)
    step = COST.decode_step_seconds(4, 0)  # a draft takes as long as a decode
    assert [later - found[0] for later in found] == pytest.approx([0.0, *[step] * 4, *[2 * step] * 4])


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_tokens_per_step_follow_from_the_probability(probability: float) -> None:
    drafting = {"speculative_config": FIXED, "draft_acceptance": probability}
    outcome = play(fleet(drafting), [job("a", 16, 1000)])
    [found] = times(outcome)
    assert len(found) == 1000
    expected = 1 + sum(probability**place for place in (1, 2, 3))
    assert 999 / (len(set(found)) - 1) == pytest.approx(expected, rel=0.1)


def test_equal_seeds_give_equal_simulations() -> None:
    drafting = {"speculative_config": FIXED, "draft_acceptance": 0.5}
    jobs = [job(f"{number}", 50, 60, number / 8) for number in range(12)]
    first, second, other = (times(play(fleet(drafting), jobs, seed)) for seed in (1, 1, 2))
    assert first == second != other


def test_full_batch_drafts_nothing_where_rows_take_all_the_time() -> None:
    adaptive = {"speculative_config": FIXED | {"adaptive": True}, "draft_acceptance": 0.2}
    jobs = [job(f"{number}", 16, 60) for number in range(16)]
    with_drafts, without = (times(play(fleet(pool), jobs)) for pool in (adaptive, {}))
    assert max(map(max, with_drafts)) <= 1.1 * max(map(max, without))


def test_simulated_requests_have_no_grammar_that_could_dictate_drafts() -> None:
    grammar = {"speculative_config": {"method": "grammar", "num_speculative_tokens": 3}, "draft_acceptance": 1.0}
    jobs = [job(f"{number}", 50, 60, number / 8) for number in range(6)]
    assert times(play(fleet(grammar), jobs)) == times(play(fleet({}), jobs))
