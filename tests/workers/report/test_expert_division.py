"""Predicted seconds of experts that ranks divide: against arithmetic by hand, and for unknown routers."""

from dataclasses import replace
from itertools import islice
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.report.expert_division import (
    Chosen,
    ExpertSizes,
    ProductRates,
    StepSeconds,
    division_seconds,
    is_whole_faster,
    routings,
    routings_by_fullest,
    step_seconds,
    typical_routings,
)
from crossdock.workers.report.presets import GPUS, product_rates
from crossdock.workers.report.profile import Role

SIZES = ExpertSizes(layers=3, count=8, chosen=2, inner=512, numbers=1000, num_bytes=2000, row_bytes=0)
READS = ProductRates(bandwidth=1000, flops=inf)  # only bytes take time
MULTIPLIES = ProductRates(bandwidth=inf, flops=1000)


def test_one_stream_with_one_expert_a_token_reads_it_from_one_rank_or_a_slice_from_each() -> None:
    sliced, whole = step_seconds(replace(SIZES, chosen=1), READS, 4, 1)
    assert sliced == pytest.approx(3 * 2000 / 4 / 1000)
    assert whole == pytest.approx(3 * 2000 / 1000)


def test_rank_with_one_expert_more_sets_the_pace_where_all_are_chosen() -> None:
    """Two ranks have 3 and 4 of 7 experts."""
    sliced, whole = step_seconds(replace(SIZES, count=7, chosen=7), READS, 2, 5)
    assert sliced == pytest.approx(3 * 7 * 2000 / 2 / 1000)
    assert whole == pytest.approx(3 * 4 * 2000 / 1000)


def test_rows_travel_to_all_slices_and_to_one_whole_expert() -> None:
    """Each of 10 rows of 50 bytes is read, written and read again for each of its 8 experts, of which a rank has 4."""
    sizes = replace(SIZES, chosen=8, num_bytes=0, row_bytes=50)
    sliced, whole = step_seconds(sizes, READS, 2, 10)
    assert sliced == pytest.approx(3 * 3 * 10 * 8 * 50 / 1000)
    assert whole == pytest.approx(sliced / 2)


def test_narrow_slices_are_multiplied_in_whole_tiles() -> None:
    """A rank of 16 has 32 of 512 inner features, and a product computes 64."""
    sizes = replace(SIZES, count=16, chosen=16)
    rates = replace(MULTIPLIES, tile=64)
    sliced, whole = step_seconds(sizes, rates, 16, 4)
    assert whole == pytest.approx(3 * 2 * 4 * 1000 / 1000)
    assert sliced == pytest.approx(2 * whole)


def test_fullest_rank_of_an_unknown_router_has_three_quarters_of_the_rows_of_two_experts() -> None:
    """The share of the first of two experts is any number from 0 to 1 alike, and the larger of p and 1 - p is 3/4."""
    sliced, whole = step_seconds(replace(SIZES, count=2, chosen=1), MULTIPLIES, 2, 4096)
    assert whole / sliced == pytest.approx(2 * 3 / 4, rel=0.03)


@settings(max_examples=20)
@given(
    count=st.integers(2, 24),
    chosen=st.integers(1, 4),
    num_ranks=st.integers(2, 4),
    rows=st.sampled_from([1, 3, 40, 700]),
)
def test_slices_are_never_slower_where_narrow_products_cost_nothing(
    count: int, chosen: int, num_ranks: int, rows: int
) -> None:
    sizes = replace(SIZES, count=max(count, num_ranks), chosen=min(chosen, count), inner=12)
    for rates in (READS, MULTIPLIES):
        sliced, whole = step_seconds(sizes, rates, num_ranks, rows)
        assert sliced <= whole * (1 + 1e-9)
        assert whole <= sliced * num_ranks * (1 + 1e-9)


def test_steps_are_one_stream_all_streams_and_a_chunk_and_are_the_same_every_time() -> None:
    rates = ProductRates(bandwidth=1000, flops=1000)
    found = division_seconds(SIZES, rates, 2, (1, 16, 64))
    assert found == division_seconds(SIZES, rates, 2, (1, 16, 64))
    for number in range(2):
        assert list(found[number]) == [step_seconds(SIZES, rates, 2, rows)[number] for rows in (1, 16, 64)]


def test_each_row_of_a_drawn_layer_is_sent_to_unlike_experts_of_which_some_have_more_rows() -> None:
    first, second = islice(routings(8, 3, 4096), 2)
    for chosen in (first, second):
        assert chosen.shape == (4096, 3)
        assert all(len({*row}) == 3 for row in chosen.tolist())
    rows_of = np.bincount(first.ravel(), minlength=8)
    assert rows_of.max() > 2 * rows_of.min()
    assert (rows_of != np.bincount(second.ravel(), minlength=8)).any()


@pytest.mark.parametrize("number", [1, 3, 8])
def test_typical_routings_have_fullest_ranks_as_full_as_those_of_many_in_the_mean(number: int) -> None:
    sizes = replace(SIZES, count=30)

    def fullest(chosen: Chosen) -> float:
        return float(np.bincount(chosen.ravel() // 10, minlength=3).max() / chosen.size)

    shares = [fullest(each) for each in typical_routings(routings_by_fullest(sizes, 3, 512), number)]
    assert shares == sorted(shares)
    assert len(shares) == number
    many = [fullest(each) for each in islice(routings(30, 2, 512), 200)]
    assert np.mean(shares) == pytest.approx(np.mean(many), abs=0.03)
    assert np.std(many) > 0.03


@pytest.mark.parametrize(
    ("role", "slices", "whole", "is_whole"),
    [
        ("decode", StepSeconds(1, 2, 30), StepSeconds(9, 1, 40), True),
        ("prefill", StepSeconds(1, 2, 30), StepSeconds(9, 1, 40), False),
        ("mixed", StepSeconds(1, 2, 30), StepSeconds(9, 1, 40), False),
        ("mixed", StepSeconds(1, 2, 30), StepSeconds(9, 3, 20), True),
        ("decode", StepSeconds(1, 2.04, 30), StepSeconds(1, 1.96, 30), False),  # both are 2.0 in two digits
    ],
)
def test_choice_follows_what_a_loaded_replica_computes_and_keeps_slices_at_ties(
    role: Role, slices: StepSeconds, whole: StepSeconds, is_whole: bool
) -> None:
    assert is_whole_faster(slices, whole, role) is is_whole


@pytest.mark.parametrize(
    ("name", "gpu"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA L40S", "l40s"), ("AMD Instinct MI300X", "mi300x")]
)
def test_gpu_has_the_rates_of_its_data_sheet_by_the_name_of_its_driver(name: str, gpu: str) -> None:
    rates = product_rates(name)
    assert rates is not None
    assert 0.5 < rates.bandwidth / GPUS[gpu].bandwidth < 1
    assert 0.3 < rates.flops / GPUS[gpu].flops < 1
    assert product_rates("NVIDIA GeForce RTX 4090") is None
