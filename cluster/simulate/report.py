"""The results of a simulation: a table for the terminal, figures for JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from crossdock.cluster.bench import metrics
from crossdock.cluster.bench.metrics import Sample, Targets
from crossdock.cluster.bench.plot import Series, plot, series_of_samples
from crossdock.cluster.bench.report import add_classes, add_tenants
from crossdock.cluster.simulate.capacity_search import Trial, best_of, offered_rate, queue_of
from crossdock.cluster.simulate.fleet import SimulatedPool
from crossdock.cluster.simulate.replica import SimulatedReplica
from crossdock.cluster.simulate.simulation import Outcome
from crossdock.cluster.simulate.study import Estimate, Score

_AFTERMATH_S = 10.0  # after a decision: gaps between tokens in this time are part of what it did


def figures(outcome: Outcome, targets: Targets) -> dict[str, Any]:
    """Return all figures, ready for JSON. The same simulation gives the same figures."""
    errors = [abs(placed.predicted_ttft - placed.ttft) / placed.ttft for placed in outcome.placed if placed.ttft > 0]
    found: dict[str, Any] = {
        "seed": outcome.seed,
        "router": outcome.fleet.router.model_dump(),
        "requests": len(outcome.samples),
        "gpus": sum(gpus_of(each.pool) for each in outcome.replicas),
        "gpu_hours": sum(gpus_of(each.pool) * _alive_s(each, outcome.duration) for each in outcome.replicas) / 3600,
        "offered_requests_per_s": offered_rate(outcome.samples),
        "queue": queue_of(outcome.samples)._asdict() | {"grows": queue_of(outcome.samples).grows},
        "duration_s": outcome.duration,
        "prefix_hit_rate": metrics.hit_rate(outcome.samples),
        **metrics.by_class(outcome.samples, outcome.duration, targets),
        "tenants": _tenants(outcome, targets),
        "models": metrics.by_tenant(outcome.samples, outcome.duration, targets, "model"),
        "pools": {pool.name: _pool(outcome, pool.name) for pool in outcome.fleet.pools},
        "placements": dict(sorted(Counter(placed.reason for placed in outcome.placed).items())),
        "cost": _cost(outcome),
        "decisions": [decision_figures(each.at, asdict(each.action), outcome.samples) for each in outcome.decisions],
    }
    if errors:
        found["ttft_prediction_error"] = {f"p{q}": float(np.percentile(errors, q)) for q in (50, 90)}
    return found


def _tenants(outcome: Outcome, targets: Targets) -> dict[str, Any]:
    """Return the figures of each tenant, and the seconds that it was charged at all replicas."""
    found = metrics.by_tenant(outcome.samples, outcome.duration, targets)
    charged = [replica.scheduler.table.tenants.charged for replica in outcome.replicas]
    for name, own in found.items():
        own["charged_s"] = sum(seconds for each in charged for (tenant, _), seconds in each.items() if tenant == name)
    return found


def decision_figures(at: float, action: dict[str, Any], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a decision of the scaler, and what happened to the requests that were running then.

    Args:
        at: on the clock of the samples.
        action: the fields of `Resize` or `Flip`.
        samples: of all requests.
    """
    running = [sample for sample in samples if sample.sent <= at < sample.ended]
    gaps = [
        after - before
        for sample in running
        for before, after in pairwise(sample.times)
        if at < after and before < at + _AFTERMATH_S
    ]
    return {
        "at": at,
        **action,
        "running": len(running),
        "broken": sum(sample.error is not None for sample in running),
        "longest_gap_s": max(gaps, default=0.0),
    }


def describe_decision(found: Mapping[str, Any]) -> str:
    """Return a decision in one line."""
    load = found["load"]
    if "pool" in found:
        change = f"{found['pool']}: {found['replicas_before']} to {found['replicas']} replicas"
    else:
        change = f"{found['replica']}: {found['role_before']} to {found['role']}"
    work = f"{load['demand']:.2f} replicas' work: {load['prompt_share']:.2f} s of prompts per second"
    streams = f"steps of {1e3 * load['step_s']:.0f} ms for {load['streams']} streams"
    return f"{change} ({found['reason']}; {work}, {load['waiting_s']:.2f} s waiting, {streams})"


