"""The count of the plain path: what runs for plain requests, and nothing else."""

from tests.checks import load_check

plain_path = load_check("plain_path")


def test_plain_path_of_the_scheduler_has_what_runs_for_plain_requests() -> None:
    files = plain_path.lines_passed(plain_path.scheduler_path())
    assert {"Scheduler.add", "Scheduler.schedule", "Scheduler.update"} <= files["workers/schedule/scheduler.py"].keys()
    assert "Scheduler.abort" not in files["workers/schedule/scheduler.py"]
    assert not [file for file in files if "/drafts/" in file]


def test_plain_path_of_a_routing_decision_has_the_choice_and_counts_no_line_twice() -> None:
    files = plain_path.lines_passed(plain_path.routing_path())
    assert {"Fleet.choose", "Fleet.book"} <= files["router/fleet.py"].keys()
    for file, lines in files.items():
        assert 0 < sum(lines.values()) <= len((plain_path.ROOT / file).read_text().splitlines())
