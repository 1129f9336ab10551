"""How long does a routing decision take, and how long does a replica need to advertise its load?

    python benchmarks/routing/router.py                         # up to 1,000 replicas, nothing is served: a minute
    git worktree add ../before COMMIT && python benchmarks/routing/router.py --other-checkout ../before  # 3 minutes

Prints µs at p50 and p99 for `choose`, `book` and `hear` by number and kind of replicas, then the time and the bytes of
one live profile. With another checkout: the median µs of `choose` among the most replicas in both, which take turns in
processes of their own, and the median over turns of their ratio: above 1, this checkout is slower.
"""

import argparse
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from crossdock.router.fleet import Fleet, RouterConfig
from crossdock.router.query import Query
from crossdock.workers.report.live_profile import LiveProfile, PageChanges, Prompts
from crossdock.workers.report.profile import Role, SchedulingProfile
from crossdock.workers.schedule.cost.cost import StepCost
from crossdock.workers.schedule.request.page_hashes import hash_pages

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tables

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the tests' replicas: schedulers without a model

from paired import Checkout, answering, in_rounds, report
from tables import commit_of, hardware

from tests.router import replicas

PROMPTS = (100, 1000, 8000)  # tokens
KINDS: dict[str, tuple[tuple[Role, ...], str]] = {  # roles of replicas, and where they have prefixes
    "mixed": (("mixed",), ""),
    "mixed, prefixes cached": (("mixed",), "pools"),
    "mixed, prefixes cached and in tiers": (("mixed",), "tiers"),
    "prefill, decode and mixed": (("prefill", "decode", "mixed"), ""),
}


def profile(slowness: float, role: Role) -> SchedulingProfile:
    cost = StepCost.of([slowness * value for value in (8e-3, 5e-5, 1e-9, 5e-5, 1e-8)])
    tokens = {"max_model_len": 32_768, "max_num_batched_tokens": 2048}
    size = {"num_pages": 20_000, "max_num_seqs": 256, "page_bytes": 2 << 20, "bytes_per_second": 2e10}
    return replicas.profile(role=role, admission="queue", cost=cost, **tokens, **size)


def live(sequence: int, rng: random.Random) -> LiveProfile:
    """Return the live profile of a replica under load."""
    prompts = (Prompts(0, 1, 3, 900, 0.05), Prompts(1, 3, 2, 6000, rng.random()), Prompts(2, 6, 1, 30_000, 9.0))
    streams = (rng.randrange(30), rng.randrange(60), rng.randrange(10))
    slots, pages = (120, 100, 80), (15_000, 14_000, 11_000)
    ends = tuple((20 * number, 50) for number in range(1, 9))
    return replicas.live_profile(
        "a",
        sequence,
        prompts=prompts,
        streams=streams,
        context_tokens=700 * sum(streams),
        arriving=(0, 1, 0),
        leaving=(0, 0, 0),
        slots=slots,
        free_pages=pages,
        prompt_shares=(0.1, 0.2, 0.1),
        ends=ends,
    )


def microseconds(seconds: list[float]) -> str:
    """Return p50 / p99."""
    ordered = sorted(seconds)
    return f"{1e6 * statistics.median(ordered):6.0f} / {1e6 * ordered[int(0.99 * len(ordered))]:6.0f} µs"


