"""Timelines over a real scheduler, on a clock of the test: what is told of a request is what happened to it."""

import json
import threading
from typing import Any

import pytest

from crossdock.workers.report.timeline import KEEP_CHUNKS, Progress, Timelines, prompt_length_bucket
from crossdock.workers.schedule.batch import SampledToken
from crossdock.workers.schedule.config import SchedulerConfig
from crossdock.workers.schedule.pages import PagePool
from crossdock.workers.schedule.request import FinishReason, Leg, Request, SamplingParams, Submission, TokenDelta
from crossdock.workers.schedule.scheduler import Scheduler
from crossdock.workers.schedule.slo import SloClass

CLASSES = (
    SloClass(name="urgent", ttft_s=2.0, tpot_s=1.0),
    SloClass(name="standard", ttft_s=10.0, tpot_s=2.0),
)
STEP = 1.0  # seconds
UNIX = 1_000_000.0  # when the clock read 0


class Story:
    """A scheduler whose every step takes a second, and the timelines that hear of it."""

    def __init__(self, keep_finished: int = 100, num_pages: int = 200, **config: Any) -> None:
        settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "page_size": 4, "slo_classes": CLASSES}
        scheduling = SchedulerConfig(**settings | {"chunk_policy": "fixed", "short_lane_share": 0.0} | config)
        self.scheduler = Scheduler(scheduling, PagePool(num_pages, 4), max_model_len=700)
        self.timelines = Timelines(CLASSES, UNIX, keep_finished)
        self.now = 100.0

    def add(self, name: str, num_tokens: int, max_tokens: int = 3, alone: float = 0.0, **fields: Any) -> None:
        """Prompts are all different: nothing is found in the cache."""
        tokens = [len(self.scheduler._requests) * 1000 + 1000 + i for i in range(num_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens)
        submission = Submission(name, tokens, sampling, request_id=fields.pop("request_id", name), **fields)
        request = Request.from_submission(submission, self.now)
        self.scheduler.add(request)
        self.timelines.add(submission, request, self.now, alone)

    def step(self) -> Progress:
        started, self.now = self.now, self.now + STEP
        batch = self.scheduler.schedule(started)
        sampled = {part.request.id: SampledToken(7) for part in batch.scheduled if part.samples}
        deltas = self.scheduler.update(batch, sampled, self.now)
        self.batch = batch
        return self.timelines.stepped(batch, deltas, started, STEP, predicted=0.75)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def of(self, name: str) -> dict[str, Any]:
        [found] = self.timelines.find(name, None, self.now)
        return found


def test_a_request_alone() -> None:
    it = Story()
    it.add("a", 40, max_tokens=3)
    it.run()
    found = it.of("a")
    assert [(chunk["start"], chunk["num_tokens"]) for chunk in found["chunks"]] == [(0, 16), (16, 16), (32, 8)]
    assert found["chunks"][1] == {
        "started_s": 1.0,
        "waited_s": 0.0,
        "start": 16,
        "num_tokens": 16,
        "step_s": 1.0,
        "predicted_s": 0.75,
        "num_decodes": 0,
        "reason": "response ratio 1.67",
        "limit": "token budget",
    }
    del found["chunks"]
    assert found == {
        "id": "a",
        "request_id": "a",
        "slo_class": "standard",
        "leg": "local",
        "epoch": 0,
        "state": "finished",
        "arrived": UNIX + 100,
        "num_prompt_tokens": 40,
        "num_cached_tokens": 0,
        "num_computed_tokens": 42,
        "num_output_tokens": 3,
        "queued_s": 0.0,
        "waiting_s": None,
        "num_chunks": 3,
        "num_preemptions": 0,
        "predicted_first_token_s": None,
        "first_token_s": 3.0,
        "num_decode_steps": 2,
        "num_shared_decode_steps": 0,
        "tpot_s": 1.0,
        "gap_p50_s": 1.0,
        "gap_max_s": 1.0,
        "ttft_met": True,
        "tpot_met": True,
        "finish_reason": "length",
        "ended_s": 5.0,
        "freed_bytes": None,
        "transfers": [],
    }
    json.dumps(found)


def test_states_and_waiting_while_it_lives() -> None:
    it = Story(max_num_seqs=1)
    it.add("first", 30, max_tokens=2)
    it.add("second", 4)

    def states() -> list[tuple[str, str, int, float]]:
        live = it.timelines.live(None, it.now)
        return [(one["id"], one["state"], one["num_computed_tokens"], one["waiting_s"]) for one in live]

    assert states() == [("first", "waiting", 0, 0.0), ("second", "waiting", 0, 0.0)]
    it.step()
    assert states() == [("first", "prefilling", 16, 0.0), ("second", "waiting", 0, 1.0)]
    it.step()
    assert states() == [("first", "decoding", 30, 0.0), ("second", "waiting", 0, 2.0)]
    it.now += 0.5  # between two steps
    assert states()[0][3] == 0.5
    it.step()
    assert states() == [("second", "waiting", 0, 3.5)]
    it.step()
    assert it.of("second")["queued_s"] == 3.5
    assert it.of("second")["chunks"][0]["waited_s"] == 3.5


def test_a_chunk_is_shared_with_decodes_and_the_gap_says_so() -> None:
    it = Story()
    it.add("stream", 4, max_tokens=6)
    it.step()
    it.step()
    it.add("prompt", 25, max_tokens=1)
    it.run()
    chunks = it.of("prompt")["chunks"]
    assert [(chunk["num_tokens"], chunk["num_decodes"]) for chunk in chunks] == [(12, 1), (13, 1)]
    stream = it.of("stream")
    assert (stream["num_decode_steps"], stream["num_shared_decode_steps"]) == (5, 2)


def test_a_chunk_step_between_two_tokens_is_shared_too() -> None:
    """Where steps with chunks and steps with decodes alternate, no step has both, and the stream waits all the same."""
    it = Story(mixed_chunks=False)
    it.add("stream", 4, max_tokens=5)
    it.step()
    it.add("prompt", 16, max_tokens=1)
    it.run()
    stream = it.of("stream")
    assert (stream["num_shared_decode_steps"], stream["gap_max_s"], stream["gap_p50_s"]) == (1, 2.0, 1.0)
    assert [chunk["num_decodes"] for chunk in it.of("prompt")["chunks"]] == [0]


def test_time_per_token_is_told_apart_by_sharing() -> None:
    it = Story(mixed_chunks=False)
    it.add("stream", 4, max_tokens=4)
    it.step()
    it.add("prompt", 10, max_tokens=1)
    finished = [timeline for _ in range(4) for timeline in it.step().finished]
    assert [timeline.id for timeline in finished] == ["prompt", "stream"]
    assert finished[1].tpot_by_sharing() == {True: 2.0, False: 1.0}
    assert finished[1].tpot == pytest.approx(4 / 3)
    assert finished[0].tpot_by_sharing() == {}
    assert finished[0].tpot is None
    assert finished[0].tpot_met() is None


def test_what_was_cached_and_what_was_preempted() -> None:
    it = Story(num_pages=175, max_num_batched_tokens=700)
    it.add("low", 650, max_tokens=40)
    it.step()
    it.add("high", 300, max_tokens=2, slo_class="urgent")
    it.run()
    low = it.of("low")
    assert low["num_preemptions"] == 1
    assert low["num_chunks"] == 2
    assert low["chunks"][1]["reason"] == "preempted before"
    assert low["num_output_tokens"] == 40
    again = Submission("again", [1000 + i for i in range(300)], request_id="x")
    request = Request.from_submission(again, it.now)
    it.scheduler.add(request)
    it.timelines.add(again, request, it.now, 0.0)
    it.run()
    assert it.of("x")["num_cached_tokens"] == request.num_cached_tokens > 0
    assert it.of("x")["chunks"][0]["start"] == request.num_cached_tokens


@pytest.mark.parametrize("num_steps", [0, 1, 3, 4])  # waiting, prefilling twice, decoding
def test_an_abort_says_what_it_freed(num_steps: int) -> None:
    it = Story()
    it.add("a", 40, max_tokens=50)
    for _ in range(num_steps):
        it.step()
    assert it.scheduler.abort("a") is not None
    timeline = it.timelines.aborted("a", it.now, freed_bytes=num_steps * 100)
    assert timeline.finish_reason is FinishReason.ABORT
    found = it.of("a")
    assert (found["state"], found["finish_reason"]) == ("finished", "abort")
    assert found["freed_bytes"] == num_steps * 100
    assert found["num_computed_tokens"] == min(16 * num_steps, 40) + max(num_steps - 3, 0)
    assert found["ended_s"] == num_steps
    assert it.timelines.live(None, it.now) == []


def test_a_step_that_raised_ends_them_all() -> None:
    it = Story()
    it.add("a", 4)
    it.add("b", 40)
    it.step()
    deltas = [TokenDelta(name, [], finish_reason=FinishReason.ERROR, error="broken") for name in ("a", "b")]
    progress = it.timelines.ended(deltas, it.now)
    assert [timeline.id for timeline in progress.finished] == ["a", "b"]
    assert it.of("a")["finish_reason"] == it.of("b")["finish_reason"] == "error"


def test_promises_kept_and_broken() -> None:
    it = Story(max_num_seqs=1)
    it.add("in time", 4, max_tokens=2, slo_class="urgent")
    it.add("late", 4, max_tokens=2, slo_class="urgent")
    it.add("late, but long", 4, max_tokens=2, slo_class="urgent", alone=3.0)  # has twice that
    it.add("open", 4, max_tokens=2)
    for _ in range(6):
        it.step()
    kept = {name: it.of(name)["ttft_met"] for name in ("in time", "late", "late, but long", "open")}
    assert kept == {"in time": True, "late": False, "late, but long": True, "open": None}
    it.now += 10
    assert it.of("open")["ttft_met"] is False  # it will be, whatever comes
    assert it.of("in time")["tpot_met"] is True


def test_one_http_request_may_have_led_to_several() -> None:
    it = Story()
    it.add("a-1", 4, request_id="a")
    it.run()
    it.add("a-2", 4, request_id="a")
    it.add("b-1", 4, request_id="b")
    assert [found["id"] for found in it.timelines.find("a", None, it.now)] == ["a-1", "a-2"]
    assert it.timelines.find("a-1", None, it.now) == []
    assert it.timelines.find("c", None, it.now) == []


def test_a_tenant_sees_its_own() -> None:
    it = Story()
    it.add("a-1", 4, request_id="a", tenant="one")
    it.add("a-2", 4, request_id="a", tenant="two")
    assert [found["id"] for found in it.timelines.find("a", "two", it.now)] == ["a-2"]
    assert [found["id"] for found in it.timelines.live("one", it.now)] == ["a-1"]
    assert len(it.timelines.live(None, it.now)) == 2
    assert it.timelines.live("three", it.now) == []


def test_a_leg_that_receives_has_gaps_and_no_first_token() -> None:
    """The first token was made, and is told, where the prompt was."""
    it = Story()
    it.add("a", 8, max_tokens=4, leg=Leg.RECEIVE)
    assert it.of("a")["state"] == "waiting"
    it.now += 20  # later than its class promises: that is not this replica's to say
    [granted] = it.scheduler.grant(it.now)
    assert granted.id == "a"
    assert (it.of("a")["state"], it.of("a")["ttft_met"]) == ("receiving", None)
    it.scheduler.arrive("a", 7, it.now)
    assert it.of("a")["state"] == "decoding"
    it.run()
    found = it.of("a")
    assert (found["leg"], found["first_token_s"], found["ttft_met"]) == ("receive", None, None)
    assert (found["num_output_tokens"], found["num_decode_steps"], found["num_chunks"]) == (4, 2, 0)
    assert (found["tpot_s"], found["tpot_met"]) == (1.0, True)


def test_a_leg_that_sends_has_the_first_token() -> None:
    it = Story()
    it.add("a", 20, max_tokens=4, leg=Leg.SEND)
    it.step()
    assert it.of("a")["state"] == "prefilling"
    it.step()
    assert (it.of("a")["state"], it.of("a")["first_token_s"]) == ("sending", 2.0)
    it.scheduler.shipped("a")
    it.timelines.ended([TokenDelta("a", [], finish_reason=FinishReason.SHIPPED)], it.now)
    found = it.of("a")
    assert (found["leg"], found["finish_reason"], found["ttft_met"], found["tpot_met"]) == (
        "send",
        "shipped",
        True,
        None,
    )


def test_a_request_that_goes_on_here_has_had_its_first_token() -> None:
    it = Story()
    it.add("a", 20, max_tokens=6, output_token_ids=(7, 7), epoch=1)
    it.run()
    found = it.of("a")
    assert (found["epoch"], found["first_token_s"], found["ttft_met"]) == (1, None, None)
    assert (found["num_output_tokens"], found["num_decode_steps"]) == (6, 3)


def test_placements_of_one_request_are_told_apart() -> None:
    it = Story()
    for epoch in (0, 1):
        it.add("a", 4, epoch=epoch)
        it.run()
    assert [found["epoch"] for found in it.timelines.find("a", None, it.now)] == [0, 1]


def test_memory_is_bounded() -> None:
    it = Story(keep_finished=3, long_prefill_token_threshold=4)
    for number in range(5):
        it.add(f"{number}", 4)
    it.add("long", 4 * (KEEP_CHUNKS + 10), max_tokens=1)
    it.run()
    found = it.of("long")
    assert found["num_chunks"] == KEEP_CHUNKS + 10
    assert len(found["chunks"]) == KEEP_CHUNKS
    last = found["chunks"][-1]
    assert last["start"] + last["num_tokens"] == found["num_prompt_tokens"]  # the newest are kept
    assert len(it.timelines._finished) == 3
    assert it.timelines._live == {}
    assert all(timeline.request is None and not timeline.gaps for timeline in it.timelines._finished)


def test_reading_from_another_thread_while_it_is_written() -> None:
    it = Story(keep_finished=5)
    errors: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for request in it.timelines.live(None, it.now):
                    assert it.timelines.find(request["id"], None, it.now) or it.timelines._finished
                    json.dumps(request)
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(400):
        it.add(f"{number}", 5 + number % 40, max_tokens=1 + number % 7)
        it.step()
    it.run()
    done.set()
    reader.join()
    assert errors == []


def test_prompt_lengths_are_counted_in_buckets() -> None:
    buckets = [prompt_length_bucket(num_tokens) for num_tokens in (1, 128, 129, 8192, 32769)]
    assert buckets == ["128", "128", "512", "8192", "inf"]
