"""A replica learns from its transfers: seconds of each, and seconds of their bytes."""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.workers.report.link import LinkCost, LinkFit

PAGE = 172_032  # bytes


def fit_of(transfers: list[tuple[int, float]]) -> LinkFit:
    """Return the fit to transfers, (bytes, seconds) each."""
    fit = LinkFit()
    for num_bytes, seconds in transfers:
        fit.observe(num_bytes, seconds)
    return fit


def test_line_of_two_sizes_is_learnt() -> None:
    link = LinkCost(0.002, 2e9)
    sizes = [32 * PAGE, 512 * PAGE] * 8
    assert fit_of([(size, link.seconds(size)) for size in sizes]).cost == pytest.approx(link, rel=0.05)


def test_transfers_of_one_size_take_the_seconds_of_their_bytes() -> None:
    link = fit_of([(10_000_000, 0.1)] * 20).cost
    assert link.transfer_s == pytest.approx(0.0, abs=1e-6)
    assert link.bytes_per_second == pytest.approx(1e8)


def test_nothing_is_known_before_bytes_were_sent() -> None:
    assert fit_of([(0, 0.001)] * 3).cost == LinkCost()
    assert fit_of([(0, 0.001)] * 3 + [(PAGE, 0.003)] * 3).cost.bytes_per_second > 0


def test_link_that_becomes_ten_times_as_fast_is_learnt_again() -> None:
    slow = [(size * PAGE, 0.02 + size * PAGE / 1e8) for size in (32, 128, 512)] * 10
    quick = [(size * PAGE, 0.002 + size * PAGE / 1e9) for size in (32, 128, 512)] * 20
    assert fit_of(slow + quick).cost == pytest.approx((0.002, 1e9), rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 1 << 32), st.floats(0, 1e3)), max_size=30))
def test_any_transfers_leave_a_finite_cost_that_grows_with_bytes(transfers: list[tuple[int, float]]) -> None:
    """A transfer's own seconds are at most those of the bytes of the longest transfer."""
    link = fit_of(transfers).cost
    sent = [num_bytes for num_bytes, _ in transfers if num_bytes]
    if sent:
        assert link.transfer_s >= 0
        assert 0 < link.bytes_per_second < float("inf")
        assert link.transfer_s <= max(sent) / link.bytes_per_second * (1 + 1e-6)
    else:
        assert link == LinkCost()


def test_noisy_transfers_are_predicted_within_fifteen_percent_where_a_mean_of_rates_is_not() -> None:
    """By the figures of a TCP link on one host: a page of a short transfer takes twice as long as one of a long one."""
    drawn = random.Random(0)
    link = LinkCost(0.0047, PAGE / 129e-6)
    fit = LinkFit()
    rate = 0.0
    errors: dict[str, list[float]] = {"fit": [], "rate": []}
    for _ in range(300):
        size = drawn.choice((32, 128, 512)) * PAGE
        seconds = link.seconds(size) * drawn.uniform(0.8, 1.2)
        if rate:
            errors["fit"].append(abs(fit.cost.seconds(size) / seconds - 1))
            errors["rate"].append(abs(size / rate / seconds - 1))
        fit.observe(size, seconds)
        rate += (size / seconds - rate) * (0.2 if rate else 1.0)
    assert median(errors["fit"]) < 0.15 < median(errors["rate"])
