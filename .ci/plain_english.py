"""Check the writing card: plain words, named nouns, cited files that exist, one class name for one thing.

Usage: python .ci/plain_english.py [FOLDER or FILE ...]; without arguments all files that git tracks. Prints one line
per violation and exits with 1 if there is any. tests/test_plain_english.py plants a violation of each rule.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("cluster", "router", "workers", "kvtransfer", "kernels")  # where public class names must be unique
PRONOUNS = {"it", "its", "he", "his"}  # never the name of a variable, a parameter or an attribute
WORDS = {  # word or phrase: what to write instead
    "whoever": "name the process or person",
    "anew": "again",
    "as ever": "leave out",
    "of late": "recent, recently",
    "nobody": "no request, no replica, no process",
    "thereupon": "then",
    "be kept for": "reserved for",
    "of a sudden": "suddenly",
    "reckon": "estimate, compute",
    "reckons": "estimates, computes",
    "reckoned": "estimated, computed",
}
OPENERS = re.compile(r"Of|What|Whose|Who|(?:Returns?|Yields?) (?:what|those|the same|it)")  # name the noun at once
_WORDS = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
_PATH = re.compile(
    r"(?<![\w./-])((?:\.ci|benchmarks|cluster|docs|facts|kernels|kvtransfer|manifests|router|tests|workers)/[\w./-]*\w)"
)
_UNCHECKED = {".ci/plain_english.py", "tests/test_plain_english.py", "CHANGELOG.md"}
_NO_CITATIONS = {"tests/test_floors.py"}  # plants imports in files that do not exist


def check_python(path: str, source: str) -> Iterator[str]:
    """Yield the violations in one Python file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name, line in _names(node):
            if name in PRONOUNS:
                yield f"{path}:{line}: `{name}` names nothing; use the noun"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            line = getattr(node, "lineno", 1)
            if opener := re.match(rf"({OPENERS.pattern})\b", docstring):
                yield f"{path}:{line}: the docstring starts with {opener[1]!r}; start with a verb and its noun"
    for line, text in _prose(source, tree, with_strings=not path.startswith("tests/")):
        yield from check_prose(path, line, text)


def check_prose(path: str, line: int, text: str) -> Iterator[str]:
    """Yield the violations in one line of prose."""
    for match in _WORDS.finditer(text):
        yield f"{path}:{line}: {match[1]!r}; write: {WORDS[match[1].lower()]}"
    for match in _PATH.finditer(text) if path not in _NO_CITATIONS else ():
        if not _exists(match[1]):
            yield f"{path}:{line}: cites {match[1]}, which does not exist"


def check_classes(sources: dict[str, str]) -> Iterator[str]:
    """Yield the public class names that name two things. `sources`: Python files of the code folders, by path."""
    seen: dict[str, str] = {}
    for path, source in sorted(sources.items()):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if node.name in seen:
                    yield f"{path}:{node.lineno}: class {node.name} is also in {seen[node.name]}"
                seen.setdefault(node.name, path)


def _names(node: ast.AST) -> Iterator[tuple[str, int]]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield name, node.lineno
        case ast.arg(arg=name):
            yield name, node.lineno
        case ast.MatchAs(name=str(name)):
            yield name, node.lineno
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name, node.lineno


def _prose(source: str, tree: ast.Module, with_strings: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every comment and docstring; with strings also of messages and help texts."""
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Constant if with_strings else ast.Expr))
    for node in strings:
        constant = node.value if isinstance(node, ast.Expr) else node
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield from enumerate(constant.value.splitlines(), constant.lineno)


def _exists(cited: str) -> bool:
    return (ROOT / cited).exists() or bool(list(ROOT.glob(f"{cited}.*"))) or "*" in cited


def _tracked(places: list[str]) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *places], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [name for name in listed.stdout.split("\n") if (ROOT / name).is_file()]


def main(places: list[str]) -> int:
    found: list[str] = []
    code: dict[str, str] = {}
    for path in _tracked(places):
        if path in _UNCHECKED or not path.endswith((".py", ".md", ".yaml", ".yml")):
            continue
        text = (ROOT / path).read_text()
        if path.endswith(".py"):
            found += check_python(path, text)
            if path.split("/")[0] in CODE:
                code[path] = text
        else:
            for line, prose in enumerate(text.splitlines(), 1):
                found += check_prose(path, line, prose)
    found += check_classes(code)
    for violation in found:
        print(violation)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
