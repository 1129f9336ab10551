"""Scripts of benchmarks/ as fixtures."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def script(path: str) -> Any:
    """Return a fixture: the script benchmarks/`path`.py, which finds its neighbours as when it is run."""
    folder, _, name = f"benchmarks/{path}".rpartition("/")

    @pytest.fixture
    def imported(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(str(ROOT / folder))
        return importlib.import_module(name)

    return imported
