"""The commands and links in README.md, docs/ and the records of benchmarks: flags parse, targets, scripts, tests, files
and headings exist.

`benchmarks/documented_commands.py` runs them.
"""

import ast
import contextlib
import importlib
import io
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from crossdock.cluster import cli

ROOT = Path(__file__).parents[1]
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*GUIDE, *(ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))]
PAGES += [
    *(ROOT / "benchmarks" / name for name in ("README.md", "RESULTS.md")),
    *sorted((ROOT / "benchmarks" / "records").glob("*.md")),
]
FENCE = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`(crossdock [^`]+)`(?!`)")
MAKE = re.compile(r"(?<!`)`(make [a-z][^`…]*)`(?!`)")
SCRIPT = re.compile(r"(?<!`)`((?:\w+=\w+ )?python benchmarks/[^`…]+)`(?!`)")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
OF_RAY = {"ray": "ray.scripts.scripts", "serve": "ray.serve.scripts"}  # modules of Ray's programs
PARSERS = ("docker", "kubectl", *OF_RAY)  # programs that say which flags they know, without a cluster
KEYWORDS = {"do", "done", "then", "fi", "for", "if"}  # of the shell
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block of shell, without comments, assignments and redirections."""
    for line in block.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.commenters, lexer.whitespace_split = "", True
        words: list[str] = []
        for word in [*_without_comment(lexer), ";"]:
            if set(word) <= set(";|&()"):
                if command := _stripped(words):
                    yield command
                words = []
            else:
                words.append(word)


def _without_comment(words: Iterator[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("#"):
            return
        yield word


def _stripped(words: list[str]) -> list[str]:
    """Return a command without shell keywords, assignments before it and redirections after it."""
    end = next((place for place, word in enumerate(words) if set(word) <= {"<", ">"}), len(words))
    words = words[:end]
    while words and (words[0] in KEYWORDS or re.fullmatch(r"\w+=.*", words[0])):
        if words[0] == "for":
            return []
        words = words[1:]
    return words


def problems(command: list[str]) -> Iterator[str]:
    """Yield the problems of a documented command."""
    name, *args = command
    match name.removeprefix(".venv/bin/"):
        case "crossdock":
            yield from _problems_of_click(args)
        case "make":
            known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            yield from (f"no target {arg}" for arg in args if "=" not in arg and arg not in known)
        case "python" if args and args[0].startswith("benchmarks/"):
            known = script_flags(args[0]) if (ROOT / args[0]).is_file() else set()
            yield from (f"{args[0]} has no {flag}" for flag in _flags(args[1:]) if flag not in known)
    for word in command:
        yield from _path_problems(word)


def _problems_of_click(args: list[str], group: Any = None) -> Iterator[str]:
    """Yield why a group of click's commands refuses the arguments. None: `crossdock`."""
    said = io.StringIO()
    try:
        command, rest, context = resolve(args, group)
        with contextlib.redirect_stderr(said):
            command.make_context(command.name, rest, parent=context)  # parses, and runs nothing
    except Exception as error:  # a usage error of click, or its Exit after --help or after all mistakes of a line
        if getattr(error, "exit_code", 1) != 0:
            yield getattr(error, "message", None) or said.getvalue() or repr(error)


def resolve(args: list[str], group: Any = None) -> tuple[Any, list[str], Any]:
    """Return the click command that `crossdock ARGS` names, the arguments left for it, and its parent's context.

    `group`: another program's commands.
    """
    command: Any = group or get_command(cli.app)
    context = None
    while hasattr(command, "resolve_command"):
        context = command.make_context(command.name, list(args), parent=context)
        _, command, args = command.resolve_command(context, list(args))
    return command, list(args), context


def problem_of_other_program(words: list[str]) -> str | None:
    """Return why docker, kubectl, Ray or Serve refuses the flags of a command, which is not run: each program parses
    all flags before it shows its help. None: it takes them, it is not here, or the command is of another program."""
    program, *args = words
    if program in OF_RAY:
        return next(_problems_of_click(args, importlib.import_module(OF_RAY[program]).cli), None)
    if program not in PARSERS or (found := shutil.which(program)) is None:
        return None
    first = next((place for place, word in enumerate(args) if word.startswith("-")), len(args))
    asked = [found, *args[:first], "--help", *args[first:]]  # `docker run` leaves what follows the image to the image
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    return (answer.stderr.strip() or answer.stdout.strip()) if answer.returncode else None


def _flags(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


@cache
def script_flags(path: str) -> set[str]:
    """Return the flags that a script of benchmarks/ declares, itself or through servers.py and tables.py.

    Read from the source, since importing the scripts takes seconds of importing torch each.
    """
    source = (ROOT / path).read_text()
    shared = "".join(
        (ROOT / "benchmarks" / f"{module}.py").read_text()
        for module, adds in (("servers", "add_server_options"), ("tables", "add_output_options"))
        if adds in source or "add_server_options" in source
    )
    return {"--help"} | {
        argument.value
        for node in [*ast.walk(ast.parse(source)), *ast.walk(ast.parse(shared))]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str) and argument.value.startswith("--")
    }


def _path_problems(word: str) -> Iterator[str]:
    """Yield a complaint if the word is a path into this repository, or a test in it, and does not exist."""
    path, _, test = word.removeprefix("./").partition("::")
    if path.split("/")[0] not in FOLDERS or "/" not in path or re.search(r"[$*{…]", path):
        return
    if not (ROOT / path).exists():
        yield f"there is no {path}"
    elif test and f"def {test}(" not in (ROOT / path).read_text():
        yield f"{path} has no {test}"


