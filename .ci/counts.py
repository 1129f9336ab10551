"""Print what the house weighs, and refuse functions and classes that are too long to read in one sitting.

Usage: python .ci/counts.py [CHECKOUT]. Prints one line per count, by the files that git tracks in CHECKOUT (this one by
default). Exits with 1 if a count is above its limit. Totals have no limit: they go into the note of each change.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

CODE = ("cluster", "router", "workers", "kvtransfer", "kernels", ".ci")
LIMITS = {"lines of the longest class": 350, "lines of the longest function": 80}  # count: the most that there may be
_PRIVATE = re.compile(r"(?<!self)(?<!cls)\._(?!replace|asdict|fields|make)[a-z]\w*")  # but those of named tuples
Function = ast.FunctionDef | ast.AsyncFunctionDef


def counts(root: Path) -> Iterator[tuple[str, float, str]]:
    """Yield each count of the checkout at `root` with its name, and where it is largest."""
    names = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout
    texts = {name: (root / name).read_text() for name in names.split()}
    for kind, tops in (("code", CODE), ("tests", ("tests",)), ("benchmarks", ("benchmarks",))):
        yield f"lines of {kind}", sum(len(texts[name].splitlines()) for name in texts if _top(name) in tops), ""
    cpp = subprocess.run(
        ["git", "ls-files", "*.cpp", "*.h"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    yield "lines of C++", sum(len((root / name).read_text().splitlines()) for name in cpp.split()), ""
    folders = Counter(name.rpartition("/")[0] for name in texts)
    folder, files = folders.most_common(1)[0]
    yield "Python files in the largest folder", files, folder

    code = {name: ast.parse(text) for name, text in texts.items() if _top(name) in CODE}
    nodes = [(name, node) for name, tree in code.items() for node in ast.walk(tree)]
    yield "AST nodes without docstrings", len(nodes) - 2 * sum(_has_docstring(node) for _, node in nodes), ""
    calls = [node for _, node in nodes if isinstance(node, ast.Call)]
    pairs = sum(_assigns_pairs(node) for _, node in nodes)
    yield "lines `a, b = x, y` per 1,000 calls", round(1000 * pairs / len(calls), 1), ""
    yield "calls with `*(a, b)` written out", sum(map(_unpacks_a_tuple, calls)), ""
    yield _longest("class", [(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)])
    functions = [(name, node) for name, node in nodes if isinstance(node, Function)]
    yield _longest("function", functions)
    yield "lines of the median function", median(_lines(node) for _, node in functions), ""
    lines = [line for name in code for line in texts[name].splitlines() if line.strip()]
    yield "characters of the mean line", round(mean(len(line) for line in lines), 1), "without blank ones"
    yield "tests `is None` or `is not None`", sum(_is_none(node) for _, node in nodes), ""
    tests = "\n".join(text for name, text in texts.items() if _top(name) == "tests")
    yield "private attributes that tests reach for", len(_PRIVATE.findall(tests)), ""
    yield "sleeps of tests", len(re.findall(r"\bsleep\(", tests)), ""


def _top(name: str) -> str:
    return name.split("/")[0]


def _lines(node: ast.ClassDef | Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _longest(kind: str, nodes: list[tuple[str, ast.ClassDef]] | list[tuple[str, Function]]) -> tuple[str, float, str]:
    name, node = max(nodes, key=lambda each: _lines(each[1]))
    return f"lines of the longest {kind}", _lines(node), f"{name}: {node.name}"


def _has_docstring(node: ast.AST) -> bool:
    return isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node, clean=False) is not None


def _assigns_pairs(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _unpacks_a_tuple(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple) for each in call.args)


def _is_none(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Is | ast.IsNot):
        return False
    value = node.comparators[0]
    return isinstance(value, ast.Constant) and value.value is None


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]
    is_above = False
    for name, count, where in counts(root):
        limit = LIMITS.get(name)
        wrong = limit is not None and count > limit
        is_above |= wrong
        print(
            f"{count:>10,} {name}{f' ({where})' if where else ''}{f': above its limit of {limit:,}' if wrong else ''}"
        )
    return int(is_above)


if __name__ == "__main__":
    sys.exit(main())
