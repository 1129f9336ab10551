"""The run of a benchmark: send a workload's jobs when they are due and collect a sample of each."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from zlib import crc32

from crossdock.cluster.bench import metrics, serverside
from crossdock.cluster.bench.agents import DEFAULT_AGENTS, Agents, agent_jobs
from crossdock.cluster.bench.client import Server
from crossdock.cluster.bench.http import BenchError, ServerGone
from crossdock.cluster.bench.load import Load
from crossdock.cluster.bench.loops import SendOne, closed_loop, open_loop
from crossdock.cluster.bench.metrics import DEFAULT_TARGETS, Sample, Targets
from crossdock.cluster.bench.mix import MIXES, Mix, mix_jobs
from crossdock.cluster.bench.tenants import TenantLoad, jobs_of_tenants, parse_tenants
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

_PLANNED = ("interference", "short-vs-long")  # workloads with the long prompts of an Interference
_MIX_SECONDS = 60.0  # of arrivals, unless requests are counted
_RETRY_S = 0.5  # the pause of a closed loop's slot whose request found no server
_GIVE_UP_S = 30.0  # without a connection, after which a run ends


@dataclass(frozen=True)
class BenchOptions(Load):
    """A load with its parts, and the limits within which its requests are good."""

    interference: Interference = field(default_factory=Interference)
    mix: Mix = MIXES["chat-heavy"]
    agents: Agents = field(default_factory=Agents)
    asks_for_classes: bool = True  # False: a mix's requests name no class, and count for the class they would name
    goodput: dict[str, float] = field(default_factory=dict)  # limits in seconds, see metrics.parse_goodput
    targets: Targets = field(default_factory=lambda: DEFAULT_TARGETS)  # of SLO classes
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def tier_to_try(self) -> str | None:
        """Return an SLO class that requests will name; None: they name none."""
        if self.workload == "mix":
            return "standard" if self.asks_for_classes else None
        return self.service_tier

    def __post_init__(self) -> None:
        if self.workload not in WORKLOADS:
            raise ValueError(f"workload: there is no {self.workload!r}; choose from {', '.join(WORKLOADS)}")
        if (self.workload == "trace") != (self.trace is not None):
            raise ValueError("trace: the workload trace and a trace file need each other")
        if (
            self.workload in ("interference", "short-vs-long", "mix", "agents", "trace")
            and self.request_rate is not None
        ):
            raise ValueError(f"request_rate: the workload {self.workload} has arrivals of its own")
        if self.workload == "mix" and self.service_tier is not None:
            raise ValueError("service_tier: the workload mix has classes of its own")
        if self.pictures is not None and self.workload != "images":
            raise ValueError("pictures: only requests of the workload images have some; see also long_pictures")
        if self.interference.long_pictures and self.workload not in _PLANNED:
            raise ValueError(f"long_pictures: the workload {self.workload} has no long prompts; see also pictures")
        if self.tenants is not None:
            parse_tenants(self.tenants)
            if self.request_rate is None and self.workload != "mix":
                raise ValueError("tenants: each has a rate of its own, so give --request-rate or --mix")
        has_pictures = self.workload == "images" or (self.workload in _PLANNED and self.interference.long_pictures)
        if self.picture_size is not None and not has_pictures:
            raise ValueError(f"picture_size: requests of the workload {self.workload} have no pictures")
        positive = ("num_requests", "duration", "concurrency", "request_rate", "burstiness", "pictures", "picture_size")
        for name in (*positive, "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: must be above 0, got {value}")

    @property
    def seconds(self) -> float | None:
        """The duration in seconds, with the mix's own default."""
        return _MIX_SECONDS if self.workload == "mix" and not self.num_requests and not self.duration else self.duration

    @property
    def shape(self) -> Shape:
        """The workload's shape with the user's numbers. A trace and a mix have no shape."""
        given = {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "prefix_tokens": self.prefix_tokens,
            "pictures": self.pictures if self.workload == "images" else None,
            "picture_size": self.picture_size,
            "concurrency": self.concurrency,
            "num_requests": self.streams if self.workload == "interference" else self.num_requests,
        }
        return replace(SHAPES[self.workload], **{name: value for name, value in given.items() if value is not None})


@dataclass
class BenchResult:
    """A finished run. Times in the samples are on a monotonic clock, which showed `origin` at the first request."""

    options: BenchOptions
    date: str
    model: str
    notes: list[str]
    samples: list[Sample]
    origin: float
    client_cpu_share: float  # of one core, over the run
    summary: dict[str, Any]
    ended_early: bool = False  # the server had gone


