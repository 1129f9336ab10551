"""Scripts of benchmarks/ as fixtures."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def script(path: str) -> Any:
    """Return a fixture: the script benchmarks/`path`.py, which finds its neighbours as when it is run."""

    @pytest.fixture
    def imported(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        return _imported(path, monkeypatch)

    return imported


def load(path: str) -> ModuleType:
    """Return the script benchmarks/`path`.py, for what tests are made of."""
    with pytest.MonkeyPatch.context() as patch:
        return _imported(path, patch)


def _imported(path: str, patch: pytest.MonkeyPatch) -> ModuleType:
    folder, _, name = f"benchmarks/{path}".rpartition("/")
    patch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module(name)
