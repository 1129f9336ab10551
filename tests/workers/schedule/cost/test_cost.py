"""StepCost: the seconds of a step are learnt from steps, stay learnt, and outliers do not change them."""

import random
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.workers.schedule.cost.cost import NO_WORK, AdapterWork, StepCost, StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit, non_negative_solution
from crossdock.workers.schedule.cost.formula import StepCosts

TRUTH = StepCost(
    base=6e-3, per_prefill_token=5.5e-4, per_attended=4e-8, per_decode=8e-4, per_context=1.5e-7
)  # about that of SmolLM2-135M on two cores of a Zen 4


def some_work(rng: random.Random) -> StepWork:
    chunks = [(rng.randrange(0, 8000), rng.randrange(16, 600)) for _ in range(rng.randrange(0, 3))]
    decodes = [rng.randrange(1, 4000) for _ in range(rng.choice([0, 1, 8, 60]))]
    return StepWork.of(chunks, decodes) if chunks or decodes else StepWork.of([(0, 64)])


def sweep(cost: StepCost, count: int = 40, noise: float = 0.0, seed: int = 1) -> list[tuple[StepWork, float]]:
    rng = random.Random(seed)
    works = [some_work(rng) for _ in range(count)]
    return [(work, cost.seconds(work) * rng.uniform(1 - noise, 1 + noise)) for work in works]


def coefficients(cost: StepCost) -> list[float]:
    return list(asdict(cost).values())


def test_work_counts_the_tokens_that_attention_reads() -> None:
    """Chunks of any size over the same tokens attend to the same pairs: n²/2."""
    whole = StepWork.of([(0, 1000)])
    parts = [StepWork.of([(start, 100)]) for start in range(0, 1000, 100)]
    assert whole.attended == 1000 * 1000 / 2 == sum(part.attended for part in parts)
    assert StepWork.of([(0, 3)], [10, 20]) == StepWork(3, 4.5, 2, 30)
    assert StepWork.of([(100, 1), (50, 2)], [10]).context == 10
    assert StepWork.of([(100, 1), (50, 2)], [10]).chunk_context == 150  # read once for each, however few tokens ask


def test_exact_sweep_gives_the_true_coefficients() -> None:
    fit = StepCostFit(sweep(TRUTH))
    np.testing.assert_allclose(coefficients(fit.cost), coefficients(TRUTH), rtol=1e-3)


def test_context_of_chunks_has_a_price_of_its_own() -> None:
    """Where no step shows this price, it is that of the context of decodes."""
    dear = replace(TRUTH, per_chunk_context=9e-7)
    np.testing.assert_allclose(coefficients(StepCostFit(sweep(dear)).cost), coefficients(dear), rtol=0.1)
    works = [StepWork.of([(0, tokens)]) for tokens in (16, 64, 256, 1024)]
    works += [StepWork.of([], [context] * streams) for streams in (1, 8, 60) for context in (10, 2000)]
    cost = StepCostFit([(work, dear.seconds(work)) for work in works]).cost
    assert cost.per_chunk_context == pytest.approx(TRUTH.per_context, rel=0.02)


def test_fit_learns_from_served_steps_what_adapters_cost() -> None:
    adapted = replace(TRUTH, per_adapter=4e-10, per_adapted=1.5e-10)
    fit, rng = StepCostFit(sweep(TRUTH)), random.Random(5)
    assert fit.cost.advertised == fit.cost.coefficients[:-4], "without adapters there is nothing to tell"
    for _ in range(320):
        count, used, size = rng.randrange(1, 9), rng.randrange(1, 9), rng.choice([2_400_000, 20_000_000])
        work = StepWork.of([], [rng.randrange(1, 2000)] * count)
        work = work._replace(adapters=min(count, used) * size, adapted=count * size)
        work = work.plus_chunk(0, rng.randrange(16, 200), rng.choice([0, size])) if rng.random() < 0.5 else work
        fit.observe(work, adapted.seconds(work) * rng.uniform(0.95, 1.05))
    assert fit.cost.per_adapter == pytest.approx(4e-10, rel=0.2)
    assert fit.cost.per_adapted == pytest.approx(1.5e-10, rel=0.2)
    work = StepWork.of([], [100] * 8)
    assert fit.cost.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.03), "plain steps cost what they did"
    assert StepCost.of(fit.cost.advertised) == fit.cost