def bench_jobs(options: BenchOptions) -> Iterator[Job]:
    """Return the jobs of a workload; of interference its streams, of short-vs-long its short requests."""
    limit = options.num_requests
    if options.tenants is not None:
        return itertools.islice(jobs_of_tenants(options.tenants, partial(_jobs_of_tenant, options)), limit)
    if options.workload == "agents":
        return _agent_jobs(options)
    if options.trace is not None:
        jobs = iter(read_trace(options.trace, speed=options.trace_speed, length_scale=options.length_scale))
    elif options.workload == "mix":
        jobs = mix_jobs(options.mix, options.seed)
    elif options.workload == "short-vs-long":
        jobs = shaped_jobs(options.shape, role="short")
    elif options.workload == "interference":
        jobs = shaped_jobs(options.shape, role="stream")
        limit = options.shape.num_requests
    else:
        jobs = shaped_jobs(options.shape)
        limit = limit or (None if options.duration else options.shape.num_requests)
        if options.request_rate is not None:
            jobs = at_rate(jobs, options.request_rate, options.seed, options.burstiness or 1.0)
    if options.service_tier is not None:
        jobs = (replace(job, service_tier=options.service_tier) for job in jobs)
    return itertools.islice(jobs, limit)


def _jobs_of_tenant(options: BenchOptions, tenant: TenantLoad) -> Iterator[Job]:
    """Return the jobs of one tenant: the same with and without the others."""
    rate = None if options.request_rate is None else options.request_rate * tenant.share
    mix = replace(options.mix, rate=options.mix.rate * tenant.share)
    seed = options.seed ^ crc32(tenant.name.encode())
    return bench_jobs(replace(options, tenants=None, request_rate=rate, mix=mix, seed=seed))


def _agent_jobs(options: BenchOptions) -> Iterator[Job]:
    """Return the first job of every agent. The number of requests and the duration end their sessions."""
    scale = options.agents.scale * options.length_scale
    speed = options.agents.speed * options.trace_speed
    agents = replace(options.agents, scale=scale, speed=speed)
    per_agent = None if options.num_requests or options.duration else 1
    slots = options.concurrency or DEFAULT_AGENTS
    return iter(agent_jobs(agents, options.seed, slots, per_agent, options.service_tier))


async def interfere(
    streams: Iterator[Job], plan: Interference, send: SendOne, samples: list[Sample]
) -> tuple[float, float]:
    """Start streams, wait until they are established, then send long prompts. Return the quiet window.

    Raises:
        BenchError: no stream was established, so long prompts have nothing to disturb.
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
    """Wait for the plan's quiet seconds, then send the long prompts one after the other. Return the quiet window."""
    quiet_start = time.perf_counter()
    await asyncio.sleep(plan.quiet)
    quiet = (quiet_start, time.perf_counter())
    for number, job in enumerate(plan.jobs()):
        if number:
            await asyncio.sleep(plan.interval)
        await send(job)
    return quiet


async def keep_arriving(shorts: Iterator[Job], plan: Interference, send: SendOne) -> tuple[float, float]:
    """Send short requests at a steady rate, first alone, then beside long prompts. Return the quiet window."""

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
    """Run a benchmark. `on_done` is called with every request as it ends.

    Raises:
        BenchError: the server cannot be measured.
        ValueError: an option or a trace is wrong.
    """
    jobs = bench_jobs(options)  # reads a trace, so that a wrong one is reported before the server is asked
    server = await _connect(options)
    fitted = _fit_to_context(options, server)
    if fitted is not options:
        options = fitted
        jobs = bench_jobs(fitted)
    samples: list[Sample] = []
    gone_since: float | None = None

    async def send(job: Job) -> Sample:
        nonlocal gone_since
        sample = Sample(job.role, job.output_tokens, job.prompt_tokens, service_tier=job.service_tier)
        sample.tenant = job.tenant
        samples.append(sample)
        await server.run(job, sample)
        on_done(sample)
        if not sample.unreachable:
            gone_since = None
            return sample
        gone_since = gone_since or sample.sent
        if sample.ended - gone_since > _GIVE_UP_S:
            raise ServerGone(f"no server at {server.url} for {_GIVE_UP_S:.0f} s")
        await asyncio.sleep(_RETRY_S)
        return sample

    await _warm_up(options, server)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    before = await _scrape(server)
    cpu = time.process_time()
    origin = time.perf_counter()
    quiet = (0.0, 0.0)
    ended_early = False
    try:
        quiet = await _drive(options, jobs, send, samples)
    except* ServerGone as gone:
        ended_early = True
        server.notes.append(f"the run ended early: {gone.exceptions[0]}")
    cpu_share = (time.process_time() - cpu) / max(time.perf_counter() - origin, 1e-9)
    after = await _scrape(server)

    duration = max((sample.ended for sample in samples), default=origin) - origin
    summary = _summary(options, samples, duration, quiet)
    if before is not None and after is not None:
        summary["server"] = serverside.figures(before, after)
    if options.workload == "interference" and any(s.role == "stream" and not s.stopped for s in samples):
        server.notes.append("a stream ended before the long prompts did: raise the output tokens")
    return BenchResult(
        options, date, server.model or "", server.notes, samples, origin, cpu_share, summary, ended_early
    )


