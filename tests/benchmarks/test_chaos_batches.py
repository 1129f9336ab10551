"""The batches of the chaos benchmark: every line has one right record, and what else is found is a problem."""

import copy
import json
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from crossdock.cluster.config_file import load
from crossdock.cluster.serve.app import REPLICA
from crossdock.workers.replica.serving.replica import Replica
from tests.benchmarks.scripts import script

batches = script("chaos/batches")
faulty = script("chaos/faulty")


def answered(name: str, tokens: list[int]) -> dict[str, Any]:
    return {"custom_id": name, "response": {"status_code": 200, "body": {"choices": [{"token_ids": tokens}]}}}


def failed(name: str, status: int, code: str) -> dict[str, Any]:
    return {"custom_id": name, "response": {"status_code": status, "body": {"error": {"code": code}}}}


def not_run(name: str) -> dict[str, Any]:
    return {"custom_id": name, "response": None, "error": {"code": "batch_cancelled"}}


def judged(batches: ModuleType, change: Callable[[dict[str, Any]], None], **habits: bool) -> Any:
    """Return the outcomes and problems of a batch of two lines, whose records a test has changed."""
    is_cancelled = habits.pop("is_cancelled", False)
    cases = {name: batches.Case(f"case {name}", {"prompt": [5]}, [1, int(name)]) for name in ("0", "1")}
    found: dict[str, Any] = {
        "batch": {"status": "completed", "request_counts": {"total": 2, "completed": 2, "failed": 0}},
        "output": [answered("1", [1, 1]), answered("0", [1, 0])],
        "errors": [],
    }
    change(found)
    found["batch"]["request_counts"]["completed"] = found.pop("counted", len(found["output"]))
    habit = batches.Habits(**habits)
    return batches.judge(cases, found["batch"], found["output"], found["errors"], habit, is_cancelled=is_cancelled)


def test_batch_with_one_right_record_for_each_line_has_no_problem(batches: ModuleType) -> None:
    told = judged(batches, lambda found: None)
    assert told.problems == []
    assert told.outcomes == {"batch completed": 1, "line of a batch, complete": 2}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda found: found["output"].pop(), "line 0 has not one record"),
        (lambda found: found["output"].append(copy.copy(found["output"][0])), "line 1 has not one record"),
        (lambda found: found["output"].append(answered("7", [1])), "a record for no line: 7"),
        (lambda found: found["output"].__setitem__(0, answered("1", [1, 2])), "wrong answer [1, 2], not [1, 1]"),
        (lambda found: found["batch"].update(status="failed"), "ended as failed"),
        (lambda found: found["batch"].update(status="cancelled"), "ended as cancelled"),
        (lambda found: found.update(counted=1), "it counts"),
        (lambda found: found.update(output=[], errors=[failed("0", 500, "x"), not_run("1")]), "line 0 failed"),
        (lambda found: found.update(output=[], errors=[failed("0", 404, "x"), not_run("1")]), "line 1 failed"),
    ],
)
def test_batch_with_a_record_that_no_fault_excuses_is_a_problem(
    batches: ModuleType, change: Callable[[dict[str, Any]], None], complaint: str
) -> None:
    assert any(complaint in problem for problem in judged(batches, change).problems)


@pytest.mark.parametrize(
    ("errors", "habits"),
    [
        ([failed("0", 404, "model_not_found"), failed("1", 404, "model_not_found")], {"may_unload": True}),
        ([failed("0", 500, "suspect_request"), failed("1", 500, "suspect_request")], {"may_suspect": True}),
        ([not_run("0"), not_run("1")], {"is_cancelled": True}),
    ],
)
def test_error_of_a_line_that_a_fault_excuses_is_counted(
    batches: ModuleType, errors: list[Any], habits: dict[str, bool]
) -> None:
    told = judged(batches, lambda found: found.update(output=[], errors=errors), **habits)
    assert told.problems == []
    assert sum(told.outcomes.values()) == 3


def test_line_asks_for_its_case(batches: ModuleType) -> None:
    case = batches.Case("a case", {"prompt": [5, 6], "model": "adapter-1"}, [1])
    found = json.loads(batches.line("3", case, random.Random(0)))
    assert (found["custom_id"], found["method"], found["url"]) == ("3", "POST", "/v1/completions")
    assert (found["body"]["prompt"], found["body"]["model"]) == ([5, 6], "adapter-1")


@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_application_of_the_benchmark_has_faulty_replicas_where_faults_are_asked_for(
    faulty: ModuleType, monkeypatch: pytest.MonkeyPatch, lost: float
) -> None:
    monkeypatch.setenv(faulty.VARIABLE, json.dumps({"lost": lost}))
    bound = faulty.build(load(None))
    engines = bound._bound_deployment.init_args[1]
    found = engines["mixed"]._bound_deployment.func_or_class
    assert (found == REPLICA) if not lost else (issubclass(found, Replica) and found is not Replica)