def _pool(outcome: Outcome, name: str) -> dict[str, Any]:
    replicas = [replica for replica in outcome.replicas if replica.pool.name == name]
    busy = [_utilisation(replica, outcome.duration) for replica in replicas]
    seconds = max(outcome.duration, 1e-9)
    return {
        "role": replicas[0].pool.role if replicas else None,
        "gpus_each": gpus_of(replicas[0].pool) if replicas else 0,
        "replicas": {replica.name: share for replica, share in zip(replicas, busy, strict=True)},
        "utilisation": float(np.mean(busy)) if busy else 0.0,
        "steps": sum(replica.num_steps for replica in replicas),
        "prefill_tokens_per_s": sum(replica.num_prefilled for replica in replicas) / seconds,
        "decode_tokens_per_s": sum(replica.num_decoded for replica in replicas) / seconds,
        "preemptions": sum(replica.scheduler.table.num_preemptions for replica in replicas),
    }


def gpus_of(pool: SimulatedPool) -> int:
    """Return the devices of each replica of a pool: the ranks of its profile."""
    profile = pool.profile
    return profile.tensor_parallel_size * profile.pipeline_parallel_size


def _utilisation(replica: SimulatedReplica, duration: float) -> float:
    """Return the share of a replica's life in which it computed."""
    return replica.busy_s / max(_alive_s(replica, duration), 1e-9)


def _alive_s(replica: SimulatedReplica, duration: float) -> float:
    return (duration if replica.until is None else min(replica.until, duration)) - min(replica.since, duration)


def _cost(outcome: Outcome) -> dict[str, float] | None:
    """Return the price of all replicas' hours, total and per token; None where no pool has a price."""
    total = sum(replica.pool.price * _alive_s(replica, outcome.duration) / 3600 for replica in outcome.replicas)
    if not total:
        return None
    ok = [sample for sample in outcome.samples if sample.ok]
    output = sum(sample.output_tokens for sample in ok)
    tokens = output + sum(sample.prompt_tokens for sample in ok)
    return {
        "total": total,
        "per_million_output_tokens": total / max(output, 1) * 1e6,
        "per_million_tokens": total / max(tokens, 1) * 1e6,
    }


def table(found: dict[str, Any], wall_s: float) -> Table:
    """Return a two-column table; times in milliseconds. `wall_s`: seconds that the simulation took."""
    replicas = sum(len(pool["replicas"]) for pool in found["pools"].values())
    router = found["router"]["policy"]
    fleet = f"{_count(replicas, 'replica')} with {_count(found['gpus'], 'GPU')} in all"
    title = f"{_count(found['requests'], 'request')} on {fleet}, placed by {router}"
    out = Table(title=title, show_header=False, title_justify="left")
    out.add_column(style="bold", no_wrap=True)
    out.add_column(justify="right")
    out.add_row("simulated", f"{found['duration_s']:.1f} s in {wall_s:.1f} s")
    seconds = max(found["duration_s"], 1e-9)
    done = f"{found['offered_requests_per_s']:.2f} / {found['requests'] / seconds:.2f} requests/s"
    out.add_row("offered / done", done)
    queue = found["queue"]
    if queue["grows"]:
        text = f"{queue['half']:,} waited after half of the arrivals, {queue['end']:,} at their end"
        out.add_row("the queue grows: a longer run keeps fewer promises", text, style="yellow")
    if found["prefix_hit_rate"] is not None:
        out.add_row("prompt tokens from prefix caches", f"{found['prefix_hit_rate']:.1%}")
    add_classes(out, found)
    add_tenants(out, found["tenants"])
    add_tenants(out, found["models"], "model")
    out.add_section()
    for name, pool in found["pools"].items():
        if not pool["replicas"]:
            continue
        shares = pool["replicas"].values()
        out.add_row(
            f"{escape(name)}: {len(shares)} x {_count(pool['gpus_each'], 'GPU')}, busy (least to most)",
            f"{pool['utilisation']:.0%} ({min(shares):.0%} to {max(shares):.0%})",
        )
        rates = f"{pool['prefill_tokens_per_s']:.0f} / {pool['decode_tokens_per_s']:.0f} tok/s"
        out.add_row("  prompts / outputs", rates)
        if pool["preemptions"]:
            out.add_row("  preemptions", str(pool["preemptions"]), style="yellow")
    out.add_row("placed", ", ".join(f"{escape(reason)} {count}" for reason, count in found["placements"].items()))
    if "ttft_prediction_error" in found:
        error = found["ttft_prediction_error"]
        out.add_row("TTFT prediction error p50 / p90", f"{error['p50']:.0%} / {error['p90']:.0%}")
    for number, decision in enumerate(found["decisions"]):
        if number == 0:
            out.add_section()
        outcome = f"{decision['running']} running, {decision['broken']} broken"
        out.add_row(f"{decision['at']:.1f} s: {escape(describe_decision(decision))}", outcome)
    out.add_section()
    out.add_row("GPU hours", f"{found['gpu_hours']:.2f}")
    if found["cost"] is not None:
        cost = found["cost"]
        out.add_section()
        out.add_row("cost of a million output tokens", f"{cost['per_million_output_tokens']:.3f}")
        out.add_row("cost of a million tokens, prompts too", f"{cost['per_million_tokens']:.3f}")
    return out


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def search_answer(trials: Sequence[Trial], goal: float, num_gpus: int) -> str:
    """Return the result of a search for the highest rate as a sentence."""
    if (best := best_of(trials, goal)) is None:
        return f"No rate that was tried keeps {goal:.0%} good on {_count(num_gpus, 'GPU')}."
    return f"{best.rate:.3g} requests/s keep {goal:.0%} good on {_count(num_gpus, 'GPU')}."


