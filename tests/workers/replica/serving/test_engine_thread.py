"""An engine in its thread, as measured from outside: metrics, timelines, log lines, and what an abort frees."""

import asyncio
import json
import logging
import re
from itertools import pairwise
from typing import Any

import pytest

from crossdock.workers.model.runner import Runner
from crossdock.workers.schedule.request.submission import Overloaded
from tests.workers.replica.driven import driving, posted


async def test_metrics_of_one_request_count_all_of_it() -> None:
    async with driving() as driven:
        await driven.run("a", num_tokens=100, max_tokens=5)
        assert driven.metric("crossdock_steps_total", kind="chunks") == 4
        assert driven.metric("crossdock_steps_total", kind="decodes") == 4
        assert driven.metric("crossdock_steps_total", kind="mixed") == 0
        assert driven.metric("crossdock_step_seconds_count") == 8
        assert driven.metric("crossdock_step_predicted_seconds_count") == 8
        assert driven.metric("crossdock_step_seconds_sum") > 0
        assert driven.metric("crossdock_chunk_tokens_count") == driven.metric("crossdock_chunk_wait_seconds_count") == 4
        assert driven.metric("crossdock_chunk_tokens_sum") == driven.metric("crossdock_prompt_tokens_total") == 100
        assert driven.metric("crossdock_prefill_iterations_sum", slo_class="standard") == 4
        first = driven.metric("crossdock_time_to_first_token_seconds_sum", slo_class="standard")
        assert first == pytest.approx(driven.timeline("a")["first_token_s"], abs=1e-5)
        gaps = driven.metric("crossdock_inter_token_seconds_count", prefill_shared="false", slo_class="standard")
        assert gaps == 4
        assert driven.metric("crossdock_inter_token_seconds_count") == 4
        assert driven.metric("crossdock_output_tokens_total") == 5
        assert driven.metric("crossdock_requests_total", finish_reason="length", slo_class="standard") == 1
        assert driven.metric("crossdock_decodes_skipped_total") == 0


async def test_metrics_of_a_stream_beside_a_prompt_tell_shared_gaps_apart() -> None:
    async with driving() as driven:
        gate = await driven.hold()
        stream, prompt = (asyncio.create_task(driven.run(name, n, m)) for name, n, m in (("s", 4, 30), ("p", 200, 1)))
        await posted(driven.thread, 2)
        gate.set()
        await asyncio.gather(stream, prompt)
        mixed = driven.metric("crossdock_steps_total", kind="mixed")
        assert mixed > 3
        assert driven.metric("crossdock_inter_token_seconds_count", prefill_shared="true") == mixed
        assert driven.timeline("s")["num_shared_decode_steps"] == mixed
        assert driven.metric("crossdock_inter_token_seconds_count") == 29
        num_chunks = sum(driven.timeline(name)["num_chunks"] for name in "ps")
        assert driven.metric("crossdock_prefill_iterations_sum") == num_chunks


async def test_promises_kept_and_missed_are_counted_by_class() -> None:
    async with driving() as driven:
        await driven.run("kept", 20)
        await driven.run("broken", 20, slo_class="urgent")  # its deadline is then twice what the prompt takes alone
        assert driven.metric("crossdock_slo_ttft_total", slo_class="standard", outcome="met") == 1
        assert driven.metric("crossdock_slo_tpot_total", slo_class="standard", outcome="met") == 1
        assert driven.metric("crossdock_slo_tpot_total", slo_class="urgent", outcome="missed") == 1
        assert driven.metric("crossdock_slo_ttft_total", slo_class="urgent") == 1


