"""Recent steps are complete, in order, and show no request's name to another owner."""

from typing import Any

import pytest

from crossdock.workers.report import recent_steps
from crossdock.workers.report.recent_steps import RecentSteps
from tests.workers.report.test_timeline import STEP, UNIX, TimedReplica


class WatchedReplica(TimedReplica):
    """A replica with timelines whose steps are recorded."""

    def __init__(self, keep: int = 100, **config: Any) -> None:
        super().__init__(**config)
        self.recent = RecentSteps(UNIX, "first", keep)

    def run_steps(self, count: int = 1) -> None:
        for _ in range(count):
            started = self.replica.now
            progress = self.step()
            self.recent.record(self.replica.batches[-1], progress.chunks, started, STEP, 0.9)

    def after(self, number: int = 0, owner: str | None = None) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = self.recent.after({self.recent.incarnation: number}, owner)["steps"]
        return steps


def test_steps_of_a_long_prompt_beside_a_stream_are_recorded() -> None:
    watched = WatchedReplica()
    watched.add("stream", 4, max_tokens=50)
    watched.run_steps()
    watched.add("long", 40)
    watched.run_steps(4)
    steps = watched.after()
    assert [step["number"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step["num_decodes"] for step in steps] == [0, 1, 1, 1, 1]
    assert [step["started"] for step in steps] == [UNIX + 100 + number for number in range(5)]
    assert {(step["seconds"], step["predicted_s"]) for step in steps} == {(1.0, 0.9)}
    slices = [(chunk["prompt"], chunk["start"], chunk["num_tokens"]) for step in steps for chunk in step["chunks"]]
    assert slices == [(1, 0, 4), (2, 0, 12), (2, 12, 12), (2, 24, 12), (2, 36, 4)]
    assert {chunk["num_prompt_tokens"] for step in steps[1:] for chunk in step["chunks"]} == {40}


def test_reader_gets_the_steps_after_the_last_it_has_seen() -> None:
    watched = WatchedReplica()
    watched.add("stream", 4, max_tokens=50)
    watched.run_steps(5)
    assert [step["number"] for step in watched.after(3)] == [4, 5]
    assert watched.after(5) == []
    assert watched.recent.after({watched.recent.incarnation: 5}, None)["last_step"] == 5
    complete = watched.recent.after({"another incarnation": 99}, None)
    assert (len(complete["steps"]), complete["last_step"]) == (5, 5)


def test_answer_has_a_bounded_number_of_steps_and_the_reader_pages_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_steps, "SHOWN", 4)
    watched = WatchedReplica()
    watched.add("stream", 4, max_tokens=50)
    watched.run_steps(10)
    assert [step["number"] for step in watched.after()] == [7, 8, 9, 10], "a new reader gets the newest"
    seen = watched.recent.after({watched.recent.incarnation: 2}, None)
    assert ([step["number"] for step in seen["steps"]], seen["last_step"]) == ([3, 4, 5, 6], 6)
    assert [step["number"] for step in watched.after(6)] == [7, 8, 9, 10]


def test_old_steps_are_dropped() -> None:
    watched = WatchedReplica(keep=3)
    watched.add("stream", 4, max_tokens=50)
    watched.run_steps(9)
    assert [step["number"] for step in watched.after()] == [7, 8, 9]


def test_chunks_are_shown_to_their_owner_only() -> None:
    """And the figures of the step, which count the work of all, to one who may see all."""
    watched = WatchedReplica()
    watched.add("mine", 4, key_owner="a", request_id="secret")
    watched.run_steps()
    watched.add("other", 4, key_owner="b")
    watched.run_steps()
    assert [chunk["request_id"] for step in watched.after() for chunk in step["chunks"]] == ["secret", "other"]
    (step,) = watched.after(0, "a")
    assert [chunk["request_id"] for chunk in step["chunks"]] == ["secret"]
    assert {step[name] for name in ("num_decodes", "num_skipped", "predicted_s", "limit")} == {None}
    assert watched.after(0, "c") == []
    for name in "ab":
        watched.add(f"beside {name}", 4, key_owner=name)
    watched.run_steps()
    assert [len(watched.after(0, owner)[-1]["chunks"]) for owner in (None, "a", "b")] == [2, 1, 1], "in one step"


def test_owner_gets_the_steps_after_the_last_it_has_seen() -> None:
    watched = WatchedReplica()
    watched.add("long", 40, key_owner="a")
    watched.run_steps(5)
    seen: dict[str, int] = {}
    first = watched.recent.after(seen, "a")
    assert [step["number"] for step in first["steps"]] == [100_000_000, 101_000_000, 102_000_000], "not counted"
    middle = {first["incarnation"]: first["steps"][0]["number"]}
    assert watched.recent.after(middle, "a")["steps"] == first["steps"][1:]
    assert watched.recent.after({first["incarnation"]: first["last_step"]}, "a")["steps"] == []
    assert watched.recent.after(middle, "b")["incarnation"] != first["incarnation"]