async def _connect(options: BenchOptions) -> Server:
    server = Server(
        url=options.url,
        model=options.model,
        api_key=options.api_key or (parse_tenants(options.tenants)[0].name if options.tenants else None),
        headers=options.headers,
        timeout=options.timeout,
        chat=options.chat,
        tokenizer=options.tokenizer,
        seed=options.seed,
        service_tier=options.tier_to_try,
        salt="" if options.repeat_prompts else secrets.token_hex(8),
    )
    await server.connect()
    return server


def _fit_to_context(options: BenchOptions, server: Server) -> BenchOptions:
    """Return the options with a mix or agents whose prompts fit the server's context; the server's notes report it."""
    if server.max_model_len is None:
        return options
    if options.workload == "agents":
        scale = options.agents.scale * options.length_scale
        fitted = replace(options.agents, scale=scale).within(server.max_model_len)
        if fitted.scale < scale:
            context = f"the server's context is {server.max_model_len:,}"
            server.notes.append(f"{context}: all lengths are {fitted.scale:.3g} of those of coding agents")
            return replace(options, agents=fitted, length_scale=1.0)
    if options.workload != "mix":
        return options
    mix = options.mix.within(server.max_model_len)
    if mix == options.mix:
        return options
    low, high = mix.long_tokens
    server.notes.append(
        f"the server's context is {server.max_model_len:,}: long prompts are {low:,} to {high:,} tokens"
    )
    return replace(options, mix=mix)


async def _warm_up(options: BenchOptions, server: Server) -> None:
    """Send requests that are not counted, of the workload's prompt length."""
    if not options.warmup:
        return
    shape = replace(options.shape if options.workload in SHAPES else SHAPES["chat"], output_tokens=8)
    await closed_loop(
        itertools.islice(shaped_jobs(shape, name="warmup"), options.warmup),
        lambda job: server.run(job, Sample(job.role, job.output_tokens, job.prompt_tokens)),
        shape.concurrency,
    )


def _summary(
    options: BenchOptions, samples: list[Sample], duration: float, quiet: tuple[float, float]
) -> dict[str, Any]:
    """Return the client's figures: of all requests, of each SLO class, and of the workload."""
    summary = metrics.summarize(samples, duration, options.goodput)
    if any(sample.service_tier is not None for sample in samples):
        summary["slo"] = metrics.by_class(samples, duration, options.targets)
    if options.tenants is not None:
        summary["tenants"] = metrics.by_tenant(samples, duration, options.targets)
    if options.workload == "interference":
        summary["interference"] = metrics.interference(samples, quiet)
    elif options.workload == "short-vs-long":
        summary["short_vs_long"] = metrics.short_vs_long(samples, quiet)
    return summary


async def _drive(
    options: BenchOptions, jobs: Iterator[Job], send: SendOne, samples: list[Sample]
) -> tuple[float, float]:
    """Send the workload's requests. Return the quiet window, which is empty for workloads without long prompts."""
    if options.workload == "interference":
        return await interfere(jobs, options.interference, send, samples)
    if options.workload == "short-vs-long":
        return await keep_arriving(jobs, options.interference, send)
    if options.workload == "agents":
        await open_loop(jobs, send, None, options.duration, options.num_requests)
    elif options.workload in ("trace", "mix") or options.request_rate is not None:
        await open_loop(jobs, send, options.concurrency, options.seconds, options.num_requests)
    else:
        await closed_loop(jobs, send, options.shape.concurrency, options.duration)
    return (0.0, 0.0)


async def _scrape(server: Server) -> Scrape | None:
    """Return the server's /metrics; None if the server is not Crossdock."""
    try:
        status, text = await server.fetch("GET", "/metrics")
        scrape = Scrape.parse(text.decode(), time.perf_counter())
    except (BenchError, ValueError):
        return None
    return scrape if status == 200 and STEPS in scrape.samples else None