async def test_gauges_of_waiting_requests_show_their_backlog() -> None:
    async with driving() as driven:
        total = driven.engine.pages.num_pages
        assert driven.metric("crossdock_pages") == driven.metric("crossdock_pages", state="free") == total
        assert driven.metric("crossdock_requests_active") == 0
        assert driven.metric("crossdock_preemptions_total") == 0
        cost = {name: driven.metric("crossdock_step_cost_seconds", coefficient=name) for name in ("base", "per_decode")}
        assert cost == {name: getattr(driven.engine.cost_fit.cost, name) for name in cost}  # type: ignore[union-attr]
        assert driven.metric("crossdock_step_outliers_total") >= 0
        gate = await driven.hold()
        added = [
            asyncio.create_task(driven.run(name, tokens, slo_class=slo))
            for name, tokens, slo in (("a", 50, "standard"), ("b", 100, "urgent"), ("c", 30, "urgent"))
        ]
        await posted(driven.thread, 3)
        before_the_first_step = asyncio.create_task(driven.hold())
        await posted(driven.thread, 4)
        gate.set()
        gate = await before_the_first_step
        assert driven.metric("crossdock_requests_active", status="waiting", slo_class="urgent") == 2
        assert driven.metric("crossdock_requests_active", status="running") == 0
        assert driven.metric("crossdock_uncached_tokens_waiting", slo_class="urgent") == 130
        assert driven.metric("crossdock_uncached_tokens_waiting", slo_class="standard") == 50
        backlog = driven.metric("crossdock_backlog_seconds", slo_class="urgent")
        assert backlog > driven.metric("crossdock_backlog_seconds", slo_class="standard") > 0
        assert [one["state"] for one in driven.thread.timelines.live(None, driven.engine.clock())] == ["waiting"] * 3
        gate.set()
        await asyncio.gather(*added)
        assert driven.metric("crossdock_step_relative_error", quantile="0.9") >= driven.metric(
            "crossdock_step_relative_error", quantile="0.5"
        )
        assert driven.metric("crossdock_pages") == total


async def test_scrapes_while_the_engine_runs_are_answered() -> None:
    """They neither hold up the engine's thread nor wait for it."""
    async with driving() as driven:
        asking = [asyncio.create_task(driven.run(f"{number}", 20 + 9 * number, 8)) for number in range(12)]
        num_scrapes = 0
        while not all(task.done() for task in asking):
            assert driven.metric("crossdock_pages") >= 0
            for one in driven.thread.timelines.live(None, driven.engine.clock()):
                driven.timeline(one["request_id"])
            num_scrapes += 1
            await asyncio.sleep(0.002)  # a thread that never rests would keep the GIL from the engine
        await asyncio.gather(*asking)
        assert num_scrapes > 1
        assert driven.metric("crossdock_requests_total", finish_reason="length") == 12


async def test_metrics_of_an_engine_that_is_not_warm_show_no_cost() -> None:
    async with driving(is_warm=False) as driven:
        await driven.run("a", 40)
        assert "crossdock_step_cost_seconds" not in driven.thread.metrics.text()
        assert driven.metric("crossdock_backlog_seconds") == 0
        assert driven.metric("crossdock_step_seconds_count") > 0
        assert driven.metric("crossdock_step_predicted_seconds_count") == 0
        assert driven.timeline("a")["chunks"][0]["predicted_s"] == 0


async def test_cached_prefix_is_counted_once() -> None:
    async with driving() as driven:
        await driven.run("a", 100)
        driven.ended.clear()  # the same prompt again
        await driven.run("b", 100)
        assert driven.timeline("b")["num_cached_tokens"] == 96
        assert driven.metric("crossdock_cached_tokens_total") == 96
        assert driven.metric("crossdock_prompt_tokens_total") == 104


