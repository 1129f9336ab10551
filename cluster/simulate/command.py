"""The command line of `crossdock simulate`: fleet.py describes the cluster, simulation.py plays the load, study.py
compares several runs, report.py shows the results."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from math import inf
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from crossdock.cluster.bench.agents import Agents
from crossdock.cluster.bench.flags import matching, takes
from crossdock.cluster.bench.load import Amount, SharedFlags
from crossdock.cluster.bench.mix import Mix, named_mix
from crossdock.cluster.bench.workloads import SHAPES, WORKLOADS, Job

if TYPE_CHECKING:
    from crossdock.cluster.bench.metrics import Targets
    from crossdock.cluster.simulate.fleet import SimulatedFleet
    from crossdock.cluster.simulate.study import Score

_STUDY = "Comparisons"
_POLICIES = "seconds,round-robin,least-requests,power-of-two,prefix-affinity,block-cost,pinned,remaining-work"
_SHIPPING = "auto,always,never"
_SECONDS = 60.0  # of arrivals, where neither seconds nor requests are given
_Jobs: TypeAlias = Callable[[int], Iterator[Job]]  # of a seed
_CLOSED_LOOPS = ("interference", "short-vs-long")  # jobs that are due when others have ended


@dataclass(frozen=True)
class SimulateFlags(Amount, SharedFlags):
    """The flags of `crossdock simulate`: the load, and what is simulated."""

    fleet: Annotated[Path | None, typer.Argument(help="YAML file that describes the fleet.")] = None
    pools: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=COUNTxPROFILE,…",
            help="Pools, in place of the file's: prefill=2xh100-8b,decode=6xh100-8b. PROFILE is a preset, "
            "{a100,h100,h200,b200,l4,l40s,mi300x}-{8b,70b,vl7b}[-tpN], such a GPU for a model's directory, "
            "h100[-tpN]:DIRECTORY, a JSON file of `crossdock tune --profile`, or a URL; PROFILE*N is N times as slow.",
        ),
    ] = None
    kv_cache_host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of each replica's host for pages that leave its pool."),
    ] = None
    noise: Annotated[float | None, typer.Option(help="Relative spread of step times.")] = None
    kill: Annotated[
        list[str] | None, typer.Option(metavar="REPLICA@SECONDS", help="A replica dies: mixed/0@30. Repeatable.")
    ] = None
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", help=f"One of: {', '.join(WORKLOADS)}.", show_default="mix")
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Number of seeds, from --seed on; shows means with 95 % intervals.", rich_help_panel=_STUDY
        ),
    ] = 1
    policy: Annotated[
        str | None,
        typer.Option(help=f"Policy of the router, or several to compare: {_POLICIES}.", rich_help_panel=_STUDY),
    ] = None
    shipping: Annotated[
        str | None,
        typer.Option(
            help=f"Whether prefill replicas compute prompts for others, or several answers to compare: {_SHIPPING}.",
            rich_help_panel=_STUDY,
        ),
    ] = None
    find_rate: Annotated[
        float | None,
        typer.Option(
            metavar="GOAL",
            min=0.01,
            max=1.0,
            help="Find the highest rate that keeps this share of requests good, e.g. 0.99. No queue may grow at it.",
            rich_help_panel=_STUDY,
        ),
    ] = None
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Find the best ratio of prefill to decode replicas.", rich_help_panel=_STUDY),
    ] = False


@takes(SimulateFlags)
def simulate(flags: SimulateFlags) -> None:
    """Simulate a cluster: the real scheduler and router, on a clock driven by measured or estimated step costs."""
    from crossdock.cluster.bench.plot import check_plot_file
    from crossdock.workers.report.presets import HOW_FAR_OFF

    stderr = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        check_plot_file(flags.plot_file)
        fleet = _fleet(flags)
        if estimated := [pool.name for pool in fleet.pools if pool.profile.is_estimate]:
            stderr.print(f"[dim]{escape(', '.join(estimated))}: {HOW_FAR_OFF}[/dim]")
        if flags.find_rate is not None:
            _find_rate(fleet, flags, _targets(fleet, flags.slo or []))
            return
        jobs = _jobs(fleet, flags)
        targets = _targets(fleet, flags.slo or [])
        variants = _variants(fleet, flags)
        if len(variants) > 1 or flags.seeds > 1:
            _compare(variants, flags, jobs, targets, stderr)
        else:
            _run(variants[0][1], flags, jobs, targets, stderr)
    except ValueError as error:
        for line in str(error).splitlines():
            stderr.print(f"[red]simulate:[/red] {escape(line)}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _fleet(flags: SimulateFlags) -> "SimulatedFleet":
    """Return the fleet of the file and the flags.

    Raises:
        ValueError: no fleet is given, or the flags do not describe one; the message names the field.
    """
    from crossdock.cluster.simulate.fleet import load_fleet

    if flags.fleet is None and flags.pools is None:
        raise ValueError("fleet: name a YAML file or give --pools, e.g. --pools mixed=4xh100-8b")
    failures = [_parse_kill(text) for text in flags.kill] if flags.kill else None
    settings = {"noise": flags.noise, "failures": failures}
    return load_fleet(flags.fleet, flags.pools, flags.kv_cache_host_memory, **settings)


def _variants(fleet: "SimulatedFleet", flags: SimulateFlags) -> "list[tuple[str, SimulatedFleet]]":
    """Return the named fleets to compare: every combination of the router's settings, in every ratio of pools."""
    from crossdock.cluster.simulate.study import ratios, routed

    variants = [("", fleet)]
    for setting, values in (("policy", flags.policy), ("shipping", flags.shipping)):
        if values is not None:
            variants = [
                (f"{name} {value}".strip(), variant)
                for name, each in variants
                for value, variant in routed(each, setting, values.split(","))
            ]
    if flags.sweep:
        variants = [(f"{name} {ratio}".strip(), variant) for name, each in variants for ratio, variant in ratios(each)]
    return variants


