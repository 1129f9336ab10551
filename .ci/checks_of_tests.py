"""Check what a script can of tests: each test asserts something, none waits for a fixed time or without a deadline, and
none gives up a request, a process, a thread or a condition before a slow machine has got so far, or asserts that it was
faster.

Usage: python .ci/checks_of_tests.py. Prints one line per violation and exits with 1 if there is any. A test asserts
when it has an assert, expects an exception or a warning, or calls a function of tests that asserts.
tests/test_checks_of_tests.py plants a violation of each rule.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_PAUSE_S = 0.05  # a fixed wait is not long enough on a slow machine, and too long on others
PATIENCE_S = 240  # as in tests/waiting.py; the default of httpx is 5
SHORT_S = 1  # who waits for less means that the time passes
LEAST_DEADLINE_S = 10  # so does a loop that ends sooner
FOR_EVER_S = 60.0  # who sleeps so long is there to be killed or cancelled
ASSERTING = ("assert_", "check_", "raises", "warns", "fail")
DEADLINES = {"monotonic", "perf_counter", "timeout", "deadline", "wait_for"}
REQUESTS = {"get", "post", "put", "delete", "request", "stream", "head", "options", "Client", "AsyncClient"}  # of httpx
WAITS = {"wait", "join", "result", "settimeout", "timeout"}  # with the seconds as their only argument
CONDITIONS = {"eventually", "until"}  # of tests/waiting.py
ALLOWED = Counter(  # file: waits that were there before this check. May shrink, not grow.
    {
        "tests/benchmarks/test_chaos.py": 1,
        "tests/benchmarks/test_conversations.py": 1,
        "tests/benchmarks/test_gpu.py": 1,
        "tests/cluster/api/http/test_heap.py": 2,
        "tests/cluster/api/http/test_listener.py": 7,
        "tests/cluster/api/http/test_listener_close.py": 3,
        "tests/cluster/api/http/test_slow_readers.py": 2,
        "tests/cluster/api/http/test_tracing.py": 2,
        "tests/cluster/api/media/hostile_host.py": 2,
        "tests/cluster/api/routes/test_embeddings.py": 1,
        "tests/cluster/api/test_failures.py": 1,
        "tests/cluster/api/test_requests.py": 1,
        "tests/cluster/api/text/test_slices.py": 1,
        "tests/cluster/bench/scripted.py": 1,
        "tests/cluster/deploy/test_ray_up.py": 2,
        "tests/cluster/dispatch/test_attempts.py": 3,
        "tests/cluster/dispatch/test_connections.py": 3,
        "tests/cluster/dispatch/test_losses.py": 2,
        "tests/cluster/dispatch/test_requests.py": 1,
        "tests/cluster/dispatch/test_router.py": 2,
        "tests/cluster/dispatch/test_shared_answer.py": 2,
        "tests/kernels/cpu/test_huge_pages.py": 1,
        "tests/kvtransfer/test_transport_failures.py": 3,
        "tests/kvtransfer/test_transports.py": 4,
        "tests/workers/model/grammar/test_grammar_limits.py": 2,
        "tests/workers/replica/driven.py": 2,
        "tests/workers/replica/serving/test_attempts.py": 2,
        "tests/workers/replica/serving/test_engine_thread.py": 1,
        "tests/workers/replica/serving/test_grammar_requests.py": 1,
        "tests/workers/replica/transfer/test_handover.py": 2,
    }
)


def asserting_functions(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of all functions that assert, themselves or through one that does."""
    bodies: dict[str, list[ast.AST]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                bodies.setdefault(node.name, []).append(node)
    found: set[str] = set()
    while more := {
        name for name, nodes in bodies.items() if name not in found and any(asserts(node, found) for node in nodes)
    }:
        found |= more
    return found


def asserts(function: ast.AST, asserting: set[str]) -> bool:
    """Whether the function has an assertion, or uses the name of a function that has one, as a fixture too."""
    for node in ast.walk(function):
        match node:
            case ast.Assert() | ast.Raise():
                return True
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name in asserting or name.startswith(ASSERTING):
                    return True
                if any(keyword.arg == "check" and getattr(keyword.value, "value", 0) for keyword in node.keywords):
                    return True  # subprocess.run(…, check=True)
            case ast.arg(arg=name) | ast.Name(id=name) if name in asserting:
                return True
    return False


def check_assertions(path: str, tree: ast.Module, asserting: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if is_test and not asserts(node, asserting - {node.name}):
            yield f"{path}:{node.lineno}: {node.name} asserts nothing"


def check_waits(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield fixed waits, and loops that wait for a condition without a deadline."""
    polls: set[ast.AST] = set()
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.While):
            continue
        if sleeps := [node for node in ast.walk(loop) if _pause(node) is not None]:
            polls.update(sleeps)
            if not _has_deadline(loop, tree):
                yield f"{path}:{loop.lineno}: a loop waits without a deadline"
    for node in ast.walk(tree):
        if (pause := _pause(node)) is not None and node not in polls and LONGEST_PAUSE_S < pause < FOR_EVER_S:
            yield f"{path}:{node.lineno}: waits for {pause} s whatever happens; wait for an event"


def check_requests(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield calls of httpx without a timeout, or with a short one. A client with a transport reaches no server."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="httpx"), attr=name)) if name in REQUESTS:
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                timeout = getattr(given.get("timeout", ast.Constant(0)), "value", PATIENCE_S)
                is_short = isinstance(timeout, int | float) and timeout < SHORT_S
                if is_short and "transport" not in given:
                    yield f"{path}:{node.lineno}: a request gives up too early; say timeout={PATIENCE_S}"


def check_patience(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield waits that end before a slow machine has got so far: for a process, a thread, a task or a condition.

    Within `pytest.raises(…Timeout…)` the time is meant to pass.
    """
    meant = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith)
        and any("Timeout" in ast.unparse(item.context_expr) for item in node.items)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node not in meant and SHORT_S <= (seconds := _patience(node)) < PATIENCE_S:
            yield f"{path}:{node.lineno}: gives up after {seconds:g} s; a slow machine needs {PATIENCE_S}"  # type: ignore[attr-defined]


def check_speed(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield asserts that the clock went on by less than a slow machine needs."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(
                left=ast.BinOp(left=ast.Call(func=ast.Attribute(attr="monotonic" | "perf_counter")), op=ast.Sub()),
                ops=[ast.Lt() | ast.LtE()],
                comparators=[ast.Constant(value=int() | float() as seconds)],
            ) if seconds < PATIENCE_S:
                yield f"{path}:{node.lineno}: must be over in {seconds:g} s; a slow machine needs {PATIENCE_S}"


def _patience(node: ast.AST) -> float:
    """Return the constant seconds that a call waits at most, or that a deadline is away; 0 where there are none."""
    given: ast.expr | None = None
    match node:
        case ast.BinOp(left=ast.Call(func=ast.Attribute(attr="monotonic")), right=ast.Constant(value=int(seconds))):
            return seconds if seconds >= LEAST_DEADLINE_S else 0.0
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=arguments, keywords=keywords):
            named = {keyword.arg: keyword.value for keyword in keywords}
            given = named.get("timeout")
            if name in CONDITIONS:
                given = named.get("seconds", arguments[-1] if arguments else None)
            elif name in WAITS and len(arguments) == 1:
                [given] = arguments
            elif name == "wait_for" and len(arguments) == 2:
                given = arguments[1]
    value = getattr(given, "value", None)
    return value if isinstance(value, int | float) else 0.0


def _has_deadline(loop: ast.While, tree: ast.Module) -> bool:
    """Whether the loop, or a `with` or call around the loop, names a deadline."""
    around = [
        item
        for node in ast.walk(tree)
        if isinstance(node, ast.With | ast.AsyncWith) and loop in ast.walk(node)
        for item in node.items
    ]
    return bool(DEADLINES & {name for node in [loop, *around] for name in _names(node)})


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _pause(node: ast.AST) -> float | None:
    """Return the seconds of a call of `sleep` with a constant above 0; None if the node is none."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="time" | "asyncio"), attr="sleep"), args=[argument]):
            return float(argument.value) or None if isinstance(argument, ast.Constant) else None
    return None


def violations(sources: dict[str, str]) -> Iterator[str]:
    trees = {path: ast.parse(source) for path, source in sources.items()}
    asserting = asserting_functions(trees.values())
    for path, tree in trees.items():
        if path.rsplit("/", 1)[-1].startswith("test_"):
            yield from check_assertions(path, tree, asserting)
        yield from check_requests(path, tree)
        yield from check_patience(path, tree)
        yield from check_speed(path, tree)
        found = list(check_waits(path, tree))
        if len(found) > ALLOWED[path]:
            yield from found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "tests"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    paths = [path for path in listed if path.endswith(".py") and (ROOT / path).exists()]
    found = list(violations({path: (ROOT / path).read_text() for path in paths}))
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
