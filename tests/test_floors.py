"""The house has floors and fences: arrows point down only, and each third party is kept to its rooms."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {  # what a folder may import besides itself
    "cluster": {"router", "workers", "kvtransfer", "kernels"},
    "router": {"workers", "kvtransfer", "kernels"},
    "workers": {"kvtransfer", "kernels"},
    "kvtransfer": set[str](),
    "kernels": set[str](),
}
PURE = [f"workers/{name}.py" for name in ("request", "pages", "profile", "chunking", "scheduler", "timeline")]
# Modules that may import a third party; a name ending in / is a folder.
ROOMS = {
    "ray": ["cluster/", "workers/replica.py"],
    "nixl": ["kvtransfer/nixl.py"],
    "fastapi": ["cluster/app.py", "cluster/api.py"],
    "triton": ["kernels/triton_attention.py", "kernels/backend.py"],
    "flash_attn": ["kernels/flash_attention.py"],
}
NO_TORCH = ["router/", *PURE]
SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for folder in BELOW for path in (ROOT / folder).rglob("*.py") if path.is_file()
)


def imports(source: str) -> Iterator[str]:
    """Dotted names of all that is imported, at whatever depth, in annotations' blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(path: str, source: str) -> list[str]:
    folder = path.split("/")[0]
    wrong = []
    for name in imports(source):
        first, *rest = name.split(".")
        if first == "":
            wrong.append(f"{path}: relative import {name}")
        elif first == "crossdock" and rest and rest[0] not in {folder, *BELOW[folder]}:
            wrong.append(f"{path}: {name} is not below {folder}")
        elif first in BELOW:
            wrong.append(f"{path}: {name} is importable only as crossdock.{name}")
        elif first in ROOMS and not _within(path, ROOMS[first]):
            wrong.append(f"{path}: {first} belongs to {', '.join(ROOMS[first])}")
        elif first in ("torch", "transformers") and _within(path, NO_TORCH):
            wrong.append(f"{path}: must import without {first}")
    return wrong


def _within(path: str, rooms: list[str]) -> bool:
    return any(path.startswith(room) if room.endswith("/") else path == room for room in rooms)


@pytest.mark.parametrize("path", SOURCES)
def test_arrows_point_down_and_fences_hold(path: str) -> None:
    assert not violations(path, (ROOT / path).read_text())


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("workers/engine.py", "from crossdock.cluster.app import build"),
        ("workers/engine.py", "import crossdock.router.placement"),
        ("router/placement.py", "from crossdock import cluster"),
        ("kernels/attention.py", "from crossdock.workers.pages import PagePool"),
        ("kvtransfer/shm.py", "from crossdock.kernels import attention"),
        ("cluster/app.py", "from kernels import attention"),
        ("cluster/app.py", "from .config import load"),
        ("workers/engine.py", "import ray"),
        ("workers/engine.py", "def f():\n    from ray import serve"),
        ("router/placement.py", "import torch.nn"),
        ("workers/scheduler.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedModel"),
        ("kvtransfer/shm.py", "from nixl._api import nixl_agent"),
        ("cluster/dispatch.py", "from fastapi import FastAPI"),
    ],
)
def test_a_breach_is_seen(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


def test_packages_are_named_as_they_must_be() -> None:
    for folder in BELOW:
        if folder == "kernels":  # transformers would run it: it probes for a package of that name
            assert not (ROOT / folder / "__init__.py").exists()
            continue
        body = ast.parse((ROOT / folder / "__init__.py").read_text()).body
        assert len(body) == 1, f"{folder}/__init__.py holds more than a docstring"
        assert ast.get_docstring(ast.Module(body, [])), f"{folder}/__init__.py has no docstring"
    assert not list(ROOT.glob("*.py")), "the root is not a place for modules"


def test_the_wheel_holds_every_folder() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == {"crossdock", *(f"crossdock.{path.rpartition('/')[0].replace('/', '.')}" for path in SOURCES)}


def test_pure_modules_need_neither_torch_nor_ray() -> None:
    pure = [path for path in SOURCES if _within(path, NO_TORCH) and not path.endswith("__init__.py")]
    names = [f"crossdock.{path.removesuffix('.py').replace('/', '.')}" for path in pure]
    assert len(names) >= len(PURE)
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'ray', 'transformers'))); "
    subprocess.run([sys.executable, "-c", blocked + "import " + ", ".join(names)], check=True, cwd="/")
