"""Expected rests of outputs are those of the product-limit estimate, computed here from its definition."""

import random
from statistics import fmean

import pytest

from crossdock.workers.schedule.output_lengths import OutputLengths
from crossdock.workers.schedule.request.request import Request
from crossdock.workers.schedule.request.submission import SamplingParams, Submission


def begun(lengths: OutputLengths, name: str, num_tokens: int, *, pooling: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=10_000, pooling=pooling)
    request = Request(Submission(name, [1], sampling, output_token_ids=[2] * num_tokens))
    lengths.begin(request)
    lengths.grow()
    return request


def ended(lengths: OutputLengths, name: str, num_tokens: int, *, is_whole: bool = True) -> None:
    lengths.end(begun(lengths, name, num_tokens), is_whole=is_whole)


def by_definition(known: list[tuple[int, bool]], num_tokens: int) -> float:
    """Return the mean rest: the sum over further tokens of the probability that an output has them.

    The probability to have more than x tokens is the product over all ends at most there of 1 - 1 / those as long. One
    more output is longer than all known ones, by as much as the longest has.
    """
    longest = max(length for length, _ in known)

    def longer_than(x: int) -> float:
        left = 1.0
        for length, is_whole in known:
            if is_whole and num_tokens < length <= x:
                at_risk = 1 + sum(other >= length for other, _ in known)
                tied = sorted(each for each in known if each == (length, True))
                left *= (1 - len(tied) / at_risk) ** (1 / len(tied))
        return left

    within = sum(longer_than(x) for x in range(num_tokens, longest))
    return within + longer_than(longest) * longest


@pytest.mark.parametrize("seed", range(5))
def test_rest_is_that_of_the_product_limit_estimate(seed: int) -> None:
    rng = random.Random(seed)
    lengths = OutputLengths()
    known = [(length, rng.random() < 0.6) for length in rng.sample(range(1, 400), 40)]
    for number, (length, is_whole) in enumerate(known):
        if is_whole:
            ended(lengths, f"{number}", length)
        elif rng.random() < 0.5:
            ended(lengths, f"{number}", length, is_whole=False)
        else:
            begun(lengths, f"{number}", length)
    for num_tokens in (0, 1, 57, 200, max(known)[0] - 1):
        assert lengths.expected_rest(num_tokens) == pytest.approx(by_definition(known, num_tokens))


def test_short_outputs_that_end_first_do_not_make_long_ones_look_short() -> None:
    lengths = OutputLengths()
    for number in range(20):
        begun(lengths, f"{number}", 100)
    ended(lengths, "short", 3)
    assert lengths.expected_rest(100) >= 100
    assert lengths.expected_rest(0) > 180


def test_outputs_of_one_length_are_expected_to_have_it_again() -> None:
    lengths = OutputLengths()
    for number in range(100):
        ended(lengths, f"{number}", 64)
    assert lengths.expected_rest(0) == pytest.approx(64, abs=3)
    assert lengths.expected_rest(60) == pytest.approx(4, abs=3)


def test_output_longer_than_all_known_ones_is_half_way() -> None:
    lengths = OutputLengths()
    assert [lengths.expected_rest(num_tokens) for num_tokens in (0, 100)] == [0, 100]
    ended(lengths, "only", 50)
    assert lengths.expected_rest(100) == 100


def test_estimate_has_no_bias_while_outputs_of_many_lengths_run() -> None:
    """Each output makes a token in each step, another begins in every fifth; the expected rest is the mean of all."""
    rng = random.Random(1)
    lengths = OutputLengths()
    running = dict[Request, int]()
    whole, estimates = list[int](), list[float]()
    for step in range(10_000):
        if step % 5 == 0:
            length = rng.choice([3, 50, 150, 250, 300, 350, 400, 1000])
            whole.append(length)
            running[begun(lengths, f"{step}", 0)] = length
        for request in list(running):
            request.token_ids.append(7)
            if request.num_output_tokens == running[request]:
                lengths.end(request, is_whole=True)
                del running[request]
        if step > 2000 and step % 50 == 0:
            lengths.grow()
            estimates.append(lengths.expected_rest(0))
    assert fmean(estimates) == pytest.approx(fmean(whole), rel=0.05)


def test_only_the_newest_outputs_count() -> None:
    lengths = OutputLengths()
    for number in range(300):
        ended(lengths, f"long {number}", 900)
    for number in range(300):
        ended(lengths, f"short {number}", 30)
    assert lengths.expected_rest(0) == pytest.approx(30, abs=5)


def test_vectors_of_prompts_are_no_outputs() -> None:
    lengths = OutputLengths()
    lengths.end(begun(lengths, "vector", 0, pooling="last"), is_whole=True)
    assert lengths.expected_rest(0) == 0