async def test_abort_after_seven_chunks_frees_all_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven chunks of 32 tokens of a prompt of 240, which had pages for all of driven."""
    async with driving() as driven:
        engine = driven.engine
        finish = Runner.finish
        is_aborted = asyncio.Event()
        loop = asyncio.get_running_loop()
        num_steps = 0

        async def abort() -> None:
            await driven.thread.abort([("a", 0)])
            is_aborted.set()

        def counted(runner: Runner, *args: Any) -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 7:  # the abort comes while the seventh chunk is computed, and is done before the eighth
                asyncio.run_coroutine_threadsafe(abort(), loop).result()
            return finish(runner, *args)

        monkeypatch.setattr(Runner, "finish", counted)
        layout = engine.model.layout(engine.config.page_size)
        await driven.submit("a", 240)
        await is_aborted.wait()
        await driven.thread.call(lambda: None)
        found = driven.timeline("a")
        assert [chunk["num_tokens"] for chunk in found["chunks"]] == [32] * 7
        assert (found["state"], found["finish_reason"], found["first_token_s"]) == ("finished", "abort", None)
        assert found["freed_bytes"] == 240 // 16 * layout.page_bytes
        assert driven.metric("crossdock_cancelled_kv_bytes_total") == 7 * 32 * layout.token_bytes
        assert driven.metric("crossdock_requests_total", finish_reason="abort") == 1
        assert engine.pages.counts().owned == 0


async def test_refused_request_is_counted_by_class_and_leaves_nothing() -> None:
    """The deadline of three equal prompts is twice what one takes alone: the third one cannot be in time."""
    async with driving(admission="reject", enable_prefix_caching=False) as driven:
        gate = await driven.hold()
        tasks = [asyncio.create_task(driven.run(name, 200, slo_class="urgent")) for name in "abc"]
        await posted(driven.thread, 3)
        gate.set()
        with pytest.raises(Overloaded, match="'urgent' promises") as refusal:
            await tasks[2]
        assert refusal.value.retry_after > 0
        await asyncio.gather(*tasks[:2])
        assert driven.metric("crossdock_requests_refused_total", slo_class="urgent") == 1
        assert driven.thread.timelines.find("c", None, 0.0) == []
        assert driven.metric("crossdock_requests_total") == 2


async def test_request_that_ends_is_logged_as_one_line_of_json(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "crossdock.requests")

    async with driving() as driven:
        await driven.run("done", 40)
        await driven.submit("left", 40, max_tokens=200)
        await driven.thread.abort([("left", 0), ("never came", 0)])
        await driven.thread.call(lambda: None)
        await driven.thread.call(lambda: None)
        lines = [json.loads(record.getMessage()) for record in caplog.records if record.name == "crossdock.requests"]
        assert [(line["request_id"], line["finish_reason"]) for line in lines] == [
            ("done", "length"),
            ("left", "abort"),
        ]
        assert lines[0] == {name: value for name, value in driven.timeline("done").items() if name != "chunks"}
        assert not {"prompt", "prompt_token_ids", "token_ids", "key_owner"} & lines[0].keys()


async def test_failed_step_ends_the_timelines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with driving() as driven:

        def fail(*_: object) -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(Runner, "finish", fail)
        await driven.run("a", 40)
        assert driven.timeline("a")["finish_reason"] == "error"
        assert driven.metric("crossdock_requests_total", finish_reason="error") == 1
        assert driven.thread.timelines.live(None, 0.0) == []


async def test_time_in_the_inbox_counts_as_time_waited() -> None:
    async with driving() as driven:
        gate = await driven.hold()
        asking = asyncio.create_task(driven.run("a", 10))
        await posted(driven.thread, 1)
        before = driven.engine.clock()
        await asyncio.sleep(0.05)
        waited = driven.engine.clock() - before
        gate.set()
        await asking
        assert driven.timeline("a")["queued_s"] >= waited
        assert driven.timeline("a")["chunks"][0]["waited_s"] >= waited


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
async def test_chunk_is_logged_at_debug_with_its_tokens_its_seconds_and_its_bound(
    caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level, "crossdock.chunks")
    async with driving() as driven:
        await driven.run("long", 100, max_tokens=3)
        chunks = driven.timeline("long")["chunks"]
    lines = [record.getMessage() for record in caplog.records if record.name == "crossdock.chunks"]
    lines = [line for line in lines if not line.startswith("warm-up")]
    if level == logging.INFO:
        assert not lines
        return
    pattern = r"long: tokens (\d+) to (\d+) of 100, ([\d.]+) ms alone, ([\d.]+) ms .* no longer because: (.*)"
    found = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert len(found) == len(lines) == len(chunks) == 4
    starts = [chunk["start"] for chunk in chunks]
    assert [(int(start), int(end)) for start, end, *_ in found] == list(pairwise([*starts, 100]))
    assert all(0 <= float(alone) <= float(step) for _, _, alone, step, _ in found)  # or below 0.005
    assert [why for *_, why in found] == [f"{chunk['limit']}, down to whole pages" for chunk in chunks[:-1]] + [
        "the prompt ends"
    ]