def search_table(trials: Sequence[Trial], goal: float) -> Table:
    """Return a table of the rates that a search for the highest one has tried."""
    best = best_of(trials, goal)
    out = Table()
    for name in ("requests/s", "good, %", "queue"):
        out.add_column(name, justify="right", no_wrap=True)
    for trial in trials:
        out.add_row(
            f"{trial.rate:.3g}",
            f"{100 * trial.good:.1f}",
            "grows" if trial.grows else "",
            style="bold" if trial == best else None,
        )
    return out


def comparison(found: Mapping[str, Sequence[Score]], num_seeds: int) -> Table:
    """Return a table with one row for each fleet that was compared, the best goodput first."""
    seeds = f"{num_seeds} seeds, 95 % confidence" if num_seeds > 1 else "one seed"
    out = Table(title=f"Share of requests that kept their promises ({seeds})", title_justify="left")
    for name in ("", "good, %", "weighted, %", "refused, %", "cached, %", "urgent TTFT p99, ms", "urgent TPOT p99, ms"):
        is_key = not name
        out.add_column(name, justify="left" if is_key else "right", style="bold" if is_key else None, no_wrap=is_key)
    for name, runs in sorted(found.items(), key=lambda item: -fmean(score.good for score in item[1])):
        out.add_row(
            escape(name) or "as given",
            *(
                str(Estimate.of([getattr(score, field) * 100 for score in runs]))
                for field in ("good", "weighted", "refused", "hit_rate")
            ),
            *(str(Estimate.of([getattr(score, field) for score in runs])) for field in ("ttft_p99", "tpot_p99")),
        )
    return out


def plotted(outcome: Outcome, targets: Targets) -> str:
    """Return a plot of TTFT and TPOT of each request. ValueError: no request has two tokens."""
    pools = ", ".join(f"{pool.name} {pool.replicas}" for pool in outcome.fleet.pools)
    subtitle = f"crossdock simulate, seed {outcome.seed}; replicas: {pools}"
    title = f"{len(outcome.samples):,} simulated requests, placed by {outcome.fleet.router.policy}"
    return plot(title, subtitle, series_of_samples(outcome.samples, targets))


def plotted_comparison(found: Mapping[str, Sequence[Score]]) -> str:
    """Return a plot of the urgent class's p99 of each fleet that was compared: the mean over the seeds."""
    points = [
        (fmean(score.ttft_p99 for score in runs) / 1e3, fmean(score.tpot_p99 for score in runs))
        for runs in found.values()
    ]
    labels = [name or "as given" for name in found]
    num_seeds = len(next(iter(found.values())))
    subtitle = f"crossdock simulate, mean of {num_seeds} seed{'s' * (num_seeds > 1)}"
    return plot("p99 of TTFT and TPOT of the most urgent class", subtitle, [Series("", points, labels)])
