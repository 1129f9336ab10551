"""Do chunks of equal time leave two live pipeline stages less idle than prompts computed whole, and lose no tokens?

    OMP_WAIT_POLICY=PASSIVE python benchmarks/chunks/live_stages.py     # three policies, three rounds: 10 minutes
    OMP_WAIT_POLICY=PASSIVE python benchmarks/chunks/live_stages.py --http

Prints the idle share of the stages, tokens per second and the 99th percentile of the seconds between two tokens, as
medians of the rounds. The default model runs on two processes of one thread each, with the load and the policies of
stages.py; each round runs all policies. A stage is idle while its process uses no CPU: the seconds between the first
request and the first token of the last, less those of CPU time. So the driver's scheduling counts as work.

With --http a `crossdock serve --pp 2` has the stages, and clients keep as many requests open. Tokens are counted and
timed where clients read them.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import numpy as np
import psutil
from pydantic import ByteSize
from servers import add_server_options, crossdock_server
from stages import SETTINGS, requests
from tables import markdown, write

from crossdock.workers.model.weights.checkpoint import resolve_model
from crossdock.workers.replica.config import EngineConfig, ReplicaSpec
from crossdock.workers.replica.engine.calibrate import warm_up
from crossdock.workers.replica.engine.engine import Engine
from crossdock.workers.replica.engine.engine_loader import engine_of_ranks
from crossdock.workers.replica.ranks.worker_group import WorkerGroup
from crossdock.workers.replica.serving.follower import follow
from crossdock.workers.schedule.request.submission import SamplingParams, Submission


class Ran(NamedTuple):
    """One run of a policy: idle shares of the first and the last stage, tokens per second, and p99 of gaps, seconds."""

    first_idle: float
    last_idle: float
    tokens_per_s: float
    gap_p99: float


def submissions(count: int) -> list[Submission]:
    """Return the load of stages.py as prompts of random tokens."""
    draw = np.random.default_rng(1)
    return [
        Submission(
            f"{number}",
            draw.integers(100, 40_000, job.prompt_tokens).tolist(),
            SamplingParams(max_tokens=job.output_tokens, temperature=0.0, ignore_eos=True),
        )
        for number, job in enumerate(requests(count))
    ]


def feed(engine: Engine, waiting: deque[Submission], most_open: int, stages: list[psutil.Process]) -> Ran:
    """Keep so many requests in progress until all have ended."""
    tokens = sum(len(each.prompt_token_ids) + each.sampling.max_tokens for each in waiting)
    last = waiting[-1].id
    times = defaultdict[str, list[float]](list)
    began, cpu = time.monotonic(), [_cpu_seconds(stage) for stage in stages]
    idle: list[float] = []
    num_open = 0
    while waiting or num_open:
        while waiting and num_open < most_open:
            engine.add(waiting.popleft())
            num_open += 1
        for delta in engine.step().deltas:
            times[delta.request_id] += [time.monotonic()] * len(delta.token_ids)
            num_open -= delta.finish_reason is not None
        if not idle and times[last]:
            took = time.monotonic() - began
            idle = [1 - (_cpu_seconds(stage) - before) / took for stage, before in zip(stages, cpu, strict=True)]
    gaps = np.concatenate([np.diff(each) for each in times.values()])
    return Ran(*idle, tokens / (time.monotonic() - began), float(np.percentile(gaps, 99)))


def run_over_http(args: argparse.Namespace, policy: str) -> Ran:
    """Serve two stages, and run the load once with the policy, as `feed` does, by clients of HTTP."""
    classes = [{"name": "standard", "ttft_s": 600.0, "tpot_s": args.tpot}]
    engine = SETTINGS[policy] | {"kv_cache_memory": 600 << 20, "enable_prefix_caching": False, "slo_classes": classes}
    engine |= {"admission": "queue", "max_num_seqs": 2 * args.open}
    settings: dict[str, object] = {"pools.mixed.num_cpus": 1, "model.max_model_len": 8192}
    settings |= {f"engine.{name}": value for name, value in engine.items()}
    flags = [f"--set={name}={json.dumps(value)}" for name, value in settings.items()]
    with crossdock_server(args, "--pp", "2", *flags) as server:
        named = {" ".join(each.cmdline()): each for each in map(psutil.Process, server.processes_now())}
        [first] = (each for name, each in named.items() if name.startswith("ray::Rank"))
        [last] = (each for name, each in named.items() if name.startswith("ray::ServeReplica:crossdock:mixed"))
        return asyncio.run(_ask(server.address, submissions(args.requests), 2 * args.open, [first, last]))


async def _ask(url: str, waiting: list[Submission], most_open: int, stages: list[psutil.Process]) -> Ran:
    """Keep so many requests in progress until all have ended."""
    tokens = sum(len(each.prompt_token_ids) + each.sampling.max_tokens for each in waiting)
    gaps: list[float] = []
    idle: list[float] = []
    turns = asyncio.Semaphore(most_open)
    began, cpu = time.monotonic(), [_cpu_seconds(stage) for stage in stages]

    async def ask(client: httpx.AsyncClient, submission: Submission, is_last: bool) -> None:
        wanted = submission.sampling.max_tokens
        body = {"prompt": submission.prompt_token_ids, "max_tokens": wanted, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        times: list[float] = []
        rest = ""
        async with turns, client.stream("POST", "/v1/completions", json=body) as answer:
            async for text in answer.aiter_text():
                *lines, rest = (rest + text).split("\n")  # not by `aiter_lines`, which knows other ends of lines too
                for line in lines:
                    if line.startswith("data: {"):
                        [choice] = json.loads(line.removeprefix("data: "))["choices"]
                        times += [time.monotonic()] * len(choice.get("token_ids") or ())
                if is_last and times and not idle:
                    took = time.monotonic() - began
                    used = (_cpu_seconds(each) - before for each, before in zip(stages, cpu, strict=True))
                    idle[:] = [1 - seconds / took for seconds in used]
        assert len(times) == wanted
        gaps.extend(np.diff(times).tolist())

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        await asyncio.gather(*(ask(client, each, each is waiting[-1]) for each in waiting))
    return Ran(*idle, tokens / (time.monotonic() - began), float(np.percentile(gaps, 99)))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run(args: argparse.Namespace, policy: str) -> Ran:
    """Start two stages, and run the load once with the policy."""
    settings = SETTINGS[policy] | {"kv_cache_memory": ByteSize(600 << 20), "enable_prefix_caching": False}
    classes = [{"name": "standard", "ttft_s": 600.0, "tpot_s": args.tpot}]
    config = EngineConfig.model_validate(
        settings | {"admission": "queue", "max_num_seqs": 2 * args.open, "slo_classes": classes}
    )
    spec = ReplicaSpec(
        config.model_spec(args.model, max_model_len=8192), config, num_threads=1, pipeline_parallel_size=2
    )
    group = WorkerGroup(spec, "127.0.0.1", sys.exit)
    first = multiprocessing.get_context("spawn").Process(target=follow, args=(spec, 0, group.address))
    first.start()
    try:
        engine = engine_of_ranks(group.load(), group, None)
        warm_up(engine)
        stages = [psutil.Process(first.pid), psutil.Process()]
        return feed(engine, deque(submissions(args.requests)), 2 * args.open, stages)
    finally:
        group.close()
        first.join(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; default: the embedded model")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--open", type=int, default=6, help="requests in progress for each stage")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds per token promised (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--http", action="store_true", help="serve the stages, and ask over HTTP")
    add_server_options(parser, "live-stages", 8471)
    args = parser.parse_args()
    args.model = str(resolve_model(args.model))
    runs: dict[str, list[Ran]] = {name: [] for name in SETTINGS}
    for _ in range(args.rounds):
        for name, each in runs.items():
            each.append((run_over_http if args.http else run)(args, name))
            print(f"{name}: {each[-1]}", file=sys.stderr, flush=True)
    lines = [["policy", "first stage idle", "last stage idle", "tokens/s", "gap p99 ms"]]
    for name, each in runs.items():
        first, last, rate, gap = (median(values) for values in zip(*each, strict=True))
        lines.append([name, f"{first:.1%}", f"{last:.1%}", f"{rate:,.0f}", f"{gap * 1e3:,.0f}"])
    text = (
        f"{Path(args.model).name}, two stages, {args.requests} requests, {args.open} in progress per stage,"
        f" {args.tpot:g} s promised a token.\n\n"
    )
    write(args, text + markdown(lines), {name: [ran._asdict() for ran in each] for name, each in runs.items()})


if __name__ == "__main__":
    main()
