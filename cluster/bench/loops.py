"""When jobs are sent: as slots become free (closed loop), or when they are due, and their follow-ups after them."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from typing import Any, TypeAlias

from crossdock.cluster.bench.metrics import Sample
from crossdock.cluster.bench.workloads import Job

SendOne: TypeAlias = Callable[[Job], Coroutine[Any, Any, Sample]]


async def closed_loop(jobs: Iterator[Job], send: SendOne, concurrency: int, duration: float | None = None) -> None:
    """Keep `concurrency` requests in flight until the jobs end or `duration` seconds have passed."""
    until = time.perf_counter() + duration if duration else float("inf")

    async def slot() -> None:
        for job in jobs:  # one iterator for all slots: a free slot takes the next job
            await send(job)
            if time.perf_counter() >= until:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(slot())


async def open_loop(
    jobs: Iterator[Job],
    send: SendOne,
    ceiling: int | None = None,
    duration: float | None = None,
    most: int | None = None,
) -> None:
    """Send each job when it is due, whether or not earlier jobs have ended. A job's follow-ups wait for the job's end.

    None begins after `duration` seconds, nor after `most` jobs.
    """
    start = time.perf_counter()
    until = start + duration if duration is not None else float("inf")
    free = asyncio.Semaphore(ceiling) if ceiling else nullcontext()
    num_sent = 0

    async def one(job: Job, at: float) -> None:
        nonlocal num_sent
        await asyncio.sleep(at - time.perf_counter())
        async with free:
            if num_sent == most:
                return
            num_sent += 1
            sample = await send(job)
        for follow_up in job.follow_ups:
            if sample.ended + follow_up.pause_s < until:
                group.create_task(one(follow_up.job, sample.ended + follow_up.pause_s))

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            assert job.due is not None
            if start + job.due >= until:
                return
            await asyncio.sleep(start + job.due - time.perf_counter())
            group.create_task(one(job, start + job.due))
