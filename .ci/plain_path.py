"""Print how many lines a reader of the plain path passes: of the scheduler, and of a routing decision.

Usage: python .ci/plain_path.py [--functions]. Runs plain requests: text alone, of one class, on mixed replicas without
a model. They have no tenants, adapters, tiers or drafts. It counts the functions of the pure rooms that run, each from
its first line to its last, and of their classes what is no function: docstring and fields. With --functions, it prints
each function with its lines.

The scheduler: one replica takes six prompts, computes them in chunks beside decodes, and ends them; each calls `add`,
`choose_streams`, `schedule` and `update`. The routing decision: `Fleet.choose` among four replicas that have reported
work and prefixes, and `book`.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("workers/schedule", "workers/report", "router")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Passed:
    """Holds the code of functions that have run, and the classes of objects that were made."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.classes: set[type] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs meanwhile in this thread."""
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        self.codes.add(frame.f_code)
        if frame.f_code.co_filename == "<string>":  # made by dataclasses
            made = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            self.classes.add(made if isinstance(made, type) else type(made))


def lines_passed(passed: Passed) -> dict[str, dict[str, int]]:
    """Return the lines of each function and class that was passed, by file."""
    firsts = defaultdict[str, set[int]](set)  # the first lines of functions, by file
    for code in passed.codes:
        firsts[code.co_filename].add(code.co_firstlineno)
    names = defaultdict[str, set[str]](set)  # of classes
    for each in passed.classes:
        names[getattr(sys.modules.get(each.__module__), "__file__", None) or ""].add(each.__name__)
    found: dict[str, dict[str, int]] = {}
    for file in firsts.keys() | names.keys():
        path = Path(file).resolve()
        if path.is_relative_to(ROOT) and str(path.relative_to(ROOT)).startswith(ROOMS):
            found[str(path.relative_to(ROOT))] = dict(_lines(ast.parse(path.read_text()), firsts[file], names[file]))
    return {name: found[name] for name in sorted(found) if found[name]}


def _lines(tree: ast.Module, firsts: set[int], names: set[str]) -> Iterator[tuple[str, int]]:
    for node in tree.body:
        if isinstance(node, Function) and _first(node) in firsts:
            yield node.name, _length(node)
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [each for each in node.body if isinstance(each, Function)]
        run = [each for each in methods if _first(each) in firsts]
        if run or node.name in names:
            yield node.name, _length(node) - sum(map(_length, methods))
        for each in run:
            yield f"{node.name}.{each.name}", _length(each)


def _first(node: Function) -> int:
    """Return the line at which the code of a function begins: that of its first decorator."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _length(node: Function | ast.ClassDef) -> int:
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return (node.end_lineno or node.lineno) - first + 1


def scheduler_path() -> Passed:
    """Run plain requests on one replica without a model."""
    from tests.router import replicas

    passed = Passed()
    replica = replicas.Replica(replicas.profile(admission="queue"))
    scheduler = replica.scheduler
    calls: dict[str, Callable[..., Any]] = {}

    def watched(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with passed.watching():
                return calls[name](*arguments, **options)

        return call

    for name in ("add", "choose_streams", "schedule", "update"):
        calls[name] = getattr(scheduler, name)
        setattr(scheduler, name, watched(name))
    for number in range(6):
        replica.add(f"request {number}", [*range(1500), number], max_tokens=20)
    while scheduler.table.has_work:
        replica.step()
    return passed


def routing_path() -> Passed:
    """Choose replicas for plain requests, among four that have work."""
    from crossdock.router.fleet import Fleet, RouterConfig
    from tests.router import replicas

    passed = Passed()
    fleet = Fleet(RouterConfig.model_validate({}))
    for name in "abcd":
        replica = replicas.Replica(replicas.profile(admission="queue"))
        fleet.join(name, replica.profile, 0.0)
        for number in range(4):
            replica.add(f"{name} {number}", list(range(100 * number, 100 * number + 1000)))
        for _ in range(4):
            replica.step()
        replica.report(fleet, name, 0.0)
    with passed.watching():
        for number in range(8):
            replicas.place(fleet, replicas.query(f"request {number}", prompt=list(range(100 * number, 2000))))
    return passed


def main(arguments: list[str]) -> None:
    for name, passed in (("the scheduler", scheduler_path()), ("a routing decision", routing_path())):
        files = lines_passed(passed)
        functions = sum(len(each) for each in files.values())
        total = sum(sum(each.values()) for each in files.values())
        print(f"{total:>6,} lines of {name}'s plain path: {functions} functions and classes in {len(files)} files")
        for file, each in sorted(files.items(), key=lambda item: -sum(item[1].values())):
            print(f"{sum(each.values()):>10,} {file}")
            if "--functions" in arguments:
                for function, lines in sorted(each.items(), key=lambda item: -item[1]):
                    print(f"{lines:>14,} {function}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
