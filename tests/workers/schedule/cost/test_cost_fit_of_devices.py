"""StepCostFit on timings of two kinds of device: a CPU whose cost of rows bends, and a GPU with and without graphs.

The CPU's figures are measured (SmolLM2-135M in bf16, two cores of an Intel Xeon with AMX, 2026-11-22). The GPU's follow
estimates for an 8B model on an H100: a decode step is a CUDA graph, and a step with a chunk launches its kernels for 20
ms.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest

from crossdock.workers.schedule.cost.cost import StepWork
from crossdock.workers.schedule.cost.cost_fit import StepCostFit

Seconds = Callable[[StepWork], float]

ROWS = (1, 4, 8, 16, 32, 64, 256, 1024)
ONEDNN = (21, 22, 22, 23, 26, 30, 45, 133)  # ms of all linears of the model, by rows
FASTEST = (15, 17, 22, 23, 26, 30, 45, 128)  # the same with the fastest kernel for each number of rows


def cpu(linears: tuple[float, ...]) -> Seconds:
    def seconds(work: StepWork) -> float:
        rows = float(np.interp(work.rows, ROWS, linears))
        if work.rows > ROWS[-1]:
            rows *= work.rows / ROWS[-1]
        return (rows + 6e-5 * work.attended + 2e-4 * (work.context + work.chunk_context) + 0.2 * work.decodes) / 1e3

    return seconds


def gpu(work: StepWork) -> float:
    """Weights of 16 GB at 2.7 TB/s, or 16 GFLOP a row at 600 TFLOP/s; KV of 128 KiB a token."""
    device = (
        max(6.0, 0.027 * work.rows)
        + 6e-7 * work.attended
        + 4.8e-5 * (work.context + work.chunk_context)
        + 0.01 * work.decodes
    )
    return (device + 0.5 if work.is_decodes_alone else max(device, 20.0)) / 1e3


def sweep(seconds: Seconds, most_tokens: int, longest: int, noise: random.Random) -> list[tuple[StepWork, float]]:
    """Return the steps of a warm-up, as calibrate.py measures them, within 3 % of the truth. `longest`: context."""
    works = [
        StepWork.of([(0, tokens)]) for tokens in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if tokens <= most_tokens
    ]
    works += [
        StepWork.of([(start, tokens)])
        for start, tokens in (
            (longest // 4, most_tokens),
            (longest // 4, 64),
            (longest // 4, 16),
            (longest - 64, 64),
            (longest - 64, 16),
        )
    ]
    for streams in (1, 2, 4, 8, 16, 32, 64):
        works.append(StepWork.of([], [32] * streams))
        if streams in (1, 4, 16, 64):
            works += [StepWork.of([], [context] * streams) for context in (256, 2048)]
            works.append(StepWork.of([(0, 64)], [32] * streams))
        if streams in (4, 64):
            works.append(StepWork.of([(longest // 4, 64)], [256] * streams))
    return [(work, seconds(work) * noise.uniform(0.97, 1.03)) for work in works]


def served(rng: random.Random, chunks: tuple[int, ...], streams: int) -> StepWork:
    """Return a step of a served mix: mostly decodes, some beside a chunk, some chunks alone."""
    decodes = [rng.randrange(50, 2000) for _ in range(rng.randrange(1, streams))]
    if rng.random() < 0.6:
        return StepWork.of([], decodes)
    chunk = (rng.randrange(0, 4000), rng.choice(chunks))
    return StepWork.of([chunk], decodes if rng.random() < 0.8 else [])


DEVICES = {
    "a CPU with one kernel": ((cpu(ONEDNN), 1024, 8192), (16, 48, 128, 400, 1000), 16),
    "a CPU with the fastest kernel": ((cpu(FASTEST), 1024, 8192), (16, 48, 128, 400, 1000), 16),
    "a GPU": ((gpu, 4096, 131_072), (32, 128, 300, 500, 1000, 2000, 8000), 128),
}


def experts(number: int, chosen: int) -> Seconds:
    """A mixture of experts that waits for the weights of the distinct experts which its rows choose at random."""

    def seconds(work: StepWork) -> float:
        touched = 1 - (1 - chosen / number) ** work.rows  # share of all experts
        products = 6 + 30 * touched + 0.15 * work.rows
        return (products + 6e-5 * work.attended + 2e-4 * (work.context + work.chunk_context) + 0.2 * work.decodes) / 1e3

    return seconds


@pytest.mark.parametrize(("number", "chosen"), [(8, 2), (64, 8), (128, 8)])
def test_distinct_experts_need_no_term_of_their_own(number: int, chosen: int) -> None:
    """The first rows touch most experts: a breakpoint too. Online, the 90th percentile of errors is within 15 %."""
    rng, seconds = random.Random(number), experts(number, chosen)
    fit = StepCostFit(sweep(seconds, 1024, 8192, rng))
    for _ in range(1500):
        work = served(rng, (16, 48, 128, 400, 1000), 16)
        fit.observe(work, seconds(work) * rng.uniform(0.95, 1.05))
    assert fit.cost.per_early_row > 0
    assert fit.error(0.9) <= 0.15


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_served_mix_is_predicted_within_fifteen_percent(device: str, seed: int) -> None:
    """At the 90th percentile, by the coefficients of the warm-up and by those refined online; in each kind of step."""
    swept, chunks, streams = DEVICES[device]
    seconds = swept[0]
    rng = random.Random(seed)
    fit = StepCostFit(sweep(*swept, rng))
    at_start, errors = fit.cost, dict[tuple[str, bool], list[float]]()
    for _ in range(1500):
        work = served(rng, chunks, streams)
        actual = seconds(work) * rng.uniform(0.95, 1.05)
        online = fit.observe(work, actual)
        for name, predicted in (("online", online), ("at start", at_start.seconds(work))):
            errors.setdefault((name, work.is_decodes_alone), []).append(abs(predicted - actual) / actual)
    assert len(errors) == 4
    found = {kind: float(np.quantile(values, 0.9)) for kind, values in errors.items()}
    assert all(error <= 0.15 for error in found.values()), found


def test_breakpoint_of_a_device_is_found_and_a_line_stays_a_line() -> None:
    """On the GPU a chunk costs the time of launching it; up to 500 rows more tokens add nothing to that."""
    cost = StepCostFit(sweep(gpu, 4096, 131_072, random.Random(1))).cost
    assert cost.least_with_chunk == pytest.approx(20e-3, rel=0.05)
    assert cost.decode_step_seconds(1, 100) == pytest.approx(6.5e-3, rel=0.1)
    assert cost.tokens_within(22e-3, 0) > 512
    assert cost.tokens_within(19e-3, 0) == 0
    straight = StepCostFit(sweep(lambda work: 6e-3 + 5e-4 * work.rows, 1024, 8192, random.Random(1))).cost
    assert (straight.breakpoint_rows, straight.least_with_chunk) == (0, 0)


def test_launch_bound_is_followed_when_the_host_becomes_slower() -> None:
    rng = random.Random(4)
    fit = StepCostFit(sweep(gpu, 4096, 131_072, rng))
    work, decode = StepWork.of([(0, 64)], [300] * 8), StepWork.of([], [300] * 8)
    for _ in range(3000):
        fit.observe(work, 28e-3 * rng.uniform(0.95, 1.05))
        fit.observe(decode, gpu(decode))
    assert fit.cost.seconds(work) == pytest.approx(28e-3, rel=0.05)
    assert fit.cost.seconds(decode) == pytest.approx(gpu(decode), rel=0.1)


def test_step_that_is_an_outlier_does_not_count_as_an_overrun() -> None:
    """A kernel that is compiled while it serves takes seconds, in one step of ten."""
    rng = random.Random(3)
    fit = StepCostFit(sweep(gpu, 4096, 131_072, rng))
    for number in range(400):
        work = StepWork.of([(rng.randrange(4000), 64)], [100] * 4)
        fit.observe(work, 3.0 if number % 10 == 0 else gpu(work) * rng.uniform(0.95, 1.05))
    assert fit.num_rejected == 40
    assert fit.overrun < 1.15