def test_fit_with_ten_percent_noise_has_a_small_error() -> None:
    fit = StepCostFit(sweep(TRUTH, noise=0.1))
    for work, seconds in sweep(TRUTH, count=300, noise=0.1, seed=2):
        fit.observe(work, seconds)
    assert 0 < fit.error(0.5) < 0.1
    assert fit.error(0.9) < 0.15


def test_steps_that_vary_are_predicted_by_their_mean() -> None:
    """Log-normal, a quarter's spread: least squares relative to the actual seconds would be 12 % short of it."""
    fit, rng = StepCostFit(sweep(TRUTH)), random.Random(4)
    ratios = []
    for number in range(6000):
        work = some_work(rng)
        fit.observe(work, TRUTH.seconds(work) * rng.lognormvariate(-(0.25**2) / 2, 0.25))
        if number >= 2000:
            ratios.append(fit.cost.seconds(work) / TRUTH.seconds(work))
    assert np.mean(ratios) == pytest.approx(1, abs=0.02)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.floats(0, 0.9))
def test_coefficients_are_never_negative(seed: int, noise: float) -> None:
    fit = StepCostFit(sweep(TRUTH, count=8, noise=noise, seed=seed))
    for work, seconds in sweep(TRUTH, count=50, noise=noise, seed=seed + 1):
        fit.observe(work, seconds)
    cost = fit.cost
    assert all(value >= 0 for name, value in asdict(cost).items() if name != "per_early_row")
    assert cost.per_early_row >= -min(cost.per_prefill_token, cost.per_decode) - 1e-12


