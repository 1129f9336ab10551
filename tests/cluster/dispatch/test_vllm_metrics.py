"""Metrics under vLLM's names over engines in this process: each request is counted once, wherever it ran."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import cast

import pytest

from crossdock.cluster.dispatch.dispatcher import Dispatcher, ReplicaLost
from crossdock.cluster.watch.scrape import Scrape
from crossdock.workers.schedule.request.request import TokenDelta
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.cluster.dispatch.in_process import IN_TURN, InProcess, serving, tokens

PARAMS = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


async def scraped(dispatcher: Dispatcher) -> Scrape:
    return Scrape.parse(await dispatcher.metrics_text(), 0.0)


def over(*replicas: InProcess) -> AbstractAsyncContextManager[Dispatcher]:
    """Return a dispatcher with vLLM's metrics over these replicas."""
    names = {f"r{number}": replica for number, replica in enumerate(replicas)}
    return serving(Dispatcher("tiny", IN_TURN, vllm_metrics=True), **names)


def ended(scrape: Scrape) -> dict[str, float]:
    found = scrape.by("vllm:request_success_total", "finished_reason")
    return {reason: count for reason, count in found.items() if count}


async def test_requests_on_two_replicas_are_counted_once_each() -> None:
    async with over(InProcess(), InProcess()) as dispatcher:
        await asyncio.gather(*(tokens(dispatcher, f"{i}", max_tokens=5, prompt=30) for i in range(4)))
        scrape = await scraped(dispatcher)
        assert ended(scrape) == {"length": 4}
        assert set(scrape.by("vllm:num_requests_running", "replica")) == {"r0", "r1"}
        assert scrape.total("vllm:generation_tokens_total") == 20
        assert scrape.total("vllm:prompt_tokens_total") == 120
        assert scrape.total("vllm:prefix_cache_queries_total") == 120
        for name in ("e2e_request_latency", "time_to_first_token", "request_time_per_output_token"):
            assert scrape.total(f"vllm:{name}_seconds_count", model_name="tiny", engine="0") == 4
        for name in ("prompt", "generation", "max_num_generation"):
            assert scrape.total(f"vllm:request_{name}_tokens_count") == 4
        assert scrape.total("vllm:request_prompt_tokens_sum") == 120
        assert scrape.total("vllm:request_generation_tokens_sum") == 20
        assert scrape.total("vllm:request_params_max_tokens_sum") == 20
        assert scrape.total("vllm:inter_token_latency_seconds_count") == 16
        for phase in ("queue", "prefill", "decode", "inference"):
            assert scrape.total(f"vllm:request_{phase}_time_seconds_count") == 4
        assert scrape.total("vllm:kv_cache_usage_perc") == 0
        assert scrape.total("vllm:cache_config_info", block_size="16") == 2


async def test_request_over_two_pools_is_one_request() -> None:
    """The prefill replica has its queue and prefill, the decode replica its decode."""
    async with over(InProcess(role="prefill"), InProcess(role="decode")) as dispatcher:
        assert len(await tokens(dispatcher, "one", max_tokens=5, prompt=60)) == 5
        scrape = await scraped(dispatcher)
        assert ended(scrape) == {"length": 1}
        assert scrape.total("vllm:prompt_tokens_total") == 60
        assert scrape.total("vllm:generation_tokens_total") == 5
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "time_to_first_token"):
            assert scrape.total(f"vllm:{name}_seconds_count") == 1, name
        assert scrape.by("vllm:request_prefill_time_seconds_count", "replica") == {"r0": 1, "r1": 0}
        assert scrape.by("vllm:request_decode_time_seconds_count", "replica") == {"r0": 0, "r1": 1}


async def test_request_that_outlives_its_replica_is_counted_once() -> None:
    clients = [InProcess(), InProcess()]
    async with over(*clients) as dispatcher:
        num_tokens = 0
        async for delta in dispatcher.generate(Submission("r", [7] * 30, PARAMS)):
            num_tokens += len(delta.token_ids)
            if num_tokens == 5:
                victim = next(client for client in clients if client.engine_thread.engine.has_work)
                victim.is_killed = True
        assert num_tokens == 200
        scrape = await scraped(dispatcher)
        assert ended(scrape) == {"length": 1}
        assert scrape.total("vllm:request_generation_tokens_sum") == 200
        assert scrape.total("vllm:time_to_first_token_seconds_count") == 1


async def test_reason_is_abort_for_a_client_that_left_and_stop_for_one_that_has_enough() -> None:
    async with over(InProcess()) as dispatcher:
        stream = cast(AsyncGenerator[TokenDelta, None], dispatcher.generate(Submission("enough", [7] * 30, PARAMS)))
        async with aclosing(stream):
            async for delta in stream:
                if delta.token_ids:
                    break
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in dispatcher.generate(Submission("leaves", [7] * 30, PARAMS)):
                has_begun.set()

        leaving = asyncio.create_task(read())
        await has_begun.wait()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert ended(await scraped(dispatcher)) == {"stop": 1, "abort": 1}


async def test_request_that_no_replica_took_is_not_counted() -> None:
    async with over(InProcess()) as dispatcher:
        with pytest.raises(ValueError, match="prompt"):
            await tokens(dispatcher, "long", prompt=100_000)
        assert ended(await scraped(dispatcher)) == {}
        with pytest.raises(ReplicaLost):
            await tokens(Dispatcher("tiny", vllm_metrics=True), "none up")


async def test_metrics_have_no_name_of_vllm_unless_they_are_asked_for() -> None:
    async with serving(Dispatcher("tiny"), one=InProcess()) as dispatcher:
        assert "vllm:" not in await dispatcher.metrics_text()
