"""Drives a benchmark: sends a workload's jobs when their turn comes and gathers what the client saw."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from crossdock.cluster.bench import metrics, serverside
from crossdock.cluster.bench.client import Server
from crossdock.cluster.bench.http import BenchError
from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Sample, Targets
from crossdock.cluster.bench.mix import MIXES, Mix, mix_jobs
from crossdock.cluster.bench.workloads import (
    SHAPES,
    WORKLOADS,
    Interference,
    Job,
    Shape,
    at_rate,
    read_trace,
    shaped_jobs,
)
from crossdock.cluster.watch.scrape import STEPS, Scrape

_MIX_SECONDS = 60.0  # of arrivals, unless requests are counted

SendOne = Callable[[Job], Coroutine[Any, Any, Sample]]


@dataclass(frozen=True)
class BenchOptions:
    """What to measure. None means the workload's own default."""

    url: str
    workload: str = "chat"
    num_requests: int | None = None
    duration: float | None = None  # seconds; requests under way at its end are waited for
    concurrency: int | None = None  # closed loop; in an open loop a ceiling on requests under way
    request_rate: float | None = None  # per second; makes the loop open
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    prefix_tokens: int | None = None
    streams: int | None = None  # of the interference workload
    interference: Interference = field(default_factory=Interference)
    mix: Mix = MIXES["chat-heavy"]
    service_tier: str | None = None  # the SLO class of all requests; a mix has its own
    burstiness: float = 1.0  # of arrivals, see workloads.arrival_times; a mix has its own
    trace: Path | None = None
    trace_speed: float = 1.0
    length_scale: float = 1.0
    seed: int = 0
    repeat_prompts: bool = False  # the same texts in every run of a seed, for measuring a warm prefix cache
    warmup: int = 2
    goodput: dict[str, float] = field(default_factory=dict)  # limits in seconds, see metrics.parse_goodput
    targets: Targets = field(default_factory=lambda: DEFAULT_TARGETS)  # of SLO classes
    model: str | None = None
    api_key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None
    chat: bool = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ValueError(f"workload: there is no {self.workload!r}; choose from {', '.join(WORKLOADS)}")
        if (self.workload == "trace") != (self.trace is not None):
            raise ValueError("trace: the workload trace and a trace file need each other")
        if self.workload in ("interference", "short-vs-long", "mix", "trace") and self.request_rate is not None:
            raise ValueError(f"request_rate: the workload {self.workload} has arrivals of its own")
        if self.workload == "mix" and self.service_tier is not None:
            raise ValueError("service_tier: the workload mix has classes of its own")
        positive = ("num_requests", "duration", "concurrency", "request_rate", "burstiness")
        for name in (*positive, "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: must be above 0, got {value}")

    @property
    def seconds(self) -> float | None:
        """The duration, with the mix's own."""
        return _MIX_SECONDS if self.workload == "mix" and not self.num_requests and not self.duration else self.duration

    @property
    def shape(self) -> Shape:
        """The workload's shape with the user's numbers in place of its own. A trace and a mix have none."""
        given = {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "prefix_tokens": self.prefix_tokens,
            "concurrency": self.concurrency,
            "num_requests": self.streams if self.workload == "interference" else self.num_requests,
        }
        return replace(SHAPES[self.workload], **{name: value for name, value in given.items() if value is not None})


@dataclass
class BenchResult:
    """A finished run. Times in the samples are on a monotonic clock that read `origin` at the first request."""

    options: BenchOptions
    date: str
    model: str
    notes: list[str]
    samples: list[Sample]
    origin: float
    client_cpu_share: float  # of one core, over the run
    summary: dict[str, Any]


def bench_jobs(options: BenchOptions) -> Iterator[Job]:
    """The jobs of a workload; of interference its streams, of short-vs-long its short requests."""
    limit = options.num_requests
    if options.trace is not None:
        jobs = iter(read_trace(options.trace, speed=options.trace_speed, length_scale=options.length_scale))
    elif options.workload == "mix":
        jobs = mix_jobs(options.mix, options.seed)
    elif options.workload == "short-vs-long":
        jobs = shaped_jobs(options.shape, role="short")
    elif options.workload == "interference":
        jobs, limit = shaped_jobs(options.shape, role="stream"), options.shape.num_requests
    else:
        jobs = shaped_jobs(options.shape)
        limit = limit or (None if options.duration else options.shape.num_requests)
        if options.request_rate is not None:
            jobs = at_rate(jobs, options.request_rate, options.seed, options.burstiness)
    if options.service_tier is not None:
        jobs = (replace(job, service_tier=options.service_tier) for job in jobs)
    return itertools.islice(jobs, limit)


async def closed_loop(jobs: Iterator[Job], send: SendOne, concurrency: int, duration: float | None = None) -> None:
    """Keeps `concurrency` requests under way until the jobs or the time run out."""
    until = time.perf_counter() + duration if duration else float("inf")

    async def slot() -> None:
        for job in jobs:  # one iterator for all slots: whoever is free takes the next
            await send(job)
            if time.perf_counter() >= until:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(slot())


async def open_loop(
    jobs: Iterator[Job], send: SendOne, ceiling: int | None = None, duration: float | None = None
) -> None:
    """Sends every job when it is due, whatever became of those before it."""
    start = time.perf_counter()
    free = asyncio.Semaphore(ceiling) if ceiling else nullcontext()

    async def one(job: Job) -> None:
        async with free:
            await send(job)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            assert job.due is not None
            if duration is not None and job.due >= duration:
                return
            await asyncio.sleep(start + job.due - time.perf_counter())
            group.create_task(one(job))


