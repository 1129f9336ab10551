"""An engine in its thread, as measured from outside: metrics, timelines, log lines, and what an abort frees."""

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ByteSize

from crossdock.workers.model.load import wrap_module
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine import Engine, warm_up
from crossdock.workers.replica.engine_thread import EngineThread
from crossdock.workers.schedule.request import Overloaded, SamplingParams, Submission, TokenDelta
from crossdock.workers.schedule.slo import SloClass
from tests.workers.architectures import build

CLASSES = (
    SloClass(name="urgent", ttft_s=1e-9, tpot_s=1e-9),  # promises nobody can keep
    SloClass(name="standard", ttft_s=1e3, tpot_s=1e3),
)


class Driven:
    """A loop around a tiny engine, one reader, and the metrics as numbers."""

    def __init__(self, *, is_warm: bool = True, **config: Any) -> None:
        settings = {
            "kv_cache_memory": ByteSize(4 << 20),
            "chunk_policy": "fixed",
            "max_num_batched_tokens": 32,
            "max_num_seqs": 4,
            "slo_classes": CLASSES,
            "admission": "queue",
        }
        engine = Engine(wrap_module(build("llama", {})), EngineConfig.model_validate(settings | config))
        if is_warm:
            warm_up(engine)
        self.loop = EngineThread(engine)
        self.reader = self.loop.channel("test")
        self.ended: dict[str, asyncio.Event] = {}
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.reader.messages():
            for delta in message.deltas:
                if delta.finish_reason is not None:
                    self.ended[delta.request_id].set()

    async def submit(self, name: str, num_tokens: int, max_tokens: int = 3, slo_class: str = "standard") -> None:
        self.ended[name] = asyncio.Event()
        first = 3 + len(self.ended)  # prompts differ from their first token on
        tokens = [first, *(3 + i % 100 for i in range(num_tokens - 1))]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        await self.loop.submit("test", Submission(name, tokens, sampling, slo_class=slo_class, request_id=name))

    async def run(self, name: str, num_tokens: int, max_tokens: int = 3, slo_class: str = "standard") -> None:
        await self.submit(name, num_tokens, max_tokens, slo_class)
        await self.ended[name].wait()

    def of(self, name: str) -> dict[str, Any]:
        [found] = self.loop.timelines.find(name, None, self.loop.engine.clock())
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels."""
        samples = [
            sample
            for family in text_string_to_metric_families(self.loop.metrics.text())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert samples, f"no sample {name} {labels}"
        return sum(sample.value for sample in samples)


def driven(story: Callable[[Driven], Awaitable[None]], **config: Any) -> None:
    async def whole() -> None:
        it = Driven(**config)
        try:
            await story(it)
        finally:
            await it.loop.close()
            await it.reading

    asyncio.run(whole())


def test_metrics_of_one_request() -> None:
    async def story(it: Driven) -> None:
        await it.run("a", num_tokens=100, max_tokens=5)
        assert it.metric("crossdock_steps_total", kind="chunks") == 4
        assert it.metric("crossdock_steps_total", kind="decodes") == 4
        assert it.metric("crossdock_steps_total", kind="mixed") == 0
        assert it.metric("crossdock_step_seconds_count") == it.metric("crossdock_step_predicted_seconds_count") == 8
        assert it.metric("crossdock_step_seconds_sum") > 0
        assert it.metric("crossdock_chunk_tokens_count") == it.metric("crossdock_chunk_wait_seconds_count") == 4
        assert it.metric("crossdock_chunk_tokens_sum") == it.metric("crossdock_prompt_tokens_total") == 100
        assert it.metric("crossdock_prefill_iterations_sum", slo_class="standard") == 4
        first = it.metric("crossdock_time_to_first_token_seconds_sum", prompt_tokens="128", slo_class="standard")
        assert first == pytest.approx(it.of("a")["first_token_s"], abs=1e-5)
        gaps = it.metric("crossdock_inter_token_seconds_count", prefill_shared="false", slo_class="standard")
        assert gaps == 4
        assert it.metric("crossdock_inter_token_seconds_count", prefill_shared="true") == 0
        assert it.metric("crossdock_time_per_output_token_seconds_count", prefill_shared="false") == 1
        assert it.metric("crossdock_output_tokens_total") == 5
        assert it.metric("crossdock_requests_total", finish_reason="length", slo_class="standard") == 1
        assert it.metric("crossdock_decodes_skipped_total") == 0

    driven(story)


def test_metrics_of_a_prompt_that_disturbs_a_stream() -> None:
    async def story(it: Driven) -> None:
        gate = await hold(it.loop)
        stream, prompt = (asyncio.create_task(it.run(name, n, m)) for name, n, m in (("s", 4, 30), ("p", 200, 1)))
        await posted(it.loop, 2)
        gate.set()
        await asyncio.gather(stream, prompt)
        mixed = it.metric("crossdock_steps_total", kind="mixed")
        assert mixed > 3
        assert it.metric("crossdock_inter_token_seconds_count", prefill_shared="true") == mixed
        assert it.of("s")["num_shared_decode_steps"] == mixed
        assert it.metric("crossdock_inter_token_seconds_count") == 29
        assert it.metric("crossdock_time_per_output_token_seconds_count", prefill_shared="true") == 1
        assert it.metric("crossdock_prefill_iterations_sum") == it.of("p")["num_chunks"] + it.of("s")["num_chunks"]

    driven(story)


def test_promises_are_counted_by_class() -> None:
    async def story(it: Driven) -> None:
        await it.run("kept", 20)
        await it.run("broken", 20, slo_class="urgent")  # its deadline is then twice what the prompt takes alone
        assert it.metric("crossdock_slo_ttft_total", slo_class="standard", outcome="met") == 1
        assert it.metric("crossdock_slo_tpot_total", slo_class="standard", outcome="met") == 1
        assert it.metric("crossdock_slo_tpot_total", slo_class="urgent", outcome="missed") == 1
        assert it.metric("crossdock_slo_ttft_total", slo_class="urgent") == 1

    driven(story)


def test_gauges_of_what_runs_and_waits() -> None:
    async def story(it: Driven) -> None:
        total = it.loop.engine.pages.num_pages
        assert it.metric("crossdock_pages") == it.metric("crossdock_pages", state="free") == total
        assert it.metric("crossdock_requests_active") == 0
        assert it.metric("crossdock_preemptions_total") == 0
        cost = {name: it.metric("crossdock_step_cost_seconds", coefficient=name) for name in ("base", "per_decode")}
        assert cost == it.loop.engine.cost_fit.cost.model_dump(include=set(cost))  # type: ignore[union-attr]
        assert it.metric("crossdock_step_outliers_total") >= 0
        gate = await hold(it.loop)
        added = [
            asyncio.create_task(it.run(name, tokens, slo_class=slo))
            for name, tokens, slo in (("a", 50, "standard"), ("b", 100, "urgent"), ("c", 30, "urgent"))
        ]
        await posted(it.loop, 3)
        before_the_first_step = asyncio.create_task(hold(it.loop))
        await posted(it.loop, 4)
        gate.set()
        gate = await before_the_first_step
        assert it.metric("crossdock_requests_active", status="waiting", slo_class="urgent") == 2
        assert it.metric("crossdock_requests_active", status="running") == 0
        assert it.metric("crossdock_uncached_tokens_waiting", slo_class="urgent") == 130
        assert it.metric("crossdock_uncached_tokens_waiting", slo_class="standard") == 50
        backlog = it.metric("crossdock_backlog_seconds", slo_class="urgent")
        assert backlog > it.metric("crossdock_backlog_seconds", slo_class="standard") > 0
        assert [one["state"] for one in it.loop.timelines.live(None, it.loop.engine.clock())] == ["waiting"] * 3
        gate.set()
        await asyncio.gather(*added)
        assert it.metric("crossdock_step_relative_error", quantile="0.9") >= it.metric(
            "crossdock_step_relative_error", quantile="0.5"
        )
        assert it.metric("crossdock_pages") == total

    driven(story)


def test_scrapes_and_questions_while_the_engine_runs() -> None:
    """Whenever they come, they are answered: the engine's thread is not asked to wait, nor waited for."""

    async def story(it: Driven) -> None:
        asking = [asyncio.create_task(it.run(f"{number}", 20 + 9 * number, 8)) for number in range(12)]
        num_scrapes = 0
        while not all(task.done() for task in asking):
            assert it.metric("crossdock_pages") >= 0
            for one in it.loop.timelines.live(None, it.loop.engine.clock()):
                it.of(one["request_id"])
            num_scrapes += 1
            await asyncio.sleep(0.002)  # a thread that never rests would keep the GIL from the engine
        await asyncio.gather(*asking)
        assert num_scrapes > 1
        assert it.metric("crossdock_requests_total", finish_reason="length") == 12

    driven(story)


