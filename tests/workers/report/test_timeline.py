"""Timelines of a real scheduler on a simulated clock: they show what happened to each request."""

import json
import threading
from typing import Any

import pytest

from crossdock.kvtransfer.events import Figures
from crossdock.workers.report.timeline import KEEP_CHUNKS, Progress, Timeline, Timelines, prompt_length_bucket
from crossdock.workers.schedule.request.request import FinishReason, Request, TokenDelta
from crossdock.workers.schedule.request.slo import SloClass
from crossdock.workers.schedule.request.submission import Leg, SamplingParams, Submission
from tests.workers.schedule.model_free_replica import ModelFreeReplica, new_scheduler

CLASSES = (
    SloClass(name="urgent", ttft_s=2.0, tpot_s=1.0),
    SloClass(name="standard", ttft_s=10.0, tpot_s=2.0),
)
STEP = 1.0  # seconds
UNIX = 1_000_000.0  # when the clock read 0


class TimedReplica:
    """A replica whose every step takes a second, and its timelines."""

    def __init__(self, keep_finished: int = 100, num_pages: int = 200, **config: Any) -> None:
        settings = {"max_num_batched_tokens": 16, "slo_classes": CLASSES, "chunk_policy": "fixed"}
        scheduler = new_scheduler(num_pages, 700, **settings | {"short_lane_share": 0.0} | config)
        self.replica = ModelFreeReplica(scheduler, lambda work: STEP, lambda token_ids: 7, now=100.0)
        self.scheduler = scheduler
        self.timelines = Timelines(CLASSES, UNIX, keep_finished)
        self.finished: list[Timeline] = []

    def add(self, name: str, num_tokens: int, max_tokens: int = 3, alone: float = 0.0, **fields: Any) -> None:
        """Queue a request. Prompts of requests that are here at the same time share no prefix."""
        tokens = [len(self.scheduler.table.requests()) * 1000 + 1000 + i for i in range(num_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens)
        self.submit(Submission(name, tokens, sampling, request_id=fields.pop("request_id", name), **fields), alone)

    def submit(self, submission: Submission, alone: float = 0.0) -> Request:
        request = Request(submission, self.replica.now)
        self.scheduler.add(request)
        self.timelines.add(submission, request, self.replica.now, alone)
        return request

    def step(self) -> Progress:
        step = self.replica.step()
        progress = self.timelines.stepped(step.batch, step.deltas, step.started, STEP, predicted=0.75)
        self.finished += progress.finished
        return progress

    def run(self) -> None:
        while self.scheduler.table.has_work:
            self.step()

    def find(self, name: str) -> dict[str, Any]:
        [found] = self.timelines.find(name, None, self.replica.now)
        return found

    def live(self, owner: str | None = None) -> list[dict[str, Any]]:
        return self.timelines.live(owner, self.replica.now)


def test_transfer_whose_last_message_comes_after_the_last_token_is_in_the_timeline() -> None:
    timed = TimedReplica()
    timed.add("a", 40)
    timed.run()
    timed.timelines.transferred("a", "embeddings", Figures(), "arrived", timed.replica.now + 1)
    (transfer,) = timed.find("a")["transfers"]
    assert (transfer["outcome"], transfer["ended_s"]) == ("arrived", 6.0)
    timed.timelines.transferred("unknown", "embeddings", Figures(), "arrived", timed.replica.now)


def test_timeline_of_a_request_alone_is_complete() -> None:
    timed = TimedReplica()
    timed.add("a", 40, max_tokens=3)
    timed.run()
    found = timed.find("a")
    assert [(chunk["start"], chunk["num_tokens"]) for chunk in found["chunks"]] == [(0, 16), (16, 16), (32, 8)]
    assert found["chunks"][1] == {
        "started_s": 1.0,
        "waited_s": 0.0,
        "start": 16,
        "num_tokens": 16,
        "step_s": 1.0,
        "predicted_s": 0.75,
        "num_decodes": 0,
        "reason": "24 tokens of its prompt left, less ageing",
        "limit": "token budget",
    }
    del found["chunks"]
    assert found == {
        "id": "a",
        "request_id": "a",
        "slo_class": "standard",
        "adapter": None,
        "weight_versions": [],
        "leg": "local",
        "epoch": 0,
        "state": "finished",
        "arrived": UNIX + 100,
        "num_prompt_tokens": 40,
        "num_cached_tokens": 0,
        "num_computed_tokens": 42,
        "num_output_tokens": 3,
        "model_start_s": 0.0,
        "queued_s": 0.0,
        "waiting_s": None,
        "num_chunks": 3,
        "num_preemptions": 0,
        "num_drafted_tokens": 0,
        "num_accepted_tokens": 0,
        "predicted_first_token_s": None,
        "first_token_s": 3.0,
        "alternatives_s": {},
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
        "charged_s": 0.0,
        "transfers": [],
    }
    json.dumps(found)


def test_state_and_waiting_time_of_live_requests_are_current() -> None:
    timed = TimedReplica(max_num_seqs=1)
    timed.add("first", 30, max_tokens=2)
    timed.add("second", 30)

    def states() -> list[tuple[str, str, int, float]]:
        shown = timed.live()
        return [(each["id"], each["state"], each["num_computed_tokens"], each["waiting_s"]) for each in shown]

    assert states() == [("first", "waiting", 0, 0.0), ("second", "waiting", 0, 0.0)]
    timed.step()
    assert states() == [("first", "prefilling", 16, 0.0), ("second", "waiting", 0, 1.0)]
    timed.step()
    assert states() == [("first", "decoding", 30, 0.0), ("second", "waiting", 0, 2.0)]
    timed.replica.now += 0.5  # between two steps
    assert states()[0][3] == 0.5
    timed.step()
    assert states() == [("second", "waiting", 0, 3.5)]
    timed.step()
    assert timed.find("second")["queued_s"] == 3.5
    assert timed.find("second")["chunks"][0]["waited_s"] == 3.5


def test_gap_with_a_chunk_step_between_tokens_counts_as_shared() -> None:
    """If steps with chunks and steps with decodes alternate, no step has both, but the stream waits for the chunk."""
    timed = TimedReplica(mixed_chunks=False)
    timed.add("stream", 4, max_tokens=5)
    timed.step()
    timed.add("prompt", 16, max_tokens=1)
    timed.run()
    stream = timed.find("stream")
    assert (stream["num_shared_decode_steps"], stream["gap_max_s"], stream["gap_p50_s"]) == (1, 2.0, 1.0)
    assert [chunk["num_decodes"] for chunk in timed.find("prompt")["chunks"]] == [0]


def test_time_per_token_is_the_mean_of_all_gaps() -> None:
    timed = TimedReplica(mixed_chunks=False)
    timed.add("stream", 4, max_tokens=4)
    timed.step()
    timed.add("prompt", 10, max_tokens=1)
    finished = [timeline for _ in range(4) for timeline in timed.step().finished]
    assert [timeline.id for timeline in finished] == ["prompt", "stream"]
    assert finished[1].num_shared_gaps == 1
    assert finished[1].tpot == pytest.approx(4 / 3)
    assert finished[0].tpot is None
    assert finished[0].tpot_met() is None


def test_timeline_counts_cached_tokens_and_preemptions() -> None:
    timed = TimedReplica(num_pages=175, max_num_batched_tokens=700)
    timed.add("low", 650, max_tokens=40)
    timed.step()
    timed.add("high", 300, max_tokens=2, slo_class="urgent")
    timed.run()
    low = timed.find("low")
    assert low["num_preemptions"] == 1
    assert low["num_chunks"] == 2
    assert low["chunks"][1]["reason"] == "preempted before"
    assert low["num_output_tokens"] == 40
    request = timed.submit(Submission("again", [1000 + i for i in range(300)], request_id="x"))
    timed.run()
    assert timed.find("x")["num_cached_tokens"] == request.num_cached_tokens > 0
    assert timed.find("x")["chunks"][0]["start"] == request.num_cached_tokens


def test_timeline_shows_whether_promises_were_met() -> None:
    timed = TimedReplica(max_num_seqs=1)
    timed.add("in time", 4, max_tokens=2, slo_class="urgent")
    timed.add("late", 4, max_tokens=2, slo_class="urgent")
    timed.add("late, but long", 4, max_tokens=2, slo_class="urgent", alone=3.0)  # may take twice that
    timed.add("open", 4, max_tokens=2)
    for _ in range(6):
        timed.step()
    met = {name: timed.find(name)["ttft_met"] for name in ("in time", "late", "late, but long", "open")}
    assert met == {"in time": True, "late": False, "late, but long": True, "open": None}
    timed.replica.now += 10
    assert timed.find("open")["ttft_met"] is False  # late already
    assert timed.find("in time")["tpot_met"] is True


def test_http_request_with_several_prompts_has_several_timelines() -> None:
    timed = TimedReplica()
    timed.add("a-1", 4, request_id="a")
    timed.run()
    timed.add("a-2", 4, request_id="a")
    timed.add("b-1", 4, request_id="b")
    assert [found["id"] for found in timed.timelines.find("a", None, timed.replica.now)] == ["a-1", "a-2"]
    assert timed.timelines.find("a-1", None, timed.replica.now) == []
    assert timed.timelines.find("c", None, timed.replica.now) == []


def test_owner_sees_only_its_own_timelines() -> None:
    timed = TimedReplica()
    timed.add("a-1", 4, request_id="a", key_owner="one")
    timed.add("a-2", 4, request_id="a", key_owner="two")
    assert [found["id"] for found in timed.timelines.find("a", "two", timed.replica.now)] == ["a-2"]
    assert [found["id"] for found in timed.live("one")] == ["a-1"]
    assert len(timed.live()) == 2
    assert timed.live("three") == []


def test_receive_leg_has_gaps_and_no_first_token() -> None:
    """The first token is made, and reported, by the replica that computed the prompt."""
    timed = TimedReplica()
    timed.add("a", 8, max_tokens=4, leg=Leg.RECEIVE)
    assert timed.find("a")["state"] == "waiting"
    timed.replica.now += 20  # later than its class promises; the other replica reports that
    timed.scheduler.handoff.offer("a")
    [granted] = timed.scheduler.handoff.grant(timed.replica.now)
    assert granted.id == "a"
    assert (timed.find("a")["state"], timed.find("a")["ttft_met"]) == ("receiving", None)
    timed.scheduler.handoff.start_decoding("a", 7, timed.replica.now)
    assert timed.find("a")["state"] == "decoding"
    timed.run()
    found = timed.find("a")
    assert (found["leg"], found["first_token_s"], found["ttft_met"]) == ("receive", None, None)
    assert (found["num_output_tokens"], found["num_decode_steps"], found["num_chunks"]) == (4, 2, 0)
    assert (found["tpot_s"], found["tpot_met"]) == (1.0, True)


def test_send_leg_has_the_first_token() -> None:
    timed = TimedReplica()
    timed.add("a", 20, max_tokens=4, leg=Leg.SEND)
    timed.step()
    assert timed.find("a")["state"] == "prefilling"
    timed.step()
    assert (timed.find("a")["state"], timed.find("a")["first_token_s"]) == ("sending", 2.0)
    timed.scheduler.handoff.finish_sent("a")
    timed.timelines.ended([TokenDelta("a", [], finish_reason=FinishReason.SHIPPED)], timed.replica.now)
    found = timed.find("a")
    assert (found["leg"], found["finish_reason"]) == ("send", "shipped")
    assert (found["ttft_met"], found["tpot_met"]) == (True, None)


def test_request_continued_after_a_loss_has_no_first_token() -> None:
    timed = TimedReplica()
    timed.add("a", 20, max_tokens=6, output_token_ids=(7, 7), epoch=1)
    timed.run()
    found = timed.find("a")
    assert (found["epoch"], found["first_token_s"], found["ttft_met"]) == (1, None, None)
    assert (found["num_output_tokens"], found["num_decode_steps"]) == (6, 3)


def test_memory_of_timelines_is_bounded() -> None:
    timed = TimedReplica(keep_finished=3, max_prefill_tokens=4)
    for number in range(5):
        timed.add(f"{number}", 4)
    timed.add("long", 4 * (KEEP_CHUNKS + 10), max_tokens=1)
    timed.run()
    found = timed.find("long")
    assert found["num_chunks"] == KEEP_CHUNKS + 10
    assert len(found["chunks"]) == KEEP_CHUNKS
    last = found["chunks"][-1]
    assert last["start"] + last["num_tokens"] == found["num_prompt_tokens"]  # the newest are shown
    names = [*map(str, range(5)), "long"]
    assert sum(len(timed.timelines.find(name, None, timed.replica.now)) for name in names) == 3
    assert timed.live() == []
    assert all(timeline.request is None and not timeline.gaps for timeline in timed.finished)


def test_timelines_can_be_read_while_the_engine_writes() -> None:
    timed = TimedReplica(keep_finished=5)
    errors: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                for request in timed.live():
                    found = timed.timelines.find(request["id"], None, timed.replica.now)
                    assert found or timed.finished, "a request is live or finished, until it is dropped"
                    json.dumps(request)
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(400):
        timed.add(f"{number}", 5 + number % 40, max_tokens=1 + number % 7)
        timed.step()
    timed.run()
    done.set()
    reader.join()
    assert errors == []


def test_prompt_length_bucket_is_the_upper_end() -> None:
    buckets = [prompt_length_bucket(num_tokens) for num_tokens in (1, 128, 129, 8192, 32769)]
    assert buckets == ["128", "128", "512", "8192", "inf"]