async def interfere(
    streams: Iterator[Job], plan: Interference, send: SendOne, samples: list[Sample]
) -> tuple[float, float]:
    """Lets streams run undisturbed for a while, then sends long prompts among them. Returns the quiet window.

    Raises:
        BenchError: no stream came to life, so that there is nothing to disturb.
    """
    tasks = [asyncio.ensure_future(send(job)) for job in streams]
    try:
        while len(samples) < len(tasks) or any(not s.ended and len(s.times) < plan.established_tokens for s in samples):
            await asyncio.sleep(0.02)
        if all(task.done() for task in tasks):
            raise BenchError(f"no stream was established: {next((s.error for s in samples if s.error), 'all ended')}")
        return await _disturb(plan, send)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disturb(plan: Interference, send: SendOne) -> tuple[float, float]:
    """Leaves what runs in peace for a while, then sends the long prompts one after the other. Returns the quiet
    window."""
    quiet_start = time.perf_counter()
    await asyncio.sleep(plan.quiet)
    quiet = (quiet_start, time.perf_counter())
    for number, job in enumerate(plan.jobs()):
        if number:
            await asyncio.sleep(plan.interval)
        await send(job)
    return quiet


async def keep_arriving(shorts: Iterator[Job], plan: Interference, send: SendOne) -> tuple[float, float]:
    """Short requests come at a steady rate, at first alone, then while long prompts are prefilled. Returns the quiet
    window."""

    async def arrive(group: asyncio.TaskGroup) -> None:
        for job in shorts:
            group.create_task(send(job))
            await asyncio.sleep(plan.short_interval)

    async with asyncio.TaskGroup() as group:
        arrivals = group.create_task(arrive(group))
        quiet = await _disturb(plan, send)
        arrivals.cancel()
    return quiet


async def run_bench(options: BenchOptions, on_done: Callable[[Sample], None] = lambda _: None) -> BenchResult:
    """Runs a benchmark; `on_done` sees every request as it ends.

    Raises:
        BenchError: the server cannot be measured.
        ValueError: an option or a trace is wrong.
    """
    jobs = bench_jobs(options)
    server = Server(
        url=options.url,
        model=options.model,
        api_key=options.api_key,
        headers=options.headers,
        timeout=options.timeout,
        chat=options.chat,
        tokenizer=options.tokenizer,
        seed=options.seed,
        service_tier="standard" if options.workload == "mix" else options.service_tier,
        salt="" if options.repeat_prompts else secrets.token_hex(8),
    )
    await server.connect()
    if options.workload == "mix" and server.max_model_len is not None:
        mix = options.mix.within(server.max_model_len)
        if mix != options.mix:
            low, high = mix.long_tokens
            server.notes.append(
                f"the server's context is {server.max_model_len:,}: long prompts are {low:,} to {high:,} tokens"
            )
            options = replace(options, mix=mix)
            jobs = bench_jobs(options)
    samples: list[Sample] = []

    async def send(job: Job) -> Sample:
        sample = Sample(job.role, job.output_tokens, job.prompt_tokens, service_tier=job.service_tier)
        samples.append(sample)
        await server.run(job, sample)
        on_done(sample)
        return sample

    if options.warmup:
        shape = replace(options.shape if options.workload in SHAPES else SHAPES["chat"], output_tokens=8)
        await closed_loop(
            itertools.islice(shaped_jobs(shape, name="warmup"), options.warmup),
            lambda job: server.run(job, Sample(job.role, job.output_tokens, job.prompt_tokens)),
            shape.concurrency,
        )
    date = datetime.now(UTC).isoformat(timespec="seconds")
    before = await _scrape(server)
    cpu, origin = time.process_time(), time.perf_counter()
    quiet = await _drive(options, jobs, send, samples)
    cpu_share = (time.process_time() - cpu) / max(time.perf_counter() - origin, 1e-9)
    after = await _scrape(server)

    duration = max((s.ended for s in samples), default=origin) - origin
    summary = metrics.summarize(samples, duration, options.goodput)
    if any(sample.service_tier is not None for sample in samples):
        summary["slo"] = metrics.by_class(samples, duration, options.targets)
    if before is not None and after is not None:
        summary["server"] = serverside.figures(before, after)
    if options.workload == "interference":
        summary["interference"] = metrics.interference(samples, quiet)
        if any(s.role == "stream" and not s.stopped for s in samples):
            server.notes.append("a stream ended before the long prompts did: raise the output tokens")
    elif options.workload == "short-vs-long":
        summary["short_vs_long"] = metrics.short_vs_long(samples, quiet)
    return BenchResult(options, date, server.model or "", server.notes, samples, origin, cpu_share, summary)


async def _drive(
    options: BenchOptions, jobs: Iterator[Job], send: SendOne, samples: list[Sample]
) -> tuple[float, float]:
    """Makes the workload's requests. Returns the window in which nothing long disturbed; it is empty for most."""
    if options.workload == "interference":
        return await interfere(jobs, options.interference, send, samples)
    if options.workload == "short-vs-long":
        return await keep_arriving(jobs, options.interference, send)
    if options.workload in ("trace", "mix") or options.request_rate is not None:
        await open_loop(jobs, send, options.concurrency, options.seconds)
    else:
        await closed_loop(jobs, send, options.shape.concurrency, options.duration)
    return (0.0, 0.0)


async def _scrape(server: Server) -> Scrape | None:
    """The server's own account so far; None if it is not Crossdock's."""
    try:
        status, text = await server.fetch("GET", "/metrics")
        scrape = Scrape.parse(text.decode(), time.perf_counter())
    except (BenchError, ValueError):
        return None
    return scrape if status == 200 and STEPS in scrape.samples else None
