"""Blocks of YAML, Python and JSON in README and docs, and names in backticks.

A block must validate, compile or parse. A setting, a flag, a metric or a file in backticks must exist.
"""

import ast
import importlib
import json
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from crossdock.cluster import cli
from crossdock.cluster.config import field_at
from crossdock.cluster.config_file import load
from crossdock.cluster.simulate.fleet import describe
from tests.test_documented_commands import PAGES, ROOT, commands, page_name, problems, resolve, script_flags

TEXTS = [page for page in PAGES if "benchmarks" not in page.parts and page.name != "CHANGELOG.md"]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SETTING = re.compile(
    r"(model|engine|router|scaling|transfer|http|pools\.(?:NAME|\*))\.([a-z_]+(?:\.[a-z_]+)*)(?![\w.*(])"
)
FLAG = re.compile(r"--[a-z][\w-]*(?![\w.-])")
METRIC = re.compile(r"\bcrossdock_[a-z]\w*")
SERIES = re.compile(r"_(?:total|bucket|sum|count|created)$")
FILE = re.compile(r"(?<![\w./*-])[\w-]+\.(?:ya?ml|sh)\b")
OF_READERS = {
    "cluster.yaml",
    "api-keys.yaml",
    "tune.yaml",
    "models.yaml",
    "timed.yaml",
    "vllm.yaml",
}  # files that readers write
OF_EXAMPLES = {"--flag", "--max-model", "--gpus"}  # any flag, the beginning of one, and a flag of Docker


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block of a page."""
    for _, language, text in BLOCK.findall(page.read_text()):
        yield language, textwrap.dedent(text)


def block_problems(language: str, text: str) -> Iterator[str]:
    """Yield the problems of one block. A language that is not checked has none."""
    try:
        match language:
            case "yaml":
                _check_yaml(yaml.safe_load(text))
            case "json":
                json.loads(text)
            case "python":
                _check_python(text)
            case "":
                lines = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
                yield from (problem for line in lines for words in commands(line) for problem in problems(words))
    except (ValueError, SyntaxError, ImportError, yaml.YAMLError) as error:
        yield str(error)


def _check_yaml(data: Any) -> None:
    """Raise where the data are neither a configuration, nor a fleet of the simulator, nor triggers of KEDA."""
    if "triggers" in data:
        queries = " ".join(trigger["metadata"]["query"] for trigger in data["triggers"])
        if absent := [name for name in METRIC.findall(queries) if not is_metric(name)]:
            raise ValueError(f"no metric {absent}")
    elif any("profile" in pool for pool in data.get("pools", ())):
        describe(json.loads(json.dumps(data).replace("timed", "fixed")))  # the policy that docs/walkthrough.md adds
    else:
        load(None, data)


def _check_python(text: str) -> None:
    """Raise where the text does not compile, or imports a name of ours that does not exist."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        tree = ast.parse(f"if True:\n    pass\n{text}")  # a branch of an `if`
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("crossdock"):
            module = importlib.import_module(node.module)
            if absent := [each.name for each in node.names if not hasattr(module, each.name)]:
                raise ImportError(f"{node.module} has no {', '.join(absent)}")


def word_problems(code: str) -> Iterator[str]:
    """Yield the settings, flags, metrics and files in a piece of code that do not exist."""
    for section, names in SETTING.findall(code) if SETTING.match(code) and not (ROOT / code).exists() else ():
        if field_at([section.split(".")[0], *names.split(".")]) is None:
            yield f"no setting {section}.{names}"
    if code.startswith("--"):
        flags = (name.replace("_", "-") for name in FLAG.findall(code))
        yield from (f"no flag {name}" for name in flags if name not in known_flags())
    yield from (f"no metric {name}" for name in METRIC.findall(code) if not is_metric(name))
    yield from (f"no file {name}" for name in FILE.findall(code) if name not in OF_READERS | known_files())


@cache
def known_flags() -> frozenset[str]:
    """Return every flag of our commands and scripts, and every flag of other servers that has an answer."""
    group: Any = get_command(cli.app)
    ours = [param for name in group.list_commands(None) for param in resolve([name])[0].params]
    found = OF_EXAMPLES | {name for param in ours for name in (*param.opts, *param.secondary_opts)}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        found |= script_flags(str(path.relative_to(ROOT)))
    answered = (ROOT / "cluster" / name for name in ("serve/other_flags.yaml", "bench/other_flags.py"))
    return frozenset(found.union(*(FLAG.findall(file.read_text()) for file in answered)))


@cache
def code() -> str:
    """Return all code of ours, and the manifests."""
    folders = [ROOT / name for name in ("cluster", "router", "workers", "kvtransfer", "manifests")]
    files = (path for folder in folders for kind in ("*.py", "*.yaml") for path in folder.rglob(kind))
    return "\n".join(path.read_text() for path in files)


def is_metric(name: str) -> bool:
    """Return whether the code has the name of a metric, or the name without the ending of a series."""
    return name in code() or SERIES.sub("", name) in code()


@cache
def known_files() -> frozenset[str]:
    folders = ("benchmarks", "cluster", "docs", "manifests", "tests", ".github")
    return frozenset(path.name for name in folders for path in (ROOT / name).rglob("*"))


@pytest.mark.parametrize("page", TEXTS, ids=page_name)
def test_blocks_of_a_page_are_valid(page: Path) -> None:
    found = [(text.split("\n")[0], problem) for kind, text in blocks(page) for problem in block_problems(kind, text)]
    assert found == []


@pytest.mark.parametrize("page", TEXTS, ids=page_name)
def test_names_in_backticks_exist(page: Path) -> None:
    words = CODE.findall(BLOCK.sub("", page.read_text()))
    assert [problem for each in words for problem in word_problems(each)] == []


@pytest.mark.parametrize(
    ("language", "text", "complaint"),
    [
        ("yaml", "engine: {max_num_seq: 3}", "engine.max_num_seq: no such setting"),
        ("yaml", "pools: [{name: mixed, replicas: 2, profile: h100-9b}]", "h100-9b"),
        (
            "yaml",
            "triggers: [{metadata: {query: 'sum(crossdock_absent_total)'}}]",
            "no metric ['crossdock_absent_total']",
        ),
        ("yaml", "a: [", "while parsing"),
        ("json", '{"a": 1,}', "Expecting property name"),
        ("python", "def f(:", "invalid syntax"),
        ("python", "from crossdock import LMM", "crossdock has no LMM"),
        ("", "$ crossdock config --nope\nwarning: …", "--nope: no such option"),
    ],
)
def test_planted_block_is_reported(language: str, text: str, complaint: str) -> None:
    (problem,) = block_problems(language, text)
    assert complaint in problem


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("engine.max_num_seq", "no setting engine.max_num_seq"),
        ("pools.NAME.replica", "no setting pools.NAME.replica"),
        ("--max-num-seq 3", "no flag --max-num-seq"),
        ("crossdock_absent_total{pool=…}", "no metric crossdock_absent_total"),
        ("kubectl apply -f absent-claim.yaml", "no file absent-claim.yaml"),
    ],
)
def test_planted_name_is_reported(code: str, complaint: str) -> None:
    assert list(word_problems(code)) == [complaint]


@pytest.mark.parametrize(
    "code",
    ["engine.max_num_seqs: 3", "pools.NAME.num_gpus", "--max-num-seqs 3", "--max_num_seqs", "model.lock", "serve.yaml"],
)
def test_name_that_exists_is_no_problem(code: str) -> None:
    assert list(word_problems(code)) == []
