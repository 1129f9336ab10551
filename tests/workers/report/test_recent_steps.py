"""The recent steps are those that were made, in order, and show nobody's requests to others."""

from typing import Any

from crossdock.workers.report.recent_steps import RecentSteps
from tests.workers.report.test_timeline import STEP, UNIX, Story


class Watched(Story):
    def __init__(self, keep: int = 100, **config: Any) -> None:
        super().__init__(**config)
        self.recent = RecentSteps(UNIX, keep)

    def go(self, count: int = 1) -> None:
        for _ in range(count):
            started = self.now
            progress = self.step()
            self.recent.record(self.batch, progress.chunks, started, STEP, 0.9)

    def after(self, number: int = 0, tenant: str | None = None) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = self.recent.after({self.recent.incarnation: number}, tenant)["steps"]
        return steps


def test_a_long_prompt_beside_a_stream() -> None:
    it = Watched()
    it.add("stream", 4, max_tokens=50)
    it.go()
    it.add("long", 40)
    it.go(4)
    steps = it.after()
    assert [step["number"] for step in steps] == [1, 2, 3, 4, 5]
    assert [step["num_decodes"] for step in steps] == [0, 1, 1, 1, 1]
    assert [step["started"] for step in steps] == [UNIX + 100 + number for number in range(5)]
    assert {(step["seconds"], step["predicted_s"]) for step in steps} == {(1.0, 0.9)}
    slices = [(chunk["prompt"], chunk["start"], chunk["num_tokens"]) for step in steps for chunk in step["chunks"]]
    assert slices == [(1, 0, 4), (2, 0, 12), (2, 12, 12), (2, 24, 12), (2, 36, 4)]
    assert {chunk["num_prompt_tokens"] for step in steps[1:] for chunk in step["chunks"]} == {40}


def test_each_reader_gets_what_it_has_not_seen() -> None:
    it = Watched()
    it.add("stream", 4, max_tokens=50)
    it.go(5)
    assert [step["number"] for step in it.after(3)] == [4, 5]
    assert it.after(5) == []
    assert it.recent.after({it.recent.incarnation: 5}, None)["last_step"] == 5
    whole = it.recent.after({"another life": 99}, None)
    assert (len(whole["steps"]), whole["last_step"]) == (5, 5)
    assert RecentSteps(UNIX).incarnation != it.recent.incarnation


def test_old_steps_go() -> None:
    it = Watched(keep=3)
    it.add("stream", 4, max_tokens=50)
    it.go(9)
    assert [step["number"] for step in it.after()] == [7, 8, 9]


def test_names_are_shown_to_their_tenant() -> None:
    it = Watched()
    it.add("mine", 4, tenant="a", request_id="secret")
    it.go()
    for tenant, name in ((None, "secret"), ("a", "secret"), ("b", None)):
        (chunk,) = it.after(0, tenant)[0]["chunks"]
        assert chunk["request_id"] == name
        assert chunk["prompt"] == 1
