"""The script that compares policies on a public trace: the search for the speed, and plays that are not repeated."""

from argparse import Namespace
from types import ModuleType

import pytest

from crossdock.cluster.bench.workloads import Job, Segment
from crossdock.cluster.simulate.fleet import load_fleet
from tests.benchmarks.scripts import script

public_trace = script("routing/public_trace")

SHIFTS = [0, 4]


def test_search_finds_the_highest_speed_that_keeps_the_goal_over_all_shifts_and_plays_each_once(
    public_trace: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plays = list[float]()

    def play(fleet: object, policy: str, jobs: list[Job]) -> dict[str, float]:
        """Keep all promises up to speed 3 in the first shift, half of the others' loss in the second."""
        seconds = jobs[-1].due or 0.0
        speed = 3.0 / seconds
        plays.append(speed)
        return {"good %": 100.0 if jobs[0].output_tokens == SHIFTS[0] or speed <= 3 else 80.0}

    monkeypatch.setattr(public_trace, "play", play)
    jobs = [Job((Segment(f"p{number}", 10),), number, due=float(number)) for number in range(8)]
    args = Namespace(requests=4, short_class="interactive", shifts=SHIFTS)
    comparison = public_trace.Comparison("small", load_fleet(None, "mixed=2xh100-8b", None), jobs, args)
    speed = comparison.highest_speed("seconds", 0.5)
    assert 3 / 1.05 <= speed <= 3
    assert len(plays) == len(set(plays)) * len(SHIFTS)
    tried = len(plays)
    assert comparison.row("seconds", speed, SHIFTS[1]) == {"good %": 100.0}
    assert len(plays) == tried
