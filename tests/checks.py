"""The scripts of .ci as modules, for tests of what they refuse."""

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / ".ci"


def load_check(name: str) -> ModuleType:
    """Return the script `.ci/{name}.py` as a module. Its `main` does not run."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