def test_an_engine_that_is_not_warm_has_no_cost_to_show() -> None:
    async def story(it: Driven) -> None:
        await it.run("a", 40)
        assert "crossdock_step_cost_seconds" not in it.loop.metrics.text()
        assert it.metric("crossdock_backlog_seconds") == 0
        assert it.metric("crossdock_step_seconds_count") > 0
        assert it.metric("crossdock_step_predicted_seconds_count") == 0
        assert it.of("a")["chunks"][0]["predicted_s"] == 0

    driven(story, is_warm=False)


def test_a_cached_prefix_is_counted_once() -> None:
    async def story(it: Driven) -> None:
        await it.run("a", 100)
        it.ended.clear()  # the same prompt again
        await it.run("b", 100)
        assert it.of("b")["num_cached_tokens"] == 96
        assert it.metric("crossdock_cached_tokens_total") == 96
        assert it.metric("crossdock_prompt_tokens_total") == 104

    driven(story)


def test_a_cancel_after_seven_chunks_frees_all_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven chunks of 32 tokens of a prompt of 240, which had pages for all of it."""

    async def story(it: Driven) -> None:
        engine = it.loop.engine
        finish = type(engine._runner).finish
        computed = asyncio.Event()
        loop = asyncio.get_running_loop()
        num_steps = 0

        def counted(runner: Any, step: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 7:  # the abort comes while the seventh chunk is computed, and is done before the eighth
                it.loop._post(lambda: it.loop._abort(["a"]))
                it.loop._post(lambda: loop.call_soon_threadsafe(computed.set))
            return finish(runner, step)

        monkeypatch.setattr(type(engine._runner), "finish", counted)
        layout = engine.model.layout(engine.config.page_size)
        await it.submit("a", 240)
        await computed.wait()
        found = it.of("a")
        assert [chunk["num_tokens"] for chunk in found["chunks"]] == [32] * 7
        assert (found["state"], found["finish_reason"], found["first_token_s"]) == ("finished", "abort", None)
        assert found["freed_bytes"] == 240 // 16 * layout.page_bytes
        assert it.metric("crossdock_cancelled_kv_bytes_total") == 7 * 32 * layout.token_bytes
        assert it.metric("crossdock_requests_total", finish_reason="abort") == 1
        assert engine.pages.counts().owned == 0

    driven(story)


def test_refusals_are_counted_by_class_and_leave_nothing() -> None:
    """The deadline of three equal prompts is twice what one takes alone: the third one cannot be in time."""

    async def story(it: Driven) -> None:
        gate = await hold(it.loop)
        tasks = [asyncio.create_task(it.run(name, 200, slo_class="urgent")) for name in "abc"]
        await posted(it.loop, 3)
        gate.set()
        with pytest.raises(Overloaded, match="'urgent' promises") as refusal:
            await tasks[2]
        assert refusal.value.retry_after > 0
        await asyncio.gather(*tasks[:2])
        assert it.metric("crossdock_requests_refused_total", slo_class="urgent") == 1
        assert it.loop.timelines.find("c", None, 0.0) == []
        assert it.metric("crossdock_requests_total") == 2

    driven(story, admission="reject", enable_prefix_caching=False)


def test_one_line_of_json_for_each_request_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "crossdock.requests")

    async def story(it: Driven) -> None:
        await it.run("done", 40)
        gate = await hold(it.loop)
        asking = asyncio.create_task(it.submit("left", 40))
        await posted(it.loop, 1)
        await it.loop.abort(["left", "never came"])
        gate.set()
        await asking
        await it.loop.call(lambda: None)
        lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "crossdock.requests"]
        assert [(line["request_id"], line["finish_reason"]) for line in lines] == [
            ("done", "length"),
            ("left", "abort"),
        ]
        assert lines[0] == {name: value for name, value in it.of("done").items() if name != "chunks"}
        assert not {"prompt", "prompt_token_ids", "token_ids", "tenant"} & lines[0].keys()

    driven(story)


def test_a_failed_step_ends_the_timelines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(it: Driven) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(type(it.loop.engine._runner), "finish", fail)
        await it.run("a", 40)
        assert it.of("a")["finish_reason"] == "error"
        assert it.metric("crossdock_requests_total", finish_reason="error") == 1
        assert it.loop.timelines.live(None, 0.0) == []

    driven(story)


def test_time_in_the_inbox_is_time_waited() -> None:
    async def story(it: Driven) -> None:
        gate = await hold(it.loop)
        asking = asyncio.create_task(it.run("a", 10))
        await posted(it.loop, 1)
        before = it.loop.engine.clock()
        await asyncio.sleep(0.05)
        waited = it.loop.engine.clock() - before
        gate.set()
        await asking
        assert it.of("a")["queued_s"] >= waited
        assert it.of("a")["chunks"][0]["waited_s"] >= waited

    driven(story)


async def hold(loop: EngineThread) -> threading.Event:
    """Keeps the engine's thread between two steps until the event is set."""
    gate, is_held = threading.Event(), threading.Event()

    def wait() -> None:
        is_held.set()
        gate.wait(20)

    loop._post(wait)
    while not is_held.is_set():
        await asyncio.sleep(0.001)
    return gate


async def posted(loop: EngineThread, count: int) -> None:
    """Until `count` actions wait for the engine's thread."""
    while len(loop._inbox) < count:
        await asyncio.sleep(0.001)


def test_deltas_are_what_they_were() -> None:
    """What is measured of a request changes nothing of it."""

    async def story(it: Driven) -> None:
        channel = it.loop.channel("other")
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        await it.loop.submit("other", Submission("x", [5] * 50, sampling))
        deltas: list[TokenDelta] = []
        async for message in channel.messages():
            deltas += message.deltas
            if deltas and deltas[-1].finish_reason is not None:
                break
        assert [len(delta.token_ids) for delta in deltas] == [1, 1, 1, 1]
        assert it.of("")["id"] == "x"  # a submission need not name an HTTP request

    driven(story)