def test_non_negative_solution_is_the_best_of_its_kind() -> None:
    """By the conditions of Karush, Kuhn and Tucker, on data whose free optimum is negative."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        rows = rng.uniform(0, 1, (12, 5))
        target = rows @ np.array([1.0, -0.5, 0.7, 0.0, -0.2])
        found = non_negative_solution(rows.T @ rows, rows.T @ target)
        gradient = rows.T @ (rows @ found - target)
        assert (found >= 0).all()
        assert (gradient >= -1e-7).all(), "more of a coefficient would lessen the residuals"
        assert np.abs(gradient * found).max() <= 1e-7, "so would less of one"


def test_fit_follows_a_device_that_becomes_slower() -> None:
    fit = StepCostFit(sweep(TRUTH))
    slower = StepCost(**{name: 1.5 * value for name, value in asdict(TRUTH).items()})
    for work, seconds in sweep(slower, count=2000, noise=0.05, seed=5):
        fit.observe(work, seconds)
    work = StepWork.of([(500, 128)], [300] * 8)
    assert fit.cost.seconds(work) == pytest.approx(slower.seconds(work), rel=0.1)


def test_pauses_are_rejected() -> None:
    """Every twentieth step takes half a second more: a garbage collection, another process."""
    fit = StepCostFit(sweep(TRUTH))
    work = StepWork.of([], [100] * 8)
    for number in range(1000):
        fit.observe(work, TRUTH.seconds(work) + (0.5 if number % 20 == 0 else 0.0))
    assert fit.num_rejected == 50
    assert fit.cost.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.01)


def test_lasting_change_is_no_outlier() -> None:
    fit = StepCostFit(sweep(TRUTH))
    work = StepWork.of([], [100] * 8)
    for _ in range(3000):
        fit.observe(work, 5 * TRUTH.seconds(work))
    assert fit.cost.seconds(work) > 4 * TRUTH.seconds(work)


def test_sweep_is_not_forgotten() -> None:
    """A week of decodes alone has no data on chunks; the data of the sweep still holds."""
    fit = StepCostFit(sweep(TRUTH))
    decodes = StepWork.of([], [200] * 8)
    for _ in range(20_000):
        fit.observe(decodes, TRUTH.seconds(decodes))
    chunk = StepWork.of([(1000, 256)])
    assert fit.cost.seconds(chunk) == pytest.approx(TRUTH.seconds(chunk), rel=0.05)


BENT = StepCost(
    base=5e-3,
    per_prefill_token=2e-4,
    per_attended=4e-8,
    per_decode=3e-4,
    per_context=1.5e-7,
    breakpoint_rows=64,
    per_early_row=-1.9e-4,
    least_with_chunk=18e-3,
    per_chunk_context=6e-7,
)
STEEP = StepCost(base=14e-3, per_prefill_token=1.1e-4, per_decode=1.5e-4, breakpoint_rows=8, per_early_row=9e-4)
CHOSEN = replace(TRUTH, most_context=2048.0, per_far=5e-9)
"""That of a model whose indexers choose 2,048 tokens."""
COSTS = st.sampled_from([TRUTH, BENT, STEEP])
WORKS = st.tuples(st.integers(0, 100), st.integers(0, 3)).map(
    lambda counts: StepWork.of([(500, 40)] * counts[1], [300] * counts[0])
)


@given(COSTS, st.floats(0, 2), st.integers(0, 100_000), WORKS)
def test_tokens_within_is_the_largest_chunk(cost: StepCost, seconds: float, start: int, work: StepWork) -> None:
    tokens = int(cost.tokens_within(seconds, start, work))
    assert tokens == 0 or cost.seconds(work.plus_chunk(start, tokens)) <= seconds * (1 + 1e-9) + 1e-12
    assert tokens + 1 == 1 or cost.seconds(work.plus_chunk(start, tokens + 1)) > seconds * (1 - 1e-9)
    if not tokens:
        assert cost.seconds(work.plus_chunk(start, 2)) > seconds


@given(COSTS, WORKS, st.integers(0, 5000), st.integers(1, 3000))
def test_no_token_makes_a_step_shorter(cost: StepCost, work: StepWork, start: int, tokens: int) -> None:
    assert cost.seconds(work.plus_chunk(start, tokens)) >= cost.seconds(work) * (1 - 1e-12)
    longer = cost.seconds(work.plus_chunk(start, tokens + 1))
    assert longer >= cost.seconds(work.plus_chunk(start, tokens)) * (1 - 1e-12)


CHUNKS = st.tuples(st.just(TRUTH), st.integers(16, 512)) | st.tuples(COSTS, st.integers(256, 512))


@given(CHUNKS, st.integers(0, 5000), st.integers(1, 3000))
def test_prompt_alone_takes_the_sum_of_its_steps(settings: tuple[StepCost, int], start: int, tokens: int) -> None:
    (cost, chunk), end = settings, start + tokens
    steps = [StepWork.of([(at, min(chunk, end - at))]) for at in range(start, end, chunk)]
    assert cost.prefill_seconds(start, end, chunk) == pytest.approx(sum(map(cost.seconds, steps)))
    assert cost.last_step_seconds(start, end, chunk) == pytest.approx(cost.seconds(steps[-1]))


@given(
    st.lists(
        st.tuples(
            CHUNKS | st.tuples(st.just(CHOSEN), st.integers(16, 512)),
            st.integers(0, 5000),
            st.integers(1, 3000),
        ),
        min_size=1,
    )
)
def test_costs_of_many_replicas_are_those_of_each(replicas: list[tuple[tuple[StepCost, int], int, int]]) -> None:
    ends = [start + tokens for _, start, tokens in replicas]
    many = StepCosts(*np.array([cost.coefficients for (cost, _), _, _ in replicas]).T)
    figures = np.array([(start, end, chunk) for ((_, chunk), start, _), end in zip(replicas, ends, strict=True)], float)
    each = [(cost, (start, end, chunk)) for ((cost, chunk), start, _), end in zip(replicas, ends, strict=True)]
    assert many.prefill_seconds(*figures.T).tolist() == [cost.prefill_seconds(*prompt) for cost, prompt in each]
    assert many.last_step_seconds(*figures.T).tolist() == [cost.last_step_seconds(*prompt) for cost, prompt in each]


def test_decode_grows_little_beyond_the_tokens_that_an_indexer_chooses() -> None:
    def seconds(context: int) -> float:
        return CHOSEN.seconds(StepWork.of([], [context] * 4))

    assert seconds(2048) == TRUTH.seconds(StepWork.of([], [2048] * 4))
    assert seconds(32_768) - seconds(2048) == pytest.approx(4 * 30_720 * 5e-9)
    assert CHOSEN.decode_step_seconds(4, 4 * 32_768) == pytest.approx(seconds(32_768))
    assert CHOSEN.context_seconds(32_768, 1) == pytest.approx(2048 * 1.5e-7 + 30_720 * 5e-9)


@pytest.mark.parametrize(("count", "context"), [(1, 500), (3, 2000), (8, 24_000)])
def test_step_of_decodes_alone_takes_what_the_terms_of_the_cost_say(count: int, context: int) -> None:
    rows = {"breakpoint_rows": 4, "per_early_row": 3e-4, "per_adapter": 1e-9, "per_adapted": 2e-9}
    cost = replace(TRUTH, **rows, most_context=1000, per_far=1e-8)
    near = min(context, 1000 * count)
    expected = 6e-3 + 3e-4 * min(count, 4) + 8e-4 * count + 1.5e-7 * near + 1e-8 * (context - near) + 1e-3 + 1.6e-2
    assert cost.decode_step_seconds(count, context, 1e6, 8e6) == pytest.approx(expected)
    streams = StepWork.of_streams(count, context, AdapterWork(1e6, 8e6))
    assert cost.device_seconds(streams) == cost.seconds(streams) == pytest.approx(expected)


@pytest.mark.parametrize("adapters", [AdapterWork(0, 0), AdapterWork(3e6, 9e6)])
@pytest.mark.parametrize("depth", [1, 4])
def test_step_of_some_streams_takes_what_its_work_takes(depth: int, adapters: AdapterWork) -> None:
    cost = replace(TRUTH, per_adapter=2e-9, per_adapted=1e-10)
    work = StepWork(decodes=12 / depth, context=7000 / depth, adapters=adapters[0] / depth, adapted=adapters[1] / depth)
    assert cost.streams_seconds(12, 7000, adapters, depth) == cost.seconds(work)
    assert StepWork.of_streams(12, 7000, adapters, depth) == work


def test_chunk_grows_little_beyond_the_tokens_that_an_indexer_chooses() -> None:
    near = CHOSEN.chunk_seconds(8192, 100) - CHOSEN.chunk_seconds(4096, 100)
    assert near == pytest.approx(4096 * (100 * 5e-9 + CHOSEN.per_chunk_context))
    work = StepWork.of([], [100]).plus_drafts(8192, 3)
    assert CHOSEN.seconds(work) - CHOSEN.seconds(StepWork.of([], [100])) == pytest.approx(
        3 * (CHOSEN.per_decode + 2048 * 4e-8 + (8192 + 2.5 - 2048) * 5e-9)
    )


@given(st.floats(0, 2), st.integers(0, 100_000))
def test_largest_chunk_alone_is_found_beyond_chosen_tokens(seconds: float, start: int) -> None:
    tokens = int(CHOSEN.tokens_within(seconds, start))
    assert tokens == 0 or CHOSEN.seconds(NO_WORK.plus_chunk(start, tokens)) <= seconds * (1 + 1e-9)
    assert tokens == 0 or CHOSEN.seconds(NO_WORK.plus_chunk(start, tokens + 1)) > seconds * (1 - 1e-9)
    if not tokens:
        assert CHOSEN.seconds(NO_WORK.plus_chunk(start, 2)) > seconds


@given(st.integers(0, 9000), st.integers(1, 20_000), st.integers(16, 512))
def test_prompt_with_chosen_tokens_takes_about_the_sum_of_its_steps(start: int, tokens: int, chunk: int) -> None:
    """Exact where no step, or every step, has more context; else its attention is a third too long at most."""
    end = start + tokens
    steps = [StepWork.of([(at, min(chunk, end - at))]) for at in range(start, end, chunk)]
    found, total = CHOSEN.prefill_seconds(start, end, chunk), sum(map(CHOSEN.seconds, steps))
    attention = sum(CHOSEN.attended_seconds(step.attended, step.prefill_tokens) for step in steps)
    assert total * (1 - 1e-9) <= found <= total + 0.34 * attention + 1e-9
    if start >= 2048 or end <= 2048:
        assert found == pytest.approx(total)


def test_price_of_tokens_that_are_scored_alone_is_learnt() -> None:
    fit = StepCostFit(sweep(CHOSEN), most_context=2048)
    np.testing.assert_allclose(coefficients(fit.cost), coefficients(CHOSEN), rtol=0.05, atol=1e-12)
    rng = random.Random(5)
    slower = CHOSEN.slowed(1.5)
    assert slower.most_context == 2048
    for _ in range(1500):
        work = StepWork.of([], [rng.choice([500, 2000, 6000, 30_000])] * rng.randrange(1, 32))
        fit.observe(work, slower.seconds(work))
    for context in (1000, 2048, 8192, 32_768):
        work = StepWork.of([], [context] * 16)
        assert fit.cost.seconds(work) == pytest.approx(slower.seconds(work), rel=0.1)


def test_bound_of_the_context_is_advertised_only_where_there_is_one() -> None:
    assert len(TRUTH.advertised) == len(TRUTH.coefficients) - 4
    for cost in (TRUTH, CHOSEN, replace(TRUTH, per_adapted=1e-12)):
        assert StepCost.of(cost.advertised) == cost


def test_tokens_within_without_a_price_has_no_limit() -> None:
    free = StepCost(base=0.01, per_prefill_token=0.0)
    assert free.tokens_within(1.0, 100) > 10**9
    assert free.tokens_within(0.0, 100) == 0


def test_cost_of_an_older_replica_has_no_breakpoint_and_one_price_of_context() -> None:
    cost = StepCost.of((0.01, 1e-3, 1e-8, 2e-3, 1e-7))
    assert cost == StepCost(base=0.01, per_prefill_token=1e-3, per_attended=1e-8, per_decode=2e-3, per_context=1e-7)
    assert cost.per_chunk_context == 1e-7
    assert StepCost.of(BENT.coefficients) == BENT


def test_cost_whose_rows_make_steps_shorter_is_refused() -> None:
    with pytest.raises(ValueError, match="per_early_row"):
        StepCost(base=0.01, per_prefill_token=1e-3, per_decode=1e-3, breakpoint_rows=8, per_early_row=-2e-3)


def test_empty_sweep_is_refused() -> None:
    with pytest.raises(ValueError, match="sweep"):
        StepCostFit([])


def test_overrun_is_exceeded_by_one_step_in_twenty() -> None:
    """Only steps with a chunk count. They take 15 % more or less, which no cost explains; decodes err far more."""
    fit = StepCostFit(sweep(TRUTH))
    rng = random.Random(3)
    for number in range(400):
        work = StepWork.of([(rng.randrange(4000), 64)], [100] * 4)
        fit.observe(work, TRUTH.seconds(work) * (0.85 if number % 2 else 1.15))
        decode = StepWork.of([], [100] * 4)
        fit.observe(decode, TRUTH.seconds(decode) * rng.choice([1, 1, 1, 2.5]))
    assert 1.1 < fit.overrun < 1.3


def test_overrun_does_not_count_what_the_cost_has_learnt() -> None:
    """Every step takes 1.8 times as long from one moment on. When predictions follow, they are exact again."""
    fit = StepCostFit(sweep(TRUTH))
    rng = random.Random(3)

    def ratio() -> float:
        work = StepWork.of([(rng.randrange(4000), 64)], [100] * 4)
        seconds = 1.8 * TRUTH.seconds(work)
        return seconds / fit.observe(work, seconds)

    seen = [ratio() for _ in range(128)]
    assert max(seen) > 1.5
    assert fit.overrun < 1.25, "1.8 if steps count by the predictions of their time"