def decisions(
    num_replicas: int, roles: tuple[Role, ...], policy: str, count: int, cached: str, exclude: Collection[str] = ()
) -> str:
    """Return the time of a choice, an in-flight load and an update from a replica, while all replicas send updates.

    `cached`: where replicas have prefixes: "pools", "tiers" below them too, or "" for nowhere. `exclude`: names of
    replicas that get no request, as after a failure there."""
    rng = random.Random(1)
    fleet = Fleet(RouterConfig.model_validate({"policy": policy}))
    names = [f"replica-{number}" for number in range(num_replicas)]
    prefix = list(range(max(PROMPTS)))
    hashes = hash_pages(prefix, 16)
    for number, name in enumerate(names):
        fleet.join(name, profile(rng.choice([1.0, 2.0, 4.0]), roles[number % len(roles)]), 0.0)
        fleet.hear(name, live(1, rng), 0.0)
        if cached:
            stored = [hashes[: rng.randrange(len(hashes))]] if cached == "tiers" else []
            fleet.hear_pages(name, PageChanges("a", 1, hashes[: rng.randrange(len(hashes))], stored=stored))
    times: dict[str, list[float]] = {"choose": [], "book": [], "hear": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        times[name].append(time.perf_counter() - started)
        return result

    running: list[str] = []
    for number in range(count):
        now = number * 1e-3
        for _ in range(4):
            update = replicas.changed(live(number + 2, rng), load_seconds=(1e-3,) if cached == "tiers" else ())
            timed("hear", partial(fleet.hear, rng.choice(names), update, now))
        length = rng.choice(PROMPTS)
        pages = hashes[: length // 16] if cached else ()
        query = Query(f"request-{number}", length, pages, rng.choice(["interactive", "standard", "batch"]))
        placement = timed("choose", partial(fleet.choose, query, now, exclude))
        timed("book", partial(fleet.book, query, placement))
        running.append(query.request_id)
        if len(running) > 2 * num_replicas:
            fleet.settle(running.pop(0))
    return " | ".join(microseconds(times[name]) for name in ("choose", "book", "hear"))


def advertising(num_waiting: int, num_running: int) -> str:
    """Return the time in which a replica makes its live profile, and the profile's bytes."""
    replica = replicas.Replica(profile(1.0, "mixed"))
    for number in range(num_waiting + num_running):
        replica.add(f"{number}", [number, *range(200)], "standard", max_tokens=500)
        if number == num_running:
            while len([request for request in replica.scheduler.table.running if request.is_decoding]) < num_running:
                replica.step()
    times = []
    for number in range(200):
        started = time.perf_counter()
        update = replica.publisher.live(float(number))
        times.append(time.perf_counter() - started)
    return f"{microseconds(times)} | {len(pickle.dumps(update))} bytes"


def compare(other: Path, turns: int, num_replicas: int, count: int) -> None:
    """Print the time of a choice in another checkout and in this one, in turns."""
    checkouts = {commit_of(other): other, "this": Path(__file__).resolve().parents[2]}

    def ask(roles: tuple[Role, ...], cached: str, side: Checkout, _: int) -> float:
        return float(side.ask([num_replicas, roles, "seconds", count, cached]).split("/")[0])

    questions = {f"{num_replicas:,} {kind}": partial(ask, *asked) for kind, asked in KINDS.items()}
    with ExitStack() as stack:
        sides = []
        for path in checkouts.values():
            (script,) = (path / "benchmarks").rglob("router.py")
            sides.append(stack.enter_context(answering(path, script, "decisions")))
        print(report(in_rounds(sides, turns, questions), list(checkouts), "µs"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 10, 100, 1000])
    parser.add_argument("--count", type=int, default=2000, help="decisions per row")
    parser.add_argument("--other-checkout", type=Path, help="directory of the commit to compare with")
    parser.add_argument("--turns", type=int, default=30, help="of each checkout, 200 decisions each (default: 30)")
    args = parser.parse_args()
    print(hardware())
    if args.other_checkout:
        compare(args.other_checkout, args.turns, max(args.replicas), 200)
        return
    print("\n| replicas | policy | choose p50 / p99 | book | hear |\n|---|---|---|---|---|")
    for num_replicas in args.replicas:
        for kind in KINDS if num_replicas > 2 else ["mixed"]:
            roles, cached = KINDS[kind]
            row = decisions(num_replicas, roles, "seconds", args.count, cached)
            print(f"| {num_replicas:,} {kind} | seconds | {row} |", flush=True)
    most = max(args.replicas)
    row = decisions(most, ("mixed",), "seconds", args.count, "", ["replica-0"])
    print(f"| {most:,} mixed, one excluded | seconds | {row} |", flush=True)
    print("\n| waiting | streams | live profile, p50 / p99 | size |\n|---|---|---|---|")
    for waiting, running in ((0, 1), (8, 64), (200, 200)):
        print(f"| {waiting} | {running} | {advertising(waiting, running)} |", flush=True)


if __name__ == "__main__":
    main()