def _jobs(fleet: "SimulatedFleet", flags: SimulateFlags) -> _Jobs:
    """Return a function from a seed to the jobs that `crossdock bench` would send with it.

    Raises:
        ValueError: the flags contradict each other; the message names the field.
    """
    from crossdock.cluster.bench.run import BenchOptions, bench_jobs

    workload = _workload(flags)
    options = matching(Amount, flags)
    options.pop("trace", None)
    if workload == "mix":
        longest = min(pool.profile.max_model_len for pool in fleet.pools)
        options |= {"mix": _mix(flags).within(longest)}
        options = {name: value for name, value in options.items() if name not in ("request_rate", "burstiness")}
    if workload == "agents":
        options |= {"agents": _agents(fleet, flags), "length_scale": 1.0}
    if (until := _until(flags)) < inf:
        options["duration"] = until

    def jobs(seed: int) -> Iterator[Job]:
        bench = BenchOptions("", workload, trace=flags.trace, seed=seed, **options)
        return takewhile(lambda job: job.due is not None and job.due < until, bench_jobs(bench))

    jobs(0)  # raises for wrong options before anything runs
    return jobs


def _until(flags: SimulateFlags) -> float:
    """Return the second at which no request begins any more."""
    is_bounded = flags.duration is not None or flags.num_requests is not None or flags.trace is not None
    return flags.duration if flags.duration is not None else inf if is_bounded else _SECONDS


def _workload(flags: SimulateFlags) -> str:
    """Return the name of the workload: mix, trace, or one of the shapes."""
    given = {flags.workload, flags.mix and "mix", flags.trace and "trace"} - {None}
    if len(given) > 1:
        raise ValueError("mix, workload, trace: give one of them")
    if flags.trace is None and flags.workload != "agents" and flags.request_rate is None:
        raise ValueError("request_rate: how many arrive per second must be given, with --request-rate")
    name = str(next(iter(given), "mix"))
    if name == "trace" and flags.trace is None:
        raise ValueError("trace: the workload trace needs a file, with --trace")
    if name in _CLOSED_LOOPS or name not in (*SHAPES, "mix", "agents", "trace"):
        known = ", ".join(shape for shape in (*SHAPES, "agents") if shape not in _CLOSED_LOOPS)
        raise ValueError(f"workload: {name!r} cannot be simulated; choose from {known}, or a --mix or --trace")
    return name


def _agents(fleet: "SimulatedFleet", flags: SimulateFlags) -> Agents:
    """Return the agents with the user's numbers, and lengths that fit every pool's context."""
    if flags.num_requests is not None:
        raise ValueError("num_requests: how many requests agents send follows from their answers; give --duration")
    agents = Agents(**matching(Agents, flags) | {"scale": flags.length_scale})
    return agents.within(min(pool.profile.max_model_len for pool in fleet.pools))


def _mix(flags: SimulateFlags) -> Mix:
    """Return the mix with the user's numbers."""
    changes = {"rate": flags.request_rate, "burstiness": flags.burstiness, "long_share": flags.long_share}
    return named_mix(flags.mix, {name: value for name, value in changes.items() if value is not None})


def _targets(fleet: "SimulatedFleet", specs: list[str]) -> "Targets":
    from crossdock.cluster.bench.metrics import parse_targets

    promised = {slo.name: {"ttft": slo.ttft_s, "tpot": slo.tpot_s} for slo in fleet.classes}
    return parse_targets(specs, promised)