def page_problems(page: Path) -> Iterator[str]:
    text = page.read_text()
    for block in FENCE.findall(text):
        for command in commands(block):
            yield from (f"{' '.join(command)}: {problem}" for problem in problems(command))
    for code in INLINE.findall(text):
        yield from (f"{code}: {problem}" for problem in _inline_problems(code))
    for code in [*SCRIPT.findall(text), *MAKE.findall(text)]:
        yield from (f"{code}: {problem}" for command in commands(code) for problem in problems(command))
    for link, anchor in LINK.findall(FENCE.sub("", text)):
        target = page.parent / link if link else page
        if "://" in link:
            continue
        if not target.exists():
            yield f"link to {link}, which does not exist"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            yield f"link to {link}#{anchor}, which has no such heading"


def anchors(text: str) -> set[str]:
    """Return the names by which GitHub links to the headings of a page."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in HEADING.findall(FENCE.sub("", text))}


def _inline_problems(code: str) -> Iterator[str]:
    """Yield the flags that the command lacks, unless it parses as a whole. Inline code may leave out arguments."""
    words = [word for word in code.split()[1:] if "…" not in word]
    if not words or words[0].startswith("-"):
        return
    try:
        command, rest, _ = resolve(words)
    except Exception as error:
        yield getattr(error, "message", None) or repr(error)
        return
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    lacking = [flag for flag in _flags(rest) if flag not in known]
    if lacking and next(_problems_of_click(words), None):  # else it takes flags of others
        yield from (f"no {flag}" for flag in lacking)


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


OF_OTHER_PROGRAMS = sorted(
    {
        shlex.join(words)
        for page in GUIDE
        for block in FENCE.findall(page.read_text())
        for words in commands(block)
        if words[0] in PARSERS
    }
)


@pytest.mark.parametrize("line", OF_OTHER_PROGRAMS)
def test_other_program_knows_the_flags_of_a_documented_command(line: str) -> None:
    words = shlex.split(line)
    if words[0] not in OF_RAY and shutil.which(words[0]) is None:
        pytest.skip(f"needs the program {words[0]}")
    assert problem_of_other_program(words) is None


@pytest.mark.parametrize("line", ["ray start --heads", "serve deploy --adress=x a.yaml"])
def test_flag_that_another_program_does_not_know_is_found(line: str) -> None:
    assert "No such option" in (problem_of_other_program(shlex.split(line)) or "")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_of_a_page_are_valid(page: Path) -> None:
    assert list(page_problems(page)) == []


def test_planted_links_are_reported(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# The `B` page\n\n## A, b (c)\n")
    page = tmp_path / "a.md"
    page.write_text(
        "# One\n[x](b.md#the-b-page) [x](b.md#a-b-c) [x](#one) [x](https://a/#b) [y](c.md) [y](b.md#c) [y](#two)\n"
    )
    assert [problem.split(",")[0] for problem in page_problems(page)] == [
        "link to c.md",
        "link to b.md#c",
        "link to #two",
    ]


def test_planted_script_within_a_line_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "`X=1 python benchmarks/weights.py --absent`, `python benchmarks/weights.py`, `old.py --x` of `1ab`\n"
    )
    (problem,) = page_problems(page)
    assert "has no --absent" in problem


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").iterdir()), ids=page_name)
def test_steps_of_the_public_checks_run_what_exists(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert lines
    assert [problem for line in lines for command in commands(line) for problem in problems(command)] == []


def test_front_page_has_commands() -> None:
    found = {command[0] for block in FENCE.findall((ROOT / "README.md").read_text()) for command in commands(block)}
    assert found >= {"make", "crossdock"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("crossdock srve", "No such command"),
        ("crossdock serve --max-modell-len 5", "no such option; did you mean --max-model-len"),
        ("X=1 crossdock bench http://h --num-requests many  # comment", "valid int"),
        ("crossdock config > c.yaml && crossdock serve --nope", "--nope: no such option"),
        ("make everything", "no target everything"),
        ("python benchmarks/adaptive.py --durations 5", "has no --durations"),
        ("python benchmarks/absent.py", "there is no benchmarks/absent.py"),
        (".venv/bin/pytest -s tests/test_documented_commands.py::test_absent", "has no test_absent"),
        ("kubectl apply -k \\\n  manifests/absent", "there is no manifests/absent"),
    ],
)
def test_planted_mistake_is_reported(line: str, complaint: str) -> None:
    (problem,) = [problem for command in commands(line) for problem in problems(command)]
    assert complaint in problem


@pytest.mark.parametrize(
    "line",
    [
        "crossdock simulate --pools mixed=4xh100-8b --request-rate 50 && crossdock serve --config tune.yaml",
        'make serve ARGS="--port 9000"',
        "for peer in vllm llamacpp; do benchmarks/peers/$peer.sh install --venv VENVS/$peer; done",
        "OMP_WAIT_POLICY=PASSIVE python benchmarks/models/step_cost.py --seconds 60 &",
        "python benchmarks/routing/scaling.py --port 1 --output=here",
    ],
)
def test_valid_line_has_no_problem(line: str) -> None:
    assert [problem for command in commands(line) for problem in problems(command)] == []