def _parse_kill(text: str) -> dict[str, Any]:
    name, _, seconds = text.rpartition("@")
    try:
        at = float(seconds)
    except ValueError:
        at = -1.0
    if not name or at < 0:
        raise ValueError(f"kill: {text!r} is not REPLICA@SECONDS, e.g. mixed/0@30")
    return {"kill": name, "at": at}


def _run(fleet: "SimulatedFleet", flags: SimulateFlags, jobs: _Jobs, targets: "Targets", stderr: Console) -> None:
    from crossdock.cluster.bench.progress import progress
    from crossdock.cluster.simulate import report
    from crossdock.cluster.simulate.simulation import Simulation

    started = time.perf_counter()
    with progress(stderr, "Simulating", "requests") as reported:

        def counted() -> Iterator[Job]:
            for number, job in enumerate(jobs(flags.seed), 1):
                reported(number, None)
                yield job

        outcome = Simulation(fleet, flags.seed).run(counted(), _until(flags))
    if not outcome.samples:
        raise ValueError("duration: no request arrives in that time")
    found = report.figures(outcome, targets)
    Console().print(report.table(found, time.perf_counter() - started))
    if flags.json_file is not None:
        flags.json_file.write_text(json.dumps(found, indent=1) + "\n")
    if flags.plot_file is not None:
        flags.plot_file.write_text(report.plotted(outcome, targets))


def _find_rate(fleet: "SimulatedFleet", flags: SimulateFlags, targets: "Targets") -> None:
    """Search for the highest rate, from --request-rate or 1 request/s on, and print the rates that were tried.

    Raises:
        ValueError: the load has no rate, or other runs are asked for besides.
    """
    from crossdock.cluster.simulate import report
    from crossdock.cluster.simulate.capacity_search import best_of, highest_rate, queue_of
    from crossdock.cluster.simulate.simulation import Simulation
    from crossdock.cluster.simulate.study import Score

    if flags.trace is not None or flags.workload == "agents":
        raise ValueError("find_rate: a trace and agents have no rate to vary; give --mix or another --workload")
    if flags.policy or flags.shipping or flags.sweep or flags.plot_file is not None:
        raise ValueError("find_rate: leave out --policy, --shipping, --sweep and --plot; each search is of one fleet")
    goal = flags.find_rate or 1.0
    seeds = range(flags.seed, flags.seed + flags.seeds)

    def run(rate: float) -> tuple[float, bool]:
        jobs = _jobs(fleet, replace(flags, request_rate=rate))
        outcomes = [Simulation(fleet, seed).run(jobs(seed), _until(flags)) for seed in seeds]
        if not all(outcome.samples for outcome in outcomes):
            return 1.0, False  # so few that none arrives
        shares = [Score.of(outcome, targets).good for outcome in outcomes]
        return fmean(shares), any(queue_of(outcome.samples).grows for outcome in outcomes)

    trials = highest_rate(run, goal, flags.request_rate or 1.0)
    num_gpus = sum(pool.replicas * report.gpus_of(pool) for pool in fleet.pools)
    console = Console(highlight=False, soft_wrap=True)
    console.print(report.search_table(trials, goal))
    console.print(report.search_answer(trials, goal, num_gpus))
    if flags.json_file is not None:
        best = best_of(trials, goal)
        found = {"goal": goal, "gpus": num_gpus, "requests_per_s": None if best is None else best.rate}
        data = found | {"trials": [trial._asdict() for trial in trials]}
        flags.json_file.write_text(json.dumps(data, indent=1) + "\n")


def _compare(
    fleets: "list[tuple[str, SimulatedFleet]]", flags: SimulateFlags, jobs: _Jobs, targets: "Targets", stderr: Console
) -> None:
    from crossdock.cluster.bench.progress import progress
    from crossdock.cluster.simulate import report
    from crossdock.cluster.simulate.study import scores

    seeds = range(flags.seed, flags.seed + flags.seeds)
    num_done = 0
    total = len(fleets) * len(seeds)
    with progress(stderr, "Comparing", "simulations") as reported:

        def done(name: str, seed: int, score: "Score") -> None:
            nonlocal num_done
            num_done += 1
            reported(num_done, total)
            if stderr.is_terminal:
                stderr.print(f"[dim]{escape(name)}, seed {seed}: {score.good:.1%} good[/dim]")

        found = scores(fleets, seeds, jobs, targets, done, _until(flags))
    Console().print(report.comparison(found, len(seeds)))
    if flags.json_file is not None:
        data = {name: [asdict(score) for score in runs] for name, runs in found.items()}
        flags.json_file.write_text(json.dumps({"seeds": list(seeds), "scores": data}, indent=1) + "\n")
    if flags.plot_file is not None:
        flags.plot_file.write_text(report.plotted_comparison(found))
